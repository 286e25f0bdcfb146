"""Placement: chooses the host for a sandbox from the free capacity of each host. Pure arithmetic.

Capacity counts the resources that sandboxes were promised, not their use at the moment: a promise holds also when every
sandbox computes at once. A host that should not be used (unreachable, quarantined) has `accepts` False.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec


class Demand(msgspec.Struct, frozen=True):
    """Resources of a sandbox or of a host. Whole numbers, because sums of fractions would drift."""

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
        """Return True if `room` is enough for this demand."""
        return self.millicpus <= room.millicpus and self.memory_mib <= room.memory_mib

    def share_of(self, whole: Demand) -> float:
        """Return the larger of the two fractions of `whole`: the resource that runs out first."""
        return max(self.millicpus / max(whole.millicpus, 1), self.memory_mib / max(whole.memory_mib, 1))


NOTHING = Demand(0, 0)


class HostView(msgspec.Struct):
    """State of one host, for placement."""

    name: str
    capacity: Demand
    accepts: bool = True
    warm: dict[str, int] = {}
    """Number of ready sandboxes on the host by kind (`warm_key`)."""
    granted: Demand = NOTHING
    """Resources that this pool has promised on the host."""

    def has_room(self, demand: Demand) -> bool:
        """Return True if this demand fits in the resources that are not promised yet."""
        # Compares numbers instead of adding `Demand`s, for speed: this runs for every host at every decision.
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
    """Return the host that takes this demand now, or None.

    Hosts outside `avoid` come first, then hosts with a ready sandbox, then the host that is least loaded afterwards: an
    even load keeps commands fast.

    Args:
        hosts: all hosts.
        demand: resources of the sandbox.
        warm_key: kind of a ready sandbox that can serve the request.
        only: name of the only host allowed; None: any.
        avoid: hosts to take only if there is no other.
        closed: hosts that are kept free for other requests.
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
    """Return True if an empty host would hold this demand.

    A host that has not reported its capacity yet counts as large enough.
    """
    candidates = [host.capacity for host in hosts if only in (None, host.name)]
    return any(capacity == NOTHING or demand.fits(capacity) for capacity in candidates)
