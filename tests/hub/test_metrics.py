"""The row of metrics of a step.

Unless a test says otherwise, `make_buffer` gives 10 steps of two groups of two samples (`batch` is their number) and
the asynchronous ratio `alpha` = 1. `trajectory` gives a sample of 3 tokens.
"""

from __future__ import annotations

import pytest

from flash.hub.metrics import StepMetrics
from flash.hub.protocol import EngineStatus
from flash.samples.batches import mean_metrics, sample_metrics
from flash.samples.buffer import SampleBuffer
from flash.types import Failure, Outcome, Task, VersionRun
from flash.waiting import run_to_end
from tests.metrics_page import unlisted
from tests.samples.cases import lease_all, make_buffer, trajectory


def commit(buffer: SampleBuffer, metrics: StepMetrics, version: int) -> dict[str, float]:
    """Train the step of this version, and return its row."""
    assert buffer.next_round(version) is not None
    buffer.commit(version)
    return metrics.row(version + 1, {}, {}, buffer.samples, [], now=float(version))


def test_samples_that_are_wholly_too_old_do_not_count_and_their_tokens_are_a_share() -> None:
    buffer = make_buffer(alpha=1, batch=2, group=2)
    metrics = StepMetrics(buffer.samples)
    leases = lease_all(buffer, 0)
    for lease in leases[:2]:
        buffer.deliver(lease.lease_id, trajectory(lease.task, 0))
    row = commit(buffer, metrics, 0)
    assert (row["samples"], row["stale_share"], row["failures"]) == (2, 0.0, 0)
    fresh = lease_all(buffer, 1)
    for lease in fresh:
        buffer.deliver(lease.lease_id, trajectory(lease.task, 1))
    assert commit(buffer, metrics, 1)["samples"] == 2
    old, mixed = leases[2:]
    buffer.deliver(old.lease_id, trajectory(old.task, 0, tokens=4))
    buffer.deliver(mixed.lease_id, trajectory(mixed.task, 0, versions=[VersionRun(0, 2), VersionRun(1, 2)], tokens=4))
    row = commit(buffer, metrics, 2)
    assert row["samples"] == 1
    assert row["stale_share"] == pytest.approx(6 / 8)


def test_failures_count_per_step_by_reason_whether_tried_again_or_given_up() -> None:
    buffer = make_buffer(alpha=0, batch=2, group=2, retries=1)
    metrics = StepMetrics(buffer.samples)
    one, two = lease_all(buffer, 0)
    buffer.deliver(one.lease_id, Failure(one.task, Outcome.ENV_TIMEOUT, "reset took longer than 60 s", 0))
    buffer.deliver(two.lease_id, Failure(two.task, Outcome.ENV_TIMEOUT, "step took longer than 60 s", 0))
    assert buffer.samples.notes == ["the first sample that failed (env_timeout): reset took longer than 60 s"]
    one, two = lease_all(buffer, 0)
    buffer.deliver(one.lease_id, Failure(one.task, Outcome.REWARD_ERROR, "it raised", 0))
    buffer.deliver(two.lease_id, trajectory(two.task, 0))
    row = commit(buffer, metrics, 0)
    assert {name: row[name] for name in row if "failures" in name} == {
        "failures": 3,
        "failures_env_timeout": 2,
        "failures_reward_error": 1,
    }
    assert unlisted(row) == []
    for lease in lease_all(buffer, 1):
        buffer.deliver(lease.lease_id, trajectory(lease.task, 1))
    assert commit(buffer, metrics, 1)["failures"] == 0


def test_kinds_have_means_of_their_own_and_an_unnamed_one_has_none() -> None:
    samples = [trajectory(Task(n, n, 0, n, kind="ab"[n % 2]), 0, tokens=n + 1, reward=n) for n in range(3)]
    row = run_to_end(mean_metrics(map(sample_metrics, samples)))
    assert row == {"domain/a/reward": 1, "domain/a/tokens": 2, "domain/b/reward": 1, "domain/b/tokens": 2}
    assert unlisted({*row, "domain/a/share", "share_drift"}) == []
    assert unlisted(row, "evaluation") == []
    assert sample_metrics(trajectory(Task(0, 0, 0, 0), 0)) == {}


def test_a_step_that_a_resumed_run_takes_before_anything_runs_has_its_own_interval_and_no_rate() -> None:
    buffer = make_buffer(alpha=1, batch=2, group=2)
    metrics = StepMetrics(buffer.samples)
    for lease in lease_all(buffer, 0):
        buffer.deliver(lease.lease_id, trajectory(lease.task, 0))
    times = {"trainer_step_s": 3.0, "trainer_wait_s": 100.0}

    def step(version: int, now: float) -> list[float | None]:
        """Train a step. Returns the interval of its row in seconds, the share of waiting, and the tokens per second."""
        assert buffer.next_round(version) is not None
        buffer.commit(version)
        row = metrics.row(version + 1, {}, times, buffer.samples, [], now=now)
        return [row.get(name) for name in ("interval_s", "trainer_wait_share", "tokens_per_second")]

    # Before the first lease, only the 3 s of the training itself count.
    assert step(0, 1000.0) == [3.0, None, None]
    metrics.sampling_began(2000.0)
    assert step(1, 2005.0) == [5.0, pytest.approx(2 / 5), 0.0]


def test_engines_idle_since_the_last_step_and_another_one_in_their_place_from_the_next_one_on() -> None:
    samples = make_buffer(alpha=1, batch=2, group=2).samples
    metrics = StepMetrics(samples)

    def idle(*engines: tuple[float, float]) -> float | None:
        """Return the idle share in the next row, for engines with these idle seconds and lifetimes."""
        told = [EngineStatus(number, 0, *seconds, 0.0) for number, seconds in enumerate(engines)]
        return metrics.row(1, {}, {}, samples, told, now=0.0).get("engine_idle_share")

    assert idle() is None
    assert idle((0.0, 0.0)) is None, "it has only begun to serve"
    assert idle((8.0, 10.0)) == pytest.approx(0.8)
    assert idle((8.0, 10.0)) is None, "it has told nothing since"
    assert idle((9.0, 14.0), (1.0, 1.0)) == pytest.approx(1 / 4)
    # Another engine is in place of the first one. The second engine was not idle for 2 s.
    assert idle((1.0, 2.0), (1.0, 3.0)) == pytest.approx(0 / 2)
    assert idle((2.0, 4.0), (1.0, 5.0)) == pytest.approx(1 / 4)
    assert idle((300.0, 600.0)) is not None
    assert idle((5.0, 610.0)) is None, "another one, which lives longer than the one before it"
    assert idle((9.0, 620.0)) == pytest.approx(4 / 10)


def test_drafts_that_stayed_since_the_last_step_and_of_another_engine_from_its_start_on() -> None:
    samples = make_buffer(alpha=1, batch=2, group=2).samples
    metrics = StepMetrics(samples)

    def stayed(*engines: tuple[int, int]) -> float | None:
        """Return the accepted share in the next row, for engines with these counts of drafted and accepted tokens."""
        told = [EngineStatus(number, 0, 0.0, 1.0, 0.0, *drafts) for number, drafts in enumerate(engines)]
        return metrics.row(1, {}, {}, samples, told, now=0.0).get("draft_accepted_share")

    assert stayed((0, 0)) is None, "none has drafted"
    assert stayed((8, 6)) == pytest.approx(6 / 8)
    assert stayed((8, 6)) is None
    assert stayed((10, 6), (6, 6)) == pytest.approx(6 / 8)
    assert stayed((4, 1), (6, 6)) == pytest.approx(1 / 4), "the first one has begun anew"
    assert stayed((4, 1), (20, 2)) == pytest.approx(2 / 20), "the second one, which has drafted more since"


def test_a_step_during_which_the_first_sample_went_out_takes_as_long_as_its_training() -> None:
    buffer = make_buffer(alpha=1, batch=2, group=2)
    metrics = StepMetrics(buffer.samples)
    metrics.sampling_began(49.0)
    row = metrics.row(1, {}, {"trainer_step_s": 8.0, "trainer_wait_s": 40.0}, buffer.samples, [], now=50.0)
    assert (row["interval_s"], row["trainer_wait_share"]) == (8, 0)
