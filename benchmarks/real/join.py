"""From `flash join` to the first sample: how long a node takes to be of use, and how much of that is not vLLM's start.

The workload of the `real_agentic` benchmark trains with one engine. Several times a node joins it, makes samples, and
is told to leave. `join_s` counts from the command to the node's word that an engine of it has a version; `own_s` is the
same without the start of its engines. The commands share the machine with the run, which keeps two cores busy.
"""

from __future__ import annotations

import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.form import WORKLOADS, Args, Row, main

NAME = "bench-join"
WAIT_S = 300.0
WORD = re.compile(r"node \d+ makes samples after [\d.]+ s, of which its engines took ([\d.]+) s to start")
OWN_GOAL_S = 2.0


def run(args: Args) -> list[Row]:
    """Median and longest of a few joins."""
    with training() as run_dir:
        joined = [join(run_dir) for _ in range(1 if args.quick else 5)]
    own = [total - engines for total, engines in joined]
    return [
        Row("a node joins a run", "join_s", "s", statistics.median(total for total, _ in joined)),
        Row("a node joins a run", "own_s", "s", statistics.median(own), goal=OWN_GOAL_S),
        Row("a node joins a run", "longest_own_s", "s", max(own), goal=OWN_GOAL_S),
    ]


@contextmanager
def training() -> Generator[Path]:
    """A run that trains, for the length of the block; its directory."""
    workload = WORKLOADS / "real_agentic.toml"
    command = [sys.executable, "-m", "flash", "train", str(workload), f"run.name={NAME}", "run.steps=100000"]
    run_dir = Path("outputs") / NAME
    shutil.rmtree(run_dir, ignore_errors=True)  # what an earlier one has left would be taken for this one's
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: bool(_text(run_dir / "metrics.jsonl")), "the first step")
            yield run_dir
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)


def join(run_dir: Path) -> tuple[float, float]:
    """Seconds from the command to the node's word, and those of its engines' start."""
    begun = time.monotonic()
    output = run_dir / "join.txt"
    with (
        output.open("w") as out,
        subprocess.Popen([sys.executable, "-m", "flash", "join", str(run_dir)], stdout=out) as process,
    ):
        try:
            until(lambda: WORD.search(_text(output)) is not None, "the node's word")
            seconds = time.monotonic() - begun
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)
    found = WORD.search(_text(output))
    assert found is not None, "it was there before"
    return seconds, float(found[1])


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.02)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    main("join", __doc__ or "", run)
