"""The listening end: sockets and TLS; what a client may do to a connection is in `connections`.

Loopback or a unix socket unless told otherwise. A public address needs TLS: a token that travels in the clear is no
token. A unix socket is made for its owner only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import ssl
import stat
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Send

from flash.errors import ConfigError
from flash.http.bodies import BoundedBodies
from flash.http.connections import ACCEPTED, HttpLimits, accepting, http_protocol

SHUTDOWN_S = 3
"""Seconds for requests in progress when the service ends."""


class HttpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a service listens: a port of this machine or a unix socket, with or without TLS."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free one."""
    unix: Path | None = None
    """A socket of this name instead of a port."""
    certificate: Path | None = None
    """PEM file; with `key`, TLS."""
    key: Path | None = None


def open_socket(address: HttpAddress) -> socket.socket:
    """A bound socket.

    Raises:
        ConfigError: it cannot be bound, or a public address has no TLS.
    """
    if (address.certificate is None) != (address.key is None):
        raise ConfigError("TLS needs both a certificate and its key")
    if address.unix is not None:
        return _open_unix(address.unix)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen at {address.host}: {error}") from error
    family, _, _, _, place = found[0]
    if not _is_loopback(str(place[0])) and address.certificate is None:
        raise ConfigError(
            f"{address.host} can be reached from other machines: tokens and all that is sent would travel in the "
            "clear. Give --certificate and --key, or listen at 127.0.0.1 or at a unix socket"
        )
    # asyncio turns Nagle's algorithm off only where the protocol is named: with it each answer takes 40 ms longer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen at {address.host}:{address.port}: {error.strerror or error}; choose another port"
        ) from error
    return bound


def _is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a numeric address."""
    found = ipaddress.ip_address(host.partition("%")[0])
    # Before Python 3.13 ::ffff:127.0.0.1, which is IPv4's own loopback written as IPv6, does not count as one.
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _open_unix(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is no socket")
        if _answers(path):
            raise ConfigError(f"a service listens at {path} already")
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _only_owner():
            bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    return bound


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def _only_owner() -> Generator[None]:
    """What is made meanwhile can be used by its owner only, from its first moment on."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


@asynccontextmanager
async def serving(
    app: ASGIApp,
    bound: socket.socket,
    address: HttpAddress,
    limits: HttpLimits | None = None,
) -> AsyncGenerator[str]:
    """Serve for the time of the block, from its beginning on. Yields the URL.

    Args:
        app: tells `scope["state"]["token"]` of the requests whose callers it knows, and answers each `HTTPException`.
        bound: of `open_socket`.
        address: of it.
        limits: what clients may do.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    limits = limits or HttpLimits()
    connections = min(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
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
        timeout_keep_alive=max(1, int(limits.idle_s)),
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
    """Sends an answer with these headers; what it says for itself stays."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = MutableHeaders(scope=message)
            for name, value in headers.items():
                given.setdefault(name, value)
        await send(message)

    return send_with_headers


def _url(bound: socket.socket, address: HttpAddress) -> str:
    if address.unix is not None:
        return f"unix:{address.unix}"
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if address.certificate else 'http'}://{shown}:{port}"
