"""transformers beyond what it documents: what a model says of its own layers."""

from __future__ import annotations

from transformers import PreTrainedModel

TOUCHED = (
    "transformers:PreTrainedModel._supports_attention_backend",
    "transformers:PreTrainedModel._no_split_modules",
    "transformers:PreTrainedModel.set_attn_implementation",
    "transformers:PreTrainedModel.get_output_embeddings",
    "transformers:PreTrainedModel.set_output_embeddings",
    "transformers:AttentionInterface.register",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether the model calls its attention by name, so that it can be replaced."""
    return bool(getattr(model, "_supports_attention_backend", False))


def layer_types(model: PreTrainedModel) -> set[str]:
    """Class names of the layers that are sharded as a whole."""
    return set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
