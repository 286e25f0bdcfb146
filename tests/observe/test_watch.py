"""The screen of `flash watch`, drawn from files that a run has left or is writing."""

from __future__ import annotations

import io
import math
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console as Terminal

from flash.cli.main import main
from flash.config.load import dump
from flash.config.tree import Config, EvalConfig
from flash.errors import RunDirectoryError
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.watch import Watched, sparkline
from tests.observe.clusters import cluster, failure, hub_now
from tests.observe.sample_rows import STARTED, eval_row, metrics_row


@pytest.fixture
def directory(config: Config) -> RunDirectory:
    """Return the directory of a new run."""
    config = msgspec.structs.replace(config, eval=EvalConfig())
    return RunDirectory.open(config.run_dir, dump(config))


def shown(watched: Watched, now: float = STARTED + 21.0, width: int = 100) -> str:
    """Return the screen as text."""
    stream = io.StringIO()
    Terminal(file=stream, width=width, highlight=False).print(watched.picture(now, width))
    return stream.getvalue()


def line_of(text: str, title: str) -> list[str]:
    """Return the words after `title` in the only line that begins with it."""
    (line,) = [line for line in text.splitlines() if line.startswith(title)]
    return line.removeprefix(title).split()


def written(directory: RunDirectory, steps: int, **changes: Any) -> None:
    """Append the rows of steps to a run."""
    for step in range(steps):
        directory.append_metrics(metrics_row(step, **changes))


def test_the_screen_shows_where_the_run_is_and_its_numbers(directory: RunDirectory) -> None:
    watched = Watched(directory)
    assert "no step yet" in shown(watched)
    written(directory, 10)
    directory.append_evaluation(eval_row(0, 0.25))
    directory.append_evaluation(eval_row(5, 0.5))
    text = shown(watched)
    title, facts, *_ = text.splitlines()
    assert title.startswith("sample  step 10/30 ████████░")
    assert title.endswith("  0:40 left")
    assert "model models/tiny  environment envs.arithmetic:Arithmetic" in facts
    assert line_of(text, "reward") == ["0.340", "0.295", "▁▁▂▃▄▅▆▇██"]
    assert line_of(text, "held out") == ["0.500", "-", "▁█"]
    assert line_of(text, "tokens/s")[:2] == ["9.81k", "9.81k"]
    assert line_of(text, "trainer waits")[0] == "25"
    assert "evaluation at step 5: " in text


def test_a_run_of_sft_shows_its_losses(directory: RunDirectory) -> None:
    for step in range(3):
        directory.append_metrics({"step": step, "time": STARTED + step, "wall_s": float(step), "nll": 2.0 - step})
    directory.append_evaluation({"step": 2, "held_out_nll": 1.5, "problems": 4})
    text = shown(Watched(directory))
    assert line_of(text, "loss on rows")[0] == "0.000"
    assert line_of(text, "held out")[0] == "1.500"


def test_a_long_step_counts_for_more_in_the_waits_than_a_short_one(directory: RunDirectory) -> None:
    directory.append_metrics(metrics_row(0, interval_s=9.0, trainer_wait_share=0.1))
    directory.append_metrics(metrics_row(1, interval_s=1.0, trainer_wait_share=0.9))
    share, _, _, *steps = line_of(shown(Watched(directory)), "trainer waits")
    assert (share, steps) == ("18", ["last", "2", "steps"])


def test_a_run_that_is_silent_or_over_says_so(directory: RunDirectory) -> None:
    written(directory, 3)
    watched = Watched(directory)
    assert "no step for" not in shown(watched, STARTED + 60.0)
    assert "no step for 1:34\n" in shown(watched, STARTED + 100.0)
    directory.summary.write_text("{}")
    os.utime(directory.summary, (1.0, 1.0))  # the files of a copied run may have any age
    assert shown(watched, STARTED + 100.0).splitlines()[0].endswith("  ended")
    RunDirectory.open(directory.path, "", resume_at=3)
    assert "  no step for 1:34" in shown(watched, STARTED + 100.0).splitlines()[0]
    assert (directory.earlier / "001" / "summary.json").read_text() == "{}"


def test_a_run_that_is_removed_while_it_is_watched_is_gone(directory: RunDirectory) -> None:
    written(directory, 3)
    watched = Watched(directory)
    assert "gone" not in shown(watched)
    shutil.rmtree(directory.path)
    assert "gone: its directory was moved or removed" in shown(watched)


def test_a_run_that_goes_on_with_more_steps_shows_them(directory: RunDirectory) -> None:
    written(directory, 3)
    watched = Watched(directory)
    assert "step 3/30 " in shown(watched)
    directory.config.write_text(directory.config.read_text().replace("steps = 30", "steps = 60"))
    assert "step 3/60 " in shown(watched)


def test_alarms_are_those_of_the_run_and_begin_anew_where_it_goes_back(directory: RunDirectory) -> None:
    watched = Watched(directory)
    written(directory, 30, entropy=0.001)
    assert shown(watched).count("alarm at step ") == 1
    assert "alarm at step 2: " in shown(watched)
    directory.metrics.unlink()
    written(RunDirectory(directory.path), 2)  # like the next hub, which knows no earlier file
    assert "alarm" not in shown(watched)


def test_alarms_are_shown_again_after_the_directory_was_away(directory: RunDirectory) -> None:
    watched = Watched(directory)
    written(directory, 30, entropy=0.001)
    assert "alarm at step 2: " in shown(watched)
    configuration = directory.config.read_text()
    shutil.rmtree(directory.path)
    assert "alarm" not in shown(watched)
    again = RunDirectory.open(directory.path, "")
    again.config.unlink()  # The rows may be there before the configuration.
    written(again, 30, entropy=0.001)
    assert "alarm" not in shown(watched)
    again.config.write_text(configuration)
    assert shown(watched).count("alarm at step 2: ") == 1


def test_what_a_run_says_cannot_reach_the_terminal_as_control_characters(directory: RunDirectory) -> None:
    written(directory, 1, **{"domain/\x1b[31mred[bold]/reward": 0.5})
    text = shown(Watched(directory))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "[31mred[bold] 0.500" in text


def test_a_number_that_is_not_finite_is_shown(directory: RunDirectory) -> None:
    written(directory, 1)
    directory.append_metrics(metrics_row(1, grad_norm=math.inf))
    assert line_of(shown(Watched(directory)), "gradient norm") == ["nan", "nan", "▅!"]


def test_numbers_that_no_float_can_hold_are_shown_as_not_finite(directory: RunDirectory) -> None:
    written(directory, 1)
    directory.append_metrics(metrics_row(1, grad_norm=10**400, time=10**400))
    assert line_of(shown(Watched(directory)), "gradient norm") == ["nan", "nan", "▅!"]


def test_a_configuration_with_a_number_of_steps_that_is_none_is_watched(directory: RunDirectory) -> None:
    directory.config.write_text('[run]\nsteps = "many"\n')
    assert "step 0/0" in shown(Watched(directory))


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_no_line_is_wider_than_the_terminal(directory: RunDirectory, width: int) -> None:
    written(directory, 300)
    lines = shown(Watched(directory), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("reward") for line in lines)


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 8, ""),
        ([1.0], 8, "▅"),
        ([0.0, 1.0, None, 2.0], 8, "▁▅ █"),
        ([0.0, 1.0, 2.0, 3.0], 2, "▁█"),
        ([0.0, math.nan, 1.0], 8, "▁!█"),
    ],
)
def test_a_course_is_drawn_in_as_many_characters_as_there_are(
    values: list[float | None], width: int, drawn: str
) -> None:
    assert sparkline(values, width) == drawn


def test_the_command_prints_one_picture_where_there_is_no_terminal(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written(directory, 3)
    assert main(["watch", str(directory.path)]) == 0
    assert "sample  step 3/30" in capsys.readouterr().out
    assert main(["watch", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_the_cluster_is_shown_with_what_is_missing_and_the_last_words_of_what_failed(directory: RunDirectory) -> None:
    written(directory, 2)
    now = STARTED + 21.0
    whole = hub_now(now, nodes=2)
    gone = msgspec.structs.replace(whole.nodes[1], state="gone", gone_at=now - 70, why="its connection ended")
    hub = msgspec.structs.replace(whole, nodes=[whole.nodes[0], gone])
    failures = [failure("env_error", now - 5, "environment x raised\nValueError: \x1b[31m" + 300 * "y", count=3)]
    directory.cluster.write_bytes(msgspec.json.encode(cluster(now - 1, hub, failures=failures)))
    lines = shown(Watched(directory), now, width=300).splitlines()
    assert "waits for a batch for step 8 (3 of 16 groups are complete)" in lines
    assert "nodes: 1 here, 1 gone" in lines
    assert "engines: 1 serving" in lines
    assert "samples on their way: 200 issued, 256 at most" in lines
    (engine,) = [line for line in lines if line.startswith("each engine: requests 12, at most 64, KV cache 25 %, ")]
    assert engine.endswith("preempted 3, prefix hits 50 %, drafts 75 %, tokens/s 300, swap s 0.5")
    assert "samples with nodes: 150 worked on, 10 queued" in lines
    assert "sandboxes: 3 in use, 2 warm, 1 waited for" in lines
    assert "node 1 (host-1) is gone for 1:10: its connection ended" in lines
    (failed,) = [line for line in lines if line.startswith("env_error failed 3 times, the last one 0:05 ago: ")]
    assert "environment x raised ValueError: " in failed
    assert "\x1b" not in failed
    assert len(failed) < 230
    stale = shown(Watched(directory), now + 90, width=300)
    assert "the state of the cluster is 1:31 old" in stale


def test_of_a_run_that_has_ended_only_failures_are_told(directory: RunDirectory) -> None:
    written(directory, 2)
    now = STARTED + 21.0
    picture = cluster(now, hub_now(now), ended="finished", failures=[failure("env_error", now - 5, "boom")])
    directory.cluster.write_bytes(msgspec.json.encode(picture))
    text = shown(Watched(directory), now)
    assert "env_error failed 1 times, the last one 0:05 ago: boom" in text
    assert "engines:" not in text
    assert "each engine" not in text


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "cluster.json", "config.toml"])
def test_a_pipe_in_the_place_of_a_file_is_an_error_that_names_it_and_keeps_nobody_waiting(
    directory: RunDirectory, name: str
) -> None:
    file = directory.path / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(RunDirectoryError, match=rf"cannot read .*/{name}: it is a pipe or a device, expected"):
        Watched(directory).picture(STARTED, 100)
