"""The waits of a run: for engines that start late, for silent nodes, and for leases that are not ended.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import pytest

from flash.config import waits
from flash.config.tree import Config, DeadlinesConfig
from flash.errors import DeadlineError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.samples.journal import NoJournal
from flash.types import Canary, Lease, Published
from tests.hub.test_hub import Driver, make_config

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


def with_deadlines(config: Config, **seconds: float) -> Config:
    """Return the configuration with these `[deadlines]`, and the default for all others."""
    return msgspec.structs.replace(config, deadlines=DeadlinesConfig(**seconds))


def version(number: int) -> p.PublishRequest:
    """Return the request with which rank 0 publishes a version."""
    return p.PublishRequest(Published(number, "tcp", b"", Canary([1, 2], [-1.0])))


class Run(Driver):
    """A running hub, and the requests to it, with the time at which each was answered."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ended: dict[str, float] = {}
        """Times of events, by a name that the test gives them."""

    async def watched(self, *acts: Callable[[], Awaitable[Any]]) -> DeadlineError:
        """Return the error that ends the run while these functions run."""

        async def act(each: Callable[[], Awaitable[Any]]) -> None:
            """Run one function. The error of the run also ends its requests, and is not an error of the test."""
            try:
                await each()
            except DeadlineError:
                await anyio.sleep_forever()

        errors: list[DeadlineError] = []
        async with anyio.create_task_group() as group:
            for each in acts:
                group.start_soon(act, each)
            try:
                await self.hub.run()
            except DeadlineError as error:
                errors.append(error)
            group.cancel_scope.cancel()
        return errors[0]

    async def report(self, node: int, *versions: int) -> None:
        """Report the living engines of a node, by their versions; -1 for an engine that has none yet."""
        statuses = [p.EngineStatus(10 * node + at, number, 0.0, 1.0, 0.0) for at, number in enumerate(versions)]
        await self.hub.handle(p.EngineReport(node, next(self.numbers), statuses, []))

    async def ask(self) -> None:
        """Wait for the first batch, as living trainer ranks do after they have published."""
        await self.hub.handle(p.BatchRequest(0, 0, []))

    async def talk(self, node: int) -> None:
        """Ask for cancels all the time, as a living node does."""
        while True:
            await self.cancels(node)


async def test_engines_have_their_own_time_to_start_before_a_batch_is_waited_for() -> None:
    run = Run(with_deadlines(make_config(), engine_start=900, step=100))

    async def slow_start() -> None:
        await run.hub.handle(version(0))
        await anyio.sleep(800)
        await run.report(0, 0)
        run.ended["started"] = anyio.current_time()

    begun = anyio.current_time()
    error = await run.watched(slow_start, run.ask)
    # The engine starts after 800 s. Then the batch may take 100 s.
    assert anyio.current_time() - begun == pytest.approx(900)
    assert "a batch for step 0 (0 of 2 groups are complete)" in str(error)


async def test_while_engines_load_that_is_what_is_waited_for() -> None:
    config = with_deadlines(make_config(), engine_start=500, step=100)
    run = Run(config)
    begun = anyio.current_time()
    error = await run.watched(lambda: run.hub.handle(version(0)))
    assert anyio.current_time() - begun == pytest.approx(waits.first_version_s(config))
    assert "for an engine to start and to load its first version; look at vLLM's output" in str(error)


async def test_an_engine_that_does_not_load_a_version_is_named_with_its_node() -> None:
    config = with_deadlines(make_config(), swap=30)
    run = Run(config)

    async def publish() -> None:
        await run.hub.handle(version(0))
        await run.report(0, 0)
        await run.report(1, 0, 0)
        await run.hub.handle(version(1))
        await run.report(0, 1)
        await run.report(1, 1, 0)
        await run.hub.handle(version(2))

    error = await run.watched(publish, lambda: run.talk(0), lambda: run.talk(1))
    assert "for engine 11 of node 1 (it has version 0) to load version" in str(error)


@pytest.mark.parametrize(("swap", "drained"), [("drain", 1800), ("abort", 300), ("recompute", 0)])
async def test_a_publication_outlasts_what_a_swap_may_take(swap: str, drained: float) -> None:
    config = make_config(swap=swap)
    assert waits.new_version_s(config) > config.deadlines.swap + drained
    assert waits.taken_s(config) > waits.first_version_s(config) > waits.new_version_s(config)
    assert waits.batch_s(config) > waits.first_version_s(config) + config.deadlines.step
    back = waits.engine_return_s(config)
    assert back > config.cluster.max_restarts * (config.deadlines.engine_start + waits.new_version_s(config))
    assert waits.batch_s(config) > back + config.deadlines.step


async def test_a_long_poll_is_answered_well_before_the_node_gives_up() -> None:
    driver = Driver(with_deadlines(make_config(), request=9))
    begun = anyio.current_time()
    assert await driver.cancels(0) == []
    # A long poll ends after a third of the time in which the node gives up.
    assert anyio.current_time() - begun == pytest.approx(3)


async def test_a_version_that_a_late_engine_is_loading_is_kept_for_it() -> None:
    driver = Driver(make_config())
    await driver.begin(0)
    reply = await driver.hub.handle(p.VersionRequest(1, after=-1))
    assert reply.published is not None
    published = anyio.Event()

    async def publish() -> None:
        await driver.hub.handle(version(1))
        published.set()

    async with anyio.create_task_group() as group:
        group.start_soon(publish)
        await anyio.sleep(100)
        assert not published.is_set(), "the trainers keep two versions, and this node still loads the first"
        await driver.hub.handle(p.EngineReport(1, 1, [p.EngineStatus(1, 0, 0.0, 1.0, 0.0)], []))


async def test_a_version_is_kept_for_an_engine_that_came_back_and_not_for_one_that_is_dead() -> None:
    run = Run(make_config())
    await run.begin(0, 1)
    await run.report(1)
    with anyio.fail_after(1):
        await run.hub.handle(version(0))
    await run.report(1, -1)
    reply = await run.hub.handle(p.VersionRequest(1, after=-1))
    assert reply.published is not None
    published = anyio.Event()

    async def publish() -> None:
        await run.hub.handle(version(1))
        published.set()

    async with anyio.create_task_group() as group:
        group.start_soon(publish)
        await anyio.sleep(100)
        assert not published.is_set(), "the trainers keep two versions, and this engine still loads the first"
        await run.report(1, 0)


async def test_while_no_engine_is_left_and_nodes_start_others_that_is_what_is_waited_for() -> None:
    config = with_deadlines(make_config(), engine_start=200, step=100)
    run = Run(config)

    async def outages() -> None:
        await run.hub.handle(version(0))
        await run.report(0, 0)
        await anyio.sleep(90)
        await run.report(0)
        await anyio.sleep(waits.engine_return_s(config))
        await run.report(0, 0)
        await anyio.sleep(90)
        await run.report(0)
        run.ended["died"] = anyio.current_time()

    error = await run.watched(outages, lambda: run.talk(0), run.ask)
    assert "for an engine to come back; look at vLLM's output" in str(error)
    given = waits.engine_return_s(config) + config.deadlines.request
    assert anyio.current_time() == pytest.approx(run.ended["died"] + given)


async def test_first_engines_that_are_killed_while_they_start_are_waited_for_as_others_that_come_back() -> None:
    config = with_deadlines(make_config(), engine_start=200, step=100)
    run = Run(config)

    async def outage() -> None:
        await run.hub.handle(version(0))
        await run.report(0)
        run.ended["died"] = anyio.current_time()

    error = await run.watched(outage, lambda: run.talk(0))
    assert "for an engine to come back; look at vLLM's output" in str(error)
    given = waits.engine_return_s(config) + config.deadlines.request
    assert anyio.current_time() == pytest.approx(run.ended["died"] + given)


async def test_a_late_node_that_is_lost_keeps_nobody_waiting() -> None:
    driver = Driver(make_config())
    await driver.begin(0)
    await driver.hub.handle(p.VersionRequest(1, after=-1))
    driver.hub.peer_lost("node-1")
    with anyio.fail_after(1):
        await driver.hub.handle(version(1))


async def test_the_work_of_a_silent_node_goes_to_the_others_with_a_word() -> None:
    run = Run(with_deadlines(make_config(), step=200, request=60))

    async def scenario() -> None:
        await run.begin(0, 1)
        leases = await run.lease(1, 4)
        # Node 1 has its last reply now, and sends no further request.
        await run.cancels(1)
        await anyio.sleep(55)
        assert run.observer.notes == []
        await anyio.sleep(10)
        again: list[Lease] = await run.lease(0, 4)
        assert {lease.task.task_id for lease in again} == {lease.task.task_id for lease in leases}
        await run.bring(1, *leases)  # Node 1 goes on after all. Its results are late and must not count twice.
        await run.bring(0, *again)
        run.hub.samples.check()
        run.ended["all"] = anyio.current_time()

    await run.watched(scenario, lambda: run.talk(0))
    assert "all" in run.ended
    run.hub.peer_lost("node-1")
    (note,) = run.observer.notes
    assert "node 1 has been silent for 60 s" in note
    assert "its event loop is blocked" in note


async def test_a_silent_node_that_is_gone_then_is_told_once_and_one_that_speaks_again_anew() -> None:
    run = Run(with_deadlines(make_config(), step=500, request=60))

    async def scenario() -> None:
        for node in (1, 2):
            await run.begin(node)
            await run.cancels(node)
        # Both nodes are silent by now. Only node 2 sends requests again before its connection ends.
        await anyio.sleep(70)
        await run.cancels(2)
        await run.report(2, 0)
        run.hub.peer_lost("node-1")
        run.hub.peer_lost("node-2")

    await run.watched(scenario, lambda: run.talk(0))
    silent = [note for note in run.observer.notes if "has been silent" in note]
    gone = [note for note in run.observer.notes if "is gone" in note]
    assert [note.partition(" has")[0] for note in silent] == ["node 1", "node 2"]
    assert [note.partition(" is")[0] for note in gone] == ["node 2"]


async def test_when_the_hubs_own_node_falls_silent_and_no_other_has_engines_the_run_ends_with_its_name() -> None:
    run = Run(make_config())

    async def scenario() -> None:
        await run.begin(0)
        await run.cancels(0)

    begun = anyio.current_time()
    error = await run.watched(scenario)
    assert anyio.current_time() - begun < 100
    assert "node 0 to ask for anything; look at the output of node 0: its event loop is blocked" in str(error)


async def test_when_the_last_node_with_engines_falls_silent_and_may_go_the_run_waits_for_another() -> None:
    run = Run(with_deadlines(make_config(), step=500, request=60))

    async def scenario() -> None:
        await run.begin(1)
        await run.cancels(1)

    begun = anyio.current_time()
    error = await run.watched(scenario, run.ask)
    assert anyio.current_time() - begun == 500
    assert "no node has an engine" in str(error)
    (note,) = run.observer.notes
    assert "node 1 has been silent for 60 s, and no other node has engines; see the output of node 1" in note


@pytest.mark.slow
async def test_a_lease_that_no_node_ends_is_given_out_again() -> None:
    config = with_deadlines(make_config(retries=1), episode=100, request=10, close=5, step=100_000)
    run = Run(config)

    async def scenario() -> None:
        await run.begin(0)
        (lost, *_) = leases = await run.lease(0, 4)
        await run.bring(0, *leases[1:])
        await anyio.sleep(waits.lease_s(config) - 1)
        assert not run.observer.notes
        await anyio.sleep(20)
        again = await run.lease(0, 4)
        assert lost.task.task_id in [lease.task.task_id for lease in again]
        run.ended["all"] = anyio.current_time()

    await run.watched(scenario, lambda: run.talk(0), run.ask)
    assert "all" in run.ended
    assert "node 0 did not end lease" in run.observer.notes[0]


async def test_a_finished_run_that_waits_for_engines_heeds_an_interrupt() -> None:
    config = make_config()
    driver = Driver(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=1)))
    await driver.begin(0)
    await driver.bring(0, *await driver.lease(0, 4))
    await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {}))
    await driver.hub.handle(version(1))
    first = await driver.hub.handle(p.BatchRequest(0, 1, []))
    ends: list[str] = []

    async def watch() -> None:
        ends.append((await driver.hub.run()).reason)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        group.start_soon(driver.hub.handle, p.Goodbye(0, []))
        await anyio.sleep(5)
        assert ends == []
        driver.hub.interrupt()
        assert await driver.hub.handle(p.BatchRequest(0, 1, [])) == first, "all ranks export, or none"
        await anyio.sleep(0.1)
        assert ends == ["interrupted"]


async def test_a_last_evaluation_that_takes_too_long_ends_with_its_name() -> None:
    config = with_deadlines(make_config(), step=90)
    run = Run(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=1)))

    async def scenario() -> None:
        await run.begin(0)
        await run.bring(0, *await run.lease(0, 4))
        await run.hub.handle(p.BatchRequest(0, 0, []))
        await run.hub.handle(p.Commit(0, {}))
        await run.hub.handle(version(1))
        await run.hub.handle(p.BatchRequest(0, 1, []))
        await run.hub.handle(p.Goodbye(0, []))

    error = await run.watched(scenario, lambda: run.talk(0))
    assert "waited 90 s for the last evaluation to end (0 of 1 answers); look at the engines" in str(error)


async def ended(run: Run, *acts: Callable[[], Awaitable[Any]]) -> RunEnd:
    """Return the end of the run while these functions run."""
    async with anyio.create_task_group() as group:
        for act in acts:
            group.start_soon(act)
        end = await run.hub.run()
        group.cancel_scope.cancel()
        return end
    raise AssertionError("cancelled from outside")


async def test_an_interrupted_step_that_outlasts_its_deadline_ends_the_run_and_is_named() -> None:
    run = Run(with_deadlines(make_config(), shutdown=40))
    said: list[str] = []

    async def interrupted() -> None:
        await run.begin(0)
        await run.bring(0, *await run.lease(0, 4))
        await run.ask()
        await anyio.sleep(100)
        said.extend([run.hub.interrupt(), run.hub.interrupt()])

    begun = anyio.current_time()
    end = await ended(run, interrupted)
    assert said == ["finishing step 0 and writing a checkpoint"] * 2
    assert (end.reason, end.version, end.unfinished) == ("interrupted", 0, said[0])
    # The interrupt came after 100 s, and the end of the run may take 40 s.
    assert anyio.current_time() - begun == pytest.approx(140)


async def test_a_step_that_ends_after_an_interrupt_gives_the_checkpoint_no_more_time() -> None:
    run = Run(with_deadlines(make_config(), shutdown=40))

    async def interrupted() -> None:
        await run.begin(0)
        await run.bring(0, *await run.lease(0, 4))
        await run.ask()
        run.hub.interrupt()
        await anyio.sleep(30)
        await run.hub.handle(p.Commit(0, {}))

    begun = anyio.current_time()
    end = await ended(run, interrupted)
    assert (end.version, end.unfinished) == (1, "writing a checkpoint of version 1")
    assert anyio.current_time() - begun == pytest.approx(40)


async def test_a_run_that_ends_in_time_after_an_interrupt_leaves_nothing_undone() -> None:
    run = Run(make_config())

    async def interrupted() -> None:
        await run.begin(0)
        assert run.hub.interrupt() == "writing a checkpoint of version 0"
        await run.hub.handle(p.Goodbye(0, []))

    end = await ended(run, interrupted)
    assert (end.reason, end.unfinished) == ("interrupted", "")
    assert run.hub.interrupt() == ""


async def test_an_interrupt_while_the_ranks_start_promises_no_checkpoint() -> None:
    assert Run(make_config()).hub.interrupt() == "ending its processes"


async def test_an_interrupt_promises_no_checkpoint_that_is_written_already() -> None:
    run = Run(make_config())
    await run.begin(0)
    await run.hub.handle(p.SnapshotRequest())
    assert run.hub.stages.last_work == "writing a checkpoint of version 0", "the ranks have not written their part yet"
    async with anyio.create_task_group() as group:
        group.start_soon(run.ask)
        await anyio.wait_all_tasks_blocked()
        assert run.hub.interrupt() == "ending its processes"
    assert run.hub.interrupt() == "ending its processes"


class SlowJournal(NoJournal):
    """A journal whose disk takes 10 s."""

    async def written(self) -> None:
        """Wait for the disk."""
        await anyio.sleep(10)


async def test_an_interrupt_while_a_batch_is_formed_promises_the_step() -> None:
    driver = Driver(make_config(), journal=SlowJournal())
    await driver.begin(0)
    await driver.hub.handle(p.SnapshotRequest())
    await driver.bring(0, *await driver.lease(0, 4))
    async with anyio.create_task_group() as group:
        group.start_soon(driver.hub.handle, p.BatchRequest(0, 0, []))
        await anyio.wait_all_tasks_blocked()
        assert driver.hub.interrupt() == "finishing step 0 and writing a checkpoint"


async def test_ranks_that_have_trained_since_their_checkpoint_write_another_one() -> None:
    run = Run(make_config())
    await run.begin(0)
    await run.hub.handle(p.SnapshotRequest())
    await run.bring(0, *await run.lease(0, 4))
    await run.ask()
    await run.hub.handle(p.Commit(0, {}))
    assert run.hub.interrupt() == "writing a checkpoint of version 1"


@pytest.mark.parametrize("saved", [False, True])
async def test_an_interrupt_at_the_end_of_a_run_promises_what_the_ranks_still_do(saved: bool) -> None:
    config = make_config()
    run = Run(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=1)))
    await run.begin(0)
    await run.bring(0, *await run.lease(0, 4))
    await run.ask()
    await run.hub.handle(p.Commit(0, {}))
    await run.hub.handle(version(1))
    if not saved:
        await run.hub.handle(p.SnapshotRequest())
    await run.hub.handle(p.BatchRequest(0, 1, []))
    async with anyio.create_task_group() as group:
        if saved:
            group.start_soon(run.hub.handle, p.Goodbye(0, []))
            await anyio.wait_all_tasks_blocked()
        assert run.hub.interrupt() == ("ending its processes" if saved else "exporting the model")
