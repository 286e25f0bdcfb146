"""Before the first step: does the model say of packed sequences what it says of each alone?

Attention is kept within sequences by `flash.trainer.model.packed.packed_attention`. What else carries something from
token to token, such as a recurrent state, a convolution, or a window or chunk that stands only in the model's own
mask, is not, and would train on log-probs that no policy has. So some sequences of random tokens go through the model
once in one row, and once alone with the model's own attention. One is longer than every window that
`model.max_length` lets matter. A few of them are also trained on, both ways: the gradient of attention is our own
(`flash.foreign.torch`), and a kernel that is asked wrongly for it would say nothing. A model that fails at any of this
is trained on one sequence at a time, as transformers made it.

Every rank calls this together, on the same tokens. Shape legend: P = packed tokens, T = predicted tokens.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable, Container, Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from flash.config.tree import Config
from flash.errors import ConfigError
from flash.foreign.torch import collective_failed
from flash.foreign.transformers import default_attention, running_layers, windows
from flash.trainer.model.logprobs import changes_logits, token_logprobs
from flash.trainer.model.model import device_of, reshard
from flash.trainer.model.output_layer import LogprobRequest, OutputLayer, apply_change
from flash.trainer.model.packed import PACKED_ATTENTION, class_name, takes_packed_rows
from flash.trainer.model.prefixes import in_one_row
from flash.trainer.model.routing_replay import RoutingReplay
from flash.trainer.optimizer import global_norm

LENGTHS = (9, 24, 5, 16)
"""Of the short sequences; each but the first has others before it in the row."""
BEYOND = 16
"""Tokens after the end of the longest window."""
LONGEST = 16_384
"""Tokens of the longest sequence. A longer window is not looked at: attention to it alone could fill the memory."""
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest difference in nats that is taken for rounding, by the dtype of the forward pass. What leaks makes 1 to 5."""
LONGEST_TRAINED = 2_064
"""Tokens of the longest sequence that is trained on."""
GRADIENT_TOLERANCE = {"float32": 1e-2, "float16": 0.2, "bfloat16": 0.5}
"""The same of the gradient of parameters of one kind, relative to its norm. In bfloat16 rounding was seen to make 0.07,
and 0.4 to 3 what takes the sums of a part's weights for those of all."""
LITTLE = 0.05
"""Share of the whole gradient's norm below which that of a kind is taken for as much: it is mostly rounding."""


FAULTS = (TypeError, ValueError, LookupError, AttributeError, AssertionError, NotImplementedError, RuntimeError)
"""What models stop with: they are other people's code. Other ranks and memory, which also end so, are not."""
PROBE = 64.0
"""The largest of the logits that a model is shown, to see what it does to them: beyond every known cap."""

log = logging.getLogger("flash")


@torch.no_grad()
def check_packing(model: PreTrainedModel, config: Config) -> None:
    """Compare a model, prepared by `shard_model`, packed and alone. A collective.

    Where that differs the model attends by itself from here on, so it is given one sequence at a time
    (`flash.trainer.model.packed.takes_packed_rows`), and the log says why.

    Raises:
        ConfigError: it cannot say anything of sequences, or in this precision; what it says of a token depends on
            later ones; it changes logits in a way that its output layer does not know; or it needs one sequence at a
            time and rows are over several ranks.
    """
    sequences = _sequences(model, config)
    # Each goes on as the next one begins, from its middle.
    forked = [torch.cat([one[: len(one) // 2 + 1], other[1:]])[: len(one)] for one, other in pairwise(sequences)]
    try:
        _check_logits(model)
        alone = _alone(model, [*sequences, *forked])
    except FAULTS as error:
        raise _stopped(model, config, error) from error
    halves = [len(ids) // 2 for ids in sequences]
    begun, other = (
        [logp_T[:half] for logp_T, half in zip(some, halves, strict=False)] for some in (alone, alone[len(halves) :])
    )
    if _gap(begun[: len(other)], other) > TOLERANCE[config.model.dtype]:
        raise ConfigError(
            f"model.path: what {class_name(model)} says of a token depends on later ones, or is no number; choose "
            "another model"
        )
    reason = _why_alone(model, config, sequences, forked, alone)
    if not _on_any_rank(model, reason is not None):
        return
    told = reason or "differs on another rank"
    layer = model.get_output_embeddings()
    if isinstance(layer, OutputLayer) and layer.context is not None:
        raise ConfigError(f"parallel.context: expected 1 with this model.path: {class_name(model)} {told}")
    attend_alone(model)
    if dist.get_rank() == 0:
        log.warning(
            "model.path: %s %s; so it is given one sequence at a time, which is slower", class_name(model), told
        )


@torch.no_grad()
def replay_routing(model: PreTrainedModel) -> None:
    """Have a model take the experts that engines chose, once it is seen that it can. A collective.

    Raises:
        ConfigError: it has no experts, or chooses them in a way that is not known.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    layer.replay = RoutingReplay(model)
    layer.replay.verifies = True
    _forward(model, [torch.arange(2, device=device_of(model))])
    layer.replay.verifies = False


def attend_alone(model: PreTrainedModel) -> None:
    """Have it attend as transformers made it, masks included, so that it needs one sequence at a time."""
    if takes_packed_rows(model):
        model.set_attn_implementation(default_attention(model))


def _stopped(model: PreTrainedModel, config: Config, error: Exception) -> Exception:
    """What to raise where a model stops at a sequence alone."""
    if isinstance(error, ConfigError) or _not_its_own(error):
        return error
    if isinstance(error, RuntimeError) and re.search("dtype|scalar type", str(error)):
        return ConfigError(
            f"model.dtype: {class_name(model)} mixes {config.model.dtype} with other precisions and stops: {error}. "
            'Set model.dtype = "float32", or choose another model'
        )
    return ConfigError(
        f"model.path: {class_name(model)} cannot be trained, it stops at a sequence with {type(error).__name__}: "
        f"{error}. Choose another model"
    )


def _not_its_own(error: Exception) -> bool:
    return collective_failed(error) or isinstance(error, torch.OutOfMemoryError)


def _check_logits(model: PreTrainedModel) -> None:
    """Whether the model does with logits what its output layer says that it does: it is shown some in their place."""
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    device = device_of(model)
    probe = torch.linspace(-PROBE, PROBE, int(layer.weight.shape[0]), device=device).view(1, 1, -1)
    selection = LogprobRequest(torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1), entropy_gradient=False)
    shown = layer.register_forward_hook(lambda *_: probe)
    try:
        with _own_attention(model), layer.answering(selection):
            ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
            said = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    finally:
        shown.remove()
        reshard(model)
    known = apply_change(probe, layer.change)
    if said.shape != known.shape or not torch.allclose(said.float(), known, rtol=1e-4, atol=1e-5):
        raise changes_logits(model)


def _why_alone(
    model: PreTrainedModel,
    config: Config,
    sequences: Sequence[Tensor],
    forked: Sequence[Tensor],
    alone: Sequence[Tensor],
) -> str | None:
    """Why sequences cannot share a row of this model; None: they can."""
    if not takes_packed_rows(model):
        return "does not use transformers' attention interface"
    try:
        gap = _gap(_packed(model, [*sequences, *forked]), alone)
        if gap > TOLERANCE[config.model.dtype]:
            layer = _first_difference(model, sequences) or "a layer that could not be found"
            return (
                f"gives packed sequences other log-probs than each of them alone, by {gap:.3g} nats; the first layer "
                f"to differ is {layer}"
            )
        kind, error = _gradient_gap(model, [*sequences[1:3], forked[1], *sequences[len(LENGTHS) :]])
    except (ConfigError, *FAULTS) as error:
        if _not_its_own(error):
            raise
        model.zero_grad()
        reshard(model)
        return f"stops at packed sequences: {type(error).__name__}: {error}"
    if error > GRADIENT_TOLERANCE[config.model.dtype]:
        return f"is given another gradient by packed sequences than by each of them alone, {error:.0%} for {kind}"
    # Of weights that were never trained these say so little that the figures above are those of rounding.
    running = running_layers(model.config)
    return f"has layers whose state runs on from one token to the next ({running})" if running else None


def _on_any_rank(model: PreTrainedModel, found: bool) -> bool:
    """Whether any has found so: what they then do is the same on all."""
    flag = torch.tensor([float(found)], device=device_of(model))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _sequences(model: PreTrainedModel, config: Config) -> list[Tensor]:
    longest = min(config.model.max_length, config.train.max_tokens_per_microbatch, LONGEST)
    lengths = [min(length, longest) for length in LENGTHS]
    beyond = [window + BEYOND for window in windows(model) if window + BEYOND <= longest]
    lengths += [max(beyond)] if beyond else []
    choose = random.Random("packing").choices
    vocabulary = range(int(model.config.get_text_config().vocab_size))
    return [torch.tensor(choose(vocabulary, k=length), device=device_of(model)) for length in lengths]


def _forward(model: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """As `_logprobs`, and no backward pass follows."""
    logp_T = _logprobs(model, sequences)
    reshard(model)
    return logp_T


def _logprobs(model: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """[T]: log-prob of every token but the first of each sequence, all in one row."""
    ids = [one.cpu().numpy() for one in sequences]
    packed = in_one_row(ids)
    keep_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
    return token_logprobs(model, packed, keep_T, np.concatenate([one[1:] for one in ids])).logp_T


def _packed(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    return list(_forward(model, sequences).split([len(ids) - 1 for ids in sequences]))


def _alone(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    with _own_attention(model):
        return [_forward(model, [ids]) for ids in sequences]


@contextmanager
def _own_attention(model: PreTrainedModel) -> Generator[None]:
    """The model attends as transformers made it, masks included, and each rank to all tokens."""
    layer: Any = model.get_output_embeddings()
    context, layer.context = layer.context, None
    shared = takes_packed_rows(model)
    attend_alone(model)
    try:
        # Kernels that are made of it would never be used again.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if shared:
            model.set_attn_implementation(PACKED_ATTENTION)
        layer.context = context


def _gap(packed: Sequence[Tensor], alone: Sequence[Tensor]) -> float:
    """The largest difference that two neighbouring tokens both have; infinite where a number is none.

    Rounding that sends a token to another expert hits that token alone; what leaks reaches its neighbours.
    """
    gaps = [(one - other).abs().nan_to_num(torch.inf) for one, other in zip(packed, alone, strict=True)]
    return max((float(gap_T[:-1].minimum(gap_T[1:]).max()) for gap_T in gaps if len(gap_T) > 1), default=0.0)


def _gradient_gap(model: PreTrainedModel, sequences: Sequence[Tensor]) -> tuple[str, float]:
    """The kind of parameter whose gradient differs the most, packed and alone, and by what share of its norm.

    Of those of attention: rounding that sends a token to another expert changes the gradients of both.
    """
    kinds: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(name)
    if not kinds:
        return "", 0.0
    kinds = {kind: names for kind, names in kinds.items() if "att" in kind} or kinds
    compared = {name for names in kinds.values() for name in names}
    some = [one for one in sequences if len(one) <= LONGEST_TRAINED]
    packed, _ = _gradient(model, [some], compared)
    with _own_attention(model):
        alone, whole = _gradient(model, [[one] for one in some], compared)
    least = LITTLE * whole
    gaps = [("", 0.0)]
    for kind, names in kinds.items():
        norm = max(global_norm([alone[name] for name in names]), least)
        error = global_norm([packed[name] - alone[name] for name in names])
        # Without a number of its own there is nothing to hold it to.
        if 0 < norm < math.inf:
            gaps.append((kind, error / norm if math.isfinite(error) else math.inf))
    return max(gaps, key=lambda gap: gap[1])


@torch.enable_grad()
def _gradient(
    model: PreTrainedModel, rows: Sequence[Sequence[Tensor]], names: Container[str]
) -> tuple[dict[str, Tensor], float]:
    """Of a loss over all tokens of some rows, of these parameters, and the norm of that of all.

    Nothing of it stays at the model: two whole gradients are more than a model may leave room for.
    """
    for sequences in rows:
        logp_T = _logprobs(model, sequences)
        sign_T = torch.cat([1.0 - 2.0 * (one[1:] % 2) for one in sequences])
        (logp_T * sign_T).sum().backward()
    whole = global_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if name in names
    }
    model.zero_grad()
    reshard(model)
    return found, whole


def _first_difference(model: PreTrainedModel, sequences: Sequence[Tensor]) -> str | None:
    """The first module, of the innermost ones, that makes different things of equal inputs, as people find it."""
    packed = _trace(model, lambda: _packed(model, sequences))
    alone = _trace(model, lambda: _alone(model, sequences))
    kinds = {name: class_name(module) for name, module in model.named_modules()}
    for name, [(given, made)] in ((name, calls) for name, calls in packed.items() if len(calls) == 1):
        others = alone.get(name, [])
        if len(others) != len(sequences):
            continue
        if _equal(given, [one for one, _ in others]) and not _equal(made, [one for _, one in others]):
            parent = kinds.get(name.rpartition(".")[0], "")
            return f"{name}, a {kinds[name]} in a {parent}"
    return None


def _trace(model: PreTrainedModel, run: Callable[[], Any]) -> dict[str, list[tuple[Tensor | None, Tensor | None]]]:
    """What each module was given and made, call by call, in the order in which they were done."""
    seen: dict[str, list[tuple[Tensor | None, Tensor | None]]] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen.setdefault(name, []).append((_tensor((*args, *kwargs.values())), _tensor(output)))

        return hook

    hooks = [
        module.register_forward_hook(remember(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        # torch.compile neither sees nor forgets hooks on what is inside a layer.
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor among what a module was given or made, as a copy."""
    values = value if isinstance(value, tuple | list) else (value,)
    found = next((one for one in values if isinstance(one, Tensor) and one.is_floating_point()), None)
    return None if found is None else found.detach().float().clone()


def _equal(packed: Tensor | None, alone: Sequence[Tensor | None]) -> bool:
    """Whether a packed tensor is what the lone ones are one after the other, along the dimension of the tokens.

    What cannot be laid side by side tells nothing and counts as equal.
    """
    parts = [one for one in alone if one is not None]
    if packed is None or len(parts) != len(alone):
        return True
    for dim in range(packed.dim()):
        lengths = [part.shape[dim] for part in parts if part.dim() == packed.dim()]
        others = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts}
        if sum(lengths) == packed.shape[dim] and others == {packed.shape[:dim] + packed.shape[dim + 1 :]}:
            whole = torch.cat(parts, dim)
            return bool(torch.allclose(packed, whole, rtol=1e-2, atol=1e-3 * float(whole.abs().max())))
    return True
