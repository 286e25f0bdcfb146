"""The listening end of the page: a port of this machine, for its own users."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from flash.errors import ConfigError

ADDRESS = "127.0.0.1"
SHUTDOWN_S = 1
"""Seconds for answers in progress when it ends."""


def open_port(port: int) -> socket.socket:
    """A listening socket; 0 takes any free port. Raises ConfigError."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ADDRESS, port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen at {ADDRESS}:{port}: {error.strerror or error}; choose another port with --port, 0 for any"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a browser finds the page."""
    return f"http://{ADDRESS}:{bound.getsockname()[1]}/"


def serve(app: ASGIApp, bound: socket.socket, told: Callable[[], None]) -> None:
    """Serve until an interrupt. `told` is called once answers are given."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            told()

    config = uvicorn.Config(
        app,
        # The other implementation takes headers without end.
        http="h11",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    with contextlib.closing(bound), contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[bound])
