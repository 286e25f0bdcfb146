"""Sizes of the parts: on a card, and on two CPU cores, where they only show that they work. Also their models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from benchmarks.form import Row
from benchmarks.real.engine_cost import remove_end_token
from flash.trainer.checkpoint_files import atomic_folder
from flash.trainer.model.tiny_model import HEAD_DIM

if TYPE_CHECKING:
    from transformers import Qwen3Config

MODELS = Path("outputs") / "models"
"""Folder of the models that the parts make."""


class Shape(msgspec.Struct, frozen=True):
    """Shape of a Qwen3 model with random weights."""

    layers: int
    """Number of layers."""
    width: int
    """Numbers of a token's vector between the layers."""
    inner: int
    """Width of the feed-forward layers."""
    heads: int
    """Attention heads of a layer, for queries."""
    kv_heads: int
    """Attention heads of a layer, for keys and values."""
    head_dim: int
    """Width of a head."""
    vocabulary: int
    """Number of token ids."""

    def config(self) -> Qwen3Config:
        """Return the configuration of a Qwen3 model of this shape."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )


SMALL = Shape(28, 1024, 3072, 16, 8, 128, 151_936)
"""Shape of Qwen3-0.6B."""
MIDDLE = Shape(4, 512, 1536, 8, 4, 64, 8192)
"""Shape of a model that two CPU cores can train, too."""
TINY = Shape(2, 64, 128, 2, 2, HEAD_DIM, 64)
"""Shape of the smallest model, for two CPU cores."""

MIXTURE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
"""Configuration of a small Qwen3 with experts."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parts. The defaults are for two CPU cores."""

    gpu: bool
    """True to run on a card."""
    swaps: int = 2
    """Versions of a run."""
    shape: Shape = TINY
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


def random_model(folder: Path, shape: Shape, tokenizer_of: Path) -> Path:
    """Fill a folder with random weights of this shape, another model's tokenizer, and no end-of-text token.

    Without that token all answers have the length of the limit. Nothing is made again if the folder has weights.
    `tokenizer_of` is the folder of the other model. Returns the folder.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    if not (folder / "model.safetensors").is_file():
        torch.manual_seed(0)
        with atomic_folder(folder) as new:  # so that a folder with weights is complete
            Qwen3ForCausalLM(shape.config()).to(torch.bfloat16).save_pretrained(new)
            AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(new)
            remove_end_token(new)
    return folder


def mixture_model(folder: Path, vocabulary: int, tokenizer_of: Path) -> Path:
    """Fill a folder with a model with experts (`MIXTURE`) of random weights, and another model's tokenizer.

    Nothing is made again if the folder has weights. `tokenizer_of` is the folder of the other model. Returns the
    folder.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if not (folder / "model.safetensors").is_file():
        torch.manual_seed(0)
        with atomic_folder(folder) as new:  # so that a folder with weights is complete
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE | {"vocab_size": vocabulary})).save_pretrained(new)
            AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(new)
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
