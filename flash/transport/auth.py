"""Both ends of a new connection prove that they hold the run's token, which itself never travels.

    client → server   magic | client nonce
    server → client   magic | server nonce | HMAC-SHA256(token, "server" | both nonces)
    client → server   HMAC-SHA256(token, "client" | both nonces | name) | length of name | name
    server → client   accepted

Fresh nonces from both ends make a recorded proof useless, and the two roles differ, so that no proof can be sent back.
Every message has a fixed or bounded size: an unproven peer cannot make us allocate. The proof says who opened the
connection; what follows is neither encrypted nor signed, so that the network between the nodes has to be trusted.

The callers set the deadline around these functions.
"""

from __future__ import annotations

import hmac
import secrets

from anyio import BrokenResourceError, EndOfStream
from anyio.abc import ByteStream

from flash.errors import ConfigError, TransportError

TOKEN_BYTES = 32
"""Length of the tokens that `new_token` makes."""
MIN_TOKEN_BYTES = 16
"""A proof can be attacked offline by guessing the token; shorter ones could be found."""
MAX_NAME_BYTES = 255
"""The name's length is sent as one byte."""

_MAGIC = b"flashrl\x01"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_ACCEPTED = b"ok"


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


async def prove_to_server(stream: ByteStream, token: bytes, name: str) -> None:
    """The client's half: check the server's proof, then give ours and our name.

    Raises:
        TransportError: the server does not hold the token, refused ours, or speaks another protocol.
    """
    encoded = name.encode()
    if len(encoded) > MAX_NAME_BYTES:
        raise ConfigError(f"a peer's name may have {MAX_NAME_BYTES} bytes, this one has {len(encoded)}: {name}")
    ours = secrets.token_bytes(_NONCE_BYTES)
    await _send(stream, _MAGIC + ours)
    await _expect_magic(stream)
    theirs = await _receive_exactly(stream, _NONCE_BYTES)
    proof = await _receive_exactly(stream, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"server", ours, theirs)):
        raise TransportError("the server does not prove our token; it belongs to another run")
    own = _proof(token, b"client", ours, theirs, encoded)
    await _send(stream, own + bytes([len(encoded)]) + encoded)
    if await _receive_exactly(stream, len(_ACCEPTED)) != _ACCEPTED:
        raise TransportError("the server did not accept our proof of the token")


async def admit_client(stream: ByteStream, token: bytes) -> str:
    """The server's half: give our proof, check the client's. Return the client's name.

    Raises:
        TransportError: the client does not hold the token, or speaks another protocol.
    """
    await _expect_magic(stream)
    theirs = await _receive_exactly(stream, _NONCE_BYTES)
    ours = secrets.token_bytes(_NONCE_BYTES)
    await _send(stream, _MAGIC + ours + _proof(token, b"server", theirs, ours))
    proof = await _receive_exactly(stream, _PROOF_BYTES)
    length = await _receive_exactly(stream, 1)
    name = await _receive_exactly(stream, length[0])
    if not hmac.compare_digest(proof, _proof(token, b"client", theirs, ours, name)):
        raise TransportError("the client does not prove our token")
    try:
        decoded = name.decode()
    except UnicodeDecodeError as error:
        raise TransportError(f"the client's name is not UTF-8: {name!r}") from error
    await _send(stream, _ACCEPTED)
    return decoded


def _proof(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes, name: bytes = b"") -> bytes:
    return hmac.digest(token, role + client_nonce + server_nonce + name, "sha256")


async def _expect_magic(stream: ByteStream) -> None:
    magic = await _receive_exactly(stream, len(_MAGIC))
    if magic != _MAGIC:
        raise TransportError(f"the other end speaks another protocol: it opened with {magic!r}, not {_MAGIC!r}")


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
                "the other end hung up before the token was proven; it may hold the token of another run"
            ) from error
    return data
