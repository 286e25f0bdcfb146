"""The outage clock on the virtual clock: what its owners' deadlines leave out, and what they do not."""

from __future__ import annotations

import anyio
import pytest

from flash.rollout.engine_state import OutageClock
from flash.simulate.clock import run_virtual

LONGEST_S = 100.0


def test_a_deadline_leaves_out_the_outages_that_it_waits_through() -> None:
    async def scenario() -> None:
        clock = OutageClock(LONGEST_S)
        with anyio.move_on_after(50) as heeds, anyio.move_on_after(50) as does_not, clock.extending(heeds):
            await anyio.sleep(10)
            for _ in range(2):
                clock.begin()
                await anyio.sleep(7)
                clock.end()
                await anyio.sleep(5)
        assert heeds.deadline == pytest.approx(50 + 2 * 7)
        assert does_not.deadline == 50

    run_virtual(scenario)


def test_a_deadline_that_comes_later_leaves_out_what_is_left_of_the_outage() -> None:
    async def scenario() -> None:
        clock = OutageClock(LONGEST_S)
        clock.begin()
        await anyio.sleep(30)
        clock.begin()
        assert clock.remaining_s == LONGEST_S - 30, "an outage begins once"
        with anyio.move_on_after(20) as scope, clock.extending(scope):
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert anyio.current_time() == pytest.approx(30 + 20 + LONGEST_S - 30)
        clock.end()
        assert scope.deadline == pytest.approx(20 + LONGEST_S), "what is over is told nothing"

    run_virtual(scenario)


def test_who_leaves_in_an_outage_and_comes_again_leaves_out_only_what_it_waited() -> None:
    async def scenario() -> None:
        clock = OutageClock(LONGEST_S)
        with anyio.move_on_after(50) as scope:
            clock.begin()
            for _ in range(3):
                with clock.extending(scope):
                    await anyio.sleep(4)
                await anyio.sleep(1)
            assert scope.deadline == pytest.approx(50 + 3 * 4)
            clock.end()
        assert scope.deadline == pytest.approx(50 + 3 * 4)

    run_virtual(scenario)


def test_an_outage_counts_beyond_the_time_that_it_may_last() -> None:
    async def scenario() -> None:
        clock = OutageClock(LONGEST_S)
        with anyio.move_on_after(1000) as scope, clock.extending(scope):
            clock.end()
            assert scope.deadline == 1000, "without an outage nothing ends"
            clock.begin()
            await anyio.sleep(3 * LONGEST_S)
            assert clock.remaining_s == 0
            clock.end()
        assert scope.deadline == pytest.approx(1000 + LONGEST_S)

    run_virtual(scenario)
