"""`flash profile` through the public command: real engines, trainer ranks, signals."""

from __future__ import annotations

import gzip
import json
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flash.cli.main import main
from tests.integration.whole_run import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

COMMAND = ("-m", "flash", "profile")


def events_of(file: Path) -> list[dict[str, Any]]:
    """The events of a trace that has the form that Perfetto reads."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], (int, float))
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert "tid" in event
    return events


def by_process(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The lasting events by the name of their process."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].append(event)
    return found


def test_an_interrupted_profile_leaves_what_it_has_and_its_run_goes_on_under_another_of_all_ranks_and_engines(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start("--steps=6", "--warm-up=0", "run.steps=9", "checkpoint.every=1", command=COMMAND)
    out = run.folder / "run-profile"
    metrics = out / "run" / "metrics.jsonl"
    run.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    run.nothing_left()
    report = (out / "report.txt").read_text()
    made = metrics.read_text().count("\n")
    assert f"the run ended before {6 - made} of the 6 steps" in report
    assert {"trainer 0", "engine 0"} <= by_process(events_of(out / "trace.json.gz")).keys()
    assert main(["replay", str(out / "run")]) == 0
    assert "every weight equals the checkpoint's" in capsys.readouterr().out, "recording has changed nothing"

    other = run.folder / "other"
    # The first step may be made of what the journal brings back, before there is an engine.
    arguments = ("--resume", "--steps=2", "--warm-up=1", f"--out={other}", f"run.output_dir={out}")
    several = ("cluster.trainer_ranks=2", "engine.count=2")
    again = start(*arguments, *several, "run.steps=9", command=COMMAND)
    assert again.wait() == 0, again.text()
    assert not (other / "run").exists()
    assert made < metrics.read_text().count("\n") < 9, "the run ends with what was asked for"
    of_all_on_one_time(other, first=made + 1)
    report = (other / "report.txt").read_text()
    assert report.startswith(f"steps {made + 1} to {made + 2} of 9 of the run in {out / 'run'}\n")
    assert report.rstrip() in again.text()
    assert f"{other / 'trace.json.gz'}: open it at ui.perfetto.dev" in again.text()
    again.nothing_left()


def of_all_on_one_time(folder: Path, first: int) -> None:
    """Two ranks and two engines are in the trace, and in the report, in two steps from this one on."""
    processes = by_process(events_of(folder / "trace.json.gz"))
    whos = {f"{kind} {number}" for kind in ("trainer", "engine") for number in (0, 1)}
    assert set(processes) >= whos | {"who was busy", "steps"}
    (begin,) = (event["ts"] for event in processes["steps"] if event["name"] == f"step {first}")
    last = max(event["ts"] + event["dur"] for event in processes["steps"])
    for rank in (0, 1):
        updates = [each for each in processes[f"trainer {rank}"] if each["name"].startswith("Optimizer.step")]
        assert len(updates) == 2, "of both steps, and of no other"
        assert all(begin <= update["ts"] <= last for update in updates)
    for engine in (0, 1):
        assert any(event["name"] == "engine step" for event in processes[f"engine {engine}"])
    report = (folder / "report.txt").read_text()
    assert "nothing is there of" not in report
    assert all(f"\n{who}: " in report for who in whos)
