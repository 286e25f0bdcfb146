"""A run of `flash train` and what it left behind: what the benchmarks that train for real share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import run_command

PINNED = ["cluster.node_cpus=[0]", "cluster.trainer_cpus=[1]"]
"""Overrides: the node loop and its engine on core 0, the trainer on core 1, each core for one device."""
RUN_TIMEOUT_S = 1800
"""Longest wait for one run."""


class Measured(msgspec.Struct, frozen=True):
    """What a run wrote down."""

    seconds: float
    """From the end of the first evaluation, when rollouts begin, to the last commit."""
    summary: dict[str, Any]
    evals: list[dict[str, Any]]
    metrics: list[dict[str, Any]]

    def mean(self, name: str, steps: slice = slice(None)) -> float:
        """A metric, averaged over the steps."""
        rows = self.metrics[steps]
        return sum(row[name] for row in rows) / len(rows)


Train = Callable[[Path, str, list[str]], Measured]
"""As `train`."""


def run(workload: Path, name: str, overrides: list[str]) -> Path:
    """Run `flash train`; the run's directory."""
    command = [sys.executable, "-m", "flash", "train", str(workload), f"run.name={name}", *overrides]
    run_command(command, RUN_TIMEOUT_S)
    return Path("outputs") / name


def train(workload: Path, name: str, overrides: list[str]) -> Measured:
    """Run `flash train` and read what it left behind."""
    run_dir = run(workload, name, overrides)
    evals, metrics = (_rows(run_dir / file) for file in ("evals.jsonl", "metrics.jsonl"))
    summary = json.loads((run_dir / "summary.json").read_text())
    return Measured(metrics[-1]["time"] - evals[0]["time"], summary, evals, metrics)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
