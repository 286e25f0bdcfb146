"""Benchmarks of whole runs of `flash train`: `python -m benchmarks.real.runs NAME [--quick] [--json FILE]`.

The runs of a benchmark have the same model, environment, batch and number of samples, and differ in their *mode*: some
settings. vLLM, trainer and environments are real. The node loop with its engine and its environments runs on core 0,
and the trainer on core 1: each core stands for one device. Time runs from the end of the first evaluation, when
rollouts begin, to the last committed step. α is `train.async_ratio`. Barriers switch off the *techniques* of ROLL
Flash: queue scheduling, prompt replication and environments that step on their own. The docstring of each function in
`RUNS` describes its benchmark. `benchmarks.gpu` and `benchmarks.versus_trl` use `train` and `run`, too.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import WORKLOADS, Args, Row, main_of, run_command
from flash.cli.simulate import predicted_step_s
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import by_step
from flash.observe.stats import Interval
from flash.simulate.calibrate import calibrate, measured_step_s

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
    """Run `flash train` with the configuration file `workload` and settings `KEY=VALUE`. Returns the run directory.

    Raises CalledProcessError if the run fails, and TimeoutExpired if it takes more than `RUN_TIMEOUT_S`.
    """
    command = [sys.executable, "-m", "flash", "train", str(workload), f"run.name={name}", *overrides]
    run_command(command, RUN_TIMEOUT_S)
    return Path("outputs") / name


def train(workload: Path, name: str, overrides: list[str]) -> Measured:
    """Run `flash train` as `run` does, and read the files that it leaves. Raises the errors of `run`."""
    directory = RunDirectory(run(workload, name, overrides))
    evals, metrics = directory.read_evaluations(), directory.read_metrics()
    summary = json.loads(directory.summary.read_text())
    return Measured(metrics[-1]["time"] - evals[0]["time"], summary, evals, metrics)


# -- all comparisons -------------------------------------------------------------------------------------------------

Modes = Mapping[str, list[str]]
"""Overrides of each mode, by its name. The first mode is the one that the others are compared with."""
Round = Mapping[str, Measured]
"""Measurements of one run of each mode, by the mode's name."""
ALPHA_0 = ["train.async_ratio=0", "rollout.seeded=false"]
"""Overrides of synchronous training. Seeds are off, as they are in asynchronous runs, because they cost time."""
TECHNIQUES = {
    "synchronous": [*ALPHA_0, 'rollout.barriers=["batch", "group", "turn"]'],
    "α = 2": ["train.async_ratio=2"],
}
"""Modes of `real_agentic` and `real_rlvr`. The second one has all techniques, which are on by default."""


def one_round(
    workload: str, modes: Modes, number: int, steps: int, more: Sequence[str] = (), train: Train = train
) -> Round:
    """Run every mode once, for `steps` steps. The round's number, counted from 0, is the seed of its runs.

    Each round begins with another mode, so that none is always the first. `workload` is the name of the configuration,
    and `more` are further overrides of all runs. Tests replace `train`.
    """
    first = number % len(modes)
    order = [*modes, *modes][first : first + len(modes)]  # rotated
    size = [*more, f"run.steps={steps}", f"run.seed={number}"]
    file = WORKLOADS / f"{workload}.toml"
    return {
        mode: train(file, f"bench-{workload}-{list(modes).index(mode)}", [*PINNED, *size, *modes[mode]])
        for mode in order
    }


def rows_of(
    modes: Modes, rounds: Sequence[Round], goals: Mapping[str, float], papers: Mapping[str, float] | None = None
) -> list[Row]:
    """Return the rows of all rounds: speed-ups over the first mode, agreement of accuracies, and each mode's figures.

    Each ratio is taken within a round. The figure is the median of the rounds, and the smallest and largest ratio stand
    below it if there are several. Accuracies agree if their 95 % intervals overlap. `goals` and `papers` are the goals
    and the published values of the speed-ups, by mode.
    """
    base, *others = modes
    rows: list[Row] = []
    for mode in others:
        ratios = [each[base].seconds / each[mode].seconds for each in rounds]
        case, paper = f"{mode} over {base}", (papers or {}).get(mode)
        rows.append(Row(case, "speedup", "x", statistics.median(ratios), paper, at_least=goals.get(mode)))
        if len(rounds) > 1:
            rows += [Row(case, "speedup_least", "x", min(ratios)), Row(case, "speedup_most", "x", max(ratios))]
    final = {mode: accuracy([each[mode] for each in rounds]) for mode in modes}
    for mode in others:
        agree = final[mode].low <= final[base].high and final[base].low <= final[mode].high
        rows.append(Row(f"{mode}, final accuracy that of {base}", "overlap", "0 or 1", float(agree), at_least=1))
    for mode in modes:
        runs = [each[mode] for each in rounds]
        figures = (
            ("seconds", "s", [one.seconds for one in runs]),
            ("trainer_step_s_per_step", "s", [one.mean("trainer_step_s") for one in runs]),
            ("trainer_wait_s_per_step", "s", [one.mean("trainer_wait_s") for one in runs]),
            ("mean_age", "versions", [one.mean("age_mean") for one in runs]),
            ("final_accuracy", "share", [final[mode].mean]),
            ("final_accuracy_low", "share", [final[mode].low]),
            ("final_accuracy_high", "share", [final[mode].high]),
        )
        rows += [Row(mode, name, unit, statistics.median(values)) for name, unit, values in figures]
    return rows


def accuracy(runs: Sequence[Measured]) -> Interval:
    """Return the mean of the last evaluations of all runs, with its 95 % interval.

    The intervals of the evaluations are independent, so the squares of their widths add up.
    """
    last, count = [one.evals[-1] for one in runs], len(runs)
    mean = sum(row["mean_reward"] for row in last) / count
    below, above = (math.hypot(*(row["mean_reward"] - row[end] for row in last)) / count for end in ("low", "high"))
    return Interval(mean, mean - below, mean + above)


def real_agentic(args: Args) -> list[Row]:
    """Compare all techniques at α = 2 with synchronous training, in environments that answer late.

    The task is envs.chain: five sums in turn. A step of the environment takes 0.3 s in the mean, about as long as a
    turn of a batch takes to generate. It is log-normal with a standard deviation of 0.2 s, so the slowest of 128 takes
    three to four times the mean, as under the paper's N(10, 10). In synchronous training, 128 environments step
    together, and generation waits for the slowest. The published value is ROLL Flash's on ALFWorld, end to end.
    """
    rounds = [one_round("real_agentic", TECHNIQUES, 0, 5 if args.quick else 24)]
    return rows_of(TECHNIQUES, rounds, goals={"α = 2": 2.72}, papers={"α = 2": 2.72})


def real_rlvr(args: Args) -> list[Row]:
    """Compare all techniques at α = 2 with synchronous training, on responses with a long tail of lengths.

    The task is envs.counting. The right answer has 24 tokens in the median and up to 480, log-normal, so a batch waits
    for its longest response as in RL on reasoning. Synchronous training has batches of 128 samples and whole groups on
    one engine. The published value is ROLL Flash's on RLVR, end to end.
    """
    rounds = [one_round("real_rlvr", TECHNIQUES, 0, 8 if args.quick else 80)]
    return rows_of(TECHNIQUES, rounds, goals={"α = 2": 1.7}, papers={"α = 2": 2.24})


LOCK_STEP, OWN = "synchronous, lock-step", "synchronous, each on its own"
"""Names of the synchronous modes of `real_textworld`."""
ASYNC, REDUNDANT = "asynchronous", "asynchronous, redundant"
"""Names of its asynchronous modes."""
GAMES: Modes = {
    LOCK_STEP: ["train.async_ratio=0", 'rollout.barriers=["turn"]'],
    OWN: ["train.async_ratio=0"],
    ASYNC: ["train.async_ratio=1"],
    REDUNDANT: ["train.async_ratio=1", "rollout.extra_groups=1", "rollout.extra_per_group=1"],
}
"""Modes of `real_textworld`. All else, queue scheduling and prompt replication too, is the same."""


def real_textworld(args: Args) -> list[Row]:
    """Compare each step from lock-step to redundant asynchronous rollouts, in real games of TextWorld.

    TextWorld answers within milliseconds, so each step of a training game also waits for a random delay, which stands
    for a remote simulator (`benchmarks.workloads.environments`). The delay is log-normal with a mean and a deviation of
    1 s, a tenth of the paper's N(10, 10). With shorter delays, the two cores would limit the speed. The modes take
    turns in three rounds, each with its own seed and delays. Accuracies are over held-out games, sampled at
    temperature 1. The published values are ROLL Flash's on ALFWorld.
    """
    steps, count = (2, 1) if args.quick else (8, 3)
    rounds = [one_round("real_textworld", GAMES, number, steps) for number in range(count)]
    papers = {OWN: 1.58, ASYNC: 2.27, REDUNDANT: 2.72}
    return rows_of(GAMES, rounds, goals={OWN: 1.58, REDUNDANT: 2.72}, papers=papers)


# -- equal halves ----------------------------------------------------------------------------------------------------

STREAMED: Modes = {
    "α = 0": ALPHA_0,
    "α = 0, streamed": [*ALPHA_0, "train.stream=true"],
    "α = 1": ["train.async_ratio=1", "train.stream=false"],
    "α = 1, streamed": ["train.async_ratio=1", "train.stream=true"],
}
"""Modes of `async_vs_sync`."""
FIRST_PADDING, MOST_PADDING, MOST_TRIES = 64, 200, 4
"""Padding of the prompts that is tried first, and the largest one that fits, in tokens; largest number of tries."""
BALANCE = 0.1
"""Largest relative difference of generation and training that counts as balanced."""


def async_vs_sync(args: Args) -> list[Row]:
    """Compare asynchronous and streamed with synchronous training, where both halves of a step are equally heavy.

    First the prompts are lengthened until a synchronous step trains about as long as it generates. The tiny model has
    learned little more than the form of an answer, since only speed is compared. The bound of a speed-up is (generation
    + training) / max(generation, training), from the synchronous run: no schedule of the same work on these two cores
    is faster. It is 2 at equal halves, if neither core slows the other one down; another row says how far that holds.
    """
    runs = one_round("async_vs_sync", STREAMED, 0, 8 if args.quick else 30, balanced(args))
    generation, training = halves(runs["α = 0"])
    bound = (generation + training) / max(generation, training)
    rows = rows_of(STREAMED, [runs], goals={"α = 0, streamed": 1.5, "α = 1": 1.6})
    replace = msgspec.structs.replace
    cores = Row("both cores at once over one core", "capacity", "x", statistics.median(capacity() for _ in range(5)))
    return [*(replace(row, bound=bound) if row.metric == "speedup" else row for row in rows), cores]


def capacity() -> float:
    """Return how much faster cores 0 and 1 work at once than core 0 alone; 2 if neither slows the other one down."""
    # Two rounds: core 0 alone, and then both cores, each in a worker of its own.
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        alone = workers.map(products_per_s, [0])
        both = workers.map(products_per_s, [0, 1], chunksize=1)
    return sum(both) / alone[0]


def products_per_s(core: int) -> float:
    """Return how many products of two matrices a second this process computes on the core, measured for two seconds."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    matrix, products, start = torch.randn(256, 256), 0, time.perf_counter()
    while time.perf_counter() < start + 2:
        matrix @ matrix
        products += 1
    return products / (time.perf_counter() - start)


def balanced(args: Args, train: Train = train) -> list[str]:
    """Return the overrides of the prompts with which the two halves of a synchronous step are most equal.

    `PaddedArithmetic` says why longer prompts make training heavier. A short form of the benchmark tries one number of
    tokens. Each number has a model of its own, which is made once. Tests replace `train`.
    """

    def overrides(padding: int) -> list[str]:
        """Return the overrides of prompts with so much padding."""
        return [f"env.options.padding={padding}", f"model.path=outputs/models/bench-padded-{padding}"]

    tried: dict[int, float] = {}  # training ÷ generation, by the number of tokens
    padding = FIRST_PADDING
    while padding not in tried and len(tried) < (1 if args.quick else MOST_TRIES):
        probe = [*PINNED, *ALPHA_0, *overrides(padding), "run.steps=8"]
        generation, training = halves(train(WORKLOADS / "async_vs_sync.toml", "bench-async-probe", probe))
        tried[padding] = training / generation
        if abs(tried[padding] - 1) <= BALANCE:
            break
        # Both halves grow with the prompts, so the ratio grows less than the tokens of a sample do, as their root is
        # assumed to. A sample has about 10 tokens besides the padding.
        padding = min(MOST_PADDING, max(0, round((padding + 10) / tried[padding] ** 2) - 10))
    return overrides(min(tried, key=lambda padding: abs(tried[padding] - 1)))


def halves(run: Measured) -> tuple[float, float]:
    """Return the seconds that a synchronous step waits for samples and that it trains; the first steps do not count."""
    settled = slice(2, None)
    return run.mean("trainer_wait_s", settled), run.mean("trainer_step_s", settled)


# -- the simulator ---------------------------------------------------------------------------------------------------

FITTED: Modes = {
    "async, the run fitted to": ["train.async_ratio=1"],
    "sync": ALPHA_0,
    "async, half the batch": ["train.async_ratio=1", "train.batch_size=128"],
}
"""Modes of `calibration`. The constants are fitted to the first one."""


def calibration(args: Args) -> list[Row]:
    """Compare the predictions of `flash simulate` with real runs, with constants fitted by `flash calibrate`.

    An asynchronous run of RL on two-digit sums is measured. The constants fitted to it predict that run itself, and two
    that the fit has not seen: synchronous training, and asynchronous training with batches of half the size. Errors are
    of the step time, without the first step.
    """
    steps = f"run.steps={10 if args.quick else 30}"
    folders = {
        case: run(WORKLOADS / "async_vs_sync.toml", f"bench-calibration-{number}", [*PINNED, steps, *overrides])
        for number, (case, overrides) in enumerate(FITTED.items())
    }
    first = next(iter(folders.values()))
    table = first / "fitted.toml"
    table.write_text(calibrate(first).toml())
    rows: list[Row] = []
    for case, folder in folders.items():
        measured = measured_step_s(by_step(RunDirectory(folder).read_metrics()))
        simulated = float(predicted_step_s(folder / "config.toml", table).mean())
        rows += [
            Row(case, "step_s", "s", simulated, measured),
            Row(case, "relative_error", "share", abs(simulated / measured - 1), at_most=0.1),
        ]
    return rows


RUNS = {
    "async_vs_sync": (async_vs_sync, None),
    "calibration": (calibration, None),
    "real_agentic": (real_agentic, None),
    "real_rlvr": (real_rlvr, None),
    "real_textworld": (real_textworld, None),
}
"""Benchmarks of this file; none has a plot."""


if __name__ == "__main__":
    main_of(RUNS)
