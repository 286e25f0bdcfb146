"""Addresses and sockets at which a server listens."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from flash.errors import ConfigError
from flash.http.connections import HttpLimits
from flash.http.server import SENT_PIECE, BoundedBodies, HttpAddress, open_socket


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_a_public_address_needs_tls(host):
    with pytest.raises(ConfigError, match="travel in the clear"):
        open_socket(HttpAddress(host=host, port=0))


def test_tls_needs_a_key_and_loopback_nothing(tmp_path):
    with pytest.raises(ConfigError, match="both a certificate and its key"):
        open_socket(HttpAddress(certificate=tmp_path / "c"))
    for host in ("127.0.0.1", "::ffff:127.0.0.1"):
        open_socket(HttpAddress(host=host, port=0)).close()


def test_a_unix_socket_is_its_owners(tmp_path):
    path = tmp_path / "s"
    bound = open_socket(HttpAddress(unix=path))
    assert path.stat().st_mode & 0o777 == 0o600
    bound.listen()
    with pytest.raises(ConfigError, match=r"listens at .* already"):
        open_socket(HttpAddress(unix=path))
    bound.close()
    open_socket(HttpAddress(unix=path)).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        open_socket(HttpAddress(unix=path))
    assert path.read_text() == "precious"


def test_a_port_in_use_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            open_socket(HttpAddress(port=taken.getsockname()[1]))


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    with open_socket(HttpAddress()) as bound:
        # Where asyncio looks before it turns Nagle's algorithm off.
        assert bound.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_is_no_name_says_so(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen at "):
        open_socket(HttpAddress(host=host))


def test_a_kernel_without_a_kind_of_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr("flash.http.server.socket.socket", refuse)
    with pytest.raises(ConfigError, match=r"^cannot listen at .* not supported"):
        open_socket(HttpAddress())


def test_a_unix_socket_below_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^cannot listen at .*Not a directory"):
        open_socket(HttpAddress(unix=tmp_path / "file" / "s"))


@pytest.mark.parametrize("size", [0, 5, SENT_PIECE, SENT_PIECE + 1, 2 * SENT_PIECE])
def test_a_large_answer_is_sent_in_pieces_so_that_its_end_waits_for_the_client(size: int) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "GET", "state": {}}
    body = bytes(range(251)) * (size // 251 + 1)
    anyio.run(BoundedBodies(Response(body[:size]), HttpLimits()), scope, receive, send)
    _, *pieces = sent
    assert b"".join(piece["body"] for piece in pieces) == body[:size]
    assert all(len(piece["body"]) <= SENT_PIECE for piece in pieces)
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_a_body_that_was_too_large_leaves_the_held_bytes_as_they_were() -> None:
    """After refused bodies, the limit on all held bodies together is still the given one."""
    waiting: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Message) -> None:
        """Send nothing."""

    scope: dict[str, Any] = {"type": "http", "state": {"connection": SimpleNamespace(holder="")}}

    async def read(scope: Scope, bounded: Receive, send: Send) -> None:
        """Read a body. If it is the first of two, read the other one while the first is held."""
        while (await bounded())["more_body"]:
            pass
        if scope.get("two"):
            waiting.append(b"x" * 60)
            await bodies({**scope, "two": False}, receive, send)

    bodies = BoundedBodies(read, HttpLimits(body_bytes=100, held_bytes=150))

    async def main() -> None:
        waiting.extend([b"x" * 60] * 2)
        with pytest.raises(HTTPException, match="413"):
            await bodies(scope, receive, send)
        waiting.append(b"x" * 100)
        with pytest.raises(HTTPException, match="503"):
            await bodies({**scope, "two": True}, receive, send)

    anyio.run(main)
