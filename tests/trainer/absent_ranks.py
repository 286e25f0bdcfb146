"""Rank of a layout whose other ranks do not exist: takes a step, and saves the collectives that it called.

Its tensors have data, so that sizes that follow from the data are known. Data from the other ranks is arbitrary.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash.config.tree import Config
from flash.foreign.torch import absent_ranks
from flash.trainer.mesh import TrainerMesh, trainer_mesh
from flash.trainer.model.adapters import empty_policy, engine_tensors
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import empty_model, named_full_tensors, shard_model
from flash.trainer.optimizer import global_norm, make_optimizer
from flash.trainer.packing import in_one_row
from flash.trainer.step import Trainer
from tests.trainer.parallel_ranks import TABLES
from tests.trainer.trainer_cases import aged_shard, local, make_config, make_shard, part_of

# Tables of the configuration: adapters, Muon, and activations that are computed again in the backward pass.
LORA, MUON = {"lora": {"rank": 2}}, {"train": {"optimizer": "muon"}}
AGAIN = {"train": {"activation_checkpointing": True}}
ALL = {"tensor": 2, "context": 4, "expert": 16}
"""Sizes of groups in a layout that divides layers, rows and experts."""


class Case(NamedTuple):
    """A layout of a number of ranks, and the ranks of it that are run."""

    ranks: int
    """Number of ranks of the layout."""
    kind: str
    """Kind of the model, the name of its folder."""
    parallel: dict[str, int]
    """Table `[parallel]`: sizes of the groups of ranks."""
    tables: dict[str, Any]
    """Tables of the configuration beside `[parallel]`."""
    some: tuple[int, ...] = (0, 1, 9, 63)
    """Ranks that are run: the first, its neighbour, another, and the last, which may have no part of a small weight."""


CASES = {
    "fsdp": Case(64, "qwen3", {}, AGAIN),
    "adapters": Case(64, "qwen3_moe", {}, LORA | AGAIN),
    "tensor": Case(64, "qwen3", {"tensor": 4}, MUON),
    "context": Case(64, "qwen3", {"context": 4}, MUON),
    "tensor and context": Case(64, "qwen3", {"tensor": 2, "context": 4}, AGAIN),
    "expert": Case(64, "qwen3_moe", {"expert": 8}, AGAIN),
    "experts over rows": Case(64, "qwen3_moe", {"context": 2, "expert": 8}, MUON),
    "all": Case(64, "qwen3_moe", ALL, AGAIN),
    "fsdp of 512": Case(512, "qwen3", {}, AGAIN, some=(0, 511)),
    "all of 512": Case(512, "qwen3_moe", ALL, MUON, some=(0, 1, 9, 511)),
}
WHOLE = {
    "experts over tensor groups": Case(512, "qwen3_moe", {"tensor": 2, "expert": 8}, MUON),
    "adapters": Case(64, "qwen3", {}, LORA),
}
"""Layouts of which the first rank takes a step with every part that a step can have."""


class Told(NamedTuple):
    """Call of a collective."""

    name: str
    """Name of the torch operation."""
    group: tuple[int, ...]
    """Ranks that take part."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors in the call, in order; empty if they follow from the data."""


class Listening(TorchDispatchMode):
    """Records the collectives that are called while it is active."""

    def __init__(self, experts: tuple[int, ...]) -> None:
        """Begin without calls. `experts` are the ranks that exchange tokens for experts; empty without such ranks."""
        super().__init__()
        self._experts = experts
        self.heard: list[Told] = []
        """Calls so far, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch, and record it if it is a collective."""
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            given = tree_leaves((args, kwargs or {}))
            tensors = [one for one in given if isinstance(one, torch.Tensor)]
            group = next(members for one in reversed(given) if (members := _members(one)) is not None)
            # Each rank sends tokens to the experts that the tokens chose, so these sizes differ between ranks.
            loose = "all_to_all" in name or "alltoall" in name
            sizes = () if loose and group == self._experts else tuple(tuple(one.shape) for one in tensors)
            self.heard.append(Told(name, group, sizes))
        return func(*args, **(kwargs or {}))


def _members(given: Any) -> tuple[int, ...] | None:
    """Return the ranks of a process group, given the group or its name; None for other values."""
    c10d: Any = dist.distributed_c10d
    if isinstance(given, str):
        given = next((one for one in c10d._world.pg_map if one.group_name == given), None)
    elif isinstance(given, torch.ScriptObject) and "ProcessGroup" in str(given._type()):
        given = ProcessGroup.unbox(given)
    return tuple(dist.get_process_group_ranks(given)) if isinstance(given, ProcessGroup) else None


class Seen(NamedTuple):
    """Results of one rank."""

    groups: dict[str, tuple[int, ...]]
    """Ranks of each group of this rank's mesh, by name."""
    heard: list[Told]
    """Collectives that the rank called, in order."""
    ungiven: list[str]
    """Names of trained weights without a gradient of the weight's own shape."""
    published: dict[str, tuple[int, ...]]
    """Shape of each published weight, by name."""
    expected: dict[str, tuple[int, ...]]
    """Shapes of the published weights in the model that is not divided."""


def configured(folder: Path, case: Case, **tables: Any) -> Config:
    """Return the configuration of a case."""
    both = {name: tables.get(name, {}) | case.tables.get(name, {}) for name in tables | case.tables}
    return make_config(folder / case.kind, **both | {"parallel": case.parallel})


def groups_of(mesh: TrainerMesh) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group of the rank's mesh."""
    found = {"fsdp": mesh.fsdp.get_group(), "data": mesh.data}
    if mesh.tensor is not None:
        found["tensor"] = mesh.tensor.get_group()
    if mesh.context is not None:
        found["context"] = mesh.context.get_group()
    if mesh.experts is not None:
        found |= {"expert": mesh.experts.get_group("expert"), "like experts": mesh.experts.get_group("fsdp")}
    return {name: tuple(dist.get_process_group_ranks(group)) for name, group in found.items()}


def step(folder: Path, case: Case, rank: int) -> Seen:
    """Run a forward and a backward pass and an update on one rank, and gather the weights of a version.

    The other ranks do not exist: their parts of a collective's result are arbitrary.
    """
    config = configured(folder, case, model={"dtype": "bfloat16"})
    with absent_ranks(case.ranks, rank):
        mesh = trainer_mesh("cpu", config.parallel)
        recompute = config.train.activation_checkpointing
        model = shard_model(empty_policy(config), mesh, config.model, recompute=recompute).to_empty(device="cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data.fill_(0.01)
        optimizer = make_optimizer(model, config.train)
        groups = groups_of(mesh)
        packed = in_one_row(np.split(np.arange(60) % 40, [9, 30]))
        before_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
        with Listening(groups.get("expert", ())) as listening:
            token_logprobs(model, packed, before_T, packed.input_P[before_T + 1]).logp_T.sum().backward()
            trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
            ungiven = [
                name
                for name, one in trained.items()
                if one.grad is None or local(one.grad).shape != local(one).shape or local(one.grad).dtype != one.dtype
            ]
            global_norm([one.grad for one in trained.values() if one.grad is not None])
            optimizer.step()
            published = {name: tuple(tensor.shape) for name, tensor in named_full_tensors(model)}
            list(engine_tensors(model, config.lora))
    whole = empty_model(config.model) if config.lora is None else empty_policy(config)
    expected = {name: tuple(one.shape) for name, one in whole.named_parameters() if one.requires_grad}
    return Seen(groups, listening.heard, ungiven, published, expected)


def whole_step(folder: Path, case: Case) -> dict[str, float]:
    """Take a step of a trainer. Every data shard has the same data."""
    config = configured(folder, case, **TABLES | ({"critic": {}} if case.tables is LORA else {}))
    with absent_ranks(case.ranks):
        trainer = Trainer(config)
        shard, shards = aged_shard(prompt=8), trainer.mesh.data_shards
        trainer.version = shard.step
        some = [sample.trajectory for sample in shard.samples[:2]] * shards
        return trainer.train_step(part_of(make_shard(some, step=shard.step, min_version=shard.min_version), [0, 1]))


def main(folder: Path, name: str, index: int) -> None:
    """Run the rank number `index` of `Case.some` in the case `name`, and save its results to `folder`.

    Each rank needs its own process, because torch keeps meshes after their process group has ended.
    """
    torch.set_num_threads(1)
    case = CASES[name]
    torch.save(step(folder, case, case.some[index]), folder / f"{name}-{index}.pt")


def main_whole(folder: Path, index: int) -> None:
    """Run the first rank of case number `index` of `WHOLE`, and save its metrics to `folder`."""
    torch.set_num_threads(1)
    torch.save(whole_step(folder, [*WHOLE.values()][index]), folder / f"whole-{index}.pt")
