"""What uvicorn has but does not promise is still where `flash.http` touches it.

A test that fails here says what moved: look at the release notes of uvicorn, and at the two files that touch it.
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
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import Server, ServerState

from flash.http import connections, websocket

ROOT = Path(__file__).parents[2]
CALLBACKS = ("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing")
HTTP = ("conn", "scope", "loop", "transport", "on_response_complete", "handle_websocket_upgrade", *CALLBACKS)
WEBSOCKET = ("conn", "transport", *CALLBACKS)


def _missing(thing: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not hasattr(thing, name)]


async def _app(scope, receive, send) -> None: ...


@pytest.mark.anyio
@pytest.mark.parametrize(("protocol", "names"), [(H11Protocol, HTTP), (WebSocketsSansIOProtocol, WEBSOCKET)])
async def test_uvicorns_connections_have_what_ours_use(protocol, names):
    config = uvicorn.Config(_app, log_config=None, lifespan="off")
    made = protocol(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
    assert not _missing(made, names), f"uvicorn's {protocol.__name__} lost some"


@pytest.mark.anyio
async def test_the_parsers_of_uvicorns_connections_are_those_that_ours_know():
    config = uvicorn.Config(_app, log_config=None, lifespan="off")
    options = {"config": config, "server_state": ServerState(), "app_state": {}}
    http, websocket = H11Protocol(**options), WebSocketsSansIOProtocol(**options)
    assert isinstance(http.conn, h11.Connection), "H11Protocol.conn is no h11.Connection"
    assert http.scope is None, "H11Protocol.scope is not None before the first request"
    assert not _missing(websocket.conn, ("logger", "debug")), "WebSocketsSansIOProtocol.conn lost some"


def test_uvicorn_takes_makers_of_connections_and_leaves_signals_to_who_overrides():
    makers = {"http": partial(H11Protocol), "ws": partial(WebSocketsSansIOProtocol)}
    config = uvicorn.Config(_app, log_config=None, lifespan="off", **makers)
    config.load()
    assert config.http_protocol_class is makers["http"], "Config.http_protocol_class is not what was given as `http`"
    assert config.ws_protocol_class is makers["ws"], "Config.ws_protocol_class is not what was given as `ws`"
    assert not _missing(Server(config), ("capture_signals", "startup", "should_exit", "serve")), "Server lost some"
    assert "sockets" in inspect.signature(Server.serve).parameters, "Server.serve takes no sockets"
    assert "sockets" in inspect.signature(Server.startup).parameters, "Server.startup takes no sockets"
    assert "capture_signals" in inspect.getsource(Server.serve), "Server.serve does not use capture_signals"


def test_its_insides_are_touched_in_two_files():
    found: set[str] = set()
    for path in [*(ROOT / "flash").rglob("*.py"), *(ROOT / "envs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("uvicorn."):
                found.add(str(path))
    assert found == {connections.__file__, websocket.__file__}
