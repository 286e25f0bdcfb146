"""A step that begins before its batch is whole: its rounds, on the virtual clock.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import ContractError
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.hub.recovery import HubState, RecoveredState
from flash.hub.stages import Stage, StartupPhase
from flash.observe.observer import MemoryObserver
from flash.samples.journal import MemoryJournal, Replay
from flash.types import Lease, Shard
from tests.hub.test_hub import Driver, make_config
from tests.hub.test_trainers import World
from tests.samples.cases import trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


def streamed(batch: int = 8, **train: Any) -> Config:
    """Return a configuration with groups of two samples, whose steps begin with one group."""
    config = make_config()
    changes = {"batch_size": batch, "stream": True} | train
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, **changes))


async def round_of(driver: Driver, number: int, rank: int = 0, step: int = 0) -> Shard:
    """Return a rank's shard of round `number` of a step. Raises TimeoutError if the round cannot be formed now."""
    with anyio.fail_after(1):
        reply = await driver.hub.handle(p.BatchRequest(rank, step, [], 0, number))
    assert reply.shard is not None
    return reply.shard


def tasks_of(*shards: Shard) -> list[int]:
    """Return the numbers of the tasks of all samples in these shards."""
    return [sample.trajectory.task.task_id for shard in shards for sample in shard.samples]


async def begun(config: Config, **more: Any) -> tuple[Driver, list[list[Lease]]]:
    """Return a driver whose node 0 has leased a whole batch, and the leases by group."""
    driver = Driver(config, **more)
    await driver.begin(0)
    leases = await driver.lease(0, config.train.batch_size)
    groups: dict[int, list[Lease]] = {}
    for lease in leases:
        groups.setdefault(lease.task.group_id, []).append(lease)
    return driver, list(groups.values())


async def test_a_step_begins_with_the_first_group_and_ends_with_the_last() -> None:
    driver, groups = await begun(streamed())
    await driver.bring(0, *groups[2])
    first = await round_of(driver, 0)
    assert (tasks_of(first), first.round.last) == ([lease.task.task_id for lease in groups[2]], False)
    with pytest.raises(ContractError, match="step 0 was committed"):
        await driver.hub.handle(p.Commit(0, {}))
    await driver.bring(0, *groups[0], *groups[3])
    second = await round_of(driver, 1)
    assert (len(second.samples), second.round.samples_before, second.round.groups_before) == (4, 2, 1)
    with pytest.raises(TimeoutError):
        await round_of(driver, 2)
    await driver.bring(0, *groups[1])
    third = await round_of(driver, 2)
    assert third.round.last
    with pytest.raises(ContractError, match="asks for round 3 of step 0, which has 3"):
        await round_of(driver, 3)
    await driver.hub.handle(p.Commit(0, {}))
    driver.hub.samples.check()
    assert driver.observer.steps[0]["samples"] == 8
    assert sorted(tasks_of(first, second, third)) == sorted(lease.task.task_id for one in groups for lease in one)


async def test_a_step_waits_for_its_whole_batch_if_a_setting_needs_all_of_it() -> None:
    config = streamed()
    whole = msgspec.structs.replace(config.algorithm, advantage="batch")
    driver, groups = await begun(msgspec.structs.replace(config, algorithm=whole))
    await driver.bring(0, *groups[0])
    with pytest.raises(TimeoutError):
        await round_of(driver, 0)
    await driver.bring(0, *groups[1], *groups[2], *groups[3])
    assert (await round_of(driver, 0)).round.last


async def test_an_interrupt_gives_up_a_step_whose_batch_is_not_whole_and_keeps_its_groups() -> None:
    journal = MemoryJournal()
    driver, groups = await begun(streamed(), journal=journal)
    await driver.bring(0, *groups[0], *groups[1])
    first = await round_of(driver, 0)
    assert driver.hub.interrupt() == "writing a checkpoint of version 0"
    reply = await driver.hub.handle(p.BatchRequest(0, 0, [], 0, 1))
    assert (reply.shard, reply.finished, reply.may_save) == (None, False, True)
    await driver.hub.handle(p.SnapshotRequest())
    driver.hub.samples.check()
    state = HubState.restore(driver.kept.by_version[0], streamed())
    again = Hub(streamed(), MemoryObserver(), now=anyio.current_time, recovered=RecoveredState(state))
    assert again.samples.pool.ready_groups == 2
    found = again.buffer.next_round(0)
    assert found is not None
    trajectories = [one for group in found for one in group.trajectories()]
    assert {one.task.task_id for one in trajectories} == set(tasks_of(first))


async def test_after_an_update_in_the_middle_of_a_step_an_interrupt_saves_nothing() -> None:
    config = streamed(minibatches=2)
    average = msgspec.structs.replace(config.algorithm, objective="decoupled_ppo", options={"proximal": "ewma"})
    driver, groups = await begun(msgspec.structs.replace(config, algorithm=average))
    await driver.bring(0, *groups[0], *groups[1])
    await round_of(driver, 0)
    assert driver.hub.interrupt() == "ending its processes"
    reply = await driver.hub.handle(p.BatchRequest(0, 0, [], 0, 1))
    assert (reply.shard, reply.may_save) == (None, False)
    # The step is given up now, and the ranks still hold weights between two versions.
    assert driver.hub.interrupt() == "ending its processes"


async def test_groups_of_earlier_rounds_count_as_complete_groups_of_the_batch() -> None:
    driver, groups = await begun(streamed())
    await driver.bring(0, *groups[0], *groups[1])
    await round_of(driver, 0)
    assert driver.hub.stages.startup_phase() == StartupPhase("first step")
    with pytest.raises(TimeoutError):
        await round_of(driver, 1)
    assert "(2 of 4 groups are complete)" in driver.hub.stages.describe(Stage.BATCH)
    assert driver.hub.stages.startup_phase() == StartupPhase("first step")
    await driver.bring(0, *groups[2], *groups[3])
    await round_of(driver, 1)
    await driver.hub.handle(p.Commit(0, {}))
    assert "(0 of 4 groups are complete)" in driver.hub.stages.describe(Stage.BATCH)


async def test_a_hub_that_is_lost_in_the_middle_of_a_step_leaves_its_groups_to_the_next_one() -> None:
    journal = MemoryJournal()
    driver, groups = await begun(streamed(), journal=journal)
    await driver.bring(0, *groups[3])
    await round_of(driver, 0)
    replay = Replay(None, 0)
    for event in journal.events:
        replay.apply(event)
    state = replay.state(0)
    assert state is not None
    assert not state.formed
    assert [group.group_id for group in state.groups] == sorted(group.group_id for group in state.groups)
    recovered = RecoveredState(HubState(0, state, journal=0))
    again = Hub(streamed(), MemoryObserver(), now=anyio.current_time, recovered=recovered)
    again.samples.check()
    (group,) = again.buffer.next_round(0) or []
    assert group.group_id == groups[3][0].task.group_id


async def test_ranks_that_start_again_in_the_middle_of_a_step_get_the_same_rounds() -> None:
    world = World(streamed())
    rank = world.rank()
    await rank.begin()
    await rank.publish()
    driver = world.hub
    report = p.EngineReport(0, 1, [p.EngineStatus(0, 0, 0.0, 1.0, 0.0)], [])
    await driver.handle(report)
    leases = (await driver.handle(p.LeaseRequest(0, 8))).leases

    def ended(*chosen: Lease) -> p.DeliverRequest:
        return p.DeliverRequest(0, [p.EndedLease(one.lease_id, trajectory(one.task, 0)) for one in chosen], 0)

    await driver.handle(ended(*leases[:2]))
    first = await rank.call(p.BatchRequest(0, 0, []))
    assert world.hub.stages.now is Stage.STEP
    rank.die()
    await driver.handle(ended(*leases[2:4]))
    other = world.rank()
    await other.begin()
    await other.publish()
    assert (await other.call(p.BatchRequest(0, 0, []))).shard == first.shard
    second = await other.call(p.BatchRequest(0, 0, [], 0, 1))
    assert second.shard is not None
    await driver.handle(ended(*leases[4:]))
    third = await other.call(p.BatchRequest(0, 0, [], 0, 2))
    assert third.shard is not None
    assert third.shard.round.last
    await other.commit()
    assert world.observer.steps[0]["samples"] == 8
    driver.samples.check()
