"""Cost of the endpoint for agents: 500 agents at once, on the real clock, around an engine of fixed timing.

Each agent is an episode of `envs.agent` with eight turns that append to one another. The environments run in this
process, as on a node. The agents' own code runs in a second process, the *driver*, which this one starts. Each agent
has one connection to the endpoint that stays open, and every second agent has its answers streamed. The engine takes
4 s for an answer of 128 tokens, in pieces of 16.

The *added* time of a call is its time for the client less its time in the engine: sending, reading, rendering, the
episode's own work, and the lag of both event loops. Every answer names its agent and turn: an error in place of an
answer is a *lost* one, and the answer to another question is *crossed*. For comparison, an environment in this process
plays the same turns without the endpoint.
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

AGENT_COUNT = 500
"""Number of agents, and so of episodes at once."""
TURNS = 8
"""Number of calls of each agent."""
ANSWER_TOKENS, PIECE_TOKENS = 128, 16
"""Tokens of an answer, and of each piece that the engine delivers of it."""
ANSWER_S = 4.0
"""Seconds that the engine takes for an answer."""
STAGGER_S = 4.0
"""Seconds within which the agents begin: if all began at once they would stay in step, as no real agents do."""
MOST_ADDED_MS = 10
"""Goal of the 99th percentile of the added time, in milliseconds."""
LEAST_THROUGHPUT_SHARE = 0.95
"""Goal of the throughput with the endpoint, as a share of the throughput without it."""
DRIVER = "MODEL_SERVICE_DRIVER"
"""Environment variable with the port at which the driver takes orders to play an agent."""

SETTINGS = EpisodeSettings(
    seed=None,
    max_new_tokens=ANSWER_TOKENS,
    max_length=100_000,
    max_turns=TURNS,
    step_s=600,
    close_s=60,
    generate_s=600,
    episode_s=3600,
)
"""Limits of an episode. They are so large that no episode reaches them."""


class Letters(Tokenizer):
    """Tokenizer with a token for each character, and token 0 for the end of a message."""

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return, for each message, the first letter of its role, its characters and the end token."""
        if isinstance(observation, str):
            return [ord(letter) for letter in observation]
        return [token for message in observation for token in (*map(ord, message.role[0] + message.content), 0)] + [
            ord("a")
        ]

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a later observation, which do not depend on the tokens before it."""
        return self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Join the letters."""
        return "".join(chr(token) for token in token_ids if token)


class TimedEngine:
    """A `Responder` of fixed timing. It repeats the question, and keeps the seconds of each response.

    Args:
        answer_s: seconds that an answer takes.
    """

    def __init__(self, answer_s: float) -> None:
        self._piece_s = answer_s * PIECE_TOKENS / ANSWER_TOKENS
        self.took: dict[str, float] = {}
        """Seconds of each response, by its question."""

    async def generate(self, request: ResponseRequest) -> Completion:
        """Respond to the question at the end of the prompt, in pieces."""
        start = time.perf_counter()
        # The prompt ends with "u" for the role, the question and a question mark, all in far fewer than 40 characters.
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
    """Return the question of an agent in a turn, without its question mark. No other turn has the same question."""
    return f"{agent}-{turn}"


class DirectTurns:
    """Environment with the turns of an agent, but without the endpoint. Its throughput is that of the comparison."""

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Ask the first question. `seed` is the number of the agent."""
        self._seed, self._turn = seed, 0
        await anyio.sleep(random.Random(seed).uniform(0, STAGGER_S))  # as the agent of this number does
        return [Message("user", f"{question(seed, 0)}?")], {}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Ask the next question."""
        self._turn += 1
        shown = [Message("user", f"{question(self._seed, self._turn)}?")]
        return shown, 0.0, self._turn == TURNS, False, {}

    async def close(self) -> None:
        """Do nothing."""


class AgentTasks:
    """Environment that `envs.agent` plays around an agent. It gives the agent its task, which is the agent's number."""

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Return the number."""
        return str(seed), {}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Accept any answer, and keep the agent's measurements as a note."""
        return "", 0.0, True, False, {"note": action}

    async def close(self) -> None:
        """Do nothing."""


async def drive(base_url: str, api_key: str, task: str) -> str:
    """Let the driver play an agent, and return the agent's measurements as JSON.

    `envs.agent` calls this function as the agent, in the process of the environments. `base_url` and `api_key` are
    those of the endpoint for this episode.
    """
    async with await anyio.connect_tcp("127.0.0.1", int(os.environ[DRIVER])) as stream:
        await stream.send(msgspec.json.encode([base_url, api_key, int(task)]) + b"\n")
        return (await BufferedByteReceiveStream(stream).receive_until(b"\n", 1 << 20)).decode()


async def run_agents() -> None:
    """Print a port, and play an agent for each order that arrives there, until the process is killed."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    sys.stdout.write(f"{listener.extra(SocketAttribute.local_port)}\n")
    sys.stdout.flush()
    with rare_garbage_collection():  # The benchmark measures the endpoint, not the garbage collection of its clients.
        await listener.serve(_serve_order)


async def _serve_order(connection: SocketStream) -> None:
    """Read an order (URL, key and number of an agent), play the agent, and reply with its measurements."""
    async with connection:
        order = await BufferedByteReceiveStream(connection).receive_until(b"\n", 1 << 16)
        base_url, key, number = msgspec.json.decode(order)
        host, _, port = base_url.partition("//")[2].partition("/")[0].partition(":")
        await anyio.sleep(random.Random(number).uniform(0, STAGGER_S))
        async with await anyio.connect_tcp(host, int(port)) as stream:
            took = await play_turns(stream, key, number)
        await connection.send(msgspec.json.encode(took) + b"\n")


async def play_turns(stream: SocketStream, key: str, number: int) -> dict[str, Any]:
    """Play all turns of the agent `number`, over its connection to the endpoint.

    Returns the seconds of each call with the right answer by question (`took`), and the numbers of lost and crossed
    answers.
    """
    received, messages = BufferedByteReceiveStream(stream), list[dict[str, str]]()
    found: dict[str, Any] = {"took": {}, "lost": 0, "crossed": 0}
    for turn in range(TURNS):
        name = question(number, turn)
        messages.append({"role": "user", "content": f"{name}?"})
        body = msgspec.json.encode({"model": "policy", "messages": messages, "stream": number % 2 == 1})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        start = time.perf_counter()
        await stream.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        content = await _answer(received)
        seconds = time.perf_counter() - start
        if content.startswith(f"{name}."):
            found["took"][name] = seconds
        else:
            found["crossed" if content else "lost"] += 1
        messages.append({"role": "assistant", "content": content})
    return found


async def _answer(received: BufferedByteReceiveStream) -> str:
    """Read an HTTP response of one body or of server-sent events. Returns its answer; an empty text for an error."""
    head = (await received.receive_until(b"\r\n\r\n", 1 << 16)).lower()
    if b"content-length: " in head:  # one body, which is also the form of an error before a stream has begun
        size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        reply = msgspec.json.decode(await received.receive_exactly(size))
        return reply["choices"][0]["message"]["content"] if "choices" in reply else ""
    events = (await received.receive_until(b"0\r\n\r\n", 1 << 20)).split(b"data: ")
    chunks = [line.partition(b"\n\n")[0] for line in events[1:]]
    replies = [msgspec.json.decode(chunk) for chunk in chunks if chunk != b"[DONE]"]
    if not all("choices" in reply for reply in replies):  # an error has ended the stream
        return ""
    return "".join(reply["choices"][0]["delta"].get("content", "") for reply in replies)


AGENT = AgentOptions(
    function="benchmarks.real.model_service:drive", tasks={"path": "benchmarks.real.model_service:AgentTasks"}
)
"""Options of environments whose agent calls the endpoint."""


async def play_episodes(
    make: Callable[[], Environment], engine: TimedEngine, count: int
) -> tuple[list[Trajectory], float]:
    """Play `count` episodes at once, as a node does. `make` makes the environment of an episode.

    Returns their trajectories and the seconds that passed.
    """
    played: list[Trajectory] = []
    player = EpisodePlayer(lambda _: make(), Letters(), engine, SETTINGS, Phases(), now=time.time)

    async def one(number: int) -> None:
        """Play one episode."""
        ended = await player.play(Lease(number, Task(number, number, 0, number), 0), EpisodeProgress())
        assert isinstance(ended, Trajectory), ended
        played.append(ended)

    start = time.perf_counter()
    with rare_garbage_collection():  # As in a node's loop.
        async with sharing("model_service"), anyio.create_task_group() as episodes:
            for number in range(count):
                episodes.start_soon(one, number)
    return played, time.perf_counter() - start


def measure(args: Args) -> list[Row]:
    """Play the episodes without the endpoint, then with it, and return the rows. `benchmarks.form.main` calls this."""
    count, answer_s = (50, 0.8) if args.quick else (AGENT_COUNT, ANSWER_S)
    without = TimedEngine(answer_s)
    _, without_s = anyio.run(play_episodes, DirectTurns, without, count)
    command = [sys.executable, "-m", "benchmarks.real.model_service", "agents"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            os.environ[DRIVER] = driver.stdout.readline().strip()  # `drive` reads the port from there
            served = TimedEngine(answer_s)
            played, served_s = anyio.run(play_episodes, lambda: Agent(AGENT), served, count)
        finally:
            driver.kill()
    # Measurements of each agent, which `AgentTasks.step` has put into the note of the last turn.
    found = [msgspec.json.decode(trajectory.turns[-1].note) for trajectory in played]
    took = {name: seconds for one in found for name, seconds in one["took"].items()}
    case = f"{count} agents"
    rows = [
        Row(case, "replies_lost", "replies", sum(one["lost"] for one in found), at_most=0),
        Row(case, "replies_crossed", "replies", sum(one["crossed"] for one in found), at_most=0),
    ]
    for way, parity in (("in one piece", 0), ("streamed", 1)):
        # A question begins with the number of its agent; agents with odd numbers have their answers streamed.
        chosen = [name for name in took if int(name.partition("-")[0]) % 2 == parity]
        added_ms = np.array([took[name] - served.took[name] for name in chosen]) * 1e3
        p99_ms = float(np.percentile(added_ms, 99))
        rows.append(Row(f"{case}, {way}", "added_p99_ms", "ms", p99_ms, at_most=MOST_ADDED_MS))
    metric, share = "share_of_throughput_without_endpoint", without_s / served_s
    return [*rows, Row(case, metric, "share", share, at_least=LEAST_THROUGHPUT_SHARE)]


if __name__ == "__main__":
    if sys.argv[1:] == ["agents"]:
        anyio.run(run_agents)
    else:
        main("model_service", __doc__ or "", measure)
