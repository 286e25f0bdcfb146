"""Parts of `envs.sandbox.engines.docker`: the link to a container, errors of the engine as ours, archives for it."""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import aiohttp
import anyio
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from flash.errors import SandboxError, SandboxLostError, SandboxRefusedError, SandboxTimeoutError

STDOUT = 1
"""Number of the stream in the engine's messages."""
TRANSCRIPT_BYTES = 2000
"""Kept of what the first process of a sandbox complains of."""
NOT_HTTP = 900
"""From here on a status is aiodocker's own: the engine cannot be reached."""


class AttachedLink:
    """The attached standard streams of a process of a container."""

    def __init__(self, stream: Stream, container_id: str) -> None:
        self._stream = stream
        self._container_id = container_id
        self.transcript = b""

    async def send(self, data: bytes) -> None:
        try:
            # Writes everything to the transport before it waits: cancelled or not, a frame is never torn.
            await self._stream.write_in(data)
        except (OSError, RuntimeError, AssertionError, aiohttp.ClientError) as error:
            raise SandboxLostError(f"the link to container {self._container_id[:12]} broke: {error}") from error

    async def receive(self) -> bytes:
        try:
            # What a shell or Python complains of is no part of what the agent says.
            while (message := await self._stream.read_out()) is not None and message.stream != STDOUT:
                self.transcript = (self.transcript + message.data)[-TRANSCRIPT_BYTES:]
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            raise SandboxLostError(f"the link to container {self._container_id[:12]} broke: {error}") from error
        return b"" if message is None else message.data

    async def aclose(self) -> None:
        with suppress(OSError, RuntimeError, AssertionError, aiohttp.ClientError):
            await self._stream.close()


class Failing:
    """Turns failures of a request into the error that it stands for."""

    def __init__(self, error: type[SandboxError], what: str, url: str) -> None:
        self._error = error
        self._what = what
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SandboxError):
            return
        if isinstance(error, DockerError) and error.status < NOT_HTTP:
            refused = SandboxRefusedError if error.status == 400 else self._error
            raise refused(f"the engine refused {self._what}: {error.message}") from error
        if isinstance(error, TimeoutError):
            raise SandboxTimeoutError(f"the engine at {self._url} did not answer {self._what} in time") from error
        if isinstance(error, (OSError, RuntimeError, aiohttp.ClientError, DockerError)):
            raise self._error(f"the engine at {self._url} cannot be reached for {self._what}: {error}") from error


def folder_in_tar(name: str, owner: int) -> bytes:
    """A tar archive with one folder."""
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.uid, header.gid = tarfile.DIRTYPE, 0o755, owner, owner
    return header.tobuf() + b"\0" * 1024


async def pieces_of(path: Path) -> AsyncIterator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        while piece := await file.read(1 << 18):
            yield piece


async def in_tar(name: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A tar archive with one file. Its size stands before it, so it is gathered on disk first."""
    async with anyio.SpooledTemporaryFile[bytes](max_size=1 << 20) as spool:
        size = 0
        async for piece in pieces:
            size += await spool.write(piece)
        await spool.seek(0)
        header = tarfile.TarInfo(name)
        header.size, header.mode = size, 0o444
        yield header.tobuf()
        while piece := await spool.read(1 << 18):
            yield piece
        yield b"\0" * (-size % 512 + 1024)
