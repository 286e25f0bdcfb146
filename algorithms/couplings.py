"""Whether the signals of attention go together: plans with entropy, plans with influence, anchors with plans.

Li et al. 2025 (arXiv 2510.13554) describe a rhythm: where local heads suddenly look further back, the model introduces
what comes next, and is uncertain of it; at once, or with it, comes a token that later ones keep coming back to. Here is
what of it shows in given responses, each number beside what chance gives. The marked tokens are those that the method
itself chooses; how far "at once" reaches, the shifts, intervals and p are this file's own.

A token is a *plan* where Δ is among the top q of its response, and an *anchor* where FAI is (`algorithms.rhythm`).
Chance: the plans of each response are shifted by some number of tokens, around the response's end. So they stay as many
and about as far apart, and the other signal stays as it is; what is lost is where the two stand to each other. The last
token of a turn has no Δ and cannot plan: plans are shifted past it, and no plan is held against it.

Shape legend: R = tokens of a response, A = tokens of all responses, E = those of them that have a Δ, S = shifts.
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
"""Shifts drawn for a null; where there are no more different ones than that, each is taken once instead."""
INTERVAL = (0.025, 0.975)
"""Quantiles between which 95 % of a null lie."""
APART = 1 << 40
"""Beyond any place in a sequence: puts the tokens of different responses out of each other's reach."""
ROUNDING = 1e-9
"""Differences that are closer than this are equal: sums in another order."""


class Signals(NamedTuple):
    """What was seen of one response."""

    position_R: IntArray
    """The tokens' places in their sequence, ascending; a gap is where a turn ends."""
    waad_R: FloatArray
    influence_R: FloatArray
    """FAI."""
    entropy_R: FloatArray
    """Of the distribution that each token was drawn from, in nats."""


class Coupling(msgspec.Struct, frozen=True):
    """One number of all responses, beside what chance gives; NaN where there are no such tokens."""

    name: str
    marked: float
    """The mean over the marked tokens."""
    others: float
    """The mean over the tokens that they are held against."""
    tokens: int
    """How many are marked."""
    null_mean: float
    """Of `marked` − `others` under the shifts."""
    null_low: float
    """Between here and `null_high` lie 95 % of it."""
    null_high: float
    p: float
    """Twice the smaller one of two shares, at most 1: of shifts that give as much or more, and as little or less. Where
    shifts are drawn, what was seen counts as one more of them; where all are taken, it is one of them."""

    @property
    def difference(self) -> float:
        """`marked` − `others`."""
        return self.marked - self.others


class _Means(NamedTuple):
    marked: float
    others: float
    tokens: int


class _Tokens(NamedTuple):
    """All responses, one after the other."""

    plan_A: BoolArray
    anchor_A: BoolArray
    entropy_A: FloatArray
    influence_A: FloatArray
    counted_A: BoolArray
    """Whether any token comes after it in time: without, FAI is 0 and says nothing."""
    place_A: IntArray
    """The place in the sequence, each response beyond reach of the others."""
    open_A: BoolArray
    """Whether it has a Δ: the next token is the response's, too."""
    lengths: list[int]
    """Tokens that have one, of each response with any; together E."""


def plans(options: Rhythm, signals: Signals) -> BoolArray:
    """[R]: the tokens that plan, the top q of Δ."""
    return top_share(changes(signals.waad_R, signals.position_R), options.top)


def anchors(options: Rhythm, signals: Signals) -> BoolArray:
    """[R]: the tokens that anchor, the top q of FAI."""
    return top_share(signals.influence_R, options.top)


def couplings(options: Rhythm, responses: Sequence[Signals], seed: int = 0, shifts: int = SHIFTS) -> list[Coupling]:
    """Four differences of means over the tokens of all responses together, with k = `options.reach`.

    - Entropy: at plans, against all other tokens that have a Δ.
    - FAI: at plans, against all other tokens that have a Δ; only tokens that some other follows in time count.
    - FAI after plans: of tokens up to k after a plan of their turn that are none themselves, against tokens that are
      neither; only those that count.
    - Anchors after plans: the share of anchors that come up to k after a plan of their turn, against that share of all
      other tokens. A plan itself comes after a plan only if there is another before it.

    The paper speaks of peaks of WAAD, at which entropy is high and with or after which FAI is; plans are the tokens
    beside which WAAD changes most, as its rules of credit take them.
    """
    if not responses:
        raise ValueError("expected at least one response")
    tokens = _together(options, responses)
    found = _measure(tokens, tokens.plan_A, options.reach)
    whole = math.prod(tokens.lengths) <= shifts
    drawn = itertools.product(*map(range, tokens.lengths)) if whole else _drawn(tokens.lengths, seed, shifts)
    nulls = (_measure(tokens, plan_A, options.reach) for plan_A in _shifted(tokens, drawn))
    null_SC = np.array([[one.marked - one.others for one in null] for null in nulls])
    return [
        _coupling(name, means, null_S, whole=whole)
        for name, means, null_S in zip(_names(options.reach), found, null_SC.T, strict=True)
    ]


def _names(reach: int) -> tuple[str, ...]:
    after = f"1 to {reach} after plans" if reach > 1 else "right after plans"
    return "entropy at plans", "FAI at plans", f"FAI {after}", f"anchors {after}"


def _together(options: Rhythm, responses: Sequence[Signals]) -> _Tokens:
    goes_on = [np.append(np.diff(one.position_R) == 1, False) for one in responses]
    counted = [followers(one.position_R, options.nearest, options.farthest) > 0 for one in responses]
    return _Tokens(
        plan_A=np.concatenate([plans(options, one) for one in responses]),
        anchor_A=np.concatenate([anchors(options, one) for one in responses]),
        entropy_A=np.concatenate([one.entropy_R for one in responses]),
        influence_A=np.concatenate([one.influence_R for one in responses]),
        counted_A=np.concatenate(counted),
        place_A=np.concatenate([one.position_R + APART * number for number, one in enumerate(responses)]),
        open_A=np.concatenate(goes_on),
        lengths=[int(one.sum()) for one in goes_on if one.any()],
    )


def _drawn(lengths: Sequence[int], seed: int, shifts: int) -> Iterator[Sequence[int]]:
    """Shifts of all responses, each evenly from all that there are of it."""
    yield from np.random.default_rng(seed).integers(0, lengths, (shifts, len(lengths))).tolist()


def _shifted(tokens: _Tokens, shifts: Iterable[Sequence[int]]) -> Iterator[BoolArray]:
    """[A]: the plans, those of each response further back by its shift."""
    lengths = np.array(tokens.lengths, dtype=np.int64)
    length_E = np.repeat(lengths, lengths)
    start_E = np.repeat(np.cumsum(lengths) - lengths, lengths)
    place_E = np.arange(len(start_E)) - start_E
    plan_E = tokens.plan_A[tokens.open_A]
    for shift in shifts:
        plan_A = np.zeros_like(tokens.plan_A)
        shift_E = np.repeat(np.array(shift, dtype=np.int64), lengths)
        plan_A[tokens.open_A] = plan_E[start_E + (place_E - shift_E) % length_E]
        yield plan_A


def _measure(tokens: _Tokens, plan_A: BoolArray, reach: int) -> tuple[_Means, ...]:
    """The four numbers, if these were the plans."""
    after_A = np.zeros_like(plan_A)
    for back in range(1, min(reach, len(plan_A) - 1) + 1):
        same_turn_A = tokens.place_A[back:] - tokens.place_A[:-back] == back
        after_A[back:] |= plan_A[:-back] & same_turn_A
    close_A, other_A = after_A & ~plan_A, tokens.open_A & ~plan_A
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


def _coupling(name: str, means: _Means, null_S: FloatArray, *, whole: bool) -> Coupling:
    """Shifts under which there is nothing to compare say nothing."""
    seen, null_S = means.marked - means.others, null_S[np.isfinite(null_S)]
    if math.isnan(seen) or not len(null_S):
        return Coupling(name, means.marked, means.others, means.tokens, math.nan, math.nan, math.nan, math.nan)
    near = ROUNDING * max(float(np.abs(null_S).max()), abs(seen))
    extra = 0 if whole else 1
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
    """Shifts that give as much or more, and as little or less."""
    return int((null_S >= seen - near).sum()), int((null_S <= seen + near).sum())
