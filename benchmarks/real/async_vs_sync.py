"""Wall-clock speed of asynchronous over synchronous training, on two cores that stand for two devices.

Both runs go through `flash train` with the same seed, model, environment, batch and number of samples. The first row
pins the node loop with all engine processes to core 0 and the trainer to core 1, in both modes: with generation and
training equally heavy, 2.0 is the limit. The second row lets the synchronous run use both cores in each phase. Time
runs from the end of the first evaluation, when rollouts begin, to the last committed step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.form import WORKLOADS, Args, Row, main

WORKLOAD = WORKLOADS / "async_vs_sync.toml"
PINNED = ["cluster.node_cpus=[0]", "cluster.trainer_cpus=[1]"]
GOAL = 1.6
"""Of the pinned comparison; 2.0 is the limit."""


def train(name: str, overrides: list[str]) -> dict[str, Any]:
    """One run; its summary, and the seconds from the first lease to the last commit."""
    command = [sys.executable, "-m", "flash", "train", str(WORKLOAD), f"run.name={name}", *overrides]
    subprocess.run(command, check=True, timeout=1800)
    run_dir = Path("outputs") / name
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = json.loads((run_dir / "evals.jsonl").read_text().splitlines()[0])
    waited = sum(row["trainer_wait_s"] for row in metrics)
    trained = sum(row["trainer_step_s"] for row in metrics)
    return summary | {
        "seconds": metrics[-1]["time"] - first["time"],
        "generate_s": waited / len(metrics),
        "train_s": trained / len(metrics),
    }


def compare(args: Args) -> list[Row]:
    """All runs and the rows they give."""
    size = [f"run.steps={8 if args.quick else 30}"]
    runs = {
        "sync, one core each": train("bench-sync", [*size, *PINNED, "train.async_ratio=0"]),
        "async, one core each": train("bench-async", [*size, *PINNED, "train.async_ratio=1"]),
        "sync, both cores": train("bench-sync-both", [*size, "train.async_ratio=0"]),
    }
    ours = runs["async, one core each"]
    rows = [
        Row("async over sync, one core each", "speedup", "x", runs["sync, one core each"]["seconds"] / ours["seconds"],
            None, GOAL),
        Row("async, one core each, over sync, both cores", "speedup", "x",
            runs["sync, both cores"]["seconds"] / ours["seconds"], None, None),
    ]  # fmt: skip
    for case, run in runs.items():
        rows += [
            Row(case, "seconds", "s", run["seconds"], None, None),
            Row(case, "final_accuracy", "share", run["final_accuracy"], None, None),
            Row(case, "trainer_busy_share", "share", 1 - run["trainer_wait_share"], None, None),
            Row(case, "engine_busy_share", "share", 1 - run["engine_idle_share"], None, None),
            Row(case, "trainer_wait_s_per_step", "s", run["generate_s"], None, None),
            Row(case, "trainer_step_s_per_step", "s", run["train_s"], None, None),
        ]
    return rows


if __name__ == "__main__":
    main("async_vs_sync", __doc__ or "", compare)
