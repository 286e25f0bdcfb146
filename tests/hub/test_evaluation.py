"""Rounds of held-out evaluation: what is asked again, in which order, and what is missing at the end."""

from __future__ import annotations

from itertools import count

from flash.config.tree import EvalConfig
from flash.hub.evaluation import Evaluations
from flash.types import Failure, Lease, Outcome
from tests.hub.cases import trajectory


def begun(problems: int, retries: int = 1) -> Evaluations:
    """The evaluation of the untrained policy."""
    evaluations = Evaluations(EvalConfig(problems=problems, samples=1), retries, 0, 8, lambda seed: "", count(100))
    evaluations.published(0)
    return evaluations


def take(evaluations: Evaluations) -> Lease:
    lease = evaluations.lease([0])
    assert lease is not None
    return lease


def fail(evaluations: Evaluations, lease: Lease, outcome: Outcome) -> dict[str, float] | None:
    return evaluations.finish(lease.lease_id, Failure(lease.task, outcome, "boom", 0), node=0)


def bring(evaluations: Evaluations, lease: Lease) -> dict[str, float] | None:
    return evaluations.finish(lease.lease_id, trajectory(lease.task, 0), node=0)


def test_a_failed_sample_is_tried_again_after_the_others_and_then_reported_as_missing() -> None:
    evaluations = begun(problems=3)
    first = take(evaluations)
    assert fail(evaluations, first, Outcome.ENV_ERROR) is None
    assert bring(evaluations, take(evaluations)) is None
    assert bring(evaluations, take(evaluations)) is None
    again = take(evaluations)
    assert (again.task.task_id, again.task.attempt) == (first.task.task_id, 1)
    row = fail(evaluations, again, Outcome.ENV_ERROR)
    assert row is not None
    assert (row["samples"], row["missing"]) == (2, 1)
    assert evaluations.done


def test_a_cancelled_sample_and_one_of_a_lost_node_are_next_and_cost_no_attempt() -> None:
    evaluations = begun(problems=3, retries=0)
    first, second = take(evaluations), take(evaluations)
    fail(evaluations, second, Outcome.CANCELLED)
    assert take(evaluations).task == second.task
    evaluations.revoke(first.lease_id)
    assert take(evaluations).task == first.task


def test_what_a_lost_node_brings_home_late_counts_for_nothing() -> None:
    evaluations = begun(problems=1)
    lost = take(evaluations)
    evaluations.revoke(lost.lease_id)
    assert bring(evaluations, lost) is None
    row = bring(evaluations, take(evaluations))
    assert row is not None
    assert row["samples"] == 1


def test_a_round_is_asked_only_of_engines_that_run_its_version() -> None:
    evaluations = begun(problems=1)
    assert evaluations.lease([-1]) is None
    assert evaluations.lease([-1, 0]) is not None
