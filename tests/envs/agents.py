"""Episodes of agents without an engine: a tokenizer of bytes, a policy of given or random tokens, easy tasks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec

from envs.agent import ENDPOINT, Agent, AgentEndpoint, AgentOptions
from flash.environment import Environment, shared, sharing
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.episode import EpisodePlayer, EpisodeProgress, EpisodeSettings, Responder
from flash.rollout.episode.phases import Phases
from flash.rollout.episode.tokenizer import Tokenizer
from flash.service.app import make_app
from flash.service.sessions import EpisodeSessions
from flash.types import Completion, Failure, Lease, Message, Observation, Task, Tool, Trajectory, VersionRun

END, ASSISTANT = 256, 257
ROLES = {"system": 258, "user": 259, "assistant": 260}

SETTINGS = EpisodeSettings(
    seed=None,
    max_new_tokens=24,
    max_length=4000,
    max_turns=8,
    step_s=20,
    close_s=20,
    generate_s=20,
    episode_s=1000,
)


class ByteTokenizer(Tokenizer):
    """A token per byte, one for who speaks, one for the end: what is sampled need not be UTF-8, so that its text does
    not tell its tokens."""

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        if isinstance(observation, str):
            return list(observation.encode())
        return [token for message in observation for token in self._message(message)] + [ASSISTANT]

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        return [END] * (end is None and not isinstance(observation, str)) + self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def _message(self, message: Message) -> list[int]:
        return [ROLES[message.role], *message.content.encode(), END]


BYTES = ByteTokenizer()


class Policy:
    """A `Responder` that says what a function gives, and keeps all it was asked and said."""

    def __init__(
        self, say: Callable[[ResponseRequest], Sequence[int]], seconds: float = 1.0, ends: Collection[int] = (END,)
    ) -> None:
        self._say = say
        self._ends = ends
        self._seconds = seconds
        self.asked: list[ResponseRequest] = []
        self.said: list[Completion] = []

    async def generate(self, request: ResponseRequest) -> Completion:
        await anyio.sleep(self._seconds)
        tokens = list(self._say(request))[: request.max_new_tokens]
        finish = "stop" if tokens[-1] in self._ends else "length"
        for stop in request.stop:
            at = bytes(token for token in tokens if token < 256).find(stop.encode())
            if at >= 0:
                tokens, finish = tokens[: at + len(stop.encode())], "text"
        for token in tokens[:-1]:
            request.on_tokens([token])
            await self.pause()
        completion = Completion(tokens, [-0.5] * len(tokens), [VersionRun(3, len(tokens))], finish)
        self.asked.append(request)
        self.said.append(completion)
        return completion

    async def pause(self) -> None:
        """Between two tokens: none, unless a test overrides this."""


def says(text: str) -> Policy:
    """Always the same answer."""
    return Policy(lambda _: [*text.encode(), END])


def babble(request: ResponseRequest) -> list[int]:
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
        self.sessions = EpisodeSessions()
        self.app = make_app(self.sessions)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AgentEndpoint]:
        yield AgentEndpoint("http://agents/v1", self.sessions)

    def client(self, base_url: str, key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=base_url, headers=headers)


NODE = InProcess()


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    """One request."""
    headers = more.pop("headers", {})
    fields = {"model": "policy", "messages": messages, **more}
    return await client.post("chat/completions", json=fields, headers=headers)


def choice_of(reply: httpx.Response) -> dict[str, Any]:
    """The one choice of an answer, in one piece or of a stream."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return reply.json()["choices"][0]
    *events, done, _ = reply.text.split("\n\n")
    assert done == "data: [DONE]"
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    finish = None
    for event in events:
        choice = msgspec.json.decode(event.removeprefix("data: "))["choices"][0]
        finish = choice["finish_reason"]
        for key, value in choice["delta"].items():
            message[key] = value if key == "role" else message[key] + value if key in message else value
    return {"message": message, "finish_reason": finish}


TASKS = {"path": f"{__name__}:Numbers"}


def make(function: str | None = None, command: list[str] | None = None, **options: Any) -> Agent:
    """An agent whose tasks are numbers."""
    return Agent(AgentOptions(function=function, command=command, tasks=TASKS, **options))


async def live(
    env: Environment, policy: Responder, seed: int = 5, *, tokenizer: Tokenizer = BYTES, **changes: Any
) -> Trajectory | Failure:
    """One episode, in the node that the caller is."""
    settings = msgspec.structs.replace(SETTINGS, **changes)
    player = EpisodePlayer(lambda kind: env, tokenizer, policy, settings, Phases(), now=anyio.current_time)
    return await player.play(Lease(1, Task(seed, seed, 0, seed), 0), EpisodeProgress())


async def play(
    env: Environment, policy: Responder, seed: int = 5, *, in_process: bool = True, **changes: Any
) -> Trajectory | Failure:
    """One episode, in a node of its own."""
    async with sharing("test"):
        if in_process:
            await shared(ENDPOINT, NODE.open)
        played = await live(env, policy, seed, **changes)
    assert len(NODE.sessions) == 0
    return played
