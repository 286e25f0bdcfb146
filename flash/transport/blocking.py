"""A `Client` for synchronous callers, such as trainer ranks, whose main thread runs torch.

The connection lives on an event loop in a background thread. An interrupt of a waiting call cancels the call there
before it goes on, so that leaving the block never waits for a reply.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Self

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from flash.errors import TransportError
from flash.transport.client import Client, connect
from flash.transport.request import ReplyT, Request


class BlockingClient:
    """`connect` and `Client` as a plain context manager. Threads may share it.

    Args: as of `flash.transport.connect`.
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

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name=f"{self._name} transport"))
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(self._connect()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # Without the block's error: it is not the loop's, and a KeyboardInterrupt raised there would kill its thread.
        self._stack.close()

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request and wait for its reply. Errors as of `Client.call`."""
        key = object()
        try:
            return self._portal.call(self._call, key, request, timeout)
        except BaseException:
            # An interrupt can come before there is a future to cancel, hence the key. The loop starts the call first.
            with suppress(RuntimeError):  # The portal is closed, and the call with it.
                self._portal.start_task_soon(self._abandon, key)
            raise

    async def _call(self, key: object, request: Request[ReplyT], timeout: float) -> ReplyT:
        with anyio.CancelScope() as scope:
            self._running[key] = scope
            try:
                return await self._client.call(request, timeout)
            finally:
                del self._running[key]
        raise TransportError(f"the caller of {type(request).__name__} was interrupted")

    def _abandon(self, key: object) -> None:
        if (scope := self._running.get(key)) is not None:
            scope.cancel()
