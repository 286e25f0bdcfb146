"""Programs judged where programs are judged: in real containers, and by a service."""

from __future__ import annotations

import re

import anyio
import pytest

from envs.code import PROGRAMS, CodeEnv, CodeOptions
from envs.judging.judge import shared_judge
from envs.judging.options import JudgePool, JudgingLimits, Suite, SuiteCase, languages_with
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.pool.ownership import PREFIX
from flash.environment import sharing
from flash.errors import ConfigError, SandboxStartError
from tests.envs.sandbox.services import TOKEN, running

pytestmark = pytest.mark.anyio

ADD = [SuiteCase(stdin="1 2", stdout="3"), SuiteCase(stdin="20 30", stdout="50")]
RIGHT = "x, y = map(int, input().split())\nprint(x + y)"
BAD = {
    "wrong output": "print(3 if input() == '1 2' else 4)",
    "crash": "raise SystemExit(3)",
    "timeout": "while True: pass",
    "memory": "data = bytearray(1 << 30)\nprint(sum(data))",
    "too much output": "print('x' * (3 << 20))",
}
MEAN = {
    "limits its agent": "import resource as r\nr.prlimit(1, r.RLIMIT_CPU, (0, 0))",
    "has its agent killed for want of memory": (
        "import os, time\ntry: open('/proc/self/oom_score_adj', 'w').write('0')\nexcept OSError: pass\n"
        "while True:\n    try:\n        if os.fork() == 0: x = bytearray(3 << 20); time.sleep(9); os._exit(0)\n"
        "    except OSError: time.sleep(9)"
    ),
    "kills all that it can": "import os\nos.kill(-1, 9)",
    "kills its agent": "import os\nos.kill(1, 9)\nos.kill(1, 11)\nos.kill(1, 19)",
    "many processes": "import os\nwhile True: os.fork()",
    "fills every folder": (
        "for place in ('/work', '/tmp', '/dev/shm', '/run', '/var/tmp'):\n"
        "    try: open(place + '/x', 'wb').write(bytes(1 << 28))\n"
        "    except OSError: pass"
    ),
    "puts itself in the place of Python": (
        "import os\nos.makedirs('/work/bin')\nopen('/work/python3', 'w').write('#!/bin/sh\\necho 3')\n"
        "os.chmod('/work/python3', 0o777)\nopen('sitecustomize.py', 'w').write('print(3)')"
    ),
    "stays and writes what others read": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
        "        open('/work/main.py', 'w').write('print(3)')\n        time.sleep(0.01)"
    ),
}
"""Programs that are right never, and must not harm the next one."""


async def _containers(url: str) -> set[str]:
    async with DockerBackend(url) as engine:
        return {sandbox.container_id for sandbox in await engine.containers.list({f"{PREFIX}service": ""})}


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_programs_are_judged_in_real_containers_and_none_of_them_harms_the_next(engine_url):
    before = await _containers(engine_url)
    languages, limits = languages_with({}), JudgingLimits(timeout=1.5, memory_mib=128)
    suite = Suite(language="python", tests=ADD)
    async with sharing("judged"):
        judge = await shared_judge(JudgePool(parallel=1))
        for cause, program in BAD.items():
            verdict = await judge.judge(program, suite, languages, limits, every=False)
            assert (verdict.cause, verdict.passed < 2) == (cause, True), verdict
            assert (await judge.judge(RIGHT, suite, languages, limits, every=True)).passed == 2, cause
        for what, program in MEAN.items():
            verdict = await judge.judge(program, suite, languages, limits, every=True)
            assert verdict.passed == 0, what
            assert (await judge.judge(RIGHT, suite, languages, limits, every=True)).passed == 2, what
        assert judge.stock().made > len(BAD)
    assert await _containers(engine_url) == before


@pytest.mark.integration
async def test_episodes_run_in_real_containers(engine_url):
    before = await _containers(engine_url)
    options = CodeOptions(language="bash", sandboxes={"parallel": 3})
    rewards: list[float] = []

    async def episode(seed: int) -> None:
        env = CodeEnv(options)
        prompt, _ = await env.reset(seed)
        one, x, y = (int(value) for value in re.findall(r"=(\d+)", str(prompt)))
        right = PROGRAMS["bash"].format(f"{one}+$x*{x - one}+{y - one}*y")
        rewards.append((await env.step(right if seed % 2 else "echo 1"))[1])
        await env.close()

    async with sharing("episodes"):
        await CodeEnv.prepare(options)
        async with anyio.create_task_group() as tasks:
            for seed in range(12):
                tasks.start_soon(episode, seed)
    assert sorted(rewards) == [0.0] * 6 + [1.0] * 6
    assert await _containers(engine_url) == before


@pytest.mark.integration
async def test_an_image_that_is_missing_is_missed_before_a_run_begins(engine_url):
    language = {"image": "flash-sandbox-nowhere", "file": "main.py", "run": ["python3", "main.py"]}
    async with sharing("missing"):
        with pytest.raises(SandboxStartError, match="flash-sandbox-nowhere"):
            await CodeEnv.prepare(CodeOptions(language="python", languages={"python": language}))


async def test_an_engine_that_is_missing_is_missed_before_a_run_begins(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    async with sharing("missing"):
        with pytest.raises((ConfigError, SandboxStartError), match=r"none\.sock"):
            await CodeEnv.prepare(CodeOptions())


async def test_a_service_judges_as_well_as_a_pool_of_our_own(tmp_path):
    (tmp_path / "tokens").write_text(f"admin {TOKEN}\n")
    (tmp_path / "tokens").chmod(0o600)
    async with running(tmp_path) as service, sharing("remote run"):
        options = CodeOptions(sandboxes={"at": service.url, "token_file": str(tmp_path / "tokens")})
        CodeEnv.check(options)
        env = CodeEnv(options)
        prompt, _ = await env.reset(3)
        one, x, y = (int(value) for value in re.findall(r"=(\d+)", str(prompt)))
        assert (await env.step(f"read x y; echo $((x*{x - one}+y*{y - one}+{one}))"))[1] == 1.0
        assert {lease.owner for lease in service.pool.state.leases._ended.values()} == {"admin/remote-run"}
