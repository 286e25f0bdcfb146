"""EventStream: answers that are sent as server-sent events while they are sampled. The client may leave early."""

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
    """An encoder of the events of one request.

    For each answer, counted from 0: `begin`, any number of `piece`, then `said`. The last call is `end`, or `fail` if
    an answer cannot be finished.
    """

    def begin(self, index: int) -> bytes:
        """Encode the beginning of an answer."""
        ...

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of an answer."""
        ...

    def said(self, answer: PolicyAnswer, index: int) -> bytes:
        """Encode the end of an answer."""
        ...

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the end of the stream, after all answers."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Encode an error that ends the stream before the answers are complete."""
        ...


class EventStream(StreamingResponse):
    """An HTTP response that streams the answers to one request.

    Args:
        calls: one call for each answer. The first has a piece or an outcome already.
        events: encoder of the events.
        ended: called with each answer before its end is sent.
        waits: closed when the stream has ended or the client has left.
    """

    media_type = "text/event-stream"

    def __init__(
        self, calls: Sequence[Call], events: EventFormat, ended: Callable[[PolicyAnswer], None], waits: ExitStack
    ) -> None:
        self._lines = _lines(calls, events, ended)
        super().__init__(self._lines, headers={"cache-control": "no-store"})
        self._waits = waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and close `waits` at its end."""
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
