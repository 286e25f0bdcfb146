"""The canary: a text whose log-probs engines are checked against, and the difference that healthy engines may have.

An engine that has loaded new weights computes the log-probs of this text. If they differ too much from the trainer's,
the engine has wrong weights or computes with them in a wrong way. `flash.trainer.step` draws the text before the first
step and makes a `CanaryMaker`. For each version, `flash.trainer.loop` publishes the canary of the current weights, and
engines that load the version are checked against it (`flash.weights`).

The text is sampled from the policy itself, in float32, so that rounding changes the text's log-probs as much as it
changes the log-probs of samples. Random tokens are not suitable: a model of 50,000 tokens gives them log-probs of −12
to −20, where logits in bfloat16 have steps of 0.125. The difference between the text's log-probs in the run's precision
and in float32 is the rounding error of the trainer, and the engine's error is about as large. Every rank has the same
text and the same tolerance.

The text consists of several short texts, sampled side by side, one token of each at a time. This saves time, because
for each sampled token of a text the ranks gather the whole model once.

Shape legend: B = short texts, P = tokens, V = vocabulary.
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
from flash.trainer.mesh import device_of
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import reshard
from flash.trainer.model.packed import class_name
from flash.trainer.packing import in_one_row
from flash.types import Canary

ROUNDING_FACTOR = 6.0
"""Tolerance as a multiple of the trainer's own rounding error. Two independent rounding errors differ by 1.4 times one
of them. The factor is larger because the policy may become more certain, and because engines use other kernels. Engines
that compute with wrong weights have differed by 0.6 nats and more."""

MIN_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.15}
"""Smallest tolerance in nats by dtype. The rounding error of an untrained model says little about the trained model."""

MIN_SIZE = 1.0
"""Smallest mean size of the first canary's log-probs, in nats, from which the growth of the tolerance is measured. If
the model is certain of its text at first, the tolerance would otherwise grow by orders of magnitude once the model is
less certain."""

TOKENS = 32
"""Length of the canary's text, in tokens. A longer text takes longer to check and would show no other faults."""
SHORT = 8
"""Smallest number of tokens of a short text. The first tokens of a text show little of what the model has learned."""


@dataclass(frozen=True)
class CanaryText:
    """A text that the policy has sampled, equal on all ranks."""

    token_ids: list[int]
    """Token ids of all short texts, one after another; the first token of each is given and not sampled."""
    exact: list[float]
    """Log-prob of each token but the first, in float32."""


@torch.no_grad()
def draw_canary(model: PreTrainedModel, config: Config) -> CanaryText:
    """Sample the canary's text from a model of `load_plain`. A collective: all ranks get the text of rank 0.

    Raises:
        ConfigError: the model fails on a plain sequence of tokens, and neither memory nor another rank is the cause.
    """
    # The engine reports the log-probs of a prompt with a response of one token, which needs a place in the context.
    count = min(TOKENS, config.model.max_length - 1)
    try:
        text = _draw_text(model, count, config.run.seed)
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        # The code of a model may raise any error. Failed collectives and a lack of memory are not its fault.
        if collective_failed(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        fault = f"it fails on a sequence of tokens with {type(error).__name__}: {error}"
        raise ConfigError(
            f"model.path: {class_name(model)} cannot be trained, {fault}. Choose another model"
        ) from error
    reshard(model)
    shared = [text]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _draw_text(model: PreTrainedModel, count: int, seed: int) -> CanaryText:
    """Return `count` tokens sampled from the model, and their log-probs. A collective.

    The tokens of several short texts stand one after another, as one text; its log-probs are computed in one pass.
    """
    described = model.config.get_text_config()
    named = (getattr(described, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((token for token in named if isinstance(token, int) and 0 <= token < described.vocab_size), 0)
    # The text has its own generator, so that it does not depend on random numbers that this process has drawn before.
    generator = torch.Generator().manual_seed(seed)
    ids_BP = torch.full((max(count // SHORT, 1), 1), first, device=device_of(model))
    model.eval()
    cache: Any = None
    while ids_BP.numel() < count:
        # With a KV cache, earlier tokens are not computed again, which would take long on a CPU.
        fed_BP = ids_BP if cache is None else ids_BP[:, -1:]
        output = model(input_ids=fed_BP, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        token_B1 = _draw_tokens(output.logits[:, -1].float().cpu(), generator).to(ids_BP)
        # Because of rounding, another rank may have drawn other tokens. Ranks that divide a layer (tensor parallelism)
        # need equal tokens, so all take the tokens of rank 0.
        dist.broadcast(token_B1, src=0)
        ids_BP = torch.cat([ids_BP, token_B1], dim=1)
    ids_P = ids_BP.flatten()[:count]
    logp_PV = model(input_ids=ids_P[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return CanaryText(ids_P.tolist(), logp_PV.gather(-1, ids_P[1:, None])[:, 0].tolist())


def _draw_tokens(logits_BV: Tensor, generator: torch.Generator) -> Tensor:
    """Return [B, 1]: a token sampled from the softmax of each row of logits.

    The index of the largest logit with added Gumbel noise has just this distribution. This also works with NaN logits,
    for which `CanaryMaker` then raises a clear error; torch's own function for sampling would fail on NaN.
    """
    # A uniform number of 0 would give infinite noise.
    uniform_BV = torch.rand(logits_BV.shape, generator=generator).clamp(min=1e-20)
    return (logits_BV - (-uniform_BV.log()).log()).argmax(-1, keepdim=True)


@torch.no_grad()
def canary_logprobs(model: PreTrainedModel, token_ids: list[int]) -> list[float]:
    """Return the log-prob of token i + 1 given tokens 0…i, at temperature 1, for each i. A collective.

    `model` is the policy, prepared by `shard_model`.

    Raises:
        ConfigError: the model changes the logits after its output layer in a way that the layer does not know.
    """
    ids_P = np.array(token_ids, dtype=np.int64)
    result = token_logprobs(model, in_one_row([ids_P]), np.arange(len(ids_P) - 1), ids_P[1:])
    reshard(model)
    return result.logp_T.tolist()


class CanaryMaker:
    """Makes the canary of each version, and holds the tolerance that follows from the first weights.

    A version is the weights that the trainer publishes to the engines after a step.
    """

    def __init__(self, text: CanaryText, model: PreTrainedModel, config: Config) -> None:
        """Measure the trainer's rounding error, and set the tolerance. A collective.

        `model` is the policy in the run's precision, which still has the weights that the text was sampled from.

        Raises:
            ConfigError: the model's log-probs are not finite.
        """
        self._token_ids = text.token_ids
        configured, dtype = config.weights.canary_tolerance, config.model.dtype
        logprobs = canary_logprobs(model, text.token_ids)
        gaps = [abs(ours - exact) for ours, exact in zip(logprobs, text.exact, strict=True)]
        self.rounding = sum(gaps) / len(gaps)
        """Mean absolute difference between log-probs in the run's precision and in float32, in nats."""
        if not math.isfinite(self.rounding):
            raise ConfigError(_not_finite(text, dtype))
        self._configured = configured
        # Mean size of the first log-probs, in nats, from which `canary` measures the growth of the tolerance.
        self._size = max(_mean_size(logprobs), MIN_SIZE)
        measured = max(ROUNDING_FACTOR * self.rounding, MIN_TOLERANCE[dtype])
        self.tolerance = measured if configured is None else configured
        """Largest mean difference of the log-probs of engine and trainer under the first weights, in nats."""

    def canary(self, model: PreTrainedModel) -> Canary:
        """Return the canary of the policy's current weights. A collective.

        Rounding errors are relative: a policy that would no longer sample this text gives it large negative log-probs,
        where healthy engines differ by more. So the tolerance grows with the size of the log-probs, unless it is
        configured.
        """
        logprobs = canary_logprobs(model, self._token_ids)
        growth = 1.0 if self._configured is not None else max(_mean_size(logprobs) / self._size, 1.0)
        return Canary(self._token_ids, logprobs, self.tolerance * growth)


def _mean_size(logprobs: list[float]) -> float:
    """Return the mean absolute value of log-probs, in nats."""
    return sum(map(abs, logprobs)) / len(logprobs)


def _not_finite(text: CanaryText, dtype: str) -> str:
    """Return the error message for a model whose log-probs are not finite in the run's precision `dtype`.

    If the log-probs are finite in float32, the precision is at fault, else the weights.
    """
    if all(map(math.isfinite, text.exact)):
        return (
            f'model.dtype = "{dtype}": the log-probs of the model at model.path are not finite in this precision, but '
            'they are in float32: its activations are too large; set model.dtype = "bfloat16" or "float32"'
        )
    return "model.path: the log-probs of this model are not finite even in float32; its weights are damaged"
