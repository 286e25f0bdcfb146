"""A new project trains as it is, in a path with spaces, through the public commands; an alarm asks for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flash.observe.alarms import Alarms
from tests.forked_command import run_forked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 10
SHORT = (f"run.steps={STEPS}", "tiny_model.warm_start_steps=20", "train.batch_size=32", "eval.problems=16")
ALARM = ("rollout.temperature=0.01", "alarms.reactions.entropy=checkpoint", "checkpoint.every=1000")
"""Settings with which nearly greedy sampling raises an alarm after some steps, which asks for a checkpoint."""


def flash(*arguments: str, folder: Path) -> str:
    """Run a command in a folder, and return its output."""
    code, said = run_forked(("-m", "flash", *arguments), folder / "output.txt", folder=folder, seconds=380)
    assert code == 0, said
    return said


def test_a_new_project_trains_at_once(tmp_path: Path) -> None:
    flash("init", "my project", folder=tmp_path)
    project = tmp_path / "my project"
    told = flash("train", "run.toml", *SHORT, *ALARM, folder=project)
    run = project / "outputs" / "my-project"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(STEPS)]
    assert all("env/places" in row for row in rows)
    assert (run / "model" / "config.json").is_file()
    assert "; alarms.reactions has a checkpoint written after the next step" in told
    alarms = Alarms()
    raised = next(row["version"] for row in rows if "entropy" in {alarm.name for alarm in alarms.step(row)})
    # On a busy machine the alarm of a step can come after the commit of the next one.
    of_alarm, last = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert of_alarm in {f"step-{raised + 1:06d}", f"step-{raised + 2:06d}"}
    assert last == f"step-{STEPS:06d}"
