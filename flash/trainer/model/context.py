"""A packed row over the ranks of a context group: each holds a slice of it, through all that works on single tokens.

Attention looks at all tokens, and at each head alone. So for it the ranks exchange all heads of their slices for some
heads of the whole row, and then back (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509). What is asked of a
token is answered by the rank that holds it, and told to all: what follows is done on each of them, as without a group.

Conservation: the gradients of a slice's tokens are those of the rank that holds it alone, and FSDP takes the mean over
the ranks. So the gradient of an answer is multiplied by their number on its way back.

Shape legend: U = tokens of the row, L = those of a slice, C = ranks, H = heads, D = width of a head, N = questions,
M = those of a slice, X = numbers of an answer.
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
    """The part of a row that this rank holds; behind the last token of the row there may be empty places."""

    tokens: int
    """U."""
    context: DeviceMesh | None = None
    """None: the whole row."""

    @property
    def ranks(self) -> int:
        """C."""
        return 1 if self.context is None else self.context.size()

    @property
    def length(self) -> int:
        """L."""
        return -(-self.tokens // self.ranks)

    @property
    def first(self) -> int:
        """Place in the row of the first of them."""
        return 0 if self.context is None else self.context.get_local_rank() * self.length

    def of(self, whole_U: Tensor) -> Tensor:
        """[L, …] of something for each token; 0 in empty places."""
        if self.context is None:
            return whole_U
        part = whole_U[self.first : self.first + self.length]
        return torch.cat([part, part.new_zeros(self.length - len(part), *part.shape[1:])])

    def holds(self, row_N: Int64Array) -> Int64Array:
        """[M]: which of these places in the row are in the slice."""
        return np.flatnonzero(row_N // self.length == self.first // self.length)

    def told(self, answer_MX: Tensor, row_N: Int64Array) -> Tensor:
        """[N, X]: what all ranks answer to questions about these places, each in the order of those that it `holds`."""
        if self.context is None:
            return answer_MX
        rank_N = row_N // self.length
        count_C = np.bincount(rank_N, minlength=self.ranks)
        most, order = int(count_C.max()), np.argsort(rank_N, kind="stable")
        place_N = np.empty_like(row_N)
        place_N[order] = np.arange(len(row_N)) - np.repeat(np.cumsum(count_C) - count_C, count_C)
        place_N += rank_N * most
        padded = pad(answer_MX, (0, 0, 0, most - len(answer_MX)))
        everyone: Any = _Told.apply(padded, self.context.get_group())
        return everyone[torch.from_numpy(place_N).to(answer_MX.device)]

    def by_heads(self, states: Sequence[Tensor]) -> list[Tensor]:
        """[L, H, D] each to [U, H / C, D]; each head once more as often as needed, where C is no divisor of H."""
        if self.context is None:
            return list(states)
        sent: list[Tensor] = []
        for one in states:
            times = math.lcm(one.shape[1], self.ranks) // one.shape[1]
            wide = one.repeat_interleave(times, 1) if times > 1 else one
            sent.append(wide.unflatten(1, (self.ranks, -1)).flatten(2).transpose(0, 1))
        widths = [one.shape[2] for one in sent]
        exchanged: Any = _Exchanged.apply(torch.cat(sent, -1), self.context.get_group())
        parts = exchanged.flatten(0, 1)[: self.tokens].split(widths, -1)
        return [part.unflatten(-1, (-1, one.shape[2])) for part, one in zip(parts, states, strict=True)]

    def heads(self, values_H: Tensor) -> Tensor:
        """[H / C] of something for each head, as `by_heads` gives them out."""
        if self.context is None:
            return values_H
        wide = values_H.repeat_interleave(math.lcm(len(values_H), self.ranks) // len(values_H))
        return wide.chunk(self.ranks)[self.context.get_local_rank()]

    def by_tokens(self, states_UHD: Tensor) -> Tensor:
        """[U, H / C, D] to [L, H, D]."""
        if self.context is None:
            return states_UHD
        padded = pad(states_UHD, (0, 0, 0, 0, 0, self.ranks * self.length - self.tokens))
        exchanged: Any = _Exchanged.apply(padded.unflatten(0, (self.ranks, -1)), self.context.get_group())
        return exchanged.transpose(0, 1).flatten(1, 2)


class _Exchanged(torch.autograd.Function):
    """[C, …]: what is at the place of a rank goes to it; what is found there is from it."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grads[0], ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


class _Told(torch.autograd.Function):
    """[M, X] of each rank to [C · M, X] on all."""

    @staticmethod
    def forward(ctx: Any, answer_MX: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.count = group, len(answer_MX)
        found = answer_MX.new_empty(group.size() * ctx.count, answer_MX.shape[1])
        all_gather(found, answer_MX.contiguous(), group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first = dist.get_rank(ctx.group) * ctx.count
        return grads[0][first : first + ctx.count] * ctx.group.size(), None
