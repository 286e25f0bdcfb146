"""Journal: records which lease has which sandbox, so that a restarted service can go on with them.

`LeaseServer` writes the leases and `SandboxPool` the snapshots; `Recovery` reads both at the start of a pool. A service
has a `SqliteJournal` in its state folder, and a pool inside a program a `MemoryPoolJournal`.

There are two records. *Labels* on the containers show what exists: the engine writes them together with the container,
any process can read them, and no container exists without them. But they can never be changed, and a sandbox that was
created ahead gets its lease only later. So the *journal* shows who holds what. It has one row per lease, written before
the side effect that it announces, and one per snapshot, written before the snapshot is reported to its holder. After a
restart, a row without a container is a lost lease, and a container without a row is removed. So neither a row nor a
container can leak.

SQLite runs in WAL mode: a row survives `kill -9` without an fsync. After a power cut the containers are gone as well.
While no row can be written, on a full disk for example, leases go on, but would not outlive a restart.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec

from envs.sandbox.pool.lease import LeaseOrder, SandboxLease
from flash.errors import DECODE_ERRORS, ConfigError, SandboxError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

BUSY_S = 5.0
"""Seconds to wait for another reader of the file."""


class Entry(LeaseOrder, frozen=True, kw_only=True):
    """Row of one lease. A restart renews the lease, because its holder could not renew it meanwhile."""

    lease: str
    """Id of the lease."""
    hard_until: float
    """Unix time at which the lease ends in any case."""
    host: str = ""
    """Host of the sandbox; "" while the lease waits."""
    sandbox_id: str = msgspec.field(default="", name="box")
    """Id of the sandbox; "" while the lease waits."""
    ready: bool = False
    """True if the holder may have the sandbox; False if it was still being started."""
    generation: int = 0
    """Number of times the sandbox was replaced after a loss."""
    parent: str = ""
    """Id of the lease whose sandbox this one was forked from, and with which it ends; "" if it is no fork."""
    snapshots: tuple[tuple[str, str], ...] = ()
    """Images that its forks began from, each with its host. They are removed with the lease."""


def entry_of(lease: SandboxLease, wall: float) -> Entry:
    """Return the row of a lease. `wall` is the unix time."""
    left = lease.spec.deadline_s if math.isinf(lease.hard_until) else lease.hard_until - anyio.current_time()
    return Entry(
        **msgspec.structs.asdict(lease.order),
        lease=lease.id,
        hard_until=wall + left,
        host=lease.host if lease.sandbox_id else "",
        sandbox_id=lease.sandbox_id,
        ready=lease.sandbox is not None,
        generation=lease.generation,
        parent=lease.parent,
        snapshots=tuple(lease.snapshots),
    )


def lease_of(entry: Entry, wall: float) -> SandboxLease:
    """Create the lease of a row of an earlier run. It has no sandbox yet. `wall` is the unix time."""
    lease = SandboxLease(entry.lease, msgspec.convert(entry, LeaseOrder, from_attributes=True))
    lease.generation, lease.parent, lease.sandbox_id = entry.generation, entry.parent, entry.sandbox_id
    lease.snapshots = [*entry.snapshots]
    # Otherwise its lifetime has not begun.
    if entry.ready or entry.generation:
        # At most one whole lifetime: the wall clock may have been set back meanwhile.
        left = min(entry.hard_until - wall, entry.spec.deadline_s)
        lease.hard_until = anyio.current_time() + left
    return lease


class KeptSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Row of one snapshot that was reported to the holder of a lease. The snapshot outlives the lease."""

    image: str
    """Name of the image."""
    snapshot_id: str
    """Id by which clients name the snapshot: the tag of the image."""
    host: str
    """Name of the host that has the image."""
    token: str
    """Name of the bearer token that may use and remove the snapshot; "" inside one process."""
    owner: str
    """Owner of the lease."""
    lease: str
    """Id of the lease whose sandbox the snapshot was made of."""
    size: int
    """Bytes beyond the image that the sandbox began from."""
    made_at: float
    """Unix time at which the snapshot was made."""
    until: float
    """Unix time at which the snapshot is removed."""


class JournalTable(Protocol[_T]):
    """Rows by key. A write is complete when the call returns."""

    async def put(self, key: str, row: _T) -> None:
        """Write a row. Replaces the row that has the same key.

        Raises:
            SandboxError: the row cannot be written. An earlier row of the key stays.
        """
        ...

    async def drop(self, key: str) -> None:
        """Delete a row. Does nothing if there is none.

        A failure is only logged: after a restart, the row is that of a lease or snapshot that is gone.
        """
        ...

    async def load(self) -> list[_T]:
        """Return all rows, in the order in which they were written."""
        ...


class PoolJournal(Protocol):
    """Tables of leases by id, and of snapshots by image."""

    @property
    def leases(self) -> JournalTable[Entry]:
        """Table of the leases that are not done."""
        ...

    @property
    def snapshots(self) -> JournalTable[KeptSnapshot]:
        """Table of the snapshots that were reported to a holder."""
        ...


class MemoryTable(Generic[_T]):
    """A `JournalTable` that lasts as long as the process: for a pool inside one program, and for tests."""

    def __init__(self) -> None:
        self.rows: dict[str, _T] = {}
        """Rows by key, in the order in which they were written first."""

    async def put(self, key: str, row: _T) -> None:
        self.rows[key] = row

    async def drop(self, key: str) -> None:
        self.rows.pop(key, None)

    async def load(self) -> list[_T]:
        return list(self.rows.values())


class MemoryPoolJournal:
    """Both tables in memory."""

    def __init__(self) -> None:
        self.leases: MemoryTable[Entry] = MemoryTable()
        self.snapshots: MemoryTable[KeptSnapshot] = MemoryTable()


class SqliteTable(Generic[_T]):
    """A `JournalTable` in the file of a service. Its calls run in a worker thread, and raise as `JournalTable` says."""

    def __init__(self, journal: SqliteJournal, name: str, key: str, kind: type[_T]) -> None:
        """Describe a table with the columns `key` and `entry`; `kind` is the type of its rows."""
        self._journal = journal
        self._name = name
        self._key = key
        self._kind = kind

    async def put(self, key: str, row: _T) -> None:
        query = f"INSERT OR REPLACE INTO {self._name} VALUES (?, ?)"
        try:
            await self._journal.run(query, key, msgspec.json.encode(row))
        except sqlite3.Error as error:
            raise SandboxError(f"the journal of the service cannot be written: {error}; is its disk full?") from error

    async def drop(self, key: str) -> None:
        try:
            await self._journal.run(f"DELETE FROM {self._name} WHERE {self._key} = ?", key)
        except sqlite3.Error as error:
            _log.warning("row %s of the journal's %s cannot be deleted: %s", key, self._name, error)

    async def load(self) -> list[_T]:
        """Return the rows that this version of the code can read.

        Other rows are skipped: the sandboxes of such leases are removed as containers without a lease. Raises
        sqlite3.Error if the file cannot be read.
        """
        found: list[_T] = []
        for (row,) in await self._journal.run(f"SELECT entry FROM {self._name} ORDER BY rowid"):
            with suppress(*DECODE_ERRORS):
                found.append(msgspec.json.decode(row, type=self._kind))
        return found


class SqliteJournal:
    """Both tables in a file. Calls run one at a time, in their order."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._limiter = anyio.CapacityLimiter(1)
        """Limiter that runs one query at a time, in a thread."""
        self.leases = SqliteTable(self, "leases", "lease", Entry)
        self.snapshots = SqliteTable(self, "snapshots", "image", KeptSnapshot)
        try:
            path.touch(mode=0o600, exist_ok=True)
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the journal {path} cannot be opened: {error}; move it away to start without it"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    async def run(self, query: str, *values: str | bytes) -> list[tuple[Any, ...]]:
        """Run a query with `values` for its question marks, in a thread, and return its rows. Raises sqlite3.Error.

        A query that has begun is completed, also if the caller is cancelled.
        """
        return await anyio.to_thread.run_sync(
            lambda: self._connection.execute(query, values).fetchall(), limiter=self._limiter
        )


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file and create missing tables. On an error nothing stays open.

    Raises:
        sqlite3.Error: the file cannot be opened.
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
