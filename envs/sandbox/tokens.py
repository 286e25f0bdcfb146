"""Bearer tokens of the service: which callers may use it, and which sandboxes each of them may order.

`flash sandbox serve` reads the token file once, at its start. Clients on the same machine read their token from it.

The token file has one line `name token` for each token, followed by the token's grants. Only the owner of the file may
be able to read it. If the file does not exist, it is created with a random token for `admin`. The token named `admin`
may use every sandbox and order any kind. Every other token may use only the sandboxes that it ordered itself; without
grants these are `strict` ones without a network.

A token is compared in constant time, so that the duration of a request does not reveal parts of a valid token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from envs.sandbox.api import Spec
from flash.errors import ConfigError, SandboxRefusedError

ADMIN = "admin"
"""Name of the token that may do everything."""
TOKEN_BYTES = 32
"""Random bytes of a token that the service creates."""
MIN_TOKEN_CHARS = 22
"""Shortest token that is accepted: 22 characters of base64 hold 128 random bits. A shorter token could be guessed."""

GRANTS = ("build", "compat", "bridge", "runtime")
"""Grants that a token can have: the profiles beyond `strict`, the network, and the choice of a container runtime."""
SNAPSHOTS = 32
"""Number of snapshots that a token may have at a time, unless its line grants another number."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Form of a token's name."""
_SNAPSHOTS = re.compile(r"snapshots=([0-9]{1,6})")
"""Form of a grant of another number of snapshots."""


class Token(msgspec.Struct, frozen=True):
    """A token with its grants."""

    secret: str
    """Text that a caller sends to prove who it is."""
    grants: frozenset[str] = frozenset()
    """Grants of the token, each an element of `GRANTS`."""
    snapshots: int = SNAPSHOTS
    """Number of snapshots that the token may have at a time."""

    def check(self, name: str, spec: Spec) -> None:
        """Refuse a sandbox that was not granted to the token named `name`.

        Raises:
            SandboxRefusedError: a grant is missing. The message names the grant, and where to add it.
        """
        needed = {
            spec.profile: spec.profile != "strict",
            spec.network: spec.network != "none",
            "runtime": spec.runtime is not None,
        }
        missing = [grant for grant, wanted in needed.items() if wanted and grant not in self.grants]
        if name != ADMIN and missing:
            raise SandboxRefusedError(
                f"token {name} may not have sandboxes with {' and '.join(missing)}; the operator of the service grants "
                f"it in the token file: `{name} TOKEN {' '.join(missing)}`"
            )


class Tokens:
    """The tokens of a service."""

    def __init__(self, tokens: Mapping[str, Token]) -> None:
        """Check `tokens`, which maps names to tokens.

        Raises:
            ConfigError: there is no token, a name or a token is invalid or too short, or two names have the same token.
        """
        if not tokens:
            raise ConfigError("there is no token; without one nobody could use the service")
        for name, token in ((name, token.secret) for name, token in tokens.items()):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"a token's name may have letters, digits, '.', '_' and '-', not {name!r}")
            if len(token) < MIN_TOKEN_CHARS:
                raise ConfigError(
                    f"token {name} has {len(token)} characters, at least {MIN_TOKEN_CHARS} are needed; remove its line "
                    "and start the service once to have one made, or use `openssl rand -hex 32`"
                )
            if not (token.isascii() and token.isprintable()):
                raise ConfigError(f"token {name} has characters that a header cannot carry; use letters and digits")
        self._tokens = dict(tokens)
        """Tokens by name."""
        self._digests = {name: _digest(token.secret) for name, token in tokens.items()}
        """Digest of each token's secret, by name."""
        if len(set(self._digests.values())) < len(tokens):
            raise ConfigError("two names have the same token, so it would be unknown whose request it is")

    def named(self, name: str) -> Token:
        """Return the token of this name. A name that is no longer in the file gets a token without grants."""
        return self._tokens.get(name, Token(""))

    def name_of(self, token: str) -> str | None:
        """Return the name of the token with this secret; None if there is none."""
        given = _digest(token)
        found: str | None = None
        # No early exit, so that the duration does not depend on the position of the token.
        for name, digest in self._digests.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found


def _digest(token: str) -> bytes:
    """Return the digest of a secret. Digests have one length, so comparing them does not reveal that of a secret."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tokens(path: Path) -> dict[str, Token]:
    """Read the token file and return its tokens by name. If there is no file, create one.

    Raises:
        ConfigError: the file cannot be read, others may read it, or a line is wrong. No message shows a token.
    """
    try:
        _make(path)
        # A pipe in the place of the file would block for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} must belong to you and be readable by nobody else; chmod 600 {path}")
            lines = [line.split() for line in file if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from error
    if any(len(line) < 2 for line in lines):
        raise ConfigError(f"{path}: expected `name token` on each line")
    tokens = {name: _token(path, name, secret, grants) for name, secret, *grants in lines}
    if len(tokens) < len(lines):
        raise ConfigError(f"{path}: a name is given twice; each token needs a name of its own")
    return tokens


def _token(path: Path, name: str, secret: str, words: list[str]) -> Token:
    """Return the token of the line `name secret words…` of the file. Raises ConfigError for an unknown grant."""
    snapshots = SNAPSHOTS
    for word in words:
        if (number := _SNAPSHOTS.fullmatch(word)) is not None:
            snapshots = int(number[1])
        elif word not in GRANTS:
            raise ConfigError(
                f"{path}: the line of {name} grants something unknown; expected `name token`, and then any of "
                f"{', '.join(GRANTS)} and snapshots=NUMBER"
            )
    return Token(secret, frozenset(words) & frozenset(GRANTS), snapshots)


def _make(path: Path) -> None:
    """Create the token file with a token for `admin`, unless it exists. Raises OSError if it cannot be created."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{ADMIN} {secrets.token_urlsafe(TOKEN_BYTES)}\n")
