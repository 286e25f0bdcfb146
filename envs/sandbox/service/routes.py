"""The HTTP API, version 1: leases, snapshots, forks and the status.

Commands are in `routes_commands`, files in `routes_files`, the page in `web`.
"""

from __future__ import annotations

from typing import cast

import anyio

from envs.sandbox.api import Snapshot
from envs.sandbox.protocol.wire import (
    EventList,
    Fork,
    Info,
    SandboxList,
    SandboxOrder,
    SnapshotInfo,
    SnapshotList,
    Status,
    StatusQuery,
    WaitQuery,
)
from envs.sandbox.service.endpoint import ApiCall, Endpoint, once

STATUS_EVERY_S = 0.2
"""Least time between two answers of a status that is waited for."""


async def _order(call: ApiCall) -> Info:
    lease = call.service.order(call.body, call.token, call.key)
    with anyio.move_on_after(call.query.wait):
        await lease.settled()
    return call.service.info(lease)


async def _list(call: ApiCall) -> SandboxList:
    return SandboxList([call.service.info(lease) for lease in call.service.visible(call.token)])


async def _show(call: ApiCall) -> Info:
    lease = call.lease
    with anyio.move_on_after(call.query.wait):
        await lease.settled()
    lease.renew()
    return call.service.info(lease)


async def _ended(call: ApiCall) -> Info:
    lease = call.lease
    with anyio.move_on_after(call.query.wait):
        await lease.done.wait()
    return call.service.info(lease)


async def _renew(call: ApiCall) -> Info:
    return call.service.info(call.lease)


async def _close(call: ApiCall) -> None:
    await call.service.pool.release(call.lease)


async def _snapshot(call: ApiCall) -> Snapshot:
    return await call.service.snapshot(call.lease)


async def _snapshots(call: ApiCall) -> SnapshotList:
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


async def _forget(call: ApiCall) -> None:
    await call.service.forget(call.path["snapshot"], call.token)


async def _fork(call: ApiCall) -> SandboxList:
    lease = call.lease

    async def fork() -> SandboxList:
        forks = await call.service.pool.fork(lease, call.body.count)
        return SandboxList([call.service.info(each) for each in forks])

    return await once(call, lease, fork)


async def _status(call: ApiCall) -> Status:
    query, state = cast("StatusQuery", call.query), call.service.pool.state
    if query.wait:
        await anyio.sleep(STATUS_EVERY_S)
        with anyio.move_on_after(query.wait):
            await state.changed_since(query.since)
    return call.service.status(call.token)


async def _timeline(call: ApiCall) -> EventList:
    return EventList(call.service.look_at(call.path["id"], call.token).timeline.events())


_SANDBOX = "/v1/sandboxes/{id}"

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/sandboxes",
        summary="Ask for a sandbox. `wait` holds the answer back until it is ready; otherwise ask again by its id.",
        handler=_order,
        body=SandboxOrder,
        query=WaitQuery,
        answer=Info,
        status=201,
        keyed=True,
    ),
    Endpoint(method="GET", path="/v1/sandboxes", summary="Your sandboxes.", handler=_list, answer=SandboxList),
    Endpoint(
        method="GET",
        path=_SANDBOX,
        summary="One sandbox. `wait` holds the answer back while it is queued or starting.",
        handler=_show,
        query=WaitQuery,
        answer=Info,
    ),
    Endpoint(
        method="DELETE", path=_SANDBOX, summary="End a sandbox, and wait until it is gone.", handler=_close, status=204
    ),
    Endpoint(
        method="GET",
        path=_SANDBOX + "/end",
        summary="Renew the lease. `wait` holds the answer back until the sandbox has ended.",
        handler=_ended,
        query=WaitQuery,
        answer=Info,
    ),
    Endpoint(method="POST", path=_SANDBOX + "/renew", summary="Renew the lease.", handler=_renew, answer=Info),
    Endpoint(
        method="POST",
        path=_SANDBOX + "/snapshot",
        summary="Keep the files.",
        handler=_snapshot,
        answer=Snapshot,
        status=201,
    ),
    Endpoint(method="GET", path="/v1/snapshots", summary="Your snapshots.", handler=_snapshots, answer=SnapshotList),
    Endpoint(
        method="DELETE",
        path="/v1/snapshots/{snapshot}",
        summary="Remove a snapshot that nothing runs from.",
        handler=_forget,
        status=204,
    ),
    Endpoint(
        method="POST",
        path=_SANDBOX + "/fork",
        summary="More sandboxes with the same files, which end with this one at the latest.",
        handler=_fork,
        body=Fork,
        answer=SandboxList,
        status=201,
        keyed=True,
    ),
    Endpoint(
        method="GET",
        path=_SANDBOX + "/timeline",
        summary="What was done in a sandbox.",
        handler=_timeline,
        answer=EventList,
    ),
    Endpoint(
        method="GET",
        path="/v1/status",
        summary="The whole pool. `wait` holds the answer back until it differs from version `since`.",
        handler=_status,
        query=StatusQuery,
        answer=Status,
    ),
)
