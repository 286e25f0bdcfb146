"""A run on three hosts, of which something is killed, stopped or cut off every 20 s [--seconds 1800] [--seed 0].

The model and task are those of examples/tiny.toml. The first host has the hub, the trainer and an engine, two others an
engine each. The seed decides the faults: SIGKILL, or SIGSTOP for 5 to 90 s, hits a trainer rank, the hub's node loop,
another node loop, an engine's core, a worker of it or `flash train` itself, or a host's link is cut in one direction or
in both. A command that ends is started again after 3 s. At the end the run is resumed once more, and ends by itself.
The files that it leaves show what was lost or counted twice.

Needs Linux, root and iproute2, because the hosts are network namespaces. `--quick`: each kind of fault once, for at
most 20 s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from benchmarks.form import ROOT, Args, Row
from benchmarks.form import main as benchmark
from benchmarks.real.chaos_cluster import NAMES, Job
from benchmarks.real.chaos_faults import GAP_S, Fault, InjectedFault, one_of_each, plan
from benchmarks.real.chaos_judge import Left, judge, left_by, stretches, tokens_per_second
from benchmarks.rig.hosts import Hosts, missing

GOAL = 0.75
"""Goal of the trained tokens per second, as a share of the same run without faults."""
HANG_S = 240.0
"""Seconds without a step that count as a hang: a restart of everything with three engines on two cores takes a minute,
and a process may be stopped for 90 s meanwhile."""
CALM_S, QUICK_CALM_S = 300.0, 60.0
"""Seconds of the run without faults."""
QUICK_LONGEST_S = 20.0
SETTLE_S = 100.0
"""Seconds from the end of the commands until a process counts as an orphan: deadlines.shutdown has 90 s with margin."""


class JobResult(msgspec.Struct, frozen=True):
    """Course of a run, beside the files that it left."""

    begin: float
    """Unix seconds of the first step with all engines."""
    end: float
    """Unix seconds of the end of the last fault."""
    injected: list[InjectedFault]
    missed: int
    """Number of faults that found no victim."""
    failed: list[str]
    """Launches that ended with an error of their own."""
    stuck: list[str]
    """Commands that did not end after an interrupt."""
    orphans: list[str]


async def run_job(name: str, folder: Path, faults: Sequence[Fault], seconds: float) -> JobResult:
    """Run the job with these faults, from its start to its end."""
    with Hosts(*NAMES) as hosts:
        job = Job(hosts, name, folder)
        async with anyio.create_task_group() as tasks:
            for host in range(len(NAMES)):
                tasks.start_soon(job.keep, host)
            await job.all_engines()
            begin = time.time()
            injected, missed = await inject(job, faults, seconds)
            end = time.time()
            stuck = await job.end()
        if faults:
            stuck += await job.finish()
        return JobResult(begin, end, injected, missed, job.failed, stuck, await job.orphans(SETTLE_S))


async def inject(job: Job, faults: Sequence[Fault], seconds: float) -> tuple[list[InjectedFault], int]:
    """Let all faults happen and pass; return those that happened, and the number of those that found no victim."""
    injected: list[InjectedFault] = []

    async def one(fault: Fault) -> None:
        print(f"{time.strftime('%H:%M:%S')} {fault.kind} on {NAMES[fault.host]} for {fault.seconds:.0f} s", flush=True)
        if (happened := await job.inject(fault)) is not None:
            injected.append(happened)

    begin = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for fault in faults:
            await anyio.sleep_until(begin + fault.at)
            tasks.start_soon(one, fault)
        await anyio.sleep_until(begin + seconds)
    return sorted(injected, key=lambda each: each.at), len(faults) - len(injected)


def rows(result: JobResult, left: Left, calm_per_s: float) -> list[Row]:
    """Return the rows of the report."""
    verdict = judge(left)
    case = f"{len(result.injected)} faults in {result.end - result.begin:.0f} s"
    units = {"tasks": "tasks", "tokens": "tokens", "rows": "lines"}
    hangs = len(stretches(left.times, result.begin, result.end, HANG_S)) + len(result.stuck)
    broken_per_s = tokens_per_second(left.rows, result.begin, result.end)
    return [
        *(
            Row(case, name, units[name.partition("_")[0]], value, at_most=0)
            for name, value in msgspec.structs.asdict(verdict).items()
        ),
        Row(case, "orphans_left", "processes, folders", len(result.orphans), at_most=0),
        Row(case, "hangs", f"times > {HANG_S:g} s", hangs, at_most=0),
        Row(case, "launches_failed", "commands", len(result.failed), at_most=0),
        Row(case, "goodput", "share of the calm run", broken_per_s / calm_per_s, at_least=GOAL),
        Row(case, "trained_tokens_per_s", "tokens/s", broken_per_s),
        Row("no faults", "trained_tokens_per_s", "tokens/s", calm_per_s),
        Row(case, "found_nothing_to_hit", "faults", result.missed),
    ]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Parse `--seconds` and `--seed`, and the options of every benchmark; run, and return the rows."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    own, rest = parser.parse_known_args(argv)

    def run(args: Args) -> list[Row]:
        if why := missing():
            raise SystemExit(f"no hosts can be made here: {why}")
        faults = one_of_each(own.seed, QUICK_LONGEST_S) if args.quick else plan(own.seconds, own.seed)
        seconds = faults[-1].at + GAP_S if args.quick else own.seconds
        folder = ROOT / "outputs" / time.strftime("chaos-%Y%m%d-%H%M%S")
        folder.mkdir(parents=True)
        calm = anyio.run(run_job, "calm", folder, [], QUICK_CALM_S if args.quick else CALM_S)
        calm_per_s = tokens_per_second(left_by(folder / "calm").rows, calm.begin, calm.end)
        result = anyio.run(run_job, "broken", folder, faults, seconds)
        (folder / "faults.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in result.injected))
        for title in ("orphans", "failed", "stuck"):
            for line in getattr(result, title):
                print(f"{title}: {line}")
        print(f"outputs and faults are in {folder}")
        return rows(result, left_by(folder / "broken"), calm_per_s)

    return benchmark("chaos", __doc__ or "", run, rest)


if __name__ == "__main__":
    main()
