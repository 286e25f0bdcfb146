"""What it costs a real run to record itself: rows, timeline, samples, batches, and the overview of its cluster.

The configuration of examples/tiny.toml, 100 steps of it (30 with `--quick`), with an environment that times what its
node records (`benchmarks.real.recording_probe`): on the loop each call that records, in the writing thread what it
writes. What is compared is of one run and one process: processor time of what records, over the run's time from its
first step to the last that was counted. Where other work delays the run, that is too little: what a step's recording
takes of the processor does not depend on it. Rounds with and without recording are no help, as they differ more for
other reasons.

What the trainer does for the tokens of readable samples is timed afterwards, in this process, on the batches that the
run has left.

The loop's longest stop is given twice: as the clock has it, in which whatever else wants the same core has a part, such
as that run's engine, and in the thread's own processor time, which is what the code itself needs. The journal is
not counted: a restart goes on from it, and `benchmarks.simulated.journal` has its figures.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.form import ROOT, Args, Row, main
from benchmarks.real.recording_probe import FILE
from benchmarks.training import train
from flash.config.load import load
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.samples.batches import split_into_shards
from flash.trainer.statistics import ShownTokens
from flash.waiting import run_to_end

NAME = "benchmark-recording"
STEPS, QUICK_STEPS = 100, 30
SHARE = 0.01
"""The goal: of the run's time."""
LONGEST_MS = 5.0
"""The goal: of the loop, at once."""
WRITER = ("_write_batch", "_write_shown", "_write")
"""What the writing thread does; all else is done on the loop."""
PARTS = {
    "rows and the terminal's lines": ("step", "evaluation", "note", "failure", "ledger"),
    "timeline": ("activities",),
    "samples and batches, handed over": ("batch", "trained"),
    "batches and rows of samples, written": ("_write_batch",),
    "readable samples, written": ("_write_shown",),
    "the cluster, looked at": ("overview", "status", "report_status", "cluster"),
    "the cluster, written": ("_write",),
}


def rows(args: Args) -> list[Row]:
    """Shares of the run's time, and the longest stop of the loop."""
    steps = QUICK_STEPS if args.quick else STEPS
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        file = Path(folder) / "sums.json"
        os.environ[FILE] = str(file)
        try:
            run = train(
                ROOT / "examples" / "tiny.toml",
                NAME,
                ["env.path=benchmarks.real.recording_probe:Arithmetic", f"run.steps={steps}"],
            )
        finally:
            del os.environ[FILE]
        told = json.loads(file.read_text())
    return compared(told, told["at"] - run.evals[0]["time"], looked_ms(Path("outputs") / NAME))


def looked_ms(run: Path) -> float:
    """Milliseconds of a processor per step that a trainer rank looks at single tokens, on what the run has trained."""
    import torch
    import torch.distributed as dist

    from flash.trainer.step import Trainer

    spent = [0.0]
    for name in ("__init__", "add", "gather"):
        setattr(ShownTokens, name, timed_into(spent, getattr(ShownTokens, name)))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = Trainer(load([run / "config.toml"], []))
        steps = recorded_steps(run / "batches")
        for step in steps:
            (shard,) = run_to_end(split_into_shards(read_batch(run / "batches", step), 1))
            trainer.version = step
            trainer.train_step(shard)
    finally:
        dist.destroy_process_group()
    return 1e3 * spent[0] / len(steps)


def timed_into(spent: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, which adds its processor time."""

    @functools.wraps(call)
    def timed(*args: Any, **more: Any) -> Any:
        begun = time.thread_time()
        try:
            return call(*args, **more)
        finally:
            spent[0] += time.thread_time() - begun

    return timed


def compared(told: dict[str, Any], seconds: float, trainer_ms: float) -> list[Row]:
    """The rows of what the probe told, of a run that took so long."""
    calls: dict[str, dict[str, float]] = told["calls"]
    of_loop = {name: sums for name, sums in calls.items() if name not in WRITER}
    loop = [*of_loop.values()]
    writer = [calls[name] for name in WRITER]
    on_loop, in_thread = (sum(sums["processor_s"] for sums in part) for part in (loop, writer))
    steps = calls["step"]["calls"]
    in_trainer = trainer_ms * steps / 1e3
    case = "tiny: processor time over the run's time"
    longest = max(of_loop, key=lambda name: of_loop[name]["longest_s"])
    slowest = max(sums["longest_processor_s"] for sums in loop)
    return [
        Row(f"{case}, all", "recording_cost_s", "s/s", (on_loop + in_thread + in_trainer) / seconds, goal=SHARE),
        Row(f"{case}, on the loop", "recording_cost_s", "s/s", on_loop / seconds),
        Row(f"{case}, in the writing thread", "recording_cost_s", "s/s", in_thread / seconds),
        Row(f"{case}, in the trainer", "recording_cost_s", "s/s", in_trainer / seconds),
        *(
            Row(f"  {title}", "recording_cost_s", "s/s", sum(calls[name]["processor_s"] for name in names) / seconds)
            for title, names in PARTS.items()
        ),
        Row("processor time of recording a step", "step_ms", "ms", 1e3 * (on_loop + in_thread + in_trainer) / steps),
        Row(
            "all of it, of the node's processor time",
            "recording_cost_s",
            "s/s",
            (on_loop + in_thread) / told["process_s"],
        ),
        Row(
            f"longest on the loop, by the clock: `{longest}`",
            "longest_ms",
            "ms",
            1e3 * of_loop[longest]["longest_s"],
            goal=LONGEST_MS,
        ),
        Row("longest on the loop, its processor time", "longest_ms", "ms", 1e3 * slowest, goal=LONGEST_MS),
    ]


if __name__ == "__main__":
    main("recording", __doc__ or "", rows)
