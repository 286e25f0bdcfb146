"""DockerBackend: sandboxes as containers of Docker or Podman, over the engine's socket.

`envs.sandbox.open`, `flash sandbox` and `envs.sandbox.doctor` make a `DockerBackend` and enter it; leaving its block
closes the connections to the engine, and no container.

The connection to an agent is the attached standard input and output of the container's first process. It needs no exec
(Podman starts one at a time, in 100 ms each), no published port and no network. A restart of the engine's service
breaks the connection but not the container; `take_over` then reaches the agent through one exec.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio

from envs.sandbox.api import Spec
from envs.sandbox.engines import profiles
from envs.sandbox.engines.backend import AGENT_ADDRESS, EngineInfo, Surroundings
from envs.sandbox.engines.docker_api import AttachedLink, DockerApi
from envs.sandbox.engines.docker_containers import USERS, DockerContainers
from envs.sandbox.engines.docker_images import DockerImages
from envs.sandbox.engines.machine import memory_bytes
from flash.errors import ConfigError, SandboxLostError, SandboxStartError

REQUEST_S, START_S, IMAGE_S = 20.0, 60.0, 600.0
"""Seconds that the engine has for one request: a usual one, the start of a container, and one that makes an image."""
SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock")
"""Sockets where engines listen, tried in this order if DOCKER_HOST is not set."""
ADDRESS_FORMS = ("unix://", "http://", "https://", "tcp://")
"""Beginnings of the addresses that an engine may have. `tcp://` is plain HTTP, as in DOCKER_HOST."""

TAKEOVER_USER = "0"
"""User of the process by which a new host process reaches the agent, after the agent's own one is gone.

That process receives the agent's secret, so no program of the sandbox may trace, signal or read it. The kernel ensures
this, because the process runs as another user: root without capabilities, as the container has none. No program may
choose what it runs either: it gets none of the spec's environment variables, and looks for Python only where the
sandbox's user cannot write. If programs may be root themselves (`compat`), there is no such user, and those sandboxes
are not taken over."""
PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Folders of programs that belong to root in every image."""
WRITABLE_FOLDERS = ("/tmp", "/run", "/var/run", "/var/tmp", "/dev", "/proc")
"""Folders where a sandbox's user can write although the root file system is read-only, beside the working directory."""
TAKEOVER_SCRIPT = """\
import os, select, socket, struct, sys
try:
    import _ctypes as c
    c.call_function(c.dlsym(c.dlopen(None, 2), 'prctl'), (4, 0, 0, 0, 0))
except Exception: pass
s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1])
assert struct.unpack('iii', s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] == 1
while True:
    for f in select.select([0, s], [], [])[0]:
        b = os.read(0, 65536) if f == 0 else s.recv(65536)
        if not b: os._exit(0)
        if f == 0: s.sendall(b)
        while f != 0 and b: b = b[os.write(1, b):]
"""
"""Program that joins an exec to the agent's socket. It trusts only the container's first process, and hides its memory
from all others."""
FIND_PYTHON = """\
for python in python3 /usr/bin/python3 /usr/local/bin/python3; do
  if command -v "$python" >/dev/null 2>&1; then exec "$python" -ISc "$1" "$2"; fi
done
"""
"""Shell script that runs the Python program `$1` with the argument `$2`, with the first Python that the image has."""


class DockerAgents:
    """Connections to the agents of containers of Docker or Podman: the `Agents` of `DockerBackend`.

    An *agent* is the first process of a container, which runs the commands of its sandbox.
    """

    def __init__(self, api: DockerApi) -> None:
        self._api = api

    def surroundings(self, container_id: str, spec: Spec) -> Surroundings:
        """Return the facts about a container that its agent needs, as its profile decides them."""
        in_memory = profiles.work_in_memory(spec)
        # If programs of the sandbox may run as the user of a takeover, no process may take over: the agent then ends
        # with the process that controls it.
        address = "" if profiles.PROFILES[spec.profile].user is None else AGENT_ADDRESS
        return Surroundings(
            workdir=spec.workdir, cgroup=True, address=address, files_apart=in_memory, disk_enforced=in_memory
        )

    def attach(self, container_id: str) -> AbstractAsyncContextManager[AttachedLink]:
        """Connect to the first process of a container that was just started, as `Agents.attach` says."""
        return self._api.attach(container_id)

    @asynccontextmanager
    async def take_over(self, container_id: str) -> AsyncGenerator[AttachedLink]:
        """Start a process in the container that connects to the agent's socket, and yield that process's streams.

        Raises:
            SandboxLostError: the container is gone, or its programs may be root (`takeover_environment`).
            SandboxTimeoutError: the engine does not answer in time.
        """
        found = await self._api.json(f"containers/{container_id}/json", SandboxLostError)
        env = takeover_environment(found)
        async with self._api.exec(container_id, takeover_command(AGENT_ADDRESS), TAKEOVER_USER, env) as link:
            yield link


class DockerBackend:
    """Container engine Docker or Podman: a `Backend` of `envs.sandbox.engines.backend`.

    An asynchronous context manager. Its methods, and those of its parts, are called inside the block only.
    """

    def __init__(self, url: str | None = None, *, users: range = USERS, info: EngineInfo | None = None) -> None:
        """Create a client of the engine, without connecting. The first request inside the block connects.

        Args:
            url: address of the engine, in one of `ADDRESS_FORMS`; None or empty: that of `find_engine`.
            users: range of user ids. Each sandbox gets its own, because the kernel limits some resources per user.
            info: properties of the engine that another backend of the same address has returned; None: this one asks
                the engine when it needs them.

        Raises:
            ConfigError: no address was given and no usual socket exists, or the address has an unknown form.
        """
        self.url = url or find_engine()
        """Address of the engine."""
        if not self.url.startswith(ADDRESS_FORMS):
            raise ConfigError(
                "expected unix:///path, http://…, https://… or tcp://HOST:PORT as the engine's address, "
                f"not {self.url!r}"
            )
        self._api = DockerApi(self.url, REQUEST_S)
        self._users = users
        self._info = info
        """Properties of the engine; None until the engine has answered."""
        self._asking = anyio.Lock()
        """Lock around the question for `_info`, so that parallel calls ask once."""
        self.containers = DockerContainers(self._api, self.info, START_S, users)
        """Starts, lists and removes containers; a start may take START_S seconds. Reads `info` when it needs it."""
        self.images = DockerImages(self._api, self.containers, REQUEST_S, IMAGE_S)
        """Makes images from archives and from containers, lists and removes them."""
        self.agents = DockerAgents(self._api)
        """Connects to the agents in containers."""

    async def __aenter__(self) -> Self:
        """Create the HTTP client, and return this backend. The engine is not asked yet."""
        await self._api.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections to the engine. Containers stay."""
        await self._api.__aexit__(kind, error, trace)

    async def info(self) -> EngineInfo:
        """Return the properties of the engine. Only the first call sends requests: the properties stay the same, and
        Podman takes a second of CPU, because it asks the package manager for the versions of its parts.

        A failed question is asked again by the next call.

        Raises:
            SandboxError: the engine does not answer, or answers with an error. Usually a SandboxStartError.
        """
        async with self._asking:
            self._info = self._info or await self._ask_info()
        return self._info

    async def _ask_info(self) -> EngineInfo:
        """Ask the engine for its properties, with two requests. Raises SandboxError if one of them fails."""
        version = await self._api.json("version", SandboxStartError)
        info = await self._api.json("info", SandboxStartError)
        names = [str(part.get("Name", "")) for part in version.get("Components") or []]
        # An engine that maps users (rootless, userns) has only a part of the machine's user ids, so ids of `users` do
        # not exist for it. Own ids would not help there either: the kernel charges all mapped users to the one user
        # behind the engine.
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
            users=None if mapped else (self._users[0], self._users[-1]),
        )


def find_engine() -> str:
    """Return the address of this machine's engine: DOCKER_HOST, or the first of `SOCKETS` that exists.

    Raises:
        ConfigError: DOCKER_HOST is not set, and none of the sockets exists.
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


def takeover_command(address: str) -> list[str]:
    """Return the command of the process by which a new host process reaches the agent, at its abstract socket.

    `address` is the name of the socket.
    """
    return ["/bin/sh", "-c", FIND_PYTHON, "relay", TAKEOVER_SCRIPT, address]


def takeover_environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of the process that `takeover_command` starts.

    Every variable of the container is emptied: one such as LD_PRELOAD would run code of the sandbox as root.

    Args:
        container: the engine's description of the container, as `inspect` of its API returns it.

    Raises:
        SandboxLostError: programs of this container may run as root.
    """
    config = container["Config"]
    if str(config.get("User") or "0").partition(":")[0] in ("", "0", "root"):
        raise SandboxLostError(
            "its programs may be root, and root could read the secret of a takeover; such a sandbox ends with the "
            "process that controls it"
        )
    given = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    folders = [*PROGRAM_FOLDERS]
    if container["HostConfig"].get("ReadonlyRootfs"):
        unsafe = (*WRITABLE_FOLDERS, str(config.get("WorkingDir") or "/"))
        folders += [folder for folder in given.get("PATH", "").split(":") if _is_safe(folder, unsafe)]
    return {**dict.fromkeys(given, ""), "HOME": "/", "PATH": ":".join(folders)}


def _is_safe(folder: str, unsafe: tuple[str, ...]) -> bool:
    """Return True if an entry of PATH is absolute, and not inside a folder where the sandbox's user can write.

    `unsafe` has these folders.
    """
    path = posixpath.normpath(folder)
    return folder.startswith("/") and not any(path == each or path.startswith(f"{each}/") for each in unsafe)
