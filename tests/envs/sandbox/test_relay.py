"""Agents in sandboxes without a network reach their endpoint, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from envs.agent import Agent, AgentOptions
from envs.programs import OUTPUT_BYTES
from envs.relay.boxed import BoxOptions, run_boxed
from envs.relay.outside import CHATTER, open_relay
from envs.sandbox.api import Spec
from envs.sandbox.open import Location, open_sandboxes
from flash.environment import sharing
from flash.errors import ConfigError, EnvError, SandboxStartError
from flash.types import Outcome, Trajectory
from tests.envs.agents import TASKS, Policy, play
from tests.envs.sandboxes import local_processes

pytestmark = pytest.mark.anyio

ASK = """
import json, os, sys, urllib.request
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]
messages = [{"role": "user", "content": sys.stdin.read()}]
for turn in range(3):
    messages += [ask(messages), {"role": "user", "content": "x" * 1000}]
print(len(messages), messages[1]["content"])
"""
"""A client of the API that needs no package."""

FETCH = """
import socket, sys, threading
def fetch(number):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as stream:
        stream.sendall(bytes([number]) * 200000 + b"!")
        got = b""
        while len(got) < 400000:
            got += stream.recv(1 << 16)
        assert got == bytes([number]) * 400000, number
threads = [threading.Thread(target=fetch, args=(number,)) for number in range(1, 9)]
for thread in threads: thread.start()
for thread in threads: thread.join()
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except OSError:
    print("fetched")
"""


class Boxed(Agent):
    """In local processes."""

    opener = staticmethod(local_processes)


async def doubles(stream: Any) -> None:
    """Sends everything back twice."""
    async with stream:
        got = b""
        while not got.endswith(b"!"):
            got += await stream.receive()
        await stream.send(got[:-1] * 2)


async def test_connections_at_once_reach_one_address_byte_for_byte(bench) -> None:
    async with (
        bench.sandbox(profile="build") as sandbox,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, doubles)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with open_relay(sandbox, "127.0.0.1", port) as inside:
            result = await sandbox.run(["python3", "-c", FETCH, str(inside)], timeout=30)
        assert (result.stdout, result.exit_code) == (b"fetched\n", 0), result.stderr
        tasks.cancel_scope.cancel()


async def test_an_address_that_nobody_listens_at_is_a_closed_connection(bench) -> None:
    look = (
        "import socket, sys\nwith socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as stream:\n"
        "    stream.send(b'x')\n    print(stream.recv(9))"
    )
    async with bench.sandbox(profile="build") as sandbox, open_relay(sandbox, "127.0.0.1", 9) as inside:
        result = await sandbox.run(["python3", "-c", look, str(inside)], timeout=10)
    assert result.stdout == b"b''\n", result.stderr


@pytest.mark.integration
async def test_a_sandbox_without_sockets_of_the_internet_has_no_relay(engine_url) -> None:
    async with (
        open_sandboxes(Location(), "relay") as sandboxes,
        sandboxes.acquire(Spec(image="flash-sandbox-python")) as sandbox,
    ):
        with pytest.raises(SandboxStartError, match=r"the relay does not start in the sandbox: (.|\s)*Error"):
            async with open_relay(sandbox, "127.0.0.1", 9):
                pass


async def test_an_agent_in_a_sandbox_is_trained() -> None:
    await trained(Boxed)


@pytest.mark.integration
async def test_an_agent_in_a_container_without_a_network_is_trained(engine_url) -> None:
    await trained(Agent)


async def trained(kind: type[Agent]) -> None:
    """An episode of three answers."""
    box = {"image": "flash-sandbox-python", "limits": {"memory_mib": 256}}
    options = AgentOptions(command=["python3", "-c", ASK], tasks=TASKS, box=box)
    policy = Policy(lambda _: [*b"well", 256], seconds=0.0)
    with anyio.fail_after(120):
        async with sharing("boxed"):
            await kind.prepare(options)
        played = await play(kind(options), policy, in_process=False, max_length=10_000)
    assert isinstance(played, Trajectory), played
    assert played.outcome == Outcome.OK
    assert [turn.action for turn in played.turns] == ["well"] * 3
    assert played.turns[-1].note == "7 well\n"


async def test_an_answer_that_is_too_long_is_an_error_and_not_cut() -> None:
    command = ["head", "-c", str(OUTPUT_BYTES + 1), "/dev/zero"]
    async with sharing("boxed"):
        with pytest.raises(EnvError, match="`head` wrote more than 1048576 bytes to its standard output"):
            await run_boxed(BoxOptions(image="any"), command, "http://127.0.0.1:9/v1", "", "", opener=local_processes)


def test_a_box_is_for_commands() -> None:
    with pytest.raises(ConfigError, match="`box` is where a `command` runs"):
        AgentOptions(function="x:y", tasks=TASKS, box={"image": "any"})
    with pytest.raises(ConfigError, match=r"box\.image"):
        AgentOptions(command=["x"], tasks=TASKS, box={})


async def test_a_sandbox_that_chatters_instead_of_a_relay_is_not_listened_to_for_long() -> None:
    class Chatter:
        given = 0

        async def read(self) -> bytes:
            self.given += 1000
            await anyio.lowlevel.checkpoint()
            return b"x" * 1000

    class Chattering:
        chatter = Chatter()

        @asynccontextmanager
        async def terminal(self, command: object) -> AsyncGenerator[Chatter]:
            yield self.chatter

    sandbox: Any = Chattering()
    with pytest.raises(SandboxStartError, match="x" * 500):
        async with open_relay(sandbox, "127.0.0.1", 9):
            pytest.fail("opened")
    assert sandbox.chatter.given <= CHATTER + 1000
