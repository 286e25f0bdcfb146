"""Snapshot book: the snapshots that exist, their owners, and their expiry. No tasks and no I/O.

A snapshot outlives its sandbox, so it has its own table in the journal, apart from leases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import anyio

from envs.sandbox.engines.backend import SNAPSHOT_NAME
from envs.sandbox.pool.journal import KeptSnapshot

_ANY_SPELLING = re.compile(rf"(.*/)?{re.escape(SNAPSHOT_NAME.rpartition('/')[2])}([:@].*)?", re.IGNORECASE | re.DOTALL)
"""Pattern of every name that finds a snapshot. Engines complete a name without a registry, so there are several."""


def names_snapshot(image: str) -> bool:
    """Return True if an image's name could be the name of a snapshot of any service."""
    return _ANY_SPELLING.fullmatch(image) is not None


class SnapshotBook:
    """Snapshots that were reported to a holder. `wall` returns the unix time."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._kept: dict[str, KeptSnapshot] = {}
        self._changed = anyio.Event()

    def restore(self, snapshots: Iterable[KeptSnapshot]) -> None:
        """Add the snapshots of an earlier run."""
        self._kept |= {kept.image: kept for kept in snapshots}
        self._change()

    def add(self, kept: KeptSnapshot) -> None:
        """Add a snapshot."""
        self._kept[kept.image] = kept
        self._change()

    def remove(self, image: str) -> None:
        """Remove a snapshot. Does nothing if it is unknown."""
        self._kept.pop(image, None)
        self._change()

    def find(self, image: str) -> KeptSnapshot | None:
        """Return an unexpired snapshot by the exact name of its image; None if there is none."""
        kept = self._kept.get(image)
        return kept if kept is not None and kept.until > self._wall() else None

    def all(self) -> list[KeptSnapshot]:
        """Return the unexpired snapshots, oldest first."""
        return [kept for kept in self._kept.values() if kept.until > self._wall()]

    def made_of(self, lease: str) -> tuple[str, ...]:
        """Return the images of the lease's sandbox that were reported to the holder."""
        return tuple(kept.image for kept in self._kept.values() if kept.lease == lease)

    def expired(self) -> list[KeptSnapshot]:
        """Return the expired snapshots that are not removed yet."""
        return [kept for kept in self._kept.values() if kept.until <= self._wall()]

    async def next_expiry(self) -> None:
        """Wait until a snapshot expires, or until the book changes, since the next expiry may then be earlier."""
        changed = self._changed
        left = min((kept.until for kept in self._kept.values()), default=math.inf) - self._wall()
        with anyio.move_on_after(max(0.0, left)):
            await changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
