"""The pass that looks at the policy's attention at the start of a step: from packed sequences to token multipliers.

Whatever kernel attends, each layer hands its queries and keys, as the model made them, to `packed_attention`; there a
`RhythmWatch` looks on. It makes the attention weights of the chosen layers once more, for the rows of action tokens
only and block by block, and keeps two numbers per head and token: WAAD and FAI are linear in the weights, so the mean
over the heads of a kind may wait until all ranks have told how far their heads look. A sequence never sees another.

Shape legend: H = heads of a layer, N = heads of all chosen layers, R = action tokens of a sequence, T = those of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
from flash.trainer.model.attention import Block, attention_rows, blocks, make_scratch
from flash.trainer.model.logprobs import watch_attention
from flash.trainer.model.packed import class_name
from flash.trainer.packing import DUMMY, Float32Array, MicroBatch


class HeadKinds(NamedTuple):
    """Heads of a layer, by number."""

    near: IntArray
    """Local."""
    far: IntArray
    """Global."""


@dataclass
class HeadSignals:
    """What the heads of a layer said of a micro-batch; 0 for those that were not asked."""

    span_H: Tensor
    """float64: summed over the rows."""
    waad_HT: Tensor
    influence_HT: Tensor
    """FAI; 0 for a token that nothing comes after in time."""


@dataclass
class RhythmWatch:
    """Looks on at one forward pass over one micro-batch."""

    micro: MicroBatch
    layers: Sequence[int]
    options: Rhythm
    kinds: dict[int, HeadKinds] | None = None
    """By layer, where they are settled: only local heads are asked for WAAD then, only global ones for FAI."""
    heads: dict[int, int] = field(default_factory=dict)
    """Of each layer that attended."""
    unnumbered: str = ""
    """The class of an attention module that does not say which layer it is of."""
    signals: dict[int, HeadSignals] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """See `AttentionWatch`."""
        layer = layer_number(module)
        if layer is None:
            self.unnumbered = class_name(module)
            return
        self.heads[layer] = query.shape[1]
        if layer not in self.layers:
            return
        query, key = (one[0].to(torch.promote_types(one.dtype, torch.float32)) for one in (query, key))
        attend = partial(attention_rows, scaling=scaling, window=sliding_window)
        if self.kinds is None:
            everyone = slice(None)
            self.signals[layer] = self._signals(query, key, everyone, everyone, sliding_window, attend)
            return
        near, far = (torch.from_numpy(heads).to(query.device) for heads in self.kinds[layer])
        asked = torch.cat([near, far])
        shared = len(query) // len(key)
        order = slice(0, len(near)), slice(len(near), len(asked))
        part = self._signals(query[asked], key[asked // shared], *order, sliding_window, attend)
        self.signals[layer] = HeadSignals(
            span_H=_spread(part.span_H, asked, len(query)),
            waad_HT=_spread(part.waad_HT, near, len(query)),
            influence_HT=_spread(part.influence_HT, far, len(query)),
        )

    def _signals(
        self, query: Tensor, key: Tensor, near: slice, far: slice, window: int | None, attend: Callable[..., Tensor]
    ) -> HeadSignals:
        """What all these heads, and those of each kind among them, say of the whole micro-batch."""
        tokens = len(self.micro.target_T)
        found = HeadSignals(
            span_H=query.new_zeros(len(query), dtype=torch.float64),
            waad_HT=query.new_zeros(len(query[near]), tokens),
            influence_HT=query.new_zeros(len(query[far]), tokens),
        )
        seen = [(*one, blocks(one[-1], window)) for one in responses(self.micro)]
        scratch = make_scratch(query, chain.from_iterable(each for *_, each in seen))
        for tokens, start, stop, position_R, each in seen if len(query) else ():
            mine = HeadSignals(found.span_H, found.waad_HT[:, tokens], found.influence_HT[:, tokens])
            self._look(
                mine,
                query[:, start:stop],
                key[:, start:stop],
                near,
                far,
                position_R,
                each,
                partial(attend, scratch=scratch),
            )
        return found

    def _look(
        self,
        found: HeadSignals,
        query: Tensor,
        key: Tensor,
        near: slice,
        far: slice,
        position_R: IntArray,
        each: Iterable[Block],
        attend: Callable[..., Tensor],
    ) -> None:
        """One sequence: the weights of a block of rows, what they say, and no trace of them."""
        options = self.options
        row_R = torch.from_numpy(position_R).to(query.device)
        place_L = torch.arange(query.shape[1], device=query.device)
        # Of all columns up to the last row, since blocks add to those of rows before them.
        given = query.new_zeros(len(found.influence_HT), query.shape[1])
        for block in each:
            rows, columns = row_R[block.rows], place_L[block.seen]
            lowest, highest = block.seen.stop - 1 - block.ahead, block.seen.stop - 1
            # Within a turn rows are neighbours, and need not be copied.
            theirs = slice(lowest, highest + 1) if len(rows) == block.ahead + 1 else rows
            weights = attend(query[:, theirs], key[:, block.seen], rows, columns, ahead=block.ahead)
            found.span_H += spans(weights, rows, columns).double().sum(-1)
            found.waad_HT[:, block.rows] = windowed_distance(weights[near], rows, columns, options.window)
            first = block.seen.start
            late = slice(max(lowest - options.farthest, first), max(highest - options.nearest, first) + 1)
            inside = slice(late.start - first, late.stop - first)
            given[:, late] += future_influence(
                weights[far, :, inside], rows, columns[inside], options.nearest, options.farthest
            )
        count_R = torch.from_numpy(followers(position_R, options.nearest, options.farthest)).to(query.device)
        found.influence_HT[:] = given[:, row_R] / count_R.clamp(min=1)


def _spread(values: Tensor, heads: Tensor, count: int) -> Tensor:
    """[.., ..] of these heads to [count, ..] of all."""
    spread = values.new_zeros(count, *values.shape[1:])
    spread[heads] = values
    return spread


def responses(micro: MicroBatch) -> Iterator[tuple[slice, int, int, IntArray]]:
    """The sequences that have a token to train: where they are in T, from where to where in P, and [R] the places of
    their action tokens in the sequence, old ones included.
    """
    starts = np.searchsorted(micro.sequence_T, np.arange(micro.sequences + 1))
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        tokens = slice(int(begin), int(end))
        if micro.mask_T[tokens].any():
            position_R = micro.position_P[micro.keep_T[tokens] + 1]
            yield tokens, int(micro.offset_S[sequence]), int(micro.offset_S[sequence + 1]), position_R


@dataclass(frozen=True)
class MicroSignals:
    """What all chosen layers said of a micro-batch; on the CPU."""

    waad_NT: Float32Array
    influence_NT: Float32Array


class LayerHead(NamedTuple):
    """A head of a chosen layer, and what it was chosen for."""

    layer: int
    head: int
    """Within its layer."""
    span: float
    """Tokens that it looks back, in the mean."""
    kind: Literal["local", "global", ""]


class RhythmPass:
    """Advantages in rhythm, step by step.

    A step is `watch` and `seen` at every micro-batch, `choose_heads`, `multiplied` at every micro-batch, and `report`.
    Once the heads are settled, each micro-batch may be multiplied as soon as it is seen.
    """

    def __init__(self, options: Rhythm, model: PreTrainedModel) -> None:
        """Find the layers to look at, and look at them once: a collective.

        Raises:
            ConfigError: the model has no such layer, or one of them is not attention.
        """
        try:
            self._layers = chosen_layers(options.layers, layer_count(model))
        except ValueError as error:
            raise ConfigError(f"algorithm.rhythm.layers: {class_name(model)}: {error}") from error
        self._options = options
        watch = RhythmWatch(DUMMY, self._layers, options)
        watch_attention(model, DUMMY, watch)
        if watch.unnumbered:
            raise ConfigError(
                f"algorithm.rhythm: the attention of {class_name(model)}, {watch.unnumbered}, does not say which layer "
                "it is of; choose another model"
            )
        without = [layer for layer in self._layers if layer not in watch.heads]
        if without:
            others = ", ".join(map(str, sorted(watch.heads))) or "none"
            raise ConfigError(
                f"algorithm.rhythm.layers: layer {without[0]} of {class_name(model)} is not attention, so nothing "
                f"in it says which token looks at which (layers that are: {others})"
            )
        self._heads_of = {layer: watch.heads[layer] for layer in self._layers}
        count = sum(self._heads_of.values())
        if count < 2:
            raise ConfigError(
                f"algorithm.rhythm: the chosen layers of {class_name(model)} have one head, which cannot be local and "
                "global at once; look at more layers"
            )
        self.kinds_2N: Tensor | None = torch.zeros(2, count) if options.heads == "first" else None
        """Which heads are local, and which global, by 1, once they have been chosen for the whole run; 0 before."""
        self._kinds: tuple[IntArray, IntArray] | None = None
        """The local and the global heads of this step."""
        self.tally = np.zeros(count + 3)
        """Of this rank's part of the step: [N] spans summed over rows, the rows, multiplied and trained tokens."""

    @property
    def settled(self) -> bool:
        """Whether the heads are known before a batch is seen."""
        return self.kinds_2N is not None and bool(self.kinds_2N.any())

    def watch(self, micro: MicroBatch) -> RhythmWatch:
        """To look on at one forward pass over this micro-batch."""
        return RhythmWatch(micro, self._layers, self._options, self._by_layer() if self.settled else None)

    def _by_layer(self) -> dict[int, HeadKinds]:
        """The local and the global heads of each layer, by their numbers in it."""
        ends = list(accumulate(self._heads_of.values(), initial=0))
        return {
            layer: HeadKinds(*(heads[(heads >= begin) & (heads < end)] - begin for heads in self._heads()))
            for layer, (begin, end) in zip(self._heads_of, pairwise(ends), strict=True)
        }

    def seen(self, watch: RhythmWatch) -> MicroSignals:
        """What was seen, all chosen layers together."""
        found = [watch.signals[layer] for layer in self._layers]
        span_N = torch.cat([one.span_H for one in found]).cpu().numpy()
        rows = sum(len(position_R) for *_, position_R in responses(watch.micro))
        self.tally[:-2] += np.append(span_N, rows)
        return MicroSignals(
            waad_NT=torch.cat([one.waad_HT for one in found]).cpu().numpy(),
            influence_NT=torch.cat([one.influence_HT for one in found]).cpu().numpy(),
        )

    def choose_heads(self, mesh: TrainerMesh) -> None:
        """Which heads are local and global follows from the rows of all ranks, once this rank has seen all of its own.

        A collective, unless the heads are settled. A batch without a row settles nothing.
        """
        if self.settled:
            return
        mean_N, rows = self._spans(mesh.gather_rows(torch.from_numpy(self.tally)).sum(0).cpu().numpy())
        self._kinds = head_kinds(mean_N, self._options)
        if self.kinds_2N is not None and rows > 0:
            for row, heads in zip(self.kinds_2N, self._kinds, strict=True):
                row[torch.from_numpy(heads)] = 1

    def averaged(self, seen: MicroSignals) -> tuple[FloatArray, FloatArray]:
        """float64 [T]: WAAD over the local heads, FAI over the global ones."""
        near, far = self._heads()
        return seen.waad_NT[near].mean(0, dtype=np.float64), seen.influence_NT[far].mean(0, dtype=np.float64)

    def heads(self) -> list[LayerHead]:
        """Those of the chosen layers, by what this rank has seen in this step, once they are told apart."""
        (span_N, _), (near, far) = self._spans(self.tally), self._heads()
        numbered = [(layer, head) for layer, count in self._heads_of.items() for head in range(count)]
        return [
            LayerHead(layer, head, float(span_N[n]), "local" if n in near else "global" if n in far else "")
            for n, (layer, head) in enumerate(numbered)
        ]

    def multiplied(self, advantage_T: FloatArray, seen: MicroSignals, micro: MicroBatch) -> FloatArray:
        """float64 [T]: the advantages in rhythm, those of the chosen signs; as they were without a token to train."""
        waad_T, influence_T = self.averaged(seen)
        gamma_T = np.ones(len(micro.target_T))
        for tokens, _, _, position_R in responses(micro):
            gamma_T[tokens] = multiplier(self._options, waad_T[tokens], influence_T[tokens], position_R)
        if self._options.signs != "both":
            sign = 1 if self._options.signs == "positive" else -1
            gamma_T[~(sign * advantage_T > 0)] = 1.0
        self.tally[-2:] += (gamma_T[micro.mask_T] > 1).sum(), micro.mask_T.sum()
        return advantage_T * gamma_T

    def report(self, mesh: TrainerMesh) -> dict[str, float]:
        """What the step showed over all ranks; the next one starts anew. A collective."""
        tally = mesh.gather_rows(torch.from_numpy(self.tally)).sum(0).cpu().numpy()
        (mean_N, _), (near, far) = self._spans(tally), self._heads()
        self.tally = np.zeros_like(self.tally)
        return {
            "rhythm_share": float(tally[-2] / max(tally[-1], 1.0)),
            "rhythm_span_local": float(mean_N[near].mean()),
            "rhythm_span_global": float(mean_N[far].mean()),
        }

    def _heads(self) -> tuple[IntArray, IntArray]:
        if self.kinds_2N is not None and self.settled:
            near, far = (row.nonzero().flatten().numpy() for row in self.kinds_2N)
            return near, far
        assert self._kinds is not None, "heads are chosen before they are asked for"
        return self._kinds

    def _spans(self, tally: FloatArray) -> tuple[FloatArray, float]:
        """[N] mean spans, and the rows that they are the means over."""
        return tally[:-3] / max(tally[-3], 1.0), float(tally[-3])
