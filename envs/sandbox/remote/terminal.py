"""A terminal of a remote sandbox, over a websocket."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from envs.sandbox.api import Command
from envs.sandbox.protocol.wire import TERMINAL_FAILED, TerminalQuery
from envs.sandbox.remote.http import HttpClient
from flash.errors import SandboxLostError, SandboxRefusedError

_QUIET = logging.getLogger(__name__)
_QUIET.setLevel(logging.WARNING)
"""Where somebody asks for details, the heads of requests are logged, and with them the tokens: not here."""

OPEN_S = 30.0
"""Seconds for the connection to be made."""


class RemoteTerminal:
    """A shell on a pseudo-terminal."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def write(self, data: bytes) -> None:
        try:
            await self._socket.send(data)
        except ConnectionClosed as error:
            raise SandboxLostError(f"the terminal is closed: {_reason(error)}") from error

    async def read(self) -> bytes:
        """What came; empty once it has ended."""
        try:
            data = await self._socket.recv()
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == TERMINAL_FAILED:
                raise SandboxLostError(_reason(error)) from error
            return b""
        return data if isinstance(data, bytes) else data.encode()

    async def resize(self, rows: int, columns: int) -> None:
        """The window has this size now."""
        try:
            await self._socket.send(msgspec.json.encode(TerminalQuery(rows=rows, columns=columns)).decode())
        except ConnectionClosed as error:
            raise SandboxLostError(f"the terminal is closed: {_reason(error)}") from error


@asynccontextmanager
async def open_terminal(
    http: HttpClient, path: str, command: Command | None, rows: int, columns: int
) -> AsyncGenerator[RemoteTerminal]:
    """A terminal for the time of the block."""
    if command is not None:
        raise SandboxRefusedError("the service opens terminals with a shell only; type the command there")
    options: dict[str, Any] = {
        "additional_headers": {"authorization": f"Bearer {http.token}"},
        "open_timeout": OPEN_S,
        "proxy": None,
        "compression": None,
        "logger": _QUIET,
    }
    if http.url.startswith("https:"):
        options["ssl"] = http.verify
    target = f"{path}?rows={rows}&columns={columns}"
    try:
        if http.url.startswith("unix:"):
            opened = unix_connect(http.url.removeprefix("unix:"), f"ws://sandboxes{target}", **options)
        else:
            opened = connect(f"ws{http.url.removeprefix('http')}{target}", **options)
        socket = await opened
    except (OSError, TimeoutError, InvalidHandshake) as error:
        raise SandboxLostError(f"no terminal at {http.url}{path}: {error}") from error
    try:
        yield RemoteTerminal(socket)
    finally:
        await socket.close()


def _reason(error: ConnectionClosed) -> str:
    return error.rcvd.reason if error.rcvd is not None else "the connection broke"
