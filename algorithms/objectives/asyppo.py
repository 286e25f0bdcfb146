"""AsyPPO (Liu et al. 2025, arXiv 2510.01656): PPO with several small critics that learn from different answers.

The critics see different answers to every prompt, so they differ where answers do. Their mean V̄ gives the advantages,
and σ, the standard deviation of what they expect, says what a token has to teach:

    L(V_m) = mean over D_m of (V_m(s_t) − R_t)²,   R_t the rewards that came
    J = E[1/|o| Σ_t I^A_t min(r_t Ā_t, clip(r_t) Ā_t) + β I^H_t H_t]

I^A = 0 on the lowest share of σ of a batch: the critics agree, the state is known, its advantage is mostly noise.
I^H = 0 on the highest: they disagree since the state itself is odd, and it is not to be explored.

The entropy H and β are the trainer's (`algorithm.entropy_bonus`); here is I^H, its factor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from algorithms.base import ObjectiveOutput, PackedTokens
from algorithms.objectives.decoupled_ppo import DecoupledPpo

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, Meta(ge=0, lt=1)]

SAME = 1e-3
"""σ that differ by less than this share count as equal: the values of one state, computed in two micro-batches, do."""

WHOLE = 1e-9
"""Keeps a share of the tokens whole where floats cannot hold it."""


class AsyPpo(DecoupledPpo, frozen=True):
    """max E[I^A min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour; or, decoupled, as that is."""

    advantage = "gae"
    aggregation = "seq_mean_token_mean"
    critics = 2
    critic_target = "monte_carlo"

    mask_lowest: Share = 0.2
    """Share of the batch's trained tokens, those with the lowest σ, whose advantage is left out."""
    filter_highest: Share = 0.2
    """Share of the batch's trained tokens, those with the highest σ, that have no entropy bonus."""
    decoupled: bool = False
    """Clip around the proximal policy and weigh by π_proximal / π_behaviour, for data of several versions ago. The
    other options of `decoupled_ppo` belong to this form."""

    def without_effect(self) -> dict[str, str]:
        """What belongs to the decoupled form, without it."""
        if self.decoupled:
            return super().without_effect()
        needed = "decoupled is false; expected true beside it"
        return dict.fromkeys(("weight_cap", "cap", "proximal", "ewma_decay"), needed)

    def bounds(self, deviation_N: Tensor) -> tuple[float, float]:
        """Tokens with a σ below the first or above the second are left out: never more than the two shares.

        A tie across a bound stays in, whole. Without a token there is nothing to bound.
        """
        count = len(deviation_N)
        if count == 0:
            return -math.inf, math.inf
        ordered_N = deviation_N.double().sort().values
        shares = (self.mask_lowest, self.filter_highest)
        lowest, highest = (min(int(share * count + WHOLE), count - 1) for share in shares)
        return float(ordered_N[lowest]) * (1 - SAME), float(ordered_N[count - 1 - highest]) * (1 + SAME)

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, `clipped`, `weight`, `deviation`, `learned`, I^A, and `bonus`, I^H."""
        if not self.decoupled:
            tokens = tokens._replace(proximal_T=tokens.behaviour_T)  # then w = 1, and r is that of the behaviour policy
        output = super().__call__(tokens)
        low, high = tokens.bounds
        deviation_T = tokens.deviation_T
        learned_T = deviation_T >= low
        bonus_T = (deviation_T <= high).to(deviation_T.dtype)
        stats = output.stats | {
            "deviation": deviation_T,
            "learned": learned_T.to(deviation_T.dtype),
            "bonus": bonus_T,
        }
        return ObjectiveOutput(output.loss_T.where(learned_T, 0.0), stats, bonus_T)
