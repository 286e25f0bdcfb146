"""Observes the policy's attention at the start of a step, and multiplies token advantages by factors computed from it.

The advantages of *anchors*, to which later tokens attend, and of *plans*, at which the distance that the policy looks
back changes, are multiplied by a factor. `flash.trainer.step` runs a forward pass with a `RhythmWatch`. In each layer
`packed_attention` gives the watch the queries and keys as the model made them, whatever kernel computes the attention.
The watch computes the attention weights of the chosen layers once more, only for action tokens (tokens that the policy
sampled), one block of rows at a time. It keeps two numbers per head and token, which `algorithms.rhythm` defines: WAAD
(windowed average attention distance: how far the token looks back) and FAI (future attention influence: how much later
tokens look at it). Both are linear in the attention weights, so the mean over local or global heads can be taken after
all ranks have reported the spans of their heads. The sequences of a micro-batch never influence one another. `flash
rhythm` shows the same signals with `observe_responses` and `attention_maps`.

*Local* heads look back the shortest distance (their *span*), *global* heads the longest. A *row* of attention weights
belongs to the token that attends, a *column* to the token that it looks at. In the code, a *response* is the action
tokens of one sequence, and a sequence's trained response has at least one token to train.

Shape legend: H = heads of a layer, N = heads of all chosen layers, P = packed tokens, L = tokens of a sequence,
R = action tokens of a sequence, T = action tokens of a micro-batch, B = tokens of the part of a sequence whose map is
drawn, C = columns of a block, D = width of a head, 2 = local and global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algorithms.couplings import Signals
from algorithms.rhythm import (
    FloatArray,
    IntArray,
    Rhythm,
    chosen_layers,
    followers,
    future_influence,
    head_kinds,
    multiplier,
    spans,
    windowed_distance,
)
from flash.errors import ConfigError
from flash.foreign.transformers import layer_count, layer_number
from flash.trainer.mesh import TrainerMesh
from flash.trainer.model.attention import RowBlock, attention_rows, blocks, make_scratch
from flash.trainer.model.logprobs import policy_logprobs, watch_attention
from flash.trainer.model.model import reshard
from flash.trainer.model.packed import class_name
from flash.trainer.packing import DUMMY, Float32Array, MicroBatch


class HeadKinds(NamedTuple):
    """The local and the global heads, by their numbers among the heads of all chosen layers."""

    local: IntArray
    """Heads with the shortest span; WAAD is averaged over them."""
    far: IntArray
    """Global heads, which have the longest span; FAI is averaged over them. (`global` is a keyword of Python.)"""


@dataclass
class HeadSignals:
    """Signals of one layer's heads for a micro-batch."""

    span_H: Tensor
    """float64: sum over the rows of the mean distance that the head looks back."""
    waad_HT: Tensor
    """WAAD of each token."""
    influence_HT: Tensor
    """FAI of each token; 0 for a token without later action tokens."""


@dataclass
class RhythmWatch:
    """Callback that observes the attention of one forward pass over one micro-batch.

    The model calls it once in each layer, as an `AttentionWatch` (`flash.trainer.model.packed`). `RhythmPass` makes the
    watch, and reads the results after the pass.
    """

    micro: MicroBatch
    layers: Sequence[int]
    """Numbers of the layers to observe."""
    options: Rhythm
    heads: dict[int, int] = field(default_factory=dict)
    """Number of heads of each layer that has attention, observed or not."""
    unnumbered: str = ""
    """Name of the class of an attention module that has no number of a layer; empty if there is no such module."""
    signals: dict[int, HeadSignals] = field(default_factory=dict)
    """Results, by layer."""

    @torch.no_grad()
    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """Compute the signals of one layer from its queries and keys, and store them in `signals`.

        A layer that is not to be observed is only counted. A layer without a number is noted in `unnumbered`.

        Args:
            module: the attention module of the layer.
            query: [1, H, P, D], queries of all tokens of the micro-batch.
            key: [1, heads of keys, P, D]. Neighbouring heads of queries may share a head of keys.
            scaling: factor of the products of queries and keys; None: 1 / √D.
            sliding_window: number of tokens that a token sees, itself included; None: itself and all earlier tokens.
        """
        layer = layer_number(module)
        if layer is None:
            self.unnumbered = class_name(module)
            return
        self.heads[layer] = query.shape[1]
        if layer not in self.layers:
            return
        query, key = (one[0].to(torch.promote_types(one.dtype, torch.float32)) for one in (query, key))
        action_tokens = len(self.micro.target_T)
        found = self.signals[layer] = HeadSignals(
            span_H=query.new_zeros(len(query), dtype=torch.float64),
            waad_HT=query.new_zeros(len(query), action_tokens),
            influence_HT=query.new_zeros(len(query), action_tokens),
        )
        responses = [(one, blocks(one.position_R, sliding_window)) for one in trained_responses(self.micro)]
        # All blocks use the same memory, because allocating memory for each block would take longer than the
        # arithmetic.
        scratch = make_scratch(query, chain.from_iterable(row_blocks for _, row_blocks in responses))
        attend = partial(attention_rows, scaling=scaling, window=sliding_window, scratch=scratch)
        for response, row_blocks in responses:
            self._add_response(
                HeadSignals(found.span_H, found.waad_HT[:, response.tokens], found.influence_HT[:, response.tokens]),
                query[:, response.start : response.stop],
                key[:, response.start : response.stop],
                response.position_R,
                row_blocks,
                attend,
            )

    def _add_response(
        self,
        found: HeadSignals,
        query_HLD: Tensor,
        key_HLD: Tensor,
        position_R: IntArray,
        row_blocks: Sequence[RowBlock],
        attend: Callable[..., Tensor],
    ) -> None:
        """Write the signals of one sequence into `found`. Memory holds the weights of one block of rows at a time.

        Args:
            found: views of the results. The spans of this sequence are added to the spans, and its WAAD and FAI are
                set.
            query_HLD: queries of the sequence.
            key_HLD: keys of the sequence.
            position_R: places of the action tokens in the sequence.
            row_blocks: division of the action tokens into blocks. A block has the slice `rows` of the R tokens, the
                slice `seen` of the sequence that any of these rows sees, and `ahead`, the number of places in `seen`
                after the block's first row.
            attend: computes the attention weights of a block, [H, rows, places in `seen`]: `attention_rows` with the
                options of the layer. The result is valid until the next call.
        """
        options = self.options
        row_R = torch.from_numpy(position_R).to(query_HLD.device)
        place_L = torch.arange(query_HLD.shape[1], device=query_HLD.device)
        # Keep one sum for each column, because the rows of a block also add to columns of earlier blocks.
        received_HL = query_HLD.new_zeros(len(found.influence_HT), query_HLD.shape[1])
        for block in row_blocks:
            rows, columns = row_R[block.rows], place_L[block.seen]
            # Places of the block's first and last row: the last place that is seen is the last row itself.
            lowest, highest = block.seen.stop - 1 - block.ahead, block.seen.stop - 1
            # Within a turn (a response of the policy) the rows are neighbours, and a slice of them needs no copy.
            query_rows = slice(lowest, highest + 1) if len(rows) == block.ahead + 1 else rows
            weights = attend(query_HLD[:, query_rows], key_HLD[:, block.seen], rows, columns, ahead=block.ahead)
            found.span_H += spans(weights, rows, columns).double().sum(-1)
            found.waad_HT[:, block.rows] = windowed_distance(weights, rows, columns)
            first = block.seen.start
            # FAI needs only the columns from `farthest` places before the lowest row to `nearest` places before the
            # highest row.
            late = slice(max(lowest - options.farthest, first), max(highest - options.nearest, first) + 1)
            inside = slice(late.start - first, late.stop - first)
            received_HL[:, late] += future_influence(
                weights[..., inside], rows, columns[inside], options.nearest, options.farthest
            )
        count_R = torch.from_numpy(followers(position_R, options.nearest, options.farthest)).to(query_HLD.device)
        found.influence_HT[:] = received_HL[:, row_R] / count_R.clamp(min=1)


class TrainedResponse(NamedTuple):
    """Response of a sequence with a token to train: where its tokens are."""

    tokens: slice
    """The sequence's action tokens in T."""
    start: int
    """First place of the sequence in P."""
    stop: int
    """Place in P after the last token of the sequence."""
    position_R: IntArray
    """Places of the action tokens in the sequence, including tokens that are too old to train."""


def trained_responses(micro: MicroBatch) -> Iterator[TrainedResponse]:
    """Yield the response of each sequence that has a token to train, in the order of the sequences."""
    starts = np.searchsorted(micro.sequence_T, np.arange(micro.sequences + 1))
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        tokens = slice(int(begin), int(end))
        if micro.mask_T[tokens].any():
            position_R = micro.position_P[micro.before_T[tokens] + 1]
            yield TrainedResponse(tokens, int(micro.offset_S[sequence]), int(micro.offset_S[sequence + 1]), position_R)


@dataclass(frozen=True)
class MicroSignals:
    """WAAD and FAI of the heads of all chosen layers for one micro-batch, on the CPU."""

    waad_NT: Float32Array
    influence_NT: Float32Array


class LayerHead(NamedTuple):
    """Head of a chosen layer."""

    layer: int
    head: int
    """Number of the head within its layer."""
    span: float
    """Mean distance that the head looks back, in tokens."""
    kind: Literal["local", "global", ""]
    """Kind for which the head was chosen; empty if it was not chosen."""


class RhythmPass:
    """Multiplies the advantages of each step by the rhythm of the policy's attention. One object serves a whole run.

    In each step, all ranks make these calls: `watch` and `collect` for every micro-batch, then `choose_heads`, then
    `multiply` for every micro-batch, then `report`.
    """

    def __init__(self, options: Rhythm, model: PreTrainedModel) -> None:
        """Find the chosen layers, and count their heads in one forward pass over a dummy micro-batch. A collective.

        FSDP keeps the gathered weights of the pass; the caller frees them with `reshard`.

        Raises:
            ConfigError: no layer is attention, the attention does not know the number of its layer, or the chosen
                layers have fewer than two heads.
        """
        self._options = options
        watch = RhythmWatch(DUMMY, (), options)
        watch_attention(model, DUMMY, watch)
        if watch.unnumbered:
            raise ConfigError(
                f"algorithm.rhythm: the attention of {class_name(model)}, {watch.unnumbered}, does not report the "
                "number of its layer; choose another model"
            )
        if not watch.heads:
            raise ConfigError(f"algorithm.rhythm: no layer of {class_name(model)} is attention; choose another model")
        self._layers = chosen_layers(list(watch.heads), layer_count(model))
        self._heads_of_layer = {layer: watch.heads[layer] for layer in self._layers}
        count = sum(self._heads_of_layer.values())
        if count < 2:
            raise ConfigError(
                f"algorithm.rhythm: the chosen layers of {class_name(model)} have one head, which cannot be local and "
                "global at once; choose another model"
            )
        self._kinds: HeadKinds | None = None
        """Heads chosen in this step; None before the first choice."""
        self.tally = np.zeros(count + 3)
        """Sums over this rank's part of the step: [N] spans summed over rows, then the numbers of rows, of trained
        tokens whose advantage was multiplied, and of trained tokens."""

    def watch(self, micro: MicroBatch) -> RhythmWatch:
        """Return a watch for one forward pass over this micro-batch, which observes all heads of the chosen layers."""
        return RhythmWatch(micro, self._layers, self._options)

    def collect(self, watch: RhythmWatch) -> MicroSignals:
        """Return the signals that a watch found in all chosen layers.

        The spans of the heads, and the number of rows, are added to the tally, by which `choose_heads` decides.
        """
        found = [watch.signals[layer] for layer in self._layers]
        span_N = torch.cat([one.span_H for one in found]).cpu().numpy()
        rows = sum(len(response.position_R) for response in trained_responses(watch.micro))
        self.tally[:-2] += np.append(span_N, rows)
        return MicroSignals(
            waad_NT=torch.cat([one.waad_HT for one in found]).cpu().numpy(),
            influence_NT=torch.cat([one.influence_HT for one in found]).cpu().numpy(),
        )

    def choose_heads(self, mesh: TrainerMesh) -> None:
        """Choose the local and the global heads by their spans over all ranks. A collective.

        Call this after this rank has collected all of its micro-batches.
        """
        tally = mesh.gather_rows(torch.from_numpy(self.tally)).sum(0).cpu().numpy()
        self._kinds = HeadKinds(*head_kinds(self._spans(tally)))

    def head_means(self, signals: MicroSignals) -> tuple[FloatArray, FloatArray]:
        """Return WAAD averaged over the local heads and FAI averaged over the global heads, float64 [T] each."""
        local, far = self._chosen()
        return signals.waad_NT[local].mean(0, dtype=np.float64), signals.influence_NT[far].mean(0, dtype=np.float64)

    def heads(self) -> list[LayerHead]:
        """Return all heads of the chosen layers, with their mean spans over this rank's part of the step.

        Call this after `choose_heads`.
        """
        span_N, (local, far) = self._spans(self.tally), self._chosen()
        numbered = [(layer, head) for layer, count in self._heads_of_layer.items() for head in range(count)]
        return [
            LayerHead(layer, head, float(span_N[n]), "local" if n in local else "global" if n in far else "")
            for n, (layer, head) in enumerate(numbered)
        ]

    def multiply(self, advantage_T: FloatArray, signals: MicroSignals, micro: MicroBatch) -> FloatArray:
        """Return the advantages multiplied by γ, the factor of `algorithms.rhythm.multiplier`; float64 [T].

        Sequences without a token to train do not change. The multiplied tokens are counted for `report`.
        """
        waad_T, influence_T = self.head_means(signals)
        gamma_T = np.ones(len(micro.target_T))
        for response in trained_responses(micro):
            at = response.tokens
            gamma_T[at] = multiplier(self._options, waad_T[at], influence_T[at], response.position_R)
        self.tally[-2:] += (gamma_T[micro.mask_T] > 1).sum(), micro.mask_T.sum()
        return advantage_T * gamma_T

    def report(self, mesh: TrainerMesh) -> dict[str, float]:
        """Return the metrics of the step over all ranks, and clear the tally. A collective.

        `rhythm_share` is the share of trained tokens whose advantage was multiplied by more than 1. `rhythm_span_local`
        and `rhythm_span_global` are the mean spans, in tokens, of the local and of the global heads.
        """
        tally = mesh.gather_rows(torch.from_numpy(self.tally)).sum(0).cpu().numpy()
        mean_N, (local, far) = self._spans(tally), self._chosen()
        self.tally = np.zeros_like(self.tally)
        return {
            "rhythm_share": float(tally[-2] / max(tally[-1], 1.0)),
            "rhythm_span_local": float(mean_N[local].mean()),
            "rhythm_span_global": float(mean_N[far].mean()),
        }

    def _chosen(self) -> HeadKinds:
        """Return the local and global heads of this step. `choose_heads` must have been called before."""
        assert self._kinds is not None, "heads are chosen before they are used"
        return self._kinds

    def _spans(self, tally: FloatArray) -> FloatArray:
        """Return [N]: the mean span of each head, in tokens; 0 without rows. `tally` has the form of `self.tally`."""
        return tally[:-3] / max(tally[-3], 1.0)


class ResponseSignals(NamedTuple):
    """Signals of one response, outside training."""

    sample: int
    """Index of the response's sample in the batch."""
    signals: Signals
    multiplier_R: FloatArray
    """γ of each token."""


@torch.no_grad()
def observe_responses(
    model: PreTrainedModel, mesh: TrainerMesh, micros: Sequence[MicroBatch], options: Rhythm
) -> tuple[list[LayerHead], list[ResponseSignals]]:
    """Return the heads, chosen over all these responses, and the signals of each response in the micro-batches' order.

    `flash rhythm` calls this. A training step computes the same signals. Entropies are of the distributions that the
    tokens were sampled from. `model` comes from `shard_model`, with this `mesh`.

    Raises:
        ConfigError: the attention of the chosen layers cannot be observed, or they have fewer than two heads.
    """
    rhythm = RhythmPass(options, model)
    passes: list[tuple[MicroBatch, MicroSignals, FloatArray]] = []
    for micro in micros:
        watch = rhythm.watch(micro)
        logprobs = policy_logprobs(model, micro, watch=watch)
        passes.append((micro, rhythm.collect(watch), logprobs.entropy_T.double().cpu().numpy()))
    reshard(model)
    rhythm.choose_heads(mesh)
    found: list[ResponseSignals] = []
    for micro, micro_signals, entropy_T in passes:
        waad_T, influence_T = rhythm.head_means(micro_signals)
        for response in trained_responses(micro):
            at = response.tokens
            signals = Signals(response.position_R, waad_T[at], influence_T[at], entropy_T[at])
            gamma_R = multiplier(options, signals.waad_R, signals.influence_R, response.position_R)
            found.append(ResponseSignals(int(micro.index_T[at.start]), signals, gamma_R))
    return rhythm.heads(), found


class MapWatch:
    """Callback that observes one forward pass over one sequence, and sums the attention maps of the local heads and of
    the global heads, for `attention_maps`. The model calls it in each layer, as an `AttentionWatch`."""

    def __init__(self, heads: Sequence[LayerHead], part: slice) -> None:
        """Observe the local and global heads among `heads`. `part` is the slice of the sequence whose map is drawn."""
        self._heads = heads
        self._part = part
        size = part.stop - part.start
        self.sum_2BB = torch.zeros(2, size, size)
        """Attention weights within the part, summed over the local heads (index 0) and over the global heads (index 1).
        It is on the CPU, on which `flash rhythm` runs the model."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """Add the maps of one layer, from its queries and keys. `RhythmWatch.__call__` explains the arguments."""
        here = [head for head in self._heads if head.layer == layer_number(module) and head.kind]
        if not here:
            return
        query, key = (one[0].to(torch.promote_types(one.dtype, torch.float32)) for one in (query, key))
        numbers = torch.tensor([head.head for head in here])
        # Neighbouring heads of queries may share a head of keys.
        query, key = query[numbers], key[numbers // (len(query) // len(key))]
        row_B = np.arange(self._part.start, self._part.stop)
        row_blocks = blocks(row_B, sliding_window)
        scratch = make_scratch(query, row_blocks)
        place_L = torch.arange(query.shape[1])
        for block in row_blocks:
            rows = torch.from_numpy(row_B[block.rows])
            weights_HBC = attention_rows(
                query[:, rows],
                key[:, block.seen],
                rows,
                place_L[block.seen],
                scaling,
                sliding_window,
                ahead=block.ahead,
                scratch=scratch,
            )
            # Columns before the drawn part are left out.
            begin = max(block.seen.start, self._part.start)
            inside_HBC = weights_HBC[..., begin - block.seen.start :]
            columns = slice(begin - self._part.start, begin - self._part.start + inside_HBC.shape[-1])
            for place, kind in enumerate(("local", "global")):
                chosen_H = torch.tensor([head.kind == kind for head in here])
                self.sum_2BB[place, block.rows, columns] += inside_HBC[chosen_H].sum(0)


@torch.no_grad()
def attention_maps(model: PreTrainedModel, micro: MicroBatch, heads: Sequence[LayerHead], part: slice) -> Float32Array:
    """Return [2, B, B]: the attention within a part of the only sequence, averaged over the heads of each kind.

    Row t holds the weights with which token t attends. Beside the result, memory holds one block of rows at a time.
    `flash rhythm` draws the maps, and `heads` come from `observe_responses`.
    """
    assert micro.sequences == 1, "a map shows one sequence"
    watch = MapWatch(heads, part)
    watch_attention(model, micro, watch)
    reshard(model)
    count_2 = [sum(head.kind == kind for head in heads) for kind in ("local", "global")]
    return (watch.sum_2BB / torch.tensor(count_2)[:, None, None]).numpy()
