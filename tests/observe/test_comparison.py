"""Comparison of runs by their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.cli.main import main
from flash.config.load import dump
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.observe.comparison import Compared, differences, read_run, results, table
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import summarise
from tests.observe.sample_rows import eval_row, metrics_row


@pytest.fixture
def make(config: Config, tmp_path: Path) -> Any:
    """Return a function that makes a run with a last evaluation, ended or not."""

    def run(name: str, mean: float, *, ended: bool = True, objective: str = "decoupled_ppo", **row: float) -> Path:
        """Make the run `name` with two evaluations, the last one with this mean, and return its directory."""
        replace = msgspec.structs.replace
        changed = replace(
            config,
            run=replace(config.run, name=name),
            algorithm=replace(config.algorithm, objective=objective),
        )
        directory = RunDirectory.open(tmp_path / name, dump(changed))
        rows = [eval_row(0, 0.2), eval_row(10, mean, **row)]
        for one in rows:
            directory.append_evaluation(one)
        if ended:
            told = summarise(changed, [metrics_row(0)], rows, ledger={"trained": 64}, restarts=0)
            directory.write_summary(told)
        return directory.path

    return run


def shown(*runs: Path) -> dict[str, list[str]]:
    """Return the texts of each row of the comparison, by its title."""
    return dict(results([read_run(path) for path in runs]))


def test_results_stand_side_by_side_with_intervals_and_how_far_they_are_apart(make: Any) -> None:
    rows = shown(make("one", 0.60), make("other", 0.75, low=0.72, high=0.78))
    assert rows["state"] == ["ended", "ended"]
    assert rows["first accuracy"] == ["0.200", "0.200"]
    assert rows["last accuracy"] == ["0.600", "0.750"]
    assert rows["  95% interval"] == ["0.550 to 0.640", "0.720 to 0.780"]
    assert rows["  best of k"] == ["0.700 of 4", "0.850 of 4"]
    assert rows["  over the first"] == ["-", "+0.150 (+0.100 to +0.208)"]
    assert rows["async ratio"] == ["1 (oldest trained token: 1 versions)"] * 2


def test_a_run_that_is_not_over_is_compared_as_far_as_it_has_come(make: Any) -> None:
    rows = shown(make("one", 0.6), make("other", 0.7, ended=False))
    assert rows["state"] == ["ended", "under way, or interrupted"]
    assert rows["last accuracy"] == ["0.600", "0.700"]
    assert rows["steps"] == ["1", "-"]


def test_graded_rewards_are_no_accuracy(make: Any) -> None:
    rows = shown(make("one", 0.6), make("other", 0.7, binary=0.0))
    assert rows["last reward"] == ["0.600", "0.700"]


def test_a_run_without_an_evaluation_has_blanks(config: Config, tmp_path: Path) -> None:
    path = RunDirectory.open(tmp_path / "new", dump(config)).path
    rows = shown(path, path)
    assert rows["last reward"] == rows["  95% interval"] == rows["  over the first"] == ["-", "-"]


def test_runs_of_sft_are_compared_by_their_losses(config: Config, tmp_path: Path) -> None:
    runs = [RunDirectory.open(tmp_path / name, dump(config)) for name in ("one", "other")]
    for run, losses in zip(runs, ((2.0, 1.25), (2.0, 1.5)), strict=True):
        for step, loss in enumerate(losses):
            run.append_evaluation({"step": step, "held_out_nll": loss, "problems": 4})
    rows = shown(*(run.path for run in runs))
    assert rows["first held-out loss"] == ["2.0000", "2.0000"]
    assert rows["last held-out loss"] == ["1.2500", "1.5000"]


def test_only_keys_that_differ_are_told_and_no_names(make: Any) -> None:
    runs = [read_run(make("one", 0.6)), read_run(make("other", 0.6, objective="grpo"))]
    assert differences(runs) == [("algorithm.objective", ["decoupled_ppo", "grpo"])]
    more = msgspec.structs.replace(runs[1], settings={**runs[0].settings, "train.minibatches": 2})
    fewer: Compared = msgspec.structs.replace(
        runs[0], settings={key: value for key, value in runs[0].settings.items() if key != "train.minibatches"}
    )
    assert differences([fewer, more]) == [("train.minibatches", ["-", "2"])]


def test_a_table_has_columns_of_equal_width() -> None:
    assert table([("a", ["1", "2"]), ("long", ["three", ""])]) == ["a     1      2", "long  three"]


def test_what_is_no_run_is_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no run directory: it holds no config\.toml"):
        read_run(tmp_path)
    path = make("one", 0.6)
    (path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"one cannot be read: .*missing required field"):
        read_run(path)


def test_the_command_prints_both_parts(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make("one", 0.6), make("other", 0.7, objective="grpo")
    assert main(["compare", str(one), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", str(one), str(other)]
    assert lines[-1].split() == ["algorithm.objective", "decoupled_ppo", "grpo"]
    assert main(["compare", str(one), str(one)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["configuration", "the", "same", "the", "same"]


def test_a_text_of_several_lines_stays_in_its_column_and_commands_no_terminal() -> None:
    first, second = table([("run", ["runs/日本", "b"]), ("env.options.prompt", ["Say\n\x1b[2Jit", "c"])])
    assert first == "run                 runs/日本       b"
    assert second == "env.options.prompt  Say\\n\\x1b[2Jit  c"
