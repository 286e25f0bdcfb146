"""Couplings of attention signals: planted ones, absent ones, and null distributions that can be counted by hand.

`algorithms.couplings` explains plans (tokens where WAAD changes most), anchors (tokens with the largest FAI), and the
cyclic shifts that make the null distribution.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from algorithms.couplings import Coupling, Signals, couplings
from algorithms.rhythm import Rhythm

OPTIONS = Rhythm(top=0.1, nearest=1, farthest=5)
NAMES = ["entropy at plans", "FAI at plans", "FAI 1 to 2 after plans", "anchors 1 to 2 after plans"]
LENGTH = 120
"""Tokens of a response of `planted`, of which `OPTIONS` makes 12 plans."""


def steps_at(places: list[int], length: int) -> np.ndarray:
    """Return a WAAD that changes after these tokens only, by 1 each, so that exactly these tokens can be plans."""
    waad = np.zeros(length)
    for place in places:
        waad[place + 1 :] += 1.0
    return waad


def planted(seed: int, *, entropy: bool = False, at: int | None = None) -> Signals:
    """Return a response of 120 tokens with twelve plans. Entropy and FAI are noise from 0.1 to 0.3, except:

    - with `entropy`, entropy is higher by 1 at the plans;
    - with `at`, FAI is higher by 1 at the tokens `at` places after the plans.
    """
    rng = np.random.default_rng(seed)
    places = sorted((rng.choice(LENGTH // 6 - 1, 12, replace=False) * 6 + rng.integers(0, 2, 12)).tolist())
    noise = rng.uniform(0.1, 0.3, (2, LENGTH))
    if entropy:
        noise[0, places] += 1.0
    if at is not None:
        noise[1, np.array(places) + at] += 1.0
    return Signals(np.arange(10, 10 + LENGTH), steps_at(places, LENGTH), noise[1], noise[0])


def found(*responses: Signals, options: Rhythm = OPTIONS, shifts: int = 200) -> list[Coupling]:
    """Return the four couplings of the responses, in the order of `NAMES`. "After" means one or two tokens later."""
    one = couplings(options, responses, seed=4, shifts=shifts, reach=2)
    assert [each.name for each in one] == NAMES
    return one


@pytest.mark.parametrize("count", [1, 4])
def test_planted_couplings_are_found_and_no_others(count: int) -> None:
    entropy, *rest = found(*(planted(seed, entropy=True) for seed in range(count)))
    assert entropy.difference == pytest.approx(1.0, abs=0.05)
    assert abs(entropy.null_mean) < 0.1
    assert entropy.null_high < entropy.difference
    assert entropy.p < 0.03
    assert all(one.p > 0.05 for one in rest)

    entropy, at, *_ = found(*(planted(seed, at=0) for seed in range(count)))
    assert at.difference == pytest.approx(1.0, abs=0.05)
    assert at.p < 0.03
    assert entropy.p > 0.05

    entropy, at, after, anchors = found(*(planted(seed, at=2) for seed in range(count)))
    assert entropy.p > 0.05
    assert after.difference == pytest.approx(0.5, abs=0.05)
    assert (anchors.marked, anchors.tokens) == (1.0, 12 * count)
    assert after.p < 0.03
    assert anchors.p < 0.05


def test_of_signals_without_a_coupling_few_have_a_small_p() -> None:
    """Check that about a tenth of all p is at most 0.1: without a coupling, p ≤ x has a probability of about x."""
    small = [one.p <= 0.1 for seed in range(30) for one in found(planted(seed), shifts=LENGTH)]
    assert 0.03 < np.mean(small) < 0.2


def test_the_null_of_a_short_response_is_every_shift_once() -> None:
    """Check eight tokens, of which seven have a Δ and one is a plan with entropy 1; entropy is 0 at all others.

    Of the seven shifts, one leaves the plan in its place and gives the difference 1. The others give −1/6.
    """
    signals = Signals(np.arange(3, 11), steps_at([2], 8), np.zeros(8), np.eye(8)[2])
    entropy, *influence = found(signals)
    assert (entropy.marked, entropy.others, entropy.tokens) == (1.0, 0.0, 1)
    assert entropy.null_mean == pytest.approx(0.0, abs=1e-12)
    assert (entropy.null_low, entropy.null_high) == pytest.approx(np.quantile([-1 / 6] * 6 + [1], (0.025, 0.975)))
    assert entropy.p == pytest.approx(2 / 7)
    assert found(signals, shifts=7)[0] == entropy
    assert all(one.p == 1.0 or math.isnan(one.p) for one in influence)


def test_every_pair_of_shifts_of_two_short_responses_counts_once() -> None:
    """Check two responses with 5 and 4 tokens that have a Δ, each with one plan, at which entropy is 1.

    Of the 5 · 4 pairs of shifts, one leaves both plans in their places, 7 leave one plan, and 12 leave none.
    """
    one = Signals(np.arange(1, 7), steps_at([1], 6), np.zeros(6), np.eye(6)[1])
    other = Signals(np.arange(2, 7), steps_at([3], 5), np.zeros(5), np.eye(5)[3])
    entropy = found(one, other)[0]
    values = [1.0] + [1 / 2 - 1 / 7] * 7 + [-2 / 7] * 12
    assert entropy.difference == 1.0
    assert entropy.null_mean == pytest.approx(np.mean(values))
    assert (entropy.null_low, entropy.null_high) == pytest.approx(np.quantile(values, (0.025, 0.975)))
    assert entropy.p == pytest.approx(2 / 20)


def test_drawn_shifts_follow_the_seed_and_never_make_a_p_of_0() -> None:
    responses = [planted(seed, entropy=True) for seed in range(3)]
    first, again, other = (couplings(OPTIONS, responses, seed=seed, shifts=50, reach=2) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[0].p == pytest.approx(2 / 51)


def test_after_a_plan_ends_with_the_turn_and_the_response() -> None:
    """Check a plan at the last token but one of its response, with an anchor right after the turn's or response's end.

    If the places have a gap (another turn), or the tokens belong to another response, the anchor follows no plan.
    """
    turns = np.array([5, 6, 7, 8, 10, 11, 12, 13])
    waad = np.array([0.0, 0, 0, 1, 1, 1, 1, 1])
    influence = np.array([0.0, 0, 0, 0, 1, 0, 0, 0])
    options = Rhythm(top=0.125, nearest=1, farthest=3)
    signals = Signals(turns, waad, influence, np.zeros(8))
    assert couplings(options, [signals], reach=2)[3].marked == 0.0
    whole = signals._replace(position_R=np.arange(5, 13))
    assert couplings(options, [whole], reach=2)[3].marked == 1.0
    cut = Signals(turns[:4], waad[:4], influence[:4], np.zeros(4))
    rest = Signals(np.arange(9, 13), np.zeros(4), influence[4:], np.zeros(4))
    assert couplings(options, [cut, rest], reach=2)[3].marked == 0.0


def test_the_last_token_of_a_turn_is_neither_a_plan_nor_compared_with_plans() -> None:
    """Check three turns of four tokens. Entropy is 0 at the ends of turns and 1 elsewhere.

    If the ends were compared with the plans, the plans would seem to have a higher entropy.
    """
    position = np.array([place + turn for turn in range(3) for place in range(4 * turn, 4 * turn + 4)])
    waad = np.array([0.0, 0, 1, 1] * 3)
    signals = Signals(position, waad, np.ones(12), np.array([1.0, 1, 1, 0] * 3))
    entropy = couplings(Rhythm(top=0.25, nearest=1, farthest=3), [signals])[0]
    assert (entropy.marked, entropy.others, entropy.tokens) == (1.0, 1.0, 3)
    assert (entropy.null_low, entropy.null_high, entropy.p) == (0.0, 0.0, 1.0)


def test_turns_of_one_token_have_no_plan() -> None:
    single = Signals(np.array([3, 5, 7]), np.array([0.0, 2, 0]), np.zeros(3), np.ones(3))
    assert couplings(OPTIONS, [single])[0].tokens == 0
    alone, beside = (couplings(OPTIONS, some, seed=1)[0] for some in ([planted(0)], [planted(0), single]))
    assert alone == beside


def test_tokens_without_followers_in_the_range_of_fai_are_not_compared() -> None:
    signals = Signals(np.arange(8), steps_at([1, 6], 8), np.array([1.0, 3, 1, 1, 1, 1, 0, 0]), np.zeros(8))
    at = couplings(Rhythm(top=0.25, nearest=2, farthest=4), [signals], reach=1)[1]
    assert (at.marked, at.others, at.tokens) == (3.0, 1.0, 1)


def test_a_mean_without_tokens_is_nan() -> None:
    still = Signals(np.arange(5), np.zeros(5), np.zeros(5), np.ones(5))
    for one in couplings(Rhythm(nearest=10), [still]):
        assert one.tokens == 0
        assert math.isnan(one.difference)
        assert math.isnan(one.p)
    with pytest.raises(ValueError, match="at least one response"):
        couplings(OPTIONS, [])
