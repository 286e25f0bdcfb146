"""Endpoints: a table with one entry for each path and method. The routes and the OpenAPI document are made from it.

A handler gets an `ApiCall` in which everything is already checked: the caller's lease, the query and the body as
structs. The value that it returns is encoded, and an error that it raises becomes a problem. A client that disconnects
cancels the handler.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints
from urllib.parse import parse_qsl

import anyio
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from envs.sandbox.pool.lease import SandboxLease
from envs.sandbox.protocol.problems import MEDIA_TYPE, ProblemError, problem_of
from envs.sandbox.protocol.wire import MSGPACK, Body, HttpProblem
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.service.service import Service
from envs.sandbox.service.work import LeaseWork
from flash.errors import FlashError, SandboxLostError
from flash.http.server import read_body

_log = logging.getLogger(__name__)

JSON_BYTES = 24 << 20
"""Largest body in bytes that is decoded. The limit for files is a different one."""
_KEY = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Form of an idempotency key."""

_T = TypeVar("_T")

Handler = Callable[["ApiCall"], Awaitable[Any]]
"""Function that answers the calls of an endpoint."""
_Handler = TypeVar("_Handler", bound=Handler)


class ApiCall:
    """A call of the HTTP API: a request with its query and body, which were checked."""

    def __init__(self, service: Service, request: Request, query: Any, body: Any) -> None:
        self.service = service
        self.request = request
        self.query = query
        self.body = body

    @property
    def token(self) -> str:
        """Name of the caller's token."""
        return self.request.state.token

    @property
    def path(self) -> Mapping[str, str]:
        """Variable parts of the path, by name."""
        return self.request.path_params

    @property
    def lease(self) -> SandboxLease:
        """Lease that the path names. Raises ProblemError if the caller may not use it."""
        return self.service.lease(self.path["id"], self.token)

    @property
    def sandbox(self) -> Sandbox:
        """Sandbox of the lease."""
        return self.service.pool.handle(self.lease)

    @property
    def work(self) -> LeaseWork:
        """Sessions, jobs and calls of the lease."""
        return self.service.work(self.lease)

    @property
    def key(self) -> str:
        """Idempotency key of the call; empty if it has none. Raises ProblemError if the key is malformed."""
        key = self.request.headers.get("idempotency-key", "")
        if key and not _KEY.fullmatch(key):
            raise ProblemError(400, "an idempotency key has 1 to 128 letters, digits, '.', '_', ':' or '-'")
        return key


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A path with a method, and how calls of it are checked and answered."""

    method: str
    path: str
    summary: str
    handler: Handler
    body: Any = None
    """Struct of the body. `BINARY` or `TAR` for a body that the handler reads itself; None: no body."""
    query: type[Body] | None = None
    answer: Any = None
    """Struct of the answer, or its media type. None: the answer has no content."""
    status: int = 200
    keyed: bool = False
    """True if the endpoint accepts an idempotency key."""


class Endpoints:
    """A table of endpoints."""

    def __init__(self) -> None:
        self.all: list[Endpoint] = []

    def add(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: type[Body] | None = None,
        media_type: str = "",
        status: int = 200,
        keyed: bool = False,
    ) -> Callable[[_Handler], _Handler]:
        """Return a decorator that adds a handler to the table.

        The handler's docstring becomes the summary. Its return type becomes the answer, unless `media_type` is given.
        """

        def added(handler: _Handler) -> _Handler:
            answer = media_type or get_type_hints(handler)["return"]
            nothing = answer is type(None)
            endpoint = Endpoint(
                method=method,
                path=path,
                summary=inspect.getdoc(handler) or "",
                handler=handler,
                body=body,
                query=query,
                answer=None if nothing else answer,
                status=204 if nothing else status,
                keyed=keyed,
            )
            self.all.append(endpoint)
            return handler

        return added


async def once(call: ApiCall, lease: SandboxLease, work: Callable[[], Awaitable[_T]]) -> _T:
    """Carry out `work`. Calls with the same idempotency key carry it out only once, and all get its result.

    Without a key, the client cancels the work when it disconnects.
    """
    if not call.key:
        return await work()
    expected = call.request.headers.get("flash-boot", "")
    if expected and expected != call.service.boot and not call.service.work(lease).knows_call(call.key):
        # The client has sent the call again after a restart, and it is unknown whether the first attempt was carried
        # out.
        raise SandboxLostError("the service was restarted meanwhile; the call may or may not have been carried out")
    asked = hashlib.sha256(msgspec.msgpack.encode((call.request.scope["path"], call.body))).digest()
    return await call.service.work(lease).once(call.key, asked, work)


def routes(service: Service, endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return the routes of a table. They answer other methods of the same paths with status 405."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [Route(path, _Dispatcher(service, methods)) for path, methods in by_path.items()]


class _Dispatcher:
    """Answers the requests to one path; each method has its own endpoint."""

    def __init__(self, service: Service, methods: Mapping[str, Endpoint]) -> None:
        self._service = service
        self._methods = methods

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        endpoint = self._methods.get(request.method)
        if endpoint is None:
            allowed = ", ".join(self._methods)
            problem = ProblemError(405, f"{request.url.path} takes {allowed}, not {request.method}").problem
            answer = problem_response(problem, {"allow": allowed})
        else:
            answer = await self._answer(endpoint, request)
        if answer is not None:
            await answer(scope, receive, send)

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response | None:
        """Return the answer of an endpoint. None: the client has disconnected."""
        try:
            call = ApiCall(self._service, request, _query(endpoint, request), await _body(endpoint, request))
            if isinstance(endpoint.body, str):
                result = await endpoint.handler(call)
            else:
                result = await _unless_left(request, endpoint.handler, call)
        except ClientDisconnect:
            return None
        except HTTPException as error:
            cause = _CAUSES.get(error.status_code, "")
            return problem_response(ProblemError(error.status_code, error.detail, cause).problem)
        except ProblemError as error:
            return problem_response(error.problem)
        except FlashError as error:
            return problem_response(problem_of(error))
        except Exception:  # the boundary of a request: a bug ends this request, not the service
            _log.exception("%s %r failed", request.method, request.scope["path"])
            return problem_response(ProblemError(500, "the service failed; its log says why").problem)
        if isinstance(result, Response) or result is _LEFT:
            return None if result is _LEFT else result
        return encoded(request, result, endpoint.status)


_LEFT = object()
"""Stands for the result of a handler that was cancelled because its client disconnected."""
_CAUSES = {413: "SandboxLimitError", 503: "SandboxBusyError"}
"""Class in `flash.errors` for the errors that the HTTP server itself raises, by status."""


async def _unless_left(request: Request, handler: Handler, call: ApiCall) -> Any:
    """Return the handler's result. A client that disconnects cancels the handler, and with it a running command."""
    result: Any = _LEFT
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_left, request.receive, tasks.cancel_scope)
        try:
            result = await handler(call)
        except (FlashError, ProblemError) as error:
            result = error
        tasks.cancel_scope.cancel()
    if isinstance(result, FlashError | ProblemError):
        raise result
    return result


def _query(endpoint: Endpoint, request: Request) -> Any:
    """Return the checked query of a request. Raises ProblemError if it is not valid."""
    if endpoint.query is None:
        return None
    # Starlette's own parser is not used: it loses bytes that are not UTF-8, which file names may have.
    text = request.scope["query_string"].decode("latin-1")
    items = parse_qsl(text, keep_blank_values=True, errors="surrogateescape")
    if len({name for name, _ in items}) != len(items):
        raise ProblemError(400, "a query parameter is given twice")
    try:
        return msgspec.convert(dict(items), endpoint.query, strict=False)
    # also raised for text that cannot be encoded
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as error:
        raise ProblemError(400, f"query: {error}", "SandboxRefusedError") from None


async def _body(endpoint: Endpoint, request: Request) -> Any:
    """Return the checked body of a request; None if the handler reads it itself, or takes none."""
    if isinstance(endpoint.body, str):
        return None
    if endpoint.body is None:
        async for _ in request.stream():  # The endpoint takes no body: this one is dropped.
            pass
        return None
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in ("application/json", MSGPACK):
        raise ProblemError(415, f"expected application/json or {MSGPACK}, not {kind[:100]}")
    data = await read_body(request, JSON_BYTES, json=kind != MSGPACK)
    decode = msgspec.msgpack.decode if kind == MSGPACK else msgspec.json.decode
    try:
        return decode(data, type=endpoint.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProblemError(400, f"body: {error}", "SandboxRefusedError") from None


async def until_left(receive: Receive, scope: anyio.CancelScope) -> None:
    """Wait until the client disconnects, and then cancel `scope`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def problem_response(problem: HttpProblem, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP answer for a problem."""
    more = {"retry-after": "1"} if problem.status == 503 else {}
    return Response(
        msgspec.json.encode(problem),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers={**more, **(headers or {})},
    )


def encoded(request: Request, value: Any, status: int) -> Response:
    """Return a struct as an HTTP answer, in msgpack if the client accepts it, else in JSON."""
    if value is None:
        return Response(status_code=204)
    if MSGPACK in request.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(value), status_code=status, media_type=MSGPACK)
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
