"""Problems and rewards of a configuration outside of a Flash run.

`benchmarks.versus_trl.runner` trains TRL on them, and `benchmarks.versus_trl.evaluate` evaluates both systems on them.
Prompts and rewards come from the class of the environment, for the seeds that a Flash run would use.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from flash.config.tree import Config
from flash.environment import Environment
from flash.environment.load import LoadedEnvironment
from flash.environment.results import check_reset_result, check_step_result
from flash.samples.tasks import TaskSource, held_out_tasks


def training_seeds(config: Config) -> list[int]:
    """Return the environment seed of each prompt of the run, in the order of issue."""
    source = TaskSource(config.run.seed, 1)
    return [source.issue(source.next_problem())[0].seed for _ in range(config.run.steps * config.groups_per_batch)]


def held_out_seeds(config: Config) -> list[int]:
    """Return the environment seeds of an evaluation."""
    return [task.seed for task in held_out_tasks(config.eval.problems, 1)]


Prompt = str | list[dict[str, str]]
"""A text, or chat messages as chat templates take them."""


def prompts(config: Config, seeds: Sequence[int]) -> list[Prompt]:
    """Return the prompt of the environment for each seed."""
    return [prompt for prompt, _ in anyio.run(_episodes, config, seeds, [None] * len(seeds))]


def rewards(config: Config, seeds: Sequence[int], answers: Sequence[str]) -> list[float]:
    """Return the reward of the environment for each answer. `seeds` has the problem of each answer."""
    return [reward for _, reward in anyio.run(_episodes, config, seeds, answers)]


async def _episodes(config: Config, seeds: Sequence[int], answers: Sequence[str | None]) -> list[tuple[Prompt, float]]:
    """Play one episode for each seed, one after the other. Returns prompts and rewards, as `_episode` does."""
    loaded = LoadedEnvironment(config.env.path, config.env.options)
    return [await _episode(loaded.make(), seed, answer) for seed, answer in zip(seeds, answers, strict=True)]


async def _episode(env: Environment, seed: int, answer: str | None) -> tuple[Prompt, float]:
    """Play one episode. Returns its prompt, and the reward of the answer, which is 0 if `answer` is None."""
    try:
        shown, _ = check_reset_result(await env.reset(seed))
        prompt = shown if isinstance(shown, str) else [{"role": one.role, "content": one.content} for one in shown]
        reward = check_step_result(await env.step(answer))[1] if answer is not None else 0.0
        return prompt, reward
    finally:
        await env.close()
