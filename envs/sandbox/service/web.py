"""The whole application: the API, its OpenAPI document, the live page and its terminals, behind the guard."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from envs.sandbox.protocol.problems import TITLES, ProblemError
from envs.sandbox.protocol.tokens import COOKIE
from envs.sandbox.service import routes, routes_commands, routes_files
from envs.sandbox.service.endpoint import routes as routes_of
from envs.sandbox.service.guard import Guard, problem_response
from envs.sandbox.service.limits import Limits
from envs.sandbox.service.openapi import document
from envs.sandbox.service.service import Service
from envs.sandbox.service.terminal import serve_terminal

STATIC = Path(__file__).parent / "static"
ASSETS = {
    "/": ("index.html", "text/html"),
    "/static/page.js": ("page.js", "text/javascript"),
    "/static/terminal.js": ("terminal.js", "text/javascript"),
    "/static/page.css": ("page.css", "text/css"),
}
"""Every file that is served. By name: no path of a request ever reaches the file system."""

ENDPOINTS = (*routes.ENDPOINTS, *routes_commands.ENDPOINTS, *routes_files.ENDPOINTS)


def make_app(service: Service, limits: Limits | None = None) -> ASGIApp:
    """The ASGI application of a service."""
    app = Starlette(routes=make_routes(service), exception_handlers={HTTPException: _http_problem})
    return Guard(app, service.tokens, limits or Limits(), service.boot)


def make_routes(service: Service) -> list[BaseRoute]:
    """Everything that is behind the guard."""
    described = msgspec.json.encode(document(ENDPOINTS))

    async def describe(_: Request) -> Response:
        return Response(described, media_type="application/json")

    async def log_out(_: Request) -> Response:
        answer = RedirectResponse("/", status_code=303)
        answer.delete_cookie(COOKIE)
        return answer

    async def terminal(socket: WebSocket) -> None:
        await serve_terminal(service, socket)

    return [
        *routes_of(service, ENDPOINTS),
        *(Route(path, partial(_asset, *asset), methods=["GET"]) for path, asset in ASSETS.items()),
        Route("/v1/openapi.json", describe, methods=["GET"]),
        Route("/logout", log_out, methods=["POST"]),
        WebSocketRoute("/v1/sandboxes/{id}/terminal", terminal),
    ]


async def _asset(name: str, media_type: str, _: Request) -> Response:
    return Response((STATIC / name).read_bytes(), media_type=media_type)


async def _http_problem(request: Request, error: Exception) -> Response:
    """Starlette's own errors, such as an unknown path, in our form."""
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in TITLES else 404
    return problem_response(
        ProblemError(status, f"{request.method} {request.url.path[:200]}: {TITLES[status]}").problem
    )
