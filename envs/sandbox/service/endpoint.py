"""Endpoints: a table with one entry for each path and method. The routes and the OpenAPI document are made from it.

`envs.sandbox.service.routes` fills the table when it is imported, and `envs.sandbox.service.web` makes the application.

A handler, in `envs.sandbox.service.routes`, gets an `ApiCall`, the body and the parameters of the query, all checked.
The value that it returns is encoded, and an error that it raises becomes a problem. A client that disconnects cancels
the handler.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
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
from envs.sandbox.protocol import MSGPACK, PROBLEM_JSON, HttpProblem, ProblemError, StreamLine, problem_of
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.service.service import LeaseWork, Service
from flash.errors import DECODE_ERRORS, FlashError, SandboxLostError
from flash.http.server import read_body

_log = logging.getLogger(__name__)

JSON_BYTES = 24 << 20
"""Largest body in bytes that is decoded. The limit for files is a different one."""
_KEY = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Form of an idempotency key."""

_T = TypeVar("_T")

Handler = Callable[..., Awaitable[Any]]
"""Function that answers the calls of an endpoint. It takes an `ApiCall`, then `body` if the endpoint has one, and the
parameters of the query. Their annotations are the types that the request is checked against."""
_Handler = TypeVar("_Handler", bound=Handler)

_LEFT = object()
"""Stands for the result of a handler that was cancelled because its client disconnected."""
_CAUSES = {413: "SandboxLimitError", 503: "SandboxBusyError"}
"""Class in `flash.errors` for the errors that the HTTP server itself raises, by status."""
_REF = "#/components/schemas/{name}"
"""Reference to the schema of a struct in the OpenAPI document."""


class ApiCall:
    """A call of the HTTP API: who calls, and the lease that the path names."""

    def __init__(self, service: Service, request: Request) -> None:
        """Describe the call of a request. `_Dispatcher` makes one for each request."""
        self.service = service
        self.request = request

    @property
    def token(self) -> str:
        """Name of the caller's token."""
        return self.request.state.token

    @property
    def path(self) -> Mapping[str, str]:
        """Variable parts of the path, by name."""
        return self.request.path_params

    def renewed_lease(self) -> SandboxLease:
        """Renew the lease that the path names, and return it. Raises ProblemError if the caller may not use it."""
        return self.service.renewed_lease(self.path["id"], self.token)

    @property
    def sandbox(self) -> Sandbox:
        """Sandbox of the lease, which this renews."""
        return self.service.pool.handle(self.renewed_lease())

    @property
    def work(self) -> LeaseWork:
        """Sessions, jobs and calls of the lease, which this renews."""
        return self.service.work(self.renewed_lease())

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
    """HTTP method."""
    path: str
    """Path with `{name}` for each variable part."""
    summary: str
    """Description in the OpenAPI document."""
    handler: Handler
    """Function that answers the calls."""
    body: Any = None
    """Struct of the body. `BINARY` or `TAR` for a body that the handler reads itself; None: no body."""
    query: type[msgspec.Struct] | None = None
    """Struct with the parameters of the query, made from those of the handler; None: no query."""
    answer: Any = None
    """Struct of the answer, or its media type. None: the answer has no content."""
    status: int = 200
    """HTTP status of an answer that is no error."""
    keyed: bool = False
    """True if the endpoint accepts an idempotency key."""


class Endpoints:
    """A table of endpoints, which the decorator `add` fills."""

    def __init__(self) -> None:
        self.all: list[Endpoint] = []
        """Endpoints in the order in which they were added."""

    def add(
        self, method: str, path: str, *, takes: str = "", gives: str = "", status: int = 200, keyed: bool = False
    ) -> Callable[[_Handler], _Handler]:
        """Return a decorator that adds a handler to the table.

        The handler's docstring becomes the summary of the OpenAPI document. Its annotations become the types of the
        body, the query and the answer.

        Args:
            method: HTTP method.
            path: path, with `{name}` for each variable part.
            takes: media type of a body that the handler reads itself, in place of a parameter `body`.
            gives: media type of an answer that is no struct.
            status: HTTP status of the answer; 204 instead if the handler returns None.
            keyed: True if the endpoint accepts an idempotency key.
        """

        def added(handler: _Handler) -> _Handler:
            """Add the handler to the table, and return it unchanged."""
            hints = get_type_hints(handler, include_extras=True)
            nothing = hints["return"] is type(None)
            parameters = [
                (name, hints[name], msgspec.NODEFAULT if given.default is given.empty else given.default)
                for name, given in inspect.signature(handler).parameters.items()
                if name not in ("call", "body")
            ]
            name = f"{handler.__name__.strip('_')}_query"
            query = msgspec.defstruct(name, parameters, frozen=True, kw_only=True, forbid_unknown_fields=True)
            endpoint = Endpoint(
                method=method,
                path=path,
                summary=inspect.getdoc(handler) or "",
                handler=handler,
                body=takes or hints.get("body"),
                query=query if parameters else None,
                answer=None if nothing else gives or hints["return"],
                status=204 if nothing else status,
                keyed=keyed,
            )
            self.all.append(endpoint)
            return handler

        return added


async def once(call: ApiCall, body: msgspec.Struct, work: Callable[[], Awaitable[_T]]) -> _T:
    """Carry out `work` and return its result. Calls with one idempotency key carry it out only once.

    For the endpoints that are `keyed`. `LeaseWork.once` remembers the results of a lease's calls. Without a key, the
    client cancels the work when it disconnects. `body` is the body of the call: a key that was used with another one is
    refused.

    Raises:
        SandboxLostError: the service was restarted since the client's first attempt, and does not know the key.
        SandboxError, ProblemError: the errors of `LeaseWork.once`, or of `work`.
    """
    if not call.key:
        return await work()
    expected, calls = call.request.headers.get("flash-boot", ""), call.work
    if expected and expected != call.service.boot and not calls.knows_call(call.key):
        # The client has sent the call again after a restart, and it is unknown whether the first attempt was carried
        # out.
        raise SandboxLostError("the service was restarted meanwhile; the call may or may not have been carried out")
    digest = hashlib.sha256(msgspec.msgpack.encode((call.request.scope["path"], body))).digest()
    return await calls.once(call.key, digest, work)


def routes(service: Service, endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return the routes of a table. They answer other methods of the same paths with status 405."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [Route(path, _Dispatcher(service, methods)) for path, methods in by_path.items()]


class _Dispatcher:
    """Answers the requests to one path; each method has its own endpoint."""

    def __init__(self, service: Service, methods: Mapping[str, Endpoint]) -> None:
        """Create the dispatcher of one path. `methods` has its endpoints by HTTP method."""
        self._service = service
        self._methods = methods

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; 405 if the path has no endpoint for its method."""
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
        """Return the answer of an endpoint. None: the client has disconnected.

        Every exception becomes a problem; one that is not expected is logged, and ends only this request. A `Response`
        that the handler returns is sent later, and handles its own errors.
        """
        try:
            call, arguments = ApiCall(self._service, request), _query(endpoint, request)
            arguments |= await _body(endpoint, request)
            if isinstance(endpoint.body, str):
                # The handler reads the body itself, and notices a disconnection there. `_unless_left` would take the
                # messages of the body away from it.
                result = await endpoint.handler(call, **arguments)
            else:
                result = await _unless_left(request, partial(endpoint.handler, call, **arguments))
            if result is _LEFT:
                return None
            return result if isinstance(result, Response) else encoded(request, result, endpoint.status)
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


async def _unless_left(request: Request, handler: Handler) -> Any:
    """Return the handler's result. A client that disconnects cancels the handler, and with it a running command.

    The result is then `_LEFT`. Raises the FlashError or ProblemError of the handler. It leaves the task group as a
    value, because the group would wrap it in an exception group; another error is wrapped, and counts as a bug.
    """
    result: Any = _LEFT
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_left, request.receive, tasks.cancel_scope)
        try:
            result = await handler()
        except (FlashError, ProblemError) as error:
            result = error
        tasks.cancel_scope.cancel()
    if isinstance(result, FlashError | ProblemError):
        raise result
    return result


def _query(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    """Return the handler's arguments that the query holds, with its defaults for missing ones.

    Raises ProblemError if the query is not valid.
    """
    if endpoint.query is None:
        return {}
    # Starlette's own parser is not used: it loses bytes that are not UTF-8, which file names may have.
    text = request.scope["query_string"].decode("latin-1")
    items = parse_qsl(text, keep_blank_values=True, errors="surrogateescape")
    if len({name for name, _ in items}) != len(items):
        raise ProblemError(400, "a query parameter is given twice")
    try:
        return msgspec.structs.asdict(msgspec.convert(dict(items), endpoint.query, strict=False))
    # also raised for text that cannot be encoded
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as error:
        raise ProblemError(400, f"query: {error}", "SandboxRefusedError") from None


async def _body(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    """Return the handler's argument `body`; nothing if the handler reads the body itself, or takes none.

    Raises:
        ProblemError: the body is not valid, or has another type than JSON and msgpack.
        HTTPException: the body is too large, or too many large ones wait.
        ClientDisconnect: the client has disconnected.
    """
    if isinstance(endpoint.body, str):
        return {}
    if endpoint.body is None:
        async for _ in request.stream():  # The endpoint takes no body: this one is dropped.
            pass
        return {}
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in ("application/json", MSGPACK):
        raise ProblemError(415, f"expected application/json or {MSGPACK}, not {kind[:100]}")
    data = await read_body(request, JSON_BYTES, json=kind != MSGPACK)
    decode = msgspec.msgpack.decode if kind == MSGPACK else msgspec.json.decode
    try:
        return {"body": decode(data, type=endpoint.body)}
    except DECODE_ERRORS as error:
        raise ProblemError(400, f"body: {error}", "SandboxRefusedError") from None


async def until_left(receive: Receive, scope: anyio.CancelScope) -> None:
    """Wait until the client disconnects, and then cancel `scope`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def problem_response(problem: HttpProblem, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP answer for a problem, with additional `headers`."""
    more = {"retry-after": "1"} if problem.status == 503 else {}
    return Response(
        msgspec.json.encode(problem),
        status_code=problem.status,
        media_type=PROBLEM_JSON,
        headers={**more, **(headers or {})},
    )


def encoded(request: Request, value: Any, status: int) -> Response:
    """Return a struct as an HTTP answer, in msgpack if the client accepts it, else in JSON. None has no content."""
    if value is None:
        return Response(status_code=204)
    if MSGPACK in request.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(value), status_code=status, media_type=MSGPACK)
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI document that describes these endpoints and the structs of their bodies and answers."""
    types = [
        each for endpoint in endpoints for each in (endpoint.body, endpoint.answer, endpoint.query) if _is_type(each)
    ]
    unique = list(dict.fromkeys([*types, HttpProblem, StreamLine]))
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REF)
    schema_of = dict(zip(map(_key, unique), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Flash sandboxes", "version": "1"},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, schema_of: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """Return the description of one endpoint.

    Args:
        endpoint: the endpoint.
        schema_of: schema of each type by its `_key`; of a struct, only a reference to its named schema.
        components: the named schemas.
    """
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    if endpoint.query is not None:
        # Each field of the struct becomes a parameter of its own.
        query = components[endpoint.query.__name__]
        parameters += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    if endpoint.keyed:
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string"}})
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.handler.__name__.strip("_"),
        "parameters": parameters,
        "responses": {
            str(endpoint.status): {"description": endpoint.summary, **_content(endpoint.answer, schema_of)},
            "default": {
                "description": "An error.",
                "content": {PROBLEM_JSON: {"schema": schema_of[_key(HttpProblem)]}},
            },
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, **_content(endpoint.body, schema_of)}
    return operation


def _content(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Return the part `content` of the OpenAPI description of a body or an answer; empty if there is none.

    `kind` is its struct, its media type, or None. `schema_of` has the schema of each struct by its `_key`.
    """
    if kind is None:
        return {}
    if isinstance(kind, str):
        # Answers in NDJSON are streams, and each of their lines is a `StreamLine`.
        schema = schema_of[_key(StreamLine)] if "ndjson" in kind else {"type": "string", "format": "binary"}
        return {"content": {kind: {"schema": schema}}}
    schema = schema_of[_key(kind)]
    return {"content": {"application/json": {"schema": schema}, MSGPACK: {"schema": schema}}}


def _is_type(kind: Any) -> bool:
    """Return True for a type that has a schema; False for a media type and for None."""
    return kind is not None and not isinstance(kind, str)


def _key(kind: Any) -> str:
    """Return the key of a type in the table of schemas. Unions cannot be keys themselves."""
    return str(kind)
