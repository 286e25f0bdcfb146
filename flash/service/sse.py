"""An answer that is sent as it comes, in server-sent events. Its client may leave at any time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from flash.service.chat import PolicyAnswer
from flash.service.errors import ApiError
from flash.service.sessions import Call
from flash.types import Piece


class EventFormat(Protocol):
    """How the answers to a request are written: one after the other, counted from 0, and then an end."""

    def begin(self, index: int) -> bytes:
        """Before anything was said."""
        ...

    def piece(self, piece: Piece, index: int) -> bytes:
        """More was said."""
        ...

    def said(self, answer: PolicyAnswer, index: int) -> bytes:
        """All was said."""
        ...

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """All answers were."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """It ends in the middle."""
        ...


class EventStream(StreamingResponse):
    """The answers to a request.

    Args:
        calls: one for each answer; the first has begun.
        events: how they are written.
        ended: told each answer before its end is sent.
        waits: closed when nobody waits for the rest any more.
    """

    media_type = "text/event-stream"

    def __init__(
        self, calls: Sequence[Call], events: EventFormat, ended: Callable[[PolicyAnswer], None], waits: ExitStack
    ) -> None:
        self._lines = _lines(calls, events, ended)
        super().__init__(self._lines, headers={"cache-control": "no-store"})
        self._waits = waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._waits:
            async with aclosing(self._lines):
                await super().__call__(scope, receive, send)


async def _lines(
    calls: Sequence[Call], events: EventFormat, ended: Callable[[PolicyAnswer], None]
) -> AsyncGenerator[bytes]:
    answers: list[PolicyAnswer] = []
    try:
        for index, call in enumerate(calls):
            yield events.begin(index)
            async with aclosing(call.pieces()) as pieces:
                async for piece in pieces:
                    yield events.piece(piece, index)
            answers.append(await call.answer())
            ended(answers[-1])
            yield events.said(answers[-1], index)
    except ApiError as error:
        yield events.fail(error)
        return
    yield events.end(answers)
