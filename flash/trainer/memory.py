"""What a trainer rank needs in memory: its own step, on tensors without data, among ranks that are not there.

The model is made, divided, sharded and run by the code that trains it; torch counts what is alive at a time. So what
is said of a layout is what the layout does, of 512 ranks as of one. Activations are those of the processor's kernels;
a GPU's fused ones keep less. Divided experts are given as many tokens each. Where all decoder layers are alike, a few
are run, and the others take what the last took.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from flash.config.learning import TrainConfig
from flash.config.tree import Config, ModelConfig
from flash.foreign.torch import absent_ranks, counted
from flash.foreign.transformers import layer_count, layer_types
from flash.trainer.mesh import TrainerMesh, trainer_mesh
from flash.trainer.model.adapters import empty_policy
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import Recompute, empty_model, recompute_mode, shard_model
from flash.trainer.model.output_layer import KeptSets
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.model.prefixes import in_one_row
from flash.trainer.objective import make_objective, resolve_method
from flash.trainer.optimizer import make_optimizer

FEW = 3
"""Decoder layers that are run: the first differs, as what it is given needs no gradient of its own."""
ABSENT = "meta"
"""The device that stands for the host's memory: what is there is not counted with the rank's."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one trainer rank, at the moment of a step when they are most."""

    parameters: int
    """Of the whole policy: a number, no bytes."""
    weights: int
    """This rank's part: float32, but for a base under adapters."""
    gradients: int
    """Of what is trained."""
    moments: int
    """Where they are not on the host."""
    others: int
    """Critics with their gradients and moments, reference, teacher, an average of the weights: this rank's parts."""
    at_work: int
    """Gathered layers, activations and logits of one micro-batch, of the policy."""
    loading: int
    """When the run begins: a base of adapters is there in float32, too."""
    host: int
    """In the host's memory, by `train.offload`."""

    @property
    def total(self) -> int:
        """The most that is on the device."""
        return max(self.weights + self.gradients + self.moments + self.others + self.at_work, self.loading)


def rank_memory(config: Config, ranks: int, few: int = FEW) -> RankMemory:
    """Of one of so many trainer ranks, whose micro-batch is as full as it may be with the longest sequences.

    Makes and leaves a default process group: there may be none. Needs `config.json` of the model, no weights.

    Raises:
        ConfigError: the model cannot be divided or trained.
    """
    with absent_ranks(ranks):
        mesh = trainer_mesh("cpu", config.parallel, offloads="weights" in config.train.offload)
        policy = _policy(config, mesh)
        moments = _moments_of(policy, config.train)
        weights, trained = _bytes(policy), _bytes(policy, trained=True)
        if not takes_packed_rows(policy):
            # Each sequence is a micro-batch.
            longest = min(config.train.max_tokens_per_microbatch, config.model.max_length)
            train = msgspec.structs.replace(config.train, max_tokens_per_microbatch=longest)
            config = msgspec.structs.replace(config, train=train)
        at_work = _at_work(config, mesh, policy, few)
        others = _others(config, mesh)
        loading = weights
        if config.lora is not None and config.model.dtype != "float32":
            loading += _bytes(_made(config.model, config.model.path, mesh))
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    host = moments[1] + others[1] + _inputs(config, policy)
    if mesh.offloads:
        host += _bytes(policy, pinned=True) + _bytes(policy, trained=True, pinned=True) + moments[0] + others[0]
        return RankMemory(numbers, 0, 0, 0, 0, at_work, 0, host)
    return RankMemory(numbers, weights, trained, moments[0], others[0], at_work, loading, host)


def _inputs(config: Config, policy: PreTrainedModel) -> int:
    """Bytes of the inputs of all decoder layers, where they wait on the host."""
    if not isinstance(recompute_mode(config.train), str):
        return 0
    tokens = config.train.max_tokens_per_microbatch // config.parallel.context
    width = policy.config.get_text_config().hidden_size * getattr(torch, config.model.dtype).itemsize
    return layer_count(policy) * _pinned(tokens * width)


def _at_work(config: Config, mesh: TrainerMesh, policy: PreTrainedModel, few: int) -> int:
    """Bytes of a step beyond what the rank keeps."""
    layers = [
        module for module in policy.modules() if type(module).__name__.removeprefix("FSDP") in layer_types(policy)
    ]
    copied = 0
    if mesh.offloads:
        # From the host a layer's weights are copied as they are; one at a time, where they are cast then.
        at_once = sum if config.model.dtype == "float32" else max
        copied = max((at_once(sizes) for layer in layers if (sizes := _sizes(layer))), default=0)
    if (
        len({tuple(parameter.shape for parameter in layer.parameters()) for layer in layers}) > 1
        or len(layers) <= few + 1
    ):
        return _step(config, mesh, len(layers)) + copied
    one, other = (_step(config, mesh, count) for count in (few, few + 1))
    return one + (len(layers) - few) * (other - one) + copied


def _step(config: Config, mesh: TrainerMesh, layers: int) -> int:
    """The same with so many of the layers: most bytes from the second micro-batch of a step on."""
    tokens, longest = config.train.max_tokens_per_microbatch, config.model.max_length
    lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    # No two alike, which would be computed once.
    packed = in_one_row(np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))
    keep_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
    target_T = np.arange(len(keep_T))
    model = _policy(config, mesh, recompute=recompute_mode(config.train, ABSENT), layers=layers)
    with counted() as count:
        model.to_empty(device="cpu")
        # Moments, and gradients of a micro-batch before, are there when the one that is counted begins.
        optimizer = _moving(model, make_optimizer(model, config.train, ABSENT))
        result = token_logprobs(model, packed, keep_T, target_T, kept=_kept_sets(config, len(keep_T)))
        result.logp_T.sum().backward()
        optimizer.step()
        kept = _bytes(model) + _bytes(model, trained=True) + _moments(optimizer)[0]
    return max(count.most - kept, 0)


def _moving(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """After an update, with gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def _moments_of(model: nn.Module, train: TrainConfig) -> tuple[int, int]:
    """As `_moments`, of a model without memory."""
    with counted():
        model.to_empty(device="cpu")
        return _moments(_moving(model, make_optimizer(model, train, ABSENT)))


def _moments(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes on the device and on the host, of this rank's part."""
    found = [0, 0]
    for one in (one for state in optimizer.state.values() for one in state.values() if one.dim() > 0):
        part = getattr(one, "_local_tensor", one)
        away, size = part.device.type == ABSENT, part.numel() * part.element_size()
        found[away] += _pinned(size) if away else size
    return found[0], found[1]


def _pinned(size: int) -> int:
    """What so many bytes take of memory that GPUs read: torch makes blocks of powers of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _kept_sets(config: Config, tokens: int) -> KeptSets | None:
    """Of so many tokens, the most that each may have been drawn from."""
    most = config.sampling.top_k
    if not config.sampling.keeps:
        return None
    each, all_of = torch.full((tokens,), most), torch.zeros(tokens * most)
    return KeptSets(all_of.long(), all_of.double(), all_of.double(), each, each.cumsum(0) - each, most)


def _others(config: Config, mesh: TrainerMesh) -> tuple[int, int]:
    """Bytes of what a rank holds beside the policy, on the device and on the host."""
    method = resolve_method(config, make_objective(config.algorithm))
    device, host = 0, 0
    if method.proximal == "ewma":
        device += _bytes(_policy(config, mesh), trained=True)
    kl, teacher = config.algorithm.kl, config.algorithm.teacher
    frozen = [kl.reference or config.model.path] if kl is not None else []
    if config.lora is not None and frozen == [config.model.path]:
        frozen = []  # the policy without its adapters
    frozen += [teacher.path] if teacher is not None and teacher.path is not None else []
    device += sum(_bytes(_made(config.model, path, mesh), pinned=mesh.offloads) for path in frozen)
    if method.critics:
        assert config.critic is not None
        critic = _made(config.model, config.critic.path or config.model.path, mesh)
        moments = _moments_of(critic, msgspec.structs.replace(config.train, optimizer="adamw"))
        device += method.critics * (2 * _bytes(critic, pinned=mesh.offloads) + moments[0])
        host = method.critics * moments[1]
    return device, host


def _policy(
    config: Config, mesh: TrainerMesh, *, recompute: Recompute = False, layers: int | None = None
) -> PreTrainedModel:
    """Without memory."""
    return shard_model(empty_policy(config, layers), mesh, config.model, recompute=recompute)


def _made(model: ModelConfig, path: str, mesh: TrainerMesh) -> PreTrainedModel:
    """Without memory."""
    named = msgspec.structs.replace(model, path=path)
    return shard_model(empty_model(named), mesh, named)


def _bytes(model: nn.Module, *, trained: bool = False, pinned: bool = False) -> int:
    """Of this rank's part of all parameters, or of those that are trained; `pinned`: in memory that GPUs read."""
    sizes = _sizes(model, trained=trained)
    return sum(map(_pinned, sizes) if pinned else sizes)


def _sizes(model: nn.Module, *, trained: bool = False) -> list[int]:
    parts = [getattr(one, "_local_tensor", one) for one in model.parameters() if one.requires_grad or not trained]
    return [part.numel() * part.element_size() for part in parts]


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each GPU of an engine."""

    weights: int
    """In the dtype of the run."""
    token: float
    """Of the KV cache, for each token."""


def engine_memory(config: Config, parameters: int) -> EngineMemory:
    """Of an engine that serves a policy of so many parameters. Needs `config.json` of the model."""
    described = empty_model(config.model).config.get_text_config()
    size, split = getattr(torch, config.model.dtype).itemsize, config.engine.tensor_parallel
    heads = described.num_key_value_heads
    wide = getattr(described, "head_dim", None) or described.hidden_size // described.num_attention_heads
    # Where there are fewer heads than GPUs, each has one.
    token = 2 * described.num_hidden_layers * max(heads / split, 1) * wide * size
    return EngineMemory(parameters * size // split, token)
