"""Attention as numbers, from what a layer compares, block by block, so that never all of its weights exist: for those
who look on, and where scores are capped, which none of torch's kernels does.

Shape legend: H = heads of a layer, G = its heads of keys, B = rows of a block, C = columns that they may see, D = width
of a head, R = tokens whose rows are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.rhythm import IntArray
from flash.foreign import kernels
from flash.foreign.kernels import Attention

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


def attend(query: Tensor, key: Tensor, value: Tensor, how: Attention) -> tuple[Tensor, Tensor]:
    """As `flash.foreign.kernels.attend`, scores that are capped among them."""
    if how.cap is None:
        return kernels.attend(query, key, value, how)
    answer = query.new_empty(*query.shape[:3], value.shape[-1])
    weight = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for rows in _row_blocks(query):
        scores, _ = _capped_scores(query, key, how, how.cap, rows)
        weight[:, :, rows] = total = scores.logsumexp(-1)
        share = (scores - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp_().to(value.dtype)
        answer[:, :, rows] = _by_head(_by_group(share, value) @ value[:, :, : share.shape[-1]], query)
    return answer, weight


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, answer: Tensor, weight: Tensor, how: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """As `flash.foreign.kernels.attend_backward`, of the same."""
    if how.cap is None:
        return kernels.attend_backward(grad, query, key, value, answer, weight, how)
    wide = weight.dtype
    grad_query, grad_key, grad_value = (torch.zeros_like(one, dtype=wide) for one in (query, key, value))
    for rows in _row_blocks(query):
        scores, slope = _capped_scores(query, key, how, how.cap, rows)
        share = (scores - weight[:, :, rows, None]).exp_()
        seen = slice(0, share.shape[-1])
        grad_rows = _by_group(grad[:, :, rows], value)
        earned = (grad[:, :, rows].to(wide) * answer[:, :, rows]).sum(-1, keepdim=True)
        paid = _by_head(grad_rows @ value[:, :, seen].transpose(2, 3), query).to(wide) - earned
        along = _by_group((paid * share * slope * how.scale).to(query.dtype), key)
        grad_query[:, :, rows] = _by_head(along @ key[:, :, seen], query)
        grad_key[:, :, seen] += along.transpose(2, 3) @ _by_group(query[:, :, rows], key)
        grad_value[:, :, seen] += _by_group(share.to(value.dtype), value).transpose(2, 3) @ grad_rows
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _capped_scores(query: Tensor, key: Tensor, how: Attention, cap: float, rows: slice) -> tuple[Tensor, Tensor]:
    """[S, H, rows, K] of the keys that any of the rows may see: scores, and by how much they go up with what is
    capped; -inf where a row does not see a key."""
    last = rows.stop if how.causal and how.mask is None else key.shape[2]
    product = _by_head(_by_group(query[:, :, rows], key) @ key[:, :, :last].transpose(2, 3), query)
    scores = product.to(torch.promote_types(product.dtype, torch.float32)).mul_(how.scale / cap).tanh_()
    slope = 1 - scores.square()
    if how.mask is not None:
        hidden = ~how.mask[:, :, rows, :last]
    else:
        place = torch.arange(last, device=key.device)
        hidden = place > place[rows, None] if how.causal else place < 0
    return scores.mul_(cap).masked_fill_(hidden, -torch.inf), slope


def _row_blocks(query: Tensor) -> Iterable[slice]:
    return [slice(start, min(start + ROWS, query.shape[2])) for start in range(0, query.shape[2], ROWS)]


def _by_group(states: Tensor, key: Tensor) -> Tensor:
    """[S, H, Q, X] to [S, G, H / G · Q, X]: neighbouring heads share keys, their rows stand one below the other."""
    return states.reshape(len(states), key.shape[1], -1, states.shape[-1])


def _by_head(states: Tensor, query: Tensor) -> Tensor:
    """And back."""
    return states.reshape(len(states), query.shape[1], -1, states.shape[-1])
