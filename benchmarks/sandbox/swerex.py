"""Client of swe-rex for `benchmarks.sandbox.run`, under the same conditions as Flash: same image, engine and limits.

swe-rex's own deployment calls the `docker` command, and installs swe-rex in the container from the network. Here the
container is made over the engine's socket. It has swe-rex's packages mounted read-only with their byte code, and shares
the host's network, so that no published port slows it down. All of that is in swe-rex's favour. Server and client are
swe-rex's own code, as is the wait for the server to answer. The client runs in this process, as ours does.

The packages are installed once under build/swerex, with pinned versions. The container runs them with the Python of the
image, so both must have the same version.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio

from benchmarks.form import ROOT, make_python
from envs.sandbox.api import Spec
from envs.sandbox.engines import profiles
from envs.sandbox.engines.docker import START_S
from envs.sandbox.engines.docker_api import DockerApi
from flash.errors import ConfigError, SandboxStartError

FOLDER = ROOT / "build" / "swerex"
"""Folder of the Python environment of swe-rex."""
SWEREX = "swe-rex 1.4.0"
"""Name and version of the peer."""
PINNED = (
    SWEREX.replace(" ", "=="),
    # Its client needs aiohttp, which it does not ask for; the rest is what it runs on.
    *("aiohttp==3.14.5", "bashlex==0.18", "fastapi==0.165.0", "pexpect==4.9.0", "pydantic==2.14.3"),
    *("python-multipart==0.0.34", "requests==2.34.2", "rich==15.0.0", "starlette==1.10.0", "uvicorn==0.54.0"),
)
"""Packages of its environment."""
MOUNT = "/swerex"
"""Path of the packages in the container."""
ALIVE_S = 60.0
"""Longest wait for a server, in seconds."""


def packages(image_python: str) -> Path:
    """Return the folder of the packages, for a container whose Python has the version `image_python`, such as 3.11.2.

    Raises:
        ConfigError: they were installed for another one.
    """
    # Without the last part of each version: packages fit all releases of 3.11.
    ours, theirs = (version.rpartition(".")[0] for version in (sys.version.split()[0], image_python))
    if ours != theirs:
        raise ConfigError(
            f"swe-rex is installed for Python {ours}, but its server would run with the image's {theirs}; run this "
            f"benchmark with Python {theirs}"
        )
    return FOLDER / "lib" / f"python{ours}" / "site-packages"


def container(spec: Spec, labels: Mapping[str, str], folder: Path, port: int, token: str) -> dict[str, Any]:
    """Return the engine's description of a container like one of ours, whose first process is swe-rex's server.

    The server listens on `port` of the host and demands `token`. `folder` is that of swe-rex's packages.
    """
    config = profiles.container(spec, dict(labels), user=None, owned_tmpfs=False, seccomp=None)
    host = config["HostConfig"]
    assert isinstance(host, dict)
    # With the host's network the name is the host's, too.
    del config["Hostname"]
    command = ["-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    return config | {
        "Entrypoint": ["python3"],
        "Cmd": command,
        "Env": [f"HOME={spec.workdir}", f"PYTHONPATH={MOUNT}", "SWE_REX_LOG_STREAM_LEVEL=ERROR"],
        "OpenStdin": False,
        "AttachStdin": False,
        "NetworkDisabled": False,
        "HostConfig": host | {"NetworkMode": "host", "Binds": [f"{folder}:{MOUNT}:ro"]},
    }


class SweRex:
    """Client of swe-rex on an engine, with one container at a time. `connected` makes it.

    Args:
        api: connection to the engine.
        spec: description of the container.
        labels: labels of the container.
        folder: folder of swe-rex's packages.
    """

    def __init__(self, api: DockerApi, spec: Spec, labels: Mapping[str, str], folder: Path) -> None:
        self._api = api
        self._spec = spec
        self._labels = labels
        self._folder = folder
        self._container = ""
        """Id of the present container; empty before `start` and after `stop`."""
        # Behind all other packages, so that this process keeps its own versions of those that it has.
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        os.environ["SWE_REX_LOG_STREAM_LEVEL"] = "ERROR"  # read at the import
        from swerex.runtime import abstract, remote  # pyright: ignore[reportMissingImports]: it is in `folder`

        self._requests: Any = abstract
        self._connect: Any = remote.RemoteRuntime
        self._server: Any = None
        """Connection to the server in the present container; set by `start`."""

    async def start(self) -> float:
        """Start a container; return the seconds from the request to the result of a first command in it."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port, token = int(probe.getsockname()[1]), uuid4().hex  # no process listens on this port
        config, name = container(self._spec, self._labels, self._folder, port, token), f"swerex-{token}"
        begin = time.perf_counter()
        # A cancelled request may still make the container. Its id would be lost, so that nothing could remove it.
        with anyio.CancelScope(shield=True):
            made = await self._send("POST", "containers/create", data=config, params={"name": name})
            self._container = made["Id"]
        await self._send("POST", f"containers/{self._container}/start")
        self._server = self._connect(port=port, auth_token=token)
        await self._server.wait_until_alive(timeout=ALIVE_S)
        await self.execute()
        return time.perf_counter() - begin

    async def open_session(self) -> None:
        """Start the shell in which `session` runs its commands."""
        await self._server.create_session(self._requests.CreateBashSessionRequest())

    async def session(self) -> None:
        """Run a command in the shell. swe-rex raises an error if it fails."""
        await self._server.run_in_session(self._requests.BashAction(command="true"))

    async def execute(self) -> None:
        """Run a command as a process of its own. swe-rex raises an error if it fails."""
        await self._server.execute(self._requests.Command(command=["true"], check=True))

    async def stop(self) -> None:
        """Remove the container, if there is one."""
        if self._container:
            await self._send("DELETE", f"containers/{self._container}", params={"force": "1", "v": "1"})
            self._container = ""

    async def _send(self, method: str, path: str, **more: Any) -> Any:
        """Send a request to the engine, and return the JSON of its response. Raises SandboxStartError if it fails."""
        return await self._api.json(path, SandboxStartError, method=method, **more)


@asynccontextmanager
async def connected(url: str, spec: Spec, labels: Mapping[str, str], image_python: str) -> AsyncGenerator[SweRex]:
    """Provide swe-rex on the engine at `url` for the time of the block, which ends its container.

    Raises ConfigError if swe-rex's packages are not for `image_python`, the version of the image's Python.
    """
    await anyio.to_thread.run_sync(make_python, FOLDER, PINNED)
    async with DockerApi(url, START_S) as api:
        peer = SweRex(api, spec, labels, packages(image_python))
        try:
            yield peer
        finally:
            with anyio.CancelScope(shield=True):
                await peer.stop()
