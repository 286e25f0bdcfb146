"""Sizes of the parts: on a card, and on two CPU cores, where they only show that they work. Also their models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from benchmarks.form import Row
from benchmarks.real.engine_cost import remove_end_token
from flash.trainer.checkpoint_files import atomic_folder
from flash.trainer.model.tiny_model import HEAD_DIM

MODELS = Path("outputs") / "models"
"""Folder of the models that the parts make."""


Shape = dict[str, Any]
"""Settings of a Qwen3 model with random weights, as its configuration in transformers names them."""


def title(shape: Shape) -> str:
    """Return a description of a shape, for the case of a row."""
    return f"{shape['num_hidden_layers']} layers × {shape['hidden_size']}"


def qwen3(layers: int, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> Shape:
    """Return the settings of a Qwen3 model. `inner` is the width of the feed-forward layers."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


SMALL = qwen3(28, 1024, 3072, 16, 8, 128, 151_936)
"""Shape of Qwen3-0.6B."""
MIDDLE = qwen3(4, 512, 1536, 8, 4, 64, 8192)
"""Shape of a model that two CPU cores can train, too."""
TINY = qwen3(2, 64, 128, 2, 2, HEAD_DIM, 64)
"""Shape of the smallest model, for two CPU cores."""
MIXTURE = qwen3(4, 256, 512, 4, 2, 64, 64) | {
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
"""Shape of a small Qwen3 with experts. Its vocabulary has the tiny model's tokens, and some that it does not have."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parts. The defaults are for two CPU cores."""

    gpu: bool
    """True to run on a card."""
    swaps: int = 2
    """Versions of a run."""
    shape: Shape = msgspec.field(default_factory=lambda: TINY)
    """Shape of the model whose steps are measured."""
    sequences: int = 16
    """Sequences of a training step that is measured."""
    length: tuple[int, int] = (4, 12)
    """Shortest and longest answer there, in tokens."""
    steps: int = 2
    """Steps that are measured, after one that is not counted."""
    requests: int = 16
    """Requests that are sent to the engine at once."""
    tokens: int = 8
    """Tokens of each answer."""
    rounds: int = 1
    """Rounds of the comparison with a bare vLLM."""

    @classmethod
    def of(cls, *, gpu: bool, quick: bool) -> Self:
        """Return the sizes for a card, or for two CPU cores. `quick` chooses the small sizes on a card, too."""
        if not gpu or quick:
            return cls(gpu=gpu)
        return cls(
            gpu=True,
            swaps=20,
            shape=SMALL,
            sequences=64,
            length=(256, 1792),
            steps=4,
            requests=256,
            tokens=256,
            rounds=3,
        )


Part = Callable[[Sizes], list[Row]]
"""A part of the check: measures, and returns its rows."""


class Skipped(Exception):
    """A part cannot run on this machine; the message says what the machine lacks."""


def random_model(folder: Path, shape: Shape, tokenizer_of: Path, *, endless: bool) -> Path:
    """Fill a folder with random weights of this shape, with or without experts, and another model's tokenizer.

    Nothing is made again if the folder has weights.

    Args:
        folder: folder of the new model, which is returned.
        shape: shape of the new model.
        tokenizer_of: folder of the other model.
        endless: True to leave out the end-of-text token, so that all answers have the length of the limit.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if not (folder / "model.safetensors").is_file():
        torch.manual_seed(0)
        experts = "num_experts" in shape
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)) if experts else Qwen3ForCausalLM(Qwen3Config(**shape))
        with atomic_folder(folder) as new:  # so that a folder with weights is complete
            model.to(torch.bfloat16).save_pretrained(new)
            AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(new)
            if endless:
                remove_end_token(new)
    return folder


def weight_bytes(folder: Path, bytes_each: int) -> int:
    """Return the bytes of a model's weights, with `bytes_each` for each number."""
    from safetensors import safe_open

    numbers = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                numbers += math.prod(tensors.get_slice(name).get_shape())
    return numbers * bytes_each
