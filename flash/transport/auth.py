"""The proof with which a connection begins: both ends show that they hold the run's token, without sending it.

    client → server   magic | client nonce
    server → client   magic | server nonce | HMAC-SHA256(token, "server" | both nonces)
    client → server   HMAC-SHA256(token, "client" | both nonces | name) | length of name | name
    server → client   accepted

`flash.transport` (client: a node or trainer rank; server: the hub) and `flash.weights.tcp` (client: an engine's worker;
server: the trainer's rank 0) run this proof before they send anything else.

Security properties:
- Mutual: each end checks the other's proof. The client checks first, so an impostor server learns no proof.
- No replay: both nonces are new in each connection, so that a recorded proof is useless.
- No reflection: the roles "client" and "server" are part of the proofs, so that a proof cannot be sent back.
- Bounded: every message has a fixed or bounded size, so that an unproven peer cannot make us allocate memory.
- Not covered: the bytes after the proof are neither encrypted nor signed. So the network between the nodes has to be
  trusted.

`client_handshake` and `server_handshake` are generators that hold the protocol and do no I/O. `prove_to_server` and
`admit_client` run them over an anyio stream, and `blocking_handshake` over a blocking socket. Callers set the deadline.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Generator
from typing import TypeVar

from anyio import BrokenResourceError, EndOfStream
from anyio.abc import ByteStream

from flash.errors import ConfigError, PeerLostError, TransportError

TOKEN_BYTES = 32
"""Length of the tokens that `new_token` makes, in bytes."""
MIN_TOKEN_BYTES = 16
"""Shortest token that is accepted, in bytes. An attacker who has recorded a proof can try tokens offline, and could
find a shorter token."""
MAX_NAME_BYTES = 255
"""Longest name of a client, in bytes. The length of the name is sent as one byte."""

MAGIC = b"flashrl\x01"
"""First bytes in both directions. The last byte is the protocol's version."""
NONCE_BYTES = 32
"""Length of a nonce in bytes. A nonce is a random challenge that is used once."""
PROOF_BYTES = 32
"""Length of an HMAC-SHA256, in bytes."""

_ACCEPTED = b"ok"
"""Last message of the proof, from the server."""

ResultT = TypeVar("ResultT")


def new_token() -> bytes:
    """Return a random token for one run."""
    return secrets.token_bytes(TOKEN_BYTES)


def check_token(token: bytes) -> None:
    """Refuse a token that is short enough to be guessed.

    Raises:
        ConfigError: the token has fewer than `MIN_TOKEN_BYTES` bytes.
    """
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"the connection token has {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed; "
            "make one with flash.transport.new_token()"
        )


Handshake = Generator[bytes | int, bytes, ResultT]
"""Steps of one end of the proof, without I/O.

The generator yields bytes to send, or the number of bytes that must be received next and are sent into it.
"""


def client_handshake(token: bytes, name: str) -> Handshake[None]:
    """Check the server's proof, then send our proof and our name.

    Raises:
        ConfigError: the name is too long.
        TransportError: the server does not hold the token, refused our proof, or speaks another protocol.
    """
    encoded = name.encode()
    if len(encoded) > MAX_NAME_BYTES:
        raise ConfigError(f"a peer's name may have {MAX_NAME_BYTES} bytes, this one has {len(encoded)}: {name}")
    our_nonce = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + our_nonce
    _check_magic((yield len(MAGIC)))
    server_nonce = yield NONCE_BYTES
    proof = yield PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(token, b"server", our_nonce, server_nonce)):
        raise TransportError("the server does not prove our token; it belongs to another run")
    yield _proof(token, b"client", our_nonce, server_nonce, encoded) + bytes([len(encoded)]) + encoded
    if (yield len(_ACCEPTED)) != _ACCEPTED:
        raise TransportError("the server did not accept our proof of the token")


def server_handshake(token: bytes) -> Handshake[str]:
    """Send our proof and check the client's proof. Return the client's name.

    Raises:
        TransportError: the client does not hold the token, or speaks another protocol.
    """
    _check_magic((yield len(MAGIC)))
    client_nonce = yield NONCE_BYTES
    our_nonce = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + our_nonce + _proof(token, b"server", client_nonce, our_nonce)
    proof = yield PROOF_BYTES
    length = yield 1
    name = yield length[0]
    if not hmac.compare_digest(proof, _proof(token, b"client", client_nonce, our_nonce, name)):
        raise TransportError("the client does not prove our token")
    try:
        decoded = name.decode()
    except UnicodeDecodeError as error:
        raise TransportError(f"the client's name is not UTF-8: {name!r}") from error
    yield _ACCEPTED
    return decoded


async def prove_to_server(stream: ByteStream, token: bytes, name: str) -> None:
    """Run `client_handshake` over a stream. Raises its errors, and PeerLostError if the server hangs up."""
    await _run_over_stream(stream, client_handshake(token, name))


async def admit_client(stream: ByteStream, token: bytes) -> str:
    """Run `server_handshake` over a stream. Raises its errors, and PeerLostError if the client hangs up."""
    return await _run_over_stream(stream, server_handshake(token))


def blocking_handshake(
    handshake: Handshake[ResultT], send: Callable[[bytes], None], receive: Callable[[int], bytes]
) -> ResultT:
    """Run a handshake with blocking functions, and return its result. Raises its errors, and those of the functions.

    Connections for weights use this, because they have no event loop. `send` sends all of the given bytes, and
    `receive(count)` returns exactly `count` bytes.
    """
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                send(step)
            step = handshake.send(receive(step) if isinstance(step, int) else b"")
    except StopIteration as end:
        return end.value


async def _run_over_stream(stream: ByteStream, handshake: Handshake[ResultT]) -> ResultT:
    """Run a handshake over a stream, and return its result.

    If the handshake yields bytes, they are sent. If it yields a number, that many bytes are received and sent into it.
    Raises the errors of the handshake, and PeerLostError if the other end hangs up. Sets no deadline.
    """
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                await _send(stream, step)
            step = handshake.send(await _receive_exactly(stream, step) if isinstance(step, int) else b"")
    except StopIteration as end:
        return end.value


def _proof(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes, name: bytes = b"") -> bytes:
    """Return the HMAC by which the end with this role proves the token. Only a client's proof covers a name."""
    return hmac.digest(token, role + client_nonce + server_nonce + name, "sha256")


def _check_magic(magic: bytes) -> None:
    """Raise TransportError if the other end does not begin with `MAGIC`, so that it speaks another protocol."""
    if magic != MAGIC:
        raise TransportError(f"the other end speaks another protocol: it opened with {magic!r}, not {MAGIC!r}")


async def _send(stream: ByteStream, data: bytes) -> None:
    """Send all bytes. Raises PeerLostError if the other end hangs up."""
    try:
        await stream.send(data)
    except BrokenResourceError as error:
        raise PeerLostError("the other end hung up before the token was proven") from error


async def _receive_exactly(stream: ByteStream, count: int) -> bytes:
    """Return the next `count` bytes. Raises PeerLostError if the other end hangs up before."""
    data = b""
    while len(data) < count:
        try:
            data += await stream.receive(count - len(data))
        except (EndOfStream, BrokenResourceError) as error:
            raise PeerLostError(
                "the other end hung up before the token was proven: it waited too long, or it holds the token of "
                "another run"
            ) from error
    return data
