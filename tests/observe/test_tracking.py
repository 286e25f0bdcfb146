"""Trackers get the measurements of a run once, also if the run is resumed, and the run does not wait for them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.cli.main import main
from flash.config.load import dump
from flash.config.tree import Config, TrackConfig, TrackerName
from flash.observe.recorder import Recorder
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.trackers.feed import Feed
from flash.observe.trackers.trackers import TRACKERS, TrackerProcess, not_installed, tracked, tracker_lock
from tests.observe.sample_rows import eval_row, metrics_row

FAKES = Path(__file__).parent / "fake_trackers"
WAIT_S = 30.0
"""Longest wait for a process, in seconds."""
ALL: Sequence[TrackerName] = list(TRACKERS)


class NoText:
    """Tokenizer without texts."""

    def token_texts(self, token_ids: Any) -> list[str]:
        return []


class Calls:
    """Calls that the fakes have received so far."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def of(self, call: str) -> list[dict[str, Any]]:
        """Return the calls of this name, in order, each with its arguments."""
        # Another process may be writing the last line, which is then read without its end.
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [told for line in lines if (told := json.loads(line))["call"] == call]

    def steps(self, name: str = "train/reward") -> list[int]:
        """Return the steps of all values with this name that were sent."""
        return [told["step"] for told in self.of("log") if name in told["values"]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace the packages by the fakes, here and in processes that are started."""
    file = tmp_path / "calls"
    monkeypatch.setenv("FAKE_TRACKER_LOG", str(file))
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(FAKES)
    for name in [name for name in sys.modules if name.partition(".")[0] in (*ALL, "fake_said")]:
        monkeypatch.delitem(sys.modules, name)
    return Calls(file)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Remove the imported fakes after each test, so that no other test imports them."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in (*ALL, "fake_said")]:
        if str(FAKES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def tracked_run(config: Config) -> RunDirectory:
    """Return a run with three steps and an evaluation."""
    directory = RunDirectory.open(config.run_dir, dump(with_trackers(config, "wandb")))
    written(directory, range(3))
    directory.append_evaluation(eval_row(0, 0.25))
    return directory


def with_trackers(config: Config, *names: TrackerName) -> Config:
    """Return a configuration with these trackers, which have WAIT_S for the rest at the end."""
    deadlines = msgspec.structs.replace(config.deadlines, close=WAIT_S)
    return msgspec.structs.replace(config, track=TrackConfig(to=list(names)), deadlines=deadlines)


def written(directory: RunDirectory, steps: Sequence[int]) -> None:
    """Append the rows of these steps to a run."""
    for step in steps:
        directory.append_metrics(metrics_row(step, **{"env/a b": 1.0}))


def until(true: Callable[[], bool]) -> None:
    """Wait until a condition is true, at most WAIT_S."""
    limit = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("name", ALL)
def test_each_is_told_every_row_once_under_names_of_the_field(
    name: TrackerName, calls: Calls, tracked_run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["track", str(tracked_run.path), "--to", name]) == 0
    assert capsys.readouterr().out.endswith(f"{name}: sent 4 rows\n")
    assert (calls.steps(), calls.steps("eval/reward")) == ([0, 1, 2], [0])
    values = calls.of("log")[1]["values"]
    assert values["train/reward"] == pytest.approx(0.26)
    assert values["train/env/a_b"] == 1.0
    assert values["perf/tokens_per_second"] == 9812.0
    written(tracked_run, range(3, 5))
    assert main(["track", str(tracked_run.path), "--to", name]) == 0
    assert calls.steps() == [0, 1, 2, 3, 4]
    first, second = calls.of("init")
    assert first["id"] == second["id"]
    assert first["project"] == "flash"
    assert main(["track", str(tracked_run.path), "--to", name]) == 0
    assert len(calls.of("init")) == 2
    assert len(calls.of("finish")) == 2


def test_steps_that_a_resumed_run_does_again_are_not_told_again(
    calls: Calls, tracked_run: RunDirectory, config: Config
) -> None:
    assert main(["track", str(tracked_run.path)]) == 0
    resumed = RunDirectory.open(tracked_run.path, dump(with_trackers(config, "wandb")), resume_at=1)
    written(resumed, range(1, 5))
    assert main(["track", str(tracked_run.path)]) == 0
    assert calls.steps() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])  # a server of MLflow makes the ids
def test_rows_that_are_sent_again_become_another_run(
    name: TrackerName, calls: Calls, tracked_run: RunDirectory
) -> None:
    for _ in range(2):
        assert main(["track", str(tracked_run.path), "--to", name]) == 0
        (tracked_run.path / "track" / f"{name}.json").unlink()
    assert calls.steps() == [0, 1, 2, 0, 1, 2]
    first, second = calls.of("init")
    assert first["id"] != second["id"]


def test_what_was_told_before_a_failure_is_not_told_again(
    calls: Calls, tracked_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_TRACKER", "raise finish")
    assert main(["track", str(tracked_run.path)]) == 2
    assert "wandb failed: ConnectionError: no route to the tracker" in capsys.readouterr().err
    monkeypatch.setenv("FAKE_TRACKER", "")
    assert main(["track", str(tracked_run.path)]) == 0
    assert calls.steps() == [0, 1, 2]


def test_a_run_whose_settings_the_tracker_refuses_is_deleted_there_before_another_is_made(
    calls: Calls, tracked_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRACKER", "raise settings")
    for attempts in (1, 2):
        assert main(["track", str(tracked_run.path), "--to", "mlflow"]) == 2
        assert len(calls.of("init")) == len(calls.of("delete")) == attempts
    monkeypatch.setenv("FAKE_TRACKER", "")
    assert main(["track", str(tracked_run.path), "--to", "mlflow"]) == 0
    assert (len(calls.of("init")), len(calls.of("delete")), calls.steps()) == (3, 2, [0, 1, 2])


def test_two_do_not_tell_the_same(calls: Calls, tracked_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with tracker_lock(tracked_run, "wandb") as alone:
        assert alone
        assert main(["track", str(tracked_run.path)]) == 2
    assert "wandb: the run itself or another command is sending rows to it" in capsys.readouterr().err
    assert calls.of("log") == []


def test_what_the_command_lacks_is_named(
    tracked_run: RunDirectory, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked_run.config.write_text(dump(config))
    assert main(["track", str(tracked_run.path)]) == 2
    assert "has no tracker in track.to: name a tracker with --to (trackio, wandb, " in capsys.readouterr().err
    (tracked_run.path / "track").mkdir()
    (tracked_run.path / "track/wandb.json").write_text("{")
    if not_installed("wandb") is None:
        assert main(["track", str(tracked_run.path), "--to", "wandb"]) == 2
        assert "remove it to send all rows again" in capsys.readouterr().err


def test_a_place_that_cannot_be_read_is_told_from_a_damaged_one(
    calls: Calls, tracked_run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (tracked_run.path / "track/wandb.json").mkdir(parents=True)
    assert main(["track", str(tracked_run.path)]) == 2
    assert capsys.readouterr().err.endswith("wandb.json: Is a directory\n")


def test_a_folder_called_like_a_package_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("no_tracker") is not None
    assert not_installed("no_tracker") == "`no_tracker` is not installed here: `pip install no_tracker`, or take it out"


def test_names_are_such_that_every_tracker_takes_them() -> None:
    row = {"step": 1, "time": 2.0, "env/../x//y\n?": 1, "loss": None, "entropy": "x", "big": 10**400, "grad_norm": 2}
    assert tracked("step", row) == {"train/env/_/x/_/y__": 1.0, "train/grad_norm": 2.0}
    assert tracked("evaluation", {"step": 1, "mean_reward": 0.5, "k": 4}) == {"eval/reward": 0.5, "eval/k": 4.0}


@pytest.mark.parametrize("failed", [False, True])
def test_a_process_tells_while_the_run_goes_on_and_how_it_ended(
    failed: bool, calls: Calls, tracked_run: RunDirectory
) -> None:
    feed = Feed(TrackerProcess(tracked_run, "wandb"))
    feed.put("step", {})
    until(lambda: calls.steps() == [0, 1, 2])
    written(tracked_run, [3])
    feed.put("step", {})
    until(lambda: calls.steps() == [0, 1, 2, 3])
    written(tracked_run, [4])
    feed.put("error" if failed else "summary", {}, last=True)
    feed.end(WAIT_S)
    assert feed.warnings() + feed.close() == []
    assert calls.steps() == [0, 1, 2, 3, 4]
    assert [told["failed"] for told in calls.of("finish")] == [failed]
    assert "prints what it likes" in (tracked_run.path / "track/wandb.log").read_text()


@pytest.mark.parametrize(
    ("ill", "told", "missed"),
    [
        (
            "raise log",
            r"the tracker wandb failed: ConnectionError: no route to the tracker\n\x1b[31m; it is",
            4,
        ),
        ("hang init", "the tracker wandb did not take the rest in ", 4),
        ("hang finish", "the tracker wandb did not take the rest in ", 0),
        ("exit log", "the tracker wandb ended with code 7: see ", 4),
    ],
)
def test_one_that_is_ill_is_told_of_and_what_it_missed(
    ill: str, told: str, missed: int, calls: Calls, tracked_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRACKER", ill)
    feed = Feed(TrackerProcess(tracked_run, "wandb"))
    feed.put("step", {})
    warnings: list[str] = []
    if "hang" in ill:
        log = tracked_run.path / "track/wandb.log"
        until(lambda: log.exists() and "prints" in log.read_text() and bool(missed or calls.steps("eval/reward")))
    else:
        until(lambda: bool(warnings.extend(feed.warnings()) or warnings))
    feed.put("summary", {}, last=True)
    feed.end(3)
    warnings += feed.close()
    assert any(warning.startswith(told) for warning in warnings), warnings
    assert len([warning for warning in warnings if "has not received" not in warning]) <= 2
    again = f"`flash track {tracked_run.path} --to wandb` sends them"
    rest = [f"the tracker wandb has not received {missed} rows: {again}"] if missed else []
    assert [warning for warning in warnings if "has not received" in warning] == rest
    assert feed.close() == []


@pytest.mark.parametrize("ill", ["hang init", "hang log"])
def test_one_that_hangs_is_told_of_once_while_the_run_goes_on(
    ill: str, calls: Calls, tracked_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRACKER", ill)
    clock = [1000.0]
    feed = Feed(TrackerProcess(tracked_run, "wandb"), lambda: clock[0])
    feed.put("step", {})
    log = tracked_run.path / "track/wandb.log"
    until(lambda: log.exists() and "prints" in log.read_text())
    told: list[str] = []
    for step in range(3, 40):
        written(tracked_run, [step])
        feed.put("step", {})
        time.sleep(0.01)
        told += feed.warnings()
        clock[0] += 10
    (line,) = told
    assert line.startswith("the tracker wandb has not answered for ")
    assert f"`flash track {tracked_run.path} --to wandb` sends the missing rows later" in line
    feed.end(0)
    feed.close()


def test_one_that_fails_once_is_told_the_rest_at_the_next_step(
    calls: Calls, tracked_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRACKER", f"raise log once {tracked_run.path}/failed")
    feed = Feed(TrackerProcess(tracked_run, "wandb"))
    feed.put("step", {})
    told: list[str] = []
    until(lambda: bool(told.extend(feed.warnings()) or told))
    feed.put("step", {})
    until(lambda: calls.steps() == [0, 1, 2])
    feed.put("summary", {}, last=True)
    feed.end(WAIT_S)
    assert feed.close() == []
    assert len(told) == 1


def test_a_process_whose_run_was_killed_tells_what_is_left_and_ends(calls: Calls, tracked_run: RunDirectory) -> None:
    code = (
        "import os, sys; from pathlib import Path; from flash.observe.rundir.rundir import RunDirectory; "
        "from flash.observe.trackers.trackers import TrackerProcess; "
        "TrackerProcess(RunDirectory(Path(sys.argv[1])), 'wandb').open(); os._exit(1)"
    )
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code, str(tracked_run.path)])
    until(lambda: len(calls.of("finish")) == 1)
    assert (calls.steps(), calls.of("finish")[0]["failed"]) == ([0, 1, 2], True)


def test_a_run_tells_its_trackers(calls: Calls, config: Config) -> None:
    config = with_trackers(config, "wandb", "tensorboard")
    with Recorder(config, NoText(), now=time.time, resume_at=None, restarts=0) as recorder:
        for step in range(3):
            recorder.step(metrics_row(step))
        recorder.evaluation(eval_row(3, 0.5))
        recorder.finish({"issued": 1}, {}, interrupted=True)
    assert sorted(calls.steps()) == [0, 0, 1, 1, 2, 2]
    assert calls.steps("eval/reward") == [3, 3]
    assert "sample" in {told["config"].get("run", {}).get("name") for told in calls.of("init")}


def test_the_command_in_the_warning_can_be_pasted_if_the_path_has_a_space() -> None:
    process = TrackerProcess(RunDirectory(Path("/my runs/a")), "wandb")
    assert (
        process.consequence
        == "; the run goes on, and `flash track '/my runs/a' --to wandb` sends the missing rows later"
    )
