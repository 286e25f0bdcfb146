"""Which class is behind an engine's address: the one place that a new container engine is added to."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from envs.sandbox.engines.backend import Backend
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.engines.users import USERS


def open_engine(address: str | None = None, *, users: range = USERS) -> AbstractAsyncContextManager[Backend]:
    """The engine at an address for the time of the block; this machine's by default.

    Args:
        address: `unix:///path` or `tcp://HOST:PORT` of Docker or Podman.
        users: for sandboxes, one for each; see `envs.sandbox.engines.users`.

    Raises:
        ConfigError: there is no engine, or the address is none that can be reached.
    """
    return DockerBackend(address, users=users)
