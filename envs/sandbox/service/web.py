"""The complete web application of a service: the API and its OpenAPI document behind the guard, and its log.

`flash sandbox serve` calls `make_app` once and serves the result until the end of the process.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from envs.sandbox.protocol import TITLES, ProblemError
from envs.sandbox.service.endpoint import document, problem_response
from envs.sandbox.service.endpoint import routes as routes_of
from envs.sandbox.service.routes import API
from envs.sandbox.service.service import Service
from envs.sandbox.tokens import ADMIN, Tokens
from flash.http.server import with_headers
from flash.text import OneLine

ENDPOINTS = tuple(API.all)
"""All endpoints of the API."""

HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
"""Headers of every answer."""

RECORDS_A_MINUTE = 600
"""Most records that the log takes in one minute."""


def make_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a service, for `flash.http.server.serving`."""
    app = Starlette(routes=make_routes(service), exception_handlers={HTTPException: _http_problem})
    return Guard(app, service.tokens, service.boot)


def make_routes(service: Service) -> list[BaseRoute]:
    """Return all routes that are behind the guard: those of the API, and the one of its OpenAPI document."""
    described = msgspec.json.encode(document(ENDPOINTS))

    async def describe(_: Request) -> Response:
        """Answer with the OpenAPI document."""
        return Response(described, media_type="application/json")

    return [
        *routes_of(service, ENDPOINTS),
        Route("/v1/openapi.json", describe, methods=["GET"]),
    ]


async def _http_problem(request: Request, error: Exception) -> Response:
    """Return Starlette's own errors, such as an unknown path, as a problem."""
    # Starlette calls this only for the class that it was registered for.
    assert isinstance(error, HTTPException)
    # Its router raises 404 and 405. Another status would have no title here.
    status = error.status_code if error.status_code in TITLES else 404
    return problem_response(
        ProblemError(status, f"{request.method} {request.url.path[:200]}: {TITLES[status]}").problem
    )


class Guard:
    """ASGI middleware in front of every request. It stores the name of the caller's token in `scope["state"]["token"]`.

    A request without a valid token is refused before any route runs and before its body is read. This includes health
    checks.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, boot: str) -> None:
        """Put a guard in front of `app`.

        `boot` is `Service.boot`, which each answer to a known caller carries as the header `flash-boot`.
        """
        self._app = app
        self._tokens = tokens
        self._boot = boot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request without a valid token with 401; pass any other one on.

        A request of a token that has too many connections open gets 503, so that other tokens find connections.
        """
        name = self._caller(Headers(scope=scope))
        send = with_headers(send, {**HEADERS, "flash-boot": self._boot} if name is not None else HEADERS)
        if name is None:
            problem = ProblemError(401, "a valid bearer token is needed: Authorization: Bearer …").problem
            await problem_response(problem, {"www-authenticate": "Bearer"})(scope, receive, send)
        else:
            state = scope["state"]
            state["token"] = name
            try:
                if name != ADMIN:
                    # A front, a service that places sandboxes on this one, uses the token `admin` for all of them, with
                    # a connection for each.
                    state["connection"].hold(name)
            except HTTPException as error:
                problem = ProblemError(error.status_code, error.detail, "SandboxBusyError").problem
                await problem_response(problem, error.headers)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _caller(self, headers: Headers) -> str | None:
        """Return the name of the caller's token; None if there is no valid token."""
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        return self._tokens.name_of(token.strip()) if scheme.lower() == "bearer" else None


class RecordLimit(logging.Filter):
    """Logging filter that drops records beyond `most` in each minute of the clock.

    The first record of a later minute reports how many were dropped.

    Each sandbox that fails to start is a record, and a token's holder can order any number of those.
    """

    def __init__(self, most: int = RECORDS_A_MINUTE, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a filter. `clock` returns seconds. Only tests replace `most` and `clock`."""
        super().__init__()
        self._most = most
        self._clock = clock
        self._minute = -1
        """Current minute on the clock; -1 before the first record."""
        self._count = 0
        """Records in this minute, dropped ones included."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be logged. Changes the first record after dropped ones, to report them."""
        minute = int(self._clock() // 60)
        dropped = 0
        if minute != self._minute:
            dropped = max(0, self._count - self._most)
            self._minute, self._count = minute, 0
        self._count += 1
        if dropped:
            record.msg = f"[{dropped} earlier records were dropped] {record.getMessage()}"
            record.args = ()
        return self._count <= self._most


def write_to_stderr() -> None:
    """Send the log records of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(RecordLimit())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
