"""The body of a request, bounded in size, in time, and in what it would cost to decode.

What is refused is an `HTTPException`; it is raised where the application reads the body.
"""

from __future__ import annotations

from collections import Counter

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash.http.connections import HttpLimits

SIGNS = 400_000
"""Lists, objects and keys of a body in JSON, or signs in its texts that look like one's: each takes memory, and time in
which the process does nothing else."""


class BoundedBodies:
    """ASGI middleware for all requests of a server: bounds each body, and all that are held at a time together."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits
        self._held = 0
        """Bytes of the requests that are not answered yet."""
        self._held_by: Counter[str] = Counter()
        """The same by holder: the name of a bounded token, or empty for all other callers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body, holder = _Body(receive, self._limits), ""

        async def bounded() -> Message:
            nonlocal holder
            before = body.size
            message = await body.receive()
            if not before:
                # The application has looked at the token by now.
                holder = scope["state"]["connection"].holder
            self._held += body.size - before
            self._held_by[holder] += body.size - before
            if self._held > self._limits.held_bytes:
                raise HTTPException(503, "too many large requests wait for their answers; try again later")
            if holder and self._held_by[holder] > self._limits.token_share * self._limits.held_bytes:
                raise HTTPException(503, "too many large requests of this token wait for their answers")
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._held -= body.size
            self._held_by[holder] -= body.size
            if not self._held_by[holder]:
                del self._held_by[holder]


class _Body:
    def __init__(self, receive: Receive, limits: HttpLimits) -> None:
        self._receive = receive
        self._limits = limits
        self._begun = anyio.current_time()
        self._complete = False
        self.size = 0
        """Bytes that have come."""

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # Waits for the client to leave, for as long as the answer takes.
        now, pause = anyio.current_time(), self._limits.receive_s
        due = self._begun + pause + self.size / self._limits.bytes_per_s
        try:
            with anyio.fail_after(min(pause, due - now)):
                message = await self._receive()
        except TimeoutError:
            slow = f"no piece of the body came for {pause:g} s, or all of it came too slowly"
            raise HTTPException(408, slow) from None
        self.size += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        if self.size > self._limits.body_bytes:
            raise HTTPException(413, f"the body has more than {self._limits.body_bytes} bytes")
        return message


async def read_body(request: Request, most_bytes: int, *, json: bool = True) -> bytes:
    """A body that is decoded as a whole.

    Args:
        request: whose it is.
        most_bytes: that it may have.
        json: whether it may also have no more than `SIGNS`.

    Raises:
        HTTPException: it is too large.
        ClientDisconnect: its client has left.
    """
    too_large = HTTPException(413, f"the body has more than {most_bytes} bytes")
    if int(request.headers.get("content-length") or 0) > most_bytes:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most_bytes:
            raise too_large
    if json and sum(map(data.count, (b"[", b"{", b":"))) > SIGNS:
        raise HTTPException(413, f"the body has more than {SIGNS} lists, objects and keys")
    return bytes(data)
