"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without its two biases.

The advantage is not divided by the group's deviation, which favoured very easy and very hard prompts; token losses are
divided by a constant, not by the response's length, which favoured long wrong answers.
"""

from __future__ import annotations

from algorithms.objectives.grpo import Grpo


class DrGrpo(Grpo, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour, A = R − mean of the group."""

    advantage = "group_mean"
    aggregation = "constant"
