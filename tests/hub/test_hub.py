"""The hub's protocol, as nodes and a trainer rank use it, on the virtual clock.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import anyio
import msgspec
import pytest

from flash.config.tree import Config
from flash.config.waits import LONG_POLL_S
from flash.errors import BreakerError, ContractError
from flash.hub import protocol as p
from flash.hub.context import SliceLimits
from flash.hub.hub import DEFAULT_LIMITS, Hub, InProcessCaller
from flash.hub.protocol import fetch_shard
from flash.hub.recovery import HubState, Persistence, RecoveredState
from flash.hub.shares import KEPT_S
from flash.observe.observer import MemoryObserver
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.rules import ONE_KIND
from flash.types import Canary, Failure, Lease, Outcome, Published
from tests.metrics_page import unlisted
from tests.samples.cases import KeptStates, trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


def make_config(**rollout: Any) -> Config:
    """Return a synchronous run of 4 steps of 2 groups of 2 samples. `rollout` replaces settings of `[rollout]`."""
    base = {
        "run": {"name": "test", "steps": 4},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "rollout": {"group_size": 2, "retries": 0} | rollout,
        "train": {"batch_size": 4, "async_ratio": 0.0},
        "eval": {"every": 0, "problems": 1},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(base, Config)


class Driver:
    """Sends the requests of all nodes and of the only trainer rank to a hub of its own.

    Args:
        config: the configuration of the run.
        kind_of: returns the kind of the problem with a seed.
        limits: limits on the work that the hub does at once.
        journal: the journal of the hub.
        more: further arguments of `Hub`.
    """

    def __init__(
        self,
        config: Config,
        kind_of: Callable[[int], str] = lambda seed: "",
        limits: SliceLimits = DEFAULT_LIMITS,
        journal: Journal = NO_JOURNAL,
        **more: Any,
    ) -> None:
        self.observer = MemoryObserver()
        self.numbers = count(1)
        """Numbers of the reports on engines, of all nodes together."""
        self.kept = KeptStates()
        """States that the hub has written into checkpoints."""
        self.hub = Hub(
            config,
            self.observer,
            now=anyio.current_time,
            problems=ONE_KIND._replace(kind_of=kind_of),
            persistence=Persistence(self.kept, journal),
            limits=limits,
            **more,
        )

    async def begin(self, *nodes: int) -> None:
        """Publish version 0, let nodes load it, and finish the first evaluation."""
        published = Published(0, "tcp", b"", Canary([1, 2], [-1.0]))
        await self.hub.handle(p.PublishRequest(published))
        for node in nodes:
            status = p.EngineStatus(index=node, version=0, idle_s=0.0, lifetime_s=1.0, canary_error=0.0)
            await self.hub.handle(p.EngineReport(node, next(self.numbers), [status], []))
        for lease in await self.lease(nodes[0], 1):
            await self.bring(nodes[0], lease)

    async def lease(self, node: int, capacity: int) -> list[Lease]:
        """Ask for leases for a node. Returns an empty list if there is none within the long poll."""
        reply = await self.hub.handle(p.LeaseRequest(node, capacity))
        return reply.leases

    async def bring(self, node: int, *leases: Lease) -> None:
        """Deliver a finished sample for each lease of a node."""
        results = [p.EndedLease(lease.lease_id, trajectory(lease.task, lease.min_version)) for lease in leases]
        await self.hub.handle(p.DeliverRequest(node, results, 0))

    async def fail(self, node: int, *leases: Lease) -> None:
        """Deliver a failure of the environment for each lease of a node."""
        results = [p.EndedLease(lease.lease_id, Failure(lease.task, Outcome.ENV_ERROR, "boom", 0)) for lease in leases]
        await self.hub.handle(p.DeliverRequest(node, results, 0))

    async def cancels(self, node: int) -> list[int]:
        """Wait for leases that a node has to cancel, for one long poll. Returns their numbers."""
        reply = await self.hub.handle(p.CancelRequest(node))
        return reply.lease_ids


async def all_leases(driver: Driver, node: int) -> list[Lease]:
    """Lease all tasks that a node can get."""
    held: list[Lease] = []
    while more := await driver.lease(node, 64):
        held += more
    return held


async def took(call: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
    """Return the result of a call, and the seconds that it took."""
    start = anyio.current_time()
    result = await call()
    return result, anyio.current_time() - start


async def test_the_losers_of_a_group_are_cancelled_at_once_on_the_node_that_runs_them() -> None:
    # Each group has a third member, which it does not need.
    driver = Driver(make_config(extra_per_group=1))
    await driver.begin(0, 1)
    first, second = await driver.lease(0, 2)
    (third,) = await driver.lease(1, 1)
    told: list[tuple[list[int], float]] = []

    async def listen() -> None:
        told.append(await took(lambda: driver.cancels(1)))

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await anyio.sleep(3)
        await driver.bring(0, first, second)
    assert told == [([third.lease_id], 3.0)]


async def test_nothing_to_cancel_is_answered_empty_after_the_long_poll() -> None:
    driver = Driver(make_config())
    await driver.begin(0)
    assert await took(lambda: driver.cancels(0)) == ([], LONG_POLL_S)


async def test_a_loser_that_came_home_first_is_booked_as_waste_and_nothing_else() -> None:
    driver = Driver(make_config(extra_per_group=1))
    await driver.begin(0)
    leases = await driver.lease(0, 3)
    await driver.bring(0, *leases)
    # The third member of the group is not needed. Its sample has 3 tokens.
    assert driver.hub.samples.ledger.discarded_tokens == {Outcome.CANCELLED: 3}
    assert driver.hub.samples.pool.ready_groups == 1
    driver.hub.samples.check()


async def test_the_leases_of_a_lost_node_go_to_another_and_its_cancels_are_forgotten() -> None:
    driver = Driver(make_config(extra_per_group=1))
    await driver.begin(0, 1)
    first, second, third = await driver.lease(0, 3)
    await driver.bring(0, first, second)
    driver.hub.peer_lost("node-0")
    driver.hub.samples.check()
    assert third.task.task_id not in [lease.task.task_id for lease in await driver.lease(1, 8)]
    assert (await driver.cancels(0)) == []


async def test_without_prompt_replication_a_group_goes_to_one_node_as_a_whole() -> None:
    driver = Driver(make_config(barriers=["group"]))
    await driver.begin(0, 1)
    assert [lease.task.task_id for lease in await driver.lease(0, 1)] == [0, 1]
    assert [lease.task.task_id for lease in await driver.lease(1, 1)] == [2, 3]


async def asked(driver: Driver, capacities: dict[int, int], then: Callable[[], Awaitable[Any]]) -> dict[int, int]:
    """Let nodes wait for leases, call `then`, and return how many leases each has got."""
    got: dict[int, int] = {}

    async def ask(node: int) -> None:
        got[node] = len(await driver.lease(node, capacities[node]))

    async with anyio.create_task_group() as tasks:
        for node in capacities:
            tasks.start_soon(ask, node)
        await anyio.wait_all_tasks_blocked()
        await then()
    return got


async def publish(driver: Driver, version: int) -> None:
    """Publish a version, as rank 0 does."""
    await driver.hub.handle(p.PublishRequest(Published(version, "tcp", b"", Canary([1, 2], [-1.0]))))


async def load(driver: Driver, node: int, version: int) -> None:
    """Report that the only engine of a node has this version."""
    status = p.EngineStatus(index=node, version=version, idle_s=0.0, lifetime_s=1.0, canary_error=0.0)
    await driver.hub.handle(p.EngineReport(node, next(driver.numbers), [status], []))


async def trained_one_step(*nodes: int) -> Driver:
    """Return a driver of a run with these nodes that has committed its first step and not published version 1."""
    driver = Driver(make_config())
    await driver.begin(*nodes)
    await driver.bring(0, *await driver.lease(0, 256))
    await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {}))
    return driver


async def test_what_a_version_admits_is_kept_for_the_nodes_that_load_it() -> None:
    driver = await trained_one_step(0, 1, 2)

    async def load_in_turn() -> None:
        """Publish version 1, and let one node after the other load it, one each second."""
        await publish(driver, 1)
        for node in range(3):
            await anyio.sleep(1)
            await load(driver, node, 1)

    before = anyio.current_time()
    # Version 1 admits the 4 samples of step 1.
    assert await asked(driver, {0: 8, 1: 8, 2: 8}, load_in_turn) == {0: 2, 1: 1, 2: 1}
    assert anyio.current_time() - before == 3.0


async def test_a_node_alone_gets_what_was_kept_for_one_that_hangs_without_asking_again() -> None:
    driver = await trained_one_step(0, 1)

    async def load_once() -> None:
        await publish(driver, 1)
        await anyio.sleep(1)
        await load(driver, 0, 1)

    got: list[float] = []

    async def ask() -> None:
        """Ask for leases for node 0, and note the seconds after which each came."""
        while len(got) < 4:
            leases = await driver.lease(0, 8)
            got.extend([anyio.current_time() - begun] * len(leases))

    begun = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        # Node 1 waits for tasks, and never loads version 1.
        tasks.start_soon(driver.lease, 1, 8)
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        await load_once()
    assert got == [1.0, 1.0, KEPT_S, KEPT_S]


async def test_a_quarantine_is_told_to_people() -> None:
    # A quarter of the breaker, one failed task, puts a kind into quarantine.
    driver = Driver(make_config(breaker=4), kind_of=lambda seed: "bad" if seed % 2 else "good")
    await driver.begin(0)
    leases = await driver.lease(0, 4)
    await driver.fail(0, *[lease for lease in leases if lease.task.kind == "bad"][:1])
    assert any("'bad' are in quarantine" in note for note in driver.observer.notes)
    await driver.bring(0, *[lease for lease in leases if lease.task.kind == "good"])
    assert {lease.task.kind for lease in await driver.lease(0, 4)} == {"good"}


async def test_when_nothing_is_left_to_issue_the_run_ends_with_the_reason() -> None:
    driver = Driver(make_config(breaker=4), kind_of=lambda seed: "bad")
    await driver.begin(0)
    leases = await driver.lease(0, 4)
    await driver.fail(0, leases[0])
    with pytest.raises(BreakerError, match=r"every kind of environment keeps failing \(bad\)"):
        await driver.lease(0, 4)


async def test_what_environments_measure_is_averaged_over_each_batch_and_each_evaluation() -> None:
    driver = Driver(make_config())

    def measured(lease: Lease, **metrics: float) -> p.EndedLease:
        """Return a finished sample in which the environment has measured these metrics."""
        made = trajectory(lease.task, 0)
        turns = [msgspec.structs.replace(made.turns[0], metrics=metrics)]
        return p.EndedLease(lease.lease_id, msgspec.structs.replace(made, turns=turns))

    await driver.hub.handle(p.PublishRequest(Published(0, "tcp", b"", Canary([1, 2], [-1.0]))))
    await driver.hub.handle(p.EngineReport(0, 1, [p.EngineStatus(0, 0, 0.0, 1.0, 0.0)], []))
    (held_out,) = await driver.lease(0, 1)
    await driver.hub.handle(p.DeliverRequest(0, [measured(held_out, won=1.0)], 0))
    assert driver.observer.evaluations[0]["env/won"] == 1.0

    one, two, three, four = await driver.lease(0, 4)
    results = [measured(one, won=1.0), measured(two, won=0.0, moves=3.0), measured(three, moves=5.0), measured(four)]
    await driver.hub.handle(p.DeliverRequest(0, results, 0))
    await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {"loss": 0.1}))
    (row,) = driver.observer.steps
    assert {name: row[name] for name in row if name.startswith("env/")} == {"env/moves": 4.0, "env/won": 0.5}
    assert (row["samples"], row["loss"]) == (4, 0.1)
    assert unlisted(row) == []
    assert unlisted(driver.observer.evaluations[0], "evaluation") == []


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_trainer_keeps_the_weights_until_the_last_evaluation_is_over(interrupted: bool) -> None:
    config = make_config()
    driver = Driver(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=1)))
    await driver.begin(0, 1)
    await driver.hub.handle(p.PublishRequest(Published(1, "tcp", b"", Canary([1, 2], [-1.0]))))
    left = anyio.Event()

    async def leave() -> None:
        await driver.hub.handle(p.Goodbye(0, []))
        left.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        for node in (0, 1):
            await load(driver, node, 1)
        (lease,) = await driver.lease(0, 1)
        await anyio.sleep(1)
        assert not left.is_set()
        given = await driver.hub.handle(p.VersionRequest(2, after=-1))
        assert given.published is not None, "the engine of a node that joins now needs the weights"
        if interrupted:
            driver.hub.interrupt()
        else:
            await driver.bring(0, lease)
        with anyio.fail_after(1):
            await left.wait()
    assert (await driver.hub.handle(p.VersionRequest(2, after=-1))).published is None
    assert (await driver.hub.handle(p.LoadFailed(2, given.published.incarnation))).gone, "the engine is not at fault"


async def test_of_a_run_that_goes_on_at_its_end_the_trainer_stays_until_it_is_evaluated() -> None:
    config = make_config()
    former = Driver(config)
    await former.begin(0)
    await former.hub.handle(p.SnapshotRequest())
    state = msgspec.structs.replace(HubState.restore(former.kept.by_version[0], config), version=config.run.steps)
    driver = Driver(config, recovered=RecoveredState(state, {0}))
    version, left = config.run.steps, anyio.Event()
    await driver.hub.handle(p.PublishRequest(Published(version, "tcp", b"", Canary([1, 2], [-1.0]))))

    async def leave() -> None:
        await driver.hub.handle(p.Goodbye(0, []))
        left.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        await driver.hub.handle(report(1, version))
        await anyio.sleep(5)
        assert not left.is_set(), "an engine that comes back could not take the weights of the last evaluation"
        leases = await driver.lease(0, 1)
        assert [lease.task.split for lease in leases] == ["eval"]
        await driver.bring(0, *leases)
        with anyio.fail_after(1):
            await left.wait()


def report(number: int, version: int) -> p.EngineReport:
    """Return report `number` of node 0, whose only engine has this version."""
    return p.EngineReport(0, number, [p.EngineStatus(0, version, 0.0, 1.0, 0.0)], [])


async def test_a_report_that_an_older_one_follows_still_counts() -> None:
    driver = Driver(make_config())
    await driver.begin(0)
    await driver.hub.handle(p.PublishRequest(Published(1, "tcp", b"", Canary([1, 2], [-1.0]))))
    await driver.hub.handle(report(9, version=1))
    await driver.hub.handle(report(8, version=0))
    with anyio.fail_after(1):
        await driver.hub.handle(p.PublishRequest(Published(2, "tcp", b"", Canary([1, 2], [-1.0]))))


async def test_others_are_served_while_a_large_batch_is_formed_and_committed() -> None:
    config = make_config()
    samples = 4096
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch_size=samples))
    driver = Driver(config)
    await driver.begin(0)
    leases: list[Lease] = []
    while len(leases) < samples:
        leases += await driver.lease(0, samples)
    await driver.bring(0, *leases)
    turns: list[int] = []

    async def count_turns(call: Callable[[], Awaitable[Any]]) -> None:
        """Append to `turns` how often another task ran during the call."""
        served = 0
        async with anyio.create_task_group() as group:

            async def serve() -> None:
                nonlocal served
                while True:
                    await anyio.lowlevel.checkpoint()
                    served += 1

            group.start_soon(serve)
            await call()
            group.cancel_scope.cancel()
        turns.append(served)

    await count_turns(lambda: driver.hub.handle(p.BatchRequest(0, 0, [])))
    await count_turns(lambda: driver.hub.handle(p.Commit(0, {})))
    assert min(turns) >= 8, "4096 samples are eight slices or more"
    assert driver.observer.steps[0]["samples"] == samples


async def test_a_shard_in_parts_comes_as_a_whole_and_is_committed_once_all_of_it_is_fetched() -> None:
    # Each sample is a part of its own.
    driver = Driver(make_config(), limits=SliceLimits(part_bytes=1))
    await driver.begin(0)
    leases = await driver.lease(0, 4)
    await driver.bring(0, *leases)
    first = await driver.hub.handle(p.BatchRequest(0, 0, []))
    assert first.shard is not None
    assert (len(first.shard.samples), len(first.shard.batch), first.parts_left) == (1, 4, 3)
    with pytest.raises(ContractError, match="step 0 was committed, but not fetched to its end by rank 0"):
        await driver.hub.handle(p.Commit(0, {}))
    for wrong in (-1, 4):
        with pytest.raises(ContractError, match=f"rank 0 asks for part {wrong} of the 4 of its shard"):
            await driver.hub.handle(p.BatchRequest(0, 0, [], wrong))
    whole = await fetch_shard(InProcessCaller(driver.hub), 0, 0, 1)
    assert whole.shard is not None
    assert {sample.trajectory.task.task_id for sample in whole.shard.samples} == {one.task.task_id for one in leases}
    assert whole.shard.batch == first.shard.batch
    await driver.hub.handle(p.Commit(0, {}))
    driver.hub.samples.check()


@pytest.mark.slow
async def test_a_snapshot_is_of_one_moment_though_results_come_in_while_it_is_encoded() -> None:
    samples = 4096
    config = make_config(group_size=1)
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch_size=samples))
    driver = Driver(config)
    await driver.begin(0)
    leases: list[Lease] = []
    while len(leases) < samples:
        leases += await driver.lease(0, samples)
    await driver.bring(0, *leases[: samples // 2])

    async def store() -> None:
        await driver.hub.handle(p.SnapshotRequest())

    async with anyio.create_task_group() as group:
        group.start_soon(store)
        # The snapshot begins, and the other results come while it is made.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        for lease in leases[samples // 2 :]:
            await driver.bring(0, lease)
            await anyio.lowlevel.checkpoint()
    recovered = RecoveredState(HubState.restore(driver.kept.by_version[0], config))
    again = Hub(config, MemoryObserver(), now=anyio.current_time, recovered=recovered)
    again.samples.check()
    driver.hub.samples.check()
    assert again.samples.pool.ready_groups < driver.hub.samples.pool.ready_groups == samples


async def test_a_node_that_is_lost_is_told_with_what_is_left() -> None:
    driver = Driver(make_config())
    await driver.begin(0, 1, 2)
    driver.hub.peer_lost("node-1")
    (note,) = driver.observer.notes
    assert note.startswith("node 1 is gone, and 1 of 3 engines with it: the other 2 do its work. It joins again by")
    driver.hub.peer_lost("node-0")
    assert len(driver.observer.notes) == 1, "it shares the hub's process, which ends with its error"
    driver.hub.peer_lost("node-2")
    assert "no engine is left" in driver.observer.notes[-1]


async def test_what_a_node_says_of_its_engines_is_told_and_counted_once() -> None:
    driver = Driver(make_config())
    await driver.begin(0)
    dead = p.EngineReport(0, next(driver.numbers), [], [], ["engine 0 is dead"], restarts=1)
    await driver.hub.handle(dead)
    assert driver.observer.notes == ["engine 0 is dead"]
    back = [p.EngineStatus(0, 0, 0.0, 1.0, 0.0)]
    await driver.hub.handle(p.EngineReport(0, next(driver.numbers), back, [], ["engine 0 is back"]))
    assert driver.hub.late_restarts == {"engine_restarts": 1, "trainer_restarts": 0}
    await driver.bring(0, *await driver.lease(0, 4))
    await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {}))
    assert [row["engine_restarts"] for row in driver.observer.steps] == [1]
    await driver.hub.handle(p.EngineReport(0, next(driver.numbers), [], [], ["it was the last one"]))
    driver.hub.peer_lost("node-0")
    assert driver.observer.notes == ["engine 0 is dead", "engine 0 is back", "it was the last one"]


async def test_a_node_without_engines_gets_no_lease_and_the_others_do_its_work() -> None:
    driver = Driver(make_config())
    await driver.begin(0, 1)
    waiting: list[Lease] = []

    async def ask() -> None:
        waiting.extend(await driver.lease(1, 4))

    held = await driver.lease(0, 4)
    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.sleep(1)
        await driver.hub.handle(p.EngineReport(1, next(driver.numbers), [], []))
        await driver.fail(0, *held)
        again = await driver.lease(0, 4)
        assert len(again) == 4
    assert waiting == []
    await driver.hub.handle(p.EngineReport(1, next(driver.numbers), [p.EngineStatus(1, -1, 0.0, 0.0, 0.0)], []))
    assert await driver.lease(1, 4) == []


async def test_a_task_that_has_failed_on_the_only_node_with_engines_does_not_wait_for_another() -> None:
    driver = Driver(make_config(retries=2))
    await driver.begin(0, 1)
    held = await all_leases(driver, 0)
    await driver.hub.handle(p.EngineReport(1, next(driver.numbers), [], []))
    await driver.fail(0, *held)
    again = await all_leases(driver, 0)
    assert {lease.task.task_id for lease in again} == {lease.task.task_id for lease in held}


async def test_a_node_that_leaves_an_interrupted_run_is_no_loss() -> None:
    driver = Driver(make_config())
    await driver.begin(0, 1)
    driver.hub.interrupt()
    driver.hub.peer_lost("node-1")
    assert driver.observer.notes == []


async def test_a_checkpoint_that_the_observer_wants_is_written_after_the_next_step_once() -> None:
    driver = Driver(make_config())
    driver.observer.wish = "checkpoint"
    await driver.begin(0)
    saves: list[bool] = []
    # The observer wants a checkpoint when step 0 is committed, so step 1 is the one that must be saved.
    for step in range(3):
        await driver.bring(0, *await driver.lease(0, 4))
        saves += [(await driver.hub.handle(p.BatchRequest(0, step, []))).must_save]
        await driver.hub.handle(p.Commit(step, {}))
        await publish(driver, step + 1)
        await load(driver, 0, step + 1)
        driver.observer.wish = None
    assert saves == [False, True, False]


async def test_an_observer_that_wants_an_end_ends_the_run_as_an_interrupt_does() -> None:
    driver = Driver(make_config())
    driver.observer.wish = "stop"
    await driver.begin(0)
    await driver.bring(0, *await driver.lease(0, 4))
    await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {}))
    assert driver.hub.progress.stopping == "interrupted"
    await publish(driver, 1)
    assert await driver.hub.handle(p.BatchRequest(0, 1, [])) == p.BatchReply(None, finished=False)


async def test_a_checkpoint_leaves_its_ledger() -> None:
    driver = Driver(make_config())
    await driver.begin(0)
    await driver.lease(0, 2)
    await driver.hub.handle(p.SnapshotRequest())
    (ledger,) = driver.observer.ledgers
    assert ledger["issued"] == ledger["in_flight"] == 2


async def test_what_a_large_node_held_goes_to_another_while_others_are_served() -> None:
    config = make_config()
    driver = Driver(msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch_size=4096)))
    await driver.begin(0, 1, 2)
    lost = [lease for _ in range(4) for lease in await driver.lease(0, 1024)]
    assert len(lost) == 1024
    turns = 0
    again: list[Lease] = []
    async with anyio.create_task_group() as group:
        group.start_soon(driver.hub.run)
        await anyio.lowlevel.checkpoint()
        driver.hub.peer_lost("node-0")
        while driver.hub.samples.backlog:
            turns += 1
            await anyio.lowlevel.checkpoint()
        again += [lease for _ in range(4) for lease in await driver.lease(1, 1024)]
        group.cancel_scope.cancel()
    assert turns > 1
    assert [lease.task for lease in again] == [lease.task for lease in lost]
    driver.hub.samples.check()
