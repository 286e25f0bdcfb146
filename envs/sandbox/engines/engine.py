"""Choice of the backend class for an engine's address. A new kind of container engine is added here only."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from envs.sandbox.engines.backend import Backend
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.engines.users import USERS


def open_engine(address: str | None = None, *, users: range = USERS) -> AbstractAsyncContextManager[Backend]:
    """Open the engine at an address for the time of the block; by default this machine's engine.

    Args:
        address: `unix:///path` or `tcp://HOST:PORT` of Docker or Podman.
        users: user ids for sandboxes, one for each; see `envs.sandbox.engines.users`.

    Raises:
        ConfigError: there is no engine, or the address has an unknown form.
    """
    return DockerBackend(address, users=users)
