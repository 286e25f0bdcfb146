"""Clients that no library makes: bytes over the service's unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from tests.envs.sandbox.services import TOKEN

END_S = 20.0
"""For the service to end a connection; long, because the machine may be busy."""


def bearer(token: str = TOKEN) -> dict[str, str]:
    """The header of a token."""
    return {"authorization": f"Bearer {token}"}


def bare(world: Any, **headers: str) -> httpx.AsyncClient:
    """A client with these headers and no others of ours."""
    transport = httpx.AsyncHTTPTransport(uds=world.url.removeprefix("unix:"))
    return httpx.AsyncClient(transport=transport, base_url="http://sandboxes", headers=headers, timeout=END_S)


def head(method: str, path: str, *lines: str, token: str | None = TOKEN) -> bytes:
    """The head of a request."""
    known = [f"authorization: Bearer {token}"] if token else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: sandboxes", *known, *lines, "", ""]).encode()


class Connection:
    """One of them."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self.got = b""
        """All that came."""

    async def until(self, text: bytes) -> None:
        """Read until this has come."""
        with anyio.fail_after(END_S):
            while text not in self.got:
                self.got += await self.stream.receive()

    async def ended(self) -> bool:
        """Read until the service ends it; False when it does not."""
        with anyio.move_on_after(END_S):
            try:
                while True:
                    self.got += await self.stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return True
        return False


@asynccontextmanager
async def connected(world: Any) -> AsyncIterator[Connection]:
    """A new connection."""
    async with await anyio.connect_unix(world.url.removeprefix("unix:")) as stream:
        yield Connection(stream)
