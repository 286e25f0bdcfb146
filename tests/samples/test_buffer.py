"""The sample buffer: admission, the ways a sample can end, redundancy, filtering, waves, expiry.

Unless a test says otherwise, `make_buffer` gives 10 steps of two groups of two samples (`batch` is their number) and
the asynchronous ratio `alpha` = 1. `trajectory` gives a sample of 3 tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.ages import window
from flash.config.tree import Config
from flash.errors import BreakerError, ContractError
from flash.samples.batches import gather, split_into_shards
from flash.samples.buffer import SampleBuffer
from flash.samples.groups import Group, GroupFilter
from flash.samples.rules import AgeContract
from flash.samples.store import BufferState
from flash.types import Failure, Lease, Outcome, VersionRun
from flash.waiting import run_to_end
from tests.samples.cases import finish_all, lease_all, make_buffer, trajectory, void


def fail(lease: Lease, outcome: Outcome = Outcome.ENV_ERROR, tokens: int = 0) -> Failure:
    """Return a failure of the task of a lease, for which this number of tokens was sampled."""
    return Failure(lease.task, outcome, "boom", tokens)


# -- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 4), (0.5, 6), (1.0, 8), (2.0, 12)])
def test_admission_at_version_zero_hands_out_one_plus_alpha_batches(alpha: float, expected: int) -> None:
    assert len(lease_all(make_buffer(alpha), 0)) == expected


def test_admission_never_exceeds_what_the_last_step_needs() -> None:
    assert len(lease_all(make_buffer(alpha=5, steps=2), 0)) == 8


def test_a_lease_goes_only_to_an_engine_whose_version_leaves_it_room() -> None:
    buffer = make_buffer(alpha=0)
    finish_all(buffer, lease_all(buffer, 0), 0)
    assert buffer.next_round(0) is not None
    buffer.commit(0)
    assert buffer.lease([0]) is None
    lease = buffer.lease([1])
    assert lease is not None
    assert lease.min_version == 1


def test_the_floor_of_a_lease_is_the_slowest_engine_of_the_node_that_admission_allows() -> None:
    buffer = make_buffer(alpha=1)
    finish_all(buffer, lease_all(buffer, 0), 0)
    buffer.next_round(0)
    buffer.commit(0)
    lease = buffer.lease([0, 2, 3])
    assert lease is not None
    assert lease.min_version == 2


def test_no_sample_starts_on_an_engine_whose_tokens_the_next_step_could_not_train() -> None:
    buffer = make_buffer(alpha=1, batch=2, retries=5)
    leases = lease_all(buffer, 0)
    finish_all(buffer, leases[:2], 0)
    buffer.next_round(0)
    buffer.commit(0)
    finish_all(buffer, lease_all(buffer, 1), 1)
    buffer.next_round(1)  # from here on the next step is 2, which trains versions 1 and 2
    buffer.deliver(leases[2].lease_id, fail(leases[2]))
    assert buffer.lease([0]) is None
    again = buffer.lease([0, 1])
    assert again is not None
    assert (again.task.task_id, again.min_version) == (leases[2].task.task_id, 1)


def failed_on_node_0(**options: Any) -> tuple[SampleBuffer, Lease]:
    """Return a buffer whose first task has failed on node 0, and the lease that it had there."""
    buffer = make_buffer(alpha=0, **options)
    first = buffer.lease([0], node=0, nodes={0, 1})
    assert first is not None
    buffer.deliver(first.lease_id, fail(first), node=0)
    return buffer, first


def test_a_failed_task_goes_to_another_node_as_long_as_there_is_one() -> None:
    buffer, first = failed_on_node_0()
    other = buffer.lease([0], node=0, nodes={0, 1})
    assert other is not None
    assert other.task.task_id != first.task.task_id
    elsewhere = buffer.lease([0], node=1, nodes={0, 1})
    assert elsewhere is not None
    assert elsewhere.task.task_id == first.task.task_id


def test_a_task_that_failed_everywhere_waits_for_no_node_when_only_one_is_left() -> None:
    buffer, first = failed_on_node_0()
    again = buffer.lease([0], node=0, nodes={0})
    assert again is not None
    assert again.task.task_id == first.task.task_id


@pytest.mark.parametrize("nodes", [{0, 1}, {0, 1, 2}])
def test_a_task_that_failed_on_every_node_goes_out_again(nodes: set[int]) -> None:
    buffer = make_buffer(alpha=0, retries=len(nodes))
    task = None
    for node in nodes:
        lease = buffer.lease([0], node=node, nodes=nodes)
        assert lease is not None
        task = task or lease.task.task_id
        assert lease.task.task_id == task
        buffer.deliver(lease.lease_id, fail(lease), node=node)
    again = buffer.lease([0], node=0, nodes=nodes)
    assert again is not None
    assert again.task.task_id == task


def test_an_avoided_task_at_the_head_of_the_queue_keeps_no_node_from_new_work() -> None:
    buffer, _ = failed_on_node_0(batch=4, group=1)
    assert [lease.task.group_id for lease in iter(lambda: buffer.lease([0], 0, nodes={0, 1}), None)] == [1, 2, 3]


def test_the_rest_of_a_group_can_be_leased_with_its_first_member() -> None:
    buffer = make_buffer(alpha=0, batch=8, group=4)
    first = buffer.lease([0])
    assert first is not None
    rest = buffer.lease_rest(first, [0])
    assert [lease.task.task_id for lease in rest] == [1, 2, 3]
    following = buffer.lease([0])
    assert following is not None
    assert following.task.group_id == 1


def test_a_group_that_stays_together_is_admitted_as_a_whole() -> None:
    buffer = make_buffer(alpha=0.75, batch=4, group=4, whole_groups=True)
    first = buffer.lease([0])
    assert first is not None
    assert len(buffer.lease_rest(first, [0])) == 3
    assert buffer.lease([0]) is None


def test_without_queue_scheduling_a_batch_starts_only_when_the_last_one_is_home() -> None:
    buffer = make_buffer(alpha=2, waves=True)
    wave = lease_all(buffer, 0)
    assert len(wave) == 4
    finish_all(buffer, wave[:3], 0)
    assert buffer.lease([0]) is None
    finish_all(buffer, wave[3:], 0)
    assert len(lease_all(buffer, 0)) == 4


# -- choice ----------------------------------------------------------------------------------------------------------


def test_a_batch_never_waits_for_a_straggler_while_enough_groups_are_complete() -> None:
    buffer = make_buffer(alpha=1)
    finish_all(buffer, lease_all(buffer, 0)[1:], 0)
    chosen = buffer.next_round(0)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [1, 2]


def test_with_a_window_of_one_batch_groups_are_trained_in_the_order_of_issue() -> None:
    buffer = make_buffer(alpha=1, fifo_window=1)
    leases = lease_all(buffer, 0)
    finish_all(buffer, leases[1:], 0)
    assert buffer.next_round(0) is None
    finish_all(buffer, leases[:1], 0)
    chosen = buffer.next_round(0)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [0, 1]


def test_the_groups_with_the_oldest_tokens_are_trained_first() -> None:
    buffer = make_buffer(alpha=2)
    for lease in lease_all(buffer, 0):
        version = 0 if lease.task.group_id in (3, 4) else 1
        buffer.deliver(lease.lease_id, trajectory(lease.task, version))
    chosen = buffer.next_round(1)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [3, 4]


# -- expiry ----------------------------------------------------------------------------------------------------------


def test_mask_tokens_older_than_the_contract_are_left_out_and_booked_as_stale() -> None:
    buffer = make_buffer(alpha=0, batch=2, step=1)
    for lease in lease_all(buffer, 1)[:2]:
        mixed = [VersionRun(0, 2), VersionRun(1, 3)]
        buffer.deliver(lease.lease_id, trajectory(lease.task, 1, 5, versions=mixed))
    chosen = buffer.next_round(1)
    assert chosen is not None
    shard = run_to_end(split_into_shards(gather(chosen, 1, 1), shards=1))[0]
    assert shard.total_tokens == 6
    buffer.commit(1)
    assert buffer.samples.ledger.trained_tokens == 6
    assert buffer.samples.ledger.discarded_tokens == {Outcome.STALE: 4}


def test_mask_a_wholly_stale_group_is_given_up_and_its_place_goes_to_a_fresh_one() -> None:
    buffer = make_buffer(alpha=0, batch=2, steps=2, extra_groups=1)
    finish_all(buffer, lease_all(buffer, 0), 0)
    assert buffer.next_round(0) is not None
    assert buffer.samples.ledger.given_up == {Outcome.STALE: 2}
    buffer.commit(0)
    assert len(lease_all(buffer, 1)) == 4
    buffer.samples.check()


def test_requeue_what_outgrows_the_window_is_withdrawn_and_starts_again_in_its_place() -> None:
    buffer = make_buffer(alpha=1, batch=4, group=2, on_expire="requeue", steps=20)
    old = lease_all(buffer, 0)
    finish_all(buffer, old[:5], 0)  # groups 0 and 1, and the first member of group 2
    buffer.next_round(0)
    buffer.commit(0)
    finish_all(buffer, lease_all(buffer, 1), 1)
    chosen = buffer.next_round(1)  # step 2 will train no token of version 0: group 2 and 3 have outgrown the window
    assert chosen is not None
    assert [group.group_id for group in chosen] == [4, 5]
    assert buffer.samples.leases.to_cancel == [lease.lease_id for lease in old[5:]]
    assert buffer.samples.ledger.retried == {Outcome.STALE: 4}
    assert buffer.samples.ledger.discarded_tokens == {Outcome.STALE: 3}
    buffer.deliver(old[5].lease_id, fail(old[5], Outcome.CANCELLED, tokens=7))
    assert buffer.samples.ledger.discarded_tokens == {Outcome.STALE: 10}
    again = lease_all(buffer, 1)
    assert [lease.task.task_id for lease in again[:4]] == [4, 5, 6, 7]
    assert {lease.min_version for lease in again} == {1}
    buffer.commit(1)


def test_mask_lets_the_same_samples_go_on() -> None:
    buffer = make_buffer(alpha=1, batch=4, group=2, on_expire="mask", steps=20)
    finish_all(buffer, lease_all(buffer, 0)[:5], 0)
    buffer.next_round(0)
    buffer.commit(0)
    finish_all(buffer, lease_all(buffer, 1), 1)
    assert buffer.next_round(1) is not None
    assert buffer.samples.leases.to_cancel == []


def test_wait_holds_a_step_back_until_no_straggler_would_outgrow_the_window() -> None:
    buffer = make_buffer(alpha=1, batch=2, group=1, on_expire="wait")
    old = lease_all(buffer, 0)  # 4 samples, all to be trained by steps 0 and 1
    finish_all(buffer, old[:2], 0)
    assert buffer.next_round(0) is not None
    buffer.commit(0)
    finish_all(buffer, lease_all(buffer, 1), 1)
    assert buffer.samples.pool.ready_groups == 2
    assert buffer.next_round(1) is None
    finish_all(buffer, old[2:], 0)
    chosen = buffer.next_round(1)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [2, 3]


def test_mask_does_not_hold_the_same_step_back() -> None:
    buffer = make_buffer(alpha=1, batch=2, group=1, on_expire="mask")
    old = lease_all(buffer, 0)
    finish_all(buffer, old[:2], 0)
    buffer.next_round(0)
    buffer.commit(0)
    finish_all(buffer, lease_all(buffer, 1), 1)
    assert buffer.next_round(1) is not None


@pytest.mark.parametrize(
    ("alpha", "bound", "limit"), [(0, None, 0), (0.5, None, 4), (2, None, 8), (2, 2, 2), (1, 9, 9)]
)
def test_a_run_trains_tokens_of_up_to_four_windows_and_begins_samples_as_with_a_limit_of_one(
    alpha: float, bound: int | None, limit: int
) -> None:
    train = {"async_ratio": alpha, "max_token_age": bound, "batch_size": 4}
    tables = {"run": {"name": "r", "steps": 20}, "model": {"path": "m"}, "env": {"path": "m:E"}}
    config = msgspec.convert({**tables, "train": train, "rollout": {"group_size": 2}}, Config)
    contract = AgeContract.of(config)
    assert contract.max_age == config.train.max_age == limit
    assert contract.min_token_version(10) == 10 - limit
    strict = msgspec.structs.replace(contract, max_token_age=window(alpha))
    assert contract.window_start(10) == strict.window_start(10) == 10 - window(alpha)
    starts = [contract.min_engine_version(place, index) for place in range(20) for index in range(2)]
    assert starts == [strict.min_engine_version(place, index) for place in range(20) for index in range(2)]


def test_a_contract_that_an_earlier_version_recorded_without_a_limit_keeps_the_limit_of_then() -> None:
    recorded = {"async_ratio": 1.5, "batch_size": 4, "group_size": 2, "steps": 9}
    assert msgspec.convert(recorded, AgeContract).max_age == 2
    assert msgspec.convert(recorded | {"max_token_age": None}, AgeContract).max_age == 2


def test_requeue_starts_no_sample_again_whose_tokens_can_still_be_trained() -> None:
    buffer = make_buffer(alpha=1, batch=2, group=1, on_expire="requeue", steps=20, max_token_age=4)
    old = lease_all(buffer, 0)
    finish_all(buffer, old[:2], 0)
    for step in range(4):
        assert buffer.next_round(step) is not None
        assert buffer.samples.leases.to_cancel == []
        buffer.commit(step)
        finish_all(buffer, lease_all(buffer, step + 1)[:2], step + 1)
    assert buffer.next_round(4) is not None  # step 5 will train no token of version 0
    assert buffer.samples.leases.to_cancel == [lease.lease_id for lease in old[2:]]
    assert buffer.samples.ledger.retried == {Outcome.STALE: 2}


def test_wait_holds_steps_back_for_a_straggler_only_at_the_age_limit() -> None:
    buffer = make_buffer(alpha=1, batch=2, group=1, on_expire="wait", steps=20, max_token_age=4)
    old = lease_all(buffer, 0)
    finish_all(buffer, old[:3], 0)
    for step in range(4):
        assert buffer.next_round(step) is not None
        buffer.commit(step)
        finish_all(buffer, lease_all(buffer, step + 1), step + 1)
    assert buffer.next_round(4) is None
    finish_all(buffer, old[3:], 0)
    chosen = buffer.next_round(4)
    assert chosen is not None
    assert chosen[0].group_id == 3


# -- failures --------------------------------------------------------------------------------------------------------


def test_groups_move_up_when_an_earlier_one_is_lost_so_that_the_rest_of_a_group_is_never_stuck() -> None:
    buffer = make_buffer(alpha=0.25, retries=0)
    for lease in lease_all(buffer, 0):
        buffer.deliver(lease.lease_id, fail(lease))
    rest = buffer.lease([0])
    assert rest is not None
    assert (rest.task.group_id, rest.task.sample_index) == (2, 1)


def test_a_group_whose_prompt_is_too_long_is_given_up_at_once_and_as_a_whole() -> None:
    buffer = make_buffer(alpha=0, retries=3)
    first = buffer.lease([0])
    second = buffer.lease([0])
    assert first is not None
    assert second is not None
    assert first.task.group_id == second.task.group_id
    buffer.deliver(first.lease_id, fail(first, Outcome.TOO_LONG))
    buffer.deliver(second.lease_id, fail(second, Outcome.TOO_LONG))  # it was on its way, too
    assert buffer.samples.ledger.retried == {}
    assert set(buffer.samples.ledger.given_up) == {Outcome.TOO_LONG}
    assert first.task.group_id not in buffer.samples.pool
    finish_all(buffer, lease_all(buffer, 0), 0)
    assert buffer.next_round(0) is not None, "another group comes in its place"


def test_an_infrastructure_failure_is_retried_within_its_budget_and_then_given_up_without_a_reward() -> None:
    buffer = make_buffer(alpha=0, retries=1)
    first = buffer.lease([0])
    assert first is not None
    buffer.deliver(first.lease_id, fail(first, tokens=2))
    again = buffer.lease([0])
    assert again is not None
    assert (again.task.task_id, again.task.attempt) == (first.task.task_id, 1)
    buffer.deliver(again.lease_id, fail(again, tokens=2))
    assert buffer.samples.ledger.given_up == {Outcome.ENV_ERROR: 1}
    assert buffer.samples.ledger.retried == {Outcome.ENV_ERROR: 1}
    finish_all(buffer, lease_all(buffer, 0), 0)
    chosen = buffer.next_round(0)
    assert chosen is not None
    assert [len(group.trajectories()) for group in chosen] == [1, 2]


def test_a_run_that_only_fails_is_stopped_by_the_breaker_with_the_last_reason() -> None:
    buffer = make_buffer(retries=0, breaker=3)
    leases = lease_all(buffer, 0)
    for lease in leases[:2]:
        buffer.deliver(lease.lease_id, fail(lease))
    with pytest.raises(BreakerError, match=r"3 samples in a row.*boom"):
        buffer.deliver(leases[2].lease_id, fail(leases[2]))


def test_a_result_of_a_revoked_lease_is_booked_but_not_trained_twice() -> None:
    buffer = make_buffer(alpha=0)
    lease = buffer.lease([0])
    assert lease is not None
    buffer.revoke([lease.lease_id])
    buffer.deliver(lease.lease_id, trajectory(lease.task, 0))
    assert buffer.samples.ledger.discarded_tokens == {Outcome.CANCELLED: 3}
    again = buffer.lease([0])
    assert again is not None
    assert again.task.task_id == lease.task.task_id
    buffer.samples.check()


def test_a_kind_of_environment_that_keeps_failing_goes_into_quarantine_and_the_others_go_on() -> None:
    kinds = lambda seed: "bad" if seed % 2 else "good"  # noqa: E731
    buffer = make_buffer(alpha=0, batch=8, retries=0, quarantine=2, breaker=4, kind_of=kinds)
    for lease in lease_all(buffer, 0):
        if lease.task.kind == "bad":
            buffer.deliver(lease.lease_id, fail(lease))
        else:
            buffer.deliver(lease.lease_id, trajectory(lease.task, 0))
    first, second = buffer.samples.notes
    assert first == "the first sample that failed (env_error): boom"
    assert "'bad' are in quarantine: 2 of their samples" in second
    fresh = lease_all(buffer, 0)
    assert {lease.task.kind for lease in fresh} == {"good"}
    finish_all(buffer, fresh, 0)
    assert buffer.next_round(0) is not None
    buffer.commit(0)
    assert buffer.samples.ledger.given_up == {Outcome.ENV_ERROR: 4}


def test_when_every_kind_is_in_quarantine_the_run_stops_and_names_them() -> None:
    buffer = make_buffer(alpha=0, batch=4, retries=0, quarantine=2, kind_of=lambda seed: "ab"[seed % 2])

    def only_fail() -> None:
        while True:
            for lease in lease_all(buffer, 0):
                buffer.deliver(lease.lease_id, fail(lease))

    with pytest.raises(BreakerError, match=r"every kind of environment keeps failing \(a, b\)"):
        only_fail()


def test_a_run_that_is_resumed_tries_what_was_in_quarantine_again() -> None:
    options: dict[str, Any] = {"alpha": 0, "batch": 4, "retries": 0, "quarantine": 2}
    options["kind_of"] = lambda seed: "ab"[seed % 2]
    buffer = make_buffer(**options)

    def only_fail() -> None:
        while True:
            for lease in lease_all(buffer, 0):
                buffer.deliver(lease.lease_id, fail(lease))

    with pytest.raises(BreakerError, match="--resume tries all kinds again"):
        only_fail()
    while buffer.do_slice():
        pass
    again = resumed(buffer, 0, **options)
    assert "in quarantine and are tried again: 'a', 'b'" in again.samples.notes[0]
    finish_all(again, lease_all(again, 0), 0)
    assert again.next_round(0) is not None
    again.commit(0)


@pytest.mark.parametrize("on_expire", ["mask", "requeue", "wait"])
def test_no_group_is_of_two_sets_of_problems(on_expire: str) -> None:
    """Make groups 0 to 3: complete, partly done, leased, not begun."""
    options: dict[str, Any] = {"alpha": 3, "batch": 4, "group": 4, "on_expire": on_expire}
    buffer = make_buffer(**options, problems="old")
    finish_all(buffer, lease_all(buffer, 0)[:7], 0)
    same = resumed(buffer, 0, **options, problems="old")
    assert {lease.task.group_id for lease in lease_all(same, 0)} == {1, 2, 3}
    again = resumed(buffer, 0, **options, problems="new")
    assert "no more samples are started in the 4 groups" in again.samples.notes[-1]
    assert {lease.task.group_id for lease in lease_all(again, 0)} == {4, 5}
    sizes = [len(group.trajectories()) for step in range(2) for group in gathered(again, step)]
    assert sizes == [4, 3]
    again.samples.check()


def gathered(buffer: SampleBuffer, step: int) -> list[Group]:
    """Train a step whose batch can be formed, and return its groups."""
    groups = buffer.next_round(step)
    assert groups is not None
    buffer.commit(step)
    return groups


def test_whole_answers_of_a_former_set_of_problems_leave_when_they_are_too_old() -> None:
    options: dict[str, Any] = {"alpha": 1, "batch": 4, "group": 4, "on_expire": "requeue"}
    buffer = make_buffer(**options, problems="old")
    finish_all(buffer, lease_all(buffer, 0), 0)
    again = resumed(buffer, 0, **options, problems="new")
    again = resumed(again, 0, **options | {"alpha": 0}, problems="new")
    gathered(again, 0)
    assert {lease.task.group_id for lease in lease_all(again, 1)} == {2}
    assert again.samples.ledger.given_up == {Outcome.STALE: 4}
    again.samples.check()


# -- redundancy and filtering ----------------------------------------------------------------------------------------


def test_the_first_finishers_of_a_group_win_and_the_others_are_withdrawn_at_once() -> None:
    buffer = make_buffer(alpha=0, batch=2, group=2, extra_per_group=2)
    leases = lease_all(buffer, 0)
    assert len(leases) == 4
    finish_all(buffer, [leases[3], leases[1]], 0)
    assert buffer.samples.leases.to_cancel == [leases[0].lease_id, leases[2].lease_id]
    chosen = buffer.next_round(0)
    assert chosen is not None
    assert [t.task.sample_index for t in chosen[0].trajectories()] == [1, 3]
    buffer.deliver(leases[0].lease_id, fail(leases[0], Outcome.CANCELLED, tokens=5))
    buffer.commit(0)
    assert buffer.samples.ledger.given_up == {Outcome.CANCELLED: 2}
    assert buffer.samples.ledger.discarded_tokens == {Outcome.CANCELLED: 5}


def test_a_redundant_member_that_was_not_started_yet_never_is() -> None:
    buffer = make_buffer(alpha=0, batch=2, group=2, extra_per_group=1)
    first, second = buffer.lease([0]), buffer.lease([0])
    assert first is not None
    assert second is not None
    finish_all(buffer, [first, second], 0)
    assert buffer.lease([0]) is None
    assert buffer.samples.ledger.given_up == {Outcome.CANCELLED: 1}


def test_redundant_groups_are_started_on_top_and_the_last_one_home_is_cancelled_when_its_step_is_taken() -> None:
    buffer = make_buffer(alpha=0, batch=4, group=2, extra_groups=1)
    leases = lease_all(buffer, 0)
    assert len(leases) == 6
    finish_all(buffer, leases[1:], 0)
    assert buffer.next_round(0) is not None
    assert buffer.samples.leases.to_cancel == [leases[0].lease_id]
    buffer.deliver(leases[0].lease_id, fail(leases[0], Outcome.CANCELLED, tokens=9))
    buffer.commit(0)
    assert buffer.samples.ledger.given_up == {Outcome.CANCELLED: 2}
    assert buffer.samples.ledger.discarded_tokens == {Outcome.CANCELLED: 12}
    assert len(lease_all(buffer, 1)) == 6


@pytest.mark.parametrize("bound", [1, 4])
def test_no_more_groups_are_cancelled_for_their_age_than_are_redundant(bound: int) -> None:
    buffer = make_buffer(alpha=1, batch=2, group=1, extra_groups=1, steps=20, max_token_age=bound)
    old = lease_all(buffer, 0)
    assert len(old) == 5
    finish_all(buffer, old[:2], 0)
    for step in range(bound):
        assert buffer.next_round(step) is not None
        assert buffer.samples.leases.to_cancel == []
        buffer.commit(step)
        finish_all(buffer, lease_all(buffer, step + 1), step + 1)
    buffer.next_round(bound)  # three samples of version 0 still run, and the next step trains none of it
    assert buffer.samples.leases.to_cancel == [old[2].lease_id]


def test_the_end_of_the_run_books_what_redundancy_left_over() -> None:
    buffer = make_buffer(alpha=0, batch=2, group=2, extra_groups=1, steps=1)
    leases = lease_all(buffer, 0)
    finish_all(buffer, leases[:3], 0)
    buffer.next_round(0)
    buffer.commit(0)
    buffer.close()
    assert buffer.samples.in_flight == 0
    assert buffer.samples.ledger.issued == buffer.samples.ledger.trained + sum(buffer.samples.ledger.given_up.values())
    buffer.samples.check()


def test_groups_without_an_advantage_are_filtered_out_and_replaced() -> None:
    buffer = make_buffer(alpha=0, filter=GroupFilter(drop_equal_rewards=True))
    leases = lease_all(buffer, 0)
    for i, lease in enumerate(leases):
        buffer.deliver(lease.lease_id, trajectory(lease.task, 0, reward=float(i % 2 and lease.task.group_id == 0)))
    assert buffer.samples.pool.ready_groups == 1
    assert buffer.samples.ledger.filtered == 2
    assert buffer.samples.ledger.discarded_tokens == {Outcome.FILTERED: 6}
    assert [lease.task.group_id for lease in lease_all(buffer, 0)] == [2, 2]
    buffer.samples.check()


def test_groups_whose_rewards_differ_by_rounding_are_filtered_out() -> None:
    buffer = make_buffer(alpha=0, batch=2, filter=GroupFilter(drop_equal_rewards=True))
    for reward, lease in zip((0.1 + 0.2, 0.3), lease_all(buffer, 0), strict=True):
        buffer.deliver(lease.lease_id, trajectory(lease.task, 0, reward=reward))
    assert buffer.samples.ledger.filtered == 2


@pytest.mark.parametrize(("bounds", "kept"), [((0.0, 1.0), 1), ((0.5, 0.5), 1), ((0.6, 1.0), 0), ((0.0, 0.4), 0)])
def test_accuracy_bounds_keep_groups_whose_mean_reward_lies_within(bounds: tuple[float, float], kept: int) -> None:
    buffer = make_buffer(alpha=0, batch=2, filter=GroupFilter(accuracy_bounds=bounds))
    for reward, lease in enumerate(lease_all(buffer, 0)):
        buffer.deliver(lease.lease_id, trajectory(lease.task, 0, reward=float(reward)))
    assert buffer.samples.pool.ready_groups == kept


def test_a_run_whose_groups_are_all_filtered_out_is_stopped() -> None:
    buffer = make_buffer(alpha=0, filter=GroupFilter(drop_equal_rewards=True))

    def all_alike() -> None:
        while True:
            finish_all(buffer, lease_all(buffer, 0), 0)

    with pytest.raises(BreakerError, match=r"groups in a row were filtered out"):
        all_alike()


def test_committing_without_a_batch_is_a_broken_contract() -> None:
    with pytest.raises(ContractError):
        make_buffer().commit(0)


def test_a_restart_keeps_finished_work_and_queues_the_rest_in_order() -> None:
    buffer = make_buffer(alpha=1, extra_per_group=1)
    leases = lease_all(buffer, 0)
    finish_all(buffer, leases[4:6], 0)
    stored = msgspec.msgpack.encode(buffer.samples.snapshot())
    again = make_buffer(alpha=1, extra_per_group=1, state=msgspec.msgpack.decode(stored, type=BufferState))
    assert again.samples.pool.ready_groups == buffer.samples.pool.ready_groups
    assert again.samples.in_flight == buffer.samples.in_flight
    order = [lease.task.task_id for lease in lease_all(again, 0)]
    assert order == sorted(order)
    again.samples.check()


def resumed(buffer: SampleBuffer, step: int, **options: Any) -> SampleBuffer:
    """Resume the run with other options. Tasks that were leased are queued again."""
    stored = msgspec.msgpack.encode(buffer.samples.snapshot())
    return void(make_buffer(**options, step=step, state=msgspec.msgpack.decode(stored, type=BufferState)))


def test_under_a_lower_ratio_a_step_waits_for_no_sample_that_may_only_go_out_after_it() -> None:
    options: dict[str, Any] = {"batch": 2, "group": 2, "on_expire": "wait"}
    buffer = make_buffer(alpha=2, **options)
    finish_all(buffer, lease_all(buffer, 0)[:5], 0)
    again = resumed(buffer, 0, alpha=1, **options)
    assert (again.samples.pool.ready_groups, again.samples.leases.out, lease_all(again, 0)) == (2, {}, [])
    for step in range(2):
        finish_all(again, lease_all(again, step), step)
        assert again.next_round(step) is not None
        again.commit(step)
    assert len(lease_all(again, 2)) > 0


@pytest.mark.parametrize("on_expire", ["mask", "requeue", "wait"])
def test_under_a_lower_ratio_what_is_too_old_for_the_first_step_makes_room_for_what_is_not(on_expire: str) -> None:
    options: dict[str, Any] = {"batch": 2, "group": 2, "on_expire": on_expire}
    buffer = make_buffer(alpha=2, **options)
    finish_all(buffer, lease_all(buffer, 0), 0)
    buffer.next_round(0)
    buffer.commit(0)
    again = resumed(buffer, 1, alpha=0, **options)
    assert again.next_round(1) is None
    assert again.samples.ledger.discarded_tokens == {Outcome.STALE: 12}
    finish_all(again, lease_all(again, 1), 1)
    chosen = again.next_round(1)
    assert chosen is not None
    assert [group.trained_tokens(1) for group in chosen] == [6]
    again.samples.check()


@pytest.mark.parametrize(("bound", "trained"), [(3, 9), (2, 5), (None, 2)])
def test_resumed_under_another_bound_of_tokens_the_next_step_trains_by_that(bound: int | None, trained: int) -> None:
    options: dict[str, Any] = {"alpha": 1, "batch": 1, "group": 1}
    buffer = make_buffer(**options, max_token_age=3)
    first, second = lease_all(buffer, 0)
    finish_all(buffer, [first], 0)
    for step in range(3):
        assert buffer.next_round(step) is not None
        buffer.commit(step)
        finish_all(buffer, lease_all(buffer, step + 1)[:1], step + 1)
    runs = [VersionRun(0, 4), VersionRun(1, 3), VersionRun(2, 2)]
    buffer.deliver(second.lease_id, trajectory(second.task, 0, 9, versions=runs))
    again = resumed(buffer, 3, **options, max_token_age=bound)
    assert again.next_round(3) is not None
    (group,) = again.samples.batches.training.values()
    before = again.samples.ledger.trained_tokens
    again.commit(3)
    assert (group.group_id, again.samples.ledger.trained_tokens - before) == (1, trained)
    again.samples.check()


@pytest.mark.parametrize(
    ("before", "bound", "told"), [(None, 4, ["4 versions, and before it was 1 "]), (4, 4, []), (4, 2, ["2 versions"])]
)
def test_a_resumed_run_tells_that_its_age_limit_has_changed(before: int | None, bound: int, told: list[str]) -> None:
    buffer = make_buffer(alpha=1, max_token_age=before)
    again = resumed(buffer, 0, alpha=1, max_token_age=bound)
    assert len(again.samples.notes) == len(told)
    for note, limit in zip(again.samples.notes, told, strict=True):
        assert note.startswith(f"from step 0 on, the largest age of a trained token is {limit}")


def test_members_that_had_no_place_at_their_last_chance_are_not_trained_without_a_recent_token() -> None:
    buffer = make_buffer(alpha=2, batch=8, group=4)
    finish_all(buffer, lease_all(buffer, 0)[:-1], 0)
    buffer.next_round(0)
    buffer.commit(0)
    again = resumed(buffer, 1, alpha=1, batch=8, group=4)
    for step in range(1, 3):
        leases = [lease for lease in lease_all(again, step) if lease.task.group_id != 5]
        finish_all(again, leases, step)
        chosen = again.next_round(step)
        assert chosen is not None
        assert all(group.trained_tokens(step - 1) > 0 for group in chosen)
        again.commit(step)


@pytest.mark.parametrize("on_expire", ["mask", "requeue"])
def test_a_group_that_comes_home_without_a_recent_token_leaves(on_expire: str) -> None:
    buffer = make_buffer(alpha=1, batch=2, on_expire=on_expire, extra_groups=2)
    old = lease_all(buffer, 0)
    for step in range(2):
        finish_all(buffer, [lease for lease in old if lease.task.group_id == step], 0)
        assert buffer.next_round(step) is not None
        buffer.commit(step)
    late = [lease for lease in old if lease.task.group_id > 1]
    finish_all(buffer, late, 0)
    assert buffer.samples.pool.ready_groups == 0
    assert buffer.next_round(2) is None
    finish_all(buffer, lease_all(buffer, 2), 2)
    groups = buffer.next_round(2)
    assert groups is not None
    assert all(group.trained_tokens(1) for group in groups)
    buffer.samples.check()


def test_a_late_part_of_a_group_without_a_recent_token_leaves() -> None:
    buffer, late = with_a_straggler()
    assert buffer.next_round(1) is not None
    buffer.commit(1)
    finish_all(buffer, lease_all(buffer, 2), 2)
    buffer.deliver(late.lease_id, trajectory(late.task, 0, 6))
    groups = buffer.next_round(2)
    assert groups is not None
    assert [group.group_id for group in groups] == [4, 5]
    assert buffer.samples.ledger.given_up == {Outcome.STALE: 1}
    buffer.samples.check()


@given(
    lengths=st.lists(st.integers(1, 50), min_size=2, max_size=24).filter(lambda x: len(x) % 2 == 0),
    ranks=st.integers(1, 4),
)
def test_dealing_gives_every_sample_to_one_rank_and_balances_tokens(lengths: list[int], ranks: int) -> None:
    buffer = make_buffer(alpha=0, batch=len(lengths))
    for index, (lease, length) in enumerate(zip(lease_all(buffer, 0), lengths, strict=True)):
        # Nothing in common, which would be computed once.
        token_ids = np.arange(100 * index, 100 * index + length + 2, dtype="<i4").tobytes()
        made = msgspec.structs.replace(trajectory(lease.task, 0, tokens=length), token_ids=token_ids)
        buffer.deliver(lease.lease_id, made)
    groups = buffer.next_round(0)
    assert groups is not None
    shards = run_to_end(split_into_shards(gather(groups, 0, 0), ranks))
    assert sorted(sample.index for shard in shards for sample in shard.samples) == list(range(len(lengths)))
    loads = [sum(sample.trajectory.length for sample in shard.samples) for shard in shards]
    # The rank with most is what the others wait for.
    assert max(loads) <= sum(loads) / ranks + max(lengths) + 2
    assert {shard.total_tokens for shard in shards} == {sum(lengths)}


# -- groups trained in parts -----------------------------------------------------------------------------------------


def with_a_straggler(**rules: Any) -> tuple[SampleBuffer, Lease]:
    """Make a buffer with two groups of four per step at α = 1. At step 1, one member of the second one is late."""
    buffer = make_buffer(alpha=1, batch=8, group=4, steps=20, **rules)
    old = lease_all(buffer, 0)
    finish_all(buffer, [lease for lease in old if lease.task.group_id != 1][:8], 0)
    finish_all(buffer, [lease for lease in old if lease.task.group_id == 1][:3], 0, reward=0.5)
    chosen = buffer.next_round(0)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [0, 2]
    buffer.commit(0)
    finish_all(buffer, [lease for lease in old if lease.task.group_id == 3], 0)
    return buffer, next(lease for lease in old if lease.task.task_id == 7)


@pytest.mark.parametrize(("bound", "stale"), [(None, {Outcome.STALE: 4}), (2, {})])
def test_members_at_their_last_chance_are_trained_without_the_straggler_of_their_group(
    bound: int | None, stale: dict[Outcome, int]
) -> None:
    """The late member keeps its first tokens with a larger `max_token_age`, and no step waits for it."""
    buffer, late = with_a_straggler(max_token_age=bound)
    chosen = buffer.next_round(1)
    assert chosen is not None
    assert [(group.group_id, len(group.trajectories())) for group in chosen] == [(1, 3), (3, 4)]
    buffer.commit(1)
    assert buffer.samples.ledger.trained == 8 + 7
    finish_all(buffer, lease_all(buffer, 2), 2)
    mixed = [VersionRun(0, 4), VersionRun(2, 2)]
    buffer.deliver(late.lease_id, trajectory(late.task, 2, 6, reward=1.0, versions=mixed))
    later = buffer.next_round(2)
    assert later is not None
    assert [group.group_id for group in later] == [4, 5, 1], "it comes on top of the step's own groups"
    shard = run_to_end(split_into_shards(gather(later, 2, 2 - (bound or 1)), shards=1))[0]
    assert [entry.reward for entry in shard.batch if entry.group_id == 1] == [1.0]
    assert [(entry.group_id, entry.reward) for entry in shard.earlier] == [(1, 0.5), (1, 0.5), (1, 0.5)]
    assert len(shard.samples) == 9
    buffer.commit(2)
    assert buffer.samples.ledger.discarded_tokens == stale
    assert buffer.samples.ledger.trained == 15 + 9


@pytest.mark.parametrize("home", [1, 2])
def test_who_completes_a_group_that_is_chosen_already_beats_the_others_of_it(home: int) -> None:
    options: dict[str, Any] = {"extra_per_group": 1, "at_once": 1}
    buffer = make_buffer(alpha=1, batch=32, group=8, steps=20, **options)
    old = lease_all(buffer, 0)
    finish_all(buffer, [lease for lease in old if lease.task.group_id < 4], 0)
    late = [lease for lease in old if lease.task.group_id == 7]
    finish_all(buffer, late[:7], 0)
    while buffer.next_round(0) is None:
        buffer.do_slice()
    buffer.commit(0)
    finish_all(buffer, [lease for lease in old if 4 <= lease.task.group_id < 7], 0)
    while buffer.do_slice():
        pass
    assert buffer.next_round(1) is None, "what was chosen is being gathered"
    finish_all(buffer, late[7 : 7 + home], 0)
    while (groups := buffer.next_round(1)) is None:
        buffer.do_slice()
    assert [(group.group_id, len(group.trajectories())) for group in groups] == [(4, 8), (5, 8), (6, 8), (7, 8)]
    while buffer.do_slice():
        pass
    finish_all(buffer, late[7 + home :], 0)
    buffer.commit(1)
    while buffer.do_slice():
        pass
    buffer.samples.check()


def test_a_straggler_of_a_trained_group_that_fails_for_good_takes_no_place_with_it() -> None:
    buffer, late = with_a_straggler(retries=0)
    buffer.next_round(1)
    buffer.commit(1)
    before = len(lease_all(buffer, 2))
    buffer.deliver(late.lease_id, fail(late))
    assert buffer.lease([2]) is None
    assert before == 16
    assert buffer.samples.ledger.given_up == {Outcome.ENV_ERROR: 1}


def test_synchronous_training_never_splits_a_group() -> None:
    buffer = make_buffer(alpha=0, batch=8, group=4)
    finish_all(buffer, lease_all(buffer, 0)[1:], 0)
    assert buffer.next_round(0) is None


def test_a_group_of_which_too_much_is_missing_waits() -> None:
    buffer, late = with_a_straggler()
    buffer.revoke([late.lease_id])
    two_of_four = make_buffer(alpha=1, batch=4, group=4, steps=20)
    old = lease_all(two_of_four, 0)
    finish_all(two_of_four, [*old[:2], *old[4:]], 0)
    assert two_of_four.next_round(0) is not None
    two_of_four.commit(0)
    assert two_of_four.next_round(1) is None


def test_law_2_tokens_that_a_sample_lost_on_its_way_are_booked_as_generated_and_discarded() -> None:
    buffer = make_buffer(alpha=0, batch=2, group=2)
    leases = lease_all(buffer, 0)
    for lease in leases:
        buffer.deliver(lease.lease_id, msgspec.structs.replace(trajectory(lease.task, 0, tokens=3), lost_tokens=4))
    late = trajectory(leases[0].task, 0, tokens=2)
    buffer.deliver(99, msgspec.structs.replace(late, lost_tokens=1))
    buffer.samples.check()
    assert buffer.samples.ledger.generated_tokens == 2 * (3 + 4) + 3
    assert buffer.samples.ledger.discarded_tokens == {Outcome.CANCELLED: 2 * 4 + 3}
