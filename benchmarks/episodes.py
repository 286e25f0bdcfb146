"""Episodes of one turn outside of a Flash run: prompts, rewards, trajectories, and batches for one trainer rank.

Prompts and rewards come from the class of the environment, for the seeds that a Flash run would use.
`benchmarks.versus_trl` trains TRL on them and evaluates both systems on them. `benchmarks.offpolicy` and
`benchmarks.gpu` train batches without a hub.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import numpy as np

from flash.config.tree import Config
from flash.environment.load import LoadedEnvironment
from flash.environment.results import check_reset_result, check_step_result
from flash.samples.tasks import TaskSource, held_out_tasks
from flash.types import Outcome, Shard, ShardSample, Span, Task, Trajectory, Turn, VersionRun, append_versions

GROUP_SIZE = 8
"""Samples of a group of `random_shard`."""
PROMPT = 12
"""Tokens of a prompt of `random_shard`."""


def training_seeds(config: Config) -> list[int]:
    """Return the environment seed of each prompt of the run, in the order of issue."""
    source = TaskSource(config.run.seed, 1)
    return [source.issue(source.next_problem())[0].seed for _ in range(config.run.steps * config.groups_per_batch)]


def held_out_seeds(config: Config) -> list[int]:
    """Return the environment seed of each held-out problem of an evaluation, `eval.problems` in all."""
    return [task.seed for task in held_out_tasks(config.eval.problems, 1)]


Prompt = str | list[dict[str, str]]
"""A text, or chat messages as chat templates take them."""


def prompts(config: Config, seeds: Sequence[int]) -> list[Prompt]:
    """Return the prompt of the environment for each seed. Runs an event loop, so no loop may be running here."""
    return [prompt for prompt, _ in anyio.run(_episodes, config, seeds, [None] * len(seeds))]


def rewards(config: Config, seeds: Sequence[int], answers: Sequence[str]) -> list[float]:
    """Return the reward of the environment for each answer, as `prompts` does. `seeds` has each answer's problem."""
    return [reward for _, reward in anyio.run(_episodes, config, seeds, answers)]


async def _episodes(config: Config, seeds: Sequence[int], answers: Sequence[str | None]) -> list[tuple[Prompt, float]]:
    """Play one episode for each seed, one after the other.

    Returns the prompt of each, and the reward of its answer, which is 0 if the answer is None. Raises EnvError or
    another error of the environment.
    """
    loaded, played = LoadedEnvironment(config.env.path, config.env.options), list[tuple[Prompt, float]]()
    for seed, answer in zip(seeds, answers, strict=True):
        env = loaded.make()
        try:
            shown, _ = check_reset_result(await env.reset(seed))
            prompt = shown if isinstance(shown, str) else [{"role": one.role, "content": one.content} for one in shown]
            played.append((prompt, check_step_result(await env.step(answer))[1] if answer is not None else 0.0))
        finally:
            await env.close()
    return played


def make_trajectory(
    task: Task,
    prompt: Sequence[int],
    answer: Sequence[int],
    logp: Sequence[float],
    *,
    reward: float,
    versions: Sequence[int],
    outcome: Outcome = Outcome.OK,
    text: str = "",
) -> Trajectory:
    """Make the result of an episode of one turn.

    `prompt` and `answer` are token ids. `logp` and `versions` are the log-probs of the answer's tokens and the versions
    that sampled them, and `text` is its text.
    """
    tokens, runs = [*prompt, *answer], list[VersionRun]()
    append_versions(runs, (VersionRun(version, 1) for version in versions))
    return Trajectory(
        task=task,
        outcome=outcome,
        reward=reward,
        token_ids=np.array(tokens, dtype="<i4").tobytes(),
        action_spans=[Span(len(prompt), len(tokens))],
        logprobs=np.array(logp, dtype="<f4").tobytes(),
        versions=runs,
        turns=[Turn("", text, reward, 0.0, 0.0, 0.0)],
    )


def make_shard(batch: Sequence[Trajectory], step: int, oldest: int) -> Shard:
    """Make the shard (a trainer rank's part of a batch) of the only rank: the whole batch of the step `step`.

    Tokens that are more than `oldest` versions older than the step stay in it, but are not trained.
    """
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


def random_shard(step: int, groups: int, answers: tuple[int, int], vocabulary: int) -> Shard:
    """Return a batch of random answers for a training step, labelled with the version before that of the step.

    `answers` are the smallest and the largest length of an answer. Token ids are below `vocabulary`.
    """
    rng = np.random.default_rng(step)
    trajectories: list[Trajectory] = []
    for group in range(groups):
        prompt = rng.integers(0, vocabulary, PROMPT).tolist()
        for member in range(GROUP_SIZE):
            length = int(rng.integers(*answers, endpoint=True))
            reward = float(rng.random() < 0.5)
            logp = rng.normal(-math.log(vocabulary), 0.2, length).tolist()
            answer = rng.integers(0, vocabulary, length).tolist()
            task = Task(group * GROUP_SIZE + member, group, member, seed=group)
            versions = [max(step - 1, 0)] * length
            trajectories.append(make_trajectory(task, prompt, answer, logp, reward=reward, versions=versions))
    return make_shard(trajectories, step, oldest=1)
