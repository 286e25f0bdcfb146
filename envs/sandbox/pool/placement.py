"""Which host a sandbox goes to: pure arithmetic over what each host has free.

Capacity is counted in what sandboxes were promised, not in what they use at the moment: a promise holds also when every
sandbox computes at once. A host that should not be used (unreachable, quarantined) is left out by `accepts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec


class Demand(msgspec.Struct, frozen=True):
    """What a sandbox is promised, or what a host has. Whole numbers: sums of fractions would drift."""

    millicpus: int
    """Thousandths of a core."""
    memory_mib: int

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.millicpus + other.millicpus, self.memory_mib + other.memory_mib)

    def __sub__(self, other: Demand) -> Demand:
        return Demand(self.millicpus - other.millicpus, self.memory_mib - other.memory_mib)

    def __str__(self) -> str:
        return f"{self.millicpus / 1000:g} CPUs and {self.memory_mib} MiB"

    def fits(self, room: Demand) -> bool:
        """Whether `room` holds this."""
        return self.millicpus <= room.millicpus and self.memory_mib <= room.memory_mib

    def share_of(self, whole: Demand) -> float:
        """The larger of the two fractions: what limits first."""
        return max(self.millicpus / max(whole.millicpus, 1), self.memory_mib / max(whole.memory_mib, 1))


NOTHING = Demand(0, 0)


class HostView(msgspec.Struct):
    """One host, as placement sees it."""

    name: str
    capacity: Demand
    accepts: bool = True
    warm: dict[str, int] = {}
    """Sandboxes that wait there ready to use, by what they are (`warm_key`)."""
    granted: Demand = NOTHING
    """Promised there by us."""

    def has_room(self, demand: Demand) -> bool:
        """Whether this is left to promise."""
        # Without sums of `Demand`: this runs for every host at every decision.
        used, whole = self.granted, self.capacity
        return (
            demand.millicpus + used.millicpus <= whole.millicpus
            and demand.memory_mib + used.memory_mib <= whole.memory_mib
        )


def choose(
    hosts: Iterable[HostView],
    demand: Demand,
    *,
    warm_key: str = "",
    only: str | None = None,
    avoid: Collection[str] = (),
    closed: Collection[str] = (),
) -> HostView | None:
    """The host that takes this demand now, or None.

    One that is not to be avoided comes first, then one with a ready sandbox, then the one that is least loaded
    afterwards: an even load is what keeps commands fast.

    Args:
        hosts: all of them.
        demand: what is asked for.
        warm_key: what a ready sandbox has to be.
        only: the single host that will do; None: any.
        avoid: hosts to take only if there is no other.
        closed: hosts kept free for somebody else.
    """
    fitting = [
        host
        for host in hosts
        if host.accepts and host.name not in closed and only in (None, host.name) and host.has_room(demand)
    ]
    if not fitting:
        return None
    return min(
        fitting,
        key=lambda host: (
            host.name in avoid,
            host.warm.get(warm_key, 0) == 0,
            (host.granted + demand).share_of(host.capacity),
            host.name,
        ),
    )


def could_ever_take(hosts: Iterable[HostView], demand: Demand, only: str | None = None) -> bool:
    """Whether an empty host would hold this demand. A host that has not said yet what it has may well."""
    candidates = [host.capacity for host in hosts if only in (None, host.name)]
    return any(capacity == NOTHING or demand.fits(capacity) for capacity in candidates)
