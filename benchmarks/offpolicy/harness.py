"""Training of one cell of the comparison of objectives on data of an exact age, in one process, on one core.

A *cell* is one objective with one age of the data and one seed (`benchmarks.offpolicy.cells`). The trainer is Flash's
own (`flash.trainer.step.Trainer`, one rank). There are no engines and no hub: a sampler in this process samples with
each version as soon as it is made, and the batches, or the parts of mixed batches, wait in a queue until they have the
age of the cell.

`benchmarks.offpolicy.run` starts this module as a process for each cell, with the cell as JSON in its standard input:
`python -m benchmarks.offpolicy.harness FOLDER [--core N] < CELL`. The result is written into the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
import transformers
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.offpolicy.cells import Cell, Folder, Point, Result
from benchmarks.offpolicy.sampler import Answer, Sampler
from flash.config.objects import check_options, load_object
from flash.environment import HELD_OUT
from flash.errors import ContractError
from flash.trainer.model.canary import canary_logprobs
from flash.trainer.model.model import named_full_tensors
from flash.trainer.step import Trainer
from flash.types import Outcome, Shard, ShardSample, Span, Task, Trajectory, Turn, VersionRun

SEED_STRIDE = 1 << 20
"""Number of problems that one seed may use; the problems of the next seed begin after them."""
PARITY = 1e-4
"""Largest difference of log-probs between the sampler and the trainer at equal weights."""
MEASURED = {
    "reward": ("reward_mean", 0.0),
    "entropy": ("entropy", 0.0),
    "grad_norm": ("grad_norm", 0.0),
    "clipped": ("clip_fraction", 0.0),
    "distance": ("lag_distance", 0.0),
    "scale": ("lag_scale", 1.0),
}
"""For each field of `Point`: the name of the trainer's metric, and the value in a step that does not report it."""

Batch = TypeVar("Batch")


def lagged(alpha: int, steps: int, sample: Callable[[int], Batch]) -> Iterator[Batch]:
    """Yield the batch of each step, sampled `alpha` versions before it is trained.

    `sample(step)` makes the batch that this step will train, with the weights at the moment of the call. Between two
    batches the caller makes the next version, so that version v samples for step v + alpha. Version 0 also samples
    for the steps before alpha: step n trains on version max(0, n − alpha), whose age is min(n, alpha). Exactly `steps`
    batches are sampled.
    """
    waiting: deque[Batch] = deque()
    for version in range(steps):
        first = version + alpha if version else 0
        waiting.extend(sample(step) for step in range(first, min(version + alpha + 1, steps)))
        yield waiting.popleft()


def mixed(alpha: int, steps: int, sample: Callable[[int, int], list[Batch]]) -> Iterator[list[Batch]]:
    """Yield the batch of each step, of alpha + 1 parts: part k was sampled k versions before it is trained.

    `sample(step, part)` makes a part, with the weights at the moment of the call. As in `lagged`, the caller makes the
    next version between two batches. Version 0 also samples the parts of earlier versions, which do not exist.
    """
    waiting: dict[int, list[Batch]] = {step: [] for step in range(steps)}  # finished parts of each step
    for version in range(steps):
        for step in range(version, min(version + alpha + 1, steps)):
            # A later version samples one part of the step. Version 0 samples those parts, too, that are older.
            for part in [step - version] if version else range(step, alpha + 1):
                waiting[step] += sample(step, part)
        yield waiting.pop(version)


class Problems:
    """Problems of an environment of one turn, each with an instance that scores its answers.

    Args:
        seeds: seed of each problem.
        env: table `env` of the configuration, with the path of the environment's class and its options.
    """

    def __init__(self, seeds: Sequence[int], env: Mapping[str, Any]) -> None:
        environment = load_object(env["path"])
        self._envs = [environment(**check_options(environment, env["options"], "env.options")) for _ in seeds]

        async def reset() -> list[str]:
            """Return the text that each problem shows."""
            return [(await env.reset(seed))[0] for env, seed in zip(self._envs, seeds, strict=True)]

        self.prompts = asyncio.run(reset())
        """Prompt of each problem, in the order of the seeds."""

    def rewards(self, answers: list[Answer]) -> list[float]:
        """Return the reward of each answer. All problems have equally many, and the answers to one stand in a row."""
        copies = len(answers) // len(self._envs)

        async def judge() -> list[float]:
            """Give each answer to the instance of its problem. An instance can score several answers."""
            return [(await self._envs[number // copies].step(answer.text))[1] for number, answer in enumerate(answers)]

        return asyncio.run(judge())


class Rollouts:
    """Samples batches and evaluates, with the weights that the sampler holds."""

    def __init__(self, cell: Cell, sampler: Sampler) -> None:
        self._cell, self._sampler = cell, sampler
        self._held_out = Problems(range(HELD_OUT, HELD_OUT + cell.setting.problems), cell.setting.env)

    def batch(self, step: int, version: int, part: int = 0, parts: int = 1) -> list[Trajectory]:
        """Sample the batch of a step, or the groups number part, part + parts, … of it.

        `version` is the version that the sampler holds, with which the tokens are labelled. The problems depend on the
        seed and the step only, so all methods see the same ones.
        """
        setting = self._cell.setting
        groups = setting.batch_size // setting.group_size
        first = self._cell.seed * SEED_STRIDE + step * groups
        # Seeds of the problems. A problem's seed is also the number of its group.
        seeds = range(first, first + groups)[part::parts]
        problems = Problems(seeds, setting.env)
        answers = self._sampler.sample(
            problems.prompts,
            copies=setting.group_size,
            limit=setting.max_new_tokens,
            generator=torch.Generator().manual_seed(seeds[0]),
        )
        size = setting.group_size
        tasks = [Task((seed - first) * size + member, seed, member, seed) for seed in seeds for member in range(size)]
        return [
            make_trajectory(task, answer, reward, version)
            for task, answer, reward in zip(tasks, answers, problems.rewards(answers), strict=True)
        ]

    def accuracy(self) -> tuple[float, Answer]:
        """Return the share of held-out problems that are answered correctly, and the first answer."""
        limit = self._cell.setting.max_new_tokens
        answers = self._sampler.sample(self._held_out.prompts, copies=1, limit=limit, generator=None)
        rewards = self._held_out.rewards(answers)
        return sum(rewards) / len(rewards), answers[0]


def make_trajectory(task: Task, answer: Answer, reward: float, version: int) -> Trajectory:
    """Make the result of an episode of one turn, all of whose tokens a version sampled."""
    tokens = [*answer.prompt, *answer.tokens]
    return Trajectory(
        task=task,
        outcome=Outcome.TRUNCATED if answer.truncated else Outcome.OK,
        reward=reward,
        token_ids=torch.tensor(tokens, dtype=torch.int32).numpy().tobytes(),
        action_spans=[Span(len(answer.prompt), len(tokens))],
        logprobs=torch.tensor(answer.logp).numpy().tobytes(),
        versions=[VersionRun(version, len(answer.tokens))],
        turns=[Turn("", answer.text, reward, 0.0, 0.0, 0.0)],
    )


def make_shard(batch: list[Trajectory], step: int, oldest: int) -> Shard:
    """Make the shard of the only rank: the whole batch, whose tokens may be `oldest` versions old."""
    min_version = max(0, step - oldest)
    trained = [one.trained_tokens(min_version) for one in batch]
    return Shard(
        step=step,
        min_version=min_version,
        samples=[ShardSample(index, one) for index, one in enumerate(batch)],
        batch=[one.batch_sample(min_version) for one in batch],
        total_tokens=sum(trained),
        total_sequences=sum(count > 0 for count in trained),
    )


def run(cell: Cell) -> Result:
    """Train the cell, and return its learning curve.

    Raises:
        ConfigError: the trainer refuses the cell's configuration.
        ContractError: the age of a batch, or the sampler's log-probs, are not what they should be.
    """
    config = cell.config()
    trainer = Trainer(config)
    sampler = Sampler(cell.setting.model_path)
    rollouts = Rollouts(cell, sampler)
    curve = [evaluate(rollouts, trainer, 0, [])]
    tokens = 0  # tokens trained so far
    recent: list[dict[str, float]] = []  # metrics of the steps since the last evaluation
    # Each turn of this loop makes one version, with which `batches` samples when the loop asks for the next batch.
    for step, batch in enumerate(batches(cell, rollouts, lambda: trainer.version)):
        shard = make_shard(batch, step, config.train.max_age)
        recent.append(trainer.train_step(shard))
        tokens += shard.total_tokens
        sampler.load(named_full_tensors(trainer.model))
        if trainer.version == cell.setting.steps or trainer.version % cell.setting.eval_every == 0:
            curve.append(evaluate(rollouts, trainer, tokens, recent))
            recent.clear()
    return Result(cell=cell, curve=curve, skipped_updates=trainer.skipped_steps, cpu_s=round(time.process_time(), 1))


def batches(cell: Cell, rollouts: Rollouts, version: Callable[[], int]) -> Iterator[list[Trajectory]]:
    """Yield the batch of each step, which has the age of the cell. `version` returns the version of the sampler.

    `run` trains each batch, and makes a version of the sampler, before it asks for the next one.
    """
    alpha, steps = cell.alpha, cell.setting.steps
    if not cell.mixed:
        yield from lagged(alpha, steps, lambda step: rollouts.batch(step, version()))
        return
    # Parts arrive by age. The trainer expects the samples of a group beside each other.
    for batch in mixed(alpha, steps, lambda step, part: rollouts.batch(step, version(), part, alpha + 1)):
        yield sorted(batch, key=lambda one: one.task.task_id)


def evaluate(rollouts: Rollouts, trainer: Trainer, tokens: int, recent: list[dict[str, float]]) -> Point:
    """Measure the held-out accuracy, and average the metrics of the steps since the last evaluation.

    Args:
        rollouts: samples the held-out problems.
        trainer: the trainer, whose version is evaluated.
        tokens: number of tokens trained so far.
        recent: metrics of the steps since the last evaluation.
    """
    accuracy, answer = rollouts.accuracy()
    check_parity(trainer, answer)
    means = {
        field: fmean([one.get(name, missing) for one in recent] or [missing])
        for field, (name, missing) in MEASURED.items()
    }
    return Point(trainer.version, tokens, accuracy, **{field: round(mean, 5) for field, mean in means.items()})


def check_parity(trainer: Trainer, answer: Answer) -> None:
    """Raise ContractError unless the sampler computes the trainer's log-probs for the tokens of an answer."""
    expected = canary_logprobs(trainer.model, [*answer.prompt, *answer.tokens])[-len(answer.logp) :]
    gap = max(abs(one - other) for one, other in zip(expected, answer.logp, strict=True))
    if not gap <= PARITY:
        raise ContractError(
            f"version {trainer.version}: the log-probs of the sampler and the trainer differ by {gap:.2g}, "
            f"expected at most {PARITY:g}"
        )


def run_described(argv: list[str] | None = None) -> None:
    """Run the cell that standard input describes, and save its result. `benchmarks.offpolicy.run` starts this.

    `argv` are the arguments of the program; None: those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offpolicy.harness", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--core", type=int)
    args = parser.parse_args(argv)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    cell = msgspec.json.decode(sys.stdin.buffer.read(), type=Cell)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        Folder(args.folder).save(run(cell))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_described()
