"""A Podman engine of its own for the fault run, and the processes that belong to it, as /proc shows them.

Its service can be killed and started again on the same root. What an engine has forgotten it does not list: a `conmon`
or an agent that outlives its container is found here by the engine's folder, which its command line or the mount of its
root names. Needs Debian's `podman` and `runc`, and root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import httpx
import msgspec

from benchmarks.sandbox.engine import IMAGE, ensure_image
from envs.sandbox.engines.docker import open_engine

ANSWER_S = 60.0
"""Seconds for a service that was started to answer."""
TIDY_S = 120.0
"""Seconds for one command of Podman."""
EXEC_DELAY_S = 0
"""Seconds for which the `conmon` of an exec stays when that has ended. Podman's default of 300 s would look like a leak
of one process for each reconnection."""

Kind = Literal["agent", "conmon", "exec conmon", "runtime", "inside", "engine"]


class Process(msgspec.Struct, frozen=True):
    """One process of an engine."""

    pid: int
    kind: Kind
    """`agent`: the first process of a container; `inside`: another one in there; `engine`: Podman itself."""
    name: str
    """Of the container, where the command line tells it."""
    command: str


class PodmanEngine:
    """See the module. `async with PodmanEngine(...)`; `url` is what DOCKER_HOST would be."""

    def __init__(self, names: Sequence[str] = (IMAGE,)) -> None:
        """`names`: of the images to make."""
        self._names = names
        self.folder = Path(tempfile.mkdtemp(prefix="flash-faults.", dir="/var/tmp"))
        self._socket = self.folder / "podman.sock"
        self.url = f"unix://{self._socket}"
        self._options: list[str] = []
        self._service: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> PodmanEngine:
        try:
            self._options = await anyio.to_thread.run_sync(self._choose_options)
            await self.start()
            await self._make_images()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._remove)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._remove)

    def _choose_options(self) -> list[str]:
        folder = self.folder
        config = folder / "containers.conf"
        config.write_text(f"[engine]\nexit_command_delay = {EXEC_DELAY_S}\n")
        options = ["--root", f"{folder}/root", "--runroot", f"{folder}/run", "--cgroup-manager", "cgroupfs"]
        options += ["--runtime", "runc", "--events-backend", "file", "--storage-driver"]
        # Overlay does not work on every file system, for instance on top of another overlay.
        if self._podman([*options, "overlay"], "info").returncode == 0:
            return [*options, "overlay"]
        for name in ("root", "run"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return [*options, "vfs"]

    async def start(self) -> None:
        """Start the service, and wait until it answers."""
        self._socket.unlink(missing_ok=True)
        with (self.folder / "podman.log").open("ab") as log:
            self._service = subprocess.Popen(  # noqa: ASYNC220  # starting it does not wait
                ["podman", *self._options, "system", "service", "--time=0", self.url],
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self.folder,
            )
        with anyio.fail_after(ANSWER_S):
            while not await self._answers():  # noqa: ASYNC110  # nothing tells when the socket is there
                await anyio.sleep(0.02)

    def kill(self) -> None:
        """`kill -9` of the service; its containers live on."""
        if self._service is not None:
            self._service.send_signal(signal.SIGKILL)
            self._service.wait()
            self._service = None

    def processes(self) -> list[Process]:
        """Everything of this engine except its service."""
        service = self._service.pid if self._service is not None else 0
        return [each for each in find_processes(self.folder.name) if each.pid not in (service, os.getpid())]

    def external(self) -> list[str]:
        """Names of containers that the engine's storage has and the engine itself does not know."""
        listed = self._podman(self._options, "ps", "--all", "--external", "--format", "{{.Names}} {{.Status}}")
        lines = listed.stdout.decode().splitlines()
        return [line.split()[0] for line in lines if line.split()[-1:] == ["Storage"]]

    async def _answers(self) -> bool:
        # Nothing more: for its version, Podman asks the package manager.
        try:
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(self._socket))) as client:
                return (await client.get("http://engine/_ping", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _make_images(self) -> None:
        async with open_engine(self.url) as backend:
            for name in self._names:
                await ensure_image(backend.images, name)

    def _environment(self) -> dict[str, str]:
        # Podman leaves a copy of each imported image in its folder for temporary files.
        extra = {"TMPDIR": str(self.folder), "CONTAINERS_CONF": str(self.folder / "containers.conf")}
        return {**os.environ, **extra}

    def _podman(self, options: Sequence[str], *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["podman", *options, *words], capture_output=True, env=self._environment(), timeout=TIDY_S, check=False
        )

    def _remove(self) -> None:
        """Leave nothing: containers, processes, mounts and files."""
        if self._options:
            self._podman(self._options, "rm", "--all", "--force", "--time", "0")
        self.kill()
        for each in find_processes(self.folder.name):
            if each.pid != os.getpid():
                send_kill(each.pid)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((each for each in mounts if each.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def find_processes(folder: str) -> list[Process]:
    """The processes of the engine whose folder has this name."""
    found: list[Process] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                process = _classify(Path(entry.path), folder)
            except OSError:
                continue  # It has ended meanwhile.
            if process is not None:
                found.append(process)
    return found


def _classify(proc: Path, folder: str) -> Process | None:
    words = (proc / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    command = " ".join(words).strip()
    pid = int(proc.name)
    if not command:
        return None
    if folder in command:
        kinds: dict[str, Kind] = {"conmon": "conmon", "runc": "runtime", "podman": "engine"}
        kind = kinds.get(Path(words[0]).name)
        if kind is None:
            return None
        if kind == "conmon" and ("-e" in words or "--exec-attach" in words):
            kind = "exec conmon"
        name = words[words.index("-n") + 1] if "-n" in words[:-1] else ""
        return Process(pid, kind, name, command[:200])
    root = next((line for line in (proc / "mountinfo").read_text().splitlines() if line.split()[4] == "/"), "")
    if folder not in root:
        return None
    inner = next(line for line in (proc / "status").read_text().splitlines() if line.startswith("NSpid:"))
    return Process(pid, "agent" if inner.split()[-1] == "1" else "inside", "", command[:200])


def send_kill(pid: int) -> bool:
    """`kill -9`; False when it has ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
