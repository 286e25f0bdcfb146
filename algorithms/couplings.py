"""Measures whether signals of attention occur together: plans with entropy, plans with FAI, and anchors with plans.

The signals (`algorithms.rhythm`) are numbers for each token of a response, the action tokens of one sequence. WAAD is
the mean distance that the model looked back at the token, Δ is the change of WAAD to the next token, and FAI is the
attention that later tokens pay to the token. A *plan* is a token whose Δ is among the largest share q of its response.
An *anchor* is a token whose FAI is among the largest share q.

Li et al. 2025 (arXiv 2510.13554) describe a rhythm: at a plan the model is uncertain, and at the plan or soon after it
there is an anchor. `couplings`, which the command `flash rhythm` calls, measures this in given responses and compares
each number with chance. The choice of plans and anchors is the paper's. The meaning of "soon after", the shifts, the
intervals and p are defined here.

Chance: the plans of each response are shifted by some number of tokens, cyclically within the response. A shift keeps
the number of plans, roughly their distances, and the other signal, but not the relation between plans and that signal.
The last token of a turn has no Δ, so it cannot be a plan and shifts skip it.

Shape legend: R = tokens of a response, A = tokens of all responses, E = tokens of A that have a Δ, S = shifts, C = the
four couplings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from algorithms.rhythm import REACH, BoolArray, FloatArray, IntArray, Rhythm, changes, followers, top_share

SHIFTS = 1000
"""Number of random shifts for the null distribution. If there are no more different shifts than this, each is used once
instead."""
INTERVAL = (0.025, 0.975)
"""Lower and upper quantile of the interval that contains 95 % of the null distribution."""
APART = 1 << 40
"""Distance between the places of two responses. It is larger than any sequence, so that tokens of different responses
never count as near."""
ROUNDING = 1e-9
"""Differences of means that are closer than this, relative to the largest, count as equal: the rounding of a sum
depends on the order of its terms."""


class Signals(NamedTuple):
    """Signals of the tokens of one response."""

    position_R: IntArray
    """Places of the tokens in their sequence, ascending; a gap is the end of a turn."""
    waad_R: FloatArray
    """WAAD of the local heads."""
    influence_R: FloatArray
    """FAI of the global heads."""
    entropy_R: FloatArray
    """Entropy of the distribution from which each token was sampled, in nats."""


class Coupling(msgspec.Struct, frozen=True):
    """A difference of two means over the tokens of all responses, compared with chance.

    A mean without any tokens is NaN, and so is everything that depends on it.
    """

    name: str
    """Name of the comparison, from `_names`."""
    marked: float
    """Mean over the marked tokens: plans, or tokens after plans, or anchors."""
    others: float
    """Mean over the tokens with which the marked tokens are compared."""
    tokens: int
    """Number of marked tokens."""
    null_mean: float
    """Mean of `marked` − `others` under the shifts."""
    null_low: float
    """Lower end of the interval that contains 95 % of the null distribution."""
    null_high: float
    """Upper end of the interval that contains 95 % of the null distribution."""
    p: float
    """Two-sided p-value, at most 1: twice the smaller of two shares of shifts. The first share has a difference at
    least as large as the observed one, the second share has a difference at most as large. With random shifts, the
    observed plans count as one more shift. If all shifts are used, the observed plans are one of them."""

    @property
    def difference(self) -> float:
        """Return `marked` − `others`."""
        return self.marked - self.others


class _Means(NamedTuple):
    """Values for the fields of `Coupling` with the same names, for one choice of plans: observed or shifted ones."""

    marked: float
    others: float
    tokens: int


class _Tokens(NamedTuple):
    """Tokens of all responses, one response after another."""

    plan_A: BoolArray
    """True for the observed plans."""
    anchor_A: BoolArray
    """True for the anchors."""
    entropy_A: FloatArray
    influence_A: FloatArray
    """FAI of each token."""
    counted_A: BoolArray
    """True if some token of the response lies in the range over which FAI is averaged. Otherwise FAI is 0 by definition
    and is not counted."""
    place_A: IntArray
    """Place in the sequence, plus `APART` for each response before this one."""
    has_change_A: BoolArray
    """True if the token has a Δ: the next token belongs to the response too."""
    lengths: list[int]
    """Number of tokens with a Δ, for each response that has any; their sum is E."""


def plans(options: Rhythm, signals: Signals) -> BoolArray:
    """Return bool [R]: True for the plans, the tokens among the top q of Δ."""
    return top_share(changes(signals.waad_R, signals.position_R), options.top)


def anchors(options: Rhythm, signals: Signals) -> BoolArray:
    """Return bool [R]: True for the anchors, the tokens among the top q of FAI."""
    return top_share(signals.influence_R, options.top)


def couplings(
    options: Rhythm, responses: Sequence[Signals], seed: int = 0, shifts: int = SHIFTS, reach: int = REACH
) -> list[Coupling]:
    """Return four differences of means over the tokens of all responses together, with k = `reach`.

    - Entropy at plans, compared with all other tokens that have a Δ.
    - FAI at plans, compared with all other tokens that have a Δ. Tokens whose FAI has no later token to average over
      are left out.
    - FAI after plans: the mean FAI of tokens that are not plans and follow a plan of the same turn by at most k tokens.
      It is compared with tokens that are not plans and follow none in this way. Tokens whose FAI has no later token to
      average over are left out.
    - Anchors after plans: the share of anchors that follow a plan of the same turn by at most k tokens. It is compared
      with the same share among tokens that are not anchors. An anchor that is a plan itself follows a plan
      only if there is another plan before it.

    The paper describes peaks of WAAD, where entropy is high and FAI is high at or after the peak. Plans here are the
    tokens at which WAAD changes most, as in the paper's rules of credit.

    Args:
        options: the rule by which plans and anchors are chosen.
        responses: signals of each response.
        seed: seed of the random shifts.
        shifts: number of random shifts. If there are no more different shifts than this, each is used once instead.
        reach: number of tokens after a plan that count as following it.

    Raises:
        ValueError: there is no response.
    """
    if not responses:
        raise ValueError("expected at least one response")
    # The same four differences of means, for the observed plans and for the plans of every shift.
    tokens = _concatenate(options, responses)
    observed = _measure(tokens, tokens.plan_A, reach)
    exhaustive = math.prod(tokens.lengths) <= shifts
    used = itertools.product(*map(range, tokens.lengths)) if exhaustive else _draw_shifts(tokens.lengths, seed, shifts)
    nulls = (_measure(tokens, plan_A, reach) for plan_A in _shifted_plans(tokens, used))
    null_SC = np.array([[means.marked - means.others for means in null] for null in nulls])
    return [
        _coupling(name, means, null_S, exhaustive=exhaustive)
        for name, means, null_S in zip(_names(reach), observed, null_SC.T, strict=True)
    ]


def _names(reach: int) -> tuple[str, ...]:
    """Return the names of the four comparisons, in the order of `_measure`."""
    after = f"1 to {reach} after plans" if reach > 1 else "right after plans"
    return "entropy at plans", "FAI at plans", f"FAI {after}", f"anchors {after}"


def _concatenate(options: Rhythm, responses: Sequence[Signals]) -> _Tokens:
    """Choose plans and anchors in each response, and return the tokens of all responses one after another.

    Places of different responses are `APART` from each other, so that no token follows a plan of another response.
    """
    has_change = [np.append(np.diff(one.position_R) == 1, False) for one in responses]
    counted = [followers(one.position_R, options.nearest, options.farthest) > 0 for one in responses]
    return _Tokens(
        plan_A=np.concatenate([plans(options, one) for one in responses]),
        anchor_A=np.concatenate([anchors(options, one) for one in responses]),
        entropy_A=np.concatenate([one.entropy_R for one in responses]),
        influence_A=np.concatenate([one.influence_R for one in responses]),
        counted_A=np.concatenate(counted),
        place_A=np.concatenate([one.position_R + APART * number for number, one in enumerate(responses)]),
        has_change_A=np.concatenate(has_change),
        lengths=[int(one.sum()) for one in has_change if one.any()],
    )


def _draw_shifts(lengths: Sequence[int], seed: int, shifts: int) -> Iterator[Sequence[int]]:
    """Yield `shifts` random shifts. Each has one number per response, drawn uniformly from 0 to its length − 1."""
    yield from np.random.default_rng(seed).integers(0, lengths, (shifts, len(lengths))).tolist()


def _shifted_plans(tokens: _Tokens, shifts: Iterable[Sequence[int]]) -> Iterator[BoolArray]:
    """Yield bool [A] for each shift: the plans, moved cyclically to later tokens. A shift has one number per response,
    by which the plans of this response are moved."""
    # For each of the E tokens that have a Δ: the length of its response, the first place of its response among the E,
    # and its own place within its response.
    lengths = np.array(tokens.lengths, dtype=np.int64)
    length_E = np.repeat(lengths, lengths)
    start_E = np.repeat(np.cumsum(lengths) - lengths, lengths)
    place_E = np.arange(len(start_E)) - start_E
    plan_E = tokens.plan_A[tokens.has_change_A]
    for shift in shifts:
        plan_A = np.zeros_like(tokens.plan_A)
        shift_E = np.repeat(np.array(shift, dtype=np.int64), lengths)
        plan_A[tokens.has_change_A] = plan_E[start_E + (place_E - shift_E) % length_E]
        yield plan_A


def _measure(tokens: _Tokens, plan_A: BoolArray, reach: int) -> tuple[_Means, ...]:
    """Return the means of the four comparisons of `couplings`, with `plan_A` as the plans and k = `reach`."""
    # after_A: the token follows a plan of the same turn by at most k tokens. Places are consecutive within a turn.
    after_A = np.zeros_like(plan_A)
    for back in range(1, min(reach, len(plan_A) - 1) + 1):
        same_turn_A = tokens.place_A[back:] - tokens.place_A[:-back] == back
        after_A[back:] |= plan_A[:-back] & same_turn_A
    close_A, other_A = after_A & ~plan_A, tokens.has_change_A & ~plan_A
    counted_A = tokens.counted_A
    return (
        _means(tokens.entropy_A, plan_A, other_A),
        _means(tokens.influence_A, plan_A & counted_A, other_A & counted_A),
        _means(tokens.influence_A, close_A & counted_A, ~close_A & ~plan_A & counted_A),
        _means(after_A.astype(np.float64), tokens.anchor_A, ~tokens.anchor_A),
    )


def _means(value_A: FloatArray, marked_A: BoolArray, other_A: BoolArray) -> _Means:
    """Return the means of a value over the marked tokens and over the other tokens; NaN where there are no tokens."""
    marked, others = (float(value_A[one].mean()) if one.any() else math.nan for one in (marked_A, other_A))
    return _Means(marked, others, int(marked_A.sum()))


def _coupling(name: str, means: _Means, null_S: FloatArray, *, exhaustive: bool) -> Coupling:
    """Compare the observed means with the null distribution, the differences under the shifts.

    Shifts whose difference is NaN are left out. If the observed difference is NaN, or no shift is left, everything
    about the null distribution is NaN. `exhaustive` is True if all shifts are used.
    """
    seen, null_S = means.marked - means.others, null_S[np.isfinite(null_S)]
    if math.isnan(seen) or not len(null_S):
        return Coupling(name, means.marked, means.others, means.tokens, math.nan, math.nan, math.nan, math.nan)
    near = ROUNDING * max(float(np.abs(null_S).max()), abs(seen))
    # With random shifts, the observed plans count as one more shift, so that p is never 0.
    extra = 0 if exhaustive else 1
    shares = [(int(count) + extra) / (len(null_S) + extra) for count in _beyond(null_S, seen, near)]
    low, high = np.quantile(null_S, INTERVAL)
    return Coupling(
        name=name,
        marked=means.marked,
        others=means.others,
        tokens=means.tokens,
        null_mean=float(null_S.mean()),
        null_low=float(low),
        null_high=float(high),
        p=min(1.0, 2 * min(shares)),
    )


def _beyond(null_S: FloatArray, seen: float, near: float) -> tuple[int, int]:
    """Return two numbers of shifts: with a difference of at least `seen`, and with a difference of at most `seen`.

    Differences within `near` of `seen` count as equal, so they are in both numbers.
    """
    return int((null_S >= seen - near).sum()), int((null_S <= seen + near).sum())
