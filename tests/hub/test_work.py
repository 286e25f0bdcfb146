"""Leases that are granted in slices or outlive their hub, and results that reach the journal.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import msgspec
import pytest

from flash.config import waits
from flash.errors import BreakerError, PeerLostError, ProtocolError
from flash.hub import protocol as p
from flash.hub.context import SliceLimits
from flash.hub.gate import Gate
from flash.hub.hub import Hub
from flash.hub.recovery import HubState, Persistence, RecoveredState
from flash.hub.work import LEASES_AT_ONCE, SLICE
from flash.observe.observer import MemoryObserver
from flash.samples.journal import Committed, MemoryJournal, Replay, Revoked
from flash.samples.store import FILTER_BREAKER
from flash.transport.server import Peer
from flash.types import Failure, Lease, Outcome
from tests.hub.test_hub import Driver, all_leases, load, make_config, publish
from tests.samples.cases import trajectory
from tests.samples.test_replay import replayed

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


@asynccontextmanager
async def burst(nodes: int, capacity: int) -> AsyncGenerator[tuple[Driver, dict[int, int]]]:
    """Let all nodes wait for leases, and make tasks for all of them available at once. Yields after the first slice.

    Also yields the number of leases that each node has got.
    """
    config, got = make_config(), dict[int, int]()
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch_size=nodes * capacity))
    driver = Driver(config)
    await publish(driver, 0)
    for node in range(nodes):
        await load(driver, node, 0)
    (evaluation,) = await driver.lease(0, 1)

    async def ask(node: int) -> None:
        got[node] = len(await driver.lease(node, capacity))

    async with anyio.create_task_group() as tasks:
        for node in range(nodes):
            tasks.start_soon(ask, node)
        await anyio.wait_all_tasks_blocked()
        # No training task is leased before the evaluation of the untrained policy is over.
        assert not driver.hub.samples.leases.out
        await driver.bring(0, evaluation)
        yield driver, got
        tasks.cancel_scope.cancel()


async def test_a_burst_is_granted_in_slices_after_which_each_node_that_was_given_leases_has_its_share() -> None:
    async with burst(nodes=40, capacity=100) as (driver, got):
        work, out = driver.hub.work, driver.hub.samples.leases.out
        slices, before = 1, 0
        while True:
            assert len(out) - before <= SLICE + LEASES_AT_ONCE
            before = len(out)
            await anyio.wait_all_tasks_blocked()
            assert set(got.values()) == {100}
            assert sum(got.values()) == len(out) == before
            if not work.slice_full:
                break
            work.grant_leases()
            slices += 1
    # A slice ends after the first reply with which it has 128 leases: two replies of 100.
    assert (len(out), len(got), slices) == (4_000, 40, 20)


async def test_when_nobody_waits_for_leases_any_more_no_further_slice_is_due() -> None:
    async with burst(nodes=5, capacity=200) as (driver, _):
        assert driver.hub.work.slice_full
        for node in range(5):
            driver.hub.work.node_lost(node)
        assert not driver.hub.work.slice_full


async def test_what_a_lease_that_is_taken_back_withdraws_is_passed_on_at_once() -> None:
    driver = Driver(make_config(breaker=4), kind_of=lambda seed: "bad" if seed % 2 else "good")
    await driver.begin(0, 1)
    first = {lease.task.kind: lease for lease in await driver.lease(0, 3)}["bad"]
    second = {lease.task.kind: lease for lease in await driver.lease(1, 1)}["bad"]
    assert await driver.cancels(1) == []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.hub.work.work_off_backlog)
        await anyio.wait_all_tasks_blocked()
        begun = anyio.current_time()
        driver.hub.work.take_back(0, first, "too old")
        assert await driver.cancels(1) == [second.lease_id]
        assert anyio.current_time() == begun
        assert any("'bad' are in quarantine" in note for note in driver.observer.notes)
        tasks.cancel_scope.cancel()


async def test_an_error_of_postponed_work_ends_the_run_and_not_the_event_that_does_a_slice_of_it() -> None:
    config = make_config(breaker=4, drop_equal_rewards=True, extra_groups=60)
    driver = Driver(config, kind_of=lambda seed: "bad", limits=SliceLimits(members=1))
    await driver.begin(0, 1)
    groups = dict[int, list[Lease]]()
    for lease in await all_leases(driver, 0):
        groups.setdefault(lease.task.group_id, []).append(lease)
    await driver.bring(0, *(leases[0] for leases in groups.values()))
    # The failure of one more task puts the only kind into quarantine. Each group is then complete with one member, and
    # is filtered out, because a single reward differs from none. After `most` such groups the breaker stops the run.
    most = FILTER_BREAKER * 2
    filtered: list[int] = []

    async def lose_a_node_before_the_last_group_that_may_be_filtered() -> None:
        while driver.hub.samples.ledger.filtered < most - 1:
            await anyio.lowlevel.checkpoint()
        driver.hub.peer_lost("node-1")
        filtered.append(driver.hub.samples.ledger.filtered)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose_a_node_before_the_last_group_that_may_be_filtered)
        await driver.fail(0, groups[0][1])
    assert filtered == [most], "the loss of the node has done the slice in which the breaker stops the run"
    with pytest.raises(BreakerError, match=f"{most} groups in a row"):
        await driver.cancels(1)


class NextHub:
    """A hub behind its gate that follows a hub under which nodes 0 and 1 held leases. Node 1 outlives that one."""

    def __init__(self) -> None:
        self.config, self.journal = make_config(), MemoryJournal()

    async def begin(self) -> None:
        """Let the first hub lease tasks to both nodes, take one result, and die. Start the second hub.

        `lost` are the leases of node 0, and `held` are the leases of node 1. The result of the last one was delivered.
        """
        driver = Driver(self.config, journal=self.journal, recovered=RecoveredState(hub_number=1))
        run = await driver.hub.handle(p.RunRequest(p.dialect()))
        await driver.hub.handle(p.JoinRequest(run.digest, 1))
        await driver.begin(0, 1)
        self.lost, self.held = await driver.lease(0, 1), await driver.lease(1, 3)
        assert len(self.held) == 3
        await driver.bring(1, self.held[2])
        self.reopen(2)

    def reopen(self, incarnation: int) -> None:
        """Start hub process number `incarnation` with the state that the journal leads to."""
        replay = Replay(None, 0)
        for event in self.journal.events:
            replay.apply(event)
        buffer = replay.state(0)
        assert buffer is not None
        self.observer = MemoryObserver()
        self.hub = Hub(
            *(self.config, self.observer),
            now=anyio.current_time,
            recovered=RecoveredState(HubState(0, buffer, journal=0), {0}, hub_number=incarnation),
            persistence=Persistence(journal=self.journal),
        )
        self.gate, self.peer = Gate(self.hub, self.config), Peer(1, "guest-7", "127.0.0.1:1")
        self.gate.arrived(self.peer)

    async def join(self) -> None:
        """Let the node that has outlived the first hub join this one, as node 1."""
        run = await self.hub.handle(p.RunRequest(p.dialect()))
        assert (await self.gate.handle(self.peer, p.JoinRequest(run.digest, 1))) == p.JoinReply(1, 1)

    async def claim(self, *leases: Lease) -> list[int]:
        """Present leases to the hub. Returns the numbers of the leases that the node keeps."""
        reply = await self.gate.handle(self.peer, p.ClaimRequest(1, list(leases)))
        assert isinstance(reply, p.ClaimReply)
        return reply.lease_ids

    async def bring(self, lease: Lease) -> None:
        """Deliver a finished sample for a lease of node 1, through the gate."""
        ended = [p.EndedLease(lease.lease_id, trajectory(lease.task, 0))]
        await self.gate.handle(self.peer, p.DeliverRequest(1, ended, 0))


async def test_a_lease_is_claimed_once_and_what_came_home_or_was_never_lent_is_not() -> None:
    hubs = NextHub()
    await hubs.begin()
    await hubs.join()
    first, second, delivered = hubs.held
    strange = msgspec.structs.replace(second, lease_id=second.lease_id + 1000)
    changed = msgspec.structs.replace(second, task=msgspec.structs.replace(second.task, attempt=1))
    assert await hubs.claim(first, delivered, strange, changed, *hubs.lost) == [first.lease_id]
    assert await hubs.claim(first) == [], "two nodes have the same lease"
    done = hubs.hub.samples.ledger.generated_tokens
    await hubs.bring(first)
    assert hubs.hub.samples.ledger.generated_tokens == done + 3
    with pytest.raises(ProtocolError, match=f"does not hold lease {second.lease_id}"):
        await hubs.bring(second)
    hubs.hub.samples.check()


async def test_a_lease_can_be_claimed_from_the_hub_after_the_next() -> None:
    hubs = NextHub()
    await hubs.begin()
    hubs.reopen(3)
    await hubs.join()
    assert await hubs.claim(*hubs.held) == [lease.lease_id for lease in hubs.held[:2]]


async def test_what_nobody_claims_goes_back_after_some_time_and_what_was_at_the_hubs_own_node_at_once() -> None:
    hubs = NextHub()
    await hubs.begin()
    out = hubs.hub.samples.leases.out
    while hubs.hub.buffer.do_slice():
        pass
    assert hubs.lost[0].lease_id not in out
    assert [lease.lease_id in out for lease in hubs.held] == [True, True, False]
    await hubs.join()
    assert await hubs.claim(hubs.held[0]) == [hubs.held[0].lease_id]
    begun = anyio.current_time()
    await hubs.hub.work.expire_claims()
    assert anyio.current_time() - begun == waits.claim_s(hubs.config)
    while hubs.hub.buffer.do_slice():
        pass
    assert [lease.lease_id in out for lease in hubs.held] == [True, False, False]
    assert await hubs.claim(hubs.held[1]) == []
    assert hubs.observer.notes[-1] == "samples that queue again, since their nodes did not come back: 1"
    # What was claimed goes back with the node, as any other lease.
    hubs.gate.left(hubs.peer)
    while hubs.hub.buffer.do_slice():
        pass
    assert hubs.held[0].lease_id not in out
    hubs.hub.samples.check()


async def test_the_first_step_of_the_next_hub_has_lasted_since_the_first_claim() -> None:
    hubs = NextHub()
    await hubs.begin()
    await hubs.join()
    await hubs.claim(*hubs.held[:2])
    await hubs.hub.handle(p.EngineReport(1, 1, [p.EngineStatus(1, 0, 0.0, 1.0, 0.0)], []))
    await anyio.sleep(7)
    reply = await hubs.gate.handle(hubs.peer, p.LeaseRequest(1, 8))
    assert isinstance(reply, p.LeaseReply)
    for lease in (*hubs.held[:2], *reply.leases):
        await hubs.bring(lease)
    await hubs.hub.handle(p.BatchRequest(0, 0, []))
    await hubs.hub.handle(p.Commit(0, {}))
    (row,) = hubs.observer.steps
    assert row["interval_s"] == pytest.approx(7)
    # Three samples of the batch were delivered to this hub, with 3 tokens each.
    assert row["tokens_per_second"] == pytest.approx(9 / 7)


async def test_a_hub_that_ends_with_an_error_leaves_its_nodes_what_they_have() -> None:
    journal = MemoryJournal()
    driver = Driver(make_config(), journal=journal, recovered=RecoveredState(hub_number=1))
    await driver.begin(0, 1)
    assert await driver.lease(1, 3)
    driver.hub.progress.fail(PeerLostError("a trainer rank is gone"))
    driver.hub.peer_lost("node-1")
    assert not any(isinstance(event, Revoked) for event in journal.events)


async def test_no_two_leases_of_a_run_have_the_same_number() -> None:
    hubs = NextHub()
    await hubs.begin()
    await hubs.join()
    await hubs.hub.handle(p.EngineReport(1, 1, [p.EngineStatus(1, 0, 0.0, 1.0, 0.0)], []))
    reply = await hubs.gate.handle(hubs.peer, p.LeaseRequest(1, 8))
    assert isinstance(reply, p.LeaseReply)
    assert reply.leases, "engines that have a version of the former hub work on"
    assert min(lease.lease_id for lease in reply.leases) > max(lease.lease_id for lease in (*hubs.held, *hubs.lost))
    failed = [p.EndedLease(each.lease_id, Failure(each.task, Outcome.ENV_ERROR, "x", 0)) for each in reply.leases]
    await hubs.gate.handle(hubs.peer, p.DeliverRequest(1, failed, 0))


async def test_a_version_of_the_hub_before_is_nobodys_and_an_engine_that_could_not_load_it_is_well() -> None:
    hubs = NextHub()
    await hubs.begin()
    await hubs.join()
    # The first incarnation under the first hub has this number.
    reply = await hubs.gate.handle(hubs.peer, p.LoadFailed(1, (1 << 20) + 1))
    assert reply == p.LoadFailedReply(gone=True)


class SlowJournal(MemoryJournal):
    """A journal that has written its events only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = anyio.Event()
        """Set by the test when the events are written."""

    async def written(self) -> None:
        """Wait until the test says that the events are written."""
        await self.disk.wait()


async def test_nothing_is_acknowledged_before_it_is_written() -> None:
    journal = SlowJournal()
    journal.disk.set()
    driver = Driver(make_config(), journal=journal)
    await driver.begin(0)
    leases = await driver.lease(0, 8)
    acknowledged: list[str] = []

    async def bring() -> None:
        await driver.bring(0, *leases)
        acknowledged.append("results")

    async def train() -> None:
        await driver.hub.handle(p.BatchRequest(0, 0, []))
        await driver.hub.handle(p.Commit(0, {}))
        acknowledged.append("step")

    async with anyio.create_task_group() as tasks:
        for work, name in ((bring, "results"), (train, "step")):
            journal.disk = anyio.Event()
            tasks.start_soon(work)
            await anyio.sleep(1)
            assert name not in acknowledged
            journal.disk.set()
            await anyio.sleep(1)
            assert name in acknowledged
    assert isinstance(journal.events[-1], Committed)


async def test_a_hub_that_starts_again_gives_the_trainers_their_batches_and_the_nodes_nothing_that_was_delivered() -> (
    None
):
    journal, config = MemoryJournal(), make_config()
    driver = Driver(config, journal=journal)
    await driver.begin(0)
    leases = await driver.lease(0, 8)
    await driver.bring(0, *leases)
    first = await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {}))
    generated = driver.hub.samples.ledger.generated_tokens

    state = replayed(None, 0, journal.events).state(until=0)
    assert state is not None
    again = Driver(config, recovered=RecoveredState(HubState(0, state, journal=0), {0}))
    await again.begin(0)
    assert await again.lease(0, 8) == []
    assert (await again.hub.handle(p.BatchRequest(0, 0, []))).shard == first.shard
    await again.hub.handle(p.Commit(0, {}))
    (row,) = again.observer.steps
    assert (row["samples"], row["generated_tokens"]) == (4, generated)
