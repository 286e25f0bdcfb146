"""The HTTP API, version 1: files and trees.

Trees travel as tar archives. They are unpacked here by `envs.sandbox.trees`, which trusts neither end.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.responses import Response, StreamingResponse

from envs.sandbox.protocol.wire import BINARY, TAR, Listing, PathQuery, ReadQuery, WriteQuery
from envs.sandbox.service.endpoint import ApiCall, Endpoint
from envs.sandbox.text import to_wire
from envs.sandbox.trees import TreeLimits, pack, unpack

_T = TypeVar("_T")

_TO_KEEP = {"content-disposition": "attachment"}
"""A browser saves it, and never shows what came out of a sandbox. Without a name: those come from the sandbox, too."""
_PIECE = 1 << 18
_IN_MEMORY = 1 << 20
"""Bytes of an archive kept in memory; more goes to a temporary file."""


async def _read(call: ApiCall) -> Response:
    query: ReadQuery = call.query
    data = await call.sandbox.read(query.path, offset=query.offset, limit=query.limit)
    return Response(data, media_type=BINARY, headers=_TO_KEEP)


async def _write(call: ApiCall) -> None:
    query: WriteQuery = call.query
    data = await call.request.body()
    await call.sandbox.write(query.path, data, mode=query.mode, append=query.append)


async def _list(call: ApiCall) -> Listing:
    entries = await call.sandbox.list(call.query.path)
    return Listing([msgspec.structs.replace(entry, name=to_wire(entry.name)) for entry in entries])


async def _remove(call: ApiCall) -> None:
    await call.sandbox.remove(call.query.path)


async def _upload(call: ApiCall) -> None:
    sandbox = call.sandbox
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as archive:
        async for piece in call.request.stream():
            await _in_thread(partial(archive.write, piece))
        with tempfile.TemporaryDirectory(prefix="flash-upload-") as folder:
            tree = Path(folder, "tree")
            await _in_thread(partial(_unpack, archive, tree))
            await sandbox.upload(tree, call.query.path)


async def _download(call: ApiCall) -> StreamingResponse:
    archive = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - closed when the answer has been sent
    try:
        with tempfile.TemporaryDirectory(prefix="flash-download-") as folder:
            tree = Path(folder, "tree")
            await call.sandbox.download(call.query.path, tree)
            await _in_thread(partial(_pack, tree, archive))
    except BaseException:
        archive.close()
        raise
    return StreamingResponse(_pieces(archive), media_type=TAR, headers=_TO_KEEP)


async def _pieces(archive: IO[bytes]) -> AsyncGenerator[bytes]:
    with archive:
        while piece := await _in_thread(partial(archive.read, _PIECE)):
            yield piece


def _unpack(archive: IO[bytes], target: Path) -> None:
    archive.seek(0)
    unpack(archive, target, TreeLimits(), what="upload")


def _pack(source: Path, archive: IO[bytes]) -> None:
    pack(source, archive, TreeLimits())
    archive.seek(0)


async def _in_thread(work: partial[_T]) -> _T:
    return await anyio.to_thread.run_sync(work)


_FILES = "/v1/sandboxes/{id}/files"
_TREE = "/v1/sandboxes/{id}/tree"

ENDPOINTS = (
    Endpoint(method="GET", path=_FILES, summary="Bytes of a file.", handler=_read, query=ReadQuery, answer=BINARY),
    Endpoint(
        method="PUT",
        path=_FILES,
        summary="Replace a file in one step, or append to it.",
        handler=_write,
        query=WriteQuery,
        body=BINARY,
        status=204,
    ),
    Endpoint(
        method="DELETE", path=_FILES, summary="Remove a file or a folder.", handler=_remove, query=PathQuery, status=204
    ),
    Endpoint(
        method="GET",
        path="/v1/sandboxes/{id}/entries",
        summary="The entries of a folder.",
        handler=_list,
        query=PathQuery,
        answer=Listing,
    ),
    Endpoint(
        method="PUT",
        path=_TREE,
        summary="Copy a tree, or one file, into the sandbox: a tar archive.",
        handler=_upload,
        query=PathQuery,
        body=TAR,
        status=204,
    ),
    Endpoint(
        method="GET",
        path=_TREE,
        summary="A tree, or one file, as a tar archive.",
        handler=_download,
        query=PathQuery,
        answer=TAR,
    ),
)
