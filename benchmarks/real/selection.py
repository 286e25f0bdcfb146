"""Samples that have to be generated for a held-out accuracy: `rollout.selection = "pass_rate"` over "uniform".

Both train batches of groups whose rewards differ, dropping the others, from equal models, problems and seeds. A run is
made with one processor core, in one process: the system's own source of tasks, buffer and trainer, at α = 0, and a
sampler in the place of the engine (`benchmarks.offpolicy`), on the problems of benchmarks/workloads/selection.toml.
`--quickstart` makes runs of `flash train examples/quickstart.toml` instead, of two seeds.

Accuracies are means of three evaluations in a row. What is to be reached, for each seed, is nine tenths of the gain of
the run that ends lower. `samples` and `tokens` are those of uniform over those of pass_rate; `accuracy` is what
pass_rate has more, in points, when equally many samples are generated. Intervals are Student's over seeds, of samples
and tokens by their logarithms. Finished runs are kept in a folder and not made again.

Further options: --seeds N (default 5, of the quickstart 2), --runs FOLDER (default outputs/selection).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.form import ROOT, WORKLOADS, Args, Row, main
from benchmarks.offpolicy.summary import half_width
from benchmarks.real.objective_cost import apart
from benchmarks.training import PINNED, Measured, train
from envs.arithmetic import Arithmetic, ArithmeticOptions
from envs.data.split import Split
from flash.environment import HELD_OUT, Info, SolvedExample
from flash.types import Observation

WORKLOAD = WORKLOADS / "selection.toml"
QUICKSTART = ROOT / "examples" / "quickstart.toml"
MODES = ("uniform", "pass_rate")
CASES: dict[str, tuple[int, list[str]]] = {
    "sums": (30_000, []),
    "sums and products": (20_000, ["env.options.operators=+*", "model.path=outputs/models/bench-few-products"]),
}
"""Samples generated in a run, at least, and what of the workload is overridden. Products stay too hard throughout."""
EVERY = 1_500
"""Samples between two evaluations."""
SHARE = 0.9
"""Of the gain, that is to be reached."""
HELD_OUT_ROWS = 512
SMOOTHED = 3
"""Evaluations whose mean an accuracy is."""


# -- the problems ----------------------------------------------------------------------------------------------------


class FewSumsOptions(ArithmeticOptions, frozen=True, kw_only=True):
    """How many problems are trained."""

    problems: int = 768


class FewSums(Arithmetic):
    """A data set of problems of arithmetic, shuffled for each epoch."""

    def __init__(self, options: FewSumsOptions) -> None:
        super().__init__(options)
        self._rows = _rows(options)

    @classmethod
    def problem_of(cls, seed: int, **options: Any) -> str:
        """The place of the row."""
        return str(_rows(options["options"]).place(seed))

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the row of this seed."""
        problem = self._rows.of_seed(seed)
        self._solution = problem.answer
        return self._shown(problem.prompt), {}


class _AllSums(Arithmetic):
    def first(self, count: int, *, held_out: bool) -> list[SolvedExample]:
        """So many different problems of a side."""
        rng, found = random.Random(count), dict[str, SolvedExample]()
        while len(found) < count:
            problem = self._draw(rng, held_out)
            found[problem.prompt] = problem
        return list(found.values())


@functools.lru_cache(maxsize=2)
def _rows(options: FewSumsOptions) -> Split[SolvedExample]:
    sums = _AllSums(options)
    return Split(sums.first(options.problems, held_out=False), sums.first(HELD_OUT_ROWS, held_out=True))


# -- runs ------------------------------------------------------------------------------------------------------------


class Point(msgspec.Struct, frozen=True, array_like=True):
    """An evaluation, and what was generated before it."""

    samples: int
    tokens: int
    accuracy: float


class Run(msgspec.Struct, frozen=True):
    """What a run did."""

    curve: list[Point]
    equal: float
    """Share of the groups that ended whose rewards were equal."""
    passed_over: float
    """Share of the problems that were passed over."""
    steps: int


def in_process(order: tuple[int, int, list[str]]) -> list[Run]:
    """Both runs of a seed, of so many samples, with overrides. Makes a process group: it wants a process of its own."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from flash.foreign.torch import private_store

    disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=private_store(), rank=0, world_size=1)
    try:
        return [one_run(mode, *order) for mode in MODES]
    finally:
        dist.destroy_process_group()


def in_its_own_process(order: tuple[int, int, list[str]]) -> list[Run]:
    """As `in_process`."""
    return apart(in_process, order)


def one_run(mode: str, seed: int, samples: int, overrides: list[str]) -> Run:
    """Train, in the process group of this process."""
    import torch

    from benchmarks.offpolicy.harness import Problems, check_parity, make_shard, make_trajectory
    from benchmarks.offpolicy.sampler import Sampler
    from flash.config.load import load
    from flash.environment.load import LoadedEnvironment
    from flash.run.models.models import make_missing_model
    from flash.samples import rules
    from flash.samples.buffer import SampleBuffer
    from flash.samples.tasks import TaskSource
    from flash.trainer.model.model import named_full_tensors
    from flash.trainer.step import Trainer
    from flash.types import Lease

    config = load(WORKLOAD, [f"run.seed={seed}", f"rollout.selection={mode}", *overrides])
    make_missing_model(config)
    trainer, sampler = Trainer(config), Sampler(config.model.path)
    env = LoadedEnvironment(config.env.path, config.env.options)
    table = {"path": config.env.path, "options": config.env.options}
    problems = rules.Problems.of(config, env.kind_of, env.domains(), env.problem_of)
    settings, size, limit = rules.buffer_rules(config), config.rollout.group_size, config.rollout.max_new_tokens
    source = TaskSource(seed, size, problems.kind_of, None, settings.samplings(), problems.selection)
    buffer = SampleBuffer(rules.age_contract(config), source, settings)
    held_out, ledger = Problems(range(HELD_OUT, HELD_OUT + config.eval.problems), table), buffer.samples.ledger
    curve: list[Point] = []
    done = 0

    def evaluate() -> None:
        answers = sampler.sample(held_out.prompts, copies=1, limit=limit, generator=None)
        check_parity(trainer, answers[0])
        curve.append(Point(done, ledger.generated_tokens, statistics.fmean(held_out.rewards(answers))))

    def play(leases: Sequence[Lease]) -> None:
        asked = Problems([lease.task.seed for lease in leases[::size]], table)
        generator = torch.Generator().manual_seed(seed << 32 | leases[0].task.task_id)
        answers = sampler.sample(asked.prompts, copies=size, limit=limit, generator=generator)
        for lease, answer, reward in zip(leases, answers, asked.rewards(answers), strict=True):
            buffer.finish(lease.lease_id, make_trajectory(lease.task, answer, reward, trainer.version))

    evaluate()
    while done < samples:
        while (groups := buffer.take(trainer.version)) is None:
            leases = list(iter(lambda: buffer.lease([trainer.version]), None))
            done += len(leases)
            play(leases)
        batch = [trajectory for group in groups for trajectory in group.trajectories()]
        trainer.train_step(make_shard(batch, trainer.version, 0))
        buffer.commit(trainer.version - 1)
        sampler.load(named_full_tensors(trainer.model))
        if done >= min(samples, EVERY * len(curve)):
            evaluate()
    cursor = source.cursor
    over = cursor.passed_over / (cursor.passed_over + cursor.next_group)
    return Run(curve, cursor.equal / cursor.ended, over, trainer.version)


def by_command(mode: str, seed: int, train: Callable[[Path, str, list[str]], Measured] = train) -> Run:
    """Train the quickstart, by `flash train`."""
    overrides = [*PINNED, f"run.seed={seed}", f"rollout.selection={mode}", "eval.every=5"]
    measured = train(QUICKSTART, f"bench-selection-{mode}-{seed}", overrides)
    curve, made = [Point(0, 0, measured.evals[0]["mean_reward"])], 0
    evaluated = {row["step"]: row["mean_reward"] for row in measured.evals[1:]}
    for row in measured.metrics:
        made += row["samples"]
        if row["version"] in evaluated:
            curve.append(Point(made + row["filtered"], row["generated_tokens"], evaluated[row["version"]]))
    filtered = measured.metrics[-1]["filtered"]
    return Run(curve, filtered / (made + filtered), measured.mean("passed_over_share"), len(measured.metrics))


# -- what came of them -----------------------------------------------------------------------------------------------


def smooth(curve: Sequence[Point]) -> list[Point]:
    """Accuracies as means over `SMOOTHED` evaluations; the first ones over as many as there are."""
    windows = [curve[max(0, at + 1 - SMOOTHED) : at + 1] for at in range(len(curve))]
    means = [statistics.fmean(point.accuracy for point in window) for window in windows]
    return [msgspec.structs.replace(point, accuracy=accuracy) for point, accuracy in zip(curve, means, strict=True)]


def between(before: Point, after: Point, part: float) -> Point:
    """So far from one point to the next."""
    pairs = zip(msgspec.structs.astuple(before), msgspec.structs.astuple(after), strict=True)
    return Point(*(first + part * (last - first) for first, last in pairs))


def reached(curve: Sequence[Point], accuracy: float) -> Point:
    """Where a smooth curve, which gets there, first comes to an accuracy."""
    before, after = next(pair for pair in itertools.pairwise(curve) if pair[1].accuracy >= accuracy)
    return between(before, after, max(0.0, (accuracy - before.accuracy) / (after.accuracy - before.accuracy)))


def at_samples(curve: Sequence[Point], samples: float) -> Point:
    """Where a smooth curve is when so many samples are generated; it has as many."""
    before, after = next(pair for pair in itertools.pairwise(curve) if pair[1].samples >= samples)
    return between(before, after, (samples - before.samples) / (after.samples - before.samples))


class Pair(NamedTuple):
    """What one seed shows."""

    target: float
    samples: float
    """Of uniform over those of pass_rate, until the target."""
    tokens: float
    accuracy: float
    """What pass_rate has more, in points, at equally many samples."""

    @classmethod
    def of(cls, uniform: Run, chosen: Run) -> Pair:
        """Compare the two runs of a seed."""
        one, other = smooth(uniform.curve), smooth(chosen.curve)
        start = one[0].accuracy
        target = start + SHARE * (min(max(point.accuracy for point in curve) for curve in (one, other)) - start)
        then, now = reached(one, target), reached(other, target)
        equal = min(one[-1].samples, other[-1].samples)
        more = at_samples(other, equal).accuracy - at_samples(one, equal).accuracy
        return cls(target, then.samples / now.samples, then.tokens / now.tokens, 100 * more)


def rows(case: str, runs: Sequence[Sequence[Run]]) -> list[Row]:
    """The comparison of all seeds, and the means of either kind of run."""
    pairs = [Pair.of(*both) for both in runs]
    found = [
        Row(case, "seeds", "pairs", len(pairs)),
        Row(case, "target", "share", statistics.fmean(p[0] for p in pairs)),
    ]
    for name in ("samples", "tokens"):
        logs = [math.log(getattr(pair, name)) for pair in pairs]
        mean, half = statistics.fmean(logs), half_width(logs)
        ends = {f"{name}_speedup": mean, f"{name}_speedup_low": mean - half, f"{name}_speedup_high": mean + half}
        found += [Row(case, metric, "x", math.exp(log)) for metric, log in ends.items()]
    points = [pair.accuracy for pair in pairs]
    mean, half = statistics.fmean(points), half_width(points)
    ends = {"more_accuracy": mean, "more_accuracy_low": mean - half, "more_accuracy_high": mean + half}
    found += [Row(case, metric, "points", value) for metric, value in ends.items()]
    for mode, kind in zip(MODES, zip(*runs, strict=True), strict=True):
        means = {
            "equal_rewards_share": [run.equal for run in kind],
            "passed_over_share": [run.passed_over for run in kind],
            "start_accuracy": [run.curve[0].accuracy for run in kind],
            "final_accuracy": [smooth(run.curve)[-1].accuracy for run in kind],
            "steps": [run.steps for run in kind],
            "samples": [run.curve[-1].samples for run in kind],
        }
        found += [Row(f"{case}: {mode}", name, "mean", statistics.fmean(values)) for name, values in means.items()]
    return found


class Comparison:
    """Makes the runs that are missing, and compares them."""

    def __init__(
        self,
        options: argparse.Namespace,
        in_process: Callable[[tuple[int, int, list[str]]], list[Run]] = in_its_own_process,
        by_command: Callable[[str, int], Run] = by_command,
    ) -> None:
        self._options = options
        self._in_process, self._by_command = in_process, by_command

    def measure(self, args: Args) -> list[Row]:
        """Seed by seed."""
        options = self._options
        seeds = options.seeds or (1 if args.quick else 2 if options.quickstart else 5)
        options.runs.mkdir(parents=True, exist_ok=True)
        if options.quickstart:
            return rows(
                "quickstart",
                [self._kept(f"quickstart-{seed}", partial(self._quickstart, seed)) for seed in range(seeds)],
            )
        found: list[Row] = []
        for case, (samples, overrides) in CASES.items():
            count = samples // 4 if args.quick else samples
            name = f"{case.replace(' ', '-')}-{count}"
            found += rows(
                case,
                [
                    self._kept(f"{name}-{seed}", partial(self._in_process, (seed, count, overrides)))
                    for seed in range(seeds)
                ],
            )
        return found

    def _quickstart(self, seed: int) -> list[Run]:
        return [self._by_command(mode, seed) for mode in MODES]

    def _kept(self, name: str, make: Callable[[], list[Run]]) -> list[Run]:
        file = self._options.runs / f"{name}.json"
        if not file.exists():
            file.write_bytes(msgspec.json.encode(make()))
        return msgspec.json.decode(file.read_bytes(), type=list[Run])


def own_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options that only this benchmark has, and the arguments that are left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real.selection", add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--runs", type=Path, default=Path("outputs/selection"))
    parser.add_argument("--quickstart", action="store_true")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    own, rest = own_options(None)
    main("selection", __doc__ or "", Comparison(own).measure, rest)
