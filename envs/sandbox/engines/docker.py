"""DockerBackend: sandboxes as containers of Docker or Podman, over the socket of the engine.

The link to an agent is the attached standard input and output of the container's first process: no exec (which costs
Podman 100 ms each, one at a time), no published port, no network. An engine whose service restarts breaks the link but
not the container; `take_over` then reaches the agent through one exec.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines import profiles, relay
from envs.sandbox.engines.archives import folder_in_tar, in_tar, pieces_of
from envs.sandbox.engines.backend import AGENT_ADDRESS, ContainerInfo, ContainerStats, EngineInfo, Surroundings
from envs.sandbox.engines.docker_api import AttachedLink, DockerApi, status_of
from envs.sandbox.engines.leftovers import kill_leftovers, remove_groups
from envs.sandbox.engines.machine import memory_bytes
from envs.sandbox.engines.seccomp import filter_text, podman_filter
from envs.sandbox.engines.users import USER_LABEL, USERS, Users
from flash.errors import (
    ConfigError,
    SandboxError,
    SandboxLimitError,
    SandboxLostError,
    SandboxStartError,
)

_log = logging.getLogger(__name__)

SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock")
"""Where engines listen, when DOCKER_HOST does not say."""
SNAPSHOT_FILE = "/.flash-snapshot.tar"
"""Where an image keeps the working directory of the sandbox that it was made of."""
CREATES = 8
"""Containers made at a time; more only wait for the engine's own locks."""
NEVER_RAN = ("created", "configured", "initialized", "unknown")
"""States of containers whose start was perhaps cut off."""
HTTP_FAILED = 500
RETRY_S = 0.5
"""Seconds between two attempts to remove what must not stay."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the engine has for one request."""

    request: float = 20.0
    start: float = 60.0
    image: float = 600.0


class DockerBackend:
    """See the module.

    Args:
        url: `unix:///path` or `http://host:port`; DOCKER_HOST, or the first of `SOCKETS` that exists, by default.
        deadlines: of requests to the engine.
        users: for sandboxes, one for each; see `envs.sandbox.engines.users`.

    Raises:
        ConfigError: there is no engine, or the address is none that can be reached.
    """

    def __init__(self, url: str | None = None, *, deadlines: Deadlines | None = None, users: range = USERS) -> None:
        self.url = url or find_engine()
        if not self.url.startswith(("unix://", "http://", "https://", "tcp://")):
            raise ConfigError(f"expected unix:///path or tcp://HOST:PORT as the engine's address, not {self.url!r}")
        self._deadlines = deadlines or Deadlines()
        self._api = DockerApi(self.url, self._deadlines.request)
        self._creating = anyio.CapacityLimiter(CREATES)
        self._info: EngineInfo | None = None
        self._asking = anyio.Lock()
        self._user_numbers = users
        self._users = Users(users)
        self._half_started: set[str] = set()
        """Containers of which the engine may not know all processes."""

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
        # Where users of containers are only some of the machine's, no others exist, and all count as one in the end.
        mapped = {"name=rootless", "name=userns"} & set(info.get("SecurityOptions") or [])
        engine = "podman" if any("podman" in name.lower() for name in names) else "docker"
        return EngineInfo(
            name=f"{engine} {version.get('Version', '?')}",
            isolated=True,
            runtimes=tuple(info.get("Runtimes") or {}),
            default_runtime=str(info.get("DefaultRuntime", "")),
            cpus=int(info.get("NCPU", 1)),
            memory=int(info.get("MemTotal", 0)),
            # A unix socket may be forwarded, or lead into a virtual machine, whose memory is another.
            here=self.url.startswith("unix://") and info.get("MemTotal") == memory_bytes()["MemTotal"],
            users=None if mapped else (self._user_numbers[0], self._user_numbers[-1]),
        )

    async def create(self, spec: Spec, *, name: str, labels: Mapping[str, str]) -> str:
        async with self._asking:
            # Once: Podman asks the package manager for the versions of its parts, which takes a second of CPU.
            self._info = self._info or await self.info()
        podman = self._info.name.startswith("podman")
        seccomp = self._filter(profiles.check(spec).families, podman=podman)
        number = self._users.draw() if profiles.check(spec).own_user and self._info.users else None
        own = {} if number is None else {USER_LABEL: str(number)}
        config = profiles.container(
            spec, {**labels, **own}, user=number, owned_tmpfs=not podman, seccomp=seccomp, mask_option=podman
        )
        try:
            return await self._create(spec, name, config, number)
        finally:
            if number is not None:
                self._users.give_up(number)

    async def _create(self, spec: Spec, name: str, config: dict[str, object], user: int | None) -> str:
        async with self._creating:
            answer = await self._api.json(
                "containers/create", SandboxStartError, method="POST", params={"name": name}, data=config
            )
            container_id = str(answer["Id"])
            if user is not None:
                self._users.keep(container_id, user)
            if owner := profiles.owner_of_work(spec):
                await self._api.json(
                    f"containers/{container_id}/archive",
                    SandboxStartError,
                    method="PUT",
                    params={"path": "/"},
                    data=folder_in_tar(spec.workdir.lstrip("/"), owner),
                    headers={"Content-Type": "application/x-tar"},
                )
        return container_id

    def _filter(self, families: Sequence[int], *, podman: bool) -> str | None:
        """Our system call filter, as the engine takes it; None where there is none for it."""
        if not podman:
            content = filter_text(families)
            return None if content is None else content.decode()
        return str(podman_filter(families)) if self.url.startswith("unix://") else None

    async def start(self, container_id: str) -> None:
        self._half_started.add(container_id)
        await self._api.json(
            f"containers/{container_id}/start", SandboxStartError, method="POST", timeout=self._deadlines.start
        )
        self._half_started.discard(container_id)

    def surroundings(self, container_id: str, spec: Spec) -> Surroundings:
        memory = profiles.work_in_memory(spec)
        # Where no other user is safe from programs, nobody takes over: the agent ends with its host.
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

    async def inspect(self, container_id: str, *, runtime: bool = False, size: bool = False) -> ContainerInfo | None:
        params = {"size": "true"} if size else None
        found = await self._api.json(f"containers/{container_id}/json", SandboxLostError, params=params, missing=None)
        if found is None:
            return None
        state = found["State"]
        running = bool(state["Running"])
        return ContainerInfo(
            container_id=str(found["Id"]),
            name=str(found["Name"]).lstrip("/"),
            running=running,
            labels=found["Config"].get("Labels") or {},
            exit_code=None if running else int(state.get("ExitCode", -1)),
            oom_killed=bool(state.get("OOMKilled")),
            runtime=await self._runtime(found) if runtime else "",
            layer_size=int(found.get("SizeRw") or 0) if size else None,
        )

    async def _runtime(self, found: Mapping[str, Any]) -> str:
        """Docker does what HostConfig says. Podman ignores it, and tells the truth only in its own API."""
        name = str(found["HostConfig"].get("Runtime") or "")
        if name != "oci":
            return name
        own = await self._api.json(f"libpod/containers/{found['Id']}/json", SandboxLostError)
        return str(own.get("OCIRuntime", ""))

    async def list(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        filters = [name if value == "" else f"{name}={value}" for name, value in labels.items()]
        params = {"all": "true", "filters": msgspec.json.encode({"label": filters}).decode()}
        try:
            found = await self._api.json("containers/json", SandboxLostError, params=params)
        except SandboxLostError as error:
            # Podman that was killed while it removed a container does not list any, until that one is removed. It still
            # does in its own API; Docker has none.
            if status_of(error) != HTTP_FAILED:
                raise
            found = await self._api.json("libpod/containers/json", SandboxLostError, params=params, missing=None)
            if found is None:
                raise
        # What was started and does not run is not `created` but `exited`.
        for entry in found:
            if (user := (entry.get("Labels") or {}).get(USER_LABEL, "")).isdecimal():
                self._users.keep(str(entry["Id"]), int(user))
        self._half_started |= {str(entry["Id"]) for entry in found if entry.get("State") in NEVER_RAN}
        return [
            ContainerInfo(
                container_id=str(entry["Id"]),
                name=str((entry.get("Names") or [""])[0]).lstrip("/"),
                running=entry.get("State") == "running",
                labels=entry.get("Labels") or {},
            )
            for entry in found
        ]

    async def stats(self, container_id: str) -> ContainerStats:
        params = {"stream": "false", "one-shot": "true"}
        found = await self._api.json(f"containers/{container_id}/stats", SandboxLostError, params=params)
        return ContainerStats(
            cpu_s=found["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9,
            memory=int((found.get("memory_stats") or {}).get("usage") or 0),
            pids=int((found.get("pids_stats") or {}).get("current") or 0),
        )

    async def kill(self, container_id: str) -> None:
        await self._api.json(
            f"containers/{container_id}/kill", SandboxLostError, method="POST", params={"signal": "SIGKILL"}
        )

    async def delete(self, container_id: str) -> None:
        params = {"force": "true", "v": "true"}
        await self._api.json(
            f"containers/{container_id}", SandboxLostError, method="DELETE", params=params, missing=None
        )
        if container_id in self._half_started and self.url.startswith("unix://"):
            count = await anyio.to_thread.run_sync(kill_leftovers, [container_id])
            if count:
                _log.info("container %s is removed; its engine had left %d of its processes", container_id[:12], count)
        if self.url.startswith("unix://"):
            await anyio.to_thread.run_sync(remove_groups, container_id)
        self._half_started.discard(container_id)
        self._users.release(container_id)

    async def commit(
        self, container_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None, most: int
    ) -> int:
        if files is None:
            async with self._paused(container_id):
                # Engines write holes out. What is paused does not make any after this look.
                found = await self.inspect(container_id, size=True)
                if found is not None and (found.layer_size or 0) > most:
                    raise SandboxLimitError(
                        f"the files have {found.layer_size} bytes, holes included, and the sandbox may have {most}"
                    )
                return await self._commit(container_id, name, labels)
        # The working directory is not part of the container's layer: put it into a second one, which never runs.
        image = (await self._api.json(f"containers/{container_id}/json", SandboxLostError))["Config"]["Image"]
        config = {"Image": image, "Cmd": ["/bin/sh"], "Labels": dict(labels), "HostConfig": {"NetworkMode": "none"}}
        # Named, so that it is found also when its creation was not answered.
        holder = f"flash-snapshot-{name.rpartition(':')[2]}"
        async with in_tar(SNAPSHOT_FILE.lstrip("/"), files) as archive:
            try:
                await self._api.json(
                    "containers/create", SandboxError, method="POST", params={"name": holder}, data=config
                )
                await self._api.json(
                    f"containers/{holder}/archive",
                    SandboxError,
                    method="PUT",
                    params={"path": "/"},
                    data=archive,
                    headers={"Content-Type": "application/x-tar"},
                    timeout=self._deadlines.image,
                )
                return await self._commit(holder, name, labels)
            finally:
                with anyio.move_on_after(self._deadlines.request, shield=True):
                    await self._delete_at_last(holder)

    @asynccontextmanager
    async def _paused(self, container_id: str) -> AsyncGenerator[None]:
        """Nothing in it runs during the block."""
        path = f"containers/{container_id}"
        try:
            await self._api.json(f"{path}/pause", SandboxLostError, method="POST")
            yield
        finally:
            # Also when it was cancelled before the engine said that it is paused, or has ended meanwhile.
            with anyio.move_on_after(self._deadlines.request, shield=True), suppress(SandboxError):
                await self._api.json(f"{path}/unpause", SandboxLostError, method="POST")

    async def _delete_at_last(self, name: str) -> None:
        """Remove a container, though the engine may fail meanwhile."""
        while True:
            try:
                return await self.delete(name)
            except SandboxError as error:
                _log.warning("removing container %s: %s", name, error)
                await anyio.sleep(RETRY_S)

    async def _commit(self, container_id: str, name: str, labels: Mapping[str, str]) -> int:
        repository, _, tag = name.partition(":")
        made = await self._api.json(
            "commit",
            SandboxError,
            method="POST",
            params={"container": container_id, "repo": repository, "tag": tag or "latest", "pause": "false"},
            # Podman fails without a body, even an empty one.
            data={"Labels": dict(labels)},
            timeout=self._deadlines.image,
        )
        image = await self._api.json(f"images/{made['Id']}/json", SandboxError)
        base = await self._api.json(f"containers/{container_id}/json", SandboxError)
        origin = await self._api.json(f"images/{base['Image']}/json", SandboxError)
        return max(0, int(image.get("Size") or 0) - int(origin.get("Size") or 0))

    async def import_image(self, archive: Path, name: str) -> None:
        repository, _, tag = name.partition(":")
        await self._api.json(
            "images/create",
            SandboxError,
            method="POST",
            params={"fromSrc": "-", "repo": repository, "tag": tag or "latest"},
            data=pieces_of(archive),
            headers={"Content-Type": "application/x-tar"},
            timeout=self._deadlines.image,
        )

    async def list_images(self, labels: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        filters = [name if value == "" else f"{name}={value}" for name, value in labels.items()]
        params = {"filters": msgspec.json.encode({"label": filters} if filters else {}).decode()}
        found = await self._api.json("images/json", SandboxError, params=params)
        return {name: entry.get("Labels") or {} for entry in found for name in entry.get("RepoTags") or []}

    async def remove_image(self, name: str) -> None:
        await self._api.json(f"images/{name}", SandboxError, method="DELETE", missing=None)


def find_engine() -> str:
    """The engine of this machine.

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
