"""Greeting an agent: from a fresh link to a channel that its agent answers on."""

from __future__ import annotations

import secrets

import anyio
import msgspec

from envs.sandbox.engines import bundle
from envs.sandbox.engines.backend import Link
from flash.errors import SandboxLostError, SandboxStartError

_NOISE_LIMIT = 1 << 14
"""Bytes before the greeting's answer that are taken for messages of the image's shell or Python."""


class Hello(msgspec.Struct, frozen=True):
    """What the agent says of itself."""

    protocol: int
    kind: str
    version: str
    pid: int
    uid: int
    workdir: str
    bash: bool
    writable: bool
    """Files can be written to the working directory."""
    protected: bool
    """Other processes of the sandbox can neither read its memory nor use its descriptors."""
    lifetime: float = msgspec.field(name="life")
    """Seconds until the agent ends by itself."""
    jobs: list[str] = []
    sessions: list[str] = []


class Rest:
    """A link of which some bytes were read already."""

    def __init__(self, link: Link, rest: bytes) -> None:
        self._link = link
        self._rest = rest

    @property
    def transcript(self) -> bytes:
        return self._link.transcript

    async def send(self, data: bytes) -> None:
        await self._link.send(data)

    async def receive(self) -> bytes:
        if self._rest:
            rest, self._rest = self._rest, b""
            return rest
        return await self._link.receive()

    async def aclose(self) -> None:
        await self._link.aclose()


class NoLink:
    """Before there is a link."""

    transcript = b""

    async def send(self, data: bytes) -> None:
        raise SandboxLostError("the sandbox was not started")

    async def receive(self) -> bytes:
        return b""

    async def aclose(self) -> None: ...


async def greet(link: Link, options: bundle.Options, prelude: str = "") -> tuple[str, str, Rest]:
    """Start the agent at the other end; give its kind (`python` or `shell`), what it adds to that, and the link.

    The caller sets the deadline.

    Raises:
        SandboxStartError: the first process of the sandbox did not answer, with what it said instead.
    """
    greeting = secrets.token_hex(16)
    await link.send(greeting.encode() + b"\n")
    got = b""
    while True:
        _, found, after = got.partition(greeting.encode() + b" ")
        line, end, rest = after.partition(b"\n")
        if found and end:
            break
        data = await link.receive()
        if not data or len(got) > _NOISE_LIMIT:
            said = (got + data + link.transcript).decode("utf-8", "replace").strip()[-500:] or "nothing"
            raise SandboxStartError(
                f"the sandbox ended before its agent answered; it said: {said}. Its image needs /bin/sh that works"
            )
        got += data
    kind, magic = line.decode("ascii", "replace").split(" ")
    if kind == "python":
        await link.send(bundle.load(magic, options, prelude))
    return kind, magic, Rest(link, rest)


async def with_deadline(
    link: Link, options: bundle.Options, seconds: float, prelude: str = ""
) -> tuple[str, str, Rest]:
    """`greet`, for at most `seconds`."""
    try:
        with anyio.fail_after(seconds):
            return await greet(link, options, prelude)
    except TimeoutError:
        raise SandboxStartError(
            f"waited {seconds:g} s for the agent of the sandbox; is the machine overloaded?"
        ) from None
