"""The sample buffer: conservation (law 2), the age contract (law 3) and the absence of deadlock."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flash.errors import BreakerError, ContractError
from flash.hub.batching import deal
from flash.hub.buffer import AgeContract, BufferState, SampleBuffer
from flash.hub.tasks import TaskSource
from flash.types import Failure, Outcome, Span, Task, Trajectory, VersionRun


def trajectory(task: Task, version: int, tokens: int = 3, reward: float = 1.0) -> Trajectory:
    return Trajectory(
        task=task,
        outcome=Outcome.OK,
        reward=reward,
        token_ids=np.arange(tokens + 2, dtype="<i4").tobytes(),
        action_spans=[Span(2, tokens + 2)],
        logprobs=np.zeros(tokens, dtype="<f4").tobytes(),
        versions=[VersionRun(version, tokens)],
        prompt_text="p",
        completion_text="c",
        generate_s=0.0,
    )


def make_buffer(
    alpha: float = 1.0,
    batch: int = 4,
    group: int = 2,
    steps: int = 10,
    retries: int = 1,
    breaker: int = 1000,
    state: BufferState | None = None,
) -> SampleBuffer:
    contract = AgeContract(alpha, batch, group, steps)
    return SampleBuffer(contract, TaskSource(0, group), retries=retries, breaker=breaker, state=state)


def lease_all(buffer: SampleBuffer, version: int) -> list:
    leases = []
    while (lease := buffer.lease(version)) is not None:
        leases.append(lease)
    return leases


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 4), (0.5, 6), (1.0, 8), (2.0, 12)])
def test_admission_at_version_zero_hands_out_one_plus_alpha_batches(alpha: float, expected: int) -> None:
    assert len(lease_all(make_buffer(alpha), 0)) == expected


def test_admission_never_exceeds_what_the_last_step_needs() -> None:
    assert len(lease_all(make_buffer(alpha=5, steps=2), 0)) == 8


def test_a_lease_goes_only_to_an_engine_whose_version_leaves_it_room() -> None:
    buffer = make_buffer(alpha=0)
    for lease in lease_all(buffer, 0):
        buffer.finish(lease.lease_id, trajectory(lease.task, 0))
    assert buffer.take(0) is not None
    buffer.commit(0)
    assert buffer.lease(0) is None
    lease = buffer.lease(1)
    assert lease is not None
    assert lease.min_version == 1


def test_a_batch_never_waits_for_a_straggler_while_enough_groups_are_complete() -> None:
    buffer = make_buffer(alpha=1)
    leases = lease_all(buffer, 0)
    for lease in leases[1:]:
        buffer.finish(lease.lease_id, trajectory(lease.task, 0))
    chosen = buffer.take(0)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [1, 2]


def test_the_groups_with_the_oldest_tokens_are_trained_first() -> None:
    buffer = make_buffer(alpha=2)
    leases = lease_all(buffer, 0)
    for lease in leases:
        version = 0 if lease.task.group_id in (3, 4) else 1
        buffer.finish(lease.lease_id, trajectory(lease.task, version))
    chosen = buffer.take(1)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [3, 4]


def test_tokens_older_than_the_contract_are_left_out_and_booked_as_stale() -> None:
    buffer = make_buffer(alpha=0, batch=2)
    for lease in lease_all(buffer, 0):
        mixed = msgspec.structs.replace(
            trajectory(lease.task, 1, tokens=5), versions=[VersionRun(0, 2), VersionRun(1, 3)]
        )
        buffer.finish(lease.lease_id, mixed)
    chosen = buffer.take(1)
    assert chosen is not None
    shard = deal(chosen, 1, 1, ranks=1)[0]
    assert shard.total_tokens == 6
    buffer.commit(1)
    assert buffer.ledger.trained_tokens == 6
    assert buffer.ledger.discarded_tokens == {Outcome.STALE: 4}


def test_a_wholly_stale_group_is_given_up_and_its_place_goes_to_a_fresh_one() -> None:
    buffer = make_buffer(alpha=0, batch=2, steps=1)
    for lease in lease_all(buffer, 0):
        buffer.finish(lease.lease_id, trajectory(lease.task, 0))
    assert buffer.take(3) is None
    assert buffer.ledger.given_up == {Outcome.STALE: 2}
    assert len(lease_all(buffer, 3)) == 2
    buffer.check()


def test_groups_move_up_when_an_earlier_one_is_lost_so_that_the_rest_of_a_group_is_never_stuck() -> None:
    buffer = make_buffer(alpha=0.25, retries=0)
    for lease in lease_all(buffer, 0):
        buffer.finish(lease.lease_id, Failure(lease.task, Outcome.ENV_ERROR, "x", 0))
    rest = buffer.lease(0)
    assert rest is not None
    assert (rest.task.group_id, rest.task.sample_index) == (2, 1)


def test_an_infrastructure_failure_is_retried_within_its_budget_and_then_given_up_without_a_reward() -> None:
    buffer = make_buffer(alpha=0, retries=1)
    first = buffer.lease(0)
    assert first is not None
    buffer.finish(first.lease_id, Failure(first.task, Outcome.ENV_ERROR, "boom", 2))
    again = buffer.lease(0)
    assert again is not None
    assert (again.task.task_id, again.task.attempt) == (first.task.task_id, 1)
    buffer.finish(again.lease_id, Failure(again.task, Outcome.ENV_ERROR, "boom", 2))
    assert buffer.ledger.given_up == {Outcome.ENV_ERROR: 1}
    assert buffer.ledger.retried == {Outcome.ENV_ERROR: 1}
    for lease in lease_all(buffer, 0):
        buffer.finish(lease.lease_id, trajectory(lease.task, 0))
    chosen = buffer.take(0)
    assert chosen is not None
    assert [len(group.trajectories()) for group in chosen] == [1, 2]


def test_a_run_that_only_fails_is_stopped_by_the_breaker_with_the_last_reason() -> None:
    buffer = make_buffer(retries=0, breaker=3)
    failures = [(lease, Failure(lease.task, Outcome.ENV_ERROR, "no such file", 0)) for lease in lease_all(buffer, 0)]
    for lease, failure in failures[:2]:
        buffer.finish(lease.lease_id, failure)
    with pytest.raises(BreakerError, match=r"3 samples in a row.*no such file"):
        buffer.finish(failures[2][0].lease_id, failures[2][1])


def test_a_result_of_a_revoked_lease_is_booked_but_not_trained_twice() -> None:
    buffer = make_buffer(alpha=0)
    lease = buffer.lease(0)
    assert lease is not None
    buffer.revoke(lease.lease_id)
    buffer.finish(lease.lease_id, trajectory(lease.task, 0))
    assert buffer.ledger.discarded_tokens == {Outcome.CANCELLED: 3}
    again = buffer.lease(0)
    assert again is not None
    assert again.task.task_id == lease.task.task_id
    buffer.check()


def test_committing_without_a_batch_is_a_broken_contract() -> None:
    with pytest.raises(ContractError):
        make_buffer().commit(0)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=2, max_size=24).filter(lambda x: len(x) % 2 == 0),
    ranks=st.integers(1, 4),
)
def test_dealing_gives_every_sample_to_one_rank_and_balances_tokens(lengths: list[int], ranks: int) -> None:
    buffer = make_buffer(alpha=0, batch=len(lengths))
    for lease, length in zip(lease_all(buffer, 0), lengths, strict=True):
        buffer.finish(lease.lease_id, trajectory(lease.task, 0, tokens=length))
    groups = buffer.take(0)
    assert groups is not None
    shards = deal(groups, 0, 0, ranks)
    assert sorted(sample.index for shard in shards for sample in shard.samples) == list(range(len(lengths)))
    loads = [sum(sample.trajectory.length for sample in shard.samples) for shard in shards]
    assert max(loads) - min(loads) <= max(lengths) + 2
    assert {shard.total_tokens for shard in shards} == {sum(lengths)}


class Conservation(RuleBasedStateMachine):
    """Random interleavings of everything that can happen to a sample, restarts included."""

    @initialize(
        alpha=st.sampled_from([0.0, 0.25, 1.0, 2.5]),
        batch=st.sampled_from([2, 4, 8]),
        retries=st.integers(0, 2),
    )
    def begin(self, alpha: float, batch: int, retries: int) -> None:
        self.settings = {"alpha": alpha, "batch": batch, "group": 2, "steps": 6, "retries": retries}
        self.buffer = make_buffer(**self.settings)
        self.alpha, self.batch = alpha, batch
        self.version = 0
        self.leases: list = []
        self.training = False

    @rule(behind=st.integers(0, 3))
    def lease(self, behind: int) -> None:
        engine = max(0, self.version - behind)
        lease = self.buffer.lease(engine)
        if lease is not None:
            assert lease.min_version <= engine
            self.leases.append((lease, engine))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 1000), newer=st.integers(0, 2))
    def finish(self, pick: int, newer: int) -> None:
        lease, engine = self.leases.pop(pick % len(self.leases))
        later = min(self.version, engine + newer)
        runs = [VersionRun(engine, 2)] + ([VersionRun(later, 1)] if later > engine else [])
        tokens = sum(run.count for run in runs)
        done = msgspec.structs.replace(trajectory(lease.task, engine, tokens), versions=runs)
        self.buffer.finish(lease.lease_id, done)

    @precondition(lambda self: self.leases)
    @rule(
        pick=st.integers(0, 1000),
        outcome=st.sampled_from([Outcome.ENV_ERROR, Outcome.ENGINE_ERROR, Outcome.CANCELLED, Outcome.REWARD_ERROR]),
    )
    def fail(self, pick: int, outcome: Outcome) -> None:
        lease, _ = self.leases.pop(pick % len(self.leases))
        self.buffer.finish(lease.lease_id, Failure(lease.task, outcome, "x", 1))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 1000))
    def revoke(self, pick: int) -> None:
        lease, _ = self.leases.pop(pick % len(self.leases))
        self.buffer.revoke(lease.lease_id)

    @precondition(lambda self: not self.training and self.version < 6)
    @rule()
    def take(self) -> None:
        groups = self.buffer.take(self.version)
        if groups is None:
            return
        self.training = True
        limit = math.ceil(self.version - self.alpha)
        for shard in deal(groups, self.version, limit, 2):
            for sample in shard.samples:
                kept = [run for run in sample.trajectory.versions if run.version >= shard.min_version]
                assert all(run.version >= self.version - self.alpha for run in kept)

    @precondition(lambda self: self.training)
    @rule()
    def commit(self) -> None:
        self.buffer.commit(self.version)
        self.version += 1
        self.training = False

    @precondition(lambda self: not self.training)
    @rule()
    def restart(self) -> None:
        stored = msgspec.msgpack.encode(self.buffer.snapshot())
        self.leases.clear()
        self.buffer = make_buffer(**self.settings, state=msgspec.msgpack.decode(stored, type=BufferState))

    @invariant()
    def law_2_conservation(self) -> None:
        self.buffer.check()

    @invariant()
    def law_3_admission(self) -> None:
        alive = self.buffer.in_flight
        # Outstanding groups hold at most (1 + α) batches' worth of places, rounded up to a whole group.
        assert alive <= (1 + self.alpha) * self.batch + 2

    @invariant()
    def something_can_always_happen(self) -> None:
        """No deadlock: work is out, or can be handed out to an engine of the current version, or a batch is ready."""
        if self.version >= 6 or self.training or self.leases:
            return
        stored = msgspec.msgpack.encode(self.buffer.snapshot())
        twin = make_buffer(**self.settings, state=msgspec.msgpack.decode(stored, type=BufferState))
        assert twin.lease(self.version) is not None or twin.take(self.version) is not None


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
