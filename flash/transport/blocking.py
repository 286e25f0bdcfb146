"""A client for synchronous callers: trainer ranks, whose main thread runs torch, call the hub through it.

The connection lives on an event loop in a background thread, from the beginning of the block to its end. If a waiting
call is interrupted (Ctrl-C), it is cancelled on that loop, so that leaving the block never waits for a reply.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Self

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from flash.errors import TransportError
from flash.transport.client import Client, connect
from flash.transport.frames import ReplyT, Request


class BlockingClient:
    """A context manager that gives the calls of a `Client` to code without an event loop. Threads may share it.

    Args:
        host: address at which the server listens.
        port: port at which the server listens.
        token: the run's token.
        name: name of this process in the server's messages.
        deadline: seconds for connecting and for the proof of the token.
        server: name of the server in error messages.
    """

    _portal: BlockingPortal
    _client: Client

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        name: str,
        deadline: float,
        *,
        server: str = "hub",
    ) -> None:
        self._connect = lambda: connect(host, port, token, name, deadline, server=server)
        self._name = name
        self._stack = ExitStack()
        self._running: dict[object, anyio.CancelScope] = {}
        """Scopes of the calls in progress. A key belongs to one call; only the loop's thread uses the dictionary."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name=f"{self._name} transport"))
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(self._connect()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # The block's error is not passed on: a KeyboardInterrupt raised in the loop would kill the loop's thread.
        self._stack.close()

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request and wait for its reply, at most `timeout` seconds. Raises the errors of `Client.call`."""
        key = object()
        try:
            return self._portal.call(self._call, key, request, timeout)
        except BaseException:
            # An interrupt may come before the portal has made a future that could be cancelled. So the call is found by
            # its key. The loop runs `_call` before `_cancel`, because `_call` was given to the loop first.
            with suppress(RuntimeError):  # The portal is closed, so the call has ended.
                self._portal.start_task_soon(self._cancel, key)
            raise

    async def _call(self, key: object, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Run one call on the loop, in a scope that `_cancel` finds by `key`."""
        with anyio.CancelScope() as scope:
            self._running[key] = scope
            try:
                return await self._client.call(request, timeout)
            finally:
                del self._running[key]
        raise TransportError(f"the caller of {type(request).__name__} was interrupted")

    def _cancel(self, key: object) -> None:
        """Cancel the call with this key, if it is still running."""
        if (scope := self._running.get(key)) is not None:
            scope.cancel()
