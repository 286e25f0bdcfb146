"""Fuzzes the port of the weights: workers pull while attackers connect, prove the token or not, and say anything.

Oracles: no thread ends with a traceback and none is left over; nothing is logged as an error; every pull gives the
tensors that were published.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from random import Random

import msgspec
import torch

from flash.errors import TransportError
from flash.transport.auth import MAGIC, blocking_handshake, client_handshake
from flash.weights.broadcast import BroadcastReceiver, BroadcastRequest, BroadcastServer, VersionReceived
from flash.weights.image import Fingerprint, make_image
from flash.weights.tcp import NO_DIGEST, PULL_REQUEST, WORKER_NAME, TcpReceiver, WeightServer, WeightSource, pull
from tests.fuzz.hub import Records
from tests.fuzz.mutate import flipped

PULL_EVERY = 25
"""Attackers between two pulls of a good worker."""
PATIENCE_S = 20.0
"""Seconds in which a pull ends, and the threads of attackers that have left: far above what either needs."""
TENSORS = (("weight", torch.arange(1000.0)), ("bias", torch.ones(3)))


def attack(source: WeightSource, rng: Random) -> None:
    """Run one attacker, from its connection to its end."""
    with socket.create_connection((source.host, source.port), timeout=PATIENCE_S) as connection, suppress(OSError):
        if rng.random() < 0.5:
            _without_token(connection, rng)
        else:
            with suppress(TransportError):
                _with_token(connection, source, rng)
        _leave(connection, rng)


def _without_token(connection: socket.socket, rng: Random) -> None:
    hello = MAGIC + rng.randbytes(32)
    pieces = [hello, rng.randbytes(32), bytes([rng.randrange(256)]), rng.randbytes(255), rng.randbytes(4096)]
    for piece in pieces[: rng.randrange(6)]:
        data = flipped(piece, rng) if rng.random() < 0.2 else piece
        for byte in data[: rng.choice((0, 0, 0, 20))]:  # slowly, or as a whole
            connection.send(bytes([byte]))
        connection.sendall(data)


def _with_token(connection: socket.socket, source: WeightSource, rng: Random) -> None:
    name = rng.choice((WORKER_NAME, "", "x" * 255, "\x1b[2J", "node-0"))
    handshake = client_handshake(bytes.fromhex(source.token), name)
    blocking_handshake(handshake, connection.sendall, lambda count: _exactly(connection, count))
    version = rng.choice((0, 1, 2, -1, 2**63 - 1, -(2**63), rng.randrange(2**32)))
    asked = PULL_REQUEST.pack(version, rng.choice((NO_DIGEST, bytes.fromhex(source.digest), rng.randbytes(32))))
    asked = asked[: rng.choice((len(asked), len(asked), 8, 0, 3))] + rng.randbytes(rng.choice((0, 0, 9)))
    # A peer with the token may delay a round, so no attacker requests a version that there is.
    word = msgspec.msgpack.encode(
        rng.choice(
            (
                BroadcastRequest("", rng.choice((0, 2, 2**63 - 1)), 0),
                BroadcastRequest("x" * 99, 1, -1),
                VersionReceived(),
            )
        )
    )
    framed = struct.pack("!I", rng.choice((len(word), len(word), 2**31))) + flipped(word, rng)
    connection.sendall(rng.choice((asked, framed, framed + framed)))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise TransportError("hung up")
    return data


def _leave(connection: socket.socket, rng: Random) -> None:
    manner = rng.choice(("mute", "reset", "half", "read"))
    if manner == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif manner != "mute":
        connection.shutdown(socket.SHUT_WR)
        while manner == "read" and connection.recv(4096):
            pass


SERVERS: dict[str, Callable[[str, float, float], WeightServer]] = {
    "tcp": WeightServer,
    "tcp, deltas": partial(WeightServer, deltas=True),
    "gloo": partial(BroadcastServer, "gloo"),
}


def fuzz(connections: int, seed: int) -> dict[str, int]:
    """Run `connections` attackers.

    Raises:
        AssertionError: an oracle does not hold; the message names the attacker's seed.
    """
    pulls = sum(_attacked(backend, connections // len(SERVERS), seed) for backend in SERVERS)
    return {"attackers": connections, "pulls": pulls}


def _attacked(backend: str, connections: int, seed: int) -> int:
    """Attack a server of `backend`, and return how often a good worker has pulled meanwhile."""
    records, dead = Records(), list[str]()
    hook = threading.excepthook
    with ExitStack() as stack:
        logging.getLogger().addHandler(records)
        stack.callback(logging.getLogger().removeHandler, records)
        threading.excepthook = lambda about: dead.append(repr(about.exc_value))
        stack.callback(setattr, threading, "excepthook", hook)
        server, member = SERVERS[backend]("127.0.0.1", PATIENCE_S, PATIENCE_S), BroadcastReceiver(torch.device("cpu"))
        held = TcpReceiver()
        stack.callback(server.close)
        stack.callback(member.leave)
        threads, fingerprint = threading.active_count(), Fingerprint()
        for _, tensor in TENSORS:
            fingerprint.add(tensor)
        image = make_image((name, tensor.clone()) for name, tensor in TENSORS)
        source, pulls = server.hold(1, image, fingerprint.sums), 0
        for attacker in range(connections):
            try:
                attack(source, Random(f"{seed}/{attacker}"))
                if attacker % PULL_EVERY == 0:
                    pulled = dict(pull(source, member.receive if backend == "gloo" else held.receive))
                    assert all(torch.equal(pulled[name], tensor) for name, tensor in TENSORS)
                    pulls += 1
                assert not records.bad, records.bad
                assert not dead, dead
            except Exception as error:
                raise AssertionError(f"{backend}: seed {seed}, attacker {attacker}: {error!r}") from error
        end = time.monotonic() + PATIENCE_S
        while threading.active_count() > threads:
            assert time.monotonic() < end, f"{threading.active_count() - threads} threads are left over"
            time.sleep(0.01)
    return pulls
