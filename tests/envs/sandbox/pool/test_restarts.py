"""What a service goes on with after `kill -9`, and what a holder is told of losses: on the virtual clock."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import cast

import anyio
import msgspec
import pytest

from envs.sandbox.engines.backend import SNAPSHOT_LABEL
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.journal import MemoryPoolJournal, MemoryTable
from envs.sandbox.pool.lease import PROBE_S, REPLACED_WAIT_S, LeasedSandbox, LeaseOrder, LeasingPool, SandboxLease
from envs.sandbox.pool.simulated import SimulatedSandbox
from envs.sandbox.pool.state import PoolSettings
from flash.errors import SandboxClosedError, SandboxError, SandboxLostError
from flash.simulate.clock import run_virtual
from tests.envs.sandbox.pools import FEW_WARM, SPEC, Crash, engine, pool_of, sandbox_of

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


class Instance:
    """One engine and one journal that outlive their services."""

    def __init__(self, start_s: float = 0.1) -> None:
        self.maker = engine(6, start_s=start_s)
        self.journal = MemoryPoolJournal()
        self._crash = Crash(self.maker, journal=self.journal)

    @asynccontextmanager
    async def service(self):
        """Ends as by `kill -9`."""
        async with pool_of(self.maker, journal=self.journal) as pool:
            yield pool
            self._crash.now()
        self._crash.over()

    @asynccontextmanager
    async def last(self):
        """Ends properly."""
        async with pool_of(self.maker, journal=self.journal) as pool:
            await anyio.sleep(2)
            yield pool
        assert self.maker.sandboxes == {}
        assert self.journal.leases.rows == {}


def find(pool, id) -> SandboxLease:
    lease = pool.state.leases.find(id)
    assert lease is not None
    return lease


def test_a_sandbox_outlives_any_number_of_restarts():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
            await pool.wait_ready(lease, 5)
            sandbox = sandbox_of(pool, lease.id)
        for _ in range(3):
            async with instance.service() as pool:
                await anyio.sleep(2)
                assert sandbox_of(pool, lease.id) is sandbox
        async with instance.last() as pool:
            assert sandbox_of(pool, lease.id) is sandbox

    run_virtual(main)


def test_a_sandbox_that_does_not_answer_after_a_restart_holds_up_nobody_else():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            stuck, other = pool.order(LeaseOrder(spec=SPEC, owner="x")), pool.order(LeaseOrder(spec=SPEC, owner="y"))
            await pool.wait_ready(stuck, 5)
            await pool.wait_ready(other, 5)
            hung = sandbox_of(pool, stuck.id).container_id
        adopt = instance.maker.adopt

        async def slow(container, spec):
            if container.id == hung:
                await anyio.sleep_forever()
            return await adopt(container, spec)

        instance.maker.adopt = slow
        async with instance.last() as pool:
            # Two seconds later: what lived goes on, and there are new ones beside it, in the room that is left.
            assert find(pool, other.id).state == "ready"
            async with pool.acquire(SPEC, owner="z", deadline=1):
                assert find(pool, stuck.id).state == "queued"
                assert sum(host.cpus_promised for host in pool.state.hosts()) == 3.0
            await anyio.sleep(HostSettings().adopt_s)
            assert find(pool, stuck.id).state == "failed"
            assert hung not in instance.maker.sandboxes
            assert sandbox_of(pool, other.id).state == "ready"

    run_virtual(main)


def test_forks_end_with_their_origin_also_after_a_restart():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
            await pool.wait_ready(lease, 5)
            forks = [fork.id for fork in await pool.fork(lease, 2)]
            assert len(instance.maker.snapshots) == 1
        async with instance.last() as pool:
            assert all(sandbox_of(pool, id).state == "ready" for id in forks)
            await pool.release(find(pool, lease.id))
            assert pool.state.leases.all() == []
            assert instance.maker.sandboxes == {}
            assert instance.maker.snapshots == {}

    run_virtual(main)


def test_the_snapshots_of_a_sandbox_that_is_made_again_end_with_it_after_two_restarts():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x", on_lost="recreate"))
            await pool.wait_ready(lease, 5)
            await pool.fork(lease, 1)
            origin = sandbox_of(pool, lease.id).container_id
        del instance.maker.sandboxes[origin]
        # The second service ends while the sandbox is made again.
        async with instance.service() as pool:
            while find(pool, lease.id).state != "starting":  # noqa: ASYNC110  # the virtual clock waits for nobody
                await anyio.sleep(0.01)
        entry = instance.journal.leases.rows[lease.id]
        assert not entry.ready
        assert entry.snapshots
        async with instance.last() as pool:
            assert find(pool, lease.id).state == "ready"
            await pool.release(find(pool, lease.id))
            assert instance.maker.snapshots == {}

    run_virtual(main)


def test_a_lease_that_is_given_up_at_the_start_leaves_no_snapshot_and_holds_up_nobody():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
            await pool.wait_ready(lease, 5)
            await pool.fork(lease, 1)
        # As if it had been lost and was to be made again.
        entry = instance.journal.leases.rows[lease.id]
        instance.journal.leases.rows = {lease.id: msgspec.structs.replace(entry, ready=False, host="", sandbox_id="")}
        instance.maker.down = True
        began = anyio.current_time()
        async with pool_of(instance.maker, journal=instance.journal, max_waiting=0):
            assert anyio.current_time() - began < 1
            instance.maker.down = False
            await anyio.sleep(10)
            assert instance.maker.snapshots == {}
            assert instance.journal.leases.rows == {}

    run_virtual(main)


def test_forks_whose_origin_is_given_up_at_the_start_end_too():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x", on_lost="recreate"))
            await pool.wait_ready(lease, 5)
            await pool.fork(lease, 2)
        # As if it had been lost and was to be made again.
        entry = instance.journal.leases.rows[lease.id]
        again = msgspec.structs.replace(entry, ready=False, host="", sandbox_id="", generation=1)
        instance.journal.leases.rows[lease.id] = again
        async with pool_of(instance.maker, journal=instance.journal, max_waiting=0) as pool:
            await anyio.sleep(10)
            assert pool.state.leases.all() == []
            assert instance.maker.sandboxes == {}
            assert instance.maker.snapshots == {}

    run_virtual(main)


def test_forks_whose_origin_ended_before_the_restart_end_too():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
            await pool.wait_ready(lease, 5)
            await pool.fork(lease, 2)
        del instance.journal.leases.rows[lease.id]
        async with instance.last() as pool:
            assert pool.state.leases.all() == []

    run_virtual(main)


def test_after_a_restart_only_snapshots_that_somebody_knows_of_are_kept():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
            await pool.wait_ready(lease, 5)
            told = await pool.handle(lease).snapshot()
            await pool.fork(lease, 1)
            [of_fork] = {*instance.maker.snapshots} - {told.spec.image}
            # The service dies before it can tell of the last one.
            lost = await sandbox_of(pool, lease.id).snapshot()
        async with instance.last() as pool:
            assert set(instance.maker.snapshots) == {told.spec.image, of_fork}
            assert lost.spec.image not in instance.maker.snapshots
            later = await pool.handle(find(pool, lease.id)).snapshot()
            # The engine has only now finished one that was asked for before.
            instance.maker.snapshots["late"] = sandbox_of(pool, lease.id).labels
            await anyio.sleep(FEW_WARM.look_s + 1)
            assert set(instance.maker.snapshots) == {told.spec.image, of_fork, later.spec.image}
            await pool.release(find(pool, lease.id))
            assert set(instance.maker.snapshots) == {told.spec.image, later.spec.image}

    run_virtual(main)


def test_a_snapshot_in_the_making_is_not_taken_for_its_sandbox():
    async def main() -> None:
        for holder_first in (True, False):
            instance = Instance()
            async with instance.service() as pool:
                lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
                await pool.wait_ready(lease, 5)
                sandbox = sandbox_of(pool, lease.id)
            holder = SimulatedSandbox(instance.maker, "holder", SPEC, {**sandbox.labels, SNAPSHOT_LABEL: "x"})
            holder.running = False
            both = [(holder.container_id, holder), *instance.maker.sandboxes.items()]
            instance.maker.sandboxes = dict(both if holder_first else reversed(both))
            async with instance.last() as pool:
                assert sandbox_of(pool, lease.id) is sandbox
                assert list(instance.maker.sandboxes.values()) == [sandbox]

    run_virtual(main)


def test_a_sandbox_on_a_host_that_is_no_longer_ours_is_told_as_lost():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            leases = [pool.order(LeaseOrder(spec=SPEC, owner="x", on_lost=how)) for how in ("fail", "recreate")]
            for lease in leases:
                await pool.wait_ready(lease, 5)
        entries = instance.journal.leases.rows
        for id, entry in [*entries.items()]:
            entries[id] = msgspec.structs.replace(entry, host="sold")
        async with instance.last() as pool:
            assert find(pool, leases[0].id).state == "failed"
            again = pool.handle(find(pool, leases[1].id))
            with pytest.raises(SandboxLostError):
                await again.run("true", timeout=1)
            assert (await again.run("true", timeout=1)).ok

    run_virtual(main)


def test_a_recovered_lease_whose_forks_began_on_a_host_that_is_no_longer_ours_ends():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x", on_lost="recreate"))
            await pool.wait_ready(lease, 5)
        entries = instance.journal.leases.rows
        entries[lease.id] = msgspec.structs.replace(entries[lease.id], snapshots=(("snapshot", "sold"),))
        async with instance.last() as pool:
            await pool.release(find(pool, lease.id))
            assert pool.state.leases.all() == []

    run_virtual(main)


@pytest.mark.parametrize("ready", [True, False])
def test_a_restart_does_not_prolong_the_life_of_a_lease_whose_sandbox_is_replaced(ready):
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            spec = msgspec.structs.replace(SPEC, deadline_s=1000)
            lease = pool.order(LeaseOrder(spec=spec, owner="x", on_lost="recreate"))
            await pool.wait_ready(lease, 5)
            await anyio.sleep(900)
        entry = instance.journal.leases.rows[lease.id]
        instance.journal.leases.rows[lease.id] = msgspec.structs.replace(
            entry, ready=ready, host="sold", generation=int(not ready)
        )
        async with instance.last() as pool:
            assert find(pool, lease.id).state == "ready"
            assert find(pool, lease.id).hard_until - anyio.current_time() < 100

    run_virtual(main)


def test_a_loss_counts_once_however_often_the_service_restarts_before_the_replacement():
    async def main() -> None:
        instance = Instance(start_s=10)
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x", on_lost="recreate"))
            await pool.wait_ready(lease, 20)
            sandbox_of(pool, lease.id).crash()
            await anyio.sleep(1)
            assert lease.generation == 1
        for _ in range(3):
            async with instance.service() as pool:
                await anyio.sleep(1)
                assert find(pool, lease.id).generation == 1
        async with instance.last() as pool:
            sandbox = pool.handle(find(pool, lease.id))
            with pytest.raises(SandboxLostError, match="did not outlive"):
                await sandbox.run("true", timeout=1)
            assert (await sandbox.run("true", timeout=1)).ok
            assert sandbox.generation == 1

    run_virtual(main)


@pytest.mark.parametrize(("ready", "state"), [(True, "failed"), (False, "ready")])
@pytest.mark.parametrize("host", ["a", "sold"])
def test_a_loss_in_a_restart_is_one_of_those_after_which_a_sandbox_is_replaced(ready, state, host):
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x", on_lost="recreate"))
            await pool.wait_ready(lease, 5)
        most = PoolSettings().recreate_attempts
        entry = instance.journal.leases.rows[lease.id]
        instance.journal.leases.rows[lease.id] = msgspec.structs.replace(entry, ready=ready, host=host, generation=most)
        instance.maker.sandboxes.clear()
        async with instance.last() as pool:
            assert find(pool, lease.id).state == state
            assert {failure.where for failure in pool.state.failures.recent} == {host}

    run_virtual(main)


class Linked(SimulatedSandbox):
    """Its link can break; it is mended after a while."""

    broken_until = 0.0

    async def run(self, command, **options):
        if self.broken_until > anyio.current_time():
            raise SandboxLostError("the channel to the sandbox ended")
        return await super().run(command, **options)


def ready_lease(sandbox: SimulatedSandbox, on_lost="recreate") -> SandboxLease:
    lease = SandboxLease("l", LeaseOrder(spec=SPEC, owner="x", on_lost=on_lost))
    lease.sandbox = sandbox
    lease.set("ready")
    return lease


async def run(lease: SandboxLease, command: str = "true"):
    async with lease.use() as sandbox:
        return await sandbox.run(command, timeout=10)


async def test_a_sandbox_whose_link_broke_is_used_again_once_it_answers():
    sandbox = Linked(engine(), "b", SPEC, {})
    lease = ready_lease(sandbox)
    sandbox.broken_until = anyio.current_time() + 1
    with pytest.raises(SandboxLostError, match="channel"):
        await run(lease)
    begin = anyio.current_time()
    assert (await run(lease)).ok
    assert anyio.current_time() - begin <= 1 + PROBE_S
    assert (await run(lease)).ok


async def test_a_call_does_not_wait_for_ever_for_a_sandbox_whose_link_stays_broken():
    sandbox = Linked(engine(), "b", SPEC, {})
    lease = ready_lease(sandbox)
    sandbox.broken_until = anyio.current_time() + 1000
    for _ in range(2):
        begin = anyio.current_time()
        with pytest.raises(SandboxLostError):
            await run(lease)
        assert anyio.current_time() - begin <= REPLACED_WAIT_S + PROBE_S


class Shells(Linked):
    """A sandbox with sessions whose commands run like its own. Each opening takes a second."""

    @asynccontextmanager
    async def session(self, name="main"):
        await anyio.sleep(1)
        if self.broken_until > anyio.current_time():
            raise SandboxLostError("the channel to the sandbox ended")
        yield self


async def test_a_session_of_a_replaced_sandbox_says_nothing_about_the_later_one():
    first, second = Shells(engine(), "a", SPEC, {}), Shells(engine(), "b", SPEC, {})
    lease = ready_lease(first)
    async with LeasedSandbox(cast("LeasingPool", None), lease).session() as session:
        first.broken_until = math.inf
        lease.sandbox = second
        with pytest.raises(SandboxLostError, match="channel"):
            await session.run("true", timeout=1)
        lease.lost(second, SandboxLostError("the later sandbox was lost"))
        with pytest.raises(SandboxLostError, match="later"):
            await run(lease)


async def test_a_loss_while_a_session_is_opened_is_told_once():
    first = Shells(engine(), "a", SPEC, {})
    lease = ready_lease(first)
    first.broken_until = math.inf
    with pytest.raises(SandboxLostError, match="channel"):
        async with LeasedSandbox(cast("LeasingPool", None), lease).session():
            pass
    lease.lost(first, SandboxLostError("the sandbox was lost"))
    lease.sandbox = Shells(engine(), "b", SPEC, {})
    assert (await run(lease)).ok


async def test_a_call_that_was_cancelled_has_not_told_of_the_loss():
    maker = engine()
    async with pool_of(maker) as pool, pool.acquire(SPEC, on_lost="recreate") as sandbox:
        inner = sandbox_of(pool, sandbox.sandbox_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: sandbox.run("sleep 100", timeout=200))
            await anyio.sleep(1)
            # Both at the same moment: the call is cancelled before it hears of the loss.
            tasks.cancel_scope.cancel()
            inner.crash()
        await anyio.sleep(1)
        with pytest.raises(SandboxLostError):
            await sandbox.run("true", timeout=1)
        assert (await sandbox.run("true", timeout=1)).ok


async def test_a_fork_whose_origin_ends_while_it_starts_says_so():
    async with pool_of(engine(4, start_s=10)) as pool:
        lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
        await pool.wait_ready(lease, 50)
        async with anyio.create_task_group() as tasks:

            async def end() -> None:
                await anyio.sleep(4)
                lease.end("it was given back")

            tasks.start_soon(end)
            with pytest.raises(SandboxClosedError, match="ended while it was forked: it was given back"):
                await pool.fork(lease, 2)
        await lease.done.wait()
        assert pool.state.leases.all() == []


class Doomed(SimulatedSandbox):
    """Its lease ends while it is copied."""

    lease: SandboxLease

    async def snapshot(self):
        kept = await super().snapshot()
        self.lease.end("somebody else closed it")
        await anyio.sleep(1)
        return kept


async def test_a_fork_whose_origin_ends_meanwhile_leaves_nothing():
    maker = engine(4)
    async with pool_of(maker) as pool:
        lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
        await pool.wait_ready(lease, 5)
        inner = sandbox_of(pool, lease.id)
        sandbox = Doomed(maker, inner.sandbox_id, SPEC, inner.labels)
        sandbox.container_id, sandbox.lease = inner.container_id, lease
        lease.sandbox = sandbox
        with pytest.raises(SandboxClosedError, match="ended while it was forked: somebody else"):
            await pool.fork(lease, 2)
        await lease.done.wait()
        assert pool.state.leases.all() == []
        assert maker.sandboxes == {}
        assert maker.snapshots == {}


def test_a_lease_whose_sandbox_was_being_made_waits_again_and_is_not_lost():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
            while lease.state != "starting":
                await lease.change()
            await anyio.sleep(0.08)  # Its container exists, and is not ready.
            assert len(instance.maker.sandboxes) == 1
        async with instance.last() as pool:
            again = find(pool, lease.id)
            assert again.state == "ready"
            assert (await pool.handle(again).run("true", timeout=1)).ok
            assert len(instance.maker.sandboxes) == 1

    run_virtual(main)


def test_a_holder_is_told_again_when_the_restart_forgot_whether_it_was_told():
    async def main() -> None:
        instance = Instance()
        async with instance.service() as pool:
            lease = pool.order(LeaseOrder(spec=SPEC, owner="x", on_lost="recreate"))
            await pool.wait_ready(lease, 5)
            sandbox_of(pool, lease.id).crash()
            await anyio.sleep(1)
            assert lease.state == "ready"
            assert lease.generation == 1
        async with instance.last() as pool:
            sandbox = pool.handle(find(pool, lease.id))
            with pytest.raises(SandboxLostError, match="was replaced"):
                await sandbox.run("true", timeout=1)
            assert (await sandbox.run("true", timeout=1)).ok

    run_virtual(main)


async def test_forks_are_not_kept_ready_for_others():
    maker = engine(20)
    settings = msgspec.structs.replace(FEW_WARM, warm_max=4)
    async with pool_of(maker, host_options={"settings": settings}) as pool:
        lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
        await pool.wait_ready(lease, 5)
        forks = await pool.fork(lease, 3)
        await anyio.sleep(5)
        image = forks[0].spec.image
        assert sum(sandbox.spec.image == image for sandbox in maker.sandboxes.values()) == 3


async def test_a_snapshot_that_could_not_be_removed_is_removed_at_the_next_look():
    maker = engine(4)
    async with pool_of(maker, close_s=1) as pool:
        lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
        await pool.wait_ready(lease, 5)
        await pool.fork(lease, 1)
        maker.down = True
        await pool.release(lease)
        assert len(maker.snapshots) == 1
        maker.down = False
        await anyio.sleep(2 * FEW_WARM.look_s)
        assert maker.snapshots == {}
        assert maker.sandboxes == {}


class FullTable(MemoryTable):
    """A table for whose rows there is no room."""

    async def put(self, key: str, row: object) -> None:
        raise SandboxError("the disk is full")


def test_a_journal_that_cannot_be_written_ends_no_lease_and_keeps_no_snapshot():
    async def main() -> None:
        maker, journal = engine(2), MemoryPoolJournal()
        journal.leases = journal.snapshots = FullTable()
        async with pool_of(maker, journal=journal) as pool, pool.acquire(SPEC) as sandbox:
            assert (await sandbox.run("true", timeout=1)).ok
            with pytest.raises(SandboxError, match="the disk is full"):
                await sandbox.snapshot()
            assert pool.snapshots.all() == []
            assert maker.snapshots == {}
            [fork] = await sandbox.fork(1)
            assert (await fork.run("true", timeout=1)).ok
        assert maker.sandboxes == {}
        assert maker.snapshots == {}

    run_virtual(main)
