"""Checks before the first step that a model gives packed sequences the same log-probs as each sequence alone.

A *packed row* has several sequences one after another. `flash.trainer.model.packed.packed_attention` keeps attention
within each sequence. Other operations can carry information from one sequence to the next: a recurrent state, a
convolution over tokens, or a window or chunk that exists only in the model's own mask. The log-probs of a packed row
would then be wrong, without any error. So some sequences of random tokens go through the model once in one row, and
once each alone with the model's own attention (`_random_sequences`). The gradients of a few sequences are compared in
the same way, because the backward pass of packed attention is our own code, and a wrong call of a kernel raises no
error.

A model that fails any of this is trained on one sequence at a time, with its own attention. `flash.trainer.step` calls
`check_packing` for the policy, and `flash.trainer.references` for each reference and teacher that it loads. All
ranks call it together, on the same tokens.

`flash.trainer.step` also uses two smaller functions of this file: `replay_routing` checks and installs the replay of
experts, and `share_rows` decides whether the micro-batches of all models may have several sequences.

Shape legend: P = packed tokens, T = predicted tokens.
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
from flash.foreign.transformers import default_attention, recurrent_layers, windows
from flash.trainer.mesh import TrainerMesh, device_of
from flash.trainer.model.logprobs import LogprobRequest, OutputLayer, apply_change, changes_logits, token_logprobs
from flash.trainer.model.model import reshard
from flash.trainer.model.packed import PACKED_ATTENTION, class_name, takes_packed_rows
from flash.trainer.model.routing_replay import RoutingReplay
from flash.trainer.optimizer import global_norm
from flash.trainer.packing import in_one_row

LENGTHS = (9, 24, 5, 16)
"""Numbers of tokens of the short sequences. Every sequence but the first follows other sequences in the row, so that a
leak between sequences shows."""
BEYOND = 16
"""Tokens by which the long sequence exceeds the longest attention window that fits into a row."""
LONGEST = 16_384
"""Largest number of tokens of a sequence in this check. Longer windows are not checked, because attention over a longer
sequence could need more memory than there is."""
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest difference of log-probs, in nats, that counts as rounding, by the dtype of the forward pass. A leak between
sequences makes a difference of 1 to 5."""
LONGEST_TRAINED = 2_064
"""Largest number of tokens of a sequence whose gradient is compared, which bounds the memory of the backward pass."""
GRADIENT_TOLERANCE = {"float32": 1e-2, "float16": 0.2, "bfloat16": 0.5}
"""Largest difference of the gradients of one kind of parameters, relative to their norm, that counts as rounding, by
the dtype of the forward pass. Rounding in bfloat16 has caused 0.07. A known fault, the use of one attention part's sum
of weights in place of the sum over all parts, has caused 0.4 to 3."""
MIN_GRADIENT_SHARE = 0.05
"""Smallest norm that a difference of gradients is divided by, as a share of the norm of the whole gradient. A gradient
with a smaller norm is mostly rounding."""

FAULTS = (TypeError, ValueError, LookupError, AttributeError, AssertionError, NotImplementedError, RuntimeError)
"""Types of the errors that the code of a model may raise. Failed collectives and a lack of memory raise some of these
types, too; `_is_outside_fault` recognises such errors."""
PROBE = 64.0
"""Largest of the logits that a model is given in place of its own, to check how it changes them. No known model caps
its logits at a larger number."""

log = logging.getLogger("flash")


@torch.no_grad()
def check_packing(model: PreTrainedModel, config: Config) -> None:
    """Compare log-probs and gradients of packed sequences with those of each sequence alone. A collective.

    `shard_model` has prepared the model. If log-probs or gradients differ, the model uses its own attention from here
    on and gets one sequence at a time (`flash.trainer.model.packed.takes_packed_rows` is False). A warning gives the
    reason.

    Raises:
        ConfigError: the model fails on a sequence, or in this precision; its log-prob of a token depends on later
            tokens; it changes logits in a way that its output layer does not know; or it needs one sequence at a time
            while rows are divided over several ranks.
    """
    # 1. Compute each sequence alone. An error here means that the model cannot be trained at all.
    sequences = _random_sequences(model, config)
    # Each forked sequence begins with the first half of one sequence (`one`) and goes on like the next one (`other`).
    # So in the packed row it shares a prefix with `one`. In this half both must get the same log-probs, because a
    # log-prob may not depend on later tokens.
    forked = [torch.cat([one[: len(one) // 2 + 1], other[1:]])[: len(one)] for one, other in pairwise(sequences)]
    try:
        _check_logits(model)
        alone = _alone_logprobs(model, [*sequences, *forked])
    except FAULTS as error:
        raise _model_failed(model, config, error) from error
    # 2. Compare the common first halves of each sequence and its forked sequence.
    halves = [len(ids) // 2 for ids in sequences]
    first_halves, same_halves = (
        [logp_T[:half] for logp_T, half in zip(some, halves, strict=False)] for some in (alone, alone[len(halves) :])
    )
    if _max_gap(first_halves[: len(same_halves)], same_halves) > TOLERANCE[config.model.dtype]:
        raise ConfigError(
            f"model.path: the log-prob that {class_name(model)} gives a token depends on later ones, or is not finite; "
            "choose another model"
        )
    # 3. Compute all sequences in one row. A model that fails on one rank counts as failed on all ranks, so that all
    # take the same path.
    reason = _why_not_packed(model, config, sequences, forked, alone)
    if not _on_any_rank(model, reason is not None):
        return
    reason = reason or "differs on another rank"
    layer = model.get_output_embeddings()
    if isinstance(layer, OutputLayer) and layer.context is not None:
        raise ConfigError(f"parallel.context: expected 1 with this model.path: {class_name(model)} {reason}")
    use_own_attention(model)
    if dist.get_rank() == 0:
        log.warning(
            "model.path: %s %s. It therefore gets one sequence at a time, which is slower", class_name(model), reason
        )


@torch.no_grad()
def replay_routing(model: PreTrainedModel) -> None:
    """Make a model use the experts that engines chose (`flash.trainer.model.routing_replay`). A collective.

    A forward pass over two tokens checks that each router chooses its experts in the way that can be replaced. From
    then on, `token_logprobs` gives the model the routes of each micro-batch.

    Raises:
        ConfigError: the model has no experts, or chooses them in a way that is not known.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    layer.replay = RoutingReplay(model)
    layer.replay.verifies = True
    _forward(model, [torch.arange(2, device=device_of(model))])
    layer.replay.verifies = False


def use_own_attention(model: PreTrainedModel) -> None:
    """Make a model use its own attention and masks again. It then needs one sequence at a time.

    Does nothing to a model that uses its own attention already.
    """
    if takes_packed_rows(model):
        model.set_attn_implementation(default_attention(model))


def share_rows(
    mesh: TrainerMesh, policy: PreTrainedModel, backbones: Sequence[PreTrainedModel], *frozen: PreTrainedModel | None
) -> bool:
    """Return True if all models can take several sequences in one micro-batch.

    A critic can if the policy can and the critic's backbone is of the same model type as the policy. Any other critic
    is changed here to use its own attention from transformers, because no check has compared its results for packed and
    for single sequences.

    Args:
        mesh: the trainer ranks.
        policy: the policy, which `check_packing` has checked.
        backbones: the models of the critics below their value heads.
        frozen: the reference and the teacher; None for each that the run does not have.

    Raises:
        ConfigError: a model cannot take several sequences, and micro-batches are divided over several ranks
            (`parallel.context`), which only packed attention supports.
    """
    for backbone in backbones:
        if not takes_packed_rows(policy) or backbone.config.model_type != policy.config.get_text_config().model_type:
            use_own_attention(backbone)
    share = all(takes_packed_rows(one) for one in (policy, *backbones, *frozen) if one is not None)
    if not share and mesh.context is not None:
        raise ConfigError("parallel.context: expected 1 with this critic.path, which takes one sequence at a time")
    return share


def _model_failed(model: PreTrainedModel, config: Config, error: Exception) -> Exception:
    """Return the error to raise if a model has raised `error` for a single sequence.

    Errors that the model did not cause are returned unchanged; the others become a ConfigError with advice.
    """
    if isinstance(error, ConfigError) or _is_outside_fault(error):
        return error
    if isinstance(error, RuntimeError) and re.search("dtype|scalar type", str(error)):
        return ConfigError(
            f"model.dtype: {class_name(model)} mixes {config.model.dtype} with other precisions and fails: {error}. "
            'Set model.dtype = "float32", or choose another model'
        )
    return ConfigError(
        f"model.path: {class_name(model)} cannot be trained, it fails on a sequence with {type(error).__name__}: "
        f"{error}. Choose another model"
    )


def _is_outside_fault(error: Exception) -> bool:
    """Return True if other ranks or a lack of memory caused the error, not the model's code."""
    return collective_failed(error) or isinstance(error, torch.OutOfMemoryError)


def _check_logits(model: PreTrainedModel) -> None:
    """Check that the model changes logits exactly as its output layer assumes.

    The output of the output layer is replaced by known logits, and the model must return `apply_change` of them.
    Otherwise the trainer's log-probs would differ from the engines', which use the changed logits.

    Raises:
        ConfigError: the model changes logits in another way.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    device = device_of(model)
    probe = torch.linspace(-PROBE, PROBE, int(layer.weight.shape[0]), device=device).view(1, 1, -1)
    request = LogprobRequest(torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1), entropy_gradient=False)
    hook = layer.register_forward_hook(lambda *_: probe)
    try:
        with _own_attention(model), layer.answering(request):
            ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
            changed = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    finally:
        hook.remove()
        reshard(model)
    expected = apply_change(probe, layer.change)
    # The tolerances cover rounding. Any known scale or cap would change the largest logits, `PROBE`, by far more.
    if changed.shape != expected.shape or not torch.allclose(changed.float(), expected, rtol=1e-4, atol=1e-5):
        raise changes_logits(model)


def _why_not_packed(
    model: PreTrainedModel,
    config: Config,
    sequences: Sequence[Tensor],
    forked: Sequence[Tensor],
    alone: Sequence[Tensor],
) -> str | None:
    """Return the reason why sequences cannot share a row, as a phrase that follows the model's name; None if they can.

    An error of the model is a reason, too. `alone` are the log-probs of the sequences and of the forked ones, each
    computed alone.

    Raises:
        Exception: an error that the model did not cause (`_is_outside_fault`).
    """
    if not takes_packed_rows(model):
        return "does not use transformers' attention interface"
    try:
        gap = _max_gap(_packed_logprobs(model, [*sequences, *forked]), alone)
        if gap > TOLERANCE[config.model.dtype]:
            layer = _first_difference(model, sequences) or "a layer that could not be found"
            return (
                f"gives packed sequences other log-probs than each of them alone, by {gap:.3g} nats; the first layer "
                f"to differ is {layer}"
            )
        # A few sequences save time and memory: two that follow others in the row, one that shares a prefix with the
        # first of these, and the long one, if there is one.
        kind, error = _gradient_gap(model, [*sequences[1:3], forked[1], *sequences[len(LENGTHS) :]])
    except (ConfigError, *FAULTS) as error:
        if _is_outside_fault(error):
            raise
        # The pass may have broken off with gradients and gathered parameters in memory.
        model.zero_grad()
        reshard(model)
        return f"fails on packed sequences: {type(error).__name__}: {error}"
    if error > GRADIENT_TOLERANCE[config.model.dtype]:
        return f"gets another gradient from packed sequences than from each of them alone, by {error:.0%} for {kind}"
    # With untrained weights, recurrent layers change the log-probs so little that it looks like rounding. So they are
    # found by their names.
    recurrent = recurrent_layers(model.config)
    return f"has layers whose state runs on from one token to the next ({recurrent})" if recurrent else None


def _on_any_rank(model: PreTrainedModel, found: bool) -> bool:
    """Return True on all ranks if `found` is True on any of them, so that all take the same path. A collective."""
    flag = torch.tensor([float(found)], device=device_of(model))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _random_sequences(model: PreTrainedModel, config: Config) -> list[Tensor]:
    """Return sequences of random tokens, equal on every rank. `check_packing` compares their log-probs and gradients.

    The first sequences have the lengths in `LENGTHS`. No sequence has more tokens than a micro-batch,
    `model.max_length` and `LONGEST` allow. If the model has attention windows, one more sequence follows, so that a
    window hides some of its tokens: it is `BEYOND` tokens longer than the longest window for which this length is
    allowed. If this length is allowed for no window, there is no such sequence.
    """
    limit = min(config.model.max_length, config.train.max_tokens_per_microbatch, LONGEST)
    lengths = [min(length, limit) for length in LENGTHS]
    beyond = [window + BEYOND for window in windows(model) if window + BEYOND <= limit]
    lengths += [max(beyond)] if beyond else []
    # The seed is fixed, so that every rank draws the same tokens.
    choose = random.Random("packing").choices
    vocabulary = range(int(model.config.get_text_config().vocab_size))
    return [torch.tensor(choose(vocabulary, k=length), device=device_of(model)) for length in lengths]


def _forward(model: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """Return [T]: the log-probs of all sequences in one row, as `_logprobs` does. No backward pass may follow.

    FSDP gathers parameters for the pass. This function frees them, because no backward pass does so.
    """
    logp_T = _logprobs(model, sequences)
    reshard(model)
    return logp_T


def _logprobs(model: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """Return [T]: the log-prob of every token but the first of each sequence, all sequences in one row."""
    ids = [one.cpu().numpy() for one in sequences]
    packed = in_one_row(ids)
    # Every token but the first of a sequence is predicted at the place of the token before it.
    before_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
    return token_logprobs(model, packed, before_T, np.concatenate([one[1:] for one in ids])).logp_T


def _packed_logprobs(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs of each sequence, computed with all sequences in one row."""
    return list(_forward(model, sequences).split([len(ids) - 1 for ids in sequences]))


def _alone_logprobs(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs of each sequence, computed in a row of its own, with the model's own attention."""
    with _own_attention(model):
        return [_forward(model, [ids]) for ids in sequences]


@contextmanager
def _own_attention(model: PreTrainedModel) -> Generator[None]:
    """Make the model use its own attention and masks inside this block, and compute whole rows on each rank."""
    layer: Any = model.get_output_embeddings()
    context, layer.context = layer.context, None
    packed = takes_packed_rows(model)
    use_own_attention(model)
    try:
        # Compiling would waste time: this combination of code and attention is not used again.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if packed:
            model.set_attn_implementation(PACKED_ATTENTION)
        layer.context = context


def _max_gap(packed: Sequence[Tensor], alone: Sequence[Tensor]) -> float:
    """Return the largest difference between the log-probs, in nats; infinite if one is NaN.

    For each pair of neighbouring tokens, only the smaller of their two differences counts. Rounding that sends a token
    to another expert changes the log-prob of that token alone, while a leak between sequences also reaches the
    neighbouring tokens.
    """
    gaps = [(one - other).abs().nan_to_num(torch.inf) for one, other in zip(packed, alone, strict=True)]
    return max((float(gap_T[:-1].minimum(gap_T[1:]).max()) for gap_T in gaps if len(gap_T) > 1), default=0.0)


def _gradient_gap(model: PreTrainedModel, sequences: Sequence[Tensor]) -> tuple[str, float]:
    """Return the kind of parameters whose gradient differs most between packed and single sequences, and by how much.

    A kind is the parameters with the same name in all layers. The difference is a norm, relative to the norm of the
    gradient without packing; infinite if the gradient of packed sequences is not finite. An empty name and 0 are
    returned if there is nothing to compare. Sequences of more than `LONGEST_TRAINED` tokens are left out. If the names
    show which parameters belong to attention, only these are compared: rounding may send a token to another expert,
    which changes the gradients of both experts. A collective.
    """
    kinds: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(name)
    if not kinds:
        return "", 0.0
    kinds = {kind: names for kind, names in kinds.items() if "att" in kind} or kinds
    compared = {name for names in kinds.values() for name in names}
    trained = [ids for ids in sequences if len(ids) <= LONGEST_TRAINED]
    packed, _ = _gradient(model, [trained], compared)
    with _own_attention(model):
        alone, whole_norm = _gradient(model, [[ids] for ids in trained], compared)
    gaps = [("", 0.0)]
    for kind, names in kinds.items():
        norm = max(global_norm([alone[name] for name in names]), MIN_GRADIENT_SHARE * whole_norm)
        error = global_norm([packed[name] - alone[name] for name in names])
        # If the gradient of single sequences is 0 or not finite, there is nothing to compare with.
        if 0 < norm < math.inf:
            gaps.append((kind, error / norm if math.isfinite(error) else math.inf))
    return max(gaps, key=lambda gap: gap[1])


@torch.enable_grad()
def _gradient(
    model: PreTrainedModel, rows: Sequence[Sequence[Tensor]], names: Container[str]
) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of the parameters `names`, by name, and the norm of the gradient of all parameters.

    The loss is over all tokens of `rows`; each row is a list of sequences. The model keeps no gradient, because memory
    may not suffice for the gradients of both comparisons. A collective.
    """
    # As in a loss with advantages of both signs, log-probs of tokens with an odd id get a minus sign.
    for sequences in rows:
        logp_T = _logprobs(model, sequences)
        sign_T = torch.cat([1.0 - 2.0 * (ids[1:] % 2) for ids in sequences])
        (logp_T * sign_T).sum().backward()
    whole_norm = global_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if name in names
    }
    model.zero_grad()
    reshard(model)
    return found, whole_norm


def _first_difference(model: PreTrainedModel, sequences: Sequence[Tensor]) -> str | None:
    """Return a phrase that names the first module whose output differs for packed sequences, while its input does not.

    An inner module returns before the module that contains it, so the phrase names the smallest such module. A module
    that is called several times in a pass is left out, because its calls cannot be assigned to sequences. None if no
    module differs. The phrase is for the warning that explains why a model is not packed.
    """
    packed = _trace(model, lambda: _packed_logprobs(model, sequences))
    alone = _trace(model, lambda: _alone_logprobs(model, sequences))
    kinds = {name: class_name(module) for name, module in model.named_modules()}
    for name, [(input_, output)] in ((name, calls) for name, calls in packed.items() if len(calls) == 1):
        calls = alone.get(name, [])
        if len(calls) != len(sequences):
            continue
        if _equal(input_, [one for one, _ in calls]) and not _equal(output, [one for _, one in calls]):
            parent = kinds.get(name.rpartition(".")[0], "")
            return f"{name}, a {kinds[name]} in a {parent}"
    return None


def _trace(model: PreTrainedModel, run: Callable[[], Any]) -> dict[str, list[tuple[Tensor | None, Tensor | None]]]:
    """Return, by the name of a module, an (input, output) pair for each call of it during `run`.

    Of each input and output only the first floating-point tensor is kept, as a copy; None if there is none. The names
    are in the order in which the first calls ended, so inner modules come before outer modules. The model itself is
    left out.
    """
    seen: dict[str, list[tuple[Tensor | None, Tensor | None]]] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen.setdefault(name, []).append((_tensor((*args, *kwargs.values())), _tensor(output)))

        return hook

    hooks = [
        module.register_forward_hook(remember(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        # A compiled layer may ignore hooks that its parts get later, and may go on to call hooks that were removed.
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _tensor(value: Any) -> Tensor | None:
    """Return a copy of the first floating-point tensor among a module's inputs or outputs; None if there is none."""
    values = value if isinstance(value, tuple | list) else (value,)
    found = next((one for one in values if isinstance(one, Tensor) and one.is_floating_point()), None)
    return None if found is None else found.detach().float().clone()


def _equal(packed: Tensor | None, alone: Sequence[Tensor | None]) -> bool:
    """Return True if a packed tensor equals the tensors of single sequences, concatenated along the token dimension.

    Tensors whose shapes do not allow a comparison, and missing ones (None), count as equal, since they show nothing.
    """
    parts = [one for one in alone if one is not None]
    if packed is None or len(parts) != len(alone):
        return True
    for dim in range(packed.dim()):
        lengths = [part.shape[dim] for part in parts if part.dim() == packed.dim()]
        others = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts}
        # In the token dimension, the lengths add up. The tolerances cover rounding; a leak makes larger differences.
        if sum(lengths) == packed.shape[dim] and others == {packed.shape[:dim] + packed.shape[dim + 1 :]}:
            whole = torch.cat(parts, dim)
            return bool(torch.allclose(packed, whole, rtol=1e-2, atol=1e-3 * float(whole.abs().max())))
    return True
