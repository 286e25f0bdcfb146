"""Greeting an agent: from a fresh link to a channel that its agent answers on."""

from __future__ import annotations

import secrets

import anyio
import msgspec

from envs.sandbox.engines import bundle
from envs.sandbox.engines.backend import Link
from flash.errors import SandboxStartError

_NOISE_LIMIT = 1 << 14
"""Bytes before the greeting's answer that are taken for messages of the image's shell or Python."""


class Hello(msgspec.Struct, frozen=True):
    """What the agent says of itself."""

    uid: int
    workdir: str
    bash: bool
    writable: bool
    """Files can be written to the working directory."""
    protected: bool
    """Other processes of the sandbox can neither read its memory nor use its descriptors."""
    lifetime: float = msgspec.field(name="life")
    """Seconds until the agent ends by itself."""
    sessions: list[str] = []


async def greet(link: Link, options: bundle.Options, seconds: float, prelude: str = "") -> bytes:
    """Start the agent at the other end, for at most `seconds`; what it has sent beyond its answer already.

    Raises:
        SandboxStartError: the first process of the sandbox did not answer, with what it said instead.
    """
    greeting = secrets.token_hex(16)
    got = b""
    with anyio.move_on_after(seconds) as scope:
        await link.send(greeting.encode() + b"\n")
        while True:
            _, found, after = got.partition(greeting.encode() + b" ")
            line, end, rest = after.partition(b"\n")
            if found and end:
                await link.send(bundle.load(line.decode("ascii", "replace"), options, prelude))
                return rest
            data = await link.receive()
            if not data or len(got) > _NOISE_LIMIT:
                said = (got + data + link.transcript).decode("utf-8", "replace").strip()[-500:] or "nothing"
                raise SandboxStartError(
                    f"the sandbox ended before its agent answered; it said: {said}. Its image needs /bin/sh and "
                    "Python 3.6 or newer, that work"
                )
            got += data
    assert scope.cancelled_caught
    raise SandboxStartError(f"waited {seconds:g} s for the agent of the sandbox; is the machine overloaded?")
