"""Attention weights as numbers, from what a layer compares: block by block, so that never all of them exist.

Shape legend: H = heads of a layer, G = its heads of keys, B = rows of a block, C = columns that they may see, D = width
of a head, R = tokens whose rows are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.rhythm import IntArray

ROWS = 128
"""Rows whose attention weights exist at a time: with 32 heads and 8,192 columns these are 128 MiB in float32."""


Scratch = tuple[Tensor, Tensor]
"""[N] each: room that blocks use one after the other. Fresh memory of their size would cost more time than what is
computed in it."""


def attention_rows(
    query_HBD: Tensor,
    key_GCD: Tensor,
    row_B: Tensor,
    column_C: Tensor,
    scaling: float | None,
    window: int | None,
    *,
    ahead: int,
    scratch: Scratch,
) -> Tensor:
    """[H, B, C]: softmax over the columns that are at the row or before it, by less than the window.

    `row_B` and `column_C` are places in the sequence, ascending; the last `ahead` columns lie behind the first row. The
    answer lies in `scratch`, of H · B · C numbers at least, until that is used again.
    """
    heads, rows, width = query_HBD.shape
    groups, columns, _ = key_GCD.shape
    # Neighbouring heads share keys: their rows stand one below the other.
    query = query_HBD.reshape(groups, heads // groups * rows, width) * (width**-0.5 if scaling is None else scaling)
    scores, weights = (room[: heads * rows * columns].view(heads, rows, columns) for room in scratch)
    torch.bmm(query, key_GCD.transpose(1, 2), out=scores.view(*query.shape[:2], columns))
    late = slice(columns - ahead, columns)
    scores[..., late] += _without(row_B[:, None] < column_C[late], scores)
    if window is not None:
        scores += _without(row_B[:, None] - window >= column_C, scores)
    return torch.softmax(scores, -1, out=weights)


def _without(hidden_BC: Tensor, like: Tensor) -> Tensor:
    """To add to scores: faster than to fill those of each head."""
    return like.new_zeros(hidden_BC.shape).masked_fill_(hidden_BC, -torch.inf)


class Block(NamedTuple):
    """Rows whose attention weights exist at the same time."""

    rows: slice
    """Which of the R."""
    seen: slice
    """The places in the sequence that any of them sees."""
    ahead: int
    """How many of these lie behind the first row."""


def blocks(position_R: IntArray, window: int | None) -> list[Block]:
    """`ROWS` of the tokens at these places at a time, ascending; `window`: how many places each sees."""
    found: list[Block] = []
    for begin in range(0, len(position_R), ROWS):
        rows = slice(begin, min(begin + ROWS, len(position_R)))
        lowest, highest = int(position_R[rows.start]), int(position_R[rows.stop - 1])
        first = 0 if window is None else max(lowest - window + 1, 0)
        found.append(Block(rows, slice(first, highest + 1), highest - lowest))
    return found


def make_scratch(query: Tensor, wanted: Iterable[Block]) -> Scratch:
    """What `attention_rows` needs for a query of [H, .., D] and any of these blocks."""
    most = max(((one.rows.stop - one.rows.start) * (one.seen.stop - one.seen.start) for one in wanted), default=0)
    return query.new_empty(len(query) * most), query.new_empty(len(query) * most)
