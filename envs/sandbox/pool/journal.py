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
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec

from envs.sandbox.pool.lease import LeaseOrder, SandboxLease
from flash.errors import ConfigError

_T = TypeVar("_T")

BUSY_S = 5.0
"""How long to wait for another reader of the file, seconds."""


class Entry(LeaseOrder, frozen=True, kw_only=True):
    """One lease, as it is remembered. A renewal begins anew after a restart: nobody could renew meanwhile."""

    lease: str
    hard_until: float
    """Unix time at which it ends in any case."""
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
    """A lease of an earlier run, as far as the journal knows it. It has no sandbox yet."""
    lease = SandboxLease(entry.lease, msgspec.convert(entry, LeaseOrder, from_attributes=True))
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


class JournalTable(Protocol[_T]):
    """Rows by their keys: each write is done when its call returns."""

    async def put(self, key: str, row: _T) -> None:
        """Remember a row, in place of an earlier one of the same key."""
        ...

    async def drop(self, key: str) -> None:
        """Forget a row; nothing when there is none."""
        ...

    async def load(self) -> list[_T]:
        """Every row that is remembered, in the order in which they were put."""
        ...


class PoolJournal(Protocol):
    """Where leases, and snapshots by their images, are remembered."""

    @property
    def leases(self) -> JournalTable[Entry]: ...

    @property
    def snapshots(self) -> JournalTable[KeptSnapshot]: ...


class MemoryTable(Generic[_T]):
    """Remembers for as long as the process lives."""

    def __init__(self) -> None:
        self.rows: dict[str, _T] = {}

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
    """Rows of a file, whose calls run in a worker thread."""

    def __init__(self, journal: SqliteJournal, name: str, key: str, kind: type[_T]) -> None:
        self._journal = journal
        self._name = name
        self._key = key
        self._kind = kind

    async def put(self, key: str, row: _T) -> None:
        await self._journal.run(f"INSERT OR REPLACE INTO {self._name} VALUES (?, ?)", key, msgspec.json.encode(row))

    async def drop(self, key: str) -> None:
        await self._journal.run(f"DELETE FROM {self._name} WHERE {self._key} = ?", key)

    async def load(self) -> list[_T]:
        """Those that this version of the code can read; the sandbox of another one's is removed."""
        found: list[_T] = []
        for (row,) in await self._journal.run(f"SELECT entry FROM {self._name} ORDER BY rowid"):
            with suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(row, type=self._kind))
        return found


class SqliteJournal:
    """Both tables in a file. Calls run one at a time and in their order."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ConfigError: it cannot be opened.
        """
        self._limiter = anyio.CapacityLimiter(1)
        self.leases = SqliteTable(self, "leases", "lease", Entry)
        self.snapshots = SqliteTable(self, "snapshots", "image", KeptSnapshot)
        path.touch(mode=0o600, exist_ok=True)
        try:
            self._connection = _connect(path)
        except sqlite3.Error as error:
            raise ConfigError(
                f"the journal {path} cannot be opened: {error}; move it away to start without it"
            ) from error

    def close(self) -> None:
        self._connection.close()

    async def run(self, query: str, *values: str | bytes) -> list[tuple[Any, ...]]:
        """What a query gives."""
        return await anyio.to_thread.run_sync(
            lambda: self._connection.execute(query, values).fetchall(), limiter=self._limiter
        )


def _connect(path: Path) -> sqlite3.Connection:
    """Open or make the tables. Raises sqlite3.Error; nothing stays open then."""
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
