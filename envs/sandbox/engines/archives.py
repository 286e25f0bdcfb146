"""Tar archives for an engine: how files get into a container that does not run, and into an image."""

from __future__ import annotations

import tarfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio


def folder_in_tar(name: str, owner: int) -> bytes:
    """A tar archive with one folder."""
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.uid, header.gid = tarfile.DIRTYPE, 0o755, owner, owner
    return header.tobuf() + b"\0" * 1024


async def pieces_of(path: Path) -> AsyncIterator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        while piece := await file.read(1 << 18):
            yield piece


@asynccontextmanager
async def in_tar(name: str, pieces: AsyncIterator[bytes]) -> AsyncGenerator[AsyncIterator[bytes]]:
    """A tar archive with one file. Its size stands before it, so it is gathered on disk first.

    When the block begins all of it is there: what fails on the way is not taken for a failure of the engine.
    """
    async with anyio.SpooledTemporaryFile[bytes](max_size=1 << 20) as spool:
        size = 0
        async for piece in pieces:
            size += await spool.write(piece)
        await spool.seek(0)

        async def archive() -> AsyncIterator[bytes]:
            header = tarfile.TarInfo(name)
            header.size, header.mode = size, 0o444
            yield header.tobuf()
            while piece := await spool.read(1 << 18):
                yield piece
            yield b"\0" * (-size % 512 + 1024)

        yield archive()
