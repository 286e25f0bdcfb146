"""Agents in sandboxes without a network reach their endpoint, and nothing else."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from envs.agent import Agent, AgentOptions
from envs.programs import OUTPUT_BYTES
from envs.relay.boxed import BoxOptions, run_boxed
from envs.relay.inside import CLOSED, CONNECTIONS, CREDIT, DATA, END, HEADER, MARK, OPEN, PAUSE_S, PIECE, WINDOW, Relay
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
    """An agent whose sandboxes are processes of this machine."""

    opener = staticmethod(local_processes)


async def doubles(stream: Any) -> None:
    """Serve a connection: send everything up to `!` back twice."""
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


HALF = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as stream:
    stream.sendall(b"request")
    stream.shutdown(socket.SHUT_WR)
    got = b""
    while True:
        piece = stream.recv(1 << 16)
        if not piece: break
        got += piece
print(len(got))
"""
"""A client that ends its side after the request, and then reads the answer to its end."""


async def test_a_client_that_has_ended_its_side_gets_the_whole_answer(bench):
    async def answer(stream: Any) -> None:
        """Read the request to its end, then send a large answer."""
        async with stream:
            request = b""
            with suppress(anyio.EndOfStream):
                while True:
                    request += await stream.receive()
            await anyio.sleep(0.1)
            await stream.send(request * 100_000)

    async with (
        bench.sandbox(profile="build") as sandbox,
        serving(answer) as port,
        open_relay(sandbox, "127.0.0.1", port) as inside,
    ):
        result = await sandbox.run(["python3", "-c", HALF, str(inside)], timeout=30)
    assert result.stdout == b"700000\n", result.stderr


SLOW = """
import socket, sys, threading
port = int(sys.argv[1])
slow = socket.create_connection(("127.0.0.1", port))
slow.setblocking(False)
sent = 0
try:
    slow.sendall(b"s")
    while True:
        sent += slow.send(b"x" * 65536)
except BlockingIOError:
    pass
quick = socket.create_connection(("127.0.0.1", port))
quick.sendall(b"q" * 300000 + b"!")
got = b""
while len(got) < 300000:
    got += quick.recv(1 << 16)
print("quick", sent > 0)
"""
"""Fills one connection, which the address does not read, and then uses another one."""


async def test_a_connection_that_nobody_reads_holds_no_other(bench):
    """In both directions: the address neither reads the slow connection nor stops sending to it."""

    async def answer(stream: Any) -> None:
        """Send to a slow client without end; send a quick one its bytes back."""
        async with stream:
            first = await stream.receive(1)
            if first == b"s":
                with suppress(anyio.BrokenResourceError):
                    while True:
                        await stream.send(b"y" * 65_536)
                return
            got = first
            while not got.endswith(b"!"):
                got += await stream.receive()
            await stream.send(got[:-1])

    async with (
        bench.sandbox(profile="build") as sandbox,
        serving(answer) as port,
        open_relay(sandbox, "127.0.0.1", port) as inside,
    ):
        result = await sandbox.run(["python3", "-c", SLOW, str(inside)], timeout=30)
    assert result.stdout == b"quick True\n", result.stderr


LEAVING = """
import socket, struct, sys
stream = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
stream.sendall(b"x")
stream.recv(1)
stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
stream.close()
"""
"""A client that breaks its connection in the middle of the answer."""


async def test_the_address_learns_that_a_client_has_broken_its_connection(bench):
    gone = anyio.Event()

    async def answer(stream: Any) -> None:
        """Send until the connection breaks."""
        async with stream:
            with suppress(anyio.BrokenResourceError):
                await stream.receive()
                while True:
                    await stream.send(b"y" * 65_536)
        gone.set()

    async with (
        bench.sandbox(profile="build") as sandbox,
        serving(answer) as port,
        open_relay(sandbox, "127.0.0.1", port) as inside,
    ):
        assert (await sandbox.run(["python3", "-c", LEAVING, str(inside)], timeout=30)).ok
        with anyio.fail_after(20):
            await gone.wait()


async def test_a_client_learns_that_the_address_has_broken_its_connection(bench):
    async def answer(stream: Any) -> None:
        """Break the connection after the first bytes."""
        await stream.receive()
        raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()

    async with (
        bench.sandbox(profile="build") as sandbox,
        serving(answer) as port,
        open_relay(sandbox, "127.0.0.1", port) as inside,
    ):
        result = await sandbox.run(["python3", "-c", READ, str(inside)], timeout=30)
    assert result.stdout == b"b''\n", result.stderr


READ = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as stream:
    stream.sendall(b"x" * 300000)
    print(stream.recv(9))
"""


@asynccontextmanager
async def serving(answer: Any) -> AsyncGenerator[int]:
    """Serve each connection to a port of this machine with `answer`. Yields the port."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


class Wire:
    """A sandbox whose end of the relay is the test: it sends frames, and reads those of the host."""

    def __init__(self) -> None:
        self._into, self._frames = anyio.create_memory_object_stream[bytes](100)
        self._out, self._got = anyio.create_memory_object_stream[bytes](10_000)
        self.left = anyio.Event()
        """Set once the host has ended the program in the sandbox."""
        self.send_raw(MARK + HEADER.pack(0, DATA, 2) + b"80")

    def send_raw(self, data: bytes) -> None:
        """Send bytes to the host."""
        self._into.send_nowait(data)

    def send(self, number: int, kind: int, data: bytes = b"") -> None:
        """Send a frame to the host."""
        self.send_raw(HEADER.pack(number, kind, len(data)) + data)

    async def receive(self) -> tuple[int, int, bytes]:
        """Return the next frame of the host: number, kind and bytes."""
        with anyio.fail_after(20):
            frame = await self._got.receive()
        number, kind, _ = HEADER.unpack_from(frame)
        return number, kind, frame[HEADER.size :]

    def close(self) -> None:
        """Close the streams."""
        for stream in (self._into, self._frames, self._out, self._got):
            stream.close()

    # ---- what the relay asks of a sandbox, and of its terminal

    @asynccontextmanager
    async def terminal(self, command: object) -> AsyncGenerator[Wire]:
        """Stand in for the terminal of a sandbox."""
        try:
            yield self
        finally:
            self.left.set()

    async def read(self) -> bytes:
        """Return the bytes that the test has sent."""
        return await self._frames.receive()

    async def write(self, data: bytes) -> None:
        """Take a frame of the host."""
        await self._out.send(data)


@asynccontextmanager
async def wired(answer: Any) -> AsyncGenerator[Wire]:
    """Open the host's end of a relay to a server that `answer` makes. Yields the other end, which the test plays."""
    wire: Any = Wire()
    try:
        async with serving(answer) as port, open_relay(wire, "127.0.0.1", port) as inside:
            assert inside == 80
            yield wire
    finally:
        wire.close()


async def test_late_frames_of_a_connection_that_is_over_open_no_other() -> None:
    connections: list[bytes] = []

    async def answer(stream: Any) -> None:
        async with stream:
            connections.append(await stream.receive())

    async with wired(answer) as wire:
        wire.send(1, OPEN)
        wire.send(1, DATA, b"one")
        seen = [await wire.receive() for _ in range(2)]
        assert sorted(kind for _, kind, _ in seen) in ([END, CREDIT], [CLOSED, CREDIT])
        wire.send(1, END)
        for kind, data in ((DATA, b"late"), (END, b""), (CREDIT, b"\0\0\0\1"), (CLOSED, b"")):
            wire.send(1, kind, data)
        wire.send(2, OPEN)
        wire.send(2, DATA, b"two")
        while (await wire.receive())[:2] != (2, END):
            pass
    assert connections == [b"one", b"two"]


async def test_more_connections_than_there_may_be_are_refused() -> None:
    async def answer(stream: Any) -> None:
        async with stream:
            await anyio.sleep_forever()

    async with wired(answer) as wire:
        for number in range(1, CONNECTIONS + 1):
            wire.send(number, OPEN)
            await anyio.lowlevel.checkpoint()
        wire.send(CONNECTIONS + 1, OPEN)
        assert await wire.receive() == (CONNECTIONS + 1, CLOSED, b"")


@pytest.mark.parametrize(
    "frames",
    [
        [(1, OPEN, b""), (1, OPEN, b"")],
        [(1, OPEN, b""), *[(1, DATA, b"x" * PIECE)] * (2 * WINDOW // PIECE + 99)],
        [(1, OPEN, b""), (1, 99, b"")],
        [(1, OPEN, b""), (1, CREDIT, b"much")] * 2,
        [(1, OPEN, b""), (1, CREDIT, b"")],
    ],
)
async def test_a_program_in_the_place_of_the_relays_end_loses_its_connections(frames) -> None:
    ended = anyio.Event()

    async def answer(stream: Any) -> None:
        """Read until the connection ends."""
        async with stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await anyio.sleep(0.2)
                while await stream.receive():
                    pass
        ended.set()

    async with wired(answer) as wire:
        wire.send(*frames[0])
        await anyio.sleep(0.1)
        for frame in frames[1:]:
            with suppress(anyio.WouldBlock):
                wire.send(*frame)
        with anyio.fail_after(20):
            await ended.wait()
            # So that the port in the sandbox is closed, and later connections do not wait for ever.
            await wire.left.wait()


def test_the_relays_end_in_the_sandbox_waits_for_nothing_but_its_selector() -> None:
    relay = Relay()
    with relay.listener:
        relay.accept()  # no program is there any more
    assert relay.clients == {}


def test_the_relays_end_in_the_sandbox_pauses_without_a_descriptor_for_a_connection() -> None:
    class Exhausted:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "no descriptor is left")

    relay = Relay()
    relay.listener.close()
    relay.listener = cast("Any", Exhausted())
    begin = time.monotonic()
    relay.accept()
    assert time.monotonic() - begin >= PAUSE_S


@pytest.mark.integration
async def test_a_sandbox_without_sockets_of_the_internet_has_no_relay(engine_url) -> None:
    async with (
        open_sandboxes(Location()) as sandboxes,
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
    """Play an episode of three answers with an agent of this class, and check it."""
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
