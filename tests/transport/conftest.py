"""Servers for the tests of connections: one of Flash, and one that does what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from flash.transport import new_token, serve
from flash.transport.auth import admit_client


@pytest.fixture
def token() -> bytes:
    """Return a token for one test."""
    return new_token()


@pytest.fixture
def serving(token: bytes):
    """A server on a free port for the length of a block, which gives the port."""

    @asynccontextmanager
    async def start(request_type: Any, handler: Any, **options: Any) -> AsyncIterator[int]:
        run = partial(serve, "127.0.0.1", 0, token, request_type, handler, **{"deadline": 5.0, **options})
        async with anyio.create_task_group() as tasks:
            yield await tasks.start(run)
            tasks.cancel_scope.cancel()

    return start


@pytest.fixture
def puppet(token: bytes):
    """A server whose whole behaviour after the proof is one function of the stream; it gives the port."""

    @asynccontextmanager
    async def start(play: Callable[[SocketStream], Awaitable[None]]) -> AsyncIterator[int]:
        async def accept(stream: SocketStream) -> None:
            async with stream:
                await admit_client(stream, token)
                await play(stream)

        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, accept)
            yield listener.extra(SocketAttribute.local_port)
            tasks.cancel_scope.cancel()

    return start
