"""Episodes of agents without an engine: a tokenizer of bytes, a policy of given or random tokens, easy tasks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec

from envs.agent import HOST, Agent, AgentOptions, Host
from flash.environment import Environment, shared, sharing
from flash.rollout.engine import GenerateRequest, SamplingSettings
from flash.rollout.episode import Episode, EpisodeProgress, EpisodeSettings, Responder
from flash.rollout.phases import FreePhases
from flash.service.app import make_app
from flash.service.sessions import Sessions
from flash.types import Completion, Failure, Lease, Message, Observation, Task, Trajectory, VersionRun

END, ASSISTANT = 256, 257
ROLES = {"system": 258, "user": 259, "assistant": 260}

SETTINGS = EpisodeSettings(
    seed=None,
    train=SamplingSettings(24, 1.0),
    eval=SamplingSettings(24, 0.0),
    max_length=4000,
    max_turns=8,
    reset_s=20,
    step_s=20,
    close_s=20,
    generate_s=20,
    episode_s=1000,
)


class ByteTokenizer:
    """A token per byte, one for who speaks, one for the end: what is sampled need not be UTF-8, so that its text does
    not tell its tokens."""

    def render(self, observation: Observation) -> list[int]:
        assert not isinstance(observation, str)
        return [token for message in observation for token in self._message(message)] + [ASSISTANT]

    def follow(self, observation: Observation, stopped: bool) -> list[int]:
        return [END] * (not stopped) + self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def _message(self, message: Message) -> list[int]:
        return [ROLES[message.role], *message.content.encode(), END]


class Policy:
    """A `Responder` that says what a function gives, and keeps all it was asked and said."""

    def __init__(self, say: Callable[[GenerateRequest], Sequence[int]], seconds: float = 1.0) -> None:
        self._say = say
        self._seconds = seconds
        self.asked: list[GenerateRequest] = []
        self.said: list[Completion] = []

    async def generate(
        self,
        request: GenerateRequest,
        *,
        min_version: int,
        affinity: tuple[int, int],
        progress: Callable[[int], None],
        timeout: float,
        episode: anyio.CancelScope,
    ) -> Completion:
        await anyio.sleep(self._seconds)
        tokens = list(self._say(request))[: request.sampling.max_new_tokens]
        finish = "stop" if tokens[-1] == END else "length"
        completion = Completion(tokens, [-0.5] * len(tokens), [VersionRun(3, len(tokens))], finish)
        self.asked.append(request)
        self.said.append(completion)
        return completion


def says(text: str) -> Policy:
    """Always the same answer."""
    return Policy(lambda _: [*text.encode(), END])


def babble(request: GenerateRequest) -> list[int]:
    """Any bytes, of any length, ended by the policy or cut."""
    rng = random.Random(repr(request.prompt))
    return [rng.randrange(256) for _ in range(rng.randrange(1, 30))] + [END]


class Numbers:
    """Tasks that are numbers; any answer is worth its length."""

    closed = 0

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return str(seed), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(len(action)), True, False, {"note": action}

    async def close(self) -> None:
        Numbers.closed += 1


class InProcess:
    """Reaches the endpoint of a node without a socket, for the virtual clock."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.app = make_app(self.sessions)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Host]:
        async with anyio.create_task_group() as agents:
            yield Host("http://agents/v1", self.sessions, agents)
            agents.cancel_scope.cancel()

    def client(self, base_url: str, key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=base_url, headers=headers)


NODE = InProcess()


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    """One request."""
    headers = more.pop("headers", {})
    fields = {"model": "policy", "messages": messages, **more}
    return await client.post("chat/completions", json=fields, headers=headers)


TASKS = {"path": f"{__name__}:Numbers"}


def make(function: str | None = None, command: list[str] | None = None) -> Agent:
    """An agent whose tasks are numbers."""
    return Agent(AgentOptions(function=function, command=command, tasks=TASKS))


async def live(env: Environment, policy: Responder, seed: int = 5, **changes: Any) -> Trajectory | Failure:
    """One episode, in the node that the caller is."""
    settings = msgspec.structs.replace(SETTINGS, **changes)
    episode = Episode(lambda kind: env, ByteTokenizer(), policy, settings, FreePhases(), now=anyio.current_time)
    return await episode.run(Lease(1, Task(seed, seed, 0, seed), 0), EpisodeProgress())


async def play(
    env: Environment, policy: Responder, seed: int = 5, *, in_process: bool = True, **changes: Any
) -> Trajectory | Failure:
    """One episode, in a node of its own."""
    async with sharing("test"):
        if in_process:
            await shared(HOST, NODE.open)
        played = await live(env, policy, seed, **changes)
    assert len(NODE.sessions) == 0
    return played
