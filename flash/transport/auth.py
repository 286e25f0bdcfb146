"""Both ends of a new connection prove that they hold the run's token, which itself never travels.

    client → server   magic | client nonce
    server → client   magic | server nonce | HMAC-SHA256(token, "server" | both nonces)
    client → server   HMAC-SHA256(token, "client" | both nonces | name) | length of name | name
    server → client   accepted

Fresh nonces from both ends make a recorded proof useless, and the two roles differ, so that no proof can be sent back.
Every message has a fixed or bounded size: an unproven peer cannot make us allocate. The proof says who opened the
connection; what follows is neither encrypted nor signed, so that the network between the nodes has to be trusted.

`client_handshake` and `server_handshake` hold the protocol and do no I/O; they are run over a stream for the hub's
connections, and over blocking sockets for the transfer of weights. The callers set the deadline.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Generator
from typing import TypeVar

from anyio import BrokenResourceError, EndOfStream
from anyio.abc import ByteStream

from flash.errors import ConfigError, TransportError

TOKEN_BYTES = 32
"""Length of the tokens that `new_token` makes."""
MIN_TOKEN_BYTES = 16
"""A proof can be attacked offline by guessing the token; shorter ones could be found."""
MAX_NAME_BYTES = 255
"""The name's length is sent as one byte."""

MAGIC = b"flashrl\x01"
"""Opens both directions; the last byte is the protocol's version."""
NONCE_BYTES = 32
"""Length of the random challenges."""
PROOF_BYTES = 32
"""Length of an HMAC-SHA256."""

_ACCEPTED = b"ok"

ResultT = TypeVar("ResultT")


def new_token() -> bytes:
    """A random token for one run."""
    return secrets.token_bytes(TOKEN_BYTES)


def check_token(token: bytes) -> None:
    """Refuse a token that could be guessed.

    Raises:
        ConfigError: it is too short.
    """
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"the connection token has {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed; "
            "make one with flash.transport.new_token()"
        )


Handshake = Generator[bytes | int, bytes, ResultT]
"""One end of the proof, without its wire: yields bytes to send, or how many it must be given next. Its owner sets the
deadline."""


def client_handshake(token: bytes, name: str) -> Handshake[None]:
    """The client's half: check the server's proof, then give ours and our name.

    Raises:
        TransportError: the server does not hold the token, refused ours, or speaks another protocol.
    """
    encoded = name.encode()
    if len(encoded) > MAX_NAME_BYTES:
        raise ConfigError(f"a peer's name may have {MAX_NAME_BYTES} bytes, this one has {len(encoded)}: {name}")
    ours = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + ours
    _expect_magic((yield len(MAGIC)))
    theirs = yield NONCE_BYTES
    proof = yield PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(token, b"server", ours, theirs)):
        raise TransportError("the server does not prove our token; it belongs to another run")
    yield _proof(token, b"client", ours, theirs, encoded) + bytes([len(encoded)]) + encoded
    if (yield len(_ACCEPTED)) != _ACCEPTED:
        raise TransportError("the server did not accept our proof of the token")


def server_handshake(token: bytes) -> Handshake[str]:
    """The server's half: give our proof, check the client's. Returns the client's name.

    Raises:
        TransportError: the client does not hold the token, or speaks another protocol.
    """
    _expect_magic((yield len(MAGIC)))
    theirs = yield NONCE_BYTES
    ours = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + ours + _proof(token, b"server", theirs, ours)
    proof = yield PROOF_BYTES
    length = yield 1
    name = yield length[0]
    if not hmac.compare_digest(proof, _proof(token, b"client", theirs, ours, name)):
        raise TransportError("the client does not prove our token")
    try:
        decoded = name.decode()
    except UnicodeDecodeError as error:
        raise TransportError(f"the client's name is not UTF-8: {name!r}") from error
    yield _ACCEPTED
    return decoded


async def prove_to_server(stream: ByteStream, token: bytes, name: str) -> None:
    """`client_handshake` over a stream. Raises TransportError also when the other end hangs up."""
    await _over_stream(stream, client_handshake(token, name))


async def admit_client(stream: ByteStream, token: bytes) -> str:
    """`server_handshake` over a stream. Raises TransportError also when the other end hangs up."""
    return await _over_stream(stream, server_handshake(token))


def blocking_handshake(
    handshake: Handshake[ResultT], send: Callable[[bytes], None], receive: Callable[[int], bytes]
) -> ResultT:
    """A handshake over anything that blocks; `receive` gives exactly as many bytes as it is asked for."""
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                send(step)
            step = handshake.send(receive(step) if isinstance(step, int) else b"")
    except StopIteration as end:
        return end.value


async def _over_stream(stream: ByteStream, handshake: Handshake[ResultT]) -> ResultT:
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                await _send(stream, step)
            step = handshake.send(await _receive_exactly(stream, step) if isinstance(step, int) else b"")
    except StopIteration as end:
        return end.value


def _proof(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes, name: bytes = b"") -> bytes:
    return hmac.digest(token, role + client_nonce + server_nonce + name, "sha256")


def _expect_magic(magic: bytes) -> None:
    if magic != MAGIC:
        raise TransportError(f"the other end speaks another protocol: it opened with {magic!r}, not {MAGIC!r}")


async def _send(stream: ByteStream, data: bytes) -> None:
    try:
        await stream.send(data)
    except BrokenResourceError as error:
        raise TransportError("the other end hung up before the token was proven") from error


async def _receive_exactly(stream: ByteStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            data += await stream.receive(count - len(data))
        except (EndOfStream, BrokenResourceError) as error:
            raise TransportError(
                "the other end hung up before the token was proven: it has waited too long, or it holds the token of "
                "another run"
            ) from error
    return data
