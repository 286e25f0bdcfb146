"""Results of runs and evaluations, as a Python program gets them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flash.config.tree import Config, EnvConfig, ModelConfig, RunConfig
from flash.errors import RunDirectoryError
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import summarise
from flash.run.results import EvaluationPoint, RunResult, read_evaluation, read_run
from tests.observe.sample_rows import eval_row, metrics_row

CONFIG = Config(
    run=RunConfig(name="run"), model=ModelConfig(path="tiny"), env=EnvConfig(path="envs.arithmetic:Arithmetic")
)
"""Configuration of a run."""


def run_of(folder: Path, metrics: list[dict[str, float]], evaluations: list[dict[str, float]]) -> RunResult:
    """Write a run directory with these rows, and read its result."""
    directory = RunDirectory.open(folder / "run", "")
    for row in metrics:
        directory.append_metrics(row)
    for row in evaluations:
        directory.append_evaluation(row)
    directory.write_summary(summarise(CONFIG, metrics, evaluations, ledger={"trained_tokens": 750}, restarts=0))
    return read_run(directory.path)


def test_a_run_has_its_summary_evaluations_and_curve(tmp_path: Path) -> None:
    metrics = [metrics_row(step, reward_mean=step / 10) for step in range(4)]
    evaluations = [eval_row(0, 0.2, low=0.1, high=0.3), eval_row(4, 0.6, low=0.5, high=0.7)]
    run = run_of(tmp_path, metrics, evaluations)
    assert run.run_dir == tmp_path / "run"
    assert (run.steps, run.initial_reward, run.final_reward) == (4, 0.2, 0.6)
    assert run.evaluations == [EvaluationPoint(0, 0.2, 0.1, 0.3), EvaluationPoint(4, 0.6, 0.5, 0.7)]
    assert (run.curve_steps, run.curve, run.measure) == ([0, 1, 2, 3], [0.0, 0.1, 0.2, 0.3], "reward")
    lines = repr(run).splitlines()
    assert len(lines) <= 6
    assert "0.200 (0.100 to 0.300) at step 0 → 0.600 (0.500 to 0.700) at step 4" in repr(run)
    assert "0.000 → 0.300  ▁▃▆█" in repr(run)


def test_a_notebook_shows_the_curve_as_a_drawing(tmp_path: Path) -> None:
    metrics = [metrics_row(step, reward_mean=step / 10) for step in range(4)]
    shown = run_of(tmp_path, metrics, [eval_row(0, 0.2, low=0.1, high=0.3), eval_row(4, 0.6)])._repr_html_()
    drawing = ElementTree.fromstring(shown).find("{http://www.w3.org/2000/svg}svg")
    assert drawing is not None
    (line,) = drawing.findall("{*}polyline")
    assert len(line.get("points", "").split()) == 4
    assert len(drawing.findall("{*}circle")) == 2
    texts = "".join(drawing.itertext())
    assert "0.200 (0.100 to 0.300) at step 0" in texts
    assert "reward of trained samples" in texts


def test_a_long_curve_is_a_short_line(tmp_path: Path) -> None:
    run = run_of(tmp_path, [metrics_row(step, reward_mean=step / 999) for step in range(1000)], [])
    assert max(map(len, repr(run).splitlines())) < 100


def test_a_run_that_made_no_step_has_no_curve(tmp_path: Path) -> None:
    run = run_of(tmp_path, [], [])
    assert (run.evaluations, run.curve) == ([], [])
    assert "steps" in repr(run)
    assert "<svg" not in run._repr_html_()


def test_the_curve_of_supervised_training_is_the_loss(tmp_path: Path) -> None:
    metrics = [{"step": step, "nll": 2.0 - step, "wall_s": 1.0} for step in range(2)]
    run = run_of(tmp_path, metrics, [{"step": 0, "held_out_nll": 3.0}, {"step": 2, "held_out_nll": 1.0}])
    assert (run.curve, run.measure) == ([2.0, 1.0], "loss")
    assert "held-out loss  3.000 at step 0 → 1.000 at step 2" in repr(run)
    assert "loss of trained samples" in run._repr_html_()


def test_a_run_without_a_summary_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="the result of the run"):
        read_run(tmp_path)


def test_an_evaluation_has_its_interval_and_the_best_of_several_answers(tmp_path: Path) -> None:
    row = {"mean_reward": 0.5, "low": 0.4, "high": 0.6, "problems": 8, "missing": 1, "binary": 1, "env/short": 0.25}
    best = [{"k": k, "mean": mean, "low": 0.0, "high": 1.0} for k, mean in ((1, 0.5), (2, 0.75))]
    (tmp_path / "result.json").write_text(json.dumps({**row, "best_of": best}))
    (tmp_path / "episodes.jsonl").touch()
    found = read_evaluation(tmp_path / "result.json", tmp_path / "episodes.jsonl")
    assert (found.mean, found.low, found.high, found.problems, found.failed) == (0.5, 0.4, 0.6, 8, 1)
    assert {k: interval.mean for k, interval in found.best_of.items()} == {1: 0.5, 2: 0.75}
    assert found.row["env/short"] == 0.25
    assert repr(found).splitlines()[0].startswith("accuracy 0.500, 95% interval 0.400 to 0.600")
    assert "pass@2  0.750" in repr(found)
