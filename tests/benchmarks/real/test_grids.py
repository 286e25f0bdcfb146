"""What is read off two runs of the grid game, and that it can be drawn."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from benchmarks.form import ROOT
from benchmarks.real.grids import EXAMPLES, curve, draw, verdict
from benchmarks.training import Measured


def measured(*accuracies: float, step_s: float = 10.0) -> Measured:
    """A run that is evaluated every ten steps, with an interval of ± 0.05."""
    evals: list[dict[str, Any]] = [
        {
            "step": 10 * place,
            "time": 100 + 10 * place * step_s,
            "mean_reward": mean,
            "low": mean - 0.05,
            "high": mean + 0.05,
        }
        for place, mean in enumerate(accuracies)
    ]
    return Measured(seconds=1.0, summary={}, evals=evals, metrics=[{"step": 0, "time": 100 + step_s}])


def found(runs: dict[str, Measured]) -> dict[tuple[str, str], tuple[float, bool | None]]:
    return {(row.case, row.metric): (round(row.ours, 6), row.met) for row in verdict(runs)}


def test_a_gain_is_clear_where_the_intervals_do_not_overlap() -> None:
    rows = found({"directly": measured(0.4, 0.6), "through an agent": measured(0.4, 0.48)})
    assert rows["directly", "clear_gain"] == (0.1, True)
    assert rows["through an agent", "clear_gain"] == (-0.02, False)


def test_runs_agree_where_their_last_intervals_overlap() -> None:
    assert found({"a": measured(0.4, 0.6), "b": measured(0.4, 0.68)})["both", "same_accuracy"] == (1.0, True)
    assert found({"a": measured(0.4, 0.6), "b": measured(0.4, 0.72)})["both", "same_accuracy"] == (0.0, False)


def test_what_was_learned_in_time_counts_from_the_end_of_the_first_evaluation() -> None:
    rows = found({"quick": measured(0.4, 0.6, 0.7, step_s=40.0), "slow": measured(0.4, 0.48, 0.7, step_s=50.0)})
    assert rows["quick", "run_s"] == (800.0, None)
    assert rows["quick", "gain_in_time"] == (0.2, True)
    assert rows["slow", "run_s"] == (1000.0, None)
    assert rows["slow", "gain_in_time"] == (-0.02, False)
    assert rows["slow", "clear_gain"] == (0.2, True)


def test_every_evaluation_is_a_point_of_the_picture(tmp_path: Path) -> None:
    rows = [row for case in EXAMPLES for row in curve(case, measured(0.4, 0.5, 0.7))]
    points = {row.case: row.ours for row in rows if row.metric == "accuracy"}
    assert points == {
        f"{case}, step {step}": value for case in EXAMPLES for step, value in ((0, 0.4), (10, 0.5), (20, 0.7))
    }
    draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_examples_that_are_run_are_there() -> None:
    for name in EXAMPLES.values():
        assert tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text())["env"]["path"]
