"""A look at single tokens while a step trains: those of the samples that the run shows.

Shape legend: T = action tokens of a micro-batch, A = action tokens of a sample, N = those of one sequence.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from algorithms.base import PackedTokens
from flash.ages import recent
from flash.branches import spans_by_turn
from flash.trained import TokenUse, TrainedSample, shown_places
from flash.trainer.loss import TokenLoss
from flash.trainer.mesh import TrainerMesh
from flash.trainer.packing import MicroBatch
from flash.types import Shard, Trajectory

ROWS = 4
"""Log-prob, entropy, advantage, use."""


class _Part(NamedTuple):
    """A sequence that was looked at."""

    place: int
    """Of its sample in the batch."""
    begin: int
    """Place of its first action token in the sample."""
    rows_RN: Tensor


class TokenLook:
    """What this rank's part of a step makes of the tokens that are shown; nothing is computed for it."""

    def __init__(self, shard: Shard, count: int) -> None:
        self._count = count
        places = set(shown_places((recent(entry.oldest_version, shard.min_version) for entry in shard.batch), count))
        self._shown = {one.index: one.trajectory for one in shard.samples if one.index in places}
        self._places = np.array(sorted(self._shown), dtype=np.int64)
        self._parts: list[_Part] = []

    def add(self, micro: MicroBatch, tokens: PackedTokens, first_T: Tensor, entropy_T: Tensor, loss: TokenLoss) -> None:
        """One micro-batch, at the first pass over it."""
        found_S = np.flatnonzero(np.isin(micro.index_S, self._places))
        # A micro-batch without a trained token is a dummy, which is of no sample.
        if not len(found_S) or not micro.mask_T.any():
            return
        mask_T = tokens.mask_T
        clipped_T = loss.stats.get("clipped", torch.zeros_like(first_T)) > 0
        use_T = torch.full_like(first_T, float(TokenUse.TRAINED))
        use_T = use_T.masked_fill(clipped_T, float(TokenUse.CLIPPED))
        use_T = use_T.masked_fill(loss.correction_T == 0, float(TokenUse.REJECTED)).masked_fill(
            ~mask_T, float(TokenUse.TOO_OLD)
        )
        advantage_T = tokens.advantage_T.masked_fill(~mask_T, torch.nan)
        rows_RT = torch.stack([row.detach().float() for row in (first_T, entropy_T, advantage_T, use_T)])
        begins, ends = (np.searchsorted(micro.sequence_T, found_S + more).tolist() for more in (0, 1))
        for index, begin, end in zip(micro.index_S[found_S].tolist(), begins, ends, strict=True):
            place = _begin(self._shown[index], int(micro.turn_T[begin]))
            self._parts.append(_Part(index, place, rows_RT[:, begin:end]))

    def gather(self, mesh: TrainerMesh) -> list[TrainedSample]:
        """What all ranks have seen, on rank 0; a collective, unless no sample is shown."""
        if self._count == 0:
            return []
        mine = [self._sample(index, trajectory) for index, trajectory in self._shown.items()]
        return sorted(itertools.chain(*mesh.gather_objects(mine)), key=lambda sample: sample.index)

    def _sample(self, index: int, trajectory: Trajectory) -> TrainedSample:
        rows_RA = np.full((ROWS, trajectory.action_count), np.nan, dtype="<f4")
        rows_RA[-1] = TokenUse.TOO_OLD
        for part in self._parts:
            if part.place == index:
                rows_RA[:, part.begin : part.begin + part.rows_RN.shape[1]] = part.rows_RN.cpu().numpy()
        logprobs, entropies, advantages, uses = rows_RA
        return TrainedSample(
            index, logprobs.tobytes(), entropies.tobytes(), advantages.tobytes(), uses.astype(np.uint8).tobytes()
        )


def _begin(trajectory: Trajectory, turn: int) -> int:
    """Where the action tokens of a turn begin among those of the sample."""
    at = spans_by_turn(trajectory)[turn].start
    return sum(span.stop - span.start for span in trajectory.action_spans if span.stop <= at)
