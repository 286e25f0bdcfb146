"""The HTTP application of the service: chat completions, completions, responses, models, and the agent's own reward.

Each request carries the key of an episode as its bearer token. The body of a request without a valid key is not read.
The server bounds the number of connections, and how slowly clients may send requests and read answers: see
`flash.http`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flash.http.server import read_body
from flash.service import chat, completions, responses
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.fields import ApiError, decoded
from flash.service.sessions import Call, EpisodeSession, EpisodeSessions
from flash.types import Piece
from flash.waiting import unwrapped_group


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


BODY_BYTES = 16 << 20
"""Largest body of a request, in bytes: far longer than any context."""

READ_BYTES = 1 << 16
"""Longest body, in bytes, that is decoded on the event loop. The worst case is a body of messages of one letter each,
which takes some milliseconds. Longer bodies are decoded in a thread."""

RETRIES = "x-stainless-retry-count"
"""Header in which OpenAI's clients send how often they have sent a request before."""

_T = TypeVar("_T")
_Handler = Callable[[Request, EpisodeSession], Awaitable[Response]]


def make_app(sessions: EpisodeSessions) -> Starlette:
    """Return the ASGI application that serves the sessions of a node."""

    def known(handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await handler(request, _session(sessions, request))
            except ApiError as error:
                return _refusal(error)
            except HTTPException as error:
                return _refusal(ApiError(error.status_code, f"The request is refused: {error.detail}."))
            except ClientDisconnect:
                return Response(status_code=400)  # The client has left, so nobody reads this response.

        return handle

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", known(_chat), methods=["POST"]),
            Route("/v1/completions", known(_complete), methods=["POST"]),
            Route("/v1/responses", known(_respond), methods=["POST"]),
            Route("/v1/episode/reward", known(_reward), methods=["POST"]),
            Route("/v1/models", known(_models), methods=["GET"]),
            Route("/v1/models/{name:path}", known(_model), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _unknown, Exception: _broken},
    )
    app.state.reading = anyio.CapacityLimiter(1)
    return app


async def _read(request: Request, read: Callable[[bytes], _T]) -> _T:
    """Read the body of a request and decode it with `read`, in a thread if it is long. Raises ApiError."""
    body = await _body(request)
    if len(body) <= READ_BYTES:
        return read(body)
    limiter = request.app.state.reading
    return await anyio.to_thread.run_sync(read, body, abandon_on_cancel=True, limiter=limiter)


async def _chat(request: Request, session: EpisodeSession) -> Response:
    asked = await _read(request, chat.read)

    def form(name: str) -> _Form:
        events = chat.ChatEvents(name, with_usage=asked.with_usage)
        return _Form(events, lambda answers: chat.completion(answers, name), lambda _: None)

    return await _answered(request, session, asked, form)


async def _complete(request: Request, session: EpisodeSession) -> Response:
    wanted = await _read(request, lambda body: completions.read(body, session.kept))
    asked = wanted.asked

    def form(name: str) -> _Form:
        events = completions.CompletionEvents(name, with_usage=asked.with_usage)
        return _Form(events, lambda answers: completions.completion(answers, name), keep)

    def keep(answer: PolicyAnswer) -> None:
        session.kept.answered(wanted.text, asked.messages, answer.message, answer.stop)

    return await _answered(request, session, asked, form)


async def _respond(request: Request, session: EpisodeSession) -> Response:
    wanted = await _read(request, lambda body: responses.read(body, session.kept.responses))

    def form(name: str) -> _Form:
        def keep(answer: PolicyAnswer) -> None:
            session.kept.responses[responses.name_of(name)] = [*wanted.said, answer.message]

        whole = partial(responses.response, name=name, wanted=wanted)
        return _Form(responses.ResponseEvents(name, wanted), whole, keep)

    return await _answered(request, session, wanted.asked, form)


class _Form(NamedTuple):
    """Functions that encode the answers to one request in the format of its API."""

    events: EventFormat
    """Encodes a stream of server-sent events."""
    whole: Callable[[Sequence[PolicyAnswer]], bytes]
    """Encodes all answers as one body."""
    keep: Callable[[PolicyAnswer], None]
    """Called with each answer before the client has all of it, so that the next request can refer to the answer."""


async def _answered(
    request: Request, session: EpisodeSession, asked: AgentRequest, form: Callable[[str], _Form]
) -> Response:
    """Make the calls of a request and return its HTTP response, as one body or as a stream.

    Raises:
        ApiError: the request is refused, or the episode ends before the answer has begun.
        ClientDisconnect: the client left before the response began.
    """
    key, retries = request.headers.get("idempotency-key") or None, request.headers.get(RETRIES)
    again = None if retries is None else retries != "0"
    calls: list[Call] = []
    with ExitStack() as waits:
        for one in asked.each():
            calls.append(session.call(one, key and f"{key} {one.choice}", again=again))
            waits.enter_context(calls[-1].waited_for())
            # A request may ask for many answers to a long conversation: other requests run in between.
            await anyio.lowlevel.checkpoint()
        events, whole, keep = form(calls[0].name)
        if asked.stream:
            await _here(request, calls[0].begun)
            return EventStream(calls, events, keep, waits.pop_all())
        answers: list[PolicyAnswer] = []
        for call in calls:
            await _here(request, call.answer)
            answers.append(await call.answer())
            keep(answers[-1])
        return _json(whole(answers))


async def _here(request: Request, wait: Callable[[], Awaitable[object]]) -> None:
    """Run `wait` until it returns. Raises ClientDisconnect if the client leaves before."""

    async def watch(scope: anyio.CancelScope) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async with unwrapped_group() as group:
        group.start_soon(watch, group.cancel_scope)
        await wait()
        group.cancel_scope.cancel()
        return
    raise ClientDisconnect


class _Earned(msgspec.Struct):
    reward: float


_earned = msgspec.json.Decoder(_Earned)


async def _reward(request: Request, session: EpisodeSession) -> Response:
    earned = decoded(_earned, await _body(request))
    session.reward_with(earned.reward)
    return _json(msgspec.json.encode({"object": "episode.reward", "reward": earned.reward}))


async def _models(request: Request, _: EpisodeSession) -> Response:
    return _json(chat.models())


async def _model(request: Request, _: EpisodeSession) -> Response:
    return _json(chat.model(request.path_params["name"]))


async def _unknown(request: Request, error: Exception) -> Response:
    """Return an error of Starlette, such as an unknown path, in the format of the API."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        return _refusal(ApiError(405, f"This URL is not asked in this way: {place}.", "method_not_allowed"))
    return _refusal(ApiError(error.status_code, f"Unknown request URL: {place}.", "unknown_url"))


async def _broken(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed by a bug of Flash. The server logs the traceback."""
    return _refusal(ApiError(500, f"The service failed: {type(error).__name__}.", "internal_error"))


def _session(sessions: EpisodeSessions, request: Request) -> EpisodeSession:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    session = sessions.of_key(key.strip() if scheme.lower() == "bearer" else "")
    # The server treats connections without a valid token differently (`flash.http.connections`).
    request.scope.setdefault("state", {})["token"] = True
    return session


async def _body(request: Request) -> bytes:
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"Bodies are not compressed here, but this one is {coding[:100]!r}.")
    return await read_body(request, BODY_BYTES)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def _refusal(error: ApiError) -> Response:
    return Response(error.body, status_code=error.status, media_type="application/json")
