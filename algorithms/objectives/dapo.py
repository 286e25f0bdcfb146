"""DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 8): GRPO with a higher upper clip, and every token counts the same.

Its other two parts are settings beside the objective: dynamic sampling is `rollout.drop_equal_rewards`, the overlong
penalty is `algorithms.shaping.Overlong`.
"""

from __future__ import annotations

from algorithms.objectives.grpo import Grpo
from algorithms.objectives.surrogate import ClipHigh


class Dapo(Grpo, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour, mean over all tokens."""

    advantage = "group"
    aggregation = "token_mean"

    clip_high: ClipHigh = 0.28
    """ε_high: unlikely tokens may rise further than they may fall, which keeps entropy up."""
