"""Advantages and targets from critics, and the assignment of responses to several critics.

A *critic* is a model that gives a *value* to the state before each action token (a token that the policy sampled): the
sum of the rewards that may be expected from there on. `flash.trainer.plan` calls these functions in each step, before
the policy changes.

Advantages are estimated by generalised advantage estimation (GAE, Schulman et al. 2016, arXiv 1506.02438) over packed
sequences. A token is *masked* if it is not trained, for example because it is too old. Only unmasked tokens are time
steps. A masked token has no value, no reward and no discount: an unmasked token before it is followed directly by the
next unmasked token. So a reward must be placed on an unmasked token.

Shape legend: T = action tokens of a micro-batch, K = unmasked action tokens, S = sequences, B = samples of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def gae(
    reward_T: npt.ArrayLike,
    value_T: npt.ArrayLike,
    mask_T: BoolArray,
    sequence_T: IntArray,
    *,
    gamma: float,
    lam: float,
    bootstrap_S: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return advantages and returns, float64 [T] each; 0 at masked tokens, whose inputs may be anything.

        δ_t = r_t + γ V_{t+1} − V_t      A_t = Σ_{k ≥ t} (γλ)^{k−t} δ_k      return_t = A_t + V_t

    V after a sequence's last step is 0, because the episode ended there. This holds also if a limit on the length ended
    the episode, since its reward has been given.

    Args:
        reward_T: r, the reward that arrives at each token.
        value_T: V, the value of the state before each token.
        mask_T: True for tokens that are time steps.
        sequence_T: index of each token's sequence, non-decreasing.
        gamma: γ, the discount of one time step.
        lam: λ. With 0, A_t is δ_t. With 1, A_t is the discounted sum of the rewards that follow, minus V_t.
        bootstrap_S: V of the state after the last step of each sequence, if episodes continue beyond their sequences; 0
            for a sequence whose episode ended. None: all episodes ended.

    Raises:
        ValueError: γ or λ lies outside of [0, 1], or an unmasked reward, an unmasked value or a used bootstrap is not
            finite.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma is {gamma} and lam is {lam}; expected numbers from 0 to 1")
    kept_K = np.flatnonzero(mask_T)
    sequence_K = np.asarray(sequence_T)[kept_K]
    reward_K = _finite(np.asarray(reward_T, dtype=np.float64)[kept_K], "reward")
    value_K = _finite(np.asarray(value_T, dtype=np.float64)[kept_K], "value")

    # next_K is V_{t+1}: the value of the next step of the same sequence; after the last step, the bootstrap.
    next_K = np.zeros_like(value_K) if bootstrap_S is None else np.asarray(bootstrap_S, dtype=np.float64)[sequence_K]
    has_next = sequence_K[1:] == sequence_K[:-1]
    next_K[:-1][has_next] = value_K[1:][has_next]
    advantage_K = discounted_sums(reward_K + gamma * _finite(next_K, "bootstrap") - value_K, sequence_K, gamma * lam)

    advantage_T, return_T = np.zeros(len(mask_T)), np.zeros(len(mask_T))
    advantage_T[kept_K] = advantage_K
    return_T[kept_K] = advantage_K + value_K
    return advantage_T, return_T


def monte_carlo(reward_T: npt.ArrayLike, mask_T: BoolArray, sequence_T: IntArray, *, gamma: float) -> FloatArray:
    """Return float64 [T]: Σ_{k ≥ t} γ^{k−t} r_k over the unmasked tokens of each sequence; 0 at masked tokens.

    Critics learn these targets if `critic.target` is "monte_carlo".

    Args:
        reward_T: r, the reward that arrives at each token.
        mask_T: True for tokens that are time steps.
        sequence_T: index of each token's sequence, non-decreasing.
        gamma: γ, the discount of one time step.

    Raises:
        ValueError: an unmasked reward is not finite.
    """
    kept_K = np.flatnonzero(mask_T)
    reward_K = _finite(np.asarray(reward_T, dtype=np.float64)[kept_K], "reward")
    return_T = np.zeros(len(mask_T))
    return_T[kept_K] = discounted_sums(reward_K, np.asarray(sequence_T)[kept_K], gamma)
    return return_T


def discounted_sums(term_K: FloatArray, sequence_K: IntArray, factor: float) -> FloatArray:
    """Return float64 [K]: Σ_{k ≥ t} factor^{k−t} · term_k over the rest of each sequence; factor is in [0, 1].

    The sum is taken by doubling: after j passes, each step holds the sum of its next 2^j terms. This takes
    log2(longest sequence) passes over arrays; a loop over tokens in Python would be far slower. Every power of the
    factor is at most 1, so nothing overflows, and nothing is divided by a power that has underflowed to 0.
    """
    sum_K = np.array(term_K, dtype=np.float64)
    longest = int(np.bincount(np.unique(sequence_K, return_inverse=True)[1]).max(initial=0))
    reach = 1
    while reach < longest:
        same_sequence = sequence_K[reach:] == sequence_K[:-reach]
        sum_K[:-reach] += np.where(same_sequence, factor**reach * sum_K[reach:], 0.0)
        reach *= 2
    return sum_K


def assign_critics(group_ids_B: Sequence[int], critics: int, seed: int) -> IntArray:
    """Return int64 [B]: the index of the one critic that learns from each response (AsyPPO, arXiv 2510.01656).

    A group is the responses to one prompt. The responses are put into an order that depends on the seed and the group's
    id, and are assigned to the critics in turn. So the critics' counts differ by at most one in each group. The first
    response goes to critic (id mod critics), so that over many groups no critic gets more responses than the others.
    Every rank gets the same result. With one critic, or without critics, all indices are 0.
    """
    group_B = np.asarray(group_ids_B, dtype=np.int64)
    critic_B = np.zeros(len(group_B), dtype=np.int64)
    if critics > 1:
        for group in np.unique(group_B):
            members = np.flatnonzero(group_B == group)
            turns = np.random.default_rng([seed, int(group)]).permutation(len(members))
            critic_B[members] = (group + turns) % critics
    return critic_B


def _finite(number_K: FloatArray, name: str) -> FloatArray:
    """Return the numbers unchanged, once all are checked.

    Raises:
        ValueError: a number is not finite. The message calls the numbers by `name`.
    """
    if not np.isfinite(number_K).all():
        bad = int(np.flatnonzero(~np.isfinite(number_K))[0])
        raise ValueError(f"{name} of unmasked token {bad} is {number_K[bad]}; expected a finite number")
    return number_K
