"""FakeBackend: sandboxes that are local processes, without any isolation. For tests and for machines without an engine.

The same agent runs as in a container, as a child process in a temporary folder that stands for the working directory;
only relative paths lead there. Images are folders of files: any name exists, `snapshot` adds new ones. Killing and
deleting a box kill every process that comes from its agent.
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

from envs.sandbox.api import Spec
from envs.sandbox.engines import bundle
from envs.sandbox.engines.backend import BoxInfo, BoxStats, EngineInfo, Surroundings
from flash.errors import SandboxLostError, SandboxStartError

_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
_WAIT_SECONDS = 10.0


class Faults(msgspec.Struct):
    """What is to go wrong. Tests change it while boxes run."""

    create: Exception | None = None
    start: Exception | None = None
    delete: Exception | None = None
    start_delay: float = 0.0
    create_delay: float = 0.0


class _Box:
    def __init__(self, box_id: str, name: str, spec: Spec, labels: Mapping[str, str], folder: Path) -> None:
        self.box_id = box_id
        self.name = name
        self.spec = spec
        self.labels = dict(labels)
        self.folder = folder
        self.process: Process | None = None

    def info(self) -> BoxInfo:
        code = None if self.process is None else self.process.returncode
        running = self.process is not None and code is None
        return BoxInfo(self.box_id, self.name, running, self.labels, exit_code=code, runtime="none", layer_size=0)


class _ProcessLink:
    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.said = b""
        self._input = process.stdin
        self._output = process.stdout

    async def send(self, data: bytes) -> None:
        try:
            await self._input.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise SandboxLostError("the agent's process is gone") from error

    async def receive(self) -> bytes:
        try:
            return await self._output.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return b""

    async def aclose(self) -> None:
        await self._input.aclose()


class FakeBackend:
    """See the module.

    Args:
        prelude: source that runs in each agent before its own.
    """

    def __init__(self, *, prelude: str = "") -> None:
        self.prelude = prelude
        self.faults = Faults()
        self.boxes: dict[str, _Box] = {}
        """What exists, by id: a test that ends with one in here has a leak."""
        self.images: dict[str, tuple[Path, Mapping[str, str]]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="flash-fake-"))
        self._numbers = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            for box_id in list(self.boxes):
                await self._remove(box_id)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def info(self) -> EngineInfo:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return EngineInfo("fake", False, ("none",), "none", os.cpu_count() or 1, memory, here=True)

    async def create(self, spec: Spec, *, name: str, labels: Mapping[str, str]) -> str:
        await anyio.sleep(self.faults.create_delay)
        if self.faults.create is not None:
            raise self.faults.create
        self._numbers += 1
        box_id = f"fake-{self._numbers}"
        folder = self._folder / box_id
        image = self.images.get(spec.image)
        if image is not None:
            shutil.copytree(image[0], folder, symlinks=True)
        else:
            folder.mkdir()
        # As engines do, with the labels of the image.
        self.boxes[box_id] = _Box(box_id, name, spec, {**(image[1] if image else {}), **labels}, folder)
        return box_id

    async def start(self, box_id: str) -> None:
        await anyio.sleep(self.faults.start_delay)
        if self.faults.start is not None:
            raise self.faults.start
        box = self._box(box_id)
        env = {"PATH": _PATH, "HOME": str(box.folder), **box.spec.env}
        # Cancelled half-way, it would leave a process that nobody knows.
        with anyio.CancelScope(shield=True):
            box.process = await anyio.open_process(
                bundle.command(), stdin=PIPE, stdout=PIPE, stderr=None, cwd=box.folder, env=env, start_new_session=True
            )

    @asynccontextmanager
    async def attach(self, box_id: str) -> AsyncGenerator[_ProcessLink]:
        process = self._box(box_id).process
        if process is None:
            raise SandboxStartError(f"{box_id} was not started")
        link = _ProcessLink(process)
        try:
            yield link
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()

    @asynccontextmanager
    async def take_over(self, box_id: str) -> AsyncGenerator[_ProcessLink]:
        raise SandboxLostError("a local process ends with its host and cannot be taken over")
        yield

    def surroundings(self, box_id: str, spec: Spec) -> Surroundings:
        return Surroundings(str(self._box(box_id).folder), files_apart=True, prelude=self.prelude)

    async def inspect(self, box_id: str, *, runtime: bool = False, size: bool = False) -> BoxInfo | None:
        box = self.boxes.get(box_id) or next((b for b in self.boxes.values() if b.name == box_id), None)
        return None if box is None else box.info()

    async def list(self, labels: Mapping[str, str]) -> list[BoxInfo]:
        return [box.info() for box in self.boxes.values() if _match(box.labels, labels)]

    async def stats(self, box_id: str) -> BoxStats:
        process = self._box(box_id).process
        assert process is not None
        return BoxStats(0.0, 0, 1 + len(_descendants(process.pid)))

    async def kill(self, box_id: str) -> None:
        """As if the kernel had killed everything in it."""
        process = self._box(box_id).process
        if process is not None and process.returncode is None:
            # The agent first, so that it cannot report the death of a command.
            pids = [process.pid, *_descendants(process.pid)]
            for pid in pids:
                _kill(pid)

    async def delete(self, box_id: str) -> None:
        if self.faults.delete is not None:
            raise self.faults.delete
        box = await self.inspect(box_id)
        if box is not None:
            await self._remove(box.box_id)

    async def _remove(self, box_id: str) -> None:
        await self.kill(box_id)
        box = self.boxes.pop(box_id)
        if box.process is not None:
            with anyio.move_on_after(_WAIT_SECONDS):
                await box.process.aclose()
        shutil.rmtree(box.folder, ignore_errors=True)

    async def commit(
        self, box_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None
    ) -> int:
        folder = self._folder / f"image-{len(self.images)}-{name.replace('/', '-').replace(':', '-')}"
        folder.mkdir()
        content = io.BytesIO()
        if files is not None:
            async for piece in files:
                content.write(piece)
            content.seek(0)
            with tarfile.open(fileobj=content) as archive:
                archive.extractall(folder, filter="tar")
        self.images[name] = (folder, dict(labels))
        return content.tell()

    async def import_image(self, archive: Path, name: str) -> None:
        folder = self._folder / f"image-{len(self.images)}"
        folder.mkdir()
        self.images[name] = (folder, {})

    async def list_images(self, labels: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        return {name: found for name, (_, found) in self.images.items() if _match(found, labels)}

    async def remove_image(self, name: str) -> None:
        folder, _ = self.images.pop(name, (None, None))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _box(self, box_id: str) -> _Box:
        if box_id not in self.boxes:
            raise SandboxLostError(f"there is no container {box_id}")
        return self.boxes[box_id]


def _match(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(name in labels and value in ("", labels[name]) for name, value in wanted.items())


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    """Everything that comes from a process; its agent adopts what loses its parent."""
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
