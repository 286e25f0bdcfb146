"""Runs of `flash train` and the files that they leave, for all benchmarks that train for real."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import Row, run_command

PINNED = ["cluster.node_cpus=[0]", "cluster.trainer_cpus=[1]"]
"""Overrides: the node loop and its engine on core 0, the trainer on core 1; each core stands for one device."""
RUN_TIMEOUT_S = 1800
"""Longest wait for one run."""


class Measured(msgspec.Struct, frozen=True):
    """Rows that a run has written, and its duration."""

    seconds: float
    """Seconds from the end of the first evaluation, when rollouts begin, to the last commit."""
    summary: dict[str, Any]
    """Content of `summary.json`."""
    evals: list[dict[str, Any]]
    """Rows of `evals.jsonl`."""
    metrics: list[dict[str, Any]]
    """Rows of `metrics.jsonl`."""

    def mean(self, name: str, steps: slice = slice(None)) -> float:
        """Return the mean of a column of `metrics.jsonl` over the steps, by default over all of them."""
        rows = self.metrics[steps]
        return sum(row[name] for row in rows) / len(rows)


Train = Callable[[Path, str, list[str]], Measured]
"""Signature of `train`, which tests of benchmarks replace."""


def run(workload: Path, name: str, overrides: list[str]) -> Path:
    """Run `flash train` with the configuration file `workload` and settings `KEY=VALUE`. Returns the run directory."""
    command = [sys.executable, "-m", "flash", "train", str(workload), f"run.name={name}", *overrides]
    run_command(command, RUN_TIMEOUT_S)
    return Path("outputs") / name


def train(workload: Path, name: str, overrides: list[str]) -> Measured:
    """Run `flash train` as `run` does, and read the files that it leaves."""
    run_dir = run(workload, name, overrides)
    evals, metrics = (
        [json.loads(line) for line in (run_dir / file).read_text().splitlines()]
        for file in ("evals.jsonl", "metrics.jsonl")
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    return Measured(metrics[-1]["time"] - evals[0]["time"], summary, evals, metrics)


def speed_rows(case: str, runs: Sequence[Measured]) -> list[Row]:
    """Return the rows about the speed of runs with the same settings: for each figure, the median over the runs."""
    figures: tuple[tuple[str, str, Callable[[Measured], float]], ...] = (
        ("seconds", "s", lambda run: run.seconds),
        ("trainer_busy_share", "share", lambda run: 1 - run.summary["trainer_wait_share"]),
        ("engine_busy_share", "share", lambda run: 1 - run.summary["engine_idle_share"]),
        ("trainer_step_s_per_step", "s", lambda run: run.mean("trainer_step_s")),
    )
    return [Row(case, name, unit, statistics.median(map(value, runs))) for name, unit, value in figures]
