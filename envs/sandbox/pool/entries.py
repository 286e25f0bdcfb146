"""Leases as entries of the journal, and back. Pure; `wall` is the unix time."""

from __future__ import annotations

import math

import anyio

from envs.sandbox.pool.journal import Entry
from envs.sandbox.pool.lease import SandboxLease


def entry_of(lease: SandboxLease, wall: float) -> Entry:
    """A lease as it is remembered."""
    left = lease.spec.deadline_s if math.isinf(lease.hard_until) else lease.hard_until - anyio.current_time()
    return Entry(
        lease=lease.id,
        owner=lease.owner,
        token=lease.token,
        spec=lease.spec,
        priority=lease.priority,
        on_lost=lease.on_lost,
        lease_s=None if math.isinf(lease.lease_s) else lease.lease_s,
        hard_until=wall + left,
        key=lease.key,
        host=lease.host if lease.sandbox_id else "",
        sandbox_id=lease.sandbox_id,
        ready=lease.sandbox is not None,
        generation=lease.generation,
        parent=lease.parent,
        snapshots=tuple(lease.snapshots),
    )


def lease_of(entry: Entry, wall: float) -> SandboxLease:
    """A lease of an earlier run, as far as the journal knows it. It has no sandbox yet."""
    lease = SandboxLease(
        entry.lease,
        entry.spec,
        owner=entry.owner,
        token=entry.token,
        priority=entry.priority,
        on_lost=entry.on_lost,
        lease_s=math.inf if entry.lease_s is None else entry.lease_s,
        key=entry.key,
    )
    lease.generation, lease.parent, lease.sandbox_id = entry.generation, entry.parent, entry.sandbox_id
    lease.snapshots = [*entry.snapshots]
    if entry.ready:
        # Never more than a whole life: the wall clock may have been set back meanwhile.
        left = min(entry.hard_until - wall, entry.spec.deadline_s)
        lease.hard_until = anyio.current_time() + left
    return lease
