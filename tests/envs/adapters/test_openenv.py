"""An OpenEnv server's protocol, answered as its server answers: one session for each connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve

from envs.adapters.openenv import OpenEnv, OpenEnvOptions
from flash.environment import Environment
from flash.errors import ConfigError, EnvError, RewardError

pytestmark = [pytest.mark.integration, pytest.mark.anyio]


class Echo:
    """A session: says what was said to it, and pays for its length."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        data = message["data"]
        if message["type"] == "reset":
            return self._observed(f"seed {data['seed']}", None, done=False)
        if "message" not in data:
            return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}}
        reward = None if data["message"] in ("think", "give up") else len(data["message"]) / 10
        return self._observed(data["message"], reward, done=data["message"] in ("bye", "give up"))

    def _observed(self, text: str, reward: float | None, *, done: bool) -> dict[str, Any]:
        observation = {"echoed": text, "numbers": [len(text)]}
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    async def session(connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.path == "/ws"
        echo = Echo()
        async for raw in connection:
            if raw == '{"type":"step","data":{"message":"hang up"}}':
                await connection.close(1011)
                return
            await connection.send(msgspec.json.encode(echo.answer(msgspec.json.decode(raw))).decode())

    async with serve(session, "127.0.0.1", 0) as serving:
        port = next(iter(serving.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}/"


def options(url: str, **changes: Any) -> OpenEnvOptions:
    return OpenEnvOptions(**{"url": url, "observation_field": "echoed", "action_field": "message", **changes})


async def test_an_episode_is_played_on_a_server() -> None:
    async with server() as url:
        env = OpenEnv(options(url))
        assert isinstance(env, Environment)
        assert await env.reset(5) == ("seed 5", {})
        assert await env.step("hello") == ("hello", 0.5, False, False, {})
        assert await env.step("bye") == ("bye", 0.3, True, False, {})
        await env.close()


async def test_an_episode_without_any_reward_is_an_error_and_never_a_zero() -> None:
    async with server() as url:
        env = OpenEnv(options(url))
        await env.reset(5)
        assert await env.step("think") == ("think", 0.0, False, False, {})
        with pytest.raises(RewardError, match="ended the episode without a reward"):
            await env.step("give up")
        await env.close()
        env = OpenEnv(options(url))
        await env.reset(5)
        assert (await env.step("hello"))[1] == 0.5
        assert await env.step("give up") == ("give up", 0.0, True, False, {})
        await env.close()


async def test_what_is_no_text_is_shown_as_json() -> None:
    async with server() as url:
        env = OpenEnv(options(url, observation_field="numbers", action={"quiet": True}))
        assert await env.reset(5) == ("[6]", {})
        await env.close()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("<html>", "the answer to reset is none of OpenEnv's: .*'<html>'"),
        ("[]", "none of OpenEnv's"),
        ('{"type": "observation"}', "none of OpenEnv's: .* `data`"),
        ('{"type": "observation", "data": {"observation": "text"}}', "must have fields, but is 'text'"),
    ],
)
async def test_what_is_no_answer_is_an_environment_error_that_shows_it(said: str, message: str) -> None:
    async def session(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send(said)

    async with serve(session, "127.0.0.1", 0) as serving:
        port = next(iter(serving.sockets)).getsockname()[1]
        env = OpenEnv(options(f"http://127.0.0.1:{port}/"))
        with pytest.raises(EnvError, match=message):
            await env.reset(5)
        await env.close()


async def test_what_the_server_refuses_or_ends_is_an_environment_error() -> None:
    async with server() as url:
        env = OpenEnv(options(url, action_field="said"))
        await env.reset(5)
        with pytest.raises(EnvError, match=r"refused step: Invalid message \(VALIDATION_ERROR\)"):
            await env.step("hello")
        await env.close()
        env = OpenEnv(options(url, observation_field="nothing"))
        with pytest.raises(EnvError, match="no field 'nothing', only 'echoed', 'numbers'"):
            await env.reset(5)
        await env.close()
        env = OpenEnv(options(url))
        await env.reset(5)
        with pytest.raises(EnvError, match="ended the connection in step"):
            await env.step("hang up")
        await env.close()
    env = OpenEnv(options(url))
    with pytest.raises(EnvError, match="cannot be reached"):
        await env.reset(5)
    await env.close()


TOOL_ERRORS = {"nothing": "tool_not_found", "broken": "execution_error"}


@asynccontextmanager
async def tool_server(tool: str) -> AsyncIterator[str]:
    """An environment of tools: its first observation has no fields, and later ones are results of calls."""

    async def session(connection: ServerConnection) -> None:
        async for raw in connection:
            message = msgspec.json.decode(raw)
            observation: dict[str, Any] = {"metadata": {}}
            if message["type"] == "step":
                assert message["data"] == {"type": "call_tool", "tool_name": tool, "arguments": {"word": "a", "n": 1}}
                kind = TOOL_ERRORS.get(tool)
                error = kind and {"error_type": kind, "message": f"{tool}!"}
                result = None if error else {"content": [{"type": "text", "text": "right"}], "data": "right"}
                observation |= {"tool_name": tool, "result": result, "error": error}
            data = {"observation": observation, "reward": 1.0, "done": False}
            await connection.send(msgspec.json.encode({"type": "observation", "data": data}).decode())

    async with serve(session, "127.0.0.1", 0) as serving:
        port = next(iter(serving.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}/"


def tool_options(url: str, tool: str) -> OpenEnvOptions:
    action = {"type": "call_tool", "tool_name": tool, "arguments": {"n": 1}}
    fields = {"observation_field": "result.data", "action_field": "arguments.word", "instructions": "Guess: "}
    return options(url, action=action, **fields)


async def test_an_environment_of_tools_is_played_by_calls() -> None:
    async with tool_server("guess") as url:
        for _ in range(2):  # the answer of one episode does not stay in the action of the next one
            env = OpenEnv(tool_options(url, "guess"))
            assert await env.reset(5) == ("Guess: ", {})
            assert await env.step("a") == ("right", 1.0, False, False, {})
            await env.close()


async def test_the_error_of_a_tool_is_shown_and_a_tool_that_is_not_there_is_an_error() -> None:
    async with tool_server("broken") as url:
        env = OpenEnv(tool_options(url, "broken"))
        await env.reset(5)
        assert (await env.step("a"))[0] == "broken!"
        await env.close()
    async with tool_server("nothing") as url:
        env = OpenEnv(tool_options(url, "nothing"))
        await env.reset(5)
        with pytest.raises(EnvError, match=r"the server refused step: nothing! \(tool_not_found\)"):
            await env.step("a")
        await env.close()


async def test_a_field_in_a_table_that_is_missing_is_named_with_its_path() -> None:
    async with tool_server("guess") as url:
        env = OpenEnv(msgspec.structs.replace(tool_options(url, "guess"), observation_field="result.text"))
        await env.reset(5)
        with pytest.raises(EnvError, match=r"no field 'result\.text', only 'content', 'data'"):
            await env.step("a")
        await env.close()


async def test_a_server_without_a_free_place_says_so() -> None:
    async def full(connection: ServerConnection) -> None:
        await connection.send('{"type": "error", "data": {"message": "1 of 1 sessions", "code": "CAPACITY_REACHED"}}')

    async with serve(full, "127.0.0.1", 0) as serving:
        port = next(iter(serving.sockets)).getsockname()[1]
        env = OpenEnv(options(f"http://127.0.0.1:{port}"))
        with pytest.raises(EnvError, match=r"refused reset: 1 of 1 sessions \(CAPACITY_REACHED\)"):
            await env.reset(5)
        await env.close()


async def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="url must begin"):
        options("127.0.0.1:8000")
