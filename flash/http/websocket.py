"""Websockets for who serves some: what `connections` is for HTTP. Here alone, because it needs one more package."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from flash.http.connections import HttpLimits, MeasuredConnection, Taking

_QUIET = logging.getLogger(__name__)
_QUIET.setLevel(logging.WARNING)


class WebSocketConnection(MeasuredConnection, WebSocketsSansIOProtocol):
    """A websocket for one client."""

    def __init__(self, *args: Any, limits: HttpLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        # It would log the heads of requests, and with them the tokens, where somebody asks for details.
        self.conn.logger, self.conn.debug = _QUIET, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._taking = Taking(self.transport, self._limits)
        self._taking.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._taking.end()
        super().connection_lost(exc)


def websocket_protocol(limits: HttpLimits) -> Any:
    """What a `uvicorn.Config` needs to know of these connections."""
    return partial(WebSocketConnection, limits=limits)
