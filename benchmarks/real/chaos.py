"""A run on three hosts in which a fault happens every 20 s on average.

The model and task are those of examples/tiny.toml. The first host has the hub, the trainer and an engine, and the two
others have an engine each. A fault kills (SIGKILL) or stops (SIGSTOP for 5 to 90 s) a process: a trainer rank, the
hub's node loop, another node loop, an engine's core, a worker of it, or `flash train` itself. Or it cuts the link of a
host, in one direction or in both. A command that ends is started again after 3 s. At the end the run is resumed once
more, and ends by itself. The files that it leaves show what was lost or counted twice. First the *calm run*, the same
run without faults, measures the speed for comparison. Steps are streamed: they begin before their batch is whole, so
that faults also happen in the middle of a step.

Needs Linux, root and iproute2, because the hosts are network namespaces. `--quick` causes each kind of fault once, for
at most 20 s.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import msgspec

from benchmarks.form import ROOT, Args, Row, main
from benchmarks.real.chaos_job import GAP_S, NAMES, Fault, Job, one_of_each, plan
from benchmarks.rig.hosts import Hosts, why_no_hosts
from flash.ages import max_age
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.types import VersionRun

GOAL = 0.75
"""Goal of the trained tokens per second, as a share of the same run without faults."""
HANG_S = 240.0
"""Seconds without a step that count as a hang: a restart of everything with three engines on two cores takes a minute,
and a process may be stopped for 90 s meanwhile."""
CALM_S, QUICK_CALM_S = 300.0, 60.0
"""Seconds of the run without faults."""
QUICK_LONGEST_S = 20.0
"""Longest stop or cut of `--quick`, in seconds."""
SEED = 0
"""Seed of the plan of faults."""
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
    injected: list[Fault]
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


async def inject(job: Job, faults: Sequence[Fault], seconds: float) -> tuple[list[Fault], int]:
    """Let each fault happen at its time, and wait until all are over and `seconds` have passed.

    Returns the faults that happened, and the number of those that found no victim.
    """
    injected: list[Fault] = []

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


# -- losses and double counts ----------------------------------------------------------------------------------------
#
# They are read from the files that the run left. All functions except `left_by` touch no file. The run
# must have ended in order: then nothing is in flight, and the *ledger* counts every task and every token in one place,
# by its fate. A *task* asks for one sample.

Metrics = Mapping[str, Any]
"""Row of `metrics.jsonl`: the metrics of a step, by name."""


class Trained(msgspec.Struct, frozen=True):
    """Batch of a step, as the run has recorded it for replay."""

    step: int
    min_version: int
    """Oldest version whose tokens the step trained."""
    tasks: list[tuple[int, list[VersionRun]]]
    """Number of the task of each sample, and the versions of its tokens, run-length encoded."""

    def tokens(self, versions: Iterable[VersionRun]) -> int:
        """Return the number of tokens of a sample that were trained. `versions` are the versions of all its tokens."""
        return sum(run.count for run in versions if run.version >= self.min_version)


class Left(msgspec.Struct, frozen=True):
    """Content of the files of a run that has ended."""

    ledger: Mapping[str, int]
    """Counts of tasks and tokens by their fate, from `ledger.json`."""
    max_age: int
    """Largest age of a trained token that the run allows, in versions."""
    rows: Sequence[Metrics]
    """Rows of `metrics.jsonl`."""
    redone: Sequence[Metrics]
    """Rows of steps that a restart has repeated; `rows` has the rows of the repetition."""
    samples: Mapping[int, int]
    """Number of lines of `samples.jsonl`, by step."""
    batches: Sequence[Trained]
    """Recorded batches of all steps."""

    @property
    def times(self) -> list[float]:
        """Unix seconds at which steps ended, in order, including steps that were repeated later."""
        return sorted(row["time"] for row in (*self.rows, *self.redone))


class Verdict(msgspec.Struct, frozen=True):
    """Counts of the things that must not happen.

    The first word of a field's name is the unit of its row in the report. A `float` is NaN if the run did not end in
    order, because the count cannot be known then.
    """

    tasks_lost: float
    """Tasks that were issued, and neither trained, filtered, given up nor in flight."""
    tasks_doubled: int
    """Times that a task was trained beyond the first."""
    tokens_unaccounted: float
    """Tokens that were sampled, and neither trained nor discarded; or whose count differs from that of the batches."""
    tokens_beyond_alpha: int
    """Trained tokens that were older than the run allows."""
    rows_doubled: int
    """Lines of metrics and samples beyond the first."""
    rows_lost: int
    """Missing lines of metrics and samples."""


def left_by(run_dir: Path) -> Left:
    """Read the files of a run that has ended, from its run directory. Raises OSError without its ledger."""
    directory = RunDirectory(run_dir)
    train = tomllib.loads(directory.config.read_text())["train"]
    redone = directory.read_earlier_metrics()
    return Left(
        ledger=json.loads(directory.ledger.read_text()),
        max_age=max_age(train["async_ratio"], train.get("max_token_age")),
        rows=directory.read_metrics(),
        redone=redone,
        samples=Counter(sample.step for sample in directory.read_samples()),
        batches=[
            Trained(step, batch.min_version, [(made.task.task_id, made.versions) for made in batch.trajectories])
            for step in recorded_steps(directory.batches)
            for batch in (read_batch(directory.batches, step),)
        ],
    )


def judge(left: Left) -> Verdict:
    """Compare the run's ledger with its recorded batches, and count what is missing or counted twice."""
    ledger = left.ledger
    times_in_batch: Counter[int] = Counter()  # number of batches that have each task
    trained_tasks: set[int] = set()  # tasks with at least one trained token
    trained_tokens = too_old = 0
    trained_samples = {batch.step: 0 for batch in left.batches}  # samples of each step with at least one trained token
    for batch in left.batches:
        # A step may train tokens of `min_version`, but the run allows none that are older than `max_age`.
        allowed = Trained(batch.step, max(batch.min_version, batch.step - left.max_age), [])
        for task, versions in batch.tasks:
            times_in_batch[task] += 1
            if (count := batch.tokens(versions)) > 0:
                trained_tasks.add(task)
                trained_tokens += count
                trained_samples[batch.step] += 1
            too_old += count - allowed.tokens(versions)
    rows_of_step = Counter(int(row["step"]) for row in left.rows)
    steps = range(max([*rows_of_step, *trained_samples, *left.samples], default=-1) + 1)
    # Lines of samples.jsonl that each step has too many; negative if lines are missing.
    surplus = [left.samples.get(step, 0) - trained_samples.get(step, 0) for step in steps]
    ended = ledger["in_flight"] == 0
    not_trained = ledger["filtered"] + ledger["given_up"]
    without_fate = ledger["generated_tokens"] - ledger["trained_tokens"] - ledger["discarded_tokens"]
    miscounted = ledger["trained_tokens"] - trained_tokens
    return Verdict(
        tasks_lost=abs(ledger["issued"] - len(trained_tasks) - not_trained) if ended else math.nan,
        tasks_doubled=times_in_batch.total() - len(times_in_batch),
        tokens_unaccounted=abs(without_fate) + abs(miscounted) if ended else math.nan,
        tokens_beyond_alpha=too_old,
        rows_doubled=rows_of_step.total() - len(rows_of_step) + sum(more for more in surplus if more > 0),
        rows_lost=len(steps) - len(rows_of_step) - sum(less for less in surplus if less < 0),
    )


def stretches(times: Iterable[float], begin: float, end: float, longest_s: float) -> list[float]:
    """Return the seconds of each time without a step that is longer than `longest_s`.

    `times` are the ends of steps. `begin` and `end` bound the time that counts. All are in Unix seconds.
    """
    inside = [begin, *(time for time in sorted(times) if begin < time < end), end]
    return [later - earlier for earlier, later in pairwise(inside) if later - earlier > longest_s]


def tokens_per_second(rows: Iterable[Metrics], begin: float, end: float) -> float:
    """Return the trained tokens per second of the time from `begin` to `end`, in Unix seconds.

    `rows` are the rows of the steps, without steps that a restart repeated.
    """
    return sum(row["trained_tokens"] for row in rows if begin < row["time"] <= end) / (end - begin)


# -- the report ------------------------------------------------------------------------------------------------------


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
    courses = ((case, result, hangs, broken_per_s), ("no faults", calm, len(calm.stuck), calm_per_s))
    return [
        *(
            Row(case, name, units[name.partition("_")[0]], value, at_most=0)
            for name, value in msgspec.structs.asdict(verdict).items()
        ),
        *(
            row
            for name, course, hung, tokens_per_s in courses
            for row in (
                Row(name, "orphans_left", "processes, folders", len(course.orphans), at_most=0),
                Row(name, "hangs", f"times > {HANG_S:g} s", hung, at_most=0),
                Row(name, "launches_failed", "commands", len(course.failed), at_most=0),
                Row(name, "trained_tokens_per_s", "tokens/s", tokens_per_s),
            )
        ),
        Row(case, "goodput", "share of the calm run", broken_per_s / calm_per_s, at_least=GOAL),
        Row(case, "found_nothing_to_hit", "faults", result.missed),
    ]


def measure(args: Args) -> list[Row]:
    """Make the calm run and the run with faults, and return the rows. Ends the process if it cannot make hosts."""
    own = args.own
    if own.seconds is not None and args.quick:
        raise SystemExit("--quick has no --seconds: it ends after each kind of fault has happened once")
    if reason := why_no_hosts():
        raise SystemExit(f"no hosts can be made here: {reason}")
    seconds = own.seconds or SECONDS
    faults = one_of_each(SEED, QUICK_LONGEST_S) if args.quick else plan(seconds, SEED)
    if args.quick:
        seconds = faults[-1].at + GAP_S
    folder = ROOT / "outputs" / time.strftime("chaos-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    calm = anyio.run(run_job, "calm", folder, [], QUICK_CALM_S if args.quick else CALM_S)
    calm_per_s = tokens_per_second(left_by(folder / "calm").rows, calm.begin, calm.end)
    result = anyio.run(run_job, "broken", folder, faults, seconds)
    (folder / "faults.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in result.injected))
    for name, course in (("calm run", calm), ("run with faults", result)):
        for title in ("orphans", "failed", "stuck"):
            for line in getattr(course, title):
                print(f"{name}, {title}: {line}")
    print(f"outputs and faults are in {folder}")
    return rows(result, left_by(folder / "broken"), calm, calm_per_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""

    def seconds(text: str) -> float:
        """Parse the value of `--seconds`."""
        if float(text) < GAP_S:
            raise argparse.ArgumentTypeError(f"must be at least {GAP_S:g}, the mean time between two faults")
        return float(text)

    parser.add_argument("--seconds", type=seconds, help=f"time in which faults happen; default: {SECONDS:g}")


if __name__ == "__main__":
    main("chaos", __doc__ or "", measure, add_options=add_options)
