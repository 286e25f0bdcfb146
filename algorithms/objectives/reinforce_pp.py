"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): advantages normalised over the whole batch, no critic, no groups.

The ratio of its clipped surrogate is 1 on policy, where the gradient is that of REINFORCE. The token-level KL of the
paper is `algorithm.kl` with estimator k1 in the reward.
"""

from __future__ import annotations

from algorithms.objectives.grpo import Grpo


class ReinforcePp(Grpo, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour, A whitened over tokens."""

    advantage = "batch"
    aggregation = "token_mean"
