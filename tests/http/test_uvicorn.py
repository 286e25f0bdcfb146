"""The parts of uvicorn that it does not promise, and that `flash.http` uses, are still there.

A test that fails here says what moved: look at the release notes of uvicorn, and at the file that touches it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from functools import partial
from pathlib import Path

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server, ServerState

from flash.http import connections

ROOT = Path(__file__).parents[2]
CALLBACKS = ("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing")
HTTP = ("app_state", "conn", "scope", "loop", "transport", "on_response_complete", "logger", *CALLBACKS)


def _missing(thing: object, names: tuple[str, ...]) -> list[str]:
    """Return the names that an object does not have."""
    return [name for name in names if not hasattr(thing, name)]


async def _app(scope, receive, send) -> None:
    """Answer nothing."""


@pytest.mark.anyio
async def test_uvicorns_connections_have_what_ours_use():
    config = uvicorn.Config(_app, log_config=None, lifespan="off")
    made = H11Protocol(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
    assert not _missing(made, HTTP), "uvicorn's H11Protocol lost some"


@pytest.mark.anyio
async def test_the_parser_of_uvicorns_connections_is_the_one_that_ours_know():
    config = uvicorn.Config(_app, log_config=None, lifespan="off")
    http = H11Protocol(config=config, server_state=ServerState(), app_state={})
    assert isinstance(http.conn, h11.Connection), "H11Protocol.conn is no h11.Connection"
    assert http.scope is None, "H11Protocol.scope is not None before the first request"


def test_uvicorn_takes_makers_of_connections_and_leaves_signals_to_who_overrides():
    maker = partial(H11Protocol)
    config = uvicorn.Config(_app, log_config=None, lifespan="off", http=maker)  # type: ignore[arg-type]
    config.load()
    assert config.http_protocol_class is maker, "Config.http_protocol_class is not what was given as `http`"
    assert not _missing(Server(config), ("capture_signals", "startup", "should_exit", "serve")), "Server lost some"
    assert "sockets" in inspect.signature(Server.serve).parameters, "Server.serve takes no sockets"
    assert "sockets" in inspect.signature(Server.startup).parameters, "Server.startup takes no sockets"
    assert "capture_signals" in inspect.getsource(Server.serve), "Server.serve does not use capture_signals"


@pytest.mark.slow
def test_its_insides_are_touched_in_one_file():
    found: set[str] = set()
    for path in [*(ROOT / "flash").rglob("*.py"), *(ROOT / "envs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("uvicorn."):
                found.add(str(path))
    assert found == {connections.__file__}
