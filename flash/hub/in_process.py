"""A peer's connection to a hub of the same process: no network, the same deadlines."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flash.hub.hub import Hub
from flash.transport.request import ReplyT, Request
from flash.waiting import deadline


class InProcessCaller:
    """A peer's calls to the hub of the same process. `watch` sees every request with its reply."""

    def __init__(self, hub: Hub, watch: Callable[[msgspec.Struct, msgspec.Struct], None] | None = None) -> None:
        self._hub = hub
        self._watch = watch

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Ask the hub. Raises DeadlineError after `timeout` seconds."""
        with deadline(timeout, f"the reply to {type(request).__name__}", "the hub of this process"):
            reply = await self._hub.handle(request)
        if self._watch is not None:
            self._watch(request, reply)
        return reply
