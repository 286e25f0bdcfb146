"""Context parallelism: a packed row divided over the ranks of a context group (`parallel.context` in the
configuration).

A *row* has the tokens of the sequences of a micro-batch one after another. `flash.trainer.model.packed` divides rows
and exchanges heads in each layer; `flash.trainer.model.logprobs` and `flash.trainer.critic` gather the *answers*, such
as log-probs. Without a context group, all functions return their arguments unchanged.

Each rank holds a slice of the row for all work on single tokens. Attention needs all tokens, but each head can be
computed separately. So for attention the ranks exchange all heads of their slices for some heads of the whole row, and
exchange back afterwards (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509). The rank that holds a token computes
the token's log-prob, which is gathered to all ranks. After the forward pass, each rank continues as if it had the whole
row.

Conservation: only the rank that holds a slice has gradients for the tokens of the slice, while FSDP averages gradients
over the ranks. So the backward pass of the gathering multiplies each gradient by the number of ranks.

Shape legend: U = tokens of the row, L = tokens of a slice, C = ranks, H = heads, D = width of a head, Q = questions
(places of the row whose answer is wanted), M = questions in this rank's slice, X = numbers of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from flash.branches import Int64Array
from flash.foreign.torch import all_gather


@dataclass(frozen=True)
class RowSlice:
    """Part of a row that this rank holds. All slices have equal lengths, so the last ones may end with empty places."""

    tokens: int
    """U, the number of tokens of the whole row."""
    context: DeviceMesh | None = None
    """Ranks of the context group. None: this rank holds the whole row."""

    @property
    def ranks(self) -> int:
        """C, the number of ranks over which the row is divided."""
        return 1 if self.context is None else self.context.size()

    @property
    def length(self) -> int:
        """L, the number of places of each slice: U / C, rounded up."""
        return -(-self.tokens // self.ranks)

    @property
    def first(self) -> int:
        """Place in the row of the slice's first token."""
        return 0 if self.context is None else self.context.get_local_rank() * self.length

    def of(self, whole_U: Tensor) -> Tensor:
        """Return [L, …]: the slice of a tensor that has an entry for each token of the row; 0 in empty places."""
        if self.context is None:
            return whole_U
        part = whole_U[self.first : self.first + self.length]
        return torch.cat([part, part.new_zeros(self.length - len(part), *part.shape[1:])])

    def holds(self, row_Q: Int64Array) -> Int64Array:
        """Return [M]: the indices of the places in `row_Q` that lie in this rank's slice."""
        return np.flatnonzero(row_Q // self.length == self.first // self.length)

    def gather_answers(self, answer_MX: Tensor, row_Q: Int64Array) -> Tensor:
        """Return [Q, X]: the answers of all ranks for places in the row. A collective.

        Each rank passes the answers for the places that it `holds`, in their order. All ranks pass the same `row_Q`.
        """
        if self.context is None:
            return answer_MX
        # Each rank sends as many answers as the rank that has the most, so that all blocks have the same length. Then
        # the answer to question n is at `place_Q[n]`: after the blocks of earlier ranks, and after the earlier answers
        # of its own rank.
        rank_Q = row_Q // self.length
        count_C = np.bincount(rank_Q, minlength=self.ranks)
        most, order = int(count_C.max()), np.argsort(rank_Q, kind="stable")
        place_Q = np.empty_like(row_Q)
        place_Q[order] = np.arange(len(row_Q)) - np.repeat(np.cumsum(count_C) - count_C, count_C)
        place_Q += rank_Q * most
        padded = pad(answer_MX, (0, 0, 0, most - len(answer_MX)))
        gathered: Any = _AllGather.apply(padded, self.context.get_group())
        return gathered[torch.from_numpy(place_Q).to(answer_MX.device)]

    def to_heads(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Exchange [L, H, D] of each state for [U, H / C, D]. A collective.

        Each rank gets some heads of all tokens, which attention needs. If C does not divide H, which happens for keys
        and values, each head is repeated until C divides the number of heads.
        """
        if self.context is None:
            return list(states)
        # The states of all kinds travel in one exchange: block r has the heads for rank r.
        blocks: list[Tensor] = []
        for state in states:
            times = math.lcm(state.shape[1], self.ranks) // state.shape[1]
            repeated = state.repeat_interleave(times, 1) if times > 1 else state
            blocks.append(repeated.unflatten(1, (self.ranks, -1)).flatten(2).transpose(0, 1))
        widths = [block.shape[2] for block in blocks]
        exchanged: Any = _AllToAll.apply(torch.cat(blocks, -1), self.context.get_group())
        parts = exchanged.flatten(0, 1)[: self.tokens].split(widths, -1)
        return [part.unflatten(-1, (-1, state.shape[2])) for part, state in zip(parts, states, strict=True)]

    def own_heads(self, values_H: Tensor) -> Tensor:
        """Return [H / C]: the entries of the heads that this rank gets from `to_heads`, such as scores of sinks."""
        if self.context is None:
            return values_H
        repeated = values_H.repeat_interleave(math.lcm(len(values_H), self.ranks) // len(values_H))
        return repeated.chunk(self.ranks)[self.context.get_local_rank()]

    def to_tokens(self, states_UHD: Tensor) -> Tensor:
        """Exchange [U, H / C, D] for [L, H, D], the inverse of `to_heads`. A collective.

        Each rank gets the attention output of all heads for the tokens of its slice.
        """
        if self.context is None:
            return states_UHD
        padded = pad(states_UHD, (0, 0, 0, 0, 0, self.ranks * self.length - self.tokens))
        exchanged: Any = _AllToAll.apply(padded.unflatten(0, (self.ranks, -1)), self.context.get_group())
        return exchanged.transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Exchange [C, …]: block r goes to rank r, and block r of the result comes from rank r.

    In the backward pass, the gradients travel back in the same way.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _all_to_all(blocks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [C, …]: block r of the result is the block that rank r had for this rank. A collective."""
    contiguous = blocks.contiguous()
    received = torch.empty_like(contiguous)
    dist.all_to_all_single(received, contiguous, group=group)
    return received


class _AllGather(torch.autograd.Function):
    """Gather [M, X] of each rank to [C · M, X] on all ranks. M must be equal on all ranks.

    In the backward pass, each rank gets the gradient of its own part, times the number of ranks, because FSDP then
    divides by this number.
    """

    @staticmethod
    def forward(ctx: Any, answer_MX: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.count = group, len(answer_MX)
        gathered = answer_MX.new_empty(group.size() * ctx.count, answer_MX.shape[1])
        all_gather(gathered, answer_MX.contiguous(), group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first = dist.get_rank(ctx.group) * ctx.count
        return grads[0][first : first + ctx.count] * ctx.group.size(), None
