"""The charts: each draws what runs measure, and says what it means."""

from __future__ import annotations

import math

from flash.view.charts import DRAWN, values


def test_a_chart_says_what_its_columns_mean_and_when_to_worry() -> None:
    charts = {chart.id: chart for chart in DRAWN}
    assert charts["ess"].means.startswith("Kish's effective sample size")
    assert charts["ess"].worry.endswith("no longer count. Lower train.async_ratio or train.learning_rate.")
    assert (charts["ess"].percent, charts["ess"].limit, [line.name for line in charts["ess"].lines]) == (
        True,
        0.5,
        [""],
    )
    waits = charts["waits"]
    assert [(line.name, line.dash) for line in waits.lines] == [("trainer waits", "solid"), ("engines idle", "dot")]
    assert "Engines idle: share of their time" in waits.means
    assert charts["failures"].limit is None
    assert [line.key for line in charts["domains"].lines] == ["domain/*/reward"]
    assert [line.key for line in charts["failures"].lines] == ["failures", "failures_*"]
    assert all(chart.means and chart.worry and "`" not in chart.means + chart.worry for chart in DRAWN)


def test_finite_numbers_of_drawn_columns_are_kept() -> None:
    row = {"step": 3, "entropy": math.nan, "ess": 0.5, "env/x": 1, "loss": 2.0, "failures_env_error": 1, "low": 0.1}
    row |= {"domain/code/reward": 0.2, "domain/code/tokens": 9.0, "env/a\nb": 2}
    assert values([row], "step") == [
        {"step": 3, "ess": 0.5, "env/x": 1, "failures_env_error": 1, "domain/code/reward": 0.2, "env/a\nb": 2}
    ]
    assert values([{"step": 3, "mean_reward": 0.2, "low": 0.1, "env/x": 1}], "evaluation") == [
        {"step": 3, "mean_reward": 0.2, "low": 0.1}
    ]
