"""What the trainer ranks tell each other about a batch: small tensors, gathered so that all ranks see the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flash.errors import ContractError

T = TypeVar("T")


def gather_rows(row: Tensor) -> Tensor:
    """[N] of each of W ranks to [W, N] on all."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def gather_ragged(values: Tensor, counts: Sequence[int]) -> Tensor:
    """[R, N] of each rank, where N is this rank's entry of `counts`, to [R, sum of counts] on all, in rank order."""
    widest = max(counts)
    padded = values.new_zeros(len(values), widest)
    padded[:, : values.shape[1]] = values
    rows = gather_rows(padded.flatten()).view(len(counts), len(values), widest)
    return torch.cat([row[:, :count] for row, count in zip(rows, counts, strict=True)], dim=1)


def gather_sums(rows: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Rows of numbers by name, added over all ranks, in the order of the names; a rank may lack some."""
    gathered: list[Mapping[str, Sequence[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    names = sorted({name for one in gathered for name in one})
    return {
        name: [sum(column) for column in zip(*(one[name] for one in gathered if name in one), strict=True)]
        for name in names
    }


def gather_objects(values: Sequence[T]) -> list[Sequence[T]]:
    """Any objects that can be pickled, of each rank in rank order, on rank 0; none on the others."""
    if dist.get_world_size() == 1:
        return [values]
    gathered: list[Sequence[T]] = [()] * dist.get_world_size()
    dist.gather_object(values, gathered if dist.get_rank() == 0 else None)
    return gathered


def raise_together(fault: str, told: Tensor, what: str) -> None:
    """Raise on every rank where any has a fault: the others would wait in the next collective for the one that left.

    `told` is [W], non-zero where a rank has one, as gathered.

    Raises:
        ContractError: this rank's `fault`, or which ranks refused `what`.
    """
    ranks = told.nonzero().flatten().tolist()
    if ranks:
        raise ContractError(fault or f"trainer ranks {ranks} refused {what}")
