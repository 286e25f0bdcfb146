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
