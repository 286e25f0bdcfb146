"""The trainer ranks as grids, and what those with different samples tell each other about a batch.

Neighbouring ranks are a tensor group, neighbouring tensor groups a context group: they are given the same samples and
make the same calls. The ranks at one place of all context groups are a column, and hold one data shard each. What
counts samples goes over a column, so that nothing is counted twice; each column then says the same. What counts
processes asks torch for ranks.

FSDP shards over the ranks at one place of all tensor groups: those of a context group, too, each have a part of the
gradient. Experts lie in a grid of their own: neighbouring ranks hold different ones, and FSDP shards over the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from flash.config.tree import ParallelConfig
from flash.errors import ContractError

T = TypeVar("T")

UNDIVIDED = ParallelConfig()
"""FSDP over all ranks."""


def backend(*, cuda: bool, offloads: bool) -> str:
    """Of the ranks' process group; `offloads`: whether weights wait on the host, whose norms are added up there."""
    return ("cpu:gloo,cuda:nccl" if offloads else "nccl") if cuda else "gloo"


@dataclass(frozen=True)
class TrainerMesh:
    """See the module's docstring. W = data shards."""

    device: torch.device
    parallel: ParallelConfig
    fsdp: DeviceMesh
    """The ranks that parameters are sharded over, this one among them."""
    data: dist.ProcessGroup
    """The column of this rank."""
    tensor: DeviceMesh | None = None
    """Its tensor group; None where it is alone in it."""
    context: DeviceMesh | None = None
    """Its place in all tensor groups of its context group; None where there is one."""
    experts: DeviceMesh | None = None
    """All ranks as `fsdp` by `expert`; None where each has all experts."""
    offloads: bool = False
    """Whether weights of all models, their gradients and moments, are on the host between passes."""

    @property
    def offload(self) -> OffloadPolicy:
        """What FSDP knows it as."""
        # Memory that is not pinned would be copied twice, and passes wait for it.
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offloads else OffloadPolicy()

    @property
    def home(self) -> str:
        """The kind of device on which each rank keeps its part of weights."""
        return "cpu" if self.offloads else self.device.type

    @property
    def data_shards(self) -> int:
        """W: into how many parts a batch is dealt."""
        return self.fsdp.size() // self.parallel.context

    @property
    def data_shard(self) -> int:
        """Which of them this rank has."""
        return self.fsdp.get_local_rank() // self.parallel.context

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those with the same samples."""
        return dist.get_rank() % self.parallel.ranks_per_shard == 0

    def gather_rows(self, row: Tensor) -> Tensor:
        """[N] of each data shard to [W, N] on all."""
        row = row.to(self.device)
        rows = [torch.empty_like(row) for _ in range(self.data_shards)]
        dist.all_gather(rows, row, group=self.data)
        return torch.stack(rows)

    def gather_ragged(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """[R, N] of each data shard, where N is its entry of `counts`, to [R, sum of counts] on all, in their order."""
        widest = max(counts)
        padded = values.new_zeros(len(values), widest)
        padded[:, : values.shape[1]] = values
        rows = self.gather_rows(padded.flatten()).view(len(counts), len(values), widest)
        return torch.cat([row[:, :count] for row, count in zip(rows, counts, strict=True)], dim=1)

    def gather_sums(self, rows: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Rows of numbers by name, added over all data shards, in the order of the names; one may lack some."""
        gathered: list[Mapping[str, Sequence[float]]] = [{}] * self.data_shards
        dist.all_gather_object(gathered, rows, group=self.data)
        names = sorted({name for one in gathered for name in one})
        return {
            name: [sum(column) for column in zip(*(one[name] for one in gathered if name in one), strict=True)]
            for name in names
        }

    def gather_objects(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Any objects that can be pickled, of each data shard in order, where the first one is; none elsewhere."""
        if self.data_shards == 1:
            return [values]
        gathered: list[Sequence[T]] = [()] * self.data_shards
        dist.gather_object(values, gathered if self.data_shard == 0 else None, group=self.data, group_dst=0)
        return gathered

    def add(self, sums: Tensor) -> None:
        """Add up over all data shards, in place."""
        dist.all_reduce(sums, group=self.data)


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the same numbers where they are needed; without a wait for what a GPU has yet to do before."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def gathered(part: DTensor) -> Tensor:
    """All of a tensor that ranks have parts of, on their device, also where the parts are on the host."""
    here: Any = part.to(part.device_mesh.device_type)
    return here.full_tensor()


def trainer_mesh(
    device: Literal["cpu", "cuda"],
    parallel: ParallelConfig = UNDIVIDED,
    seconds: float | None = None,
    *,
    offloads: bool = False,
) -> TrainerMesh:
    """The grids of all ranks of the default process group.

    `seconds` bounds a collective of a part of them; None: as long as torch has it. `offloads`: weights are on the host.
    """
    world, tensor, context, where = dist.get_world_size(), parallel.tensor, parallel.context, torch.device(device)
    timeout = None if seconds is None else timedelta(seconds=seconds)

    def group(ranks: Tensor) -> dist.ProcessGroup:
        # Made here: those that `init_device_mesh` makes have a timeout of their own.
        made: tuple[Any, Any] = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        return made[0]

    def grid(inner: int, name: str) -> DeviceMesh:
        ranks = torch.arange(world).view(-1, inner)
        groups = [group(ranks.T), group(ranks)]
        return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=("fsdp", name))

    if tensor == 1:
        fsdp, of_tensor = init_device_mesh(device, (world,), mesh_dim_names=("fsdp",)), None
    else:
        whole = grid(tensor, "tensor")
        fsdp, of_tensor = whole["fsdp"], whole["tensor"]
    data, of_context = fsdp.get_group(), None
    if context > 1:
        cube = torch.arange(world).view(-1, context, tensor)
        data = group(cube.flatten(1).T)
        of_context = DeviceMesh.from_group(group(cube.transpose(1, 2).flatten(0, 1)), device)
    experts = grid(parallel.expert, "expert") if parallel.expert > 1 else None
    return TrainerMesh(where, parallel, fsdp, data, of_tensor, of_context, experts, offloads)


def raise_together(fault: str, told: Tensor, what: str) -> None:
    """Raise on every rank where any has a fault: the others would wait in the next collective for the one that left.

    `told` is [W], non-zero where a data shard has one, as gathered.

    Raises:
        ContractError: this rank's `fault`, or which data shards refused `what`.
    """
    shards = told.nonzero().flatten().tolist()
    if shards:
        raise ContractError(fault or f"trainer ranks {shards} refused {what}")
