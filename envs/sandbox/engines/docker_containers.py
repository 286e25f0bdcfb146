"""DockerContainers: creates, inspects, measures and removes containers of Docker or Podman. `DockerBackend` makes it.

Each container can have a user id of its own (`Users`).

The kernel counts some resources per user, over all containers. If all sandboxes had the same user, a single one could
take all of the machine's inotify instances, POSIX queues, pending signals or pipe buffers. User namespaces would not
help: a resource counted in a namespace also counts for the namespace's creator, which is root for all of them, and
whose limit is as small. So ids are drawn at random from `USERS`, and several services on one engine rarely use the same
one. The containers that this process knows never share one.
"""

from __future__ import annotations

import logging
import random
import socket
import struct
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines import profiles
from envs.sandbox.engines.backend import ContainerInfo, EngineInfo
from envs.sandbox.engines.docker_api import HTTP_FAILED, DockerApi, status_of
from envs.sandbox.engines.machine import LayerUse, kill_leftovers, layer_use, remove_groups
from envs.sandbox.engines.seccomp import filter_text, podman_filter
from flash.errors import ConfigError, SandboxError, SandboxLostError, SandboxStartError

_log = logging.getLogger(__name__)

USERS = range(0x70000000, 0x7FFFFFFF)
"""Range of ids that no user has by default: neither people and services of a distribution nor systemd's containers
(https://systemd.io/UIDS-GIDS)."""
_LAST_USER = (1 << 32) - 2
"""Largest user id of Linux; the next number means "no user"."""
USER_LABEL = "flash.user"
"""Label with the user id of a container that has one of its own."""

WALKS = 2
"""Most layers measured at the same time, each in a thread that walks through all files."""
CREATES = 8
"""Most containers created at the same time. More would only wait for the engine's own locks."""
NEVER_RAN = ("created", "configured", "initialized", "unknown")
"""States, in the engine's list, of a container whose start may have been interrupted."""
HTTP_CONFLICT = 409
"""HTTP status of the engine's response to a signal if the container does not run."""
PEER_S = 5.0
"""Seconds to connect to the engine's socket, to find out which process listens there."""
_PEER = struct.Struct("iii")
"""Layout of the kernel's SO_PEERCRED: ids of the process, user and group at the other end of a socket."""
HARMLESS_SIGNAL = "SIGWINCH"
"""Signal that no process notices unless it has a handler for it."""


def parse_users(text: str) -> range:
    """Return the range that `FIRST-LAST` names, the value of `flash sandbox serve --users`.

    Raises:
        ConfigError: the text is not such a range.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= _LAST_USER):
        raise ConfigError(
            f"--users {text!r}: expected FIRST-LAST, two numbers from 1 to {_LAST_USER}, the first not larger"
        )
    return range(int(first), int(last) + 1)


class Users:
    """Assigns user ids of a range to containers, each to one container.

    `draw` reserves an id before the container exists, `record` notes it for the created container, and `release`
    returns it after the removal. `give_up` ends the reservation in every case. Containers of other services keep their
    ids for as long as the engine lists them (`set_listed`).
    """

    def __init__(self, numbers: range) -> None:
        """Begin with no id in use. `numbers` is the range of user ids."""
        self._numbers = numbers
        self._drawn: set[int] = set()
        """Reserved user ids, of containers that are being created."""
        self._used: dict[str, int] = {}
        """User id of each container that this process created, by container id."""
        self._listed: dict[str, int] = {}
        """User id of each container in the engine's last list, by container id."""

    def draw(self) -> int:
        """Draw a user id that no known container has, and reserve it.

        Raises:
            SandboxStartError: all ids are in use.
        """
        taken = self._drawn.union(self._used.values(), self._listed.values())
        if len(taken) >= len(self._numbers):
            raise SandboxStartError(
                f"each of the {len(self._numbers)} users for sandboxes is in use; give the service a longer range"
            )
        while (number := random.choice(self._numbers)) in taken:
            pass
        self._drawn.add(number)
        return number

    def give_up(self, number: int) -> None:
        """End the reservation of `number`: the container was not created, or `record` has noted its user id."""
        self._drawn.discard(number)

    def record(self, container_id: str, number: int) -> None:
        """Record the user id of a container that was created."""
        self._used[container_id] = number

    def set_listed(self, numbers: dict[str, int]) -> None:
        """Record the user ids (`numbers`) of all containers that the engine lists, by container id.

        They replace those of the last list.
        """
        self._listed = numbers

    def release(self, container_id: str) -> None:
        """Release the user id of a container that is gone."""
        self._used.pop(container_id, None)
        self._listed.pop(container_id, None)


class DockerContainers:
    """Containers of Docker or Podman: the `Containers` of `DockerBackend`, whose docstrings describe the methods."""

    def __init__(self, api: DockerApi, info: Callable[[], Awaitable[EngineInfo]], start_s: float, users: range) -> None:
        """Create the operations on one engine's containers.

        Args:
            api: requests to the engine.
            info: function that returns the engine's properties, and asks the engine only once.
            start_s: seconds that the engine has to start a container.
            users: range of user ids for sandboxes.
        """
        self._api = api
        self._info = info
        self._start_s = start_s
        self._creating = anyio.CapacityLimiter(CREATES)
        """Limiter of containers that are being created."""
        self._walking = anyio.CapacityLimiter(WALKS)
        """Limiter of the threads that measure layers."""
        self._cleaning = anyio.CapacityLimiter(1)
        """Limiter of the threads that remove what the engine left of a deleted container."""
        self._users = Users(users)
        """User ids of the containers that this process knows."""
        self._half_started: set[str] = set()
        """Ids of containers whose start was interrupted. The engine may not know all of their processes, so `delete`
        also kills processes that name the container."""
        self._never_ran: set[str] = set()
        """Ids of containers in the engine's last list whose start an earlier process may have interrupted."""

    async def create(self, spec: Spec, *, name: str, labels: Mapping[str, str]) -> str:
        """Create a container, with a user id of its own if its profile and the engine allow one, and return its id.

        Raises the errors of `Containers.create`. The caller then deletes the container by its name, as it may exist.
        """
        info = await self._info()
        podman = info.name.startswith("podman")
        profile = profiles.check(spec)
        seccomp = _filter(profile.families, podman=podman, here=info.here)
        number = self._users.draw() if profile.own_user and info.users else None
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
        """Send the request that creates a container, and return its id.

        Args:
            spec: the spec of the sandbox.
            name: name of the container.
            config: configuration of the container in the form of Docker's API.
            user: user id that was drawn for the container, which is recorded as soon as it exists; None: no own one.
        """
        async with self._creating:
            answer = await self._api.json(
                "containers/create", SandboxStartError, method="POST", params={"name": name}, data=config
            )
            container_id = str(answer["Id"])
            if user is not None:
                self._users.record(container_id, user)
            if owner := profiles.owner_of_work(spec):
                # The image has no working directory that belongs to the sandbox's user, so one is copied in.
                await self._api.json(
                    f"containers/{container_id}/archive",
                    SandboxStartError,
                    method="PUT",
                    params={"path": "/"},
                    data=_folder_in_tar(spec.workdir.lstrip("/"), owner),
                    headers={"Content-Type": "application/x-tar"},
                )
        return container_id

    async def start(self, container_id: str) -> None:
        """Start the container's first process, which waits for a greeting.

        Raises the errors of `Containers.start`. The container may run in spite of an error.
        """
        # Stays in the set if the request fails: the engine may have started some of the processes all the same.
        self._half_started.add(container_id)
        await self._api.json(
            f"containers/{container_id}/start", SandboxStartError, method="POST", timeout=self._start_s
        )
        self._half_started.discard(container_id)

    async def inspect(self, container_id: str, *, runtime: bool = False, surely: bool = False) -> ContainerInfo | None:
        """Return the state of a container; None if there is no such container.

        With `surely`, a container that the engine reports as running is checked again, because Podman may not have
        noticed its end (`_has_ended`). Its exit code is then -1. With `runtime`, the result names the runtime that the
        container really runs under. Raises SandboxError if the engine fails.
        """
        path = f"containers/{container_id}/json"
        found = await self._api.json(path, SandboxLostError, missing=None)
        if found is None:
            return None
        state = found["State"]
        running = bool(state["Running"])
        if surely and running and not state.get("Paused") and await self._has_ended(container_id, int(state["Pid"])):
            # A paused container refuses the signal as well. One that was paused meanwhile, for a snapshot, has not
            # ended.
            found = await self._api.json(path, SandboxLostError, missing=None)
            if found is None:
                return None
            state = {**found["State"], "ExitCode": -1} if found["State"]["Running"] else found["State"]
            running = bool(state.get("Paused"))
        return ContainerInfo(
            container_id=str(found["Id"]),
            name=str(found["Name"]).lstrip("/"),
            running=running,
            labels=found["Config"].get("Labels") or {},
            exit_code=None if running else int(state.get("ExitCode", -1)),
            oom_killed=bool(state.get("OOMKilled")),
            runtime=await self._runtime(found) if runtime else "",
        )

    async def _has_ended(self, container_id: str, pid: int) -> bool:
        """Return True if the container has ended although its engine reports it as running.

        Podman reports a container as running until its monitor reports its end, also if the monitor was killed together
        with the container. But to send a signal, Podman asks the runtime. So a harmless signal is sent. If that fails,
        this machine's /proc decides, if it shows the engine's processes. If it does not, only the status
        `HTTP_CONFLICT` counts as the end, because the runtime also fails on an overloaded machine.

        Args:
            container_id: id of the container.
            pid: id of the container's first process, as the engine reports it.
        """
        params = {"signal": HARMLESS_SIGNAL}
        try:
            await self._api.json(f"containers/{container_id}/kill", SandboxLostError, method="POST", params=params)
            return False
        except SandboxLostError as error:
            status = status_of(error)
            if status not in (HTTP_CONFLICT, HTTP_FAILED):
                return False  # The engine did not answer, or does not know the container: the runtime was not asked.
        if not (await self._is_here() and await anyio.to_thread.run_sync(self._shares_processes)):
            return status == HTTP_CONFLICT
        # Also after `HTTP_CONFLICT`: a container that was paused meanwhile refuses the signal, and lives.
        try:
            # The command line is empty if the process has ended and its parent has not waited for it.
            return not await anyio.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return True

    async def _is_here(self) -> bool:
        """Return True if the containers run on this machine; False also if the engine does not answer this question."""
        try:
            return (await self._info()).here
        except SandboxError:
            return False

    def _shares_processes(self) -> bool:
        """Return True if /proc shows the processes of an engine on this machine under the ids that the engine reports.

        Returns False if this process runs in a container and the engine outside of it. Blocks for a moment, because it
        connects to the engine.
        """
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PEER_S)
            connection.connect(self._api.url.removeprefix("unix://"))
            # The kernel reports 0 if the process at the other end has no id here.
            engine, _, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            return engine > 0 and Path(f"/proc/{engine}/ns/pid").samefile("/proc/self/ns/pid")
        return False

    async def layer(self, container_id: str, most: LayerUse, *, holes: bool = False) -> LayerUse:
        """Measure the container's own layer in a thread, or ask the engine if the layer cannot be read here.

        `Containers.layer` describes the parameters. `most` and `holes` have no effect if the engine is asked. Raises
        SandboxError if the engine fails.
        """
        path = f"containers/{container_id}/json"
        found = await self._api.json(path, SandboxLostError, missing=None)
        if found is None:
            return LayerUse()
        folder = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
        # OSError: only root may enter the folders of Docker, or this process has no descriptor left.
        with suppress(OSError):
            if folder and await self._is_here() and await anyio.Path(folder).is_dir():
                pid = int(found["State"].get("Pid") or 0)
                measure = partial(layer_use, Path(folder), pid, most, holes=holes)
                return await anyio.to_thread.run_sync(measure, limiter=self._walking)
        # Also for an engine on another machine, or another storage driver. The engine counts only bytes, and does not
        # stop at `most`.
        found = await self._api.json(path, SandboxLostError, params={"size": "true"}, missing=None)
        return LayerUse(int((found or {}).get("SizeRw") or 0))

    async def _runtime(self, found: Mapping[str, Any]) -> str:
        """Return the name or path of the runtime that a container runs under; empty if the engine does not report it.

        `found` is the description of the container as `inspect` of the engine's API returns it.
        """
        # Docker runs HostConfig.Runtime. Podman reports "oci" there, and the real runtime only in its own API.
        name = str(found["HostConfig"].get("Runtime") or "")
        if name != "oci":
            return name
        own = await self._api.json(f"libpod/containers/{found['Id']}/json", SandboxLostError)
        return str(own.get("OCIRuntime", ""))

    async def list(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        """Return all containers with these labels. Also notes their user ids, and which may be half started.

        An empty value matches any value of a label. Raises SandboxError if the engine fails.
        """
        filters = [name if value == "" else f"{name}={value}" for name, value in labels.items()]
        params = {"all": "true", "filters": msgspec.json.encode({"label": filters}).decode()}
        try:
            found = await self._api.json("containers/json", SandboxLostError, params=params)
        except SandboxLostError as error:
            # A Podman that was killed while it removed a container fails to list containers until that one is removed.
            # Its own API still lists them; Docker has no such API.
            if status_of(error) != HTTP_FAILED:
                raise
            found = await self._api.json("libpod/containers/json", SandboxLostError, params=params, missing=None)
            if found is None:
                raise
        # Containers of other processes keep their user ids, so `_users` must not draw them again.
        users = {str(entry["Id"]): (entry.get("Labels") or {}).get(USER_LABEL, "") for entry in found}
        self._users.set_listed({id: int(user) for id, user in users.items() if user.isdecimal()})
        # A container that was started and no longer runs is `exited`, so only these states may be half started.
        self._never_ran = {str(entry["Id"]) for entry in found if entry.get("State") in NEVER_RAN}
        return [
            ContainerInfo(
                container_id=str(entry["Id"]),
                name=str((entry.get("Names") or [""])[0]).lstrip("/"),
                running=entry.get("State") == "running",
                labels=entry.get("Labels") or {},
            )
            for entry in found
        ]

    async def kill(self, container_id: str) -> None:
        """Kill the container's first process, and with it all others, as `Containers.kill` says.

        Raises SandboxLostError if the container does not run or does not exist.
        """
        await self._api.json(
            f"containers/{container_id}/kill", SandboxLostError, method="POST", params={"signal": "SIGKILL"}
        )

    async def delete(self, container_id: str) -> None:
        """Kill and remove a container, given by id or name, and whatever the engine has left of it.

        Does nothing if it is gone. Raises SandboxError if the engine fails. What the engine has left of a container is
        found only by its id: a container that is deleted by its name was never started.
        """
        params = {"force": "true", "v": "true"}
        await self._api.json(
            f"containers/{container_id}", SandboxLostError, method="DELETE", params=params, missing=None
        )
        if await self._is_here():
            if container_id in self._half_started | self._never_ran:
                count = await anyio.to_thread.run_sync(kill_leftovers, [container_id], limiter=self._cleaning)
                if count:
                    _log.info("container %s is removed; its engine had left %d processes", container_id[:12], count)
            await anyio.to_thread.run_sync(remove_groups, container_id, limiter=self._cleaning)
        self._half_started.discard(container_id)
        self._users.release(container_id)


def _filter(families: Sequence[int], *, podman: bool, here: bool) -> str | None:
    """Return the system call filter in the form that the engine takes.

    Docker takes its text, and None if this machine has no default filter to derive it from. Podman takes the path of a
    file; a Podman on another machine has no such file, and gets None. With None the engine uses its own default filter.

    Args:
        families: socket families that the profile allows.
        podman: True if the engine is Podman.
        here: True if the engine runs on this machine.
    """
    if not podman:
        content = filter_text(families)
        return None if content is None else content.decode()
    return str(podman_filter(families)) if here else None


def _folder_in_tar(name: str, owner: int) -> bytes:
    """Return a tar archive with one empty folder that belongs to the user and group `owner`."""
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.uid, header.gid = tarfile.DIRTYPE, 0o755, owner, owner
    return header.tobuf() + b"\0" * 1024
