"""The canary's text, and how far apart healthy engines and trainers may be.

The text is the policy's own, drawn by the model in float32: at tokens that a model itself says, rounding does to
log-probs what it does to those of samples, while a model of 50,000 tokens gives random ones log-probs of −12 to −20,
where logits in bfloat16 have steps of 0.125. Its log-probs in float32 say what the precision of the run makes: trainer
and engine are each about so far away from them. Every rank has the same text and the same tolerance.

It is several short texts, each begun anew and drawn beside the others, one token of each at a time: for each time the
ranks gather the whole model once. Shape legend: B = short texts, P = tokens, V = vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from flash.config.tree import Config
from flash.errors import ConfigError
from flash.foreign.torch import collective_failed
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import device_of, reshard
from flash.trainer.model.packed import class_name
from flash.trainer.model.prefixes import in_one_row
from flash.types import Canary

BEYOND_ROUNDING = 6.0
"""How often the trainer's own rounding engine and trainer may differ by. Two independent roundings differ by 1.4 times
of one; the rest is for policies that become surer, and for other kernels. Engines that compute with wrong weights were
seen to differ by 0.6 nats and more."""

LEAST = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.15}
"""Nats that are always allowed: what is measured of a model that knows nothing yet says little of what it will make."""


LEAST_SIZE = 1.0
"""Nats that the canary's log-probs count as having at first: a model that is sure of its text would else make the
tolerance grow by orders of magnitude once it is not."""

SHORT = 8
"""Tokens of each short text, at least: a text's first tokens say little of what the model knows."""


@dataclass(frozen=True)
class CanaryText:
    """What the policy says, and how surely."""

    token_ids: list[int]
    exact: list[float]
    """Log-prob of each token but the first in float32."""


@torch.no_grad()
def draw_canary(model: PreTrainedModel, config: Config) -> CanaryText:
    """Let the policy say something, in float32 (see `load_plain`). Called by all ranks, who get what rank 0 has drawn.

    Raises:
        ConfigError: the model stops at a plain sequence of tokens, while memory is enough and all ranks are there.
    """
    # The engine answers the canary with one token, which needs its place in the context.
    count = min(config.weights.canary_tokens, config.model.max_length - 1)
    try:
        text = _drawn(model, count, config.run.seed)
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        # Models are other people's code. Other ranks and memory are not.
        if collective_failed(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        fault = f"it stops at a sequence of tokens with {type(error).__name__}: {error}"
        raise ConfigError(
            f"model.path: {class_name(model)} cannot be trained, {fault}. Choose another model"
        ) from error
    reshard(model)
    said = [text]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _drawn(model: PreTrainedModel, count: int, seed: int) -> CanaryText:
    described = model.config.get_text_config()
    named = (getattr(described, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((token for token in named if isinstance(token, int) and 0 <= token < described.vocab_size), 0)
    generator = torch.Generator().manual_seed(seed)
    ids_BP = torch.full((max(count // SHORT, 1), 1), first, device=device_of(model))
    model.eval()
    cache: Any = None
    while ids_BP.numel() < count:
        # What came before is not computed again, where a model keeps it: on a processor each pass takes long.
        known = ids_BP if cache is None else ids_BP[:, -1:]
        output = model(input_ids=known, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        token_B1 = _draw(output.logits[:, -1].float().cpu(), generator).to(ids_BP)
        # Rounding on another rank may have drawn others; those who divide a layer need the same.
        dist.broadcast(token_B1, src=0)
        ids_BP = torch.cat([ids_BP, token_B1], dim=1)
    ids_P = ids_BP.flatten()[:count]
    rows = model(input_ids=ids_P[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return CanaryText(ids_P.tolist(), rows.gather(-1, ids_P[1:, None])[:, 0].tolist())


def _draw(logits_BV: Tensor, generator: torch.Generator) -> Tensor:
    """[B, 1]: by the largest of logits with Gumbel noise, which also gives an answer where they are no numbers."""
    uniform_BV = torch.rand(logits_BV.shape, generator=generator).clamp(min=1e-20)
    return (logits_BV - (-uniform_BV.log()).log()).argmax(-1, keepdim=True)


@torch.no_grad()
def canary_logprobs(model: PreTrainedModel, token_ids: list[int]) -> list[float]:
    """Log-prob of token i + 1 given tokens 0…i, at temperature 1. Every rank calls it and gets the same answer."""
    ids_P = np.array(token_ids, dtype=np.int64)
    result = token_logprobs(model, in_one_row([ids_P]), np.arange(len(ids_P) - 1), ids_P[1:])
    reshard(model)
    return result.logp_T.tolist()


class CanaryMaker:
    """Says under each version what engines are held to. `model` holds the weights that the text was drawn from.

    Raises:
        ConfigError: the model's log-probs are no finite numbers.
    """

    def __init__(self, text: CanaryText, model: PreTrainedModel, config: Config) -> None:
        self._token_ids = text.token_ids
        given, dtype = config.weights.canary_tolerance, config.model.dtype
        logprobs = canary_logprobs(model, text.token_ids)
        gaps = [abs(ours - exact) for ours, exact in zip(logprobs, text.exact, strict=True)]
        self.rounding = sum(gaps) / len(gaps)
        """Mean absolute difference of the trainer's log-probs from those in float32, in nats."""
        if not math.isfinite(self.rounding):
            raise ConfigError(_not_finite(text, dtype))
        self._given = given
        self._size = max(_mean_size(logprobs), LEAST_SIZE)
        self.tolerance = max(BEYOND_ROUNDING * self.rounding, LEAST[dtype]) if given is None else given
        """Most that the log-probs of engine and trainer may differ by in the mean, in nats, under the first weights."""

    def canary(self, model: PreTrainedModel) -> Canary:
        """Return the canary of the policy's present weights. A collective.

        Rounding is relative: a policy that has left this text behind gives it large negative log-probs, and healthy
        engines differ by more there. So the tolerance grows with the size of the log-probs, unless it was configured.
        """
        logprobs = canary_logprobs(model, self._token_ids)
        grown = 1.0 if self._given is not None else max(_mean_size(logprobs) / self._size, 1.0)
        return Canary(self._token_ids, logprobs, self.tolerance * grown)


def _mean_size(logprobs: list[float]) -> float:
    return sum(map(abs, logprobs)) / len(logprobs)


def _not_finite(text: CanaryText, dtype: str) -> str:
    if all(map(math.isfinite, text.exact)):
        return (
            f'model.dtype = "{dtype}": the log-probs of the model at model.path are no finite numbers in this '
            'precision, and are in float32: its activations outgrow it; set model.dtype = "bfloat16" or "float32"'
        )
    return "model.path: the log-probs of this model are no finite numbers even in float32; its weights are damaged"
