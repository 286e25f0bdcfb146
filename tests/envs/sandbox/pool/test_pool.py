"""The pool on simulated engines and the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import msgspec
import pytest

from envs.sandbox.api import Spec
from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.pool.admission import Demand
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.journal import MemoryPoolJournal
from envs.sandbox.pool.lease import LeaseOrder
from envs.sandbox.pool.ownership import Labels, OwnerAlive
from envs.sandbox.pool.simulated import SimulatedMaker, SimulatedSandbox
from envs.sandbox.sandbox import Sandbox
from flash.errors import (
    SandboxBusyError,
    SandboxClosedError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
)
from flash.simulate.clock import run_virtual
from tests.envs.sandbox.pools import FEW_WARM, SPEC, Crash, engine, pool_of, sandbox_of

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


async def test_a_sandbox_is_there_for_the_block_and_nothing_is_left_after_it():
    maker = engine()
    async with pool_of(maker) as pool:
        async with pool.acquire(SPEC) as sandbox:
            assert sandbox.state == "ready"
            assert (await sandbox.run("true", timeout=1)).ok
            assert len(maker.sandboxes) == 1
        assert maker.sandboxes == {}
        assert pool.state.leases.all() == []
        with pytest.raises(SandboxClosedError, match="it was given back"):
            await sandbox.run("true", timeout=1)


async def test_never_more_sandboxes_than_the_hosts_can_hold_and_everybody_is_served():
    makers = [engine(2), engine(3)]
    served = []

    async with pool_of(*makers) as pool, anyio.create_task_group() as tasks:

        async def use(number: int) -> None:
            async with pool.acquire(SPEC, owner=f"o{number % 3}", deadline=1000) as sandbox:
                await sandbox.run("sleep 1", timeout=10)
                served.append(number)

        for number in range(40):
            tasks.start_soon(use, number)
    assert sorted(served) == list(range(40))
    assert [maker.most for maker in makers] == [2, 3]
    assert [maker.sandboxes for maker in makers] == [{}, {}]


@pytest.mark.parametrize("milliseconds", range(0, 400, 7))
def test_nothing_leaks_on_cancellation_at_any_time(milliseconds):
    async def main() -> None:
        makers = [engine(1), engine(1)]
        async with pool_of(*makers) as pool:
            async with anyio.create_task_group() as tasks:

                async def use() -> None:
                    async with pool.acquire(SPEC) as sandbox:
                        await sandbox.run("sleep 0.05", timeout=10)
                        await pool.fork(pool.state.leases.all()[0], 1)

                for _ in range(4):
                    tasks.start_soon(use)
                await anyio.sleep(milliseconds / 1000)
                tasks.cancel_scope.cancel()
            # A start that was cut off may leave its container to the next look.
            await anyio.sleep(FEW_WARM.look_s + 1)
            assert pool.state.leases.all() == []
            assert [maker.sandboxes for maker in makers] == [{}, {}]
            assert [maker.snapshots for maker in makers] == [{}, {}]
            assert pool.state.admission.usage() == {}

    run_virtual(main)


@pytest.mark.parametrize("milliseconds", range(0, 300, 23))
def test_nothing_leaks_when_the_pool_itself_is_cancelled(milliseconds):
    async def main() -> None:
        maker = engine(2)
        journal = MemoryPoolJournal()
        with anyio.move_on_after(milliseconds / 1000):
            async with pool_of(maker, journal=journal) as pool, anyio.create_task_group() as tasks:

                async def use() -> None:
                    async with pool.acquire(SPEC):
                        await anyio.sleep_forever()

                for _ in range(4):
                    tasks.start_soon(use)
                await anyio.sleep_forever()
        # Nobody is left to look again: the next start of the service removes what a cut-off start left.
        async with pool_of(maker, journal=journal):
            await anyio.sleep(FEW_WARM.look_s + 1)
            assert maker.sandboxes == {}
            assert journal.leases.rows == {}

    run_virtual(main)


async def test_without_room_the_deadline_is_kept_and_says_what_was_waited_for():
    async with pool_of(engine(1)) as pool, pool.acquire(SPEC):
        start = anyio.current_time()
        with pytest.raises(
            SandboxBusyError, match=r"waited 5 s for a sandbox of img: 0 of 1 waiting .* 1 sandboxes are in"
        ):
            async with pool.acquire(SPEC, deadline=5):
                pass
        assert anyio.current_time() - start == pytest.approx(5)
        assert pool.state.admission.waiting() == {}


async def test_what_can_never_fit_is_refused_at_once():
    async with pool_of(engine(1)) as pool:
        await anyio.sleep(1)
        with pytest.raises(SandboxRefusedError, match="fits nowhere"):
            async with pool.acquire(msgspec.structs.replace(SPEC, cpus=2)):
                pass


# ---- the warm pool


async def test_a_ready_sandbox_is_handed_out_at_once_and_replaced():
    maker = engine()
    async with pool_of(maker, host_options={"warm": [(SPEC, 2)]}) as pool:
        await anyio.sleep(1)
        assert len(maker.sandboxes) == 2
        start = anyio.current_time()
        async with pool.acquire(msgspec.structs.replace(SPEC, deadline_s=5.0)) as sandbox:
            assert anyio.current_time() == start
            assert sandbox.spec.deadline_s == 5.0
            await anyio.sleep(1)
            assert len(maker.sandboxes) == 3
        [host] = pool.state.hosts()
        assert (host.hits, host.misses) == (1, 0)
        assert not vars(pool.state.host(host.name))["_warming"]
    assert maker.sandboxes == {}


async def test_ready_sandboxes_make_room_for_others():
    maker = engine(2)
    async with pool_of(maker, host_options={"warm": [(SPEC, 2)]}) as pool:
        await anyio.sleep(1)
        other = msgspec.structs.replace(SPEC, image="other", cpus=2)
        async with pool.acquire(other, deadline=5):
            assert [sandbox.spec.image for sandbox in maker.sandboxes.values()] == ["other"]
        assert maker.most <= 2


async def test_the_pool_learns_what_is_asked_for_and_forgets_it():
    maker = engine(8)
    settings = HostSettings(cpu_factor=1.0, memory_factor=1.0, warm_max=3, idle_warm_s=100)
    async with pool_of(maker, host_options={"settings": settings}) as pool:
        async with anyio.create_task_group() as tasks:

            async def use() -> None:
                async with pool.acquire(SPEC) as sandbox:
                    await sandbox.run("sleep 1", timeout=10)

            for _ in range(4):
                tasks.start_soon(use)
        await anyio.sleep(1)
        assert len(maker.sandboxes) == 3
        await anyio.sleep(101)
        assert maker.sandboxes == {}


async def test_a_ready_sandbox_that_dies_is_replaced_and_not_handed_out():
    maker = engine()
    async with pool_of(maker, host_options={"warm": [(SPEC, 1)]}) as pool:
        await anyio.sleep(1)
        [dead] = maker.sandboxes.values()
        dead.crash()
        async with pool.acquire(SPEC) as sandbox:
            assert (await sandbox.run("true", timeout=1)).ok


async def test_an_old_ready_sandbox_is_replaced():
    maker = engine()
    settings = HostSettings(cpu_factor=1.0, memory_factor=1.0, warm_max=0, warm_age_s=50)
    async with pool_of(maker, host_options={"warm": [(SPEC, 1)], "settings": settings}):
        await anyio.sleep(1)
        [first] = maker.sandboxes
        await anyio.sleep(51)
        [second] = maker.sandboxes
        assert first != second


async def test_a_ready_sandbox_lives_as_long_as_the_lease_that_takes_it():
    maker = engine()
    settings = HostSettings(cpu_factor=1.0, memory_factor=1.0, warm_max=2, warm_age_s=50)
    short, long = (msgspec.structs.replace(SPEC, deadline_s=seconds) for seconds in (4.0, 600.0))
    async with pool_of(maker, host_options={"settings": settings}) as pool:
        for spec, waits in ((short, True), (long, True), (long, False), (short, False), (long, False)):
            begun = anyio.current_time()
            async with pool.acquire(spec) as sandbox:
                assert (anyio.current_time() > begun) == waits
                assert sandbox_of(pool, sandbox.sandbox_id).spec.deadline_s >= spec.deadline_s
            await anyio.sleep(10)


# ---- losses


async def test_a_lost_sandbox_ends_its_lease_with_a_typed_error():
    maker = engine()
    async with pool_of(maker) as pool:
        async with pool.acquire(SPEC) as sandbox:
            sandbox_of(pool, sandbox.sandbox_id).crash()
            with pytest.raises(SandboxLostError):
                await sandbox.run("true", timeout=1)
            await sandbox.wait_ended()
            assert sandbox.state == "lost"
        assert pool.state.failures.counts == {"SandboxLostError": 1}
        assert pool.state.admission.usage() == {}


async def test_a_lost_sandbox_is_made_again_and_the_holder_is_told_once():
    maker = engine()
    async with pool_of(maker) as pool, pool.acquire(SPEC, on_lost="recreate") as sandbox:
        sandbox_of(pool, sandbox.sandbox_id).crash()
        await anyio.sleep(1)
        with pytest.raises(SandboxLostError, match="is gone"):
            await sandbox.run("true", timeout=1)
        assert (await sandbox.run("true", timeout=1)).ok
        assert sandbox.generation == 1
        assert len(maker.sandboxes) == 1


async def test_a_call_in_progress_tells_of_the_loss_and_the_next_one_works():
    async with pool_of(engine()) as pool, pool.acquire(SPEC, on_lost="recreate") as sandbox:
        async with anyio.create_task_group() as tasks:

            async def crash() -> None:
                await anyio.sleep(1)
                sandbox_of(pool, sandbox.sandbox_id).crash()

            tasks.start_soon(crash)
            with pytest.raises(SandboxLostError):
                await sandbox.run("sleep 5", timeout=10)
        assert (await sandbox.run("true", timeout=1)).ok


async def test_what_is_lost_over_and_over_is_given_up():
    async with pool_of(engine(), recreate_attempts=2) as pool, pool.acquire(SPEC, on_lost="recreate") as sandbox:
        for _ in range(3):
            await anyio.sleep(1)
            sandbox_of(pool, sandbox.sandbox_id).crash()
        await sandbox.wait_ended()
        with pytest.raises(SandboxLostError):
            await sandbox.run("true", timeout=1)


# ---- starts that fail


async def test_a_failed_start_is_tried_on_another_host():
    bad, good = engine(8), engine(1)
    bad.bad_images.add("img")
    async with pool_of(bad, good) as pool, pool.acquire(SPEC):
        assert len(good.sandboxes) == 1
        assert pool.state.failures.counts == {"SandboxStartError": 1}


async def test_an_image_that_only_fails_is_answered_at_once_and_tried_again_later():
    maker = engine()
    maker.bad_images.add("img")
    async with pool_of(maker, quarantine_threshold=3, quarantine_s=30) as pool:
        with pytest.raises(SandboxStartError, match="img does not start"):
            async with pool.acquire(SPEC):
                pass
        made = maker.made
        with pytest.raises(
            SandboxStartError, match=r"img with these settings has failed; .* in 30 s\. Last error: img does not"
        ):
            async with pool.acquire(SPEC):
                pass
        assert maker.made == made
        async with pool.acquire(msgspec.structs.replace(SPEC, image="other")):
            pass
        await anyio.sleep(31)
        maker.bad_images.clear()
        async with pool.acquire(SPEC):
            assert pool.state.failures.images_put_aside() == {}


async def test_a_host_that_fails_where_others_do_not_is_put_aside_and_comes_back():
    bad, good = engine(8), engine(8)
    async with pool_of(bad, good, quarantine_threshold=2, quarantine_s=30, start_attempts=5) as pool:
        async with pool.acquire(SPEC), pool.acquire(SPEC):
            pass
        bad.bad_images.add("img")
        for _ in range(2):
            async with pool.acquire(SPEC):
                assert len(good.sandboxes) == 1
        [first, _] = pool.state.hosts()
        assert "in quarantine for 30 s: img does not start" in first.why_not
        made = bad.made
        async with pool.acquire(SPEC), pool.acquire(SPEC):
            assert bad.made == made
        await anyio.sleep(31)
        bad.bad_images.clear()
        async with pool.acquire(SPEC), pool.acquire(SPEC):
            assert bad.made > made


class _NoSuchFolder(SimulatedMaker):
    """An engine on which sandboxes with one working directory cannot be made."""

    async def make(self, spec: Spec, sandbox_id: str, labels: Mapping[str, str]) -> Sandbox:
        if spec.workdir == "/bin":
            raise SandboxStartError("user 1000 cannot write to /bin")
        return await super().make(spec, sandbox_id, labels)


@pytest.mark.parametrize("known", [False, True])
async def test_who_asks_for_what_cannot_be_puts_neither_a_host_nor_an_image_aside_for_others(known):
    wrong = msgspec.structs.replace(SPEC, workdir="/bin")
    async with pool_of(_NoSuchFolder(Demand(8000, 100_000)), quarantine_threshold=3, quarantine_s=30) as pool:
        if known:
            async with pool.acquire(SPEC):
                pass
        with pytest.raises(SandboxStartError, match="cannot write"):
            async with pool.acquire(wrong):
                pass
        with pytest.raises(SandboxStartError, match=r"has failed; the next one is tried in 30 s"):
            async with pool.acquire(wrong):
                pass
        async with pool.acquire(SPEC, deadline=5):
            assert pool.state.failures.images_put_aside() == {"img": "user 1000 cannot write to /bin"}
            assert [each.why_not for each in pool.state.hosts()] == [""]


async def test_while_the_engine_is_down_requests_wait_and_are_served_afterwards():
    maker = engine()
    async with pool_of(maker) as pool:
        await anyio.sleep(1)
        maker.down = True
        await anyio.sleep(20)
        [host] = pool.state.hosts()
        assert host.why_not == "the engine does not answer: the engine does not answer"
        with pytest.raises(SandboxBusyError, match="0 of 1 hosts take new ones; a: the engine does not answer"):
            async with pool.acquire(SPEC, deadline=5):
                pass
        async with anyio.create_task_group() as tasks:

            async def repair() -> None:
                await anyio.sleep(60)
                maker.down = False

            tasks.start_soon(repair)
            async with pool.acquire(SPEC, deadline=100):
                pass


async def test_a_container_whose_removal_failed_is_removed_later():
    maker = engine()
    async with pool_of(maker) as pool:
        async with pool.acquire(SPEC):
            maker.down = True
        assert len(maker.sandboxes) == 1
        maker.down = False
        await anyio.sleep(40)
        assert maker.sandboxes == {}


# ---- the times of a lease


async def test_a_lease_that_nobody_renews_ends():
    maker = engine()
    async with pool_of(maker) as pool:
        lease = pool.order(LeaseOrder(spec=SPEC, owner="x", lease_s=10))
        await pool.wait_ready(lease, 5)
        for _ in range(3):
            await anyio.sleep(8)
            lease.renew()
        assert lease.state == "ready"
        await anyio.sleep(11)
        assert lease.done.is_set()
        assert lease.reason == "the lease was not renewed within 10 s"
        assert maker.sandboxes == {}


async def test_a_lease_whose_holder_vanished_while_it_waited_ends_too():
    async with pool_of(engine(1)) as pool, pool.acquire(SPEC):
        lease = pool.order(LeaseOrder(spec=SPEC, owner="x", lease_s=10))
        await anyio.sleep(11)
        assert lease.done.is_set()
        assert pool.state.admission.waiting() == {}


async def test_the_life_of_a_sandbox_is_limited_from_when_it_is_ready():
    async with pool_of(engine(1)) as pool, pool.acquire(msgspec.structs.replace(SPEC, deadline_s=20.0)) as sandbox:
        await anyio.sleep(19.5)
        assert sandbox.state == "ready"
        await sandbox.wait_ended()
        with pytest.raises(SandboxClosedError, match="its life of 20 s was over"):
            await sandbox.run("true", timeout=1)


async def test_an_idle_sandbox_ends_and_a_busy_one_does_not():
    async with pool_of(engine(1)) as pool, pool.acquire(msgspec.structs.replace(SPEC, idle_s=10.0)) as sandbox:
        await sandbox.run("sleep 30", timeout=60)
        await anyio.sleep(9)
        await sandbox.run("true", timeout=60)
        await anyio.sleep(9)
        assert sandbox.state == "ready"
        await anyio.sleep(2)
        assert sandbox.state == "closed"
        with pytest.raises(SandboxClosedError, match="no call for 10 s"):
            await sandbox.run("true", timeout=1)


# ---- forks


async def test_forks_are_on_the_same_host_and_end_with_their_origin():
    makers = [engine(4), engine(4)]
    async with pool_of(*makers) as pool:
        async with pool.acquire(SPEC) as sandbox:
            forks = await sandbox.fork(3)
            assert sorted(len(maker.sandboxes) for maker in makers) == [0, 4]
            await forks[0].close()
            assert sorted(len(maker.sandboxes) for maker in makers) == [0, 3]
        assert [maker.sandboxes for maker in makers] == [{}, {}]
        assert [maker.snapshots for maker in makers] == [{}, {}]
        assert forks[1].state == "closed"


async def test_a_fork_that_finds_no_room_leaves_none():
    maker = engine(3)
    async with pool_of(maker, fork_s=10) as pool, pool.acquire(SPEC) as sandbox:
        with pytest.raises(SandboxBusyError):
            await sandbox.fork(3)
        assert len(maker.sandboxes) == 1


# ---- one key, one sandbox


async def test_the_same_key_gives_the_same_lease_also_after_its_end():
    async with pool_of(engine()) as pool:
        first = pool.order(LeaseOrder(spec=SPEC, owner="x", token="t", key="k"))
        assert pool.order(LeaseOrder(spec=SPEC, owner="x", token="t", key="k")) is first
        assert pool.order(LeaseOrder(spec=SPEC, owner="x", token="other", key="k")) is not first
        await pool.release(first)
        assert pool.order(LeaseOrder(spec=SPEC, owner="x", token="t", key="k")) is first
        with pytest.raises(SandboxRefusedError, match="was used for another"):
            pool.order(LeaseOrder(spec=Spec(image="other"), owner="x", token="t", key="k"))


# ---- restarts and orphans


def test_a_restarted_service_goes_on_with_its_sandboxes():
    async def main() -> None:
        maker = engine(4)
        journal = MemoryPoolJournal()
        crash = Crash(maker, journal=journal)
        async with pool_of(maker, journal=journal) as pool:
            leases = [
                pool.order(LeaseOrder(spec=SPEC, owner="x", token="t", key=f"k{n}", on_lost=how))
                for n, how in enumerate(["fail", "fail", "recreate"])
            ]
            for lease in leases:
                await pool.wait_ready(lease, 5)
            ids = [lease.id for lease in leases]
            sandboxes = [sandbox_of(pool, id) for id in ids]
            crash.now()
        crash.over()
        assert len(maker.sandboxes) == 3
        sandboxes[1].crash()
        sandboxes[2].crash()
        async with pool_of(maker, journal=journal) as pool:
            await anyio.sleep(2)
            assert sandbox_of(pool, ids[0]) is sandboxes[0]
            assert pool.order(LeaseOrder(spec=SPEC, owner="x", token="t", key="k0")).id == ids[0]
            lost = pool.state.leases.find(ids[1])
            assert lost is not None
            assert lost.state == "failed"
            remade = pool.state.leases.find(ids[2])
            assert remade is not None
            with pytest.raises(SandboxLostError, match="did not outlive the restart"):
                await pool.handle(remade).run("true", timeout=1)
            assert (await pool.handle(remade).run("true", timeout=1)).ok
            assert len(maker.sandboxes) == 2
        assert maker.sandboxes == {}
        assert journal.leases.rows == {}

    run_virtual(main)


def test_after_a_restart_a_lease_ends_unless_it_is_renewed_and_its_life_goes_on():
    async def main() -> None:
        maker = engine(4)
        journal = MemoryPoolJournal()
        crash = Crash(maker, journal=journal)
        short = msgspec.structs.replace(SPEC, deadline_s=100.0)
        async with pool_of(maker, journal=journal) as pool:
            held = pool.order(LeaseOrder(spec=short, owner="x", lease_s=30))
            kept = pool.order(LeaseOrder(spec=short, owner="x"))
            for lease in (held, kept):
                await pool.wait_ready(lease, 5)
            crash.now()
        crash.over()
        await anyio.sleep(60)
        async with pool_of(maker, journal=journal) as pool:
            await anyio.sleep(31)
            assert [lease.id for lease in pool.state.leases.all()] == [kept.id]
            await anyio.sleep(10)
            assert pool.state.leases.all() == []
            assert maker.sandboxes == {}

    run_virtual(main)


async def test_containers_that_the_journal_does_not_know_are_removed_at_the_start():
    maker = engine(4)
    crash = Crash(maker, journal=MemoryPoolJournal())
    async with pool_of(maker) as pool:
        await pool.wait_ready(pool.order(LeaseOrder(spec=SPEC, owner="x")), 5)
        crash.now()
    crash.over()
    assert len(maker.sandboxes) == 1
    async with pool_of(maker):
        await anyio.sleep(1)
        assert maker.sandboxes == {}


async def test_a_pool_that_ends_while_it_recovers_leaves_only_what_leases_have():
    maker, journal = engine(4), MemoryPoolJournal()
    crash = Crash(maker, journal=journal)
    async with pool_of(maker, journal=journal) as pool:
        held, forgotten = (pool.order(LeaseOrder(spec=SPEC, owner=owner)) for owner in "xy")
        for lease in (held, forgotten):
            await pool.wait_ready(lease, 5)
        crash.now()
    crash.over()
    del journal.leases.rows[forgotten.id]
    async with pool_of(maker, journal=journal):
        await anyio.sleep(0.01)
    assert [sandbox.sandbox_id for sandbox in maker.sandboxes.values()] == [held.sandbox_id]
    async with pool_of(maker, journal=journal) as pool:
        await anyio.sleep(1)
        assert [(lease.id, lease.state) for lease in pool.state.leases.all()] == [(held.id, "ready")]


async def test_while_a_host_cannot_be_reached_after_a_restart_its_leases_wait():
    maker = engine(4)
    journal = MemoryPoolJournal()
    crash = Crash(maker, journal=journal)
    async with pool_of(maker, journal=journal) as pool:
        lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
        await pool.wait_ready(lease, 5)
        crash.now()
    crash.over()
    maker.down = True
    async with pool_of(maker, journal=journal) as pool:
        again = pool.state.leases.find(lease.id)
        assert again is not None
        await anyio.sleep(20)
        assert again.state == "queued"
        maker.down = False
        assert (await pool.handle(again).run("true", timeout=1)).ok
        await pool.release(again)


def foreign(maker, *, service: str, deadline: float) -> SimulatedSandbox:
    labels = Labels(service, service, deadline, "/lock", "machine")
    sandbox = SimulatedSandbox(maker, service, SPEC, labels.as_dict())
    maker.sandboxes[sandbox.container_id] = sandbox
    return sandbox


async def test_any_survivor_removes_the_containers_of_a_dead_service_after_a_grace():
    maker = engine(4)
    dead = foreign(maker, service="dead", deadline=2e9)
    alive = foreign(maker, service="alive", deadline=0.0)
    elsewhere = foreign(maker, service="elsewhere", deadline=2e9)
    expired = foreign(maker, service="expired", deadline=0.0)
    stranger = SimulatedSandbox(maker, "stranger", SPEC, {"something": "else"})
    maker.sandboxes[stranger.container_id] = stranger
    known = {"dead": OwnerAlive.NO, "alive": OwnerAlive.YES}
    options = {"alive": lambda labels, machine: known.get(labels.service, OwnerAlive.UNKNOWN)}
    async with pool_of(maker, host_options=options) as pool:
        await anyio.sleep(1)
        assert expired.container_id not in maker.sandboxes
        assert dead.container_id in maker.sandboxes
        await anyio.sleep(FEW_WARM.orphan_grace_s + FEW_WARM.look_s)
        assert set(maker.sandboxes) == {alive.container_id, elsewhere.container_id, stranger.container_id}
        [host] = pool.state.hosts()
        assert host.orphans_removed == 2


async def test_a_service_that_comes_back_within_the_grace_keeps_its_containers():
    maker = engine(4)
    sandbox = foreign(maker, service="other", deadline=2e9)
    state = {"other": OwnerAlive.NO}
    options = {"alive": lambda labels, machine: state[labels.service]}
    async with pool_of(maker, host_options=options):
        await anyio.sleep(40)
        state["other"] = OwnerAlive.YES
        await anyio.sleep(40)
        state["other"] = OwnerAlive.NO
        await anyio.sleep(40)
        assert sandbox.container_id in maker.sandboxes


async def test_a_host_whose_machine_has_no_memory_left_takes_no_sandboxes_until_it_has():
    maker = engine(4)
    maker.measured = MachineLoad(1.0, 4, 96_000, 100_000)
    async with pool_of(maker) as pool:
        await anyio.sleep(1)
        with pytest.raises(SandboxBusyError, match="4000 of 100000 MiB of memory free"):
            async with pool.acquire(SPEC, deadline=20):
                pass
        maker.measured = MachineLoad(1.0, 4, 95_000, 100_000)
        async with pool.acquire(SPEC, deadline=20) as sandbox:
            assert (await sandbox.run("true", timeout=1)).ok
        assert pool.state.hosts()[0].load == maker.measured
