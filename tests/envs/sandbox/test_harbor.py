"""A task in Harbor's format where it is worked on: in a real container."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from envs.adapters.harbor import Harbor, HarborOptions
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.pool.ownership import PREFIX
from flash.environment import sharing
from flash.environment.results import note_of
from flash.types import Message
from tests.envs.adapters.harbor_folder import write_task

GREET = "```bash\ncd /app/src && echo hello $(cat /tmp/level) > greeting.txt\nsubmit\n```"
PLANT = (
    "```bash\nmkdir -p /tests /logs/verifier; cd /logs/verifier\necho 1 | tee reward.txt /tests/test.sh\nsubmit\n```"
)


async def _containers(url: str) -> set[str]:
    async with DockerBackend(url) as engine:
        return {sandbox.container_id for sandbox in await engine.containers.list({f"{PREFIX}service": ""})}


@pytest.mark.integration
@pytest.mark.anyio
async def test_a_task_is_solved_in_a_real_container(engine_url: str, tmp_path: Path) -> None:
    before = await _containers(engine_url)
    machine = 'docker_image = "flash-sandbox-python"\nmemory_mb = 256\nstorage_mb = 64'
    for name in ("one", "two"):
        write_task(tmp_path / name, f"Greet {name}.", environment=machine)
    options = HarborOptions(path=str(tmp_path), held_out_fraction=0.5, sandboxes={"parallel": 2})
    rewards: dict[str, tuple[float, str]] = {}

    async def episode(last: str) -> None:
        env = Harbor(options)
        await env.reset(0)
        shown, *_ = await env.step("```bash\npwd; cd /tmp; echo 3 > level; level=$(ls)\n```")
        assert shown == [Message("user", "exit code 0\n/app/src")]
        shown, *_ = await env.step("```bash\necho $PWD has $level\n```")
        assert shown == [Message("user", "exit code 0\n/tmp has level")]
        _, reward, over, _, info = await env.step(last)
        assert over
        rewards[last] = reward, note_of(info)
        await env.close()

    async with sharing("harbor"):
        await Harbor.prepare(options)
        async with anyio.create_task_group() as episodes:
            episodes.start_soon(episode, GREET)
            episodes.start_soon(episode, PLANT)
    assert rewards == {
        GREET: (1.0, "exit code 0: {'reward': 1.0}"),
        PLANT: (0.0, "exit code 0: {'reward': 0.0}"),
    }
    assert await _containers(engine_url) == before


@pytest.mark.integration
@pytest.mark.anyio
async def test_tests_of_a_second_container_see_the_artifacts_alone(engine_url: str, tmp_path: Path) -> None:
    before = await _containers(engine_url)
    machine = 'docker_image = "flash-sandbox-python"\nmemory_mb = 256\nstorage_mb = 64'
    for name in ("one", "two"):
        verifier = 'environment_mode = "separate"\nenv = { LEVEL = "3" }'
        write_task(
            tmp_path / name, f"Greet {name}.", top='artifacts = ["/app/src"]', environment=machine, verifier=verifier
        )
    # With place for one sandbox, an episode that kept its first sandbox would wait for ever.
    options = HarborOptions(path=str(tmp_path), held_out_fraction=0.5, sandboxes={"parallel": 1})
    rewards: list[float] = []
    plant = "```bash\nmkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh\nsubmit\n```"
    async with sharing("harbor"):
        await Harbor.prepare(options)
        for answer in ("```bash\necho hello 3 > greeting.txt\nsubmit\n```", plant):
            env = Harbor(options)
            await env.reset(0)
            _, reward, over, *_ = await env.step(answer)
            await env.close()
            assert over
            rewards.append(reward)
    assert rewards == [1.0, 0.0]
    assert await _containers(engine_url) == before
