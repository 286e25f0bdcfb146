"""Connections without the token cannot keep a worker from its pull."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import torch

from flash.transport.auth import MAGIC
from flash.weights.image import make_image
from flash.weights.tcp import MAX_UNPROVEN, WeightServer, WeightSource, pull


@pytest.fixture
def idle() -> Iterator[Callable[[WeightSource], socket.socket]]:
    """Yield a function that connects to a server, and keeps the connection silent until the end of the test."""
    with ExitStack() as stack:

        def call(source: WeightSource) -> socket.socket:
            return stack.enter_context(socket.create_connection((source.host, source.port), timeout=10))

        yield call


def serve(stack: ExitStack, prove_s: float) -> WeightSource:
    """Serve a tensor of four ones until the stack ends. A worker has `prove_s` seconds to prove the token."""
    server = WeightServer("127.0.0.1", prove_s, 5.0)
    stack.callback(server.close)
    return server.hold(1, make_image([("weight", torch.ones(4))]))


def fetch(source: WeightSource) -> list[float]:
    """Pull the tensor of `serve` as a worker that knows the token does."""
    return dict(pull(source))["weight"].tolist()


def test_running_out_of_descriptors_does_not_end_the_server(
    idle: Callable[[WeightSource], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        source = serve(stack, 60)
        few = len(os.listdir("/proc/self/fd")) + 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            # Both ends are of this process: the server finds no descriptor for what the last of these asks for.
            strangers: list[socket.socket] = []
            with suppress(OSError):
                strangers.extend(idle(source) for _ in range(few))
            with suppress(TimeoutError):
                strangers[-1].settimeout(1.0)
                strangers[-1].recv(1)
            for stranger in strangers:
                stranger.close()
            assert fetch(source) == [1, 1, 1, 1]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "no connections are taken for 0.5 s" in caplog.text


def test_too_many_unproven_connections_end_the_oldest_and_no_pull(
    idle: Callable[[WeightSource], socket.socket],
) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        source = serve(stack, 60)
        strangers = [idle(source) for _ in range(MAX_UNPROVEN + 3)]
        for stranger in strangers[:3]:
            assert stranger.recv(1) == b""
        assert fetch(source) == [1, 1, 1, 1]
        # Their threads end in their own time, after the sockets.
        while threading.active_count() > before + 1 + MAX_UNPROVEN:
            time.sleep(0.01)


def test_a_byte_now_and_then_does_not_extend_the_time_for_a_proof(
    idle: Callable[[WeightSource], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        stranger = idle(serve(stack, 0.3))
        stranger.settimeout(0.05)
        # Send the first bytes of a handshake, each 0.05 s after the one before, until the server ends the connection.
        for byte in MAGIC[:-1] + bytes(200):
            try:
                if not stranger.recv(1):
                    break
            except TimeoutError:
                pass
            except ConnectionError:  # what it had sent last was never read
                break
            with suppress(ConnectionError):
                stranger.send(bytes([byte]))
        else:
            pytest.fail("the server did not end the connection")
    assert "no proof of the token within 0.3 s" in caplog.text or "timed out" in caplog.text
