"""Engines that die and are started again: when, how often, and what the hub is told; on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from flash.config.waits import LONG_POLL_S, LONGEST_PAUSE_S
from flash.errors import DeadlineError, EngineDeadError, EngineError
from flash.hub import protocol as p
from flash.rollout.engine_state import OutageClock
from flash.rollout.episode.episode import EpisodeProgress
from flash.rollout.fake_engine import FakeEngine, FakeLine
from flash.rollout.proxy import LLMProxy, ProxySettings
from flash.rollout.reports import NodeReports
from flash.rollout.scheduler import HubClient, HubLink, Scheduler, Wakeup
from flash.rollout.supervisor import (
    MAX_STEADY_S,
    MIN_STEADY_S,
    STEADY_STARTS,
    EnginePlace,
    EngineSupervisor,
    Restart,
    RestartBudget,
)
from flash.simulate.clock import run_virtual
from flash.transport.frames import ReplyT, Request, check_reply
from flash.types import Failure, Lease
from flash.waiting import first_error

START_S = 20.0
"""Seconds that the start of an engine may take."""


def test_pauses_double_up_to_a_limit_and_end_with_the_budget() -> None:
    budget = RestartBudget(9)
    budget.started(0.0, START_S)
    pauses: list[float] = []
    while (restart := budget.died(5.0)) is not None:
        assert restart.number == len(pauses) + 1
        pauses.append(restart.pause_s)
        budget.started(5.0, START_S)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@pytest.mark.parametrize(
    ("start_s", "well_s"),
    [(2.0, MIN_STEADY_S), (START_S, STEADY_STARTS * START_S), (180.0, MAX_STEADY_S)],
)
def test_an_engine_that_was_well_for_ten_times_its_start_counts_anew(start_s: float, well_s: float) -> None:
    budget = RestartBudget(2)
    now = 0.0
    budget.started(now, start_s)
    for _ in range(5):
        now += well_s
        assert budget.died(now) == Restart(1.0, 1)
        budget.started(now, start_s)
        assert budget.died(now + well_s - 1) == Restart(2.0, 2)
        budget.started(now, start_s)
    assert budget.died(now + 1) is None


def test_time_in_which_no_engine_starts_makes_up_for_nothing() -> None:
    budget = RestartBudget(2)
    budget.started(0.0, START_S)
    assert budget.died(MAX_STEADY_S) == Restart(1.0, 1)
    assert budget.died(3 * MAX_STEADY_S) == Restart(2.0, 2)
    assert budget.died(5 * MAX_STEADY_S) is None


class Diary:
    """A hub that publishes nothing, and writes down the reports of a node and when they come."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, str]] = []
        """Time of each report in seconds, and its notes, or `replaced` for a report without notes."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Answer a request for a version after the longest wait, with none. Write down a report."""
        if isinstance(request, p.VersionRequest):
            await anyio.sleep(LONG_POLL_S)
            return check_reply(request, p.VersionReply(None, done=False))
        assert isinstance(request, p.EngineReport)
        self.reports.append((anyio.current_time(), "; ".join(request.notes) or "replaced"))
        return check_reply(request, p.Ack())


def engine() -> FakeEngine:
    """Return a fake engine that takes 5 seconds to start."""
    return FakeEngine(lambda prompt: [], start_seconds=5.0)


def supervised(diary: Diary, line: FakeLine, most: int) -> EngineSupervisor:
    """Return the supervisor of a node with one place, for at most `most` restarts in a row."""
    now = anyio.current_time
    hub, wakeup = HubClient(HubLink(0, 7, diary), None, 2 * LONG_POLL_S), Wakeup()
    place = EnginePlace(0, 7, line, START_S)
    settings = ProxySettings(max_sequences=1, swap="keep", bind_groups=False, swap_s=10.0, drain_s=10.0)
    proxy = LLMProxy([place.engine], 7, settings, OutageClock(), on_room=wakeup.notify, now=now)
    reports = NodeReports(hub, proxy, Scheduler(hub, unplayed, wakeup), now=now, blocked_s=float)
    return EngineSupervisor([place], proxy, hub, reports, now=now, max_restarts=most)


async def unplayed(lease: Lease, progress: EpisodeProgress) -> Failure:
    """Fail the test: no episode is played here."""
    raise AssertionError("no lease is granted here")


def lives(
    most: int, then: Callable[[FakeLine], None], make: Callable[[], FakeEngine] = engine
) -> tuple[list[tuple[float, str]], list[FakeEngine], str]:
    """Let the first engine die at 100 s and, by `then`, each next one 10 s after its start.

    Returns the reports, the engines, and how the last one died.
    """
    line, diary = FakeLine(make), Diary()
    deaths: list[EngineDeadError] = []

    async def scenario() -> None:
        supervisor = supervised(diary, line, most)
        await supervisor.start(START_S)

        async def watch() -> None:
            """Run the supervisor, and keep the death with which it ends."""
            try:
                await supervisor.run()
            except BaseExceptionGroup as errors:
                error = first_error(errors)
                assert isinstance(error, EngineDeadError)
                deaths.append(error)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await anyio.sleep(100 - anyio.current_time())
            line.newest.kill()
            while True:
                seen = len(diary.reports)
                await anyio.sleep(1)
                if len(diary.reports) > seen and diary.reports[-1][1] == "replaced":
                    await anyio.sleep(9.5)
                    then(line)

    run_virtual(scenario)
    return diary.reports, line.made, str(deaths[0])


KILLED = "the fake engine was killed"


def restarts(number: int, most: int, pause_s: int, death: str = KILLED) -> str:
    """Return the note about a death after which another engine starts."""
    return f"{death}. It starts again in {pause_s} s ({number} of {most} restarts in a row)"


def was_last(most: int, death: str = KILLED) -> str:
    """Return the note about a death after which no engine is left."""
    return f"{death}. It was the last one of node 0, which ends with it: cluster.max_restarts is {most}"


def test_an_engine_comes_back_after_a_pause_and_a_start_until_its_restarts_are_used_up() -> None:
    told, made, death = lives(2, lambda line: line.newest.kill())
    assert [text for _, text in told] == [
        restarts(1, 2, 1),
        "replaced",
        restarts(2, 2, 2),
        "replaced",
        was_last(2),
    ]
    # The pauses of 1 s and 2 s, and a start of 5 s.
    assert told[1][0] == told[0][0] + 1 + 5
    assert told[3][0] == told[2][0] + 2 + 5
    assert len(made) == 3
    assert all(one.closed for one in made), "also the last one: what is left of it holds memory"
    assert death == KILLED


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_start_that_fails_or_never_ends_is_tried_again(how: str) -> None:
    numbers = iter(range(10))

    def make() -> FakeEngine:
        """Return a fake engine. The second one fails or hangs when it starts."""
        number = next(numbers)
        one = FakeEngine(lambda prompt: [], start_seconds=1000.0 if how == "hangs" and number == 1 else 5.0)
        one.start_error = EngineError("no memory") if how == "fails" and number == 1 else None
        return one

    told, made, _ = lives(2, lambda line: line.newest.kill(), make)
    took, why = (5, "no memory") if how == "fails" else (START_S, f"waited {START_S:g} s for an engine to start again")
    assert told[0] == (100, restarts(1, 2, 1))
    assert told[1][0] == 100 + 1 + took
    assert told[1][1].startswith(why)
    assert told[1][1].endswith("It starts again in 2 s (2 of 2 restarts in a row)")
    assert [text for _, text in told[2:]] == ["replaced", was_last(2)]
    assert all(one.closed for one in made)


def begun_with(
    most: int, *ends: Exception | None
) -> tuple[list[tuple[float, str]], list[FakeEngine], BaseException | None]:
    """Run a supervisor for 1000 s, with engines whose starts end as given.

    Returns the reports, the engines, and the error that the supervisor raised.
    """
    each = iter(ends)

    def make() -> FakeEngine:
        """Return a fake engine with the next end of a start."""
        one = engine()
        one.start_error = next(each)
        return one

    line, diary = FakeLine(make), Diary()
    raised: list[BaseException] = []

    async def scenario() -> None:
        supervisor = supervised(diary, line, most)
        with anyio.move_on_after(1000):
            try:
                await supervisor.start(START_S)
                await supervisor.run()
            except BaseExceptionGroup as errors:
                raised.append(first_error(errors))

    run_virtual(scenario)
    return diary.reports, line.made, raised[0] if raised else None


SHOT = EngineDeadError("killed while it started")


def test_a_first_engine_that_is_killed_while_it_starts_has_died_and_another_one_follows() -> None:
    told, made, raised = begun_with(3, SHOT, SHOT, None)
    assert told == [
        (5, restarts(1, 3, 1, str(SHOT))),
        (5 + 1 + 5, restarts(2, 3, 2, str(SHOT))),
        (11 + 2 + 5, "replaced"),
    ]
    assert [one.closed for one in made] == [True, True, False]
    assert raised is None


def test_starts_that_are_killed_use_up_the_restarts() -> None:
    told, made, raised = begun_with(1, SHOT, SHOT)
    assert [text for _, text in told] == [restarts(1, 1, 1, str(SHOT)), was_last(1, str(SHOT))]
    assert all(one.closed for one in made)
    assert raised is SHOT


@pytest.mark.parametrize("error", [EngineError("no such model"), DeadlineError("engine 7 to start", 20, "its log")])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_place_whose_engines_cannot_start_by_themselves_is_given_up_at_once(killed: int, error: Exception) -> None:
    told, made, raised = begun_with(3, *[SHOT] * killed, error)
    assert raised is error
    assert len(told) == killed
    assert len(made) == killed + 1


def test_the_last_death_on_a_node_that_leaves_is_no_error_and_is_not_reported() -> None:
    line, diary = FakeLine(engine), Diary()

    async def scenario() -> None:
        supervisor = supervised(diary, line, 0)
        await supervisor.start(START_S)
        supervisor.start_leaving()
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.run)
            await anyio.sleep(1)
            line.newest.kill()
            await supervisor.no_engine_left()

    run_virtual(scenario)
    assert diary.reports == []
    assert line.made[0].closed


def test_without_restarts_the_first_death_is_the_last() -> None:
    told, made, death = lives(0, lambda line: None)
    assert told == [(100, was_last(0))]
    assert made[0].closed
    assert death == KILLED
