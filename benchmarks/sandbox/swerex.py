"""Client of swe-rex for `benchmarks.sandbox.run`, under the same conditions as Flash: same image, engine and limits.

swe-rex's own deployment calls the `docker` command, and installs swe-rex in the container from the network. Here the
container is made over the engine's socket. It has swe-rex's packages mounted read-only with their byte code, and shares
the host's network, so that no published port slows it down. All of that is in swe-rex's favour. Server and client are
swe-rex's own code, as is the wait for the server to answer.

The Python environment is made once under build/swerex, with pinned versions. The container runs its packages with the
Python of the image, so both must have the same version.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiodocker
import aiohttp
import anyio
import msgspec
from aiodocker.containers import DockerContainer
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks.form import ROOT, make_python
from envs.sandbox.api import Spec
from envs.sandbox.engines import profiles
from flash.errors import ConfigError

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
INSTALL_S = 900
"""Longest wait for pip, in seconds."""
MOUNT = "/swerex"
"""Path of the packages in the container."""
ANSWER_S = 120.0
"""Longest wait for the client, in seconds; its slowest answer is a start on a loaded machine."""
LONGEST_ANSWER = 1 << 20
"""Most bytes of an answer."""


def python() -> Path:
    """Return the environment's Python; make the environment first, unless it exists with these packages.

    Raises:
        subprocess.CalledProcessError: pip could not install it; its output was shown.
        subprocess.TimeoutExpired: pip took longer than INSTALL_S.
    """

    def install(executable: Path) -> None:
        """Install the packages into the new environment."""
        command = [executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *PINNED]
        subprocess.run(command, check=True, timeout=INSTALL_S)

    return make_python(FOLDER, [*PINNED, sys.version.split()[0]], install)


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
            f"benchmark with Python {theirs}, or without swe-rex: `--without-swerex`"
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
        docker: connection to the engine.
        client: process of `benchmarks.sandbox.swerex_runner`, which runs swe-rex's own client.
        spec: description of the container.
        labels: labels of the container.
        folder: folder of swe-rex's packages.
    """

    def __init__(
        self, docker: aiodocker.Docker, client: Process, spec: Spec, labels: Mapping[str, str], folder: Path
    ) -> None:
        assert client.stdout is not None
        self._docker = docker
        self._client = client
        self._answers = BufferedByteReceiveStream(client.stdout)
        self._spec = spec
        self._labels = labels
        self._folder = folder
        self._container: DockerContainer | None = None
        """The present container; None before `start` and after `stop`."""

    async def start(self) -> float:
        """Start a container; return the seconds from the request to the result of a first command in it."""
        port, token = _free_port(), uuid4().hex
        config = container(self._spec, self._labels, self._folder, port, token)
        begin = time.perf_counter()
        # A cancelled request may still make the container. Its id would be lost, so that nothing could remove it.
        with anyio.CancelScope(shield=True):
            self._container = await self._docker.containers.create(config, name=f"swerex-{token}")
        assert self._container is not None
        await self._container.start()
        await self._ask("connect", port=port, token=token)
        return time.perf_counter() - begin

    async def open_session(self) -> None:
        """Start the shell in which `session` runs its commands."""
        await self._ask("open_session")

    async def session(self, count: int) -> list[float]:
        """Return the seconds of each of `count` commands in the shell."""
        return await self._ask("session", count=count)

    async def execute(self, count: int) -> list[float]:
        """Return the seconds of each of `count` commands, each a process of its own."""
        return await self._ask("execute", count=count)

    async def stop(self) -> None:
        """Remove the container, if there is one."""
        if self._container is not None:
            await self._container.delete(force=True, v=True)
            self._container = None

    async def _ask(self, do: str, **arguments: object) -> list[float]:
        """Send a request to the client process, and return the seconds that it measured.

        `do` is a method of `benchmarks.sandbox.swerex_runner.Client`, and `arguments` are its arguments. Raises
        RuntimeError if the process has ended, and TimeoutError after ANSWER_S.
        """
        assert self._client.stdin is not None
        with anyio.fail_after(ANSWER_S):
            try:
                await self._client.stdin.send(msgspec.json.encode({"do": do, **arguments}) + b"\n")
                line = await self._answers.receive_until(b"\n", LONGEST_ANSWER)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                raise RuntimeError("swe-rex's client ended without an answer; see its output above") from None
        return msgspec.json.decode(line, type=list[float])


@asynccontextmanager
async def connected(url: str, spec: Spec, labels: Mapping[str, str], image_python: str) -> AsyncGenerator[SweRex]:
    """Provide swe-rex on the engine at `url` for the time of the block, which ends its container and its client.

    Raises ConfigError if swe-rex's packages are not for `image_python`, the version of the image's Python.
    """
    executable = await anyio.to_thread.run_sync(python)
    folder = packages(image_python)
    path = url.removeprefix("unix://")
    connector = aiohttp.UnixConnector(path, limit=0) if path != url else aiohttp.TCPConnector(limit=0)
    base = "http://localhost" if path != url else url.replace("tcp://", "http://")
    async with await anyio.open_process(
        [str(executable), "-m", "benchmarks.sandbox.swerex_runner"],
        stderr=None,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SWE_REX_LOG_STREAM_LEVEL": "ERROR"},
        # ctrl-C is ours to handle.
        start_new_session=True,
    ) as client:
        docker = aiodocker.Docker(url=base, connector=connector)
        peer = SweRex(docker, client, spec, labels, folder)
        try:
            yield peer
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):
                    client.kill()
                await peer.stop()
                await docker.close()
                await connector.close()


def _free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
