"""A node whose engines die and start again in their places, on the virtual clock: it costs their own work alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flash.errors import DeadlineError, EngineDeadError, EngineError, FlashError, WeightsError
from flash.hub.context import RunEnd
from flash.rollout.fake_engine import FakeEngine
from flash.rollout.routing import MAX_DEATHS
from flash.simulate.clock import run_virtual
from tests.rollout.test_node import World, ages
from tests.rollout.test_node_engines import SLOTS, config, engine

START_S = 7.0
STEPS = 8
"""Steps of a run in which engines die at any moment."""


def world(engines: int, **changes: Any) -> World:
    """Return a run of 20 steps whose nodes have this number of engines. `changes` replace keys of the configuration."""
    changes.setdefault("run", {"steps": 20})
    return World(config(**changes), engines=[partial(started, text="yes and more")] * engines)


def started(**changes: Any) -> FakeEngine:
    """Return a fake engine that takes `START_S` to start."""
    made = engine(**changes)
    made.start_seconds = START_S
    return made


def run_with(world: World, *events: tuple[float, Callable[[], object]]) -> RunEnd:
    """Run a world until its end. `events`: seconds after the event before, and a function that is then called."""

    async def go() -> RunEnd:
        ends: list[RunEnd] = []

        async def runs() -> None:
            ends.append(await world.run())

        async with anyio.create_task_group() as group:
            group.start_soon(runs)
            for seconds, event in events:
                await anyio.sleep(seconds)
                event()
        return ends[0]

    return run_virtual(go)


def nothing_is_lost(world: World, end: RunEnd, *, steps: int = 20) -> None:
    """Check that the run made all its steps, and that no sample was repeated or given up."""
    assert (end.reason, end.version) == ("finished", steps)
    assert end.ledger["issued"] == end.ledger["trained"] == 8 * steps
    assert not [name for name in end.ledger if name.startswith(("retried", "given_up_"))]


def test_a_node_whose_only_engine_is_on_its_way_back_ends_with_the_run() -> None:
    fakes = iter([started(text="yes and more"), FakeEngine(lambda prompt: [], start_seconds=1000.0)])
    one = World(config(run={"steps": 20}), engines=[partial(next, fakes)])
    run_with(one, (START_S + 15.2, lambda: one.engines[0].kill()), (10.0, lambda: one.hub.interrupt()))
    assert len(one.lines[0].made) == 2, "the next one was starting"
    assert one.took < 100


@pytest.mark.parametrize("swap", ["recompute", "keep", "abort", "drain"])
@pytest.mark.parametrize("engines", [1, 3])
def test_an_engine_that_dies_comes_back_and_takes_part_again(engines: int, swap: str) -> None:
    one = world(engines, rollout={"swap": swap})
    end = run_with(one, (START_S + 15.2, lambda: one.engines[0].kill()))
    nothing_is_lost(one, end)
    first, second = one.lines[0].made
    assert first.closed
    assert second.requests
    assert second.version == 20
    assert one.observer.notes == [
        "the fake engine was killed. It starts again in 1 s (1 of 3 restarts in a row)",
        f"engine 0 is back after 8 s, with version {one.observer.notes[1].rsplit(' ', 1)[1]}",
    ]
    counts = [row["engines"] for row in one.observer.steps]
    assert (counts[0], min(counts), counts[-1]) == (engines, max(1, engines - 1), engines)
    assert sum(row["engine_restarts"] for row in one.observer.steps) == 1


def test_a_response_goes_on_at_the_next_engine_with_its_tokens() -> None:
    one = world(1)
    run_with(one, (START_S + 15.2, lambda: one.engines[0].kill()))
    moved = [request for request in one.engines[0].requests if request.generated]
    assert len(moved) == SLOTS
    mixed = [s.trajectory.versions for shard in one.trainer.shards for s in shard.samples]
    assert any(len(runs) > 1 for runs in mixed)


def test_time_without_an_engine_is_no_time_of_the_episodes_that_wait_for_it() -> None:
    # An answer takes 6.5 s, the next engine 8 s.
    one = world(1, deadlines={"episode": 10.0})
    nothing_is_lost(one, run_with(one, (START_S + 15.2, lambda: one.engines[0].kill())))


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("at", [START_S + 0.05, START_S + 14.0, START_S + 14.7, START_S + 15.0])
def test_all_engines_may_die_at_once_and_again_before_they_have_loaded_anything(engines: int, at: float) -> None:
    one = world(engines)

    def kill() -> None:
        for fake in one.engines:
            fake.kill()

    # While they start again: 1 s of pause, 7 s of start; then 2 s of pause.
    end = run_with(one, (at, kill), (1 + START_S + 0.05, kill), (2 + START_S + 20.0, kill))
    nothing_is_lost(one, end)
    assert all(len(line.made) == 4 for line in one.lines)


def test_an_engine_that_fails_all_its_requests_is_started_again() -> None:
    one = world(1, rollout={"breaker": 16})
    end = run_with(one, (START_S + 15.2, lambda: one.engines[0].fail_next(1000)))
    assert end.version == 20
    assert len(one.lines[0].made) == 2
    assert one.lines[0].made[0].closed
    assert "engine 0 failed 8 requests in a row" in next(note for note in one.observer.notes if "starts again" in note)


def fail_loads(fake: FakeEngine, error: FlashError) -> None:
    """Make each later load of the engine raise `error`."""
    fake.load_error = error


@pytest.mark.parametrize("error", [EngineError("out of memory"), DeadlineError("engine 0 to load", 5, "it")])
def test_an_engine_that_cannot_load_a_version_is_started_again(error: FlashError) -> None:
    one = world(2)
    end = run_with(one, (START_S + 15.2, lambda: fail_loads(one.engines[1], error)))
    nothing_is_lost(one, end)
    assert len(one.lines[1].made) == 2
    assert any(note.startswith(str(error)) for note in one.observer.notes)


def test_damaged_weights_end_the_node_at_once() -> None:
    one = world(2)
    with pytest.raises(BaseExceptionGroup) as caught:
        run_with(one, (START_S + 15.2, lambda: fail_loads(one.engines[1], WeightsError("tensor a is damaged"))))
    assert caught.group_contains(WeightsError, match="tensor a is damaged")
    assert len(one.lines[1].made) == 1


def test_a_first_version_that_cannot_be_loaded_ends_the_node_at_once() -> None:
    one = world(2)
    with pytest.raises(BaseExceptionGroup) as caught:
        run_with(one, (0.5, lambda: fail_loads(one.engines[1], EngineError("there is no parameter named x"))))
    assert caught.group_contains(EngineError, match="there is no parameter named x")
    assert len(one.lines[1].made) == 1


def ends_of_starts(*ends: Exception | None) -> Callable[[], FakeEngine]:
    """Return a maker of engines. The start of each raises one of `ends` (None: no error); later starts raise none."""
    each = iter(ends)

    def make() -> FakeEngine:
        fake = started(text="yes and more")
        fake.start_error = next(each, None)
        return fake

    return make


SHOT = EngineDeadError("engine 0 is dead: while it started, its process was killed")


@pytest.mark.parametrize("others", [0, 1])
def test_engines_that_are_killed_while_they_start_for_the_first_time_are_started_again(others: int) -> None:
    one = World(config(run={"steps": 8}), engines=[ends_of_starts(SHOT, SHOT), *[ends_of_starts()] * others])
    end = run_with(one)
    nothing_is_lost(one, end, steps=8)
    assert [len(line.made) for line in one.lines] == [3, *[1] * others]
    assert one.engines[0].version == 8
    assert one.observer.notes[:3] == [
        f"{SHOT}. It starts again in 1 s (1 of 3 restarts in a row)",
        f"{SHOT}. It starts again in 2 s (2 of 3 restarts in a row)",
        # 1 s and 2 s of pauses, two starts.
        "engine 0 is back after 17 s, with version 0",
    ]


def test_a_run_waits_for_first_engines_that_are_killed_again_and_again_as_long_as_they_have_restarts() -> None:
    slow = {"engine_start": 40.0, "swap": 1.0, "request": 5.0, "generate": 50.0, "step": 100.0}
    many = {"max_restarts": 20}
    one = World(config(run={"steps": 2}, cluster=many, deadlines=slow), engines=[ends_of_starts(*[SHOT] * 12)])
    end = run_with(one)
    nothing_is_lost(one, end, steps=2)
    assert one.took > 12 * START_S + 300


@pytest.mark.parametrize("killed", [0, 1])
def test_an_engine_that_cannot_start_by_itself_ends_the_node_at_once(killed: int) -> None:
    wrong = EngineError("engine 0 did not start: no such model")
    one = World(config(run={"steps": 8}), engines=[ends_of_starts(*[SHOT] * killed, wrong), ends_of_starts()])
    with pytest.raises(BaseExceptionGroup) as caught:
        run_with(one)
    assert caught.group_contains(EngineError, match="no such model")
    assert len(one.lines[0].made) == killed + 1


def test_a_node_leaves_when_its_only_engine_is_killed_at_every_start() -> None:
    one = World(config(run={"steps": 8}), engines=[ends_of_starts(*[SHOT] * 10)])
    with pytest.raises(BaseExceptionGroup) as caught:
        run_with(one)
    assert caught.group_contains(EngineDeadError, match="while it started")
    assert len(one.lines[0].made) == 4
    assert one.observer.notes[-1].startswith(f"{SHOT}. It was the last one of node 0, which ends with it")


def test_a_node_leaves_when_the_restarts_of_its_last_engine_are_used_up() -> None:
    one = world(2, cluster={"max_restarts": 1}, rollout={"retries": 0, "breaker": 1})

    def kill(index: int) -> Callable[[], object]:
        return lambda: one.engines[index].kill()

    with pytest.raises(BaseExceptionGroup) as caught:
        run_with(one, (START_S + 5, kill(0)), (20, kill(0)), (20, kill(1)), (20, kill(1)))
    assert caught.group_contains(EngineDeadError, match="the fake engine was killed")
    follows = [note.removeprefix("the fake engine was killed. ").split(",")[0] for note in one.observer.notes]
    assert follows == [
        "It starts again in 1 s (1 of 1 restarts in a row)",
        "engine 0 is back after 8 s",
        "The run goes on without it: cluster.max_restarts is 1",
        "It starts again in 1 s (1 of 1 restarts in a row)",
        "engine 1 is back after 8 s",
        "It was the last one of node 0",
    ]
    assert [len(line.made) for line in one.lines] == [2, 2]


def test_a_run_that_ends_does_not_wait_for_an_engine_that_starts() -> None:
    fakes = iter([started(), FakeEngine(lambda prompt: [], start_seconds=1000.0)])
    one = World(config(run={"steps": 6}), engines=[partial(next, fakes), started])
    end = run_with(one, (START_S + 3.2, lambda: one.engines[0].kill()))
    nothing_is_lost(one, end, steps=6)
    assert one.took < 100
    assert all(fake.closed for line in one.lines for fake in line.made)


@pytest.mark.slow
@settings(max_examples=25)
@example(3, [(4.014, 2), (7.894, 0), (3.128, 1), (5.772, 2), (0.0, 0)], "recompute", False, 0.0)
@example(3, [(12.0, 1)], "drain", False, 1.0)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.floats(0.0, 12.0), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from(["recompute", "keep", "abort", "drain"]),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_laws_2_and_3_hold_whenever_engines_die(
    engines: int, deaths: list[tuple[float, int]], swap: str, replicate: bool, alpha: float
) -> None:
    one = world(
        engines,
        run={"steps": STEPS},
        cluster={"max_restarts": 100},
        rollout={"swap": swap, "barriers": [] if replicate else ["group"], "retries": 0, "breaker": 1000},
        train={"async_ratio": alpha, "max_token_age": math.ceil(alpha)},
    )

    def kill(index: int) -> Callable[[], object]:
        return lambda: one.engines[index % engines].kill()

    end = run_with(one, (START_S, lambda: None), *((delay, kill(index)) for delay, index in deaths))
    assert (end.reason, end.version) == ("finished", STEPS)
    # The others may train past what waits for an engine; they do so very rarely.
    most = SLOTS * len(deaths)
    if swap == "drain" and not replicate:
        # An engine's three slots have a group of two and half of another one, whose second member is bound to the
        # engine and waits. An engine that was away drains at other times than the others for the rest of the run, so
        # in each later step such a member may come too late.
        most = max(most, STEPS)
    stale = end.ledger.get("given_up_stale", 0)
    assert stale <= most
    # By chance as many engines may die under one sample, before any has given a token, as convict it.
    killed = end.ledger.get("given_up_engine_killed", 0)
    assert killed <= SLOTS * (len(deaths) // MAX_DEATHS)
    assert end.ledger["issued"] == end.ledger["trained"] + stale + killed
    given_up = {name for name in end.ledger if name.startswith(("retried", "given_up_"))}
    assert given_up <= {"given_up_stale", "given_up_engine_killed"}
    assert max(ages(one)) <= math.ceil(alpha)
    assert all(fake.closed for line in one.lines for fake in line.made)
