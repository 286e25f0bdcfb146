"""Cost of the endpoint for agents: 500 agents at once, on the real clock, around an engine of fixed timing.

Each agent is an episode of `envs.agent` with eight turns that append to one another. It runs in a process of its own
with the 499 others, each with one connection that stays open; every second one has its answers streamed. The engine
takes 4 s for an answer of 128 tokens, in pieces of 16. The *added*
time of a call is its time for the client less its time in the engine: sending, reading, rendering, the episode's own
work, and the lag of both event loops. Every answer names its agent and turn: an answer that does not arrive is *lost*,
and the answer of another agent is *crossed*. For comparison, an environment in the process plays the same turns without
the endpoint.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
import numpy as np
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks.form import ROOT, Args, Row, main
from envs.agent import Agent, AgentOptions
from flash.environment import Environment, sharing
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.episode import EpisodePlayer, EpisodeProgress, EpisodeSettings
from flash.rollout.episode.phases import Phases
from flash.rollout.episode.tokenizer import Tokenizer
from flash.types import Completion, Lease, Message, Observation, Task, Tool, Trajectory, VersionRun
from flash.waiting import rare_garbage_collection

AGENTS = 500
TURNS = 8
ANSWER_TOKENS, PIECE_TOKENS = 128, 16
ANSWER_S = 4.0
STAGGER_S = 4.0
"""Seconds within which the agents begin: if all began at once they would stay in step, as no real agents do."""
ADDED_GOAL_MS = 10
RATIO_GOAL = 0.95
DRIVER = "MODEL_SERVICE_DRIVER"
"""Environment variable with the port of the process of agents."""

SETTINGS = EpisodeSettings(
    seed=None,
    max_new_tokens=ANSWER_TOKENS,
    max_length=100_000,
    max_turns=TURNS,
    max_branches=8,
    max_tokens=800_000,
    reset_s=600,
    step_s=600,
    close_s=60,
    generate_s=600,
    episode_s=3600,
)


class Letters(Tokenizer):
    """Tokenizer with a token for each letter, and one for the end of a message."""

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the letters of each message after the first letter of its role."""
        if isinstance(observation, str):
            return [ord(letter) for letter in observation]
        return [token for message in observation for token in (*map(ord, message.role[0] + message.content), 0)] + [
            ord("a")
        ]

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Render the observation."""
        return self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Join the letters."""
        return "".join(chr(token) for token in token_ids if token)


class Timed:
    """A `Responder` of fixed timing. It repeats the question, and keeps the seconds of each response."""

    def __init__(self, answer_s: float) -> None:
        self._piece_s = answer_s * PIECE_TOKENS / ANSWER_TOKENS
        self.took: dict[str, float] = {}

    async def generate(self, request: ResponseRequest) -> Completion:
        """Respond in pieces."""
        start = time.perf_counter()
        last = "".join(map(chr, request.prompt[-40:]))
        question = last.rpartition("u")[2].partition("?")[0]
        tokens = [ord(letter) for letter in f"{question}.".ljust(ANSWER_TOKENS - 1, "x")] + [0]
        for at in range(0, ANSWER_TOKENS, PIECE_TOKENS):
            await anyio.sleep(self._piece_s)
            if at + PIECE_TOKENS < ANSWER_TOKENS:
                request.on_tokens(tokens[at : at + PIECE_TOKENS])
        self.took[question] = time.perf_counter() - start
        return Completion(tokens, [-1.0] * len(tokens), [VersionRun(0, len(tokens))], "stop")


def question(agent: int, turn: int) -> str:
    """Return the question of an agent in a turn, without its question mark."""
    return f"{agent}-{turn}"


class Talk:
    """Environment with the turns of an agent, but without the endpoint."""

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Ask the first question."""
        self._seed, self._turn = seed, 0
        await anyio.sleep(random.Random(seed).uniform(0, STAGGER_S))
        return [Message("user", f"{question(seed, 0)}?")], {}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Ask the next question."""
        self._turn += 1
        shown = [Message("user", f"{question(self._seed, self._turn)}?")]
        return shown, 0.0, self._turn == TURNS, False, {}

    async def close(self) -> None:
        """Do nothing."""


class Tasks:
    """Environment of an agent's task, which is the agent's number."""

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Return the number."""
        return str(seed), {}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Accept any answer, and keep the agent's measurements as a note."""
        return "", 0.0, True, False, {"note": action}

    async def close(self) -> None:
        """Do nothing."""


async def drive(base_url: str, api_key: str, task: str) -> str:
    """Let an agent play in the process of agents; return its measurements as JSON."""
    async with await anyio.connect_tcp("127.0.0.1", int(os.environ[DRIVER])) as stream:
        await stream.send(msgspec.json.encode([base_url, api_key, int(task)]) + b"\n")
        return (await BufferedByteReceiveStream(stream).receive_until(b"\n", 1 << 20)).decode()


# -- the process of agents -------------------------------------------------------------------------------------------


async def agents() -> None:
    """Run agents that connect to a port, which is printed first."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    sys.stdout.write(f"{listener.extra(SocketAttribute.local_port)}\n")
    sys.stdout.flush()
    with rare_garbage_collection():  # The benchmark measures the endpoint, not the garbage collection of its clients.
        await listener.serve(_agent)


async def _agent(connection: SocketStream) -> None:
    async with connection:
        order = await BufferedByteReceiveStream(connection).receive_until(b"\n", 1 << 16)
        base_url, key, number = msgspec.json.decode(order)
        host, _, port = base_url.partition("//")[2].partition("/")[0].partition(":")
        await anyio.sleep(random.Random(number).uniform(0, STAGGER_S))
        async with await anyio.connect_tcp(host, int(port)) as stream:
            took = await _talk(stream, key, number)
        await connection.send(msgspec.json.encode(took) + b"\n")


async def _talk(stream: SocketStream, key: str, number: int) -> dict[str, Any]:
    """Play all turns of an agent; return the seconds of each, and the numbers of lost and crossed answers."""
    received, messages = BufferedByteReceiveStream(stream), list[dict[str, str]]()
    found: dict[str, Any] = {"took": {}, "lost": 0, "crossed": 0}
    for turn in range(TURNS):
        name = question(number, turn)
        messages.append({"role": "user", "content": f"{name}?"})
        body = msgspec.json.encode({"model": "policy", "messages": messages, "stream": number % 2 == 1})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        start = time.perf_counter()
        await stream.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        content = await (_streamed(received) if number % 2 else _whole(received))
        found["took"][name] = time.perf_counter() - start
        found["lost"] += not content
        found["crossed"] += bool(content) and not content.startswith(f"{name}.")
        messages.append({"role": "assistant", "content": content})
    return found


async def _whole(received: BufferedByteReceiveStream) -> str:
    head = (await received.receive_until(b"\r\n\r\n", 1 << 16)).lower()
    size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    reply = msgspec.json.decode(await received.receive_exactly(size))
    return reply["choices"][0]["message"]["content"] if "choices" in reply else ""


async def _streamed(received: BufferedByteReceiveStream) -> str:
    events = (await received.receive_until(b"0\r\n\r\n", 1 << 20)).split(b"data: ")
    chunks = [line.partition(b"\n\n")[0] for line in events[1:]]
    deltas = [msgspec.json.decode(chunk)["choices"][0]["delta"] for chunk in chunks if chunk != b"[DONE]"]
    return "".join(delta.get("content", "") for delta in deltas)


# -- the node --------------------------------------------------------------------------------------------------------


async def node(make: Callable[[], Environment], engine: Timed, count: int) -> tuple[list[Trajectory], float, float]:
    """Play `count` episodes at once; return them, the seconds that passed, and the node's processor seconds."""
    played: list[Trajectory] = []
    player = EpisodePlayer(lambda _: make(), Letters(), engine, SETTINGS, Phases(), now=time.time)

    async def one(number: int) -> None:
        ended = await player.play(Lease(number, Task(number, number, 0, number), 0), EpisodeProgress())
        assert isinstance(ended, Trajectory), ended
        played.append(ended)

    start, cpu = time.perf_counter(), time.process_time()
    with rare_garbage_collection():  # As in a node's loop.
        async with sharing("model_service"), anyio.create_task_group() as episodes:
            for number in range(count):
                episodes.start_soon(one, number)
    return played, time.perf_counter() - start, time.process_time() - cpu


def agent() -> Agent:
    """Make an environment whose agent calls the endpoint."""
    module = "benchmarks.real.model_service"
    return Agent(AgentOptions(function=f"{module}:drive", tasks={"path": f"{module}:Tasks"}))


def measure(args: Args) -> list[Row]:
    """Measure without the endpoint, then with it."""
    count, answer_s = (50, 0.8) if args.quick else (AGENTS, ANSWER_S)
    alone = Timed(answer_s)
    _, alone_s, alone_cpu_s = anyio.run(node, Talk, alone, count)
    command = [sys.executable, "-m", "benchmarks.real.model_service", "agents"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            os.environ[DRIVER] = driver.stdout.readline().strip()
            served = Timed(answer_s)
            played, served_s, served_cpu_s = anyio.run(node, agent, served, count)
        finally:
            driver.kill()
    found = [msgspec.json.decode(one.turns[-1].note) for one in played]
    took = {name: seconds for one in found for name, seconds in one["took"].items()}
    case = f"{count} agents"
    rows = [
        Row(case, "replies_lost", "replies", count * TURNS - len(took) + sum(one["lost"] for one in found), at_most=0),
        Row(case, "replies_crossed", "replies", sum(one["crossed"] for one in found), at_most=0),
    ]
    for way, odd in (("in one piece", 0), ("streamed", 1)):
        chosen = [name for name in took if int(name.partition("-")[0]) % 2 == odd]
        added_ms = np.array([took[name] - served.took[name] for name in chosen]) * 1e3
        rows += [
            Row(f"{case}, {way}", "added_p50_ms", "ms", float(np.percentile(added_ms, 50))),
            Row(f"{case}, {way}", "added_p99_ms", "ms", float(np.percentile(added_ms, 99)), at_most=ADDED_GOAL_MS),
        ]
    return [
        *rows,
        Row(case, "added_cpu_per_call_ms", "ms", (served_cpu_s - alone_cpu_s) / (count * TURNS) * 1e3),
        Row(case, "calls_per_s", "1/s", len(took) / served_s),
        Row(case, "throughput_of_none", "share", alone_s / served_s, at_least=RATIO_GOAL),
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["agents"]:
        anyio.run(agents)
    else:
        main("model_service", __doc__ or "", measure)
