"""Which tokens of a packed row attend in one call of a kernel, and the calls.

Each sequence's own tokens attend to one another causally, in the first step; in a second one those of all sequences
that go on from the same tokens, a family, attend to these. On a GPU each step is one call: its kernels take sequences
of any lengths one after the other (`Ragged`). Where they do not take what is asked, sequences are padded (`Padded`),
together by their number of own tokens, to pad little.

Shape legend: U = tokens of the row, S = sequences of a part, or families, Q = most tokens of one that ask, K = tokens
that they ask, M = slots of a part, N = filled ones, H = heads, D = width of a head.


Attention as numbers, from what a layer compares, block by block, so that never all of its weights exist: for those
who look on, and where scores are capped, which none of torch's kernels does.

Shape legend: H = heads of a layer, G = its heads of keys, B = rows of a block, C = columns that they may see, D = width
of a head, R = tokens whose rows are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from algorithms.rhythm import IntArray
from flash.branches import Int64Array
from flash.foreign import kernels
from flash.foreign.kernels import Attention
from flash.trainer.mesh import to_device

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
    rounds = [(to_device(slot_N[part], device), to_device(row_N[part], device)) for part in parts]
    return TakenRows(
        along, to_device(source_M.clip(0), device), to_device(np.flatnonzero(source_M < 0), device), rounds
    )


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
        place_SQ=to_device(place_M.reshape(len(families), most), device),
        causal=False,
        furthest=int(place_M.max()) + 1,
    )


def _ragged(
    asking: Sequence[Int64Array], asked: Sequence[Int64Array], causal: bool, furthest: int, device: torch.device
) -> Ragged:
    both = list[tuple[TakenRows, Tensor, int]]()
    for rows in (asking, asked):
        length, flat = [len(one) for one in rows], np.concatenate(rows)
        begin_S = to_device(np.cumsum([0, *length], dtype=np.int32), device)
        both.append((taken(len(flat), np.arange(len(flat)), flat, device), begin_S, max(length)))
    (one, one_S, most), (other, other_S, other_most) = both
    return Ragged(one, other, kernels.Sequences((one_S, other_S), (most, other_most)), causal, furthest)


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """start, start + 1, … of each, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


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
