"""Packed rows: sequences as the policy and the critics are given them, and the attention that keeps them apart.

The sequences of a micro-batch lie one after the other in one row, without padding. What several of them begin with, a
group's prompt or the turns before branches part, is in the row once (`flash.trainer.model.prefixes`): what works on
single tokens is not repeated. Attention is computed in two parts, which are merged as the softmax of both: each
sequence's own tokens attend to one another causally, and those of all sequences that go on from the same tokens attend
to these, however deep in the tree. So no key is there twice and none is masked, and fast kernels apply. They want
padded batches: sequences are taken together by their number of own tokens, to pad little.

A model that attends by itself, since something else in it passes between tokens, is given one sequence at a time.

Shape legend: P = packed tokens of the sequences, U = those that are computed, S = sequences of a part, or families that
go on from the same tokens, Q = most tokens of one that ask, K = tokens that they ask, M = slots of the padded batch,
H = heads, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from flash.branches import Int64Array
from flash.errors import ConfigError
from flash.foreign.torch import Attention
from flash.foreign.transformers import attention
from flash.trainer.model.attention import attend, attend_backward
from flash.trainer.model.context import RowSlice
from flash.trainer.model.prefixes import PackedSequences

PACKED_ATTENTION = "packed"
"""Our name in transformers' attention interface. Not in its mask interface, so no dense mask is built. It must contain
none of transformers' own names, such as sdpa: the rules for that one would apply."""

HALF = (torch.bfloat16, torch.float16)

SHORT = 512
"""Tokens up to which attention on the CPU is computed in float32: the backward pass of torch's kernel takes three times
as long in bfloat16 for sequences of 50 tokens, and as long for 1,000."""


class AttentionWatch(Protocol):
    """Looks on while the layers attend."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """What one layer compares, as the model made it: query [1, H, P, D], key [1, heads of keys, P, D]."""
        ...


class TakenRows(NamedTuple):
    """Rows that fill the slots of a padded batch."""

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
    rounds = [(_on(device, slot_N[part]), _on(device, row_N[part])) for part in parts]
    return TakenRows(along, _on(device, source_M.clip(0)), _on(device, np.flatnonzero(source_M < 0)), rounds)


@dataclass(frozen=True)
class PackedPart:
    """What attends in one call."""

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

    def mask(self, window: int | None) -> Tensor | None:
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


class PackedLayout(msgspec.Struct, frozen=True):
    """How the tokens of a row attend, and who looks on.

    No dataclass: in half precision FSDP copies those among a layer's arguments with all that they hold, so a copy would
    look on.
    """

    parts: list[PackedPart]
    """First those in which each token of the row asks once, then those in which some go on from others'."""
    row_P: Tensor
    """int64: where each token of the sequences, one after the other, is computed."""
    shared: bool
    """Whether some tokens stand for those of several sequences; else the row is these, one after the other."""
    part: RowSlice
    """What this rank is given of the row."""
    watch: AttentionWatch | None = None
    """Is told of every layer's attention."""


class PackedRow(NamedTuple):
    """Sequences as a model is given them."""

    input_U: Tensor
    """int64: token ids."""
    position_U: Tensor
    """int64: of each token in its sequences."""
    row_P: Int64Array
    """As in the layout."""
    layout: PackedLayout
    routes_ULK: Tensor | None
    """int32: the experts that engines chose; -1: not known."""

    def over(self, context: DeviceMesh | None) -> PackedRow:
        """What this one of the ranks is given of the row."""
        part = RowSlice(len(self.input_U), context)
        layout = msgspec.structs.replace(self.layout, part=part)
        routes = None if self.routes_ULK is None else part.of(self.routes_ULK)
        return PackedRow(part.of(self.input_U), part.of(self.position_U), self.row_P, layout, routes)

    def watched(self, watch: AttentionWatch | None) -> PackedRow:
        """The same, while somebody looks on."""
        return self._replace(layout=msgspec.structs.replace(self.layout, watch=watch))


def packs(model: PreTrainedModel) -> bool:
    """Whether sequences share a row of this model: it attends as is said here, and not by itself."""
    return attention(model) == PACKED_ATTENTION


def given(model: PreTrainedModel, row: PackedRow) -> dict[str, Any]:
    """What a model is called with, to make no more of a row than hidden states."""
    ids = {"input_ids": row.input_U.unsqueeze(0), "use_cache": False}
    if packs(model):
        return ids | {"position_ids": row.position_U.unsqueeze(0), "packed_layout": row.layout}
    assert [part.sequences for part in row.layout.parts] == [1], "a model that attends by itself has one sequence"
    return ids


def packed_row(sequences: PackedSequences, device: torch.device) -> PackedRow:
    """Put sequences in one row."""
    place_U, row_P = sequences.computed
    offset_S = sequences.offset_S
    owner_U = np.searchsorted(offset_S, place_U, side="right") - 1
    own_S = np.bincount(owner_U, minlength=len(offset_S) - 1)
    # By powers of two, so that padding is at most a half.
    kind_S = np.frexp(own_S)[1]
    shared = len(place_U) < len(row_P)
    if shared:
        # What attends together lies together, where it need not stay where it was.
        order = np.argsort(kind_S[owner_U], kind="stable")
        place_U, row_P = place_U[order], np.argsort(order)[row_P]
    known_S = np.diff(offset_S) - own_S
    own = [row_P[start:stop] for start, stop in zip(offset_S[:-1] + known_S, offset_S[1:], strict=True)]
    kinds = np.unique(kind_S[own_S > 0]).tolist()
    alone = [_among_themselves([own[place] for place in np.flatnonzero(kind_S == kind)], device) for kind in kinds]
    position_U = sequences.position_P[place_U]
    parts = [*alone, *_going_on(sequences, own, known_S, row_P, position_U, device)]
    layout = PackedLayout(parts, _on(device, row_P), shared, RowSlice(len(place_U)))
    routes = sequences.routes
    routes_ULK = None if routes is None else torch.from_numpy(routes.numbers()[place_U]).to(device)
    return PackedRow(_on(device, sequences.input_P[place_U]), _on(device, position_U), row_P, layout, routes_ULK)


def _among_themselves(members: Sequence[Int64Array], device: torch.device) -> PackedPart:
    """The own tokens of sequences, each of them with its own alone."""
    length = np.array([len(rows) for rows in members])
    longest = int(length.max())
    slots = _ranges(np.arange(len(members)) * longest, length)
    rows = taken(len(members) * longest, slots, np.concatenate(members), device)
    place_SQ = torch.arange(longest, device=device).expand(len(members), longest)
    return PackedPart(len(members), rows, rows, place_SQ, causal=True, furthest=longest)


def _going_on(
    sequences: PackedSequences,
    own: Sequence[Int64Array],
    known_S: Int64Array,
    row_P: Int64Array,
    position_U: Int64Array,
    device: torch.device,
) -> Iterator[PackedPart]:
    """The own tokens of families with those that they go on from."""
    families: dict[int, list[int]] = {}
    for place in np.flatnonzero((known_S > 0) & np.array([len(rows) > 0 for rows in own])).tolist():
        # The last token that they go on from says what is before it: they are a tree.
        families.setdefault(int(row_P[sequences.offset_S[place] + known_S[place] - 1]), []).append(place)
    kinds: dict[tuple[int, int], list[tuple[Int64Array, Int64Array]]] = {}
    for members in families.values():
        asking = np.concatenate([own[place] for place in members])
        start, known = sequences.offset_S[members[0]], int(known_S[members[0]])
        # Of equally many that are asked, so that none of these is padded; nothing would hide it.
        kinds.setdefault((known, len(asking).bit_length()), []).append((asking, row_P[start : start + known]))
    for (known, _), found in kinds.items():
        length = np.array([len(rows) for rows, _ in found])
        most, asking = int(length.max()), np.concatenate([rows for rows, _ in found])
        slots = _ranges(np.arange(len(found)) * most, length)
        place_M = np.full(len(found) * most, known)
        place_M[slots] = position_U[asking]
        yield PackedPart(
            sequences=len(found),
            asking=taken(len(found) * most, slots, asking, device),
            asked=taken(
                len(found) * known, np.arange(len(found) * known), np.concatenate([rows for _, rows in found]), device
            ),
            place_SQ=_on(device, place_M.reshape(len(found), most)),
            causal=False,
            furthest=int(place_M.max()) + 1,
        )


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """start, start + 1, … of each, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


def _on(device: torch.device, array: Int64Array) -> Tensor:
    return torch.from_numpy(array).to(device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row: query [1, H, U, D] to output [1, U, H, D].

    Where the row is over several ranks, they are given and answered their slices.
    """
    if packed_layout is None:
        raise ConfigError(f"{class_name(module)} does not pass on what its attention is told of packed sequences")
    if attention_mask is not None:
        raise ConfigError(f"{class_name(module)} makes a mask of its own for its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how, sinks_H = _Scores(scale, sliding_window, other.get("softcap")), other.get("s_aux")
    if packed_layout.watch is not None:
        if how.cap is not None or sinks_H is not None:
            raise ConfigError(
                f"algorithm.rhythm: {class_name(module)} caps its attention or lets it go into sinks, which nothing "
                "that looks on knows of; choose another model"
            )
        row_P = packed_layout.row_P if packed_layout.shared else slice(None)
        packed_layout.watch(module, query[:, :, row_P], key[:, :, row_P], scaling, sliding_window)
    part = packed_layout.part
    query_UHD, key_UHD, value_UHD = part.by_heads([one[0].transpose(0, 1) for one in (query, key, value)])
    sinks_H = None if sinks_H is None else part.heads(sinks_H)
    answer_UHD: Any = _PackedAttention.apply(query_UHD, key_UHD, value_UHD, sinks_H, packed_layout.parts, how)
    return part.by_tokens(answer_UHD).unsqueeze(0), None


class _Scores(NamedTuple):
    """What a layer does to what it compares."""

    scale: float
    window: int | None
    cap: float | None

    def of(self, part: PackedPart) -> Attention:
        return Attention(part.mask(self.window), part.causal, self.scale, self.cap)


class _PackedAttention(torch.autograd.Function):
    """[U, H, D]: what each token of the row is answered, over the parts in which it asks.

    No padded batch is kept for the backward pass.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        query_UHD: Tensor,
        key_UHD: Tensor,
        value_UHD: Tensor,
        sinks_H: Tensor | None,
        parts: Sequence[PackedPart],
        how: _Scores,
    ) -> Tensor:
        tokens, heads, _ = query_UHD.shape
        wide = torch.promote_types(value_UHD.dtype, torch.float32)
        answer_UHD = value_UHD.new_empty((tokens, heads, value_UHD.shape[2]), dtype=wide)
        weight_UH = value_UHD.new_empty((tokens, heads), dtype=wide)
        for part in parts:
            padded = _padded(part, (query_UHD, key_UHD, value_UHD))
            answer_MHD, weight_MH = map(_slots, attend(*padded, how.of(part)))
            if not part.causal:
                answer_MHD, weight_MH = _merged(
                    part.asking.take(answer_UHD), part.asking.take(weight_UH), answer_MHD, weight_MH
                )
            part.asking.put(answer_UHD, answer_MHD)
            part.asking.put(weight_UH, weight_MH)
        if sinks_H is not None:
            # A token more that all see, with a score of its own and nothing to say.
            all_UH = torch.logaddexp(weight_UH, sinks_H.to(wide))
            answer_UHD *= (weight_UH - all_UH).exp_()[..., None]
            weight_UH = all_UH
        answer_UHD = answer_UHD.to(value_UHD.dtype)
        ctx.save_for_backward(query_UHD, key_UHD, value_UHD, sinks_H, answer_UHD, weight_UH)
        ctx.parts, ctx.how = parts, how
        return answer_UHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_UHD,), (*states, sinks_H, answer_UHD, weight_UH) = grads, ctx.saved_tensors
        totals = [torch.zeros(one.shape, dtype=weight_UH.dtype, device=one.device) for one in states]
        for part in ctx.parts:
            padded = _padded(part, states)
            # Kernels take the merged answer and weight for their own, so each gives its part of the gradient of all.
            grad, answer = (_batch(part, part.asking, one).to(padded[0].dtype) for one in (grad_UHD, answer_UHD))
            weight = _batch(part, part.asking, weight_UH)
            parted = attend_backward(grad, *padded, answer, weight, ctx.how.of(part))
            for total, places, one in zip(totals, (part.asking, part.asked, part.asked), parted, strict=True):
                places.add(total, _slots(one))
        grad_H = None
        if sinks_H is not None:
            earned_UH = (grad_UHD.to(weight_UH) * answer_UHD).sum(-1)
            grad_H = ((sinks_H.to(weight_UH) - weight_UH).exp_() * -earned_UH).sum(0).to(sinks_H.dtype)
        return *(total.to(one.dtype) for total, one in zip(totals, states, strict=True)), grad_H, None, None


def _merged(one_MHD: Tensor, one_MH: Tensor, other_MHD: Tensor, other_MH: Tensor) -> tuple[Tensor, Tensor]:
    """Answers over two sets of keys as one over both, and the logarithms of the sums of their exponentials."""
    share_MH = torch.sigmoid(other_MH - one_MH)
    return torch.lerp(one_MHD, other_MHD.to(one_MHD.dtype), share_MH[..., None]), torch.logaddexp(one_MH, other_MH)


def _padded(part: PackedPart, states: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, [S, H, Q or K, D] each."""
    query_UHD, key_UHD, value_UHD = states
    query, key = _batch(part, part.asking, query_UHD), _batch(part, part.asked, key_UHD)
    value = _batch(part, part.asked, value_UHD)
    if query.device.type == "cpu" and query.dtype in HALF and max(query.shape[2], key.shape[2]) <= SHORT:
        return query.float(), key.float(), value.float()
    return query, key, value


def _batch(part: PackedPart, places: TakenRows, states_UX: Tensor) -> Tensor:
    """[U, H, …] to [S, H, Q or K, …]."""
    return places.take(states_UX).unflatten(0, (part.sequences, -1)).transpose(1, 2)


def _slots(batch: Tensor) -> Tensor:
    """[S, H, Q or K, …] to [M, H, …]."""
    return batch.transpose(1, 2).flatten(0, 1)


def class_name(module: nn.Module) -> str:
    """The name of a module's class as transformers has it; FSDP puts its own before it."""
    return type(module).__name__.removeprefix("FSDP")
