"""Who may use the service, and what for: bearer tokens.

A token file has one `name token` per line, with what the token is granted behind it, is readable by its owner only, and
is made with a random token when it does not exist. The token named `admin` may use every sandbox and have any kind,
any other only its own, and only `strict` ones without a network unless it is granted more. Comparisons take the same
time whatever was sent.
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
MIN_TOKEN_CHARS = 22
"""Shorter ones could be guessed: 128 bits in base64."""

GRANTS = ("build", "compat", "bridge", "runtime")
"""The profiles beyond `strict`, the network, and the choice of a container runtime."""
SNAPSHOTS = 32
"""That a token may have at a time, unless it is granted another number."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SNAPSHOTS = re.compile(r"snapshots=([0-9]{1,6})")


class Token(msgspec.Struct, frozen=True):
    """One token, and what it may ask for."""

    secret: str
    grants: frozenset[str] = frozenset()
    """Some of `GRANTS`."""
    snapshots: int = SNAPSHOTS
    """Snapshots that it may have at a time."""

    def check(self, name: str, spec: Spec) -> None:
        """Refuse a sandbox that the token was not granted.

        Raises:
            SandboxRefusedError: naming what is missing, and where it is granted.
        """
        asked = {
            spec.profile: spec.profile != "strict",
            spec.network: spec.network != "none",
            "runtime": spec.runtime is not None,
        }
        missing = [grant for grant, wanted in asked.items() if wanted and grant not in self.grants]
        if name != ADMIN and missing:
            raise SandboxRefusedError(
                f"token {name} may not have sandboxes with {' and '.join(missing)}; who runs the service grants it in "
                f"the token file: `{name} TOKEN {' '.join(missing)}`"
            )


class Tokens:
    """The tokens of a service."""

    def __init__(self, tokens: Mapping[str, Token]) -> None:
        """`tokens` by name.

        Raises:
            ConfigError: there is none, or one could be guessed.
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
        self._digests = {name: _digest(token.secret) for name, token in tokens.items()}
        if len(set(self._digests.values())) < len(tokens):
            raise ConfigError("two names have the same token; whose request it is could not be told")

    def named(self, name: str) -> Token:
        """The token of this name; one without grants for a name that was taken out of the file."""
        return self._tokens.get(name, Token(""))

    def name_of(self, token: str) -> str | None:
        """Whose token this is. All are compared, each in constant time."""
        given = _digest(token)
        found: str | None = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tokens(path: Path) -> dict[str, Token]:
    """The tokens of a file by name; makes the file if there is none.

    Raises:
        ConfigError: it cannot be read, others may read it, or a line is wrong. No message shows a token.
    """
    try:
        _make(path)
        # A pipe in its place would block for ever.
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
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{ADMIN} {secrets.token_urlsafe(TOKEN_BYTES)}\n")
