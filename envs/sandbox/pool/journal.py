"""The journal: which lease has which sandbox, kept so that a restarted service can go on with them.

Two records with two tasks. *Labels* on the containers are the truth about what exists: the engine writes them together
with the container, any process can read them, and nothing can be made without them. But they can never be changed, and
a sandbox that was made ahead learns only later whose it is. So the *journal* is the truth about who holds what: one row
per lease, written before the side effect it announces, and one per snapshot that somebody was told of, written before
they are. After a restart a row without a container is a lease that was lost, and a container without a row is removed.
Neither can leak the other.

SQLite in WAL mode: a row survives `kill -9` without an fsync; after a power cut the containers are gone as well.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec

from envs.sandbox.api import OnLost, Spec
from envs.sandbox.pool.lease import SandboxLease
from flash.errors import ConfigError

_T = TypeVar("_T")

BUSY_S = 5.0
"""How long to wait for another reader of the file, seconds."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, as it is remembered."""

    lease: str
    owner: str
    token: str
    """Name of the bearer token that may use it; "" inside one process."""
    spec: Spec
    priority: int
    on_lost: OnLost
    lease_s: float | None
    """Seconds that a renewal lasts; None: for ever. After a restart it begins anew: nobody could renew meanwhile."""
    hard_until: float
    """Unix time at which it ends in any case."""
    key: str = ""
    """The request's idempotency key."""
    host: str = ""
    """Where the sandbox is; "" while it waits."""
    sandbox_id: str = msgspec.field(default="", name="box")
    """The sandbox; "" while it waits."""
    ready: bool = False
    """The holder may have it. Without, it was being made."""
    generation: int = 0
    """How often the sandbox was made again."""
    parent: str = ""
    """The lease whose sandbox this one was forked from: it ends with that one."""
    snapshots: tuple[tuple[str, str], ...] = ()
    """Images that its forks began from, and their hosts: removed with it."""


def entry_of(lease: SandboxLease, wall: float) -> Entry:
    """A lease as it is remembered; `wall` is the unix time."""
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


class KeptSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot that the holder of a lease was told of. It outlives the lease."""

    image: str
    snapshot_id: str
    host: str
    token: str
    """Name of the bearer token that may use and remove it; "" inside one process."""
    owner: str
    lease: str
    """The lease whose sandbox it was made of."""
    size: int
    """Bytes beyond the image that the sandbox began from."""
    made_at: float
    """Unix time."""
    until: float
    """Unix time at which it is removed."""


class PoolJournal(Protocol):
    """Where the entries of leases are kept: each write is done when its call returns."""

    async def put(self, entry: Entry) -> None:
        """Remember an entry, in place of an earlier one of the same lease."""
        ...

    async def drop(self, lease: str) -> None:
        """Forget the entry of a lease; nothing when there is none."""
        ...

    async def load(self) -> list[Entry]:
        """Every lease that is remembered."""
        ...

    async def put_snapshot(self, kept: KeptSnapshot) -> None:
        """Remember a snapshot."""
        ...

    async def drop_snapshot(self, image: str) -> None:
        """Forget a snapshot; nothing when there is none."""
        ...

    async def load_snapshots(self) -> list[KeptSnapshot]:
        """Every snapshot that is remembered, in the order in which they were put."""
        ...


class MemoryPoolJournal:
    """Remembers for as long as the process lives."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.snapshots: dict[str, KeptSnapshot] = {}

    async def put(self, entry: Entry) -> None:
        self.entries[entry.lease] = entry

    async def drop(self, lease: str) -> None:
        """Forget the entry of a lease; nothing when there is none."""
        self.entries.pop(lease, None)

    async def load(self) -> list[Entry]:
        """Every lease that is remembered."""
        return list(self.entries.values())

    async def put_snapshot(self, kept: KeptSnapshot) -> None:
        self.snapshots[kept.image] = kept

    async def drop_snapshot(self, image: str) -> None:
        """Forget a snapshot; nothing when there is none."""
        self.snapshots.pop(image, None)

    async def load_snapshots(self) -> list[KeptSnapshot]:
        """Every snapshot that is remembered."""
        return list(self.snapshots.values())


def _connect(path: Path) -> sqlite3.Connection:
    """Open or make the tables.

    Raises:
        sqlite3.Error: they cannot be; nothing stays open.
    """
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("CREATE TABLE IF NOT EXISTS leases (lease TEXT PRIMARY KEY, entry BLOB NOT NULL)")
        connection.execute("CREATE TABLE IF NOT EXISTS snapshots (image TEXT PRIMARY KEY, entry BLOB NOT NULL)")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class SqliteJournal:
    """Remembers in a file. Its calls run in a worker thread, one at a time and in their order."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ConfigError: it cannot be opened.
        """
        self._limiter = anyio.CapacityLimiter(1)
        path.touch(mode=0o600, exist_ok=True)
        try:
            self._connection = _connect(path)
        except sqlite3.Error as error:
            raise ConfigError(
                f"the journal {path} cannot be opened: {error}; move it away to start without it"
            ) from error

    async def put(self, entry: Entry) -> None:
        row = (entry.lease, msgspec.json.encode(entry))
        await self._run(lambda: self._connection.execute("INSERT OR REPLACE INTO leases VALUES (?, ?)", row))

    async def drop(self, lease: str) -> None:
        """Forget the entry of a lease; nothing when there is none."""
        await self._run(lambda: self._connection.execute("DELETE FROM leases WHERE lease = ?", (lease,)))

    async def load(self) -> list[Entry]:
        """Every lease that is remembered. A row of another version of the code is left out: its sandbox is removed."""
        return await self._read("SELECT entry FROM leases", Entry)

    async def put_snapshot(self, kept: KeptSnapshot) -> None:
        row = (kept.image, msgspec.json.encode(kept))
        await self._run(lambda: self._connection.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", row))

    async def drop_snapshot(self, image: str) -> None:
        """Forget a snapshot; nothing when there is none."""
        await self._run(lambda: self._connection.execute("DELETE FROM snapshots WHERE image = ?", (image,)))

    async def load_snapshots(self) -> list[KeptSnapshot]:
        """Every snapshot that is remembered, oldest first."""
        return await self._read("SELECT entry FROM snapshots ORDER BY rowid", KeptSnapshot)

    def close(self) -> None:
        self._connection.close()

    async def _read(self, query: str, kind: type[_T]) -> list[_T]:
        """The rows that this version of the code can read."""
        rows = await self._run(lambda: self._connection.execute(query).fetchall())
        found: list[_T] = []
        for (row,) in rows:
            with suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(row, type=kind))
        return found

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)
