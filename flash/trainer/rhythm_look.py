"""Looking at the rhythm of given responses, without training: what `RhythmPass` sees of them, and the maps themselves.

Shape legend: R = action tokens of a sequence, B = tokens of a drawn part of it, 2 = local and global.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algorithms.couplings import Signals
from algorithms.rhythm import FloatArray, Rhythm, multiplier
from flash.foreign.transformers import layer_number
from flash.trainer.mesh import TrainerMesh
from flash.trainer.model.attention import attention_rows, blocks, make_scratch
from flash.trainer.model.logprobs import policy_logprobs, watch_attention
from flash.trainer.model.model import reshard
from flash.trainer.packing import Float32Array, MicroBatch
from flash.trainer.rhythm import LayerHead, MicroSignals, RhythmPass, responses


class Seen(NamedTuple):
    """What was seen of one response."""

    sample: int
    """Its place among the samples, as in `MicroBatch.index_S`."""
    signals: Signals
    multiplier_R: FloatArray
    """γ, for an advantage of a sign that is multiplied."""


@torch.no_grad()
def look(
    model: PreTrainedModel, mesh: TrainerMesh, micros: Sequence[MicroBatch], options: Rhythm
) -> tuple[list[LayerHead], list[Seen]]:
    """The heads, told apart over all these responses, and the responses, in the order of the micro-batches.

    The passes are those of a step that begins with one: `model` comes from `shard_model`, over this `mesh`, entropies
    are of the distributions that tokens were drawn from.

    Raises:
        ConfigError: the model has no such layer, or one of them is not attention.
    """
    rhythm = RhythmPass(options, model)
    passes: list[tuple[MicroBatch, MicroSignals, FloatArray]] = []
    for micro in micros:
        watch = rhythm.watch(micro)
        says = policy_logprobs(model, micro, watch=watch)
        passes.append((micro, rhythm.seen(watch), says.entropy_T.double().cpu().numpy()))
    reshard(model)
    rhythm.choose_heads(mesh)
    found: list[Seen] = []
    for micro, seen, entropy_T in passes:
        waad_T, influence_T = rhythm.averaged(seen)
        for tokens, _, _, position_R in responses(micro):
            signals = Signals(position_R, waad_T[tokens], influence_T[tokens], entropy_T[tokens])
            gamma_R = multiplier(options, signals.waad_R, signals.influence_R, position_R)
            found.append(Seen(int(micro.index_T[tokens.start]), signals, gamma_R))
    return rhythm.heads(), found


class MapWatch:
    """Looks on at one forward pass over one sequence, and adds up the maps of local and of global heads."""

    def __init__(self, heads: Sequence[LayerHead], part: slice) -> None:
        self._heads = heads
        self._part = part
        size = part.stop - part.start
        self.sum_2BB = torch.zeros(2, size, size)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """See `AttentionWatch`."""
        here = [head for head in self._heads if head.layer == layer_number(module) and head.kind]
        if not here:
            return
        query, key = (one[0].to(torch.promote_types(one.dtype, torch.float32)) for one in (query, key))
        numbers = torch.tensor([head.head for head in here])
        query, key = query[numbers], key[numbers // (len(query) // len(key))]
        row_B = np.arange(self._part.start, self._part.stop)
        each = blocks(row_B, sliding_window)
        scratch = make_scratch(query, each)
        place_L = torch.arange(query.shape[1])
        for block in each:
            rows = torch.from_numpy(row_B[block.rows])
            weights = attention_rows(
                query[:, rows],
                key[:, block.seen],
                rows,
                place_L[block.seen],
                scaling,
                sliding_window,
                ahead=block.ahead,
                scratch=scratch,
            )
            self._add(weights, here, block.rows, block.seen.start)

    def _add(self, weights_HBC: Tensor, here: Sequence[LayerHead], rows: slice, first: int) -> None:
        """The columns that are drawn, of these rows."""
        begin = max(first, self._part.start)
        inside = weights_HBC[..., begin - first :]
        columns = slice(begin - self._part.start, begin - self._part.start + inside.shape[-1])
        for place, kind in enumerate(("local", "global")):
            chosen = [head.kind == kind for head in here]
            self.sum_2BB[place, rows, columns] += inside[torch.tensor(chosen)].sum(0)


@torch.no_grad()
def maps(model: PreTrainedModel, micro: MicroBatch, heads: Sequence[LayerHead], part: slice) -> Float32Array:
    """[2, B, B]: the attention between the tokens of a part of the only sequence, averaged over the heads of each kind.

    Rows are those who look. Memory is that of a block of rows at a time, beside the answer.
    """
    assert micro.sequences == 1, "a map is of one sequence"
    watch = MapWatch(heads, part)
    watch_attention(model, micro, watch)
    reshard(model)
    count_2 = [sum(head.kind == kind for head in heads) for kind in ("local", "global")]
    return (watch.sum_2BB / torch.tensor(count_2)[:, None, None]).numpy()
