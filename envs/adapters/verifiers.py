"""Task sets of `verifiers`, in a Python of their own: that package does not go with what Flash needs.

There `envs/adapters/verifiers_server` runs. An episode is one of `envs.agent:Agent`, whose `function` is `play` and
whose `tasks` are `Verifiers`: a harness of `verifiers` asks the policy as often as it likes, and rewards it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import httpx
import msgspec

from envs.data.split import Split, divide
from flash.environment import Info, StepResult, shared
from flash.errors import EnvError

SERVER = "envs/adapters/verifiers_server"
"""Runs where `verifiers` is."""


class VerifiersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which server."""

    url: str = "http://127.0.0.1:8400"
    held_out_fraction: float = 0.05
    """The share of the tasks that is kept aside for evaluation."""


class _Task(NamedTuple):
    prompt: str
    number: int


class _Played(msgspec.Struct):
    reward: float = 0.0
    metrics: dict[str, float] = {}


class Verifiers:
    """One task of the server's."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options

    @classmethod
    async def prepare(cls, options: VerifiersOptions) -> None:
        """Ask the server for its tasks."""
        await _opened(options)

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Name the task of this seed to `play`."""
        _, tasks = await _opened(self._options)
        number = tasks.of_seed(seed).number
        return msgspec.json.encode((self._options, number)).decode(), {"task": number}

    async def step(self, action: str) -> StepResult:
        """Take what `play` returned; nothing, where a limit of the run ended it."""
        played = msgspec.json.decode(action, type=_Played) if action else _Played()
        return "", played.reward, True, False, {"metrics": played.metrics}

    async def close(self) -> None:
        """Nothing to release."""


async def play(base_url: str, api_key: str, task: str) -> str:
    """Have the server play a task against the endpoint of an episode."""
    options, number = msgspec.json.decode(task, type=tuple[VerifiersOptions, int])
    client, _ = await _opened(options)
    reply = await client.post("/play", json={"number": number, "base_url": base_url, "api_key": api_key})
    if reply.is_error:
        raise EnvError(f"verifiers: {reply.text[:1000]}")
    return reply.text


async def _opened(options: VerifiersOptions) -> tuple[httpx.AsyncClient, Split[_Task]]:
    return await shared(options, partial(_open, options))


@asynccontextmanager
async def _open(options: VerifiersOptions) -> AsyncGenerator[tuple[httpx.AsyncClient, Split[_Task]]]:
    # A server answers when an episode is over: the deadlines are those of the run.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=None, limits=limits, trust_env=False) as client:
        try:
            names = (await client.get("/tasks")).raise_for_status().json()
        except httpx.HTTPError as error:
            raise EnvError(f"there are no tasks of verifiers at {options.url} ({error}): see {SERVER}") from error
        tasks = [_Task(name, number) for number, name in enumerate(names)]
        yield client, divide(tasks, None, options.held_out_fraction, options.url)
