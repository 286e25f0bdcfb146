"""DockerBackend: sandboxes as containers of Docker or Podman, over the engine's socket.

The connection to an agent is the attached standard input and output of the container's first process. It needs no exec
(Podman starts one at a time, in 100 ms each), no published port and no network. A restart of the engine's service
breaks the connection but not the container; `take_over` then reaches the agent through one exec.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines import profiles, relay
from envs.sandbox.engines.backend import AGENT_ADDRESS, EngineInfo, Surroundings
from envs.sandbox.engines.docker_api import AttachedLink, DockerApi
from envs.sandbox.engines.docker_containers import DockerContainers
from envs.sandbox.engines.docker_images import DockerImages
from envs.sandbox.engines.machine import memory_bytes
from envs.sandbox.engines.users import USERS
from flash.errors import ConfigError, SandboxLostError, SandboxStartError

SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock")
"""Sockets where engines listen, tried in this order if DOCKER_HOST is not set."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the engine has for one request, by kind of request."""

    request: float = 20.0
    start: float = 60.0
    image: float = 600.0


class DockerAgents:
    """Connections to the agents of containers of Docker or Podman."""

    def __init__(self, api: DockerApi) -> None:
        self._api = api

    def surroundings(self, container_id: str, spec: Spec) -> Surroundings:
        memory = profiles.work_in_memory(spec)
        # If sandboxed programs may run as the relay's user, no host may take over: the agent then ends with its host.
        address = "" if profiles.PROFILES[spec.profile].user is None else AGENT_ADDRESS
        return Surroundings(spec.workdir, True, address, files_apart=memory, disk_enforced=memory)

    def attach(self, container_id: str) -> AbstractAsyncContextManager[AttachedLink]:
        return self._api.attach(container_id)

    @asynccontextmanager
    async def take_over(self, container_id: str) -> AsyncGenerator[AttachedLink]:
        found = await self._api.json(f"containers/{container_id}/json", SandboxLostError)
        env = relay.environment(found)
        async with self._api.exec(container_id, relay.command(AGENT_ADDRESS), relay.USER, env) as link:
            yield link


class DockerBackend:
    """Container engine Docker or Podman. An asynchronous context manager.

    Args:
        url: `unix:///path` or `http://host:port`; by default DOCKER_HOST, or the first of `SOCKETS` that exists.
        deadlines: deadlines of requests to the engine.
        users: user ids for sandboxes, one for each; see `envs.sandbox.engines.users`.

    Raises:
        ConfigError: there is no engine, or the address has an unknown form.
    """

    def __init__(self, url: str | None = None, *, deadlines: Deadlines | None = None, users: range = USERS) -> None:
        self.url = url or find_engine()
        if not self.url.startswith(("unix://", "http://", "https://", "tcp://")):
            raise ConfigError(f"expected unix:///path or tcp://HOST:PORT as the engine's address, not {self.url!r}")
        deadlines = deadlines or Deadlines()
        self._api = DockerApi(self.url, deadlines.request)
        self._user_numbers = users
        self.containers = DockerContainers(self._api, self.info, deadlines.start, users)
        self.images = DockerImages(self._api, self.containers, deadlines.request, deadlines.image)
        self.agents = DockerAgents(self._api)

    async def __aenter__(self) -> Self:
        await self._api.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.__aexit__(kind, error, trace)

    async def info(self) -> EngineInfo:
        version = await self._api.json("version", SandboxStartError)
        info = await self._api.json("info", SandboxStartError)
        names = [str(part.get("Name", "")) for part in version.get("Components") or []]
        # An engine that maps users has only part of the machine's user ids, so ids of `users` do not exist for it. It
        # also gains nothing from them: the kernel counts all mapped users as one in the end.
        mapped = {"name=rootless", "name=userns"} & set(info.get("SecurityOptions") or [])
        engine = "podman" if any("podman" in name.lower() for name in names) else "docker"
        return EngineInfo(
            name=f"{engine} {version.get('Version', '?')}",
            address=self.url,
            isolated=True,
            runtimes=tuple(info.get("Runtimes") or {}),
            default_runtime=str(info.get("DefaultRuntime", "")),
            cpus=int(info.get("NCPU", 1)),
            memory=int(info.get("MemTotal", 0)),
            # A unix socket may be forwarded, or lead into a virtual machine, which has another amount of memory.
            here=self.url.startswith("unix://") and info.get("MemTotal") == memory_bytes()["MemTotal"],
            users=None if mapped else (self._user_numbers[0], self._user_numbers[-1]),
        )


def find_engine() -> str:
    """Return the address of this machine's engine.

    Raises:
        ConfigError: there is none.
    """
    if url := os.environ.get("DOCKER_HOST"):
        return url
    for path in SOCKETS:
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                return f"unix://{path}"
        except OSError:
            continue
    raise ConfigError(
        f"no container engine listens at {', '.join(SOCKETS)}; start one, such as "
        "`podman system service --time=0 unix:///run/podman/podman.sock`, or set DOCKER_HOST"
    )
