"""Adapter for task sets of the package `verifiers`, whose requirements conflict with the requirements of Flash.

So `verifiers` runs in a Python environment of its own, in the server `envs/adapters/verifiers_server`. The configured
environment is `envs.agent:Agent`, with `play` as its `function` and `Verifiers` as its `tasks`. In each episode, a
harness of `verifiers` (a program that works on a task) sends any number of requests to the policy, and gives the
reward.
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
from flash.errors import DECODE_ERRORS, EnvError, RewardError

SERVER = "envs/adapters/verifiers_server"
"""Path of the server, which runs in the Python environment of `verifiers`."""


class VerifiersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the server, and the division of its tasks."""

    url: str = "http://127.0.0.1:8400"
    """Address of the server."""
    held_out_fraction: float = 0.05
    """Share of the tasks that is held out for evaluation."""


class _Task(NamedTuple):
    """A task of the server, as a row of `envs.data.split`."""

    prompt: str
    """Digest of the task's prompt, by which tasks are divided into training and held-out ones."""
    number: int
    """Index of the task on the server."""


class _Played(msgspec.Struct):
    """Result of an episode, as the server returns it from `play`."""

    reward: float
    """Reward of the episode. Required: a result without it must not count as a reward of 0."""
    metrics: dict[str, float] = {}
    """Rewards and metrics of the task set, by name."""


class Verifiers:
    """Environment of one task of the server. The rollout node makes one object for each episode."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options

    @classmethod
    async def prepare(cls, options: VerifiersOptions) -> None:
        """Connect to the server, and read its list of tasks. Each node calls this once, before its engines start.

        Raises:
            EnvError: the server cannot be reached, or has no list of tasks.
            ConfigError: the division would leave a side without tasks.
        """
        await _opened(options)

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Return the task of this seed as a text for `play`: the options and the task's number, as JSON."""
        _, tasks = await _opened(self._options)
        number = tasks.of_seed(seed).number
        return msgspec.json.encode((self._options, number)).decode(), {"task": number}

    async def step(self, action: str) -> StepResult:
        """Return the reward in the result of `play`. An empty action, after a limit of the run, has the reward 0.

        Returns (observation, reward, terminated, truncated, info).

        Raises:
            RewardError: the result has no reward.
        """
        try:
            played = msgspec.json.decode(action, type=_Played) if action else _Played(0.0)
        except DECODE_ERRORS as error:
            raise RewardError(f"verifiers: a result without a reward: {action[:200]!r}: {error}") from error
        return "", played.reward, True, False, {"metrics": played.metrics}

    async def close(self) -> None:
        """Do nothing: the connection belongs to the node."""


async def play(base_url: str, api_key: str, task: str) -> str:
    """Let the server run a task against the episode's endpoint. Returns the result as JSON text, for `Verifiers.step`.

    `envs.agent` calls this as the agent; a cancellation closes the request, and the server then ends the episode.

    Raises:
        EnvError: the server reports an error.
        httpx.HTTPError: the server cannot be reached any more.
    """
    options, number = msgspec.json.decode(task, type=tuple[VerifiersOptions, int])
    client, _ = await _opened(options)
    reply = await client.post("/play", json={"number": number, "base_url": base_url, "api_key": api_key})
    if reply.is_error:
        raise EnvError(f"verifiers: {reply.text[:1000]}")
    return reply.text


async def _opened(options: VerifiersOptions) -> tuple[httpx.AsyncClient, Split[_Task]]:
    """Return the node's client of the server, and the divided tasks. The first call connects."""
    return await shared(options, partial(_open, options))


@asynccontextmanager
async def _open(options: VerifiersOptions) -> AsyncGenerator[tuple[httpx.AsyncClient, Split[_Task]]]:
    """Connect to the server for the life of the node, and divide its tasks. Yields the client and the tasks.

    Raises:
        EnvError: the server cannot be reached, or has no list of tasks.
        ConfigError: the division would leave a side without tasks.
    """
    # The server replies when an episode is over, so only the run's own deadlines apply.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=None, limits=limits, trust_env=False) as client:
        try:
            names = msgspec.json.decode((await client.get("/tasks")).raise_for_status().content, type=list[str])
        except (httpx.HTTPError, *DECODE_ERRORS) as error:
            raise EnvError(f"there are no tasks of verifiers at {options.url} ({error}): see {SERVER}") from error
        tasks = [_Task(name, number) for number, name in enumerate(names)]
        yield client, divide(tasks, None, options.held_out_fraction, options.url)
