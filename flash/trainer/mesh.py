"""Arranges the trainer ranks in grids, and reduces or gathers numbers over the ranks that hold different samples.

Neighbouring ranks form a tensor group, which divides each layer's weights. Neighbouring tensor groups form a context
group, which divides the tokens of a micro-batch. So the ranks of a context group are given the same samples, a *data
shard*, and make the same calls. The ranks with the same number within their context groups form a *column*, which has
one rank per data shard. Sums over samples are reduced over a column, so that no sample counts twice, and every column
gets the same result. Code that needs the number of processes asks torch.

FSDP shards parameters over the ranks with the same number within their tensor groups, so the ranks of a context group
also hold different parts of the gradient. Experts have a grid of their own: neighbouring ranks hold different experts,
and FSDP shards each expert over the ranks that hold it.

`flash.trainer.step.Trainer` makes the mesh once, with `trainer_mesh`. Every method that is a collective must be called
by all ranks of its group in the same order: a rank that leaves out a call makes the others wait until the timeout.

Shape legend: W = data shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from flash.config.tree import ParallelConfig
from flash.errors import ContractError

T = TypeVar("T")

UNDIVIDED = ParallelConfig()
"""Layout in which FSDP shards over all ranks, and nothing else is divided."""


def process_group_backend(*, cuda: bool, offloads: bool) -> str:
    """Return torch's name for the backend of the default process group, which each rank opens when it starts.

    `cuda` is True if the ranks compute on GPUs. `offloads` is True if weights stay on the host between passes. The
    norms of the gradients are then reduced on the host, by gloo, because nccl reduces only on GPUs.
    """
    return ("cpu:gloo,cuda:nccl" if offloads else "nccl") if cuda else "gloo"


@dataclass(frozen=True)
class TrainerMesh:
    """Groups of ranks that this rank belongs to, and collectives over data shards. The module's docstring explains the
    groups."""

    device: torch.device
    """Device on which this rank computes."""
    parallel: ParallelConfig
    """Sizes of the tensor, context and expert groups."""
    fsdp: DeviceMesh
    """Ranks over which parameters are sharded, this rank among them."""
    data: dist.ProcessGroup
    """Column of this rank: one rank per data shard."""
    tensor: DeviceMesh | None = None
    """Tensor group of this rank; None if the group has one rank."""
    context: DeviceMesh | None = None
    """Ranks of this rank's context group that have the same number within their tensor groups as this rank. None if a
    context group has one tensor group."""
    experts: DeviceMesh | None = None
    """All ranks as a grid of `fsdp` by `expert`; None if each rank has all experts."""
    offloads: bool = False
    """True if the weights of all models, their gradients and moments stay on the host between passes."""

    @property
    def offload_policy(self) -> OffloadPolicy:
        """FSDP's setting that decides whether shards stay on the host between passes."""
        # A copy from memory that is not pinned takes two steps, and passes would wait for it.
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offloads else OffloadPolicy()

    @property
    def weight_device(self) -> str:
        """Type of the device on which a rank keeps its shards of the weights: "cpu" or "cuda"."""
        return "cpu" if self.offloads else self.device.type

    @property
    def data_shards(self) -> int:
        """W, the number of parts into which the hub divides a batch."""
        return self.fsdp.size() // self.parallel.context

    @property
    def data_shard(self) -> int:
        """Number of the data shard that this rank holds."""
        return self.fsdp.get_local_rank() // self.parallel.context

    @property
    def leads_shard(self) -> bool:
        """True for the first of the ranks with the same samples: it alone writes files of the data shard, and its
        arithmetic is counted for all of these ranks."""
        return dist.get_rank() % self.parallel.ranks_per_shard == 0

    def gather_rows(self, row: Tensor) -> Tensor:
        """Gather one row of numbers, [N], of each data shard into [W, N] on all ranks. A collective."""
        row = row.to(self.device)
        rows = [torch.empty_like(row) for _ in range(self.data_shards)]
        dist.all_gather(rows, row, group=self.data)
        return torch.stack(rows)

    def gather_ragged(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather a matrix of each data shard, side by side, on all ranks. A collective.

        Data shard w gives `values` of shape [R, counts[w]]. The result is [R, sum of counts], with the columns in the
        order of the data shards. All ranks pass the same `counts`.
        """
        widest = max(counts)
        padded = values.new_zeros(len(values), widest)
        padded[:, : values.shape[1]] = values
        rows = self.gather_rows(padded.flatten()).view(len(counts), len(values), widest)
        return torch.cat([row[:, :count] for row, count in zip(rows, counts, strict=True)], dim=1)

    def gather_sums(self, rows: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Add up rows of numbers with the same name over all data shards. A collective.

        Unlike with `gather_rows`, a data shard may lack some of the names. This method is slower, because it sends the
        names, too. The result is equal on all ranks and sorted by name.
        """
        gathered: list[Mapping[str, Sequence[float]]] = [{}] * self.data_shards
        dist.all_gather_object(gathered, rows, group=self.data)
        names = sorted({name for one in gathered for name in one})
        return {
            name: [sum(column) for column in zip(*(one[name] for one in gathered if name in one), strict=True)]
            for name in names
        }

    def gather_objects(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Return the picklable objects of each data shard, in the order of the shards, on data shard 0.

        Other data shards get empty sequences. A collective if there are several data shards.
        """
        if self.data_shards == 1:
            return [values]
        gathered: list[Sequence[T]] = [()] * self.data_shards
        dist.gather_object(values, gathered if self.data_shard == 0 else None, group=self.data, group_dst=0)
        return gathered

    def reduce_sum(self, sums: Tensor) -> None:
        """Add up a tensor over all data shards, in place. A collective."""
        dist.all_reduce(sums, group=self.data)

    def raise_on_all_ranks(self, fault: str, flags_W: Tensor, refused: str) -> None:
        """Raise on every rank if any data shard has a fault.

        A rank that raised alone would leave the others waiting in their next collective.

        Args:
            fault: the fault that this rank found; empty if it found none.
            flags_W: [W], gathered from all data shards: not 0 where a shard has a fault.
            refused: phrase that names the refused data, for the error of a rank that has no fault itself.

        Raises:
            ContractError: a data shard has a fault. The message is this rank's own fault or, if this rank has none,
                names the ranks of the faulty shards.
        """
        size = self.parallel.ranks_per_shard
        shards: list[int] = flags_W.nonzero().flatten().tolist()
        if shards:
            ranks = [rank for shard in shards for rank in range(shard * size, (shard + 1) * size)]
            raise ContractError(fault or f"trainer ranks {ranks} refused {refused}")


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`, without waiting for work that a GPU still has to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model computes.

    With offloading, sharded weights are on the host, but this is still the device to which they are gathered.
    """
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def gather_full(part: DTensor) -> Tensor:
    """Return the full tensor of a sharded tensor. A collective.

    The result is on the device on which the rank computes, even if the shards are on the host.
    """
    here: Any = part.to(part.device_mesh.device_type)
    return here.full_tensor()


def trainer_mesh(
    device: Literal["cpu", "cuda"],
    parallel: ParallelConfig = UNDIVIDED,
    seconds: float | None = None,
    *,
    offloads: bool = False,
) -> TrainerMesh:
    """Arrange all ranks of the default process group in the grids of a layout. A collective.

    Args:
        device: type of the device that the ranks compute on.
        parallel: sizes of the tensor, context and expert groups.
        seconds: timeout of collectives in which only some of the ranks take part; None uses torch's default.
        offloads: True keeps weights on the host between passes.
    """
    world, tensor, context, where = dist.get_world_size(), parallel.tensor, parallel.context, torch.device(device)
    timeout = None if seconds is None else timedelta(seconds=seconds)

    def group(ranks: Tensor) -> dist.ProcessGroup:
        # Make a group for each row of `ranks`, and return the group of this rank. `init_device_mesh` would make groups
        # without our timeout.
        made: tuple[Any, Any] = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        return made[0]

    def grid(inner: int, name: str) -> DeviceMesh:
        # Arrange all ranks in a grid of `fsdp` by `name`, with `inner` neighbouring ranks in each row.
        ranks = torch.arange(world).view(-1, inner)
        groups = [group(ranks.T), group(ranks)]
        return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=("fsdp", name))

    # Making a group is a collective of all ranks, so every rank makes all groups in this order, even groups of other
    # ranks.
    # 1. Make tensor groups, and across them the groups of ranks over which FSDP shards.
    if tensor == 1:
        fsdp, of_tensor = init_device_mesh(device, (world,), mesh_dim_names=("fsdp",)), None
    else:
        whole = grid(tensor, "tensor")
        fsdp, of_tensor = whole["fsdp"], whole["tensor"]
    # 2. Make columns, which have one rank per data shard, and context groups.
    data, of_context = fsdp.get_group(), None
    if context > 1:
        cube = torch.arange(world).view(-1, context, tensor)
        data = group(cube.flatten(1).T)
        of_context = DeviceMesh.from_group(group(cube.transpose(1, 2).flatten(0, 1)), device)
    # 3. Make expert groups, which are independent of the groups above.
    experts = grid(parallel.expert, "expert") if parallel.expert > 1 else None
    return TrainerMesh(where, parallel, fsdp, data, of_tensor, of_context, experts, offloads)
