"""Greeting of an agent: from a new link to a channel on which the agent answers."""

from __future__ import annotations

import secrets

import anyio
import msgspec

from envs.sandbox.engines import bundle
from envs.sandbox.engines.backend import Link
from flash.errors import SandboxStartError

_NOISE_LIMIT = 1 << 14
"""Bytes before the answer to the greeting that are accepted as messages of the image's shell or Python."""


class Hello(msgspec.Struct, frozen=True):
    """Facts about the agent that it reports in its first answer."""

    uid: int
    workdir: str
    bash: bool
    writable: bool
    """True if files can be written to the working directory."""
    protected: bool
    """True if other processes of the sandbox can neither read the agent's memory nor use its descriptors."""
    lifetime: float = msgspec.field(name="life")
    """Seconds until the agent ends by itself."""
    sessions: list[str] = []


async def greet(link: Link, options: bundle.Options, seconds: float, prelude: str = "") -> bytes:
    """Start the agent at the other end of a link. Returns the bytes that it has sent after its answer.

    Raises:
        SandboxStartError: the agent did not answer within `seconds`; or the first process of the sandbox ended, or sent
            too many other bytes. The message quotes the end of these bytes.
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
