"""The gate in front of every request: who asks, how much, how fast.

Nothing behind it runs without a valid token: no page, no script, no health check. It also bounds the size of a body and
the time that it takes. Who does not take an answer is cut off by `connections`.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from envs.sandbox.protocol.problems import MEDIA_TYPE, ProblemError
from envs.sandbox.protocol.tokens import COOKIE, COOKIE_S, Tokens
from envs.sandbox.protocol.wire import Problem
from envs.sandbox.service.limits import Limits

LOGIN_BYTES = 4096
"""Largest login form."""
_SAFE = ("GET", "HEAD", "OPTIONS")

HEADERS = {
    "x-content-type-options": "nosniff",
    # Not `no-referrer`: browsers would then not say which page a form belongs to either.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}
"""On every answer: what came out of a sandbox must never run in the page."""

LOGIN = """<!doctype html><meta charset="utf-8"><title>Flash sandboxes</title>
<h1>Flash sandboxes</h1><form method="post" action="/login">
<label>Token <input name="token" type="password" autocomplete="current-password" autofocus></label>
<button>Log in</button></form><p>The token is in the service's token file.</p>"""


class Guard:
    """ASGI middleware; gives `scope["state"]["token"]` the name of the caller's token."""

    def __init__(self, app: ASGIApp, tokens: Tokens, limits: Limits, boot: str) -> None:
        """`boot` is told in each answer to a known caller: another one after each start of the service."""
        self._app = app
        self._boot = boot
        self._tokens = tokens
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one websocket."""
        headers = Headers(scope=scope)
        name, by_cookie = self._caller(headers)
        send = _Sender(send, self._boot if name is not None else "")
        if scope["type"] == "http":
            most = self._limits.body_bytes if name is not None else LOGIN_BYTES
            receive = _Receiver(receive, most, self._limits)
        refusal = self._refusal(scope, headers, name, by_cookie)
        try:
            if scope["type"] == "http" and scope["path"] == "/login" and scope["method"] == "POST":
                await (await self._login(Request(scope, receive), headers))(scope, receive, send)
            elif refusal is None:
                scope.setdefault("state", {})["token"] = name
                await self._app(scope, receive, send)
            else:
                await refusal(scope, receive, send)
        except ProblemError as error:
            await problem_response(error.problem)(scope, receive, send)
        except ClientDisconnect:
            return  # In the middle of a login.

    def _caller(self, headers: Headers) -> tuple[str | None, bool]:
        """The name of the caller's token, and whether a cookie says so."""
        given = headers.getlist("authorization")
        if given:
            scheme, _, token = given[0].partition(" ")
            known = self._tokens.name_of(token.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
            return known, False
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return None, False
        return (self._tokens.name_of_cookie(cookie.value) if cookie else None), True

    def _refusal(self, scope: Scope, headers: Headers, name: str | None, by_cookie: bool) -> Response | None:
        websocket = scope["type"] == "websocket"
        if name is None:
            if not websocket and scope["path"] == "/" and scope["method"] == "GET":
                return HTMLResponse(LOGIN, status_code=401, headers={"www-authenticate": "Bearer"})
            error = ProblemError(401, "a valid bearer token is needed: Authorization: Bearer …")
            return problem_response(error.problem, {"www-authenticate": "Bearer"})
        if by_cookie and (websocket or scope["method"] not in _SAFE) and not _same_origin(scope, headers):
            return problem_response(ProblemError(403, "a request of another site is not carried out").problem)
        return None

    async def _login(self, request: Request, headers: Headers) -> Response:
        if not _same_origin(request.scope, headers):
            raise ProblemError(403, "log in at the page of this service")
        form = parse_qs((await request.body()).decode("ascii", "replace"))
        name = self._tokens.name_of(form.get("token", [""])[0].strip())
        if name is None:
            return HTMLResponse(LOGIN, status_code=401, headers={"www-authenticate": "Bearer"})
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            COOKIE,
            self._tokens.cookie_for(name),
            max_age=COOKIE_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer


def _same_origin(scope: Scope, headers: Headers) -> bool:
    """Whether a browser says that its request comes from a page of ours."""
    try:
        origin = urlsplit(headers.get("origin", ""))
    except ValueError:
        return False
    # A page without TLS at our own address is not ours when we have it: anybody on the way could have made it.
    ours = ("https",) if scope["scheme"] in ("https", "wss") else ("http", "https")
    return origin.scheme in ours and origin.netloc == headers.get("host")


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """An error as an answer."""
    more = {"retry-after": "1"} if problem.status == 503 else {}
    return Response(
        msgspec.json.encode(problem),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers={**more, **(headers or {})},
    )


class _Receiver:
    """A request's body, bounded in size and in time."""

    def __init__(self, receive: Receive, most: int, limits: Limits) -> None:
        self._receive = receive
        self._most = most
        self._limits = limits
        self._begun = anyio.current_time()
        self._size = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()  # Waits for the client to leave, for as long as the answer takes.
        now, pause = anyio.current_time(), self._limits.receive_s
        due = self._begun + pause + self._size / self._limits.bytes_per_s
        try:
            with anyio.fail_after(min(pause, due - now)):
                message = await self._receive()
        except TimeoutError:
            slow = f"no piece of the body came for {pause:g} s, or all of it came too slowly"
            raise ProblemError(408, slow) from None
        self._size += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        if self._size > self._most:
            raise ProblemError(413, f"the body has more than {self._most} bytes", "SandboxLimitError")
        return message


class _Sender:
    """An answer, with our headers."""

    def __init__(self, send: Send, boot: str) -> None:
        self._send = send
        self._headers = {**HEADERS, "flash-boot": boot} if boot else HEADERS

    async def __call__(self, message: Message) -> None:
        # A websocket that is refused gets an answer of HTTP.
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            given = {name.lower() for name, _ in message.get("headers", [])}
            ours = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            message["headers"] = [*message.get("headers", []), *(each for each in ours if each[0] not in given)]
        await self._send(message)
