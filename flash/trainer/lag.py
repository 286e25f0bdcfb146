"""Limits the learning rate of an update by the lag: the distance of the policy from the policies that sampled.

`flash.trainer.step` makes a `LagLimiter` if `algorithm.lag` is configured. All ranks make the same calls with the same
numbers, because all sums are reduced over the ranks first.

π is the policy that is trained. π_behaviour is the policy that sampled a token, with the log-prob that the engine
reported. Version n is the weights after n training steps, and the *age* of a token is the version that is trained minus
the version that sampled the token.

Shape legend: T = action tokens of a micro-batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from algorithms.base import PackedTokens
from algorithms.staleness import Lag
from flash.ages import version_of
from flash.config.learning import TrainConfig
from flash.trainer.mesh import TrainerMesh, to_device
from flash.trainer.optimizer import learning_rate

LARGEST_LOG_RATIO = 2.0
"""Bound to which `LagLimiter` cuts each |log π − log π_behaviour|, so that one outlier cannot hold down the rate of a
whole batch. The bound is ten times the square root of the default budget of `Lag` (a mean squared log-ratio)."""
FORGETTING = 0.9
"""Weight of a step's disagreement between engine and trainer, relative to the weight of the next step. So the mean is
over some ten steps: it follows slow changes, and is less noisy than one step."""


class LagLimiter:
    """Limits the learning rate of each update by the distance of the policy from the policies that sampled.

    `algorithms.staleness.Lag` describes the rule. All sums are taken over all ranks in float64 before an update, so the
    rate is equal on every rank and, up to rounding, for every division of the batch. The limiter keeps two things
    from step to step, which checkpoints hold: the rates of the versions from which tokens may still come, and the
    disagreement of engine and trainer at equal weights.

    For each update, `flash.trainer.step` calls `add` for every micro-batch, then `limit`, then `record`; and after the
    last update of the step, `finish`.
    """

    def __init__(self, options: Lag, train: TrainConfig, steps: int, mesh: TrainerMesh) -> None:
        """Begin without recorded rates. When a run resumes, the checkpoint sets `rates` and `disagreement_sums`.

        Args:
            options: the budget of the distance.
            train: the learning rate, its schedule, and the number of updates in a step.
            steps: number of steps of the run, which the schedule needs.
            mesh: the trainer ranks.
        """
        self._mesh = mesh
        self._options, self._train, self._steps = options, train, steps
        self._updates = train.minibatches * train.updates_per_batch
        self._ages = train.max_age + 1
        # The sum of squared log-ratios over all tokens, the sum over tokens of age 0 (sampled by the version that is
        # trained), then the number of tokens of each age.
        self._row = torch.zeros(2 + self._ages, dtype=torch.float64, device=mesh.device)
        # For each update of this step so far: the rate that was applied, the factor of the scheduled rate, and the mean
        # squared log-ratio.
        self._applied: list[float] = []
        self._scales: list[float] = []
        self._distances: list[float] = []
        self.rates: dict[int, float] = {}
        """Mean rate of the updates in the step that trained each version. A version without an entry had the scheduled
        rate."""
        self.disagreement_sums = (0.0, 0.0)
        """Sum of (log π − log π_behaviour)² over tokens that the present weights sampled, and the number of these
        tokens. Both sums are multiplied by `FORGETTING` in each step."""

    def add(self, tokens: PackedTokens, age_T: np.ndarray, mask_T: np.ndarray) -> None:
        """Add a micro-batch of the next update to the sums.

        Args:
            tokens: the input of the objective.
            age_T: age of each token.
            mask_T: mask of `tokens`, True for trained tokens, as an array on the CPU.
        """
        log_ratio_T = (tokens.logp_T - tokens.behaviour_T).detach().double().where(tokens.mask_T, 0.0)
        square_T = log_ratio_T.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).square()
        self._row[0] += square_T.sum()
        self._row[1] += square_T.where(to_device(age_T == 0, square_T.device), 0.0).sum()
        self._row[2:] += to_device(np.bincount(age_T[mask_T], minlength=self._ages), square_T.device)

    def limit(self, rate: float, version: int) -> float:
        """Return the learning rate for the update whose micro-batches have been added: at most `rate`. A collective.

        The sums of these micro-batches are cleared. `version` is the version that the step trains.
        """
        square, fresh, *counts = self._mesh.gather_rows(self._row).sum(0).tolist()
        self._row.zero_()
        # Before the first update of a step, tokens of age 0 come from exactly the present weights. A sum that is not
        # finite is left out, because `disagreement_sums` would never become finite again.
        if not self._applied and math.isfinite(fresh):
            total, number = self.disagreement_sums
            self.disagreement_sums = (fresh + FORGETTING * total, counts[0] + FORGETTING * number)
        drift = square - self.disagreement * sum(counts)
        # For each age: by how many versions the policy has moved on since the token was sampled, and the sum of the
        # rates of these versions. The updates that this step has made count as fractions of a version.
        lags, moved = [len(self._applied) / self._updates], [sum(self._applied) / self._updates]
        for age in range(1, self._ages):
            lags.append(lags[-1] + 1)
            moved.append(moved[-1] + self._rate_of(version_of(age, version)))
        scale = self._options.scale(rate, drift, counts, lags, moved)
        self._scales.append(scale)
        self._distances.append(square / max(sum(counts), 1.0))
        return rate * scale

    @property
    def disagreement(self) -> float:
        """Mean (log π − log π_behaviour)² of tokens that the present weights sampled; 0 before there was such a token.

        Only the difference between the arithmetic of engine and trainer causes it. `limit` subtracts it, because no
        learning rate can make it smaller.
        """
        total, number = self.disagreement_sums
        return total / number if number else 0.0

    def record(self, rate: float) -> None:
        """Record the learning rate with which an update was made; 0 if the update was left out."""
        self._applied.append(rate)

    def finish(self, version: int) -> dict[str, float]:
        """End the step that trained `version`, and return its metrics; empty if `limit` was not called in it.

        Without a call of `limit`, only critics (value models) were trained, and the mean rate of the version is 0.
        """
        self._row.zero_()  # drops micro-batches of updates that only critics made
        self.rates[version] = sum(self._applied) / self._updates
        # Tokens of older versions will not be trained any more.
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

    def _rate_of(self, version: int) -> float:
        """Return the mean rate of the updates in the step that trained a version, recorded or else scheduled.

        Returns 0 for numbers below 0: there were no such versions.
        """
        if version < 0:
            return 0.0
        found = self.rates.get(version)
        return learning_rate(self._train, self._steps, version) if found is None else found
