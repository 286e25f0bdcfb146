from __future__ import annotations

import math
import random

import pytest

from flash.config.tree import Config
from flash.observe.rundir.summary import Summary, summarise
from tests.observe.sample_rows import eval_row, metrics_row

LEDGER = {"issued": 640, "trained": 192, "trained_tokens": 750, "discarded_tokens": 400, "discarded_tokens_stale": 250}


def summary(config: Config, metrics: list[dict[str, float]], evaluations: list[dict[str, float]]) -> Summary:
    """Return the summary of a run with these rows, the totals of LEDGER, and one restart."""
    return summarise(config, metrics, evaluations, ledger=LEDGER, restarts=1)


def test_a_summary_is_computed_from_the_rows(config: Config) -> None:
    metrics = [
        metrics_row(0, interval_s=1.0, tokens_per_second=1000.0, trainer_wait_s=1.0, trainer_step_s=1.0, age_max=0),
        metrics_row(1, interval_s=3.0, tokens_per_second=3000.0, trainer_wait_s=0.0, trainer_step_s=0.5, age_max=2),
        metrics_row(2, interval_s=0.0, tokens_per_second=9.0, trainer_wait_s=0.0, trainer_step_s=0.0, age_max=1),
    ]
    metrics[1] |= {"engine_idle_share": 0.12, "canary_error": 3e-7}
    result = summary(config, metrics, [eval_row(0, 0.3), eval_row(2, 0.6), eval_row(3, 0.9, wall_s=31.5)])
    assert (result.initial_reward, result.final_reward) == (0.3, 0.9)
    assert (result.steps, result.samples, result.wall_seconds) == (3, 192, 31.5)
    assert (result.trained_tokens, result.stale_share, result.failures) == (750, 0.25, 9)
    assert result.tokens_per_second == pytest.approx((1 * 1000 + 3 * 3000) / 4)
    assert result.trainer_wait_share == pytest.approx(1 / 4)
    assert result.engine_idle_share == pytest.approx((1 * 0.04 + 3 * 0.12) / 4)
    assert result.max_age == 2
    assert (result.async_ratio, result.seed, result.model) == (1.0, 7, "models/tiny")
    assert (result.objective, result.restarts, result.canary_error) == ("grpo", 1, 3e-7)
    assert result.ledger == LEDGER


def test_the_order_of_evaluations_does_not_matter(config: Config) -> None:
    rows = [eval_row(step, step / 10) for step in range(10)]
    random.Random(0).shuffle(rows)
    result = summary(config, [], rows)
    assert (result.initial_reward, result.final_reward) == (0.0, 0.9)


def test_of_an_evaluation_done_twice_the_later_record_counts(config: Config) -> None:
    result = summary(config, [], [eval_row(0, 0.3), eval_row(4, 0.5), eval_row(4, 0.6)])
    assert result.final_reward == 0.6


def test_what_was_never_measured_is_none(config: Config) -> None:
    result = summary(config, [], [])
    assert (result.steps, result.samples, result.wall_seconds) == (0, 192, 0.0)
    assert result.initial_reward is result.final_reward is result.tokens_per_second is None
    assert result.trainer_wait_share is result.engine_idle_share is result.max_age is None


def test_numbers_that_are_not_finite_do_not_spread(config: Config) -> None:
    rows = [metrics_row(0), metrics_row(1, tokens_per_second=math.nan, age_max=math.inf, engine_idle_share=None)]
    result = summary(config, rows, [eval_row(0, math.nan), eval_row(1, 0.4)])
    assert result.tokens_per_second == pytest.approx(9812.0)
    assert (result.max_age, result.engine_idle_share) == (1, 0.04)
    assert (result.initial_reward, result.final_reward) == (0.4, 0.4)


def test_rows_without_an_interval_are_weighted_by_tokens_over_rate(config: Config) -> None:
    rows = [metrics_row(0, tokens=100, tokens_per_second=100.0), metrics_row(1, tokens=100, tokens_per_second=50.0)]
    for row in rows:
        del row["interval_s"]
    assert summary(config, rows, []).tokens_per_second == pytest.approx(200 / 3)


def test_restarts_count_in_steps_that_were_done_again_too(config: Config) -> None:
    kept = metrics_row(0, trainer_restarts=1, engine_restarts=0)
    undone = metrics_row(1, trainer_restarts=1, engine_restarts=2, failures=5)
    result = summarise(config, [kept], [], undone=[undone], ledger=LEDGER, restarts=1)
    assert (result.trainer_restarts, result.engine_restarts) == (2, 2)
    assert (result.steps, result.failures) == (1, kept["failures"])
