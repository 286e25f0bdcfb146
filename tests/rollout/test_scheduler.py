"""Scheduler between a fake hub and fake episodes, on the virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.hub import protocol as p
from flash.hub.protocol import EndedLease
from flash.rollout.episode.episode import EpisodeProgress
from flash.rollout.scheduler import DELIVERY_BYTES, HubClient, HubLink, Scheduler, Wakeup
from flash.simulate.clock import run_virtual
from flash.transport.frames import ReplyT, Request, check_reply
from flash.types import Failure, Lease, Outcome, Task, Trajectory
from tests.samples.cases import trajectory


def lease(number: int) -> Lease:
    """Return a lease whose number is also the number of its task and group."""
    return Lease(number, Task(number, number, 0, number), 0)


def ended(of: Lease, tokens: int = 1) -> Failure:
    """Return a result of a lease. The scheduler does not look inside."""
    return Failure(of.task, Outcome.ENV_ERROR, "ended", tokens)


class FakeHub:
    """A hub that gives its leases and keeps results. It keeps a request open while it has nothing, as the hub does."""

    def __init__(self, count: int) -> None:
        self.ready = [lease(number) for number in range(count)]
        """Leases that were not given yet."""
        self.more = anyio.Event()
        """Event that is set when leases are added."""
        self.done = True
        """True if there is no more work when all leases are given."""
        self.asked: list[int] = []
        """Number of leases that each request has asked for."""
        self.ended: list[EndedLease] = []
        """All results."""
        self.on_grant: Callable[[], None] = lambda: None
        """Function that is called when leases are given."""

    def client(self) -> HubClient:
        """Return the connection of a node to this hub."""
        return HubClient(HubLink(0, 0, self), None, 60.0)

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Answer a request of the scheduler, as `HubCaller` does."""
        match request:
            case p.LeaseRequest():
                leases = await self.lease(request.capacity)
                return check_reply(request, p.LeaseReply(leases or [], done=leases is None))
            case p.DeliverRequest():
                await self.deliver(request.ended)
                return check_reply(request, p.Ack())
            case _:
                raise AssertionError(f"{request} is not of the scheduler")

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Return at most `capacity` leases. Waits for more; returns None if there are none and `done` is True."""
        assert capacity > 0
        self.asked.append(capacity)
        await anyio.lowlevel.checkpoint()
        while not self.ready:
            if self.done:
                return None
            self.more = anyio.Event()
            await self.more.wait()
        granted, self.ready = self.ready[:capacity], self.ready[capacity:]
        self.on_grant()
        return granted

    def add(self, *numbers: int) -> None:
        """Give more leases, with these numbers."""
        self.ready += [lease(number) for number in numbers]
        self.more.set()

    async def deliver(self, ended: list[EndedLease]) -> None:
        """Take results."""
        self.ended += ended
        await anyio.lowlevel.checkpoint()

    def outcomes(self) -> dict[int, Outcome]:
        """Return the outcome of each lease. Checks that each has one result."""
        assert len({ended.lease_id for ended in self.ended}) == len(self.ended), "one result per lease"
        return {ended.lease_id: ended.result.outcome for ended in self.ended}


class Engine:
    """An engine of slots, one of which an episode holds while it generates."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.wake: Callable[[], None] = lambda: None

    def room(self) -> int:
        """Return the number of free slots."""
        return max(0, self.free)

    async def generate(self, seconds: float) -> None:
        """Hold a slot for some seconds, then wake the scheduler."""
        self.free -= 1
        try:
            await anyio.sleep(seconds)
        finally:
            self.free += 1
            self.wake()


def run(scenario: Callable[[], Awaitable[Any]]) -> None:
    """Run a scenario on the virtual clock."""
    run_virtual(scenario)


def test_at_most_max_concurrent_episodes_are_alive_and_a_freed_place_is_refilled_at_once() -> None:
    async def scenario() -> None:
        hub, alive, most = FakeHub(10), 0, 0

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            await anyio.sleep(1)
            alive -= 1
            return ended(of)

        await Scheduler(hub.client(), episode, Wakeup(), max_concurrent=3).run()
        assert most == 3
        assert anyio.current_time() == 4.0, "ten episodes of a second, three at a time"
        assert len(hub.outcomes()) == 10

    run(scenario)


def test_places_freed_while_a_request_is_held_back_are_asked_for_as_soon_as_it_is_answered() -> None:
    async def scenario() -> None:
        hub = FakeHub(32)
        hub.done = False
        started: dict[int, float] = {}

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            started[of.lease_id] = anyio.current_time()
            await anyio.sleep(1 if of.lease_id == 0 else 2 if of.lease_id < 32 else 100)
            return ended(of)

        async with anyio.create_task_group() as group:
            group.start_soon(Scheduler(hub.client(), episode, Wakeup(), max_concurrent=32).run)
            # Lease 0 ends at 1 s, so one lease is asked for; the hub holds this request. At 2 s the other 31 end.
            await anyio.sleep(5)
            assert hub.asked == [32, 1]
            hub.add(*range(32, 64))
            await anyio.sleep(0.1)
            assert hub.asked == [32, 1, 31]
            assert {started[number] for number in range(32, 64)} == {5.0}
            group.cancel_scope.cancel()

    run(scenario)


def test_episodes_that_wait_in_their_environment_leave_their_engine_slots_to_others() -> None:
    async def scenario() -> None:
        hub, engine = FakeHub(12), Engine(2)

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            progress.on_request()
            await engine.generate(1)
            await anyio.sleep(50)
            return ended(of)

        wakeup = Wakeup()
        engine.wake = wakeup.notify
        scheduler = Scheduler(hub.client(), episode, wakeup, room=engine.room)
        await scheduler.run()
        assert anyio.current_time() == 6 + 50, "twelve responses of a second in two slots, then the last steps"

    run(scenario)


def test_an_episode_that_has_not_asked_yet_takes_a_place() -> None:
    async def scenario() -> None:
        hub, engine = FakeHub(12), Engine(2)
        resetting = most = 0

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            nonlocal resetting, most
            resetting += 1
            most = max(most, resetting)
            await anyio.sleep(5)
            resetting -= 1
            progress.on_request()
            await engine.generate(1)
            return ended(of)

        wakeup = Wakeup()
        engine.wake = wakeup.notify
        scheduler = Scheduler(hub.client(), episode, wakeup, room=engine.room)
        await scheduler.run()
        assert most == 2

    run(scenario)


@pytest.mark.parametrize("where", ["not begun", "reset", "generate", "step", "ended"])
def test_a_loser_is_cancelled_wherever_it_is_and_reports_its_tokens(where: str) -> None:
    async def scenario() -> None:
        hub = FakeHub(2)
        at = {"not begun": 0.0, "reset": 0.5, "generate": 1.5, "step": 2.5, "ended": 3.5}[where]
        closed: list[int] = []

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            try:
                await anyio.sleep(1)
                progress.tokens = 7
                await anyio.sleep(1)
                progress.tokens = 9
                await anyio.sleep(1)
                return ended(of, 9)
            finally:
                closed.append(of.lease_id)

        async with anyio.create_task_group() as group:
            scheduler = Scheduler(hub.client(), episode, Wakeup())
            if where == "not begun":

                async def cancel() -> None:
                    scheduler.cancel([1])

                hub.on_grant = lambda: group.start_soon(cancel)
            group.start_soon(scheduler.run)
            if at:
                await anyio.sleep(at)
                scheduler.cancel([1, 77])
        results = {ended.lease_id: ended.result for ended in hub.ended}
        assert hub.outcomes()[0] is Outcome.ENV_ERROR
        if where == "ended":
            assert hub.outcomes()[1] is Outcome.ENV_ERROR
        else:
            loser = results[1]
            assert isinstance(loser, Failure)
            tokens = {"not begun": 0, "reset": 0, "generate": 7, "step": 9}[where]
            assert (loser.outcome, loser.tokens) == (Outcome.CANCELLED, tokens)
        assert closed.count(1) == 1

    run(scenario)


def test_a_result_that_is_ready_when_its_cancel_comes_is_delivered_as_it_is() -> None:
    async def scenario() -> None:
        hub = FakeHub(1)

        async def episode(of: Lease, progress: EpisodeProgress) -> Trajectory | Failure:
            await anyio.sleep(1)
            scheduler.cancel([of.lease_id])
            return ended(of)

        scheduler = Scheduler(hub.client(), episode, Wakeup())
        await scheduler.run()
        assert hub.outcomes() == {0: Outcome.ENV_ERROR}

    run(scenario)


def test_a_cancelled_episodes_place_is_refilled_at_once() -> None:
    async def scenario() -> None:
        hub = FakeHub(3)
        started: list[float] = []

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            started.append(anyio.current_time())
            await anyio.sleep(100)
            return ended(of)

        async with anyio.create_task_group() as group:
            scheduler = Scheduler(hub.client(), episode, Wakeup(), max_concurrent=2)
            group.start_soon(scheduler.run)
            await anyio.sleep(3)
            scheduler.cancel([0])
        assert started == [0.0, 0.0, 3.0]

    run(scenario)


LIVES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=30)
"""Random episodes: seconds of the response, seconds of the step, and the second after which the episode is
cancelled."""


@given(LIVES, st.integers(1, 4))
def test_law_2_every_lease_has_one_result_and_no_slot_is_empty_while_a_lease_waits(
    lives: Sequence[tuple[int, int, int]], slots: int
) -> None:
    async def scenario() -> None:
        hub, engine = FakeHub(len(lives)), Engine(slots)

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            generate_s, step_s, _ = lives[of.lease_id]
            progress.on_request()
            await engine.generate(generate_s)
            await anyio.sleep(step_s)
            return ended(of)

        async def cancel() -> None:
            """Cancel the episodes at their seconds, and check the slots in between."""
            for second in range(13):
                # Everything happens at whole and half seconds.
                await anyio.sleep(0.25)
                assert engine.free == 0 or not hub.ready
                await anyio.sleep(0.25)
                scheduler.cancel(number for number, life in enumerate(lives) if life[2] == second)
                await anyio.sleep(0.25)
                assert engine.free == 0 or not hub.ready
                await anyio.sleep(0.25)

        wakeup = Wakeup()
        engine.wake = wakeup.notify
        scheduler = Scheduler(hub.client(), episode, wakeup, room=engine.room)
        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            await scheduler.run()
        assert set(hub.outcomes()) == set(range(len(lives)))
        assert engine.free == slots

    run(scenario)


class Keeps(FakeHub):
    """A hub that keeps the leases of each delivery. The first delivery takes a while."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.deliveries: list[list[int]] = []

    async def deliver(self, ended: list[EndedLease]) -> None:
        self.deliveries.append([each.lease_id for each in ended])
        await anyio.sleep(1)


async def deliveries_of(tokens: int, count: int) -> list[list[int]]:
    """Return the leases of each delivery, if `count` episodes end at once, each with this number of tokens."""
    hub = Keeps(count)

    async def episode(of: Lease, progress: EpisodeProgress) -> Trajectory | Failure:
        await anyio.sleep(0.1)
        return trajectory(of.task, 0, tokens=tokens)

    await Scheduler(hub.client(), episode, Wakeup(), max_concurrent=64).run()
    return hub.deliveries


def test_long_results_go_in_several_deliveries_and_short_ones_in_one() -> None:
    assert [len(batch) for batch in run_virtual(deliveries_of, 4, 40)] == [40]
    long = run_virtual(deliveries_of, DELIVERY_BYTES // 32, 40)
    assert sorted(lease_id for batch in long for lease_id in batch) == list(range(40))
    assert max(len(batch) for batch in long) == 3
    huge = run_virtual(deliveries_of, DELIVERY_BYTES, 3)
    assert [len(batch) for batch in huge] == [1, 1, 1]


def test_a_cancelled_episode_reports_what_it_had_sampled_and_what_never_arrived() -> None:
    async def scenario() -> list[EndedLease]:
        hub = FakeHub(1)

        async def episode(of: Lease, progress: EpisodeProgress) -> Trajectory | Failure:
            progress.tokens += 8
            try:
                await anyio.sleep_forever()
            finally:
                progress.lost += 5
            raise AssertionError("slept for ever")

        scheduler = Scheduler(hub.client(), episode, Wakeup())
        async with anyio.create_task_group() as group:
            group.start_soon(scheduler.run)
            await anyio.sleep(1)
            scheduler.cancel([0])
        return hub.ended

    (cancelled,) = run_virtual(scenario)
    assert isinstance(cancelled.result, Failure)
    assert cancelled.result.tokens == 13


def test_a_cancel_that_overtakes_its_lease_ends_it_when_it_comes() -> None:
    async def scenario() -> None:
        hub = FakeHub(1)
        hub.done = False

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            await anyio.sleep(1)
            return ended(of)

        scheduler = Scheduler(hub.client(), episode, Wakeup(), max_concurrent=3)
        async with anyio.create_task_group() as group:
            group.start_soon(scheduler.run)
            await anyio.sleep(2)
            scheduler.cancel([0, 2])
            hub.add(1, 2)
            hub.done = True
        # Lease 0 ended before its cancellation. Lease 2 is cancelled when it comes, at 2 s, and lease 1 ends at 3 s.
        assert anyio.current_time() == 3.0
        assert hub.outcomes() == {0: Outcome.ENV_ERROR, 1: Outcome.ENV_ERROR, 2: Outcome.CANCELLED}

    run(scenario)


def test_a_scheduler_that_stops_leasing_asks_no_more_and_hands_back_what_it_is_told_to() -> None:
    async def scenario() -> None:
        hub = FakeHub(3)
        hub.done = False

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            await anyio.sleep([3, 100, 100][of.lease_id])
            return ended(of)

        scheduler = Scheduler(hub.client(), episode, Wakeup())
        async with anyio.create_task_group() as group:
            group.start_soon(scheduler.run)
            await anyio.sleep(1)
            scheduler.stop_leasing()
            await anyio.wait_all_tasks_blocked()
            hub.add(3)
            await anyio.sleep(8)
            scheduler.hand_back()
        # The fourth lease is never asked for. The long episodes are cancelled at 9 s.
        assert anyio.current_time() == 9.0
        assert hub.outcomes() == {0: Outcome.ENV_ERROR, 1: Outcome.CANCELLED, 2: Outcome.CANCELLED}

    run(scenario)


def test_a_scheduler_without_room_ends_when_there_is_no_more_work() -> None:
    async def scenario() -> None:
        hub, engine = FakeHub(4), Engine(2)

        async def episode(of: Lease, progress: EpisodeProgress) -> Failure:
            progress.on_request()
            await engine.generate(1000)
            return ended(of)

        scheduler = Scheduler(hub.client(), episode, Wakeup(), room=engine.room)
        async with anyio.create_task_group() as group:
            group.start_soon(scheduler.run)
            await anyio.sleep(5)
            assert (scheduler.alive, scheduler.free_places()) == (2, 0)
            scheduler.end()
        assert anyio.current_time() == 5
        assert set(hub.outcomes().values()) == {Outcome.CANCELLED}

    run(scenario)
