"""Which tokens of a packed row attend in one call of a kernel, and the calls.

Each sequence's own tokens attend to one another causally, in the first step; in a second one those of all sequences
that go on from the same tokens, a family, attend to these. On a GPU each step is one call: its kernels take sequences
of any lengths one after the other (`Ragged`). Where they do not take what is asked, sequences are padded (`Padded`),
together by their number of own tokens, to pad little.

Shape legend: U = tokens of the row, S = sequences of a part, or families, Q = most tokens of one that ask, K = tokens
that they ask, M = slots of a part, N = filled ones, H = heads, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash.branches import Int64Array
from flash.foreign import kernels
from flash.foreign.kernels import Attention
from flash.trainer.mesh import sent
from flash.trainer.model.attention import attend, attend_backward

HALF = (torch.bfloat16, torch.float16)

SHORT = 512
"""Tokens up to which attention on the CPU is computed in float32: the backward pass of torch's kernel takes three times
as long in bfloat16 for sequences of 50 tokens, and as long for 1,000."""

States = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, [U, H, D] each, or their gradients."""


class Scores(NamedTuple):
    """What a layer does to what it compares."""

    scale: float
    window: int | None
    """How many places a token sees, its own among them; None: all."""
    cap: float | None


class TakenRows(NamedTuple):
    """Rows that fill slots."""

    along: slice | None
    """These, in their order, fill all slots. None: as the others say."""
    source_M: Tensor
    """int64: the row of each slot; any where it is empty."""
    empty_N: Tensor
    """int64: the slots in which nothing is."""
    rounds: list[tuple[Tensor, Tensor]]
    """int64 pairs: filled slots, and their rows. No row is twice in a round, so sums have one order, on a GPU too."""

    def take(self, states_UX: Tensor) -> Tensor:
        """[M, …]; zeros in empty slots."""
        if self.along is not None:
            return states_UX[self.along]
        found_MX = states_UX.index_select(0, self.source_M)
        return found_MX.index_fill_(0, self.empty_N, 0.0) if len(self.empty_N) else found_MX

    def put(self, states_UX: Tensor, part_MX: Tensor) -> None:
        """Each row, which no two slots take, becomes what its slot holds."""
        if self.along is not None:
            states_UX[self.along] = part_MX.to(states_UX.dtype)
            return
        for slot_N, row_N in self.rounds:
            states_UX.index_copy_(0, row_N, part_MX.index_select(0, slot_N).to(states_UX.dtype))

    def add(self, total_UX: Tensor, part_MX: Tensor) -> None:
        """Give each row what its slots hold."""
        if self.along is not None:
            total_UX[self.along] += part_MX
            return
        for slot_N, row_N in self.rounds:
            total_UX.index_add_(0, row_N, part_MX.index_select(0, slot_N).to(total_UX.dtype))


def taken(size: int, slot_N: Int64Array, row_N: Int64Array, device: torch.device) -> TakenRows:
    """These slots, each once, of so many take these rows."""
    source_M = np.full(size, -1)
    source_M[slot_N] = row_N
    along = slice(int(source_M[0]), int(source_M[0]) + size)
    if len(slot_N) < size or not np.array_equal(source_M, np.arange(along.start, along.stop)):
        along = None
    order = np.argsort(row_N, kind="stable")
    first = np.flatnonzero(np.diff(row_N[order], prepend=-1))
    turn = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    parts = [order[turn == number] for number in range(int(turn.max(initial=-1)) + 1)]
    rounds = [(sent(slot_N[part], device), sent(row_N[part], device)) for part in parts]
    return TakenRows(along, sent(source_M.clip(0), device), sent(np.flatnonzero(source_M < 0), device), rounds)


@dataclass(frozen=True)
class Padded:
    """What attends in one call on a padded batch."""

    sequences: int
    """S."""
    asking: TakenRows
    """Computed tokens → S · Q slots."""
    asked: TakenRows
    """Computed tokens → S · K slots."""
    place_SQ: Tensor
    """int64: the place among the K of each token that asks; beyond them where it goes on from them."""
    causal: bool
    """Whether those that ask are those that are asked; else they come after all of them."""
    furthest: int
    """How many places the last that asks sees at most, itself included."""

    def attend(self, states: States, scores: Scores) -> tuple[Tensor, Tensor]:
        """What slots are answered, [M, H, D], and the logarithm of the sum of their weights, [M, H]."""
        answer, weight = attend(*self._batches(states), self._how(scores))
        return _slots(answer), _slots(weight)

    def gradients(
        self, grad_UHD: Tensor, states: States, answer_UHD: Tensor, weight_UH: Tensor, scores: Scores
    ) -> States:
        """For the slots of those that ask, of those that are asked, and of these again.

        Kernels take a merged answer and weight for their own, so each gives its part of the gradient of all.
        """
        batches = self._batches(states)
        grad, answer = (self._batch(self.asking, one).to(batches[0].dtype) for one in (grad_UHD, answer_UHD))
        weight = self._batch(self.asking, weight_UH)
        query, key, value = attend_backward(grad, *batches, answer, weight, self._how(scores))
        return _slots(query), _slots(key), _slots(value)

    def _how(self, scores: Scores) -> Attention:
        return Attention(self._mask(scores.window), self.causal, scores.scale, scores.cap)

    def _mask(self, window: int | None) -> Tensor | None:
        """bool, [S, 1, Q, K]: who sees whom. None: whoever is not later."""
        if window is None or self.furthest <= window:
            return None
        if window not in self._masks:
            asked = len(self.asked.source_M) // self.sequences
            distance = self.place_SQ[:, :, None] - torch.arange(asked, device=self.place_SQ.device)
            self._masks[window] = ((distance >= 0) & (distance < window)).unsqueeze(1)
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        """By window: every layer asks."""
        return {}

    def _batches(self, states: States) -> States:
        """[S, H, Q or K, D] each."""
        query, key, value = (
            self._batch(places, one) for places, one in zip((self.asking, self.asked, self.asked), states, strict=True)
        )
        if query.device.type == "cpu" and query.dtype in HALF and max(query.shape[2], key.shape[2]) <= SHORT:
            return query.float(), key.float(), value.float()
        return query, key, value

    def _batch(self, places: TakenRows, states_UX: Tensor) -> Tensor:
        """[U, H, …] to [S, H, Q or K, …]."""
        return places.take(states_UX).unflatten(0, (self.sequences, -1)).transpose(1, 2)


def _slots(batch: Tensor) -> Tensor:
    """[S, H, Q or K, …] to [M, H, …]."""
    return batch.transpose(1, 2).flatten(0, 1)


class RaggedKernels(NamedTuple):
    """Attention of sequences one after the other, and its gradients."""

    attend: Callable[..., tuple[Tensor, Tensor]] = kernels.attend_ragged
    gradients: Callable[..., States] = kernels.attend_ragged_backward


@dataclass(frozen=True)
class Ragged:
    """What attends in one call on sequences one after the other."""

    asking: TakenRows
    """Computed tokens → M slots, all of which are filled."""
    asked: TakenRows
    sequences: kernels.Sequences
    """Without a window."""
    causal: bool
    furthest: int
    """As of `Padded`."""
    kernels: RaggedKernels = field(default_factory=RaggedKernels)

    def attend(self, states: States, scores: Scores) -> tuple[Tensor, Tensor]:
        """As `Padded.attend`."""
        return self.kernels.attend(*self._taken(states), *self._how(scores))

    def gradients(
        self, grad_UHD: Tensor, states: States, answer_UHD: Tensor, weight_UH: Tensor, scores: Scores
    ) -> States:
        """As `Padded.gradients`."""
        grad, answer, weight = (self.asking.take(one) for one in (grad_UHD, answer_UHD, weight_UH))
        return self.kernels.gradients(grad, *self._taken(states), answer, weight, *self._how(scores))

    def takes(self, scores: Scores) -> bool:
        """Whether kernels can be told who sees whom: how far those that go on see depends on the token."""
        return scores.cap is None and (self.causal or self._window(scores) is None)

    def _how(self, scores: Scores) -> tuple[Attention, kernels.Sequences]:
        return Attention(None, self.causal, scores.scale), self.sequences._replace(window=self._window(scores))

    def _window(self, scores: Scores) -> int | None:
        return None if scores.window is None or self.furthest <= scores.window else scores.window

    def _taken(self, states: States) -> States:
        query, key, value = states
        return self.asking.take(query), self.asked.take(key), self.asked.take(value)


Part = Padded | Ragged


class Parts:
    """All that attends in a row: first parts in which each token asks once, then those in which some go on."""

    def __init__(
        self,
        own: Sequence[Int64Array],
        kind_S: Int64Array,
        known: Sequence[Int64Array],
        position_U: Int64Array,
        device: torch.device,
    ) -> None:
        """Sequences with these rows of their `own`, after rows that they are `known` to go on from; both may be empty.

        Those of one `kind_S` are padded together. `position_U`: the place of each row's token in its sequences.
        """
        self._own, self._kind_S, self._position_U, self._device = own, kind_S, position_U, device
        families: dict[int, list[int]] = {}
        for place in (place for place, rows in enumerate(own) if len(rows) and len(known[place])):
            # The last token that they go on from says what is before it: they are a tree.
            families.setdefault(int(known[place][-1]), []).append(place)
        self._families: list[tuple[Int64Array, Int64Array]] = [
            (np.concatenate([own[place] for place in members]), known[members[0]]) for members in families.values()
        ]

    @property
    def sequences(self) -> int:
        """With tokens of their own."""
        return sum(len(rows) > 0 for rows in self._own)

    def of(self, query_UHD: Tensor, value_UHD: Tensor, scores: Scores) -> list[Part]:
        """Those whose kernels take such states."""
        return self.fewest(scores) if kernels.takes_ragged(query_UHD, value_UHD) else [*self.padded]

    def fewest(self, scores: Scores) -> list[Part]:
        """Ragged where kernels can be told who sees whom, else padded."""
        first, *more = self.ragged
        found: list[Part] = [first] if first.takes(scores) else [*self._alone]
        return found + (more if all(one.takes(scores) for one in more) else [*self._going_on])

    @cached_property
    def padded(self) -> list[Padded]:
        """All, by kinds."""
        return [*self._alone, *self._going_on]

    @cached_property
    def ragged(self) -> list[Ragged]:
        """All in one, and all in a second one that go on."""
        own = sorted((rows for rows in self._own if len(rows)), key=lambda rows: int(rows[0]))
        longest = max(map(len, own))
        parts = [_ragged(own, own, True, longest, self._device)]
        if self._families:
            asking, asked = zip(*self._families, strict=True)
            furthest = 1 + max(int(self._position_U[rows].max()) for rows in asking)
            parts.append(_ragged(asking, asked, False, furthest, self._device))
        return parts

    @cached_property
    def _alone(self) -> list[Padded]:
        filled = np.array([len(rows) > 0 for rows in self._own])
        kinds = np.unique(self._kind_S[filled]).tolist()
        return [
            _among_themselves(
                [self._own[place] for place in np.flatnonzero(filled & (self._kind_S == kind)).tolist()], self._device
            )
            for kind in kinds
        ]

    @cached_property
    def _going_on(self) -> list[Padded]:
        kinds: dict[tuple[int, int], list[tuple[Int64Array, Int64Array]]] = {}
        for asking, asked in self._families:
            # Of equally many that are asked, so that none of these is padded; nothing would hide it.
            kinds.setdefault((len(asked), len(asking).bit_length()), []).append((asking, asked))
        return [_going_on(found, self._position_U, self._device) for found in kinds.values()]


def _among_themselves(members: Sequence[Int64Array], device: torch.device) -> Padded:
    """The own tokens of sequences, each of them with its own alone."""
    length = np.array([len(rows) for rows in members])
    longest = int(length.max())
    slots = _ranges(np.arange(len(members)) * longest, length)
    rows = taken(len(members) * longest, slots, np.concatenate(members), device)
    place_SQ = torch.arange(longest, device=device).expand(len(members), longest)
    return Padded(len(members), rows, rows, place_SQ, causal=True, furthest=longest)


def _going_on(
    families: Sequence[tuple[Int64Array, Int64Array]], position_U: Int64Array, device: torch.device
) -> Padded:
    """The own tokens of families with those that they go on from, which are equally many in all of them."""
    known, length = len(families[0][1]), np.array([len(rows) for rows, _ in families])
    most, asking = int(length.max()), np.concatenate([rows for rows, _ in families])
    slots = _ranges(np.arange(len(families)) * most, length)
    place_M = np.full(len(families) * most, known)
    place_M[slots] = position_U[asking]
    asked = np.concatenate([rows for _, rows in families])
    return Padded(
        sequences=len(families),
        asking=taken(len(place_M), slots, asking, device),
        asked=taken(len(asked), np.arange(len(asked)), asked, device),
        place_SQ=sent(place_M.reshape(len(families), most), device),
        causal=False,
        furthest=int(place_M.max()) + 1,
    )


def _ragged(
    asking: Sequence[Int64Array], asked: Sequence[Int64Array], causal: bool, furthest: int, device: torch.device
) -> Ragged:
    both = list[tuple[TakenRows, Tensor, int]]()
    for rows in (asking, asked):
        length, flat = [len(one) for one in rows], np.concatenate(rows)
        begin_S = sent(np.cumsum([0, *length], dtype=np.int32), device)
        both.append((taken(len(flat), np.arange(len(flat)), flat, device), begin_S, max(length)))
    (one, one_S, most), (other, other_S, other_most) = both
    return Ragged(one, other, kernels.Sequences((one_S, other_S), (most, other_most)), causal, furthest)


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """start, start + 1, … of each, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
