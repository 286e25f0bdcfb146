"""Which snapshots exist, whose they are, and how long they are kept. No tasks and no I/O.

A snapshot outlives the sandbox that it was made of, so it is remembered apart from leases, in a table of the journal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import anyio

from envs.sandbox.engines.backend import SNAPSHOT_NAME
from envs.sandbox.pool.journal import KeptSnapshot

_ANY_SPELLING = re.compile(rf"(.*/)?{re.escape(SNAPSHOT_NAME.rpartition('/')[2])}([:@].*)?", re.IGNORECASE | re.DOTALL)
"""Engines complete a name without a registry, so that more than one spelling finds a snapshot."""


def names_snapshot(image: str) -> bool:
    """Whether an image's name could be that of a snapshot, whoever made it."""
    return _ANY_SPELLING.fullmatch(image) is not None


class SnapshotBook:
    """The snapshots that somebody was told of. `wall` gives the unix time."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._kept: dict[str, KeptSnapshot] = {}
        self._changed = anyio.Event()

    def restore(self, snapshots: Iterable[KeptSnapshot]) -> None:
        """Know those of an earlier run."""
        self._kept |= {kept.image: kept for kept in snapshots}
        self._change()

    def add(self, kept: KeptSnapshot) -> None:
        self._kept[kept.image] = kept
        self._change()

    def remove(self, image: str) -> None:
        """Forget one. Nothing when it is not known."""
        self._kept.pop(image, None)
        self._change()

    def find(self, image: str) -> KeptSnapshot | None:
        """One that is still kept, by the exact name of its image."""
        kept = self._kept.get(image)
        return kept if kept is not None and kept.until > self._wall() else None

    def all(self) -> list[KeptSnapshot]:
        """Those that are still kept, oldest first."""
        return [kept for kept in self._kept.values() if kept.until > self._wall()]

    def made_of(self, lease: str) -> tuple[str, ...]:
        """The images that a lease's holder was told of."""
        return tuple(kept.image for kept in self._kept.values() if kept.lease == lease)

    def expired(self) -> list[KeptSnapshot]:
        """Those whose time is over, and that are not removed yet."""
        return [kept for kept in self._kept.values() if kept.until <= self._wall()]

    async def next_expiry(self) -> None:
        """Return once a snapshot's time is over, or when there may be an earlier one."""
        changed = self._changed
        left = min((kept.until for kept in self._kept.values()), default=math.inf) - self._wall()
        with anyio.move_on_after(max(0.0, left)):
            await changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
