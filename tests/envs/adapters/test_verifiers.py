"""Task sets of `verifiers`, played by their server against the endpoints of episodes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from envs.adapters.verifiers import Verifiers, VerifiersOptions
from envs.adapters.verifiers_server.__main__ import Server
from envs.agent import Agent, AgentOptions
from flash.environment import HELD_OUT, sharing
from flash.errors import EnvError, RewardError
from flash.rollout.engine import ResponseRequest
from flash.types import Failure, Outcome, Trajectory
from tests.envs.agents import END, Policy, live, play

pytestmark = [pytest.mark.integration, pytest.mark.anyio]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`verifiers`, as far as the server sees it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fakes"))
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("verifiers.v1")


@asynccontextmanager
async def served(taskset: str = "sums") -> AsyncIterator[VerifiersOptions]:
    runner = web.AppRunner(Server(taskset, {}, 5).app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield VerifiersOptions(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def agent(options: VerifiersOptions) -> Agent:
    tasks = {"path": "envs.adapters.verifiers:Verifiers", "options": {"url": options.url}}
    made = AgentOptions(function="envs.adapters.verifiers:play", tasks=tasks)
    Agent.check(made)
    return Agent(made)


def policy(says: bytes = b"42") -> Policy:
    return Policy(lambda _: [*says, END], seconds=0.01)


async def test_an_episode_is_played_by_the_server_and_rewarded_by_it() -> None:
    async with served() as options:
        played = await play(agent(options), policy(), in_process=False)
    assert isinstance(played, Trajectory)
    first, last = played.turns
    assert (first.action, played.reward, played.outcome) == ("42", 1.0, Outcome.OK)
    assert last.metrics == {"same": 1.0, "length": 2.0}
    assert "Are you sure?" in last.observation


async def test_episodes_at_once_are_answered_by_their_own_policies() -> None:
    ended: list[Trajectory | Failure] = []

    async def one(options: VerifiersOptions, said: str, again: str) -> None:
        def say(request: ResponseRequest) -> list[int]:
            return [*(again if len(request.prompt) > 20 else said).encode(), END]

        ended.append(await live(agent(options), Policy(say, seconds=0.01)))

    async with served() as options, sharing("test"), anyio.create_task_group() as episodes:
        episodes.start_soon(one, options, "7", "7")
        episodes.start_soon(one, options, "10", "100")
    assert sorted((played.turns[0].action, played.reward) for played in ended if isinstance(played, Trajectory)) == [
        ("10", 0.0),
        ("7", 1.0),
    ]


async def test_what_a_limit_of_the_run_ends_is_truncated_and_earns_nothing() -> None:
    async with served() as options:
        played = await play(agent(options), policy(), in_process=False, max_turns=1)
    assert isinstance(played, Trajectory)
    assert (played.outcome, played.reward) == (Outcome.TRUNCATED, 0.0)


@pytest.mark.parametrize(("said", "message"), [(b"fail", "verifiers: 500"), (b"hide", "no trace of an agent that is")])
async def test_an_episode_that_fails_there_is_an_error_here(said: bytes, message: str) -> None:
    async with served() as options:
        played = await play(agent(options), policy(said), in_process=False)
    assert isinstance(played, Failure)
    assert played.outcome == Outcome.ENV_ERROR
    assert "it raised EnvError: verifiers: " in played.message
    assert message in played.message


async def test_a_result_without_a_reward_is_an_error_and_never_a_zero() -> None:
    env = Verifiers(VerifiersOptions())
    assert (await env.step('{"reward": 0.5, "metrics": {"a": 1}}'))[1] == 0.5
    assert (await env.step(""))[1] == 0.0
    for result in ("{}", '{"reward": null}', '{"error": "x"}', "no JSON"):
        with pytest.raises(RewardError, match="a result without a reward"):
            await env.step(result)


async def test_an_episode_that_is_closed_ends_at_the_server_too(package: Any) -> None:
    async with served() as options, sharing("test"), anyio.create_task_group() as tasks:
        tasks.start_soon(live, agent(options), policy(b"wait"))
        await package.waits.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True), anyio.fail_after(20):
            await package.over.wait()


async def test_training_and_held_out_tasks_are_apart() -> None:
    async with served() as options, sharing("test"):
        await Verifiers.prepare(options)
        env = Verifiers(options)
        train = {(await env.reset(seed))[0] for seed in range(20)}
        held_out = {(await env.reset(HELD_OUT + seed))[0] for seed in range(20)}
    assert (len(train), len(held_out)) == (4, 1)
    assert not train & held_out


async def test_tasks_that_show_the_same_prompt_are_told_apart_by_their_other_data() -> None:
    async with served("secrets") as options, sharing("test"):
        await Verifiers.prepare(options)
        env = Verifiers(options)
        train = {(await env.reset(seed))[0] for seed in range(20)}
        held_out = {(await env.reset(HELD_OUT + seed))[0] for seed in range(20)}
    assert (len(train), len(held_out)) == (4, 1)
    assert not train & held_out


def test_every_agent_of_a_task_set_runs_here_unless_its_table_says_otherwise(package: Any) -> None:
    here, null, bash = {"type": "subprocess"}, {"id": "null"}, {"id": "bash"}
    made: list[dict[str, Any]] = []
    package.load_environment = lambda config: made.append(config.agents) or package.Env(config)
    Server("sums", {}, 5)
    Server("sums", {"agent": {"harness": bash}}, 5)
    Server("sums", {"agent": {"runtime": {"type": "docker"}}}, 5)
    Server("secrets", {}, 5)
    agent = package.AgentConfig
    assert made == [
        {"agent": agent(null, here)},
        {"agent": agent(bash, here)},
        {"agent": agent(null, {"type": "docker"})},
        {"player": agent(null, here), "user": agent(bash, here)},
    ]


async def test_a_server_that_is_not_there_is_said_to_be_missing() -> None:
    async with sharing("test"):
        with pytest.raises(EnvError, match=r"no tasks of verifiers at http://127\.0\.0\.1:9 .*verifiers_server"):
            await Verifiers.prepare(VerifiersOptions(url="http://127.0.0.1:9"))


async def test_the_server_imports_nothing_of_ours() -> None:
    folder = Path(importlib.import_module("envs.adapters.verifiers_server").__path__[0])
    looks = (
        f"import runpy, sys; sys.argv = ['server', '--help']; sys.path[:] = [p for p in sys.path if p]\n"
        f"try: runpy.run_path({str(folder)!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert not {'flash', 'envs', 'torch', 'verifiers'} & set(sys.modules)"
    )
    done = await anyio.run_process([sys.executable, "-c", looks], cwd="/")
    assert b"--env" in done.stdout


async def test_programs_beside_the_python_of_the_server_are_found_without_activation() -> None:
    folder = Path(importlib.import_module("envs.adapters.verifiers_server").__path__[0])
    looks = (
        f"import os, runpy, sys; sys.path.insert(0, {str(Path(__file__).parent / 'fakes')!r})\n"
        "sys.argv = ['server', 'sums', '--port', '99999']\n"
        f"try: runpy.run_path({str(folder)!r}, run_name='__main__')\n"
        "except OverflowError: print(os.environ['PATH'])"
    )
    done = await anyio.run_process([sys.executable, "-c", looks], cwd="/", env={"PATH": "/nowhere"})
    assert done.stdout.decode().strip() == f"{Path(sys.executable).parent}:/nowhere"


@pytest.mark.parametrize("text", ["no JSON", '{"error": 1}', "[1]"])
async def test_an_answer_that_is_no_list_of_tasks_is_reported(text: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/tasks", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with sharing("test"):
            with pytest.raises(EnvError, match="there are no tasks of verifiers"):
                await Verifiers.prepare(VerifiersOptions(url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    finally:
        await runner.cleanup()
