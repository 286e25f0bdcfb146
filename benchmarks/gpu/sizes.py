"""How large the parts are: on a card, and where they only have to show that they work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from benchmarks.form import Row
from benchmarks.real.routing_replay import SHAPE
from flash.trainer.model.tiny_model import HEAD_DIM

if TYPE_CHECKING:
    from transformers import Qwen3Config

MODELS = Path("outputs") / "models"


class Shape(msgspec.Struct, frozen=True):
    """Of a Qwen3 model with random weights."""

    layers: int
    width: int
    inner: int
    """Width of the feed-forward layers."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def config(self) -> Qwen3Config:
        """As transformers has it."""
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

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)


SMALL = Shape(28, 1024, 3072, 16, 8, 128, 151_936)
"""Of Qwen3-0.6B."""
MIDDLE = Shape(4, 512, 1536, 8, 4, 64, 8192)
"""That two CPU cores train too."""
TINY = Shape(2, 64, 128, 2, 2, HEAD_DIM, 64)


MIXTURE = SHAPE | {"intermediate_size": 512, "num_hidden_layers": 4, "tie_word_embeddings": False}
"""Of a small Qwen 3 with experts."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What each part does."""

    gpu: bool
    swaps: int
    """Of a job."""
    shape: Shape
    layer_tokens: int
    layer_vocabulary: int
    sequences: int
    """Of a training step that is measured."""
    length: tuple[int, int]
    """Shortest and longest answer there, in tokens."""
    steps: int
    requests: int
    """To the engine, at once."""
    tokens: int
    """Of each answer."""
    rounds: int

    @classmethod
    def of(cls, *, gpu: bool, quick: bool) -> Self:
        """For a card, or for two CPU cores."""
        if gpu and not quick:
            return cls(
                gpu=True,
                swaps=20,
                shape=SMALL,
                layer_tokens=16_384,
                layer_vocabulary=SMALL.vocabulary,
                sequences=64,
                length=(256, 1792),
                steps=4,
                requests=256,
                tokens=256,
                rounds=3,
            )
        return cls(
            gpu=gpu,
            swaps=2,
            shape=TINY,
            layer_tokens=64,
            layer_vocabulary=1000,
            sequences=16,
            length=(4, 12),
            steps=2,
            requests=16,
            tokens=8,
            rounds=1,
        )


Part = Callable[[Sizes], list[Row]]


class Skipped(Exception):
    """A part cannot run on this machine; it says what that lacks."""


def random_model(folder: Path, shape: Shape, tokenizer_of: Path) -> Path:
    """A folder with random weights of this shape, another model's tokenizer, and no end-of-text token."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    if not (folder / "model.safetensors").is_file():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(shape.config()).to(torch.bfloat16)
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        content = json.loads(file.read_text())
        content.pop("eos_token", None)
        file.write_text(json.dumps(content))
    return folder


def mixture_model(folder: Path, vocabulary: int, tokenizer_of: Path | None = None) -> Path:
    """A folder with a mixture of random weights, and another model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if not (folder / "model.safetensors").is_file():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE | {"vocab_size": vocabulary})).save_pretrained(folder)
    if tokenizer_of is not None:
        AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return folder


def weight_bytes(folder: Path, bytes_each: int) -> int:
    """What a model's weights take with so many bytes for a number."""
    from safetensors import safe_open

    numbers = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                count = 1
                for size in tensors.get_slice(name).get_shape():
                    count *= size
                numbers += count
    return numbers * bytes_each
