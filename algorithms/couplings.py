"""Statistics on whether the signals of attention occur together: plans with entropy, plans with FAI, anchors with
plans.

Li et al. 2025 (arXiv 2510.13554) describe a rhythm: where local heads suddenly look further back, the model plans the
next tokens and is uncertain; at the same token, or soon after it, comes a token to which later tokens keep returning.
`couplings` measures this in given responses and compares each number with chance. `flash rhythm` prints the result. The
marked tokens are the ones that the method itself chooses; the meaning of "soon after", the shifts, the intervals and p
are defined here and not in the paper.

A token is a *plan* if Δ is among the top q of its response, and an *anchor* if FAI is (`algorithms.rhythm`). Chance:
the plans of each response are shifted by some number of tokens, cyclically within the response. This keeps their
number, roughly their distances, and the other signal; only the relation between the two is lost. The last token of a
turn has no Δ and cannot be a plan: plans are shifted past it, and it is in no comparison with plans.

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

from algorithms.rhythm import BoolArray, FloatArray, IntArray, Rhythm, changes, followers, top_share

SHIFTS = 1000
"""Number of random shifts for the null distribution. If there are no more different shifts than this, each is used once
instead."""
INTERVAL = (0.025, 0.975)
"""Quantiles between which 95 % of the null distribution lie."""
APART = 1 << 40
"""Distance between the places of two responses, larger than any sequence, so that their tokens never count as near."""
ROUNDING = 1e-9
"""Relative difference up to which two numbers count as equal, since their sums may be taken in another order."""


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
    """A difference of means over all responses, compared with chance; NaN if there are no such tokens."""

    name: str
    marked: float
    """Mean over the marked tokens."""
    others: float
    """Mean over the tokens that the marked ones are compared with."""
    tokens: int
    """Number of marked tokens."""
    null_mean: float
    """Mean of `marked` − `others` under the shifts."""
    null_low: float
    """Lower end of the interval that contains 95 % of the null distribution."""
    null_high: float
    """Upper end of that interval."""
    p: float
    """Two-sided p-value: twice the smaller of two shares, at most 1, namely of shifts with a difference at least as
    large as the observed one, and of shifts with one at most as large. The observed difference counts as one more
    random shift; if all shifts are used, it is one of them."""

    @property
    def difference(self) -> float:
        """Return `marked` − `others`."""
        return self.marked - self.others


class _Means(NamedTuple):
    marked: float
    others: float
    tokens: int


class _Tokens(NamedTuple):
    """Tokens of all responses, one response after another."""

    plan_A: BoolArray
    anchor_A: BoolArray
    entropy_A: FloatArray
    influence_A: FloatArray
    counted_A: BoolArray
    """True if the response has tokens far enough behind this one; otherwise FAI is 0 and means nothing."""
    place_A: IntArray
    """Place in the sequence, with `APART` between responses."""
    has_change_A: BoolArray
    """True if the token has a Δ: the next token belongs to the response too."""
    lengths: list[int]
    """Number of tokens with a Δ, for each response that has any; their sum is E."""


def plans(options: Rhythm, signals: Signals) -> BoolArray:
    """Return bool [R]: the plans, the top q of Δ."""
    return top_share(changes(signals.waad_R, signals.position_R), options.top)


def anchors(options: Rhythm, signals: Signals) -> BoolArray:
    """Return bool [R]: the anchors, the top q of FAI."""
    return top_share(signals.influence_R, options.top)


def couplings(options: Rhythm, responses: Sequence[Signals], seed: int = 0, shifts: int = SHIFTS) -> list[Coupling]:
    """Return four differences of means over the tokens of all responses together, with k = `options.reach`.

    - Entropy at plans, compared with all other tokens that have a Δ.
    - FAI at plans, compared with all other tokens that have a Δ. Only tokens with followers count.
    - FAI after plans: tokens up to k after a plan of their turn that are no plans themselves, compared with tokens that
      are neither. Only tokens with followers count.
    - Anchors after plans: the share of anchors that lie up to k after a plan of their turn, compared with the same
    share
      of all other tokens. A plan itself lies after a plan only if there is another plan before it.

    The paper speaks of peaks of WAAD, at which entropy is high and at or after which FAI is high. Plans here are the
    tokens at which WAAD changes most, as in the paper's rules of credit.

    `seed` draws the random shifts, of which there are at most `shifts`.

    Raises:
        ValueError: there is no response.
    """
    if not responses:
        raise ValueError("expected at least one response")
    tokens = _concatenate(options, responses)
    observed = _measure(tokens, tokens.plan_A, options.reach)
    exhaustive = math.prod(tokens.lengths) <= shifts
    used = itertools.product(*map(range, tokens.lengths)) if exhaustive else _draw_shifts(tokens.lengths, seed, shifts)
    nulls = (_measure(tokens, plan_A, options.reach) for plan_A in _shifted_plans(tokens, used))
    null_SC = np.array([[means.marked - means.others for means in null] for null in nulls])
    return [
        _coupling(name, means, null_S, exhaustive=exhaustive)
        for name, means, null_S in zip(_names(options.reach), observed, null_SC.T, strict=True)
    ]


def _names(reach: int) -> tuple[str, ...]:
    after = f"1 to {reach} after plans" if reach > 1 else "right after plans"
    return "entropy at plans", "FAI at plans", f"FAI {after}", f"anchors {after}"


def _concatenate(options: Rhythm, responses: Sequence[Signals]) -> _Tokens:
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
    """Yield random shifts, one number per response, each uniform over the response's tokens with a Δ."""
    yield from np.random.default_rng(seed).integers(0, lengths, (shifts, len(lengths))).tolist()


def _shifted_plans(tokens: _Tokens, shifts: Iterable[Sequence[int]]) -> Iterator[BoolArray]:
    """Yield bool [A] for each shift: the plans of each response, moved to later tokens by its number of tokens."""
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
    """Return the four pairs of means under the assumption that `plan_A` are the plans."""
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
    marked, others = (float(value_A[one].mean()) if one.any() else math.nan for one in (marked_A, other_A))
    return _Means(marked, others, int(marked_A.sum()))


def _coupling(name: str, means: _Means, null_S: FloatArray, *, exhaustive: bool) -> Coupling:
    """Compare the observed means with the null distribution; shifts without a difference (NaN) are left out."""
    seen, null_S = means.marked - means.others, null_S[np.isfinite(null_S)]
    if math.isnan(seen) or not len(null_S):
        return Coupling(name, means.marked, means.others, means.tokens, math.nan, math.nan, math.nan, math.nan)
    near = ROUNDING * max(float(np.abs(null_S).max()), abs(seen))
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
    """Return the number of shifts with a difference of at least `seen`, and with one of at most `seen`."""
    return int((null_S >= seen - near).sum()), int((null_S <= seen + near).sum())
