"""A step that knows its lag: the learning rate is held down by how far the policy has left those that sampled.

What a step adds to a policy meets data of that policy only when they come back, a lag later; until then every step
pushes on as if the ones before had not been made. So the rate goes down with the distance over the lag, as measured on
the very tokens of an update, before it:

    distance² = mean over the trained tokens of (log π_θ − log π_behaviour)², less that at tokens of the present weights
    rate ≤ past rate · √(budget / distance²)

Why. Let a token have the lag a, in versions, the updates of its own step before this one counted as shares of a
version, and let R be what the rates that were applied over that time add up to, with a version's rate the mean of its
updates. To first order in the weights, with updates that agree in their direction, log r = R · g, where g is what a
rate of 1 does to the token's log-prob in a version. Then distance² = g² · mean R², and a batch of the same lags behind
updates of one rate would be at g² · rate² · mean a². Held to the budget that is the rule, with past rate =
√(mean R² / mean a²): the mean of the rates that were applied, weighted by the lags. What was held down before is
thereby taken out of what is measured, so the distance settles at the budget, and not between the budget and where it
would go by itself. What engine and trainer disagree on at equal weights is no distance that a rate has made, and is
subtracted: taken for one, it would hold the rate down for the less distance the rate makes, and so for good.

The rate is never above the scheduled one, and never below that over 1 + √(mean a²): synchronous training ends a whole
update away from the policy that sampled, and at this rate a lag of a and the update after it go no further together.
So a first update on tokens of the current version always has its whole rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta


class Lag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the policy may be from those that sampled."""

    budget: Annotated[float, Meta(gt=0, le=100)] = 0.04
    """Largest mean (log π − log π_behaviour)² of an update. 0.04: ratios of 0.8 or 1.2, as clips."""

    def scale(
        self, rate: float, square: float, counts: Sequence[float], lags: Sequence[float], moved: Sequence[float]
    ) -> float:
        """What a scheduled rate is multiplied by, from 1 / (1 + √(mean a²)) to 1.

        `square` is the sum of (log π − log π_behaviour)² over the tokens, less what engine and trainer disagree on at
        equal weights; `counts`, `lags` and `moved` have an entry for each age: how many tokens, a and R. Where nothing
        has moved the policy since, or no distance is seen, there is nothing to go by: 1.
        """
        tokens = sum(counts)
        lag_square = sum(count * lag**2 for count, lag in zip(counts, lags, strict=True))
        moved_square = sum(count * way**2 for count, way in zip(counts, moved, strict=True))
        if not (rate > 0 and lag_square > 0 and moved_square > 0 and square > 0 and math.isfinite(square)):
            return 1.0
        held = math.sqrt(self.budget * tokens / square * moved_square / lag_square) / rate
        return min(1.0, max(held, 1 / (1 + math.sqrt(lag_square / tokens))))
