"""Wall-clock speed of each step from lock-step to redundant asynchronous rollouts, in real games of TextWorld.

vLLM, the trainer and the games are real. The node loop with its engine and the games runs on core 0, and the trainer on
core 1. TextWorld answers within milliseconds, so each step of a training game also waits for a random delay, which
stands for a remote simulator (`benchmarks.real.remote_textworld`). The delay is log-normal with a mean and a deviation
of 1 s, a tenth of the paper's N(10, 10). With shorter delays, the two cores would limit the speed.

Four modes train the same number of samples: synchronous with all environments in lock-step; synchronous with each
environment on its own; asynchronous with α = 1; and asynchronous with redundant environments. The modes take turns in
three rounds, each with its own seed and delays. Each ratio is taken within a round. The figure is the median of the
rounds, and the smallest and largest ratio stand below it. Accuracies are over the held-out games of all rounds, sampled
at temperature 1. They agree if their 95 % intervals overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.form import WORKLOADS, Args, Row, main
from benchmarks.training import PINNED, Measured, Train, speed_rows, train
from flash.observe.stats import Interval, mean_interval

WORKLOAD = WORKLOADS / "real_textworld.toml"
"""Configuration of all runs."""

LOCK_STEP = "synchronous, lock-step"
"""Name of the mode that the others are compared with."""
OWN, ASYNC, REDUNDANT = "synchronous, each on its own", "asynchronous", "asynchronous, redundant"
"""Names of the other modes."""
MODES: Mapping[str, list[str]] = {
    LOCK_STEP: ["train.async_ratio=0", 'rollout.barriers=["turn"]'],
    OWN: ["train.async_ratio=0"],
    ASYNC: ["train.async_ratio=1"],
    REDUNDANT: ["train.async_ratio=1", "rollout.extra_groups=1", "rollout.extra_per_group=1"],
}
"""Overrides of each mode. All else, queue scheduling and prompt replication too, is the same."""
PAPER = {OWN: 1.58, ASYNC: 2.27, REDUNDANT: 2.72}
"""ROLL Flash, ALFWorld: speed-ups over its synchronous training in lock-step."""
GOALS = {OWN: 1.58, REDUNDANT: 2.72}
"""Goals of the speed-ups over lock-step."""

STEPS, QUICK_STEPS = 8, 2
"""Steps of a run, in full and quick rounds."""
ROUNDS = 3
"""Number of rounds of a full run; a quick run has one."""

Round = Mapping[str, Measured]
"""Measurements of one run of each mode, by the mode's name."""


def compare(args: Args) -> list[Row]:
    """Run all rounds, and return their rows. `benchmarks.form.main` calls this."""
    steps = QUICK_STEPS if args.quick else STEPS
    return rows_of([one_round(number, steps) for number in range(1 if args.quick else ROUNDS)])


def one_round(number: int, steps: int, train: Train = train) -> Round:
    """Run every mode once, for `steps` steps. The round's number, counted from 0, is the seed of its runs.

    Each round begins with another mode, so that none is always the first. Tests replace `train`.
    """
    first = number % len(MODES)
    order = [*MODES, *MODES][first : first + len(MODES)]  # rotated
    size = [f"run.steps={steps}", f"run.seed={number}"]
    return {
        mode: train(WORKLOAD, f"bench-real_textworld-{list(MODES).index(mode)}", [*PINNED, *MODES[mode], *size])
        for mode in order
    }


def rows_of(rounds: Sequence[Round]) -> list[Row]:
    """Return the rows of all rounds: speed-ups, the agreement of accuracies, and the figures of each mode."""
    rows: list[Row] = []
    for mode, paper in PAPER.items():
        ratios = [each[LOCK_STEP].seconds / each[mode].seconds for each in rounds]
        case = f"{mode}, over lock-step"
        rows += [
            Row(case, "speedup", "x", statistics.median(ratios), paper, at_least=GOALS.get(mode)),
            Row(case, "speedup_least", "x", min(ratios)),
            Row(case, "speedup_most", "x", max(ratios)),
        ]
    final = {mode: accuracy([each[mode] for each in rounds], -1) for mode in MODES}
    for mode in PAPER:
        agree = final[mode].low <= final[LOCK_STEP].high and final[LOCK_STEP].low <= final[mode].high
        rows.append(Row(f"{mode}, final accuracy that of lock-step", "overlap", "0 or 1", float(agree), at_least=1))
    for mode in MODES:
        runs = [each[mode] for each in rounds]
        trained = [run.summary["ledger"]["trained_tokens"] / run.summary["ledger"]["generated_tokens"] for run in runs]
        rows += [
            *speed_rows(mode, runs),
            Row(mode, "samples", "samples", statistics.median(run.summary["samples"] for run in runs)),
            Row(mode, "first_accuracy", "share", accuracy(runs, 0).mean),
            Row(mode, "final_accuracy", "share", final[mode].mean),
            Row(mode, "final_accuracy_low", "share", final[mode].low),
            Row(mode, "final_accuracy_high", "share", final[mode].high),
            Row(mode, "trained_token_share", "share", statistics.median(trained)),
            Row(mode, "oldest_trained_age", "versions", max(run.summary["max_age"] for run in runs)),
        ]
    return rows


def accuracy(runs: Sequence[Measured], which: int) -> Interval:
    """Return the share of held-out games that were won, with its 95 % interval, over the games of all runs.

    `which` is the evaluation of each run that counts: 0 for the first one, −1 for the last one.
    """
    evals = [run.evals[which] for run in runs]
    played = sum(row["samples"] for row in evals)
    won = round(sum(row["samples"] * row["mean_reward"] for row in evals))  # the reward of a game is 0 or 1
    return mean_interval([1.0] * won + [0.0] * (played - won), binary=True)


if __name__ == "__main__":
    main("real_textworld", __doc__ or "", compare)
