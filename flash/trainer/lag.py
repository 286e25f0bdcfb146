"""Learning rates held to a budget of divergence: see `algorithms.lag`.

What is measured is summed over all ranks, in float64, before each update: the rate is the same on every rank and,
but for rounding, for every split into ranks and micro-batches. What an update needs of the past is the rates that were
applied in the versions that the age contract lets tokens have, and how far engine and trainer are apart where nothing
has moved the policy; both are kept in checkpoints.

Shape legend: T = action tokens of a micro-batch, A = ages, from 0 to the oldest that a token may have.
"""

from __future__ import annotations

import numpy as np
import torch

from algorithms.base import PackedTokens
from algorithms.lag import Lag
from flash.ages import version_of
from flash.config.learning import TrainConfig
from flash.trainer.mesh import TrainerMesh, sent
from flash.trainer.optimizer import learning_rate

LARGEST = 2.0
"""|log π − log π_behaviour| of a token that counts as it is, ten times what the default budget allows in the mean: one
token's fluke is not to hold a whole batch down."""
FORGETTING = 0.9
"""What an older step's disagreement of engine and trainer counts for, beside that of the next one."""


def lags_behind(train: TrainConfig) -> bool:
    """Whether any update meets tokens of a policy that is not the one it changes."""
    return train.max_age > 0 or train.minibatches * train.updates_per_batch > 1


class LagPass:
    """Holds the updates of step after step. Every rank makes the same calls and is given the same numbers."""

    def __init__(self, options: Lag, train: TrainConfig, steps: int, mesh: TrainerMesh) -> None:
        self._mesh = mesh
        self._options, self._train, self._steps = options, train, steps
        self._updates = train.minibatches * train.updates_per_batch
        self._ages = train.max_age + 1
        self._row = torch.zeros(2 + self._ages, dtype=torch.float64, device=mesh.device)
        self._applied: list[float] = []
        self._scales: list[float] = []
        self._distances: list[float] = []
        self.rates: dict[int, float] = {}
        """By version, the mean rate of the updates that left it. One that is not there had the scheduled rate."""
        self.apart = (0.0, 0.0)
        """Sum of the squares at tokens that the present weights have sampled, and their number; older ones decayed."""

    def add(self, tokens: PackedTokens, age_T: np.ndarray, mask_T: np.ndarray) -> None:
        """Look at a micro-batch of the next update; `mask_T` is that of the tokens."""
        log_ratio_T = (tokens.logp_T - tokens.behaviour_T).detach().double().where(tokens.mask_T, 0.0)
        square_T = log_ratio_T.clamp(-LARGEST, LARGEST).square()
        self._row[0] += square_T.sum()
        self._row[1] += square_T.where(sent(age_T == 0, square_T.device), 0.0).sum()
        self._row[2:] += sent(np.bincount(age_T[mask_T], minlength=self._ages), square_T.device)

    def held(self, rate: float, version: int) -> float:
        """The rate of the update whose micro-batches were all added. A collective."""
        square, fresh, *counts = self._mesh.gather_rows(self._row).sum(0).tolist()
        self._row.zero_()
        if not self._applied:
            total, number = self.apart
            self.apart = (fresh + FORGETTING * total, counts[0] + FORGETTING * number)
        drift = square - self.disagreement * sum(counts)
        scale = self._options.scale(rate, drift, counts, *self._way(version))
        self._scales.append(scale)
        self._distances.append(square / max(sum(counts), 1.0))
        return rate * scale

    @property
    def disagreement(self) -> float:
        """Mean square by which engine and trainer are apart at equal weights."""
        total, number = self.apart
        return total / number if number else 0.0

    def made(self, rate: float) -> None:
        """An update was made with this rate; with 0, it was left out."""
        self._applied.append(rate)

    def finish(self, version: int) -> dict[str, float]:
        """The step that left this version is over. Returns its metrics."""
        self._row.zero_()  # of updates that only critics made
        self.rates[version] = sum(self._applied) / self._updates
        self.rates = {one: rate for one, rate in self.rates.items() if one > version + 1 - self._ages}
        scales, distances = self._scales, self._distances
        self._applied, self._scales, self._distances = [], [], []
        if not scales:
            return {}
        return {
            "lag_scale": sum(scales) / len(scales),
            "lag_distance": sum(distances) / len(distances),
            "lag_disagreement": self.disagreement,
        }

    def _way(self, version: int) -> tuple[list[float], list[float]]:
        """By age: the lag of this update, and what the rates of the updates in between add up to, in versions."""
        lags, moved = [len(self._applied) / self._updates], [sum(self._applied) / self._updates]
        for age in range(1, self._ages):
            lags.append(lags[-1] + 1)
            moved.append(moved[-1] + self._rate_of(version_of(age, version)))
        return lags, moved

    def _rate_of(self, version: int) -> float:
        if version < 0:
            return 0.0
        found = self.rates.get(version)
        return learning_rate(self._train, self._steps, version) if found is None else found
