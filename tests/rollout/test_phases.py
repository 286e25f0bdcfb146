"""Lock-step and group barriers: which episodes may continue, under random interleavings of many episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.config.tree import Config
from flash.rollout.episode.phases import GroupBarrier, LockStep, PhaseRule, Phases, phases
from flash.simulate.clock import run_virtual
from flash.types import Lease, Split, Task


def lease(number: int, group: int = 0, split: Split = "train") -> Lease:
    """Return a lease with the number `number`, of a sample of the group `group`."""
    return Lease(number, Task(number, group, number, seed=group, split=split), min_version=0)


def config(**rollout: Any) -> Config:
    """Return a configuration with these keys of `[rollout]`."""
    tables = {"run": {"name": "t"}, "model": {"path": "m"}, "env": {"path": "e:E"}, "rollout": rollout}
    return msgspec.convert(tables, Config)


@pytest.mark.parametrize(
    ("barriers", "expected"),
    [
        ([], type(None)),
        (["turn"], LockStep),
        (["group"], GroupBarrier),
        (["group", "turn"], LockStep),
    ],
)
def test_the_barriers_choose_the_phases(barriers: list[str], expected: type) -> None:
    assert type(phases(config(barriers=barriers)).rule) is expected


class Crowd:
    """Episodes under a rule: each resets, then generates and steps by turns until it leaves."""

    def __init__(self, rule: PhaseRule) -> None:
        self.rule = rule
        self.leases: dict[int, Lease] = {}
        self.doing: dict[int, str] = {}
        self.responses: dict[int, int] = {}

    def finish(self, episode: int) -> None:
        """Let an episode finish its reset, response or step."""
        if self.doing[episode] == "generate":
            self.doing[episode] = "wait to step"
            self.responses[episode] += 1
            self.release(self.rule.generated(self.leases[episode]))
        else:
            self.doing[episode] = "wait to generate"
            self.release(self.rule.stepped(self.leases[episode]))

    def release(self, released: set[int]) -> None:
        for episode in released:
            self.doing[episode] = {"wait to step": "step", "wait to generate": "generate"}[self.doing[episode]]

    def enter(self, new: Lease) -> None:
        episode = new.lease_id
        self.rule.enter(new)
        self.leases[episode], self.doing[episode], self.responses[episode] = new, "reset", 0

    def leave(self, episode: int) -> None:
        del self.doing[episode], self.responses[episode]
        self.release(self.rule.leave(self.leases.pop(episode)))

    def active(self) -> list[int]:
        return [episode for episode, what in self.doing.items() if not what.startswith("wait")]


@given(st.data())
def test_lock_step_never_deadlocks_and_never_steps_while_an_alive_episode_generates(data: st.DataObject) -> None:
    crowd = Crowd(LockStep())
    for number in range(data.draw(st.integers(1, 60))):
        alive = list(crowd.doing)
        event = data.draw(st.sampled_from(["finish"] * 4 + ["enter", "leave"] if alive else ["enter"]))
        if event == "enter":
            crowd.enter(lease(number))
        elif event == "leave":
            crowd.leave(data.draw(st.sampled_from(alive)))
        else:
            crowd.finish(data.draw(st.sampled_from(crowd.active())))
        assert crowd.active() or not crowd.doing, "someone alive can always go on"
        assert not {"generate", "step"} <= set(crowd.doing.values())
        assert not ("step" in crowd.doing.values() and "wait to step" in crowd.doing.values())


@given(st.data())
def test_a_group_barrier_never_deadlocks_and_never_steps_ahead_of_a_member(data: st.DataObject) -> None:
    groups: dict[int, tuple[Split, int]] = {}
    crowd = Crowd(GroupBarrier())
    for number in range(data.draw(st.integers(1, 60))):
        alive = list(crowd.doing)
        event = data.draw(st.sampled_from(["finish"] * 4 + ["enter", "leave"] if alive else ["enter"]))
        if event == "enter":
            split, group = groups[number] = data.draw(st.sampled_from([("train", 0), ("train", 1), ("eval", 0)]))
            crowd.enter(lease(number, group, split))
        elif event == "leave":
            crowd.leave(data.draw(st.sampled_from(alive)))
        else:
            before = dict(crowd.doing)
            crowd.finish(data.draw(st.sampled_from(crowd.active())))
            for one, what in crowd.doing.items():
                if what == "step" and before[one] != "step":
                    members = [other for other in crowd.doing if groups[other] == groups[one]]
                    assert crowd.responses[one] <= min(crowd.responses[other] for other in members)
        for one, what in crowd.doing.items():
            members = [other for other in crowd.doing if groups[other] == groups[one]]
            if what == "wait to step":
                assert crowd.responses[one] > min(crowd.responses[other] for other in members)
        assert crowd.active() or not crowd.doing, "someone alive can always go on"


async def live(room: Phases, me: Lease, delays: list[tuple[float, float]], log: list[tuple[str, float, float]]) -> None:
    """Play an episode that only sleeps: for each turn, seconds to generate and to step. It ends in a task group."""
    room.enter(me)
    try:
        async with anyio.create_task_group():
            for generate_s, step_s in delays:
                await room.stepped(me)
                start = anyio.current_time()
                await anyio.sleep(generate_s)
                log.append(("generate", start, anyio.current_time()))
                await room.generated(me)
                start = anyio.current_time()
                await anyio.sleep(step_s)
                log.append(("step", start, anyio.current_time()))
    finally:
        room.leave(me)


seconds = st.integers(0, 5).map(float)
episodes = st.lists(
    st.tuples(
        seconds, st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4), st.none() | st.just(4.0) | seconds
    ),
    min_size=1,
    max_size=6,
)
"""Plans of several episodes: for each, when it enters, how long its turns take, and when it is cancelled."""


def play(
    room: Phases, plan: list[tuple[float, list[tuple[float, float]], float | None]]
) -> list[tuple[str, float, float]]:
    """Play episodes by a plan, and return a log of (event, start, end) triples, with times of the virtual clock.

    Each entry of `plan` has the time at which an episode enters, the seconds of its responses and steps, and the
    seconds after which it is cancelled (None: never).
    """
    log: list[tuple[str, float, float]] = []

    async def one(number: int, enter: float, delays: list[tuple[float, float]], cancelled: float | None) -> None:
        await anyio.sleep(enter)
        with anyio.move_on_after(cancelled if cancelled is not None else 1e6):
            await live(room, lease(number, number % 2), delays, log)

    async def main() -> None:
        with anyio.fail_after(1e5):
            async with anyio.create_task_group() as group:
                for number, (enter, delays, cancelled) in enumerate(plan):
                    group.start_soon(one, number, enter, delays, cancelled)

    run_virtual(main)
    return log


@given(episodes)
def test_episodes_in_lock_step_all_end_and_their_phases_do_not_overlap(
    plan: list[tuple[float, list[tuple[float, float]], float | None]],
) -> None:
    log = play(Phases(LockStep()), plan)
    for what, start, stop in log:
        for other, begin, end in log:
            assert what == other or stop <= begin or end <= start


@given(episodes)
def test_episodes_behind_a_group_barrier_all_end(
    plan: list[tuple[float, list[tuple[float, float]], float | None]],
) -> None:
    log = play(Phases(GroupBarrier()), plan)
    turns = sum(len(delays) for _, delays, cancelled in plan if cancelled is None)
    assert len([what for what, _, _ in log if what == "step"]) >= turns


def test_in_lock_step_a_turn_takes_as_long_as_its_slowest_response_and_step() -> None:
    plan = [(0.0, [(1.0, 4.0), (3.0, 1.0)], None), (0.0, [(2.0, 1.0), (1.0, 5.0)], None)]
    log = play(Phases(LockStep()), plan)
    assert max(stop for _, _, stop in log) == (2 + 4) + (3 + 5)
    free = play(Phases(), plan)
    assert max(stop for _, _, stop in free) == 9


def test_an_episode_that_enters_while_others_step_waits_for_the_next_phase_of_generation() -> None:
    log = play(Phases(LockStep()), [(0.0, [(1.0, 4.0), (1.0, 1.0)], None), (2.0, [(1.0, 1.0)], None)])
    assert sorted(log) == [
        ("generate", 0.0, 1.0),
        ("generate", 5.0, 6.0),
        ("generate", 5.0, 6.0),
        ("step", 1.0, 5.0),
        ("step", 6.0, 7.0),
        ("step", 6.0, 7.0),
    ]


def test_an_environment_that_resets_while_others_step_does_not_keep_them_from_generating() -> None:
    rule = LockStep()
    rule.enter(lease(1))
    rule.stepped(lease(1))
    assert rule.generated(lease(1)) == {1}
    rule.enter(lease(2))
    assert rule.stepped(lease(1)) == {1}
    assert rule.generated(lease(1)) == set(), "it waits for the response of the one that has reset meanwhile"
    assert rule.stepped(lease(2)) == {2}
    assert rule.generated(lease(2)) == {1, 2}


def test_an_episode_cancelled_while_others_wait_for_it_releases_them() -> None:
    log = play(Phases(LockStep()), [(0.0, [(1.0, 1.0)], None), (0.0, [(100.0, 1.0)], 3.0)])
    assert log == [("generate", 0.0, 1.0), ("step", 3.0, 4.0)]


@pytest.mark.parametrize("make_rule", [LockStep, GroupBarrier])
def test_an_episode_that_was_cancelled_while_it_waited_is_released_before_it_has_left(
    make_rule: Callable[[], PhaseRule],
) -> None:
    async def main() -> None:
        room, cancelled, other = Phases(make_rule()), lease(1), lease(2)
        other_left = anyio.Event()

        async def wait() -> None:
            """Wait at the barrier, and leave only after the other episode has left."""
            try:
                await room.generated(cancelled)
            finally:
                with anyio.CancelScope(shield=True):
                    await other_left.wait()
                room.leave(cancelled)

        room.enter(cancelled)
        room.enter(other)
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            room.leave(other)
            other_left.set()

    run_virtual(main)


def test_the_responses_of_a_group_come_home_together_and_other_groups_do_not_wait() -> None:
    plan = [(0.0, [(duration, 1.0)], None) for duration in (1.0, 2.0, 5.0, 3.0)]
    log = play(Phases(GroupBarrier()), plan)
    assert sorted(start for what, start, _ in log if what == "step") == [3.0, 3.0, 5.0, 5.0]
