"""The laws that hold on every random schedule.

`python -m tests.hub.test_schedules COUNT [FIRST]` runs COUNT schedules, one per seed, from seed FIRST on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import pytest

from flash.types import Shard
from tests.hub.schedules import Laws, Schedule, run_one

# -- laws that hold after each event ---------------------------------------------------------------------------------


def law_2_conservation(schedule: Schedule) -> None:
    """The ledger accounts for every task and every token."""
    schedule.hub.samples.check()


def no_node_waits_for_what_it_could_run(schedule: Schedule) -> None:
    """A node waits only if there is no task for it, or if a share may be kept for a node that loads a version."""
    nodes, newest = schedule.nodes.values(), schedule.hub.progress.published_version
    loading = any(max(node.versions, default=newest) < newest for node in nodes)
    over = schedule.hub.progress.stopping is not None  # nothing more is trained
    if over or not schedule.observer.evaluations or loading:
        return
    for node in nodes:
        if node.waits and len(node.held) < node.room:
            reported = [other.number for other in nodes if max(other.versions, default=-1) >= 0]
            lease = schedule.hub.buffer.lease(node.versions, node.number, nodes=reported)
            assert lease is None, f"node {node.number} waits, and could run {lease}"


# -- laws that hold for each batch -----------------------------------------------------------------------------------


def law_3_ages(schedule: Schedule, shards: Sequence[Shard]) -> None:
    """The age contract holds. Steps that are trained again were checked before, under the contract of that time."""
    for shard in shards:
        for sample in shard.samples if shard.step == schedule.hub.progress.version else ():
            kept = [run.version for run in sample.trajectory.versions if run.version >= shard.min_version]
            assert min(kept, default=shard.step) >= shard.step - schedule.config.train.max_age
            assert max(kept, default=shard.step) <= shard.step, "a token of a version that is still to be made"


def no_group_is_of_two_environments(schedule: Schedule, shards: Sequence[Shard]) -> None:
    """All samples of a group are from one environment, also if the run was resumed with another environment.

    The observation of a sample has the number of its environment.
    """
    for made in (sample.trajectory for shard in shards for sample in shard.samples):
        known = schedule.environments.setdefault(made.task.group_id, made.turns[0].observation)
        assert made.turns[0].observation == known, f"group {made.task.group_id} has samples of two environments"


def a_step_has_one_batch(schedule: Schedule, shards: Sequence[Shard]) -> None:
    """Every incarnation of the ranks gets the same batch of a step."""
    # A hub that is lost after the batch was whole leaves the batch to the next hub, and not its rounds.
    dealt = sorted(sample.trajectory.task.task_id for shard in shards for sample in shard.samples)
    assert schedule.shards.setdefault(shards[0].step, dealt) == dealt, "another batch for the same step"


# -- laws that hold at the end ---------------------------------------------------------------------------------------


def after_each_event(schedule: Schedule) -> None:
    """Check the laws that hold after each event."""
    law_2_conservation(schedule)
    no_node_waits_for_what_it_could_run(schedule)


def for_each_batch(schedule: Schedule, shards: Sequence[Shard]) -> None:
    """Check the laws that hold for the shards of each step."""
    law_3_ages(schedule, shards)
    no_group_is_of_two_environments(schedule, shards)
    a_step_has_one_batch(schedule, shards)


def every_schedule_comes_to_its_end(seed: int) -> None:
    """Run one schedule, and check that it has trained and counted each step, and that no sample is left."""
    schedule = run_one(seed, Laws(after_each_event, for_each_batch))
    steps, samples = schedule.config.run.steps, schedule.hub.samples
    assert schedule.finished, f"seed {seed} stalls at step {schedule.version} of {steps}"
    assert samples.in_flight == 0
    assert [row["step"] for row in schedule.observer.steps] == list(range(steps)), "booked once each"
    assert schedule.observer.evaluations[-1]["step"] == steps, "the last version is evaluated"
    stale = samples.totals().get("discarded_tokens_stale", 0)
    assert not (schedule.calm and stale), "a token is stale because of admission"
    waits = schedule.config.rollout.on_expire == "wait" and not schedule.resumed
    assert not (waits and stale), "a token is stale though steps wait for it"


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 15, 30])
def test_the_laws_hold_on_every_schedule(first: int) -> None:
    for seed in range(first, first + 15):
        every_schedule_comes_to_its_end(seed)


if __name__ == "__main__":
    began, count, first_seed = time.perf_counter(), int(sys.argv[1]), int((*sys.argv, 0)[2])
    for number in range(first_seed, first_seed + count):
        every_schedule_comes_to_its_end(number)
    sys.stdout.write(f"{count} schedules from seed {first_seed}: {time.perf_counter() - began:.0f} s\n")
