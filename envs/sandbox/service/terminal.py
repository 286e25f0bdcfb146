"""A terminal over a websocket: bytes both ways, and text frames with the window's new size.

The program on it ends when the browser leaves, and the socket is closed when the program ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from envs.sandbox.api import Terminal
from envs.sandbox.protocol.problems import ProblemError
from envs.sandbox.protocol.wire import TERMINAL_ENDED, TERMINAL_FAILED, TerminalQuery
from envs.sandbox.service.endpoint import problem_response
from envs.sandbox.service.service import Service
from flash.errors import FlashError

REASON_BYTES = 120
"""A websocket's close frame has room for 123."""


async def serve_terminal(service: Service, socket: WebSocket) -> None:
    """One terminal, from the browser's connection to its end."""
    try:
        lease = service.lease(socket.path_params["id"], socket.state.token)
        query = msgspec.convert(dict(socket.query_params), TerminalQuery, strict=False)
    except ProblemError as error:
        await socket.send_denial_response(problem_response(error.problem))
        return
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as error:
        await socket.send_denial_response(problem_response(ProblemError(400, f"query: {error}").problem))
        return
    await socket.accept()
    code, reason = TERMINAL_ENDED, "the program ended"
    try:
        async with service.pool.handle(lease).terminal(rows=query.rows, columns=query.columns) as terminal:
            await _join(terminal, socket)
    except FlashError as error:
        code, reason = TERMINAL_FAILED, str(error)
    except WebSocketDisconnect:
        return
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # The browser may have left first.
        await socket.close(code, reason.encode()[:REASON_BYTES].decode(errors="ignore"))


async def _join(terminal: Terminal, socket: WebSocket) -> None:
    """Carry bytes until one side ends."""
    failures: list[FlashError] = []

    async def show() -> None:
        while data := await terminal.read():
            await socket.send_bytes(data)

    async def type_in() -> None:
        while (message := await socket.receive())["type"] == "websocket.receive":
            if (data := message.get("bytes")) is not None:
                await terminal.write(data)
            else:
                size = msgspec.json.decode(message["text"], type=TerminalQuery)
                await terminal.resize(size.rows, size.columns)

    async with anyio.create_task_group() as tasks:

        async def until_end(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except FlashError as error:
                failures.append(error)
            except (msgspec.DecodeError, UnicodeError, WebSocketDisconnect):
                pass  # The browser left, or sends what no browser sends: either way it is over.
            tasks.cancel_scope.cancel()

        tasks.start_soon(until_end, show)
        tasks.start_soon(until_end, type_in)
    if failures:
        raise failures[0]
