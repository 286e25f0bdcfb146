"""Bugs mended where bugs are mended: in real containers."""

from __future__ import annotations

import anyio
import pytest

from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.pool.ownership import PREFIX
from envs.swe import SweEnv, SweOptions
from flash.environment import sharing

pytestmark = pytest.mark.anyio


async def _containers(url: str) -> set[str]:
    async with DockerBackend(url) as engine:
        return {sandbox.container_id for sandbox in await engine.containers.list({f"{PREFIX}service": ""})}


@pytest.mark.integration
async def test_every_task_is_solved_in_real_containers_by_its_solution_alone(engine_url):
    before = await _containers(engine_url)
    options = SweOptions(template="plain", sandboxes={"parallel": 3})
    solutions = {example.prompt: example.answer for example in SweEnv(options).solved_examples(300, seed=1)}
    rewards: dict[tuple[int, bool], float] = {}

    async def episode(seed: int, right: bool) -> None:
        env = SweEnv(options)
        prompt, _ = await env.reset(seed)
        nothing = "find . -name '*.py' | xargs sed -i '1i import os; os._exit(0)'"
        assert (await env.step(solutions[str(prompt)] if right else nothing))[0] == "\nexit code 0\n$ "
        rewards[seed, right] = (await env.step("submit"))[1]
        await env.close()

    async with sharing("mending"):
        await SweEnv.prepare(options)
        async with anyio.create_task_group() as tasks:
            for seed in range(15):
                tasks.start_soon(episode, seed, True)
            for seed in range(3):
                tasks.start_soon(episode, seed, False)
    assert rewards == {(seed, True): 1.0 for seed in range(15)} | {(seed, False): 0.0 for seed in range(3)}
    assert await _containers(engine_url) == before
