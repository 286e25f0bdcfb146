"""The limit of requests per engine, under any history of pressure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flash.rollout.engine import Pressure
from flash.rollout.engine_record import CUT, HIGH_WATER, LOW_WATER, ConcurrencyLimit


def pressure(kv_used: float, preemptions: int = 0) -> Pressure:
    return Pressure(running=0, waiting=0, kv_used=kv_used, preemptions=preemptions)


def test_without_pressure_the_limit_is_the_engines_number_of_sequences() -> None:
    limit = ConcurrencyLimit(256)
    for held in (1, 100, 256):
        limit.observe(pressure(0.5), held, ended=True)
    assert limit.limit == 256


def test_a_full_cache_cuts_the_limit_below_what_is_held() -> None:
    limit = ConcurrencyLimit(256)
    limit.observe(pressure(HIGH_WATER), 100, ended=False)
    assert limit.limit == int(100 * CUT)


def test_a_preemption_cuts_the_limit_also_when_the_cache_has_room_again() -> None:
    limit = ConcurrencyLimit(100)
    limit.observe(pressure(0.5, preemptions=1), 100, ended=True)
    assert limit.limit == int(100 * CUT)
    limit.observe(pressure(0.5, preemptions=1), 80, ended=False)
    assert limit.limit == int(100 * CUT), "a preemption is news once"


def test_the_next_cut_waits_until_the_last_one_has_taken_effect() -> None:
    limit = ConcurrencyLimit(100)
    for held in (100, 99, 90, 81):
        limit.observe(pressure(1.0), held, ended=True)
    assert limit.limit == 80
    limit.observe(pressure(1.0), 80, ended=True)
    assert limit.limit == 64


def test_a_cut_is_made_good_while_all_of_the_limit_is_used_and_the_cache_has_room() -> None:
    limit = ConcurrencyLimit(100)
    limit.observe(pressure(1.0), 100, ended=True)
    ends = 0
    while limit.limit < 100:
        limit.observe(pressure(LOW_WATER), limit.limit, ended=True)
        ends += 1
    assert 100 <= ends <= 1000


def test_a_limit_that_is_not_reached_does_not_rise() -> None:
    limit = ConcurrencyLimit(100)
    limit.observe(pressure(1.0), 100, ended=True)
    for _ in range(1000):
        limit.observe(pressure(0.1), limit.limit - 1, ended=True)
    assert limit.limit == 80


Observation = tuple[float, int, int, bool]
OBSERVATIONS: st.SearchStrategy[list[Observation]] = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 1), st.integers(1, 64), st.booleans())
)


@given(st.integers(1, 64), OBSERVATIONS)
def test_the_limit_stays_between_one_and_the_ceiling_and_moves_only_for_a_reason(
    ceiling: int, observations: list[Observation]
) -> None:
    limit, preemptions = ConcurrencyLimit(ceiling), 0
    for kv_used, new, held, ended in observations:
        before, preemptions = limit.limit, preemptions + new
        limit.observe(pressure(kv_used, preemptions), held, ended=ended)
        assert 1 <= limit.limit <= ceiling
        if limit.limit > before:
            assert ended
            assert held >= before
            assert kv_used <= LOW_WATER
            assert not new
        if limit.limit < before:
            assert new or kv_used >= HIGH_WATER


@given(st.integers(1, 64), OBSERVATIONS)
def test_under_lasting_pressure_the_limit_reaches_one(ceiling: int, observations: list[Observation]) -> None:
    limit = ConcurrencyLimit(ceiling)
    for kv_used, _, held, ended in observations:
        limit.observe(pressure(kv_used), held, ended=ended)
    for _ in range(64):
        limit.observe(pressure(1.0), limit.limit, ended=True)
    assert limit.limit == 1
