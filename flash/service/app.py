"""The service over HTTP: `/v1/chat/completions` and `/v1/models`, for who has the key of an episode.

Nothing is read of a request without a key. A request's body is bounded in size and in time; how many connections there
are, and how slowly they may take their answers, is for the server to bound.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from flash.service import chat
from flash.service.chat import ApiError
from flash.service.sessions import Session, Sessions

BODY_BYTES = 16 << 20
"""Largest request: far longer than any context."""

BODY_S = 30.0
"""Seconds for a request to arrive in."""

_Handler = Callable[[Request, Session], Awaitable[Response]]


def make_app(sessions: Sessions) -> Starlette:
    """The ASGI application of a node's sessions."""

    def known(handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await handler(request, _session(sessions, request))
            except ApiError as error:
                return _refusal(error)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it

        return handle

    return Starlette(
        routes=[
            Route("/v1/chat/completions", known(_complete), methods=["POST"]),
            Route("/v1/models", known(_models), methods=["GET"]),
            Route("/v1/models/{name:path}", known(_model), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _unknown},
    )


async def _complete(request: Request, session: Session) -> Response:
    asked = chat.read(await _body(request))
    answer, name = await session.call(asked, request.headers.get("idempotency-key"))
    if asked.stream:
        events = chat.stream(answer, name, with_usage=asked.with_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
    return _json(chat.completion(answer, name))


async def _models(request: Request, _: Session) -> Response:
    return _json(chat.models())


async def _model(request: Request, _: Session) -> Response:
    return _json(chat.model(request.path_params["name"]))


async def _unknown(request: Request, error: Exception) -> Response:
    """Starlette's own errors, such as an unknown path, in the form of the API."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    return _refusal(ApiError(error.status_code, f"Unknown request URL: {place}.", "unknown_url"))


def _session(sessions: Sessions, request: Request) -> Session:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    session = sessions.of_key(key.strip() if scheme.lower() == "bearer" else "")
    # The server keeps connections apart from strangers' by it.
    request.scope.setdefault("state", {})["token"] = True
    return session


async def _body(request: Request) -> bytes:
    body = bytearray()
    with anyio.move_on_after(BODY_S):
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                raise ApiError(413, f"The request has more than {BODY_BYTES} bytes.")
        return bytes(body)
    raise ApiError(408, f"The request did not arrive within {BODY_S:g} s.")


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def _refusal(error: ApiError) -> Response:
    return Response(error.body, status_code=error.status, media_type="application/json")
