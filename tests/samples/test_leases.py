"""Leases and the queue of waiting tasks, which training and evaluation share."""

from __future__ import annotations

from itertools import count

import pytest

from flash.samples.groups import Member
from flash.samples.tasks import LeaseTable, by_attempt, by_issue
from flash.types import RETRIED, Outcome, Task
from tests.samples.cases import in_order


def members(number: int) -> list[Member]:
    """Return this number of tasks, each the only one of its group."""
    return [Member(Task(index, index, 0, index)) for index in range(number)]


def waiting(table: LeaseTable) -> list[int]:
    """Return the numbers of the waiting tasks, in the order in which they would be leased."""
    return [member.task.task_id for member in in_order(table.queue)]


def table_of(tasks: list[Member], *, evaluation: bool = False) -> LeaseTable:
    """Return a table in which these tasks wait, in the order of training or of an evaluation."""
    table = LeaseTable(count(), retries=1, key_of=by_attempt if evaluation else by_issue)
    for member in tasks:
        table.put(member)
    return table


@pytest.mark.parametrize(("evaluation", "order"), [(False, [0, 1, 2]), (True, [1, 2, 0])])
def test_a_task_that_failed_waits_at_its_place_in_training_and_last_in_evaluation(
    evaluation: bool, order: list[int]
) -> None:
    first, *_ = tasks = members(3)
    table = table_of(tasks, evaluation=evaluation)
    lease = table.grant(first, 0, number=3)
    assert table.out.pop(lease.lease_id) is first
    assert table.retry(first, Outcome.ENV_ERROR, node=5)
    assert (waiting(table), first.task.attempt, first.avoid) == (order, 1, (5,))
    table.grant(first, 0, number=4)
    assert not table.retry(first, Outcome.ENV_ERROR, node=5)


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - RETRIED - {Outcome.CANCELLED}))
def test_only_what_the_infrastructure_failed_is_tried_again(outcome: Outcome) -> None:
    (first,) = tasks = members(1)
    table = table_of(tasks)
    table.grant(first, 0, number=3)
    del table.out[3]
    assert not table.retry(first, outcome, node=0)
    assert waiting(table) == []


def test_a_withdrawn_lease_is_not_revoked_and_its_reason_is_told_once() -> None:
    first, second = tasks = members(2)
    table = table_of(tasks)
    withdrawn, other = table.grant(first, 0, number=3), table.grant(second, 0, number=4)
    table.remove(first, Outcome.STALE)
    assert table.to_cancel == [withdrawn.lease_id]
    assert [table.take_reason(withdrawn.lease_id) for _ in range(2)] == [Outcome.STALE, Outcome.CANCELLED]
    assert not table.revoke(withdrawn.lease_id)
    assert table.revoke(other.lease_id)
    assert (waiting(table), table.out) == ([1], {})
