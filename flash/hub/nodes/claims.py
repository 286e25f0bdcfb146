"""Claims: leases granted by former incarnations of the hub, until who holds them comes to the hub of now. Pure state.

A node that outlives a hub goes on with what it was given, and presents it to the next one. That one knows from its
state and the journal what was granted and has not come home: the node may keep it, and drops the rest. What nobody has
claimed after some time queues again.

Law: each lease of a former incarnation is claimed by one node, or revoked, or has ended before; never two of
it, never twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flash.samples.leases import LeaseTable
from flash.types import Lease


class Claims:
    """See the module's docstring.

    Args:
        leases: of training, as the former incarnations have left them.
        survives: whether this node may have outlived the hub.
    """

    def __init__(self, leases: LeaseTable, survives: Callable[[int], bool]) -> None:
        self._leases = leases
        self._open = {lease_id for lease_id, member in leases.out.items() if survives(member.node)}
        """Those that nobody has claimed yet."""
        self.void = [lease_id for lease_id in leases.out if lease_id not in self._open]
        """Those whose nodes have ended with the hub."""

    def __bool__(self) -> bool:
        """Whether there is something to claim."""
        return bool(self._open)

    def take(self, presented: Iterable[Lease]) -> list[Lease]:
        """A node presents leases; those that it may keep. All others are of no use to anybody."""
        kept: list[Lease] = []
        for lease in presented:
            member = self._leases.out.get(lease.lease_id) if lease.lease_id in self._open else None
            if member is not None and (member.task, member.floor) == (lease.task, lease.min_version):
                self._open.discard(lease.lease_id)
                kept.append(lease)
        return kept

    def expire(self) -> list[int]:
        """It is too late to claim anything; what nobody has claimed."""
        left = [lease_id for lease_id in sorted(self._open) if lease_id in self._leases.out]
        self._open.clear()
        return left
