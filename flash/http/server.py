"""Serving of an application: sockets and TLS, bounded request bodies, and an application served during a block.

The endpoint for agents (`envs.agent`), the sandbox service and `flash view` use this module. They open a socket with
`open_socket`, serve their application with `serving`, read bodies with `read_body`, and add headers with
`with_headers`. Limits on connections are in `flash.http.connections`. A *bounded* token is one whose connections are
counted there.

The default address is loopback. A public address needs TLS, because on the network anyone could read a token that is
not encrypted. A unix socket can be used only by the user who made it.

Law of bodies: each body is bounded in bytes and in time. All bodies that are held at the same time are bounded in bytes
together, for the server and for each bounded token. A JSON body is bounded in the number of values that decoding would
make. A refusal is an `HTTPException`, which is raised where the application reads the body.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
import ssl
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash.errors import ConfigError
from flash.http.connections import ACCEPTED, HttpLimits, accepting, http_protocol

SHUTDOWN_S = 3
"""Seconds that requests in progress have to finish when the service ends."""
SENT_PIECE = 64 << 10
"""Largest number of bytes of an answer that are given to uvicorn at once."""
MAX_JSON_VALUES = 400_000
"""Largest number of lists, objects and keys of a JSON body. The characters `[`, `{` and `:` are counted, also inside
texts. Decoding each value takes memory, and time in which the process does nothing else."""


class HttpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a service: a port of this machine or a unix socket, with or without TLS."""

    host: str = "127.0.0.1"
    """Name or address to listen at."""
    port: int = 0
    """Port to listen at; 0: any free port. The caller checks that it is at most 65535."""
    unix: Path | None = None
    """Path of a unix socket, which is used instead of a port."""
    certificate: Path | None = None
    """PEM file of the certificate. With `key` it turns TLS on."""
    key: Path | None = None
    """PEM file of the certificate's key."""


def open_socket(address: HttpAddress) -> socket.socket:
    """Return a socket that is bound to `address` and does not listen yet: `serving` lets it listen.

    Services call this first, so that a wrong address is refused before any other work.

    Raises:
        ConfigError: the address cannot be bound, a public address has no TLS, or only one of certificate and key is
            given.
    """
    if (address.certificate is None) != (address.key is None):
        raise ConfigError("TLS needs both a certificate and its key")
    if address.unix is not None:
        return _open_unix(address.unix)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        raise ConfigError(f"cannot listen at {address.host}: {error}") from error
    # The first address is the one that the system prefers. `socket_address` is (host, port), with two more numbers in
    # IPv6.
    family, _, _, _, socket_address = found[0]
    if not _is_loopback(str(socket_address[0])) and address.certificate is None:
        raise ConfigError(
            f"{address.host} can be reached from other machines: tokens and all that is sent would travel in the "
            "clear. Give --certificate and --key, or listen at 127.0.0.1 or at a unix socket"
        )
    try:
        # asyncio turns Nagle's algorithm off only for sockets that name the protocol TCP. With Nagle's algorithm each
        # answer takes 40 ms longer.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:  # the kernel lacks this kind of address
        raise ConfigError(f"cannot listen at {address.host}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(socket_address)
    except OSError as error:
        bound.close()
        advice = "; choose another port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise ConfigError(
            f"cannot listen at {address.host}:{address.port}: {error.strerror or error}{advice}"
        ) from error
    return bound


def _is_loopback(host: str) -> bool:
    """Return True if a numeric address can be reached from this machine only, so that it needs no TLS.

    An IPv6 address may have the name of an interface behind `%`.
    """
    found = ipaddress.ip_address(host.partition("%")[0])
    # Before Python 3.13, `is_loopback` is False for ::ffff:127.0.0.1, the loopback of IPv4 written as IPv6.
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _open_unix(path: Path) -> socket.socket:
    """Return a unix socket that is bound to `path`, and that only its owner can use.

    A socket that nobody listens at any more is replaced. Raises ConfigError if `path` is in use or cannot be bound.
    """
    try:
        _remove_dead_socket(path)
    except OSError as error:
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # This sets the umask and does not use chmod afterwards, because other users could connect before the chmod.
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    finally:
        os.umask(before)
    return bound


def _remove_dead_socket(path: Path) -> None:
    """Remove the unix socket at `path` that a killed service has left, if there is one.

    Raises:
        ConfigError: a service listens there, or `path` is no socket.
        OSError: the path cannot be examined, or the socket cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ConfigError(f"a service listens at {path} already")
        path.unlink()


@asynccontextmanager
async def serving(
    app: ASGIApp,
    bound: socket.socket,
    address: HttpAddress,
    limits: HttpLimits | None = None,
) -> AsyncGenerator[str]:
    """Serve an application during the block, which begins when the socket listens. Yields the URL.

    When the block ends, requests in progress have SHUTDOWN_S seconds to finish, and are cancelled then.

    Args:
        app: the ASGI application. It sets `scope["state"]["token"]` of requests with a valid token, so that their
            connection is no stranger any more, and answers each `HTTPException`.
        bound: the socket, from `open_socket`. It is closed at the end.
        address: the address that `bound` is bound to.
        limits: bounds on requests and connections; None: the defaults.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    limits = limits or HttpLimits()
    # The process also opens other files, so connections get at most half of the number that it may open.
    connections = min(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    # Websockets, startup events, uvicorn's logs and the header that names uvicorn are off. Headers of a proxy that name
    # the client are not trusted.
    config = uvicorn.Config(
        BoundedBodies(app, limits),
        http=http_protocol(limits, connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.key,
        backlog=ACCEPTED,
        limit_concurrency=connections,
        timeout_keep_alive=max(1, int(limits.idle_s)),  # uvicorn takes whole seconds
        timeout_graceful_shutdown=SHUTDOWN_S,
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {address.certificate} cannot be used: {error}") from error
    try:
        async with accepting(config, bound):
            yield _url(bound, address)
    finally:
        bound.close()
        if address.unix is not None:
            address.unix.unlink(missing_ok=True)


def with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return a `send` that adds these headers to an answer. Headers that the answer sets itself stay as they are.

    An ASGI application sends its answer with the function `send`. The middleware of `flash view` and of the sandbox
    service passes the returned function to its application instead, so that every answer has their security headers.
    """

    async def send_with_headers(message: Message) -> None:
        """Send one message of an answer. Only the first, with the status, has headers."""
        if message["type"] == "http.response.start":
            answer_headers = MutableHeaders(scope=message)
            for name, value in headers.items():
                answer_headers.setdefault(name, value)
        await send(message)

    return send_with_headers


def _url(bound: socket.socket, address: HttpAddress) -> str:
    """Return the URL of a bound socket, with its real port, which the system has chosen if `address.port` is 0."""
    if address.unix is not None:
        return f"unix:{address.unix}"
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if address.certificate else 'http'}://{shown}:{port}"


# -- bodies ----------------------------------------------------------------------------------------------------------


async def read_body(request: Request, most_bytes: int, *, json: bool = True) -> bytes:
    """Return the whole body of a request, which the caller then decodes. Applications of `serving` call this.

    Args:
        request: the request.
        most_bytes: largest body that is accepted.
        json: True if the body is JSON, which may have at most `MAX_JSON_VALUES` lists, objects and keys.

    Raises:
        HTTPException: the body is too large, has too many values, or comes too slowly, or too many other bodies are
            held at this time (`BoundedBodies`).
        ClientDisconnect: the client has left.
    """
    too_large = HTTPException(413, f"the body has more than {most_bytes} bytes")
    if int(request.headers.get("content-length") or 0) > most_bytes:  # refused before any of it is read
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most_bytes:
            raise too_large
    if json and sum(map(data.count, (b"[", b"{", b":"))) > MAX_JSON_VALUES:
        raise HTTPException(413, f"the body has more than {MAX_JSON_VALUES} lists, objects and keys")
    return bytes(data)


class BoundedBodies:
    """ASGI middleware that bounds each request body, and the bytes of all bodies that are held at the same time.

    The body of a request counts as held until the request is answered, because applications keep it that long. The body
    of an answer is sent in pieces of at most `SENT_PIECE` bytes.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits
        self._held = 0
        """Bytes of the bodies of requests that are not answered yet."""
        self._held_by: Counter[str] = Counter()
        """Bytes in `_held` by holder: the name of a bounded token (`HttpConnection.holder`), or empty for all other
        requests together."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with bounds on its body. uvicorn calls this for each request.

        The application gets a `receive` that counts the bytes as they come and raises HTTPException beyond a bound. The
        bytes are given back when the application has answered, or failed.
        """
        if scope["type"] != "http":  # `serving` turns the other protocols of ASGI off
            return await self._app(scope, receive, send)
        body, holder = _Body(receive, self._limits), ""
        counted = 0  # bytes of this body in `_held`; a piece that `_Body.receive` refuses is never added

        async def bounded() -> Message:
            """Return the next message of the request, with its bytes counted. Raises HTTPException beyond a bound."""
            nonlocal holder, counted
            message = await body.receive()  # `body.size` grows by the bytes of this piece
            if not counted:
                # The holder is known only now: the application has checked the token before it reads the first piece.
                holder = scope["state"]["connection"].holder
            self._held += body.size - counted
            self._held_by[holder] += body.size - counted
            counted = body.size
            if self._held > self._limits.held_bytes:
                raise HTTPException(503, "too many large requests wait for their answers; try again later")
            if holder and self._held_by[holder] > self._limits.token_share * self._limits.held_bytes:
                raise HTTPException(503, "too many large requests of this token wait for their answers")
            return message

        async def send_pieces(message: Message) -> None:
            """Send one message of the answer, a large body in pieces."""
            # uvicorn waits for a slow client only between two messages. After the last one it counts the connection as
            # idle. With TLS it would then soon cut off an answer of which the client has read only the beginning.
            body = message.get("body", b"")
            # Beginning of the last piece, which keeps `more_body` of the message. 0: the body is one piece.
            last = max(0, len(body) - 1) // SENT_PIECE * SENT_PIECE
            for start in range(0, last, SENT_PIECE):
                await send({**message, "body": body[start : start + SENT_PIECE], "more_body": True})
            await send({**message, "body": body[last:]} if last else message)

        try:
            await self._app(scope, bounded, send_pieces)
        finally:
            self._held -= counted
            self._held_by[holder] -= counted
            if not self._held_by[holder]:
                del self._held_by[holder]


class _Body:
    """Body of one request, bounded in bytes and in time. `receive` replaces the ASGI function `receive`."""

    def __init__(self, receive: Receive, limits: HttpLimits) -> None:
        self._receive = receive
        self._limits = limits
        self._begun = anyio.current_time()
        """Time at which the request began, in seconds of the event loop's clock."""
        self._complete = False
        """True since the whole body has arrived, or the client has left."""
        self.size = 0
        """Bytes that have arrived."""

    async def receive(self) -> Message:
        """Return the next ASGI message, which has the next piece of the body or says that the client has left.

        Raises:
            HTTPException: the body is too large, no piece came in time, or all of it came too slowly.
        """
        if self._complete:
            # This call waits until the client leaves or the answer is complete, so it must have no timeout.
            return await self._receive()
        now, pause = anyio.current_time(), self._limits.receive_s
        # The latest time for the next piece, if the whole body keeps the average rate `bytes_per_s`.
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
