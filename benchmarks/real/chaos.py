"""A run on three hosts in which a fault happens every 20 s on average [--seconds 1800] [--seed 0].

The model and task are those of examples/tiny.toml. The first host has the hub, the trainer and an engine, and the two
others have an engine each. The seed decides the faults. A fault kills (SIGKILL) or stops (SIGSTOP for 5 to 90 s) a
process: a trainer rank, the hub's node loop, another node loop, an engine's core, a worker of it, or `flash train`
itself. Or it cuts the link of a host, in one direction or in both. A command that ends is started again after 3 s. At
the end the run is resumed once more, and ends by itself. The files that it leaves show what was lost or counted twice.
First the *calm run*, the same run without faults, measures the speed for comparison.

Needs Linux, root and iproute2, because the hosts are network namespaces. `--quick` causes each kind of fault once, for
at most 20 s; it has no `--seconds`.
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
from benchmarks.rig.hosts import Hosts, why_no_hosts

GOAL = 0.75
"""Goal of the trained tokens per second, as a share of the same run without faults."""
HANG_S = 240.0
"""Seconds without a step that count as a hang: a restart of everything with three engines on two cores takes a minute,
and a process may be stopped for 90 s meanwhile."""
CALM_S, QUICK_CALM_S = 300.0, 60.0
"""Seconds of the run without faults."""
QUICK_LONGEST_S = 20.0
"""Longest stop or cut of `--quick`, in seconds."""
SECONDS = 1800.0
"""Default of `--seconds`: the time in which faults happen."""
SETTLE_S = 100.0
"""Seconds from the end of the commands until a process counts as an orphan: deadlines.shutdown has 90 s with margin."""


class JobResult(msgspec.Struct, frozen=True):
    """Course of a run, in addition to the files that it left."""

    begin: float
    """Unix seconds of the first step with all engines."""
    end: float
    """Unix seconds of the end of the last fault."""
    injected: list[InjectedFault]
    """Faults that happened, in order."""
    missed: int
    """Number of faults that found no victim."""
    failed: list[str]
    """Launches that ended with an error of their own."""
    stuck: list[str]
    """Commands that did not end after an interrupt."""
    orphans: list[str]
    """Processes and folders that were left after all commands had ended."""


async def run_job(name: str, folder: Path, faults: Sequence[Fault], seconds: float) -> JobResult:
    """Run the job with these faults, from its start to its end.

    Args:
        name: name of the run.
        folder: folder for the run directory and the output of the commands.
        faults: faults, in order. After a run with faults, the job is resumed until it ends by itself.
        seconds: time from the first step with all engines to the end of the faults.
    """
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
    """Let each fault happen at its time, and wait until all are over and `seconds` have passed.

    Returns the faults that happened, and the number of those that found no victim.
    """
    injected: list[InjectedFault] = []

    async def one(fault: Fault) -> None:
        """Cause one fault, and record it if it found a victim."""
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


def rows(result: JobResult, left: Left, calm: JobResult, calm_per_s: float) -> list[Row]:
    """Return the rows of the report, after both runs.

    Args:
        result: course of the run with faults.
        left: files that it left.
        calm: course of the calm run, whose failures count too.
        calm_per_s: trained tokens per second of the calm run.
    """
    verdict = judge(left)
    case = f"{len(result.injected)} faults in {result.end - result.begin:.0f} s"
    # Unit of each field of the verdict, by the first word of its name.
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
        Row("no faults", "orphans_left", "processes, folders", len(calm.orphans), at_most=0),
        Row("no faults", "hangs", "commands", len(calm.stuck), at_most=0),
        Row("no faults", "launches_failed", "commands", len(calm.failed), at_most=0),
        Row(case, "found_nothing_to_hit", "faults", result.missed),
    ]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run the benchmark with its own options, `--seconds` and `--seed`, and those of every benchmark.

    Returns the rows. `argv` are the arguments; None: those of the command line.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    own, rest = parser.parse_known_args(argv)
    if own.seconds is not None and own.seconds < GAP_S:
        parser.error(f"--seconds must be at least {GAP_S:g}, the mean time between two faults")
    if own.seconds is not None and "--quick" in rest:
        parser.error("--quick has no --seconds: it ends after each kind of fault has happened once")

    def run(args: Args) -> list[Row]:
        """Make the calm run and the run with faults, and return the rows. Ends the process if it cannot make hosts."""
        if reason := why_no_hosts():
            raise SystemExit(f"no hosts can be made here: {reason}")
        seconds = own.seconds or SECONDS
        faults = one_of_each(own.seed, QUICK_LONGEST_S) if args.quick else plan(seconds, own.seed)
        if args.quick:
            seconds = faults[-1].at + GAP_S
        folder = ROOT / "outputs" / time.strftime("chaos-%Y%m%d-%H%M%S")
        folder.mkdir(parents=True)
        calm = anyio.run(run_job, "calm", folder, [], QUICK_CALM_S if args.quick else CALM_S)
        calm_per_s = tokens_per_second(left_by(folder / "calm").rows, calm.begin, calm.end)
        result = anyio.run(run_job, "broken", folder, faults, seconds)
        (folder / "faults.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in result.injected))
        for name, job in (("calm run", calm), ("run with faults", result)):
            for title in ("orphans", "failed", "stuck"):
                for line in getattr(job, title):
                    print(f"{name}, {title}: {line}")
        print(f"outputs and faults are in {folder}")
        return rows(result, left_by(folder / "broken"), calm, calm_per_s)

    return benchmark("chaos", __doc__ or "", run, rest)


if __name__ == "__main__":
    main()
