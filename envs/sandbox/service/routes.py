"""The HTTP API, version 1: leases, snapshots, forks, files and the status. Commands are in `routes_commands`.

Trees travel as tar archives. They are unpacked here by `envs.sandbox.trees`, which trusts neither end.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import IO, TypeVar, cast

import anyio
import anyio.to_thread
import msgspec
from starlette.responses import Response, StreamingResponse

from envs.sandbox.api import Snapshot
from envs.sandbox.protocol.wire import (
    BINARY,
    TAR,
    Fork,
    Info,
    Listing,
    PathQuery,
    ReadQuery,
    SandboxList,
    SandboxOrder,
    SnapshotInfo,
    SnapshotList,
    Status,
    StatusQuery,
    WaitQuery,
    WriteQuery,
)
from envs.sandbox.service.endpoint import ApiCall, Endpoints, once
from envs.sandbox.text import to_wire
from envs.sandbox.trees import TreeLimits, pack, unpack

_T = TypeVar("_T")

_TO_KEEP = {"content-disposition": "attachment"}
"""A browser saves it, and never shows what came out of a sandbox. Without a name: those come from the sandbox, too."""
_PIECE = 1 << 18
_IN_MEMORY = 1 << 20
"""Bytes of an archive kept in memory; more goes to a temporary file."""
STATUS_EVERY_S = 0.2
"""Least time between two answers of a status that is waited for."""


ENDPOINTS = Endpoints()

_SANDBOX = "/v1/sandboxes/{id}"
_FILES = "/v1/sandboxes/{id}/files"
_TREE = "/v1/sandboxes/{id}/tree"


@ENDPOINTS.add("POST", "/v1/sandboxes", body=SandboxOrder, query=WaitQuery, status=201, keyed=True)
async def _order(call: ApiCall) -> Info:
    """Ask for a sandbox. `wait` holds the answer back until it is ready; otherwise ask again by its id."""
    lease = call.service.order(call.body, call.token, call.key)
    with anyio.move_on_after(call.query.wait):
        await lease.settled()
    return call.service.info(lease)


@ENDPOINTS.add("GET", "/v1/sandboxes")
async def _list(call: ApiCall) -> SandboxList:
    """Your sandboxes."""
    return SandboxList([call.service.info(lease) for lease in call.service.visible(call.token)])


@ENDPOINTS.add("GET", _SANDBOX, query=WaitQuery)
async def _show(call: ApiCall) -> Info:
    """One sandbox. `wait` holds the answer back while it is queued or starting."""
    lease = call.lease
    with anyio.move_on_after(call.query.wait):
        await lease.settled()
    lease.renew()
    return call.service.info(lease)


@ENDPOINTS.add("GET", _SANDBOX + "/end", query=WaitQuery)
async def _ended(call: ApiCall) -> Info:
    """Renew the lease. `wait` holds the answer back until the sandbox has ended."""
    lease = call.lease
    with anyio.move_on_after(call.query.wait):
        await lease.done.wait()
    return call.service.info(lease)


@ENDPOINTS.add("POST", _SANDBOX + "/renew")
async def _renew(call: ApiCall) -> Info:
    """Renew the lease."""
    return call.service.info(call.lease)


@ENDPOINTS.add("DELETE", _SANDBOX)
async def _close(call: ApiCall) -> None:
    """End a sandbox, and wait until it is gone."""
    await call.service.pool.release(call.lease)


@ENDPOINTS.add("POST", _SANDBOX + "/snapshot", status=201)
async def _snapshot(call: ApiCall) -> Snapshot:
    """Keep the files."""
    return await call.service.snapshot(call.lease)


@ENDPOINTS.add("GET", "/v1/snapshots")
async def _snapshots(call: ApiCall) -> SnapshotList:
    """Your snapshots."""
    return SnapshotList(
        [
            SnapshotInfo(
                snapshot_id=kept.snapshot_id,
                image=kept.image,
                owner=kept.owner,
                host=kept.host,
                size=kept.size,
                made_at=kept.made_at,
                expires_at=kept.until,
            )
            for kept in call.service.snapshots(call.token)
        ]
    )


@ENDPOINTS.add("DELETE", "/v1/snapshots/{snapshot}")
async def _forget(call: ApiCall) -> None:
    """Remove a snapshot that nothing runs from."""
    await call.service.forget(call.path["snapshot"], call.token)


@ENDPOINTS.add("POST", _SANDBOX + "/fork", body=Fork, status=201, keyed=True)
async def _fork(call: ApiCall) -> SandboxList:
    """More sandboxes with the same files, which end with this one at the latest."""
    lease = call.lease

    async def fork() -> SandboxList:
        forks = await call.service.pool.fork(lease, call.body.count)
        return SandboxList([call.service.info(each) for each in forks])

    return await once(call, lease, fork)


@ENDPOINTS.add("GET", "/v1/status", query=StatusQuery)
async def _status(call: ApiCall) -> Status:
    """The whole pool. `wait` holds the answer back until it differs from version `since`."""
    query, state = cast("StatusQuery", call.query), call.service.pool.state
    if query.wait:
        await anyio.sleep(STATUS_EVERY_S)
        with anyio.move_on_after(query.wait):
            await state.changed_since(query.since)
    return call.service.status(call.token)


# ---- files


@ENDPOINTS.add("GET", _FILES, query=ReadQuery, media_type=BINARY)
async def _read(call: ApiCall) -> Response:
    """Bytes of a file."""
    query: ReadQuery = call.query
    data = await call.sandbox.read(query.path, offset=query.offset, limit=query.limit)
    return Response(data, media_type=BINARY, headers=_TO_KEEP)


@ENDPOINTS.add("PUT", _FILES, body=BINARY, query=WriteQuery)
async def _write(call: ApiCall) -> None:
    """Replace a file in one step, or append to it."""
    query: WriteQuery = call.query
    data = await call.request.body()
    await call.sandbox.write(query.path, data, mode=query.mode, append=query.append)


@ENDPOINTS.add("GET", "/v1/sandboxes/{id}/entries", query=PathQuery)
async def _list_files(call: ApiCall) -> Listing:
    """The entries of a folder."""
    entries = await call.sandbox.list(call.query.path)
    return Listing([msgspec.structs.replace(entry, name=to_wire(entry.name)) for entry in entries])


@ENDPOINTS.add("DELETE", _FILES, query=PathQuery)
async def _remove(call: ApiCall) -> None:
    """Remove a file or a folder."""
    await call.sandbox.remove(call.query.path)


@ENDPOINTS.add("PUT", _TREE, body=TAR, query=PathQuery)
async def _upload(call: ApiCall) -> None:
    """Copy a tree, or one file, into the sandbox: a tar archive."""
    sandbox = call.sandbox
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as archive:
        async for piece in call.request.stream():
            await _in_thread(partial(archive.write, piece))
        with tempfile.TemporaryDirectory(prefix="flash-upload-") as folder:
            tree = Path(folder, "tree")
            await _in_thread(partial(_unpack, archive, tree))
            await sandbox.upload(tree, call.query.path)


@ENDPOINTS.add("GET", _TREE, query=PathQuery, media_type=TAR)
async def _download(call: ApiCall) -> StreamingResponse:
    """A tree, or one file, as a tar archive."""
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
