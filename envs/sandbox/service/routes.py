"""Tables of the HTTP API, version 1: leases, snapshots, forks, files and the status.

The commands are in `envs.sandbox.service.routes_commands`. Trees travel as tar archives, piece by piece, and are never
stored here. The sandbox unpacks an upload. The client unpacks a download with `envs.sandbox.trees`, which does not
trust it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import cast

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from envs.sandbox.api import Snapshot
from envs.sandbox.protocol.problems import problem_of
from envs.sandbox.protocol.wire import (
    BINARY,
    TAR,
    Fork,
    HttpProblem,
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
from envs.sandbox.sandbox import PutArchive, StreamTree
from envs.sandbox.service.endpoint import ApiCall, Endpoints, once, problem_response, until_left
from envs.sandbox.text import to_wire
from envs.sandbox.trees import TreeLimits
from flash.errors import FlashError

_TO_KEEP = {"content-disposition": "attachment"}
"""Headers that make a browser save a file instead of showing content from a sandbox. They have no file name, since it
would also be chosen in the sandbox."""
HELD_BYTES = 1 << 17
"""Bytes of an archive that are held back before the first is sent, so that an early error can be answered with its own
status."""
STATUS_EVERY_S = 0.2
"""Shortest time between two answers to a caller that waits for changes of the status, in seconds."""


ENDPOINTS = Endpoints()

_SANDBOX = "/v1/sandboxes/{id}"
_FILES = "/v1/sandboxes/{id}/files"
_TREE = "/v1/sandboxes/{id}/tree"


@ENDPOINTS.add("POST", "/v1/sandboxes", body=SandboxOrder, query=WaitQuery, status=201, keyed=True)
async def _order(call: ApiCall) -> Info:
    """Order a sandbox. `wait` holds the answer back until it is ready; otherwise ask for it again by its id."""
    lease = call.service.order(call.body, call.token, call.key)
    with anyio.move_on_after(call.query.wait):
        await lease.settled()
    return call.service.info(lease)


@ENDPOINTS.add("GET", "/v1/sandboxes")
async def _list(call: ApiCall) -> SandboxList:
    """List your sandboxes."""
    return SandboxList([call.service.info(lease) for lease in call.service.visible(call.token)])


@ENDPOINTS.add("GET", _SANDBOX, query=WaitQuery)
async def _show(call: ApiCall) -> Info:
    """Show one sandbox. `wait` holds the answer back while it is queued or starting."""
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
    """End a sandbox, and wait until it is removed."""
    await call.service.pool.release(call.lease)


@ENDPOINTS.add("POST", _SANDBOX + "/snapshot", status=201)
async def _snapshot(call: ApiCall) -> Snapshot:
    """Keep the files of a sandbox as a snapshot."""
    return await call.service.snapshot(call.lease)


@ENDPOINTS.add("GET", "/v1/snapshots")
async def _snapshots(call: ApiCall) -> SnapshotList:
    """List your snapshots."""
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
    """Remove a snapshot. Its host waits with the removal while a sandbox runs from it."""
    await call.service.forget(call.path["snapshot"], call.token)


@ENDPOINTS.add("POST", _SANDBOX + "/fork", body=Fork, status=201, keyed=True)
async def _fork(call: ApiCall) -> SandboxList:
    """Start more sandboxes with the same files. They end with this one at the latest."""
    lease = call.lease

    async def fork() -> SandboxList:
        forks = await call.service.pool.fork(lease, call.body.count)
        return SandboxList([call.service.info(each) for each in forks])

    return await once(call, lease, fork)


@ENDPOINTS.add("GET", "/v1/status", query=StatusQuery)
async def _status(call: ApiCall) -> Status:
    """Show the state of the whole pool. `wait` holds the answer back until it differs from version `since`."""
    query, state = cast("StatusQuery", call.query), call.service.pool.state
    if query.wait:
        await anyio.sleep(STATUS_EVERY_S)
        with anyio.move_on_after(query.wait):
            await state.changed_since(query.since)
    return call.service.status(call.token)


# ---- files


@ENDPOINTS.add("GET", _FILES, query=ReadQuery, media_type=BINARY)
async def _read(call: ApiCall) -> Response:
    """Read bytes of a file."""
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
    """List the entries of a folder."""
    entries = await call.sandbox.list(call.query.path)
    return Listing([msgspec.structs.replace(entry, name=to_wire(entry.name)) for entry in entries])


@ENDPOINTS.add("DELETE", _FILES, query=PathQuery)
async def _remove(call: ApiCall) -> None:
    """Remove a file or a folder."""
    await call.sandbox.remove(call.query.path)


@ENDPOINTS.add("PUT", _TREE, body=TAR, query=PathQuery)
async def _upload(call: ApiCall) -> None:
    """Copy a tree, or one file, into the sandbox, as a tar archive."""
    length = call.request.headers.get("content-length")
    await call.sandbox.ask(PutArchive(call.query.path, call.request.stream(), int(length) if length else None))


@ENDPOINTS.add("GET", _TREE, query=PathQuery, media_type=TAR)
async def _download(call: ApiCall) -> TreeStream:
    """Download a tree, or one file, as a tar archive of untrusted content. An answer that breaks off has failed."""
    return TreeStream(call.sandbox.open(StreamTree(call.query.path, TreeLimits())))


class TreeStream(Response):
    """Answer with a tar archive of a sandbox, sent while it arrives.

    For a slow client only a few pieces are held in memory, and none in a file. An error in the first `HELD_BYTES` is
    answered with its own status. A later error ends the connection.
    """

    def __init__(self, pieces: AbstractAsyncContextManager[AsyncIterator[bytes]]) -> None:
        super().__init__(media_type=TAR, headers=_TO_KEEP)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A client that disconnects ends the copy."""
        problem: HttpProblem | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_left, receive, tasks.cancel_scope)
            problem = await self._copy(scope, send)
            tasks.cancel_scope.cancel()
        if problem is not None:
            await problem_response(problem)(scope, receive, send)

    async def _copy(self, scope: Scope, send: Send) -> HttpProblem | None:
        """Send the archive. Returns an error that occurred before anything was sent; else None."""
        held, begun = bytearray(), False

        async def give(piece: bytes, *, more: bool) -> None:
            nonlocal begun
            if not begun:
                # Without the content length that `Response` computes for an empty body: the real length is not known.
                kept = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": kept})
                begun = True
            await send({"type": "http.response.body", "body": piece, "more_body": more})

        try:
            async with self._pieces as pieces:
                async for piece in pieces:
                    held += piece
                    if begun or len(held) >= HELD_BYTES:
                        await give(bytes(held), more=True)
                        held.clear()
            await give(bytes(held), more=False)
        except FlashError as error:
            if not begun:
                return problem_of(error)
            scope["state"]["connection"].abort()
            await anyio.sleep_forever()  # until the disconnection is noticed and cancels this task
        return None
