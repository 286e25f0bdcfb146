"""Packed rows: sequences as the policy and the critics are given them, and the attention that keeps them apart.

The sequences of a micro-batch lie one after the other in one row, without padding. What several of them begin with, a
group's prompt above all, is in the row once (`flash.trainer.model.prefixes`): what works on single tokens is not
repeated. Attention works on padded batches. A sequence whose tokens are all its own attends causally; padding comes
after them, so no mask is needed, and fast kernels apply. A sequence that goes on from another one's tokens asks for
its own alone, and sees those before them too. Such sequences are taken together by their number of own tokens, to pad
little.

Shape legend: P = tokens of the packed sequences, U = those that are computed, S = sequences of a part, Q = most own
tokens of its sequences, L = longest of its sequences, H = heads, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flash.errors import ConfigError
from flash.trainer.model.prefixes import Int64Array, PackedSequences

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
    """Rows that are taken by index, and who of the takers has a gradient to give back."""

    source_M: Tensor
    """int64: the row that each place takes."""
    rounds: list[tuple[Tensor, Tensor]]
    """int64 pairs, places and the rows that they give their gradient to. No row is twice in a round."""


def taken(source_M: Int64Array, counted_K: Int64Array, device: torch.device) -> TakenRows:
    """Take row `source_M[m]` at each place m; the places `counted_K`, each once, are the ones whose values matter."""
    row_K = source_M[counted_K]
    order = np.argsort(row_K, kind="stable")
    rows = row_K[order]
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    turn = np.arange(len(rows)) - np.repeat(first, np.diff(first, append=len(rows)))
    parts = [order[turn == number] for number in range(int(turn.max(initial=-1)) + 1)]
    pairs = [(counted_K[part], row_K[part]) for part in parts]
    return TakenRows(_on(device, source_M), [(_on(device, places), _on(device, rows)) for places, rows in pairs])


def take(source_N: Tensor, places: TakenRows) -> Tensor:
    """[M, …] of [N, …].

    The gradient of a row is the sum over the places that took it, in a fixed order and in float32. torch's own sum has
    whatever order threads on a GPU come in, and rounds to bfloat16 after each addend.
    """
    return _Take.apply(source_N, places)  # pyright: ignore[reportReturnType]


class _Take(torch.autograd.Function):
    """See `take`."""

    @staticmethod
    def forward(ctx: Any, source_N: Tensor, places: TakenRows) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.places, ctx.shape = places, source_N.shape
        return source_N.index_select(0, places.source_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_M,), rounds = grads, ctx.places.rounds
        wide = grad_M.dtype if len(rounds) < 2 else torch.promote_types(grad_M.dtype, torch.float32)
        total_N = grad_M.new_zeros(ctx.shape, dtype=wide)
        for number, (place_K, row_K) in enumerate(rounds):
            part_K = grad_M.index_select(0, place_K).to(wide)
            total_N.index_copy_(0, row_K, total_N.index_select(0, row_K) + part_K if number else part_K)
        return total_N.to(grad_M.dtype), None


@dataclass(frozen=True)
class PackedPart:
    """Sequences that attend together."""

    sequences: int
    """S."""
    asking: int
    """Q."""
    longest: int
    """L."""
    queries: TakenRows | None
    """Computed tokens → slots of the padded queries, sequence · Q + place among its own. None: they are that batch."""
    keys: TakenRows | None
    """Computed tokens → slots of the padded keys, sequence · L + position. None: they are that batch."""
    answers: TakenRows | None
    """Slots of the queries → own tokens, in their order in U. None: they are those."""
    known_S: Tensor | None
    """int64: how many tokens come before each sequence's own. None: none, in any of them."""

    def mask(self, window: int | None) -> Tensor | None:
        """bool, [1 or S, 1, Q, L]: who sees whom. None: whoever is not later."""
        if window is not None and self.longest <= window:
            window = None
        if self.known_S is None and window is None:
            return None
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int | None, Tensor]:
        """By window: every layer asks."""
        return {}

    def _mask(self, window: int | None) -> Tensor:
        place_L = torch.arange(self.longest, device=None if self.known_S is None else self.known_S.device)
        known_S = place_L[:1] if self.known_S is None else self.known_S
        distance = known_S[:, None, None] + place_L[: self.asking, None] - place_L
        # What fills up the queries sees something too: a softmax over nothing is NaN.
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return seen.unsqueeze(1)


class PackedLayout(msgspec.Struct, frozen=True):
    """How the tokens of a row attend, and who looks on.

    No dataclass: in half precision FSDP copies those among a layer's arguments with all that they hold, so a copy would
    look on.
    """

    parts: list[PackedPart]
    """Their own tokens are those of the row, one part after the other."""
    row_P: Tensor
    """int64: where each token of the sequences, one after the other, is computed."""
    shared: bool
    """Whether some tokens stand for those of several sequences."""
    watch: AttentionWatch | None = None
    """Is told of every layer's attention."""


class PackedRow(NamedTuple):
    """Sequences as a model is given them."""

    input_U: Tensor
    """int64: token ids."""
    position_U: Tensor
    """int64: of each token in its sequences."""
    layout: PackedLayout

    def watched(self, watch: AttentionWatch | None) -> PackedRow:
        """The same, while somebody looks on."""
        return self._replace(layout=msgspec.structs.replace(self.layout, watch=watch))


def packed_row(sequences: PackedSequences, device: torch.device) -> PackedRow:
    """Put sequences in one row."""
    place_U, row_P = sequences.computed
    offset_S = sequences.offset_S
    owner_U = np.searchsorted(offset_S, place_U, side="right") - 1
    own_S = np.bincount(owner_U, minlength=len(offset_S) - 1)
    # Those that are their own owners, and the others by powers of two, so that padding is at most a half.
    kind_S = np.where(own_S == np.diff(offset_S), -1, np.frexp(own_S)[1])
    kind_U = kind_S[owner_U]
    order = np.argsort(kind_U, kind="stable")
    place_U, rank_U = place_U[order], np.argsort(order)
    row_P = rank_U[row_P]
    parts = [
        _part(sequences, np.flatnonzero(kind_S == kind), own_S, row_P, device) for kind in np.unique(kind_U).tolist()
    ]
    layout = PackedLayout(parts, _on(device, row_P), shared=len(place_U) < len(row_P))
    input_U, position_U = sequences.input_P[place_U], sequences.position_P[place_U]
    return PackedRow(_on(device, input_U), _on(device, position_U), layout)


def _part(
    sequences: PackedSequences, members: Int64Array, own_S: Int64Array, row_P: Int64Array, device: torch.device
) -> PackedPart:
    offset_S, length_S = sequences.offset_S, np.diff(sequences.offset_S)
    own, length = own_S[members], length_S[members]
    known, count, asking, longest = length - own, len(members), int(own.max()), int(length.max())
    seen = _ranges(offset_S[members], length)
    asked = _ranges(offset_S[members] + known, own)
    key_slots = _ranges(np.arange(count) * longest, length)
    query_slots = _ranges(np.arange(count) * asking, own)
    # In the order of the row, in which a part's own tokens are neighbours.
    ordered = np.argsort(row_P[asked])
    alone = not known.any()
    if len(seen) == count * longest and np.array_equal(row_P[seen], np.arange(len(row_P))):
        return PackedPart(count, asking, longest, None, None, None, None)
    return PackedPart(
        sequences=count,
        asking=asking,
        longest=longest,
        queries=_filled(count * asking, query_slots, row_P[asked], device),
        keys=_filled(count * longest, key_slots, row_P[seen], device),
        answers=taken(query_slots[ordered], np.arange(len(ordered)), device),
        known_S=None if alone else _on(device, known),
    )


def _filled(size: int, slots: Int64Array, rows: Int64Array, device: torch.device) -> TakenRows:
    """These slots take these rows. What fills the others is arbitrary: nobody sees it, or asks for its answer."""
    source = np.full(size, rows[0])
    source[slots] = rows
    return taken(source, slots, device)


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
    """Causal attention within each sequence of a packed row: query [1, H, U, D] to output [1, U, H, D]."""
    if packed_layout is None:
        raise ConfigError(
            f"model.path: {class_name(module)} does not pass on what its attention is told of packed sequences; choose "
            "another model"
        )
    if attention_mask is not None:
        raise ConfigError(
            f"model.path: {class_name(module)} makes a mask of its own for its attention, which packed training would "
            "have to ignore; choose another model"
        )
    if other.get("softcap") is not None or other.get("s_aux") is not None:
        raise ConfigError(f"model.path: {class_name(module)} uses capped or sink attention, which is not supported")
    if packed_layout.watch is not None:
        row_P = packed_layout.row_P if packed_layout.shared else slice(None)
        packed_layout.watch(module, query[:, :, row_P], key[:, :, row_P], scaling, sliding_window)
    query_UHD, key_UHD, value_UHD = (one[0].transpose(0, 1) for one in (query, key, value))
    answers = list(_answers(packed_layout.parts, query_UHD, key_UHD, value_UHD, scaling, sliding_window))
    packed = answers[0] if len(answers) == 1 else torch.cat(answers)
    return packed.unsqueeze(0), None


def _answers(
    parts: list[PackedPart],
    query_UHD: Tensor,
    key_UHD: Tensor,
    value_UHD: Tensor,
    scaling: float | None,
    window: int | None,
) -> Iterator[Tensor]:
    """What the own tokens of each part are answered."""
    for part in parts:
        query, key, value = (
            _padded(states, places, part.sequences)
            for states, places in ((query_UHD, part.queries), (key_UHD, part.keys), (value_UHD, part.keys))
        )
        mask = part.mask(window)
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else mask.to(query.device),
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        slots = output.transpose(1, 2).flatten(0, 1).to(query_UHD.dtype)
        yield slots if part.answers is None else take(slots, part.answers)


def _padded(states_UHD: Tensor, places: TakenRows | None, sequences: int) -> Tensor:
    """[S, H, Q or L, D]."""
    rows = states_UHD if places is None else take(states_UHD, places)
    batch = rows.unflatten(0, (sequences, -1)).transpose(1, 2)
    short = batch.device.type == "cpu" and batch.shape[2] <= SHORT
    return batch.float() if short and batch.dtype in HALF else batch


def class_name(module: nn.Module) -> str:
    """The name of a module's class as transformers has it; FSDP puts its own before it."""
    return type(module).__name__.removeprefix("FSDP")
