"""Rounds of held-out evaluation: which tasks are tried again, in which order, and which are missing at the end."""

from __future__ import annotations

from itertools import count

from flash.config.tree import EvalConfig
from flash.samples.evaluation import Evaluations
from flash.samples.tasks import PLAIN_FOR_ALL
from flash.sampling import Sampling
from flash.types import Failure, Lease, Outcome
from tests.samples.cases import trajectory


def resumed(version: int, evaluated: set[int], every: int = 4, steps: int = 8) -> list[int]:
    """Return the versions that are evaluated after a restart at `version`. Rounds end before the next version."""
    config = EvalConfig(problems=1, samples=1, every=every)
    evaluations = Evaluations(config, 1, version, steps, lambda seed: "", PLAIN_FOR_ALL, count(100), evaluated)
    rows: list[float] = []
    for published in range(version, steps + 1):
        evaluations.published(published)
        while (lease := evaluations.lease([published])) is not None:
            row = evaluations.deliver(lease.lease_id, trajectory(lease.task, published), node=0)
            assert row is not None
            rows.append(row["step"])
    return [int(step) for step in rows]


def test_what_was_evaluated_in_a_former_incarnation_is_not_asked_again() -> None:
    assert resumed(0, set()) == [0, 4, 8]
    assert resumed(0, {0}) == [4, 8], "no checkpoint yet, but the untrained policy was measured"
    assert resumed(4, {0, 4}) == [8]
    assert resumed(6, {0, 4}) == [8]
    assert resumed(8, {0, 4, 8}) == []


def test_an_evaluation_that_left_no_result_is_made_up_for_when_the_run_goes_on() -> None:
    assert resumed(4, {0}) == [4, 8], "due at the version of the checkpoint itself"
    assert resumed(6, {0}) == [6, 8], "its own version is gone"
    assert resumed(6, {0, 6}) == [8], "made up for once"
    assert resumed(8, {0, 4}) == [8]
    assert resumed(3, set(), every=0) == [3, 8]


def begun(problems: int, retries: int = 1) -> Evaluations:
    """Return evaluations in which that of the untrained policy runs."""
    samplings = {"": Sampling(0.9, top_k=5, stop=("\n",))}
    config = EvalConfig(problems=problems, samples=1)
    evaluations = Evaluations(config, retries, 0, 8, lambda seed: "", samplings, count(100))
    evaluations.published(0)
    return evaluations


def test_held_out_problems_have_a_temperature_of_their_own() -> None:
    assert take(begun(1)).task.sampling == Sampling(0.0, top_k=5, stop=("\n",)), "all else is as in training"


def take(evaluations: Evaluations) -> Lease:
    """Lease the next task of the running round to a node with an engine of version 0."""
    lease = evaluations.lease([0])
    assert lease is not None
    return lease


def fail(evaluations: Evaluations, lease: Lease, outcome: Outcome) -> dict[str, float] | None:
    """Deliver a failure. Returns the row of the round if this was its last result."""
    return evaluations.deliver(lease.lease_id, Failure(lease.task, outcome, "boom", 0), node=0)


def bring(evaluations: Evaluations, lease: Lease) -> dict[str, float] | None:
    """Deliver a finished sample. Returns the row of the round if this was its last result."""
    return evaluations.deliver(lease.lease_id, trajectory(lease.task, 0), node=0)


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


def test_a_failed_sample_goes_to_another_node_as_long_as_there_is_one() -> None:
    evaluations = begun(problems=1, retries=2)
    first = take(evaluations)
    fail(evaluations, first, Outcome.ENV_ERROR)
    assert evaluations.lease([0], 0, nodes=[0, 1]) is None
    second = evaluations.lease([0], 1, nodes=[0, 1])
    assert second is not None
    assert (second.task.task_id, second.task.attempt) == (first.task.task_id, 1)
    evaluations.deliver(second.lease_id, Failure(second.task, Outcome.ENV_ERROR, "boom", 0), node=1)
    assert evaluations.lease([0], 0, nodes=[0, 1]) is not None, "it has failed on all of them"


def test_a_failed_sample_does_not_wait_for_a_node_that_is_gone() -> None:
    evaluations = begun(problems=1)
    fail(evaluations, take(evaluations), Outcome.ENV_ERROR)
    assert evaluations.lease([0], 0, nodes=[0]) is not None
