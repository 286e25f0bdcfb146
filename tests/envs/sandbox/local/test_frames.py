"""Frames between host and agent: each end reads what the other writes, whole and split, and refuses what is none."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
from contextlib import suppress

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.agent import wire
from envs.sandbox.agent.loop import HostChannel, Loop
from envs.sandbox.engines import bundle
from envs.sandbox.engines.bundle import greet
from envs.sandbox.local.channel import INPUT_WINDOW, MAX_FRAME, Channel, Decoder, encode
from flash.errors import SandboxLostError, SandboxStartError

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(values, st.integers(1, 7))
def test_the_agent_reads_what_the_host_writes(value, step):
    frames, bodies = wire.Frames(), []
    data = encode(7, "run", value) + encode(8, "ping", None)
    for at in range(0, len(data), step):
        bodies += frames.feed(data[at : at + step])
    assert bodies == [[7, "run", value], [8, "ping", None]]


@given(values, st.integers(1, 7))
def test_the_host_reads_what_the_agent_writes(value, step):
    decoder, bodies = Decoder(), []
    data = bytes(wire.frame([7, 2, value]) + wire.frame([8, 0, None]))
    for at in range(0, len(data), step):
        bodies += decoder.feed(data[at : at + step])
    assert [(call, kind, msgspec.msgpack.decode(raw)) for call, kind, raw in bodies] == [(7, 2, value), (8, 0, None)]


@given(st.binary(min_size=8, max_size=400))
def test_noise_is_never_a_frame(noise):
    with suppress(SandboxLostError):
        assert Decoder().feed(noise) == []


def test_oversized_and_damaged_frames_end_the_channel():
    with pytest.raises(SandboxLostError, match="more than"):
        Decoder().feed((MAX_FRAME + 1).to_bytes(4, "big") + b"\0" * 4)
    data = bytearray(wire.frame([1, 0, b"data"]))
    data[-1] ^= 1
    with pytest.raises(SandboxLostError, match="damaged"):
        Decoder().feed(bytes(data))
    with pytest.raises(wire.WireError):
        wire.Frames().feed(bytes(data))


class SilentAgent:
    """A link to an agent that takes everything, and sends only what a test puts into `frames`."""

    transcript = b""

    def __init__(self) -> None:
        self.frames, self._received = anyio.create_memory_object_stream[bytes](1)

    async def send(self, data: bytes) -> None:
        pass

    async def receive(self) -> bytes:
        return await self._received.receive()

    async def aclose(self) -> None:
        self.frames.close()
        self._received.close()


@pytest.mark.anyio
async def test_input_that_waits_for_room_is_dropped_when_its_call_ends():
    link = SilentAgent()
    channel = Channel(link)

    async def answer() -> None:
        await anyio.wait_all_tasks_blocked()
        await link.frames.send(bytes(wire.frame([1, wire.RESULT, None])))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        async with channel.call("work", {}, 60) as call:
            tasks.start_soon(answer)
            with anyio.fail_after(5):
                await call.send(bytes(2 * INPUT_WINDOW))
            assert await call.result(type(None)) == (None, {})
        tasks.cancel_scope.cancel()
    await link.aclose()


def test_no_frame_is_carried_out_after_the_frame_that_closed_its_channel():
    ours, theirs = socket.socketpair()
    carried: list[object] = []

    def carry_out(body: object) -> None:
        carried.append(body)
        channel.close()

    source = ours.detach()
    with theirs:
        channel = HostChannel(Loop(), source, source, carry_out, lambda: None)
        theirs.sendall(encode(1, "ping", None) + encode(2, "run", {}))
        channel.read()
    assert carried == [[1, "ping", None]]


def test_the_agents_modules_have_no_name_in_common():
    names: list[str] = []
    for part in bundle.PARTS:
        text = (bundle.FOLDER / f"{part}.py").read_text()
        names += re.findall(r"^(?:class |def )?([A-Za-z_]\w*)(?= = |\(|:)", text, re.MULTILINE)
    assert sorted(set(names)) == sorted(names)
    assert "from envs" not in bundle.source()
    compile(bundle.source(), "agent", "exec")


def test_the_agent_goes_as_byte_code_only_to_the_same_python():
    options = bundle.Options(workdir="/work", lifetime=1, orphan=1, cgroup=False)
    assert bundle.load(importlib.util.MAGIC_NUMBER.hex(), options)[:1] == b"m"
    assert bundle.load("00000000", options)[:1] == b"s"


def test_an_image_without_python_says_so():
    boot = ["/bin/sh", "-c", "command() { return 1; }\n" + bundle.BOOT, "box", bundle.LOADER]
    said = subprocess.run(boot, input=b"greeting\n", capture_output=True, timeout=30, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (1, b"", b"the image has no Python\n")


class Silent:
    """A link whose other end says something else than an agent."""

    transcript = b""

    def __init__(self, says: bytes) -> None:
        self.says = [says, b""]

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes:
        return self.says.pop(0)

    async def aclose(self) -> None: ...


@pytest.mark.anyio
async def test_an_image_that_says_something_else_is_named_with_what_it_said():
    options = bundle.Options(workdir="/work", lifetime=1, orphan=1, cgroup=False)
    with pytest.raises(SandboxStartError, match="exec format error"):
        await greet(Silent(b"exec format error"), options, 10.0)
