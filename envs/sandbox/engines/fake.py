"""FakeBackend: sandboxes as local processes without any isolation, for tests on machines without an engine.

The same agent runs as in a container, as a child process in a temporary folder that stands for the working directory;
only relative paths lead there. Images are folders of files: any name exists, and a snapshot adds a new one. Killing or
deleting a container kills its agent and every process that descends from it.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import Self

import anyio
import msgspec
from anyio.abc import Process

from envs.sandbox.agent.files import remove
from envs.sandbox.api import Spec
from envs.sandbox.engines import bundle
from envs.sandbox.engines.backend import ContainerInfo, EngineInfo, Surroundings
from envs.sandbox.engines.machine import LayerUse
from flash.errors import SandboxLostError, SandboxStartError

_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
"""PATH of commands: this process's Python comes first, because the agent needs one."""
RUNTIME = "none"
"""Name of the only runtime: commands run without one."""
_WAIT_SECONDS = 10.0
"""Seconds to wait for the end of a killed process."""
_DROP_SECONDS = 0.01
"""Seconds after the end of a process in which the event loop drops its buffers."""


class EngineFaults(msgspec.Struct):
    """Faults to inject. Tests change them while containers run."""

    create: Exception | None = None
    """Error that `create` raises; None: it works."""
    start: Exception | None = None
    """Error that `start` raises; None: it works."""
    delete: Exception | None = None
    """Error that `delete` raises; None: it works."""
    start_delay: float = 0.0
    """Seconds that `start` waits first."""
    create_delay: float = 0.0
    """Seconds that `create` waits first."""
    delete_delay: float = 0.0
    """Seconds that `delete` waits first."""


class FakeContainer:
    """A process that stands for a container."""

    def __init__(self, container_id: str, name: str, spec: Spec, labels: Mapping[str, str], folder: Path) -> None:
        """Describe a container whose process was not started. `name` is the one that the caller of `create` chose."""
        self.container_id = container_id
        self.name = name
        self.spec = spec
        self.labels = dict(labels)
        """Labels of the container, with those of its image."""
        self.folder = folder
        """Folder that stands for the working directory."""
        self.process: Process | None = None
        """Process of the agent; None before `start`."""
        self.killed = False
        """True after `kill`. The container counts as ended at once, though its process may take a moment to end."""

    def info(self, *, runtime: bool = False) -> ContainerInfo:
        """Return the state of the container, as an engine would report it. `runtime` adds the name of the runtime."""
        code = None if self.process is None else self.process.returncode
        code = -signal.SIGKILL if code is None and self.killed else code
        running = self.process is not None and code is None
        if code is not None and code < 0:
            code = 128 - code  # Engines add the number of the signal to 128.
        name = RUNTIME if runtime else ""
        return ContainerInfo(self.container_id, self.name, running, self.labels, exit_code=code, runtime=name)


class _ProcessLink:
    """Standard input and output of a local process, as a `Link`."""

    def __init__(self, process: Process) -> None:
        """Use the streams of `process`, which was started with pipes."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.transcript = b""
        """Empty: the process writes its errors to this process's standard error."""
        self._input = process.stdin
        self._output = process.stdout

    async def send(self, data: bytes) -> None:
        """Send all of `data`. Raises SandboxLostError if the process is gone."""
        try:
            await self._input.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise SandboxLostError("the agent's process is gone") from error

    async def receive(self) -> bytes:
        """Return the next bytes; empty once the process is gone."""
        try:
            return await self._output.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return b""

    async def aclose(self) -> None:
        """Close the input of the process, at whose end the agent ends."""
        await self._input.aclose()


class FakeImages:
    """Folders of files that stand for images: any name exists, snapshots are kept."""

    def __init__(self, folder: Path) -> None:
        """Begin without images. `folder` is where their folders are made."""
        self.kept: dict[str, tuple[Path, Mapping[str, str]]] = {}
        """Snapshots and images that were made, by name. One that is still here at the end of a test is a leak."""
        self._folder = folder

    async def commit(
        self, container_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None, most: int
    ) -> int:
        """Unpack the files into a folder that stands for the image, and return the bytes of their archive.

        Without `files` the image is empty. `most` has no effect.
        """
        folder = self._folder / f"image-{len(self.kept)}-{name.replace('/', '-').replace(':', '-')}"
        folder.mkdir()
        content = io.BytesIO()
        if files is not None:
            async for piece in files:
                content.write(piece)
            content.seek(0)
            with tarfile.open(fileobj=content) as archive:
                archive.extractall(folder, filter="tar")
        self.kept[name] = (folder, dict(labels))
        return content.getbuffer().nbytes

    async def make(self, archive: Path, name: str) -> None:
        """Record an empty image of this name. The archive is not read."""
        folder = self._folder / f"image-{len(self.kept)}"
        folder.mkdir()
        self.kept[name] = (folder, {})

    async def list(self, labels: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        """Return the labels of the images that have `labels`, by the image's name."""
        return {name: found for name, (_, found) in self.kept.items() if _match(found, labels)}

    async def remove(self, name: str) -> None:
        """Remove an image and its folder. Does nothing if it is unknown."""
        folder, _ = self.kept.pop(name, (None, None))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class FakeContainers:
    """Processes that stand for containers. `faults` are injected into their operations."""

    def __init__(self, folder: Path, images: FakeImages, faults: EngineFaults) -> None:
        """Begin without containers. `folder` is where their folders are made; `images` has the files of snapshots."""
        self.kept: dict[str, FakeContainer] = {}
        """Containers that exist, by id. One that is still here at the end of a test is a leak."""
        self._folder = folder
        self._images = images
        self._faults = faults
        self._numbers = 0
        """Number of containers so far."""

    def known(self, container_id: str) -> FakeContainer:
        """Return a container.

        Raises:
            SandboxLostError: there is no such container.
        """
        if container_id not in self.kept:
            raise SandboxLostError(f"there is no container {container_id}")
        return self.kept[container_id]

    async def create(self, spec: Spec, *, name: str, labels: Mapping[str, str]) -> str:
        """Create a container with a folder, which gets the files of its image if that is a snapshot.

        Waits and raises as `faults` says.
        """
        await anyio.sleep(self._faults.create_delay)
        if self._faults.create is not None:
            raise self._faults.create
        self._numbers += 1
        container_id = f"fake-{self._numbers}"
        folder = self._folder / container_id
        image = self._images.kept.get(spec.image)
        if image is not None:
            shutil.copytree(image[0], folder, symlinks=True)
        else:
            folder.mkdir()
        # Real engines also merge the labels of the image into those of the container.
        self.kept[container_id] = FakeContainer(
            container_id, name, spec, {**(image[1] if image else {}), **labels}, folder
        )
        return container_id

    async def start(self, container_id: str) -> None:
        """Start the agent as a process in the container's folder. Waits and raises as `faults` says.

        Raises SandboxLostError if there is no such container.
        """
        await anyio.sleep(self._faults.start_delay)
        if self._faults.start is not None:
            raise self._faults.start
        container = self.known(container_id)
        env = {"PATH": _PATH, "HOME": str(container.folder), **container.spec.env}
        # Shielded: a cancelled start would leave a process that no container refers to.
        with anyio.CancelScope(shield=True):
            container.process = await anyio.open_process(
                bundle.command(),
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                cwd=container.folder,
                env=env,
                start_new_session=True,
            )

    async def inspect(self, container_id: str, *, runtime: bool = False, surely: bool = False) -> ContainerInfo | None:
        """Return the state of a container, given by id or name; None if there is none. `surely` has no effect."""
        container = self.kept.get(container_id) or next((b for b in self.kept.values() if b.name == container_id), None)
        return None if container is None else container.info(runtime=runtime)

    async def layer(self, container_id: str, most: LayerUse, *, holes: bool = False) -> LayerUse:
        """Return an empty measurement: nothing is limited here."""
        return LayerUse()

    async def list(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        """Return all containers with these labels, running or not."""
        return [container.info() for container in self.kept.values() if _match(container.labels, labels)]

    async def kill(self, container_id: str) -> None:
        """Kill the agent and its descendants, as if the kernel had killed every process of the container.

        Does nothing if it does not run. Raises SandboxLostError if there is no such container.
        """
        process = self.known(container_id).process
        if process is not None and process.returncode is None:
            self.known(container_id).killed = True
            # The agent is killed first, so that it cannot report the death of a command.
            pids = [process.pid, *_descendants(process.pid)]
            for pid in pids:
                _kill(pid)

    async def delete(self, container_id: str) -> None:
        """Kill and remove a container, given by id or name. Raises the injected fault, if there is one."""
        await anyio.sleep(self._faults.delete_delay)
        if self._faults.delete is not None:
            raise self._faults.delete
        container = await self.inspect(container_id)
        if container is not None:
            await self._remove(container.container_id)

    async def _remove(self, container_id: str) -> None:
        """Kill the processes of a container, wait for their end, and remove its folder."""
        await self.kill(container_id)
        container = self.kept.pop(container_id)
        if container.process is not None:
            with anyio.move_on_after(_WAIT_SECONDS):
                await container.process.aclose()
            # Buffers for the process are dropped in the next turns of the loop. Without this wait, the garbage
            # collector warns about them.
            await anyio.sleep(_DROP_SECONDS)
        with suppress(OSError):
            remove(str(container.folder))  # Not `rmtree`, which fails on a very deep tree.


class FakeAgents:
    """Connections to the agents, which are these processes."""

    def __init__(self, containers: FakeContainers, prelude: str) -> None:
        """Connect to the processes of `containers`."""
        self._containers = containers
        self.prelude = prelude
        """Source code that runs in each agent before its own."""

    def surroundings(self, container_id: str, spec: Spec) -> Surroundings:
        """Return the container's folder as the working directory. No host process can take over (no address)."""
        return Surroundings(str(self._containers.known(container_id).folder), files_apart=True, prelude=self.prelude)

    @asynccontextmanager
    async def attach(self, container_id: str) -> AsyncGenerator[_ProcessLink]:
        """Connect to the standard streams of the agent's process for the time of the block.

        Raises SandboxStartError if the container was not started, and SandboxLostError if it does not exist.
        """
        process = self._containers.known(container_id).process
        if process is None:
            raise SandboxStartError(f"{container_id} was not started")
        link = _ProcessLink(process)
        try:
            yield link
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()

    @asynccontextmanager
    async def take_over(self, container_id: str) -> AsyncGenerator[_ProcessLink]:
        """Raise SandboxLostError: the agent of a local process ends with its host."""
        raise SandboxLostError("a local process ends with its host and cannot be taken over")
        yield  # Makes this function a generator, as the decorator needs.


class FakeBackend:
    """Backend of local processes. An asynchronous context manager, which deletes all containers at its end."""

    def __init__(self, *, prelude: str = "") -> None:
        """Create a backend with a temporary folder. `prelude` is source code that runs in each agent before its own."""
        self.faults = EngineFaults()
        """Faults that tests inject."""
        self.folder = Path(tempfile.mkdtemp(prefix="flash-fake-"))
        """Temporary folder with the folders of containers and images."""
        self.images = FakeImages(self.folder)
        self.containers = FakeContainers(self.folder, self.images, self.faults)
        self.agents = FakeAgents(self.containers, prelude)

    async def __aenter__(self) -> Self:
        """Enter the block. The folder exists since the creation."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete all containers, whatever faults are injected, and the folder."""
        self.faults.delete = None
        with anyio.CancelScope(shield=True):
            for container_id in list(self.containers.kept):
                await self.containers.delete(container_id)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def info(self) -> EngineInfo:
        """Return the properties of this machine, without isolation."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return EngineInfo(
            name="fake",
            address="this process",
            isolated=False,
            runtimes=(RUNTIME,),
            default_runtime=RUNTIME,
            cpus=os.cpu_count() or 1,
            memory=memory,
            here=True,
        )


def _match(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return True if `labels` has all wanted ones. An empty value matches any value."""
    return all(name in labels and value in ("", labels[name]) for name, value in wanted.items())


def _kill(pid: int) -> None:
    """Kill a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    """Return all descendants of a process. Orphans are among them, because the agent adopts them."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_bytes()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(b")")[2].split()[1])
    inside = {root}
    while grown := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= grown
    return sorted(inside - {root})
