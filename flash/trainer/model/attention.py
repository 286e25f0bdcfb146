"""Attention of a packed row: how it is divided into parts, the kernel calls of a part, and attention weights.

A *row* has the tokens of several sequences one after another; `flash.trainer.model.packed` calls this file in every
layer. The attention of a token is computed in up to two parts, which `packed` merges. In the first part, the own tokens
of each sequence attend to one another causally. In the second part, the own tokens of all sequences that continue from
the same prefix (a *family*) attend to that prefix, which is in the row only once.

On a GPU each part is one kernel call: the kernel takes sequences of any lengths one after another (`RaggedPart`). Where
this kernel cannot be used, sequences of similar length are padded to one batch (`PaddedPart`).

torch's kernels can neither cap scores (some models limit the size of scores) nor return attention weights. For capped
models, and for `flash.trainer.rhythm`, this module computes the weights by matrix products, `ROWS_PER_BLOCK` rows at a
time, so that the weights of a whole layer never exist at once.

`answer` is the attention output of a token. `lse` is the log-sum-exp of the token's scores, which is the log of the sum
of its weights before they are normalised; with it, the outputs of several parts are merged.

Shape legend: U = computed tokens of the row, S = sequences (or families) of a part, Q = query tokens of the longest
sequence, K = key tokens of the longest, M = slots of a part, N = filled slots, H = heads of queries, G = heads of keys,
D = width of a head. For observers: B = rows of a block, C = columns that these rows see, R = tokens that are observed.
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
from flash.foreign.kernels import AttentionOptions
from flash.trainer.mesh import to_device

HALF = (torch.bfloat16, torch.float16)
"""Dtypes of 16 bits. On a CPU, short sequences of these dtypes are computed in float32 (`SHORT`)."""

SHORT = 512
"""Longest sequence, in tokens, whose attention is computed in float32 on a CPU. In bfloat16, the backward pass of
torch's kernel takes three times as long as in float32 for sequences of 50 tokens, and equally long for 1,000."""

ROWS_PER_BLOCK = 128
"""Rows whose attention weights exist at a time: with 32 heads and 8,192 columns these are 128 MiB in float32."""

States = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, [U, H, D] each, or the gradients of these three."""


class ScoreOptions(NamedTuple):
    """Treatment of the products of queries and keys in one layer."""

    scale: float
    """Factor of each product."""
    window: int | None
    """Number of tokens that a token sees, itself included. None: the token sees itself and all earlier tokens."""
    cap: float | None
    """Largest size of a score: scores become cap · tanh(score / cap). None: no cap."""


class RowIndex(NamedTuple):
    """Assignment of rows (tokens of the packed row) to slots (places in a kernel's batch)."""

    contiguous: slice | None
    """Consecutive rows that fill all slots in order, so that no index is needed. None: use the other fields."""
    row_M: Tensor
    """int64: the row of each slot; any row for an empty slot."""
    empty_N: Tensor
    """int64: the empty slots."""
    rounds: list[tuple[Tensor, Tensor]]
    """int64 pairs: filled slots, and the row of each. No row occurs twice in one round, so that the slots of a row are
    always added in the same order, also on a GPU."""

    def gather(self, states_UX: Tensor) -> Tensor:
        """Return [M, …]: the states of the slots' rows; zeros in empty slots."""
        if self.contiguous is not None:
            return states_UX[self.contiguous]
        found_MX = states_UX.index_select(0, self.row_M)
        return found_MX.index_fill_(0, self.empty_N, 0.0) if len(self.empty_N) else found_MX

    def scatter(self, states_UX: Tensor, part_MX: Tensor) -> None:
        """Write the values of the slots to their rows in `states_UX`. No two slots may have the same row."""
        if self.contiguous is not None:
            states_UX[self.contiguous] = part_MX.to(states_UX.dtype)
            return
        for slot_N, row_N in self.rounds:
            states_UX.index_copy_(0, row_N, part_MX.index_select(0, slot_N).to(states_UX.dtype))

    def scatter_add(self, total_UX: Tensor, part_MX: Tensor) -> None:
        """Add the values of the slots to their rows in `total_UX`. Several slots may have the same row."""
        if self.contiguous is not None:
            total_UX[self.contiguous] += part_MX
            return
        for slot_N, row_N in self.rounds:
            total_UX.index_add_(0, row_N, part_MX.index_select(0, slot_N).to(total_UX.dtype))


def row_index(slots: int, slot_N: Int64Array, row_N: Int64Array, device: torch.device) -> RowIndex:
    """Return the index of `slots` slots in which slot `slot_N[i]` holds row `row_N[i]`. No slot may occur twice.

    The other slots are empty: they pad a batch.
    """
    row_M = np.full(slots, -1)
    row_M[slot_N] = row_N
    contiguous = slice(int(row_M[0]), int(row_M[0]) + slots)
    if len(slot_N) < slots or not np.array_equal(row_M, np.arange(contiguous.start, contiguous.stop)):
        contiguous = None
    # Sort the slots by their rows; `first` has the place in this order at which the slots of each row begin. The n-th
    # slot of each row goes into round n.
    order = np.argsort(row_N, kind="stable")
    first = np.flatnonzero(np.diff(row_N[order], prepend=-1))
    turn = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    chosen = [order[turn == number] for number in range(int(turn.max(initial=-1)) + 1)]
    rounds = [(to_device(slot_N[places], device), to_device(row_N[places], device)) for places in chosen]
    return RowIndex(contiguous, to_device(row_M.clip(0), device), to_device(np.flatnonzero(row_M < 0), device), rounds)


@dataclass(frozen=True)
class PaddedPart:
    """Sequences or families that attend in one call on a padded batch."""

    sequences: int
    """S."""
    queries: RowIndex
    """Rows of the S · Q slots of queries."""
    keys: RowIndex
    """Rows of the S · K slots of keys and values."""
    place_SQ: Tensor
    """int64: the place of each query token among the K keys; at least K for a token after all keys."""
    causal: bool
    """True if queries and keys are the same tokens; False if the queries come after all keys."""
    reach: int
    """Number of tokens that the last query sees, itself included. A window of at least this size hides no key."""

    def attend(self, states: States, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
        """Return the attention output of each slot, [M, H, D], and the log of the sum of its weights, [M, H]."""
        answer, lse = attend(*self._batches(states), self._options(scores))
        return _slots(answer), _slots(lse)

    def gradients(
        self, grad_UHD: Tensor, states: States, answer_UHD: Tensor, lse_UH: Tensor, scores: ScoreOptions
    ) -> States:
        """Return this part's gradients for the slots of queries, of keys and of values.

        `answer_UHD` and `lse_UH` (log of the sum of the attention weights) are merged over all parts.
        """
        # The kernels get the output and `lse` of all parts together. So they compute the softmax shares of the whole
        # attention, and the gradients of the parts sum to the whole gradient.
        batches = self._batches(states)
        grad, answer = (self._batch(self.queries, value).to(batches[0].dtype) for value in (grad_UHD, answer_UHD))
        lse = self._batch(self.queries, lse_UH)
        query, key, value = attend_backward(grad, *batches, answer, lse, self._options(scores))
        return _slots(query), _slots(key), _slots(value)

    def _options(self, scores: ScoreOptions) -> AttentionOptions:
        """Return the options of the kernel call: mask, causality, scale and cap."""
        return AttentionOptions(self._mask(scores.window), self.causal, scores.scale, scores.cap)

    def _mask(self, window: int | None) -> Tensor | None:
        """Return bool [S, 1, Q, K]: True where the query sees the key. None if the window hides no key."""
        if window is None or self.reach <= window:
            return None
        if window not in self._masks:
            keys = len(self.keys.row_M) // self.sequences
            distance = self.place_SQ[:, :, None] - torch.arange(keys, device=self.place_SQ.device)
            self._masks[window] = ((distance >= 0) & (distance < window)).unsqueeze(1)
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        """Masks by window, kept because every layer needs the same masks."""
        return {}

    def _batches(self, states: States) -> States:
        """Return query, key and value as padded batches, [S, H, Q or K, D] each."""
        # On a CPU, short sequences are faster in float32 (`SHORT`).
        query, key, value = (
            self._batch(index, state) for index, state in zip((self.queries, self.keys, self.keys), states, strict=True)
        )
        if query.device.type == "cpu" and query.dtype in HALF and max(query.shape[2], key.shape[2]) <= SHORT:
            return query.float(), key.float(), value.float()
        return query, key, value

    def _batch(self, index: RowIndex, states_UX: Tensor) -> Tensor:
        """Return [S, H, Q or K, …] from states of [U, H, …]."""
        return index.gather(states_UX).unflatten(0, (self.sequences, -1)).transpose(1, 2)


def _slots(batch: Tensor) -> Tensor:
    """Return [M, H, …] from a batch of [S, H, Q or K, …]."""
    return batch.transpose(1, 2).flatten(0, 1)


class RaggedKernels(NamedTuple):
    """Functions that compute ragged attention and its gradients. Tests replace them on machines without a GPU."""

    attend: Callable[..., tuple[Tensor, Tensor]] = kernels.attend_ragged
    gradients: Callable[..., States] = kernels.attend_ragged_backward


@dataclass(frozen=True)
class RaggedPart:
    """Sequences or families that attend in one call, one after another and without padding. For GPUs only."""

    queries: RowIndex
    """Rows of the M slots of queries, all of which are filled."""
    keys: RowIndex
    """Rows of the slots of keys and values, all of which are filled."""
    sequences: kernels.RaggedSequences
    """Limits of the sequences, without a window."""
    causal: bool
    """True if queries and keys are the same tokens; False if the queries come after all keys."""
    reach: int
    """Number of tokens that the last query sees, itself included. A window of at least this size hides no key."""
    kernels: RaggedKernels = field(default_factory=RaggedKernels)

    def attend(self, states: States, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
        """Return the attention output of each slot, [M, H, D], and the log of the sum of its weights, [M, H]."""
        return self.kernels.attend(*self._gathered(states), *self._options(scores))

    def gradients(
        self, grad_UHD: Tensor, states: States, answer_UHD: Tensor, lse_UH: Tensor, scores: ScoreOptions
    ) -> States:
        """Return this part's gradients for the slots of queries, of keys and of values.

        `answer_UHD` and `lse_UH` are merged over all parts. So the kernel computes the softmax shares of the whole
        attention, and the gradients of the parts sum to the whole gradient.
        """
        grad, answer, lse = (self.queries.gather(value) for value in (grad_UHD, answer_UHD, lse_UH))
        return self.kernels.gradients(grad, *self._gathered(states), answer, lse, *self._options(scores))

    def supports(self, scores: ScoreOptions) -> bool:
        """Return True if the kernels can compute these scores.

        The kernels cannot cap scores. They also support no window in a prefix part, where the window of each query
        begins at another key.
        """
        return scores.cap is None and (self.causal or self._window(scores) is None)

    def _options(self, scores: ScoreOptions) -> tuple[AttentionOptions, kernels.RaggedSequences]:
        """Return the options of the kernel, and this part's sequences as the kernel takes them, with their window."""
        return AttentionOptions(None, self.causal, scores.scale), self.sequences._replace(window=self._window(scores))

    def _window(self, scores: ScoreOptions) -> int | None:
        """Return the window in tokens; None if it hides no key of this part."""
        return None if scores.window is None or self.reach <= scores.window else scores.window

    def _gathered(self, states: States) -> States:
        """Return query, key and value of the part's slots."""
        query, key, value = states
        return self.queries.gather(query), self.keys.gather(key), self.keys.gather(value)


AttentionPart = PaddedPart | RaggedPart


class RowAttention:
    """Attention parts of one packed row: parts for the sequences' own tokens, then parts for shared prefixes.

    The order matters: the output of a prefix part is merged with the output over the own tokens. Parts are built when a
    layer first needs them, and are kept for the other layers. Two kinds of layers, for example with and without a
    window, may need different parts of the same row.

    A token that several sequences share is computed once and belongs to one of them: the first in token order. *Own*
    tokens are the tokens that belong to a sequence in this sense.
    """

    def __init__(
        self,
        own: Sequence[Int64Array],
        length_class_S: Int64Array,
        prefixes: Sequence[Int64Array],
        position_U: Int64Array,
        device: torch.device,
    ) -> None:
        """Note the rows of each sequence and group the sequences by prefix.

        Args:
            own: for each sequence, the rows that are computed for it: tokens that only this sequence has, and shared
                tokens that belong to it; may be empty.
            length_class_S: class of the number of each sequence's own tokens. Sequences of one class are padded to one
                batch.
            prefixes: for each sequence, the rows of the tokens before `own`, which belong to other sequences; may be
                empty.
            position_U: position of each row's token in its sequences.
            device: the device on which the model computes.
        """
        self._own, self._length_class_S = own, length_class_S
        self._position_U, self._device = position_U, device
        families: dict[int, list[int]] = {}
        for sequence, rows in enumerate(own):
            if len(rows) and len(prefixes[sequence]):
                # Prefixes form a tree, so the last token of a prefix identifies the whole prefix.
                families.setdefault(int(prefixes[sequence][-1]), []).append(sequence)
        self._families: list[tuple[Int64Array, Int64Array]] = [
            (np.concatenate([own[sequence] for sequence in members]), prefixes[members[0]])
            for members in families.values()
        ]

    @property
    def sequences(self) -> int:
        """Number of sequences with own tokens. If several sequences are equal, only one of them has own tokens."""
        return sum(len(rows) > 0 for rows in self._own)

    def parts(self, query_UHD: Tensor, value_UHD: Tensor, scores: ScoreOptions) -> list[AttentionPart]:
        """Return the parts for these states and scores: ragged parts where the kernels support them, else padded."""
        return self.fewest(scores) if kernels.takes_ragged(query_UHD, value_UHD) else [*self.padded]

    def fewest(self, scores: ScoreOptions) -> list[AttentionPart]:
        """Return the fewest parts: ragged parts where the ragged kernels support the scores, else padded parts.

        Own tokens and prefixes are decided separately. `parts` calls this on a GPU, and tests call it on a CPU.
        """
        own, *prefixes = self.ragged
        found: list[AttentionPart] = [own] if own.supports(scores) else [*self._padded_own_parts]
        return found + (prefixes if all(part.supports(scores) for part in prefixes) else [*self._padded_prefix_parts])

    @cached_property
    def padded(self) -> list[PaddedPart]:
        """All parts as padded batches, one batch per class of lengths."""
        return [*self._padded_own_parts, *self._padded_prefix_parts]

    @cached_property
    def ragged(self) -> list[RaggedPart]:
        """Ragged parts: one for the own tokens of all sequences and, if there are families, one for all prefixes."""
        # Sort by the order of the row. If the slots are then all rows in order, no gathering is needed.
        own = sorted((rows for rows in self._own if len(rows)), key=lambda rows: int(rows[0]))
        longest = max(map(len, own))
        parts = [_ragged(own, own, True, longest, self._device)]
        if self._families:
            queries, keys = zip(*self._families, strict=True)
            reach = 1 + max(int(self._position_U[rows].max()) for rows in queries)
            parts.append(_ragged(queries, keys, False, reach, self._device))
        return parts

    @cached_property
    def _padded_own_parts(self) -> list[PaddedPart]:
        """Padded parts in which the own tokens of each sequence attend to one another: one part per class of lengths.

        Sequences without own tokens are left out: another, equal sequence computes their tokens.
        """
        filled = np.array([len(rows) > 0 for rows in self._own])
        length_classes = np.unique(self._length_class_S[filled]).tolist()
        members = [
            np.flatnonzero(filled & (self._length_class_S == length_class)).tolist() for length_class in length_classes
        ]
        return [_padded_own([self._own[sequence] for sequence in some], self._device) for some in members]

    @cached_property
    def _padded_prefix_parts(self) -> list[PaddedPart]:
        """Parts for prefixes: one per prefix length and per power of two of the number of queries.

        The powers of two keep the padding below half of a batch.
        """
        classes: dict[tuple[int, int], list[tuple[Int64Array, Int64Array]]] = {}
        for queries, keys in self._families:
            # Only prefixes of equal length share a batch: without a mask, nothing would hide the padding of keys.
            classes.setdefault((len(keys), len(queries).bit_length()), []).append((queries, keys))
        return [_padded_prefixes(families, self._position_U, self._device) for families in classes.values()]


def _padded_own(members: Sequence[Int64Array], device: torch.device) -> PaddedPart:
    """Return the part in which the own tokens of each sequence attend to one another; `members` has their rows."""
    length = np.array([len(rows) for rows in members])
    longest = int(length.max())
    # Sequence i fills the first slots of its block of `longest` slots; padding comes after its tokens, where causal
    # attention does not look.
    slots = _ranges(np.arange(len(members)) * longest, length)
    index = row_index(len(members) * longest, slots, np.concatenate(members), device)
    place_SQ = torch.arange(longest, device=device).expand(len(members), longest)
    return PaddedPart(len(members), index, index, place_SQ, causal=True, reach=longest)


def _padded_prefixes(
    families: Sequence[tuple[Int64Array, Int64Array]], position_U: Int64Array, device: torch.device
) -> PaddedPart:
    """Return the part in which the own tokens of families attend to their prefixes.

    A family is a pair: the rows of its queries, and the rows of its prefix. All prefixes must have equal lengths,
    because nothing would hide padding of keys.
    """
    prefix, length = len(families[0][1]), np.array([len(rows) for rows, _ in families])
    longest, query_rows = int(length.max()), np.concatenate([rows for rows, _ in families])
    # Queries are padded to the longest family. A slot of padding has the place `prefix`, as if it came after all keys.
    slots = _ranges(np.arange(len(families)) * longest, length)
    place_M = np.full(len(families) * longest, prefix)
    place_M[slots] = position_U[query_rows]
    key_rows = np.concatenate([rows for _, rows in families])
    return PaddedPart(
        sequences=len(families),
        queries=row_index(len(place_M), slots, query_rows, device),
        keys=row_index(len(key_rows), np.arange(len(key_rows)), key_rows, device),
        place_SQ=to_device(place_M.reshape(len(families), longest), device),
        causal=False,
        reach=int(place_M.max()) + 1,
    )


def _ragged(
    queries: Sequence[Int64Array], keys: Sequence[Int64Array], causal: bool, reach: int, device: torch.device
) -> RaggedPart:
    """Return the ragged part in which `queries` attend to `keys`: the rows of each sequence or family.

    `causal` is True if queries and keys are the same tokens. `reach` is the most tokens that a query sees.
    """
    sides = list[tuple[RowIndex, Tensor, int]]()
    for rows in (queries, keys):
        lengths, flat = [len(one) for one in rows], np.concatenate(rows)
        begin_S = to_device(np.cumsum([0, *lengths], dtype=np.int32), device)
        sides.append((row_index(len(flat), np.arange(len(flat)), flat, device), begin_S, max(lengths)))
    (query_index, query_begin_S, longest_query), (key_index, key_begin_S, longest_key) = sides
    sequences = kernels.RaggedSequences((query_begin_S, key_begin_S), (longest_query, longest_key))
    return RaggedPart(query_index, key_index, sequences, causal, reach)


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return the numbers start, start + 1, … of each range of this length, one range after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the attention output [S, H, Q, D] of a padded batch and the log of the sum of weights, [S, H, Q].

    Without a cap, a kernel of torch computes both. With a cap, this function uses matrix products, because no kernel of
    torch caps scores. A query that sees no key gets an output of zeros and a log-sum of −inf.
    """
    if options.cap is None:
        return kernels.attend(query, key, value, options)
    answer = query.new_empty(*query.shape[:3], value.shape[-1])
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for rows in _row_blocks(query):
        scores, _ = _capped_scores(query, key, options, options.cap, rows)
        lse[:, :, rows] = total = scores.logsumexp(-1)
        # For a query that sees no key, −inf − (−inf) would be NaN.
        share = (scores - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp_().to(value.dtype)
        answer[:, :, rows] = _by_head(_by_group(share, value) @ value[:, :, : share.shape[-1]], query)
    return answer, lse


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, answer: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, also for capped scores.

    With share p = exp(score − lse), dL/dscore = p (grad · value − grad · answer), and the cap adds the factor
    1 − tanh². `answer` and `lse` must be merged over all parts; the result is then this part's share.
    """
    if options.cap is None:
        return kernels.attend_backward(grad, query, key, value, answer, lse, options)
    wide = lse.dtype
    grad_query, grad_key, grad_value = (torch.zeros_like(state, dtype=wide) for state in (query, key, value))
    for rows in _row_blocks(query):
        scores, slope = _capped_scores(query, key, options, options.cap, rows)
        share = (scores - lse[:, :, rows, None]).exp_()
        seen = slice(0, share.shape[-1])
        grad_rows = _by_group(grad[:, :, rows], value)
        grad_dot_answer = (grad[:, :, rows].to(wide) * answer[:, :, rows]).sum(-1, keepdim=True)
        grad_share = _by_head(grad_rows @ value[:, :, seen].transpose(2, 3), query).to(wide) - grad_dot_answer
        grad_product = _by_group((grad_share * share * slope * options.scale).to(query.dtype), key)
        grad_query[:, :, rows] = _by_head(grad_product @ key[:, :, seen], query)
        grad_key[:, :, seen] += grad_product.transpose(2, 3) @ _by_group(query[:, :, rows], key)
        grad_value[:, :, seen] += _by_group(share.to(value.dtype), value).transpose(2, 3) @ grad_rows
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _capped_scores(
    query: Tensor, key: Tensor, options: AttentionOptions, cap: float, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return two tensors [S, H, rows, K]: the capped scores, and the derivative of the cap.

    `rows` are places among the queries. K is here the number of keys that any of the rows may see. A score is −inf
    where a row does not see a key.
    """
    # Without a mask, causal rows see no keys after the last row.
    last = rows.stop if options.causal and options.mask is None else key.shape[2]
    product = _by_head(_by_group(query[:, :, rows], key) @ key[:, :, :last].transpose(2, 3), query)
    scores = product.to(torch.promote_types(product.dtype, torch.float32)).mul_(options.scale / cap).tanh_()
    slope = 1 - scores.square()
    if options.mask is not None:
        hidden = ~options.mask[:, :, rows, :last]
    else:
        place = torch.arange(last, device=key.device)
        hidden = place > place[rows, None] if options.causal else place < 0
    return scores.mul_(cap).masked_fill_(hidden, -torch.inf), slope


def _row_blocks(query: Tensor) -> Iterable[slice]:
    """Return slices of `ROWS_PER_BLOCK` rows that together cover the Q rows of a query."""
    starts = range(0, query.shape[2], ROWS_PER_BLOCK)
    return [slice(start, min(start + ROWS_PER_BLOCK, query.shape[2])) for start in starts]


def _by_group(states: Tensor, key: Tensor) -> Tensor:
    """Reshape [S, H, Q, X] to [S, G, H / G · Q, X]: the rows of all heads that share a key head form one matrix."""
    return states.reshape(len(states), key.shape[1], -1, states.shape[-1])


def _by_head(states: Tensor, query: Tensor) -> Tensor:
    """Reshape [S, G, H / G · Q, X] to [S, H, Q, X], the inverse of `_by_group`."""
    return states.reshape(len(states), query.shape[1], -1, states.shape[-1])


Scratch = tuple[Tensor, Tensor]
"""Two flat buffers of numbers, for the scores and the weights of a block. All blocks use the same buffers, because
allocating memory for each block would take more time than computing the block."""


class RowBlock(NamedTuple):
    """Rows whose attention weights exist at the same time."""

    rows: slice
    """The rows, as places among the R tokens."""
    seen: slice
    """Places in the sequence that any of the rows sees."""
    ahead: int
    """Number of places in `seen` that are later in the sequence than the first row."""


def blocks(position_R: IntArray, window: int | None) -> list[RowBlock]:
    """Divide tokens at the ascending places `position_R` into blocks of `ROWS_PER_BLOCK` rows.

    `flash.trainer.rhythm` computes the attention weights of one block at a time, with `attention_rows`. `window` is the
    number of places that each token sees, itself included; None: all places up to its own.
    """
    found: list[RowBlock] = []
    for begin in range(0, len(position_R), ROWS_PER_BLOCK):
        rows = slice(begin, min(begin + ROWS_PER_BLOCK, len(position_R)))
        lowest, highest = int(position_R[rows.start]), int(position_R[rows.stop - 1])
        first = 0 if window is None else max(lowest - window + 1, 0)
        found.append(RowBlock(rows, slice(first, highest + 1), highest - lowest))
    return found


def make_scratch(query: Tensor, wanted: Iterable[RowBlock]) -> Scratch:
    """Return buffers large enough for `attention_rows` with a query of [H, …, D] and any of these blocks."""
    most = max(
        ((block.rows.stop - block.rows.start) * (block.seen.stop - block.seen.start) for block in wanted), default=0
    )
    return query.new_empty(len(query) * most), query.new_empty(len(query) * most)


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
    """Return [H, B, C]: the attention weights of a block of rows, a softmax over the columns that each row sees.

    `flash.trainer.rhythm` calls this for each `RowBlock`. The result lies in `scratch` and is valid until the next call
    with the same buffers.

    Args:
        query_HBD: queries of the rows.
        key_GCD: keys of the columns.
        row_B: places of the rows in the sequence, ascending.
        column_C: places of the columns in the sequence, ascending.
        scaling: factor of the products; None: 1 / √D.
        window: number of places that a row sees, its own place included; None: all places up to its own.
        ahead: number of columns, at the end, that are later in the sequence than the first row. Only these need the
            causal mask.
        scratch: two buffers of at least H · B · C numbers.
    """
    heads, rows, width = query_HBD.shape
    groups, columns, _ = key_GCD.shape
    # Heads that share a key head are neighbours, so the rows of these heads form one matrix for a single product.
    query = query_HBD.reshape(groups, heads // groups * rows, width) * (width**-0.5 if scaling is None else scaling)
    scores, weights = (buffer[: heads * rows * columns].view(heads, rows, columns) for buffer in scratch)
    torch.bmm(query, key_GCD.transpose(1, 2), out=scores.view(*query.shape[:2], columns))
    late = slice(columns - ahead, columns)
    scores[..., late] += _additive_mask(row_B[:, None] < column_C[late], scores)
    if window is not None:
        scores += _additive_mask(row_B[:, None] - window >= column_C, scores)
    return torch.softmax(scores, -1, out=weights)


def _additive_mask(hidden_BC: Tensor, like: Tensor) -> Tensor:
    """Return [B, C]: −inf where hidden, else 0. Adding it is faster than filling the scores of each head."""
    return like.new_zeros(hidden_BC.shape).masked_fill_(hidden_BC, -torch.inf)
