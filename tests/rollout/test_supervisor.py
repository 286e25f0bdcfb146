"""Engines that die and are started again: when, how often, and what their owner is told; on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from flash.config.waits import LONGEST_PAUSE_S
from flash.errors import DeadlineError, EngineDeadError, EngineError
from flash.rollout.engine import Engine
from flash.rollout.fake_engine import FakeEngine, FakeLine
from flash.rollout.supervisor import LEAST_STEADY_S, MOST_STEADY_S, STEADY_STARTS, Restart, RestartBudget, Supervisor
from flash.simulate.clock import run_virtual

START_S = 20.0


def test_pauses_double_up_to_a_limit_and_end_with_the_budget() -> None:
    budget = RestartBudget(9)
    budget.serves(0.0, START_S)
    pauses: list[float] = []
    while (restart := budget.died(5.0)) is not None:
        assert restart.number == len(pauses) + 1
        pauses.append(restart.pause_s)
        budget.serves(5.0, START_S)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@pytest.mark.parametrize(
    ("start_s", "well_s"),
    [(2.0, LEAST_STEADY_S), (START_S, STEADY_STARTS * START_S), (180.0, MOST_STEADY_S)],
)
def test_an_engine_that_was_well_for_ten_times_its_start_counts_anew(start_s: float, well_s: float) -> None:
    budget = RestartBudget(2)
    now = 0.0
    budget.serves(now, start_s)
    for _ in range(5):
        now += well_s
        assert budget.died(now) == Restart(1.0, 1)
        budget.serves(now, start_s)
        assert budget.died(now + well_s - 1) == Restart(2.0, 2)
        budget.serves(now, start_s)
    assert budget.died(now + 1) is None


def test_time_in_which_no_engine_starts_makes_up_for_nothing() -> None:
    budget = RestartBudget(2)
    budget.serves(0.0, START_S)
    assert budget.died(MOST_STEADY_S) == Restart(1.0, 1)
    assert budget.died(3 * MOST_STEADY_S) == Restart(2.0, 2)
    assert budget.died(5 * MOST_STEADY_S) is None


class Diary:
    """An owner that gives no work, and writes down what it is told and when."""

    def __init__(self, line: FakeLine) -> None:
        self.line = line
        self.told: list[tuple[float, str]] = []

    def write(self, text: str) -> None:
        self.told.append((anyio.current_time(), text))

    async def serve(self, place: int) -> EngineDeadError:
        return await self.line.newest.wait_dead()

    async def died(self, place: int, death: EngineDeadError, restart: Restart | None) -> None:
        self.write(f"{place}: {death}; {restart and restart.pause_s}")

    async def replaced(self, place: int, engine: Engine) -> None:
        assert engine is self.line.newest
        assert all(former.closed for former in self.line.made[:-1])
        self.write(f"{place}: replaced")


def engine() -> FakeEngine:
    return FakeEngine(lambda prompt: [], start_seconds=5.0)


def lives(
    most: int, then: Callable[[Diary], None], make: Callable[[], FakeEngine] = engine
) -> tuple[list[tuple[float, str]], list[FakeEngine], str]:
    """What an owner is told when the first engine dies at 100 s and each next one 10 s after its start."""
    line = FakeLine(make)
    diary = Diary(line)
    deaths: list[EngineDeadError] = []

    async def scenario() -> None:
        supervisor = Supervisor(7, line, most, START_S)
        await supervisor.start()

        async def watch() -> None:
            deaths.append(await supervisor.run(diary))
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await anyio.sleep(100 - anyio.current_time())
            line.newest.kill()
            while True:
                seen = len(diary.told)
                await anyio.sleep(1)
                if len(diary.told) > seen and diary.told[-1][1].endswith("replaced"):
                    await anyio.sleep(9.5)
                    then(diary)

    run_virtual(scenario)
    return diary.told, line.made, str(deaths[0])


KILLED = "7: the fake engine was killed"


def test_an_engine_comes_back_after_a_pause_and_a_start_until_its_restarts_are_used_up() -> None:
    told, made, death = lives(2, lambda diary: diary.line.newest.kill())
    assert [text for _, text in told] == [
        f"{KILLED}; 1.0",
        "7: replaced",
        f"{KILLED}; 2.0",
        "7: replaced",
        f"{KILLED}; None",
    ]
    assert told[1][0] == told[0][0] + 1 + 5
    assert told[3][0] == told[2][0] + 2 + 5
    assert len(made) == 3
    assert all(one.closed for one in made), "also the last one: what is left of it holds memory"
    assert death == "the fake engine was killed"


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_start_that_fails_or_never_ends_is_tried_again(how: str) -> None:
    numbers = iter(range(10))

    def make() -> FakeEngine:
        number = next(numbers)
        one = FakeEngine(lambda prompt: [], start_seconds=1000.0 if how == "hangs" and number == 1 else 5.0)
        one.start_error = EngineError("no memory") if how == "fails" and number == 1 else None
        return one

    told, made, _ = lives(2, lambda diary: diary.line.newest.kill(), make)
    took, why = (5, "no memory") if how == "fails" else (START_S, f"waited {START_S:g} s for an engine to start again")
    assert told[0] == (100, f"{KILLED}; 1.0")
    assert told[1][0] == 100 + 1 + took
    assert told[1][1].startswith(f"7: {why}")
    assert told[1][1].endswith("; 2.0")
    assert [text for _, text in told[2:]] == ["7: replaced", f"{KILLED}; None"]
    assert all(one.closed for one in made)


def begun_with(
    most: int, *ends: Exception | None
) -> tuple[list[tuple[float, str]], list[FakeEngine], Exception | None]:
    """What an owner is told in 1000 s when starts end so, one after the other; and what the supervisor raised."""
    each = iter(ends)

    def make() -> FakeEngine:
        one = engine()
        one.start_error = next(each)
        return one

    line = FakeLine(make)
    diary = Diary(line)
    raised: list[Exception] = []

    async def scenario() -> None:
        supervisor = Supervisor(7, line, most, START_S)
        with anyio.move_on_after(1000):
            try:
                await supervisor.start()
                await supervisor.run(diary)
            except (EngineError, DeadlineError) as error:
                raised.append(error)

    run_virtual(scenario)
    return diary.told, line.made, raised[0] if raised else None


SHOT = EngineDeadError("killed while it started")


def test_a_first_engine_that_is_killed_while_it_starts_has_died_and_another_one_follows() -> None:
    told, made, raised = begun_with(3, SHOT, SHOT, None)
    assert told == [(5, f"7: {SHOT}; 1.0"), (5 + 1 + 5, f"7: {SHOT}; 2.0"), (11 + 2 + 5, "7: replaced")]
    assert [one.closed for one in made] == [True, True, False]
    assert raised is None


def test_starts_that_are_killed_use_up_the_restarts() -> None:
    told, made, _ = begun_with(1, SHOT, SHOT)
    assert [text for _, text in told] == [f"7: {SHOT}; 1.0", f"7: {SHOT}; None"]
    assert all(one.closed for one in made)


@pytest.mark.parametrize("error", [EngineError("no such model"), DeadlineError("engine 7 to start", 20, "its log")])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_place_whose_engines_cannot_start_by_themselves_is_given_up_at_once(killed: int, error: Exception) -> None:
    told, made, raised = begun_with(3, *[SHOT] * killed, error)
    assert raised is error
    assert len(told) == killed
    assert len(made) == killed + 1


def test_without_restarts_the_first_death_is_the_last() -> None:
    told, made, death = lives(0, lambda diary: None)
    assert told == [(100, f"{KILLED}; None")]
    assert made[0].closed
    assert death == "the fake engine was killed"
