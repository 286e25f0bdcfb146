"""The trainer ranks as a grid, and what those with different samples tell each other about a batch.

Each row of the grid is a tensor group: neighbouring ranks, which are given the same samples and make the same calls.
The ranks of a column hold one data shard each, and FSDP shards over them. What counts samples goes over a column, so
that nothing is counted twice; each column then says the same. What counts processes asks torch for ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flash.errors import ContractError

T = TypeVar("T")


@dataclass(frozen=True)
class TrainerMesh:
    """See the module's docstring. W = data shards."""

    device: torch.device
    fsdp: DeviceMesh
    """The column of this rank."""
    tensor: DeviceMesh | None
    """Its row; None where it is alone in it."""

    @property
    def data_shards(self) -> int:
        """W: into how many parts a batch is dealt."""
        return self.fsdp.size()

    @property
    def data_shard(self) -> int:
        """Which of them this rank has."""
        return self.fsdp.get_local_rank()

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its tensor group."""
        return self.tensor is None or self.tensor.get_local_rank() == 0

    def gather_rows(self, row: Tensor) -> Tensor:
        """[N] of each data shard to [W, N] on all."""
        row = row.to(self.device)
        rows = [torch.empty_like(row) for _ in range(self.data_shards)]
        dist.all_gather(rows, row, group=self.fsdp.get_group())
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
        dist.all_gather_object(gathered, rows, group=self.fsdp.get_group())
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
        dist.gather_object(values, gathered if self.data_shard == 0 else None, group=self.fsdp.get_group(), group_dst=0)
        return gathered

    def add(self, sums: Tensor) -> None:
        """Add up over all data shards, in place."""
        dist.all_reduce(sums, group=self.fsdp.get_group())


def trainer_mesh(device: Literal["cpu", "cuda"], tensor: int = 1, seconds: float | None = None) -> TrainerMesh:
    """The grid of all ranks of the default process group, in rows of `tensor`.

    `seconds` bounds a collective of a part of them; None: as long as torch has it.
    """
    world, where = dist.get_world_size(), torch.device(device)
    if tensor == 1:
        return TrainerMesh(where, init_device_mesh(device, (world,), mesh_dim_names=("fsdp",)), None)
    grid = torch.arange(world).view(-1, tensor)
    timeout = None if seconds is None else timedelta(seconds=seconds)
    # Made here: those that `init_device_mesh` makes have a timeout of their own.
    groups = [_mine(dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)) for ranks in (grid.T, grid)]
    mesh = DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=("fsdp", "tensor"))
    return TrainerMesh(where, mesh["fsdp"], mesh["tensor"])


def _mine(made: tuple[Any, Any]) -> dist.ProcessGroup:
    return made[0]


def raise_together(fault: str, told: Tensor, what: str) -> None:
    """Raise on every rank where any has a fault: the others would wait in the next collective for the one that left.

    `told` is [W], non-zero where a data shard has one, as gathered.

    Raises:
        ContractError: this rank's `fault`, or which data shards refused `what`.
    """
    shards = told.nonzero().flatten().tolist()
    if shards:
        raise ContractError(fault or f"trainer ranks {shards} refused {what}")
