"""The charts: each draws what runs measure, and says what it means."""

from __future__ import annotations

import math

from flash.view.charts import CHARTS, drawn
from tests.metrics_page import unlisted


def test_every_chart_draws_what_the_page_of_the_metrics_lists() -> None:
    for chart in CHARTS:
        keys = [line.key.replace("*", "name") for line in chart.lines]
        assert unlisted(keys, "metrics.jsonl" if chart.of == "steps" else "evals.jsonl") == []
    assert len({chart.id for chart in CHARTS}) == len(CHARTS)


def test_finite_numbers_of_drawn_columns_are_kept() -> None:
    row = {"step": 3, "entropy": math.nan, "ess": 0.5, "env/x": 1, "loss": 2.0, "failures_env_error": 1, "low": 0.1}
    assert drawn([row], "steps") == [{"step": 3, "ess": 0.5, "env/x": 1, "failures_env_error": 1}]
    assert drawn([{"step": 3, "mean_reward": 0.2, "low": 0.1, "env/x": 1}], "evals") == [
        {"step": 3, "mean_reward": 0.2, "low": 0.1}
    ]
