"""Admission: decides which request gets the next sandbox, and on which host. Pure state machine: no clock, no tasks.

`PoolState` owns one `SandboxAdmission`. It submits a request for each lease, and calls `decide` after each change that
could allow a grant. A grant is a place on a host for one sandbox. Placement (`choose`) counts the resources that
sandboxes were promised, not their use at the moment: a promise holds also when every sandbox computes at once.

Laws, each tested under its name:

- **Capacity.** The grants on a host never exceed the host's capacity.
- **Answered.** Every request is in exactly one state: waiting, granted, or gone (`remove`).
- **Fair share.** The payer with the smallest share of the total capacity is served first; among the owners of one
  payer, the owner with the smallest share. Equal shares are served in turn. An owner's own requests are served by
  priority, then by age. The payer is the part of an owner's name before the slash: a token may name its owners freely,
  but gets no more by having many.
- **No starvation.** A request is overtaken unfairly a bounded number of times, whatever the priorities and sizes of
  other requests are. Requests of its own owner: after `patience` more of them than were ahead of it, the request is
  late, and is served first among them. Smaller requests: if it was the request's turn but no host had room for it while
  `patience` others were granted, the request is overdue. Overdue requests are served before all others, oldest first,
  and a host is kept free for each. Grants to other owners whose share is smaller do not count: a flood of requests
  gives no owner more than a fair share.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import count

import msgspec

from flash.errors import SandboxBusyError, SandboxRefusedError


class Demand(msgspec.Struct, frozen=True):
    """Resources of a sandbox or of a host. Whole numbers, because sums of fractions would drift."""

    millicpus: int
    """Thousandths of a core."""
    memory_mib: int
    """Memory in MiB."""

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
        """Return the larger of the two fractions of `whole`: that of the resource that runs out first."""
        # A host that has not reported yet, or a pool of such hosts, has a `whole` of 0.
        return max(self.millicpus / max(whole.millicpus, 1), self.memory_mib / max(whole.memory_mib, 1))


NOTHING = Demand(0, 0)
"""Demand of no sandbox; also the capacity of a host that has not reported one yet."""


class HostView(msgspec.Struct):
    """State of one host, for placement."""

    name: str
    """Name of the host in the pool."""
    capacity: Demand
    """Resources that may be promised to sandboxes."""
    accepts: bool = True
    """False if no sandbox may be placed on the host now."""
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

    A host that has not reported its capacity yet counts as large enough. `only` names the single host to consider.
    """
    candidates = [host.capacity for host in hosts if only in (None, host.name)]
    return any(capacity == NOTHING or demand.fits(capacity) for capacity in candidates)


class PlaceRequest(msgspec.Struct, frozen=True):
    """A request for a place for one sandbox."""

    id: str
    """Id of the lease that makes the request."""
    owner: str
    """Owner of the lease: the payer's name, and optionally a slash and a name that the payer has chosen."""
    demand: Demand
    """Resources of the sandbox."""
    priority: int = 0
    """Requests of one owner with a larger number are served sooner."""
    warm_key: str = ""
    """Kind of a ready sandbox that can serve this request."""
    only: str | None = None
    """Name of the host that the sandbox must be on; None: any host."""


class Grant(msgspec.Struct, frozen=True):
    """A decision: the request has a place on the host, until it is put back or removed."""

    request: PlaceRequest
    """Request that has the place."""
    arrival: int
    """Serial number of the request by its arrival. `put_back` keeps it, so that the request keeps its age."""
    host: str
    """Name of the host."""

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.request.id


class _Waiting(msgspec.Struct):
    """A request in the queue."""

    request: PlaceRequest
    """Request that waits."""
    arrival: int
    """Serial number of the request by its arrival."""
    late_at: int
    """Number of grants to its owner from which the request is late."""
    late: bool = False
    """True if the request comes first among those of its owner; see the law "No starvation"."""
    passed: int = 0
    """Grants to other requests while it was this request's turn and no host had room for it."""
    avoid: frozenset[str] = frozenset()
    """Names of hosts where its start has failed, which are taken only if there is no other."""

    def order(self) -> tuple[bool, int, int]:
        """Return the sort key among the requests of one owner."""
        return not self.late, 0 if self.late else -self.request.priority, self.arrival


_Shape = tuple[Demand, str | None, str]
"""Key of requests that placement treats alike: demand, the only host allowed, and kind."""
_Fit = tuple[Demand, str | None]
"""Key that decides if a host has room: if one request with this key fits nowhere, no request with this key does."""


class SandboxAdmission:
    """The queue of one pool, and the grants it has made."""

    def __init__(self, *, max_waiting: int, patience: int) -> None:
        """Create an empty queue for at most `max_waiting` requests.

        `patience` is the number of grants by which a request may be overtaken unfairly, as the laws say.
        """
        self.max_waiting = max_waiting
        self._patience = patience
        self._hosts: dict[str, HostView] = {}
        """Hosts by name."""
        self._waiting: dict[str, _Waiting] = {}
        """Waiting requests by id."""
        self._waiting_arrivals: list[int] = []
        """Arrivals of the waiting requests, in order. A status asks for the position of each of them, so a search
        through all requests for each position would block the service when thousands wait."""
        self._by_owner: dict[str, dict[_Shape, list[_Waiting]]] = {}
        """Waiting requests by owner and shape, each list in the order of service."""
        self._granted: dict[str, Grant] = {}
        """Grants by the id of their request."""
        self._usage: dict[str, Demand] = {}
        """Resources granted, by owner."""
        self._paid: dict[str, Demand] = {}
        """Resources granted, by payer."""
        self._grants_held: dict[str, int] = {}
        """Number of requests that hold a grant, by owner."""
        self._turns: dict[str, int] = {}
        """Number of grants so far, by owner."""
        self._alarms: dict[str, list[tuple[int, int, str]]] = {}
        """Heap by owner of (number of grants at which the request is late, arrival, id). Entries of requests that left
        are skipped."""
        self._passed_over: dict[str, _Waiting] = {}
        """Requests by id that fitted on no host in the current call of `decide`, in order. Further grants count as
        overtaking them."""
        self._overdue: dict[str, _Waiting] = {}
        """Overdue requests by id, which are served before all others."""
        self._arrivals = count()
        """Source of the serial numbers of requests."""
        self._grants = 0
        """Number of grants so far."""
        self._last_grant: dict[str, int] = {}
        """Number of the last grant, by owner. One without records counts as served just before its request came."""
        self._last_paid: dict[str, int] = {}
        """Number of the last grant, by payer."""

    # ---- hosts

    def set_host(
        self, name: str, capacity: Demand, *, accepts: bool = True, warm: dict[str, int] | None = None
    ) -> None:
        """Add a host, or update its capacity and state from its report. Existing grants on it stay.

        `accepts` is False if no sandbox may be placed on it now, and `warm` has its ready sandboxes by kind.
        """
        view = self._hosts.setdefault(name, HostView(name, capacity))
        view.capacity, view.accepts, view.warm = capacity, accepts, dict(warm or {})

    def hosts(self) -> list[HostView]:
        """Return the current view of each host."""
        return list(self._hosts.values())

    # ---- requests

    def submit(self, request: PlaceRequest) -> None:
        """Add a request to the queue.

        Raises:
            SandboxRefusedError: no host could ever hold the sandbox.
            SandboxBusyError: the queue is full.
        """
        assert request.id not in self._waiting
        assert request.id not in self._granted
        if self._hosts and not could_ever_take(self._hosts.values(), request.demand, request.only):
            raise SandboxRefusedError(self._too_large(request))
        if len(self._waiting) >= self.max_waiting:
            raise SandboxBusyError(
                f"{len(self._waiting)} requests wait for a sandbox already; ask again later, or add hosts"
            )
        # The owner's waiting requests may be served first, and then `patience` others, before this one is late.
        ahead = sum(map(len, self._by_owner.get(request.owner, {}).values()))
        late_at = self._turns.get(request.owner, 0) + ahead + self._patience
        self._enter(_Waiting(request, next(self._arrivals), late_at))

    def put_back(self, id: str, *, avoid: Iterable[str] = ()) -> None:
        """Put a granted request back into the queue: its sandbox did not start, or was lost and is to be replaced.

        The request keeps its age, is overdue at once, and avoids the hosts in `avoid` if there are others. Raises
        KeyError if it has no grant.
        """
        granted = self._free_place(id)
        waiting = _Waiting(granted.request, granted.arrival, 0, late=True, avoid=frozenset(avoid))
        self._enter(waiting)
        self._overdue[id] = waiting

    def remove(self, id: str) -> None:
        """Remove a request: it gives up waiting, or its sandbox is gone. Raises KeyError if the request is unknown."""
        if (waiting := self._waiting.get(id)) is not None:
            self._leave(waiting)
        else:
            self._free_place(id)

    def restore(self, request: PlaceRequest, host: str) -> None:
        """Record the grant that a lease had before a restart, without checking that it fits: its sandbox still runs.

        `PoolState.restore` calls this before any other request is granted on the host.
        """
        self._grant(_Waiting(request, next(self._arrivals), 0), self._hosts[host], counted=False)

    def is_waiting(self, id: str) -> bool:
        """Return True if the request has not been granted yet."""
        return id in self._waiting

    def position(self, id: str) -> int:
        """Return the number of waiting requests that are older. Raises KeyError if the request does not wait."""
        return bisect_left(self._waiting_arrivals, self._waiting[id].arrival)

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting requests by owner."""
        return {owner: sum(map(len, shapes.values())) for owner, shapes in self._by_owner.items()}

    def usage(self) -> dict[str, Demand]:
        """Return the resources that each owner was granted."""
        return dict(self._usage)

    def why_waiting(self, id: str) -> str:
        """Return the reason why a request waits, for the status and for the error message when its deadline passes.

        Raises KeyError if the request does not wait.
        """
        request = self._waiting[id].request
        if not could_ever_take(self._hosts.values(), request.demand, request.only):
            return self._too_large(request)
        open_hosts = sum(host.accepts for host in self._hosts.values())
        return (
            f"{self.position(id)} of {len(self._waiting)} waiting requests are older, {len(self._granted)} sandboxes "
            f"are in use, {open_hosts} of {len(self._hosts)} hosts take new ones"
        )

    # ---- decisions

    def decide(self) -> list[Grant]:
        """Grant everything that can be granted now, in the order of the laws, and return the new grants."""
        grants: list[Grant] = []
        closed: set[str] = set()
        self._passed_over.clear()
        self._serve_overdue(grants, closed)
        self._serve_owners(grants, closed)
        return grants

    def _serve_overdue(self, grants: list[Grant], closed: set[str]) -> None:
        """Grant overdue requests, oldest first, and keep a host free for each that does not fit.

        New grants are added to `grants`, and names of hosts that are kept free to `closed`. A grant can make other
        requests overdue, so the loop runs until no new request is overdue.
        """
        seen: set[str] = set()
        while new := [waiting for id, waiting in self._overdue.items() if id not in seen]:
            for waiting in sorted(new, key=lambda waiting: waiting.arrival):
                seen.add(waiting.request.id)
                if len(closed) == len(self._hosts):
                    return
                if (host := self._place(waiting, closed)) is not None:
                    grants.append(self._grant(waiting, host))
                elif (kept := self._host_to_keep(waiting.request, closed)) is not None:
                    closed.add(kept.name)

    def _host_to_keep(self, request: PlaceRequest, closed: set[str]) -> HostView | None:
        """Return the host where this request should fit soonest: of those large enough, the least loaded one.

        Hosts in `closed` are kept free for other requests already.
        """
        large = [
            host
            for host in self._hosts.values()
            if host.accepts
            and host.name not in closed
            and request.only in (None, host.name)
            and request.demand.fits(host.capacity)
        ]
        return min(large, key=lambda host: (host.granted.share_of(host.capacity), host.name), default=None)

    def _serve_owners(self, grants: list[Grant], closed: set[str]) -> None:
        """Grant requests one by one: each time the first one that fits of the owner with the smallest share.

        New grants are added to `grants`. `closed` has the hosts that are kept free for overdue requests.
        """
        unfit: set[_Fit] = set()
        whole = sum((host.capacity for host in self._hosts.values()), NOTHING)
        owners = [(self._rank(owner, whole), owner) for owner in self._by_owner]
        heapq.heapify(owners)
        while owners:
            ranked, owner = heapq.heappop(owners)
            if (now := self._rank(owner, whole)) > ranked:
                # The payer was granted something for another of its owners meanwhile, so the owner's rank is out of
                # date.
                heapq.heappush(owners, (now, owner))
                continue
            if (grant := self._serve_owner(owner, unfit, closed)) is None:
                continue
            grants.append(grant)
            self._serve_overdue(grants, closed)
            if owner in self._by_owner:
                heapq.heappush(owners, (self._rank(owner, whole), owner))

    def _rank(self, owner: str, whole: Demand) -> tuple[float, int, float, int]:
        """Return the sort key of an owner that waits: share and last grant of its payer, then its own ones.

        Shares are fractions of `whole`, the capacity of all hosts.
        """
        pays = payer(owner)
        paid, used = self._paid.get(pays, NOTHING), self._usage.get(owner, NOTHING)
        return paid.share_of(whole), self._last_paid[pays], used.share_of(whole), self._last_grant[owner]

    def _serve_owner(self, owner: str, unfit: set[_Fit], closed: set[str]) -> Grant | None:
        """Grant the first request of an owner that fits on a host. Returns None if none does.

        `unfit` collects the keys that fit on no host, so that later owners skip them in this decision. `closed` has the
        hosts that are kept free for overdue requests.
        """
        first = [queue[0] for queue in self._by_owner.get(owner, {}).values()]
        for waiting in sorted(first, key=_Waiting.order):
            fit = (waiting.request.demand, waiting.request.only)
            if fit not in unfit:
                if (host := self._place(waiting, closed)) is not None:
                    return self._grant(waiting, host)
                unfit.add(fit)
            self._passed_over[waiting.request.id] = waiting
        return None

    def _place(self, waiting: _Waiting, closed: set[str]) -> HostView | None:
        """Return the best host for a request now; None if it fits on none.

        `closed` has the hosts that are kept free for overdue requests.
        """
        request = waiting.request
        return choose(
            self._hosts.values(),
            request.demand,
            warm_key=request.warm_key,
            only=request.only,
            avoid=waiting.avoid,
            closed=closed,
        )

    # ---- records

    def _enter(self, waiting: _Waiting) -> None:
        """Add a request to the queues, and set the alarm for the grant at which it becomes late."""
        request = waiting.request
        self._waiting[request.id] = waiting
        insort(self._waiting_arrivals, waiting.arrival)
        # Not "never served": owners that come and go would then pass one that stays, for ever.
        self._last_grant.setdefault(request.owner, self._grants)
        self._last_paid.setdefault(payer(request.owner), self._grants)
        queue = self._by_owner.setdefault(request.owner, {}).setdefault(_shape(request), [])
        insort(queue, waiting, key=_Waiting.order)
        if not waiting.late:
            alarms = self._alarms.setdefault(request.owner, [])
            heapq.heappush(alarms, (waiting.late_at, waiting.arrival, request.id))

    def _leave(self, waiting: _Waiting) -> None:
        """Take a waiting request out of all queues."""
        request = waiting.request
        del self._waiting[request.id]
        del self._waiting_arrivals[bisect_left(self._waiting_arrivals, waiting.arrival)]
        self._overdue.pop(request.id, None)
        self._passed_over.pop(request.id, None)
        shapes = self._by_owner[request.owner]
        queue = shapes[_shape(request)]
        del queue[bisect_left(queue, waiting.order(), key=_Waiting.order)]
        if not queue:
            del shapes[_shape(request)]
        if not shapes:
            del self._by_owner[request.owner]
            self._drop_owner(request.owner)

    def _grant(self, waiting: _Waiting, host: HostView, *, counted: bool = True) -> Grant:
        """Give a request its place on a host, and count it for its owner and payer.

        Only grants that were decided count for the laws. The places of an earlier run, which `restore` gives back,
        overtake nobody, so they are not `counted`.
        """
        request = waiting.request
        # Counted before it leaves the queue, so that the owner's records are not dropped in between.
        self._grants_held[request.owner] = self._grants_held.get(request.owner, 0) + 1
        if request.id in self._waiting:
            self._leave(waiting)
        grant = self._granted[request.id] = Grant(request, waiting.arrival, host.name)
        host.granted += request.demand
        if host.warm.get(request.warm_key, 0) > 0:
            # The lease will take a ready sandbox. The next report of the host comes too late for this decision.
            host.warm[request.warm_key] -= 1
        self._usage[request.owner] = self._usage.get(request.owner, NOTHING) + request.demand
        pays = payer(request.owner)
        self._paid[pays] = self._paid.get(pays, NOTHING) + request.demand
        if counted:
            self._grants += 1
            self._last_grant[request.owner] = self._last_paid[pays] = self._grants
            self._overtake(request.owner)
        return grant

    def _overtake(self, owner: str) -> None:
        """Count one grant to `owner` against the requests that it overtook, and mark late and overdue requests.

        A grant overtakes the requests whose turn it was but which fitted on no host, and the owner's own waiting
        requests.
        """
        for id, waiting in self._passed_over.items():
            waiting.passed += 1
            if waiting.passed >= self._patience:
                self._overdue[id] = waiting
        turns = self._turns[owner] = self._turns.get(owner, 0) + 1
        alarms = self._alarms.get(owner, [])
        while alarms and alarms[0][0] <= turns:
            _, arrival, id = heapq.heappop(alarms)
            waiting = self._waiting.get(id)
            if waiting is not None and waiting.arrival == arrival and not waiting.late:
                queue = self._by_owner[owner][_shape(waiting.request)]
                del queue[bisect_left(queue, waiting.order(), key=_Waiting.order)]
                waiting.late = True
                insort(queue, waiting, key=_Waiting.order)

    def _free_place(self, id: str) -> Grant:
        """Free the place of a granted request, and return its grant. Raises KeyError if it has none."""
        granted = self._granted.pop(id)
        owner, demand = granted.request.owner, granted.request.demand
        self._hosts[granted.host].granted -= demand
        self._usage[owner] -= demand
        self._paid[payer(owner)] -= demand
        self._grants_held[owner] -= 1
        self._drop_owner(owner)
        return granted

    def _drop_owner(self, owner: str) -> None:
        """Drop the records of an owner that are not needed any more: a service may see very many owners.

        An owner without a grant loses the sum of its granted resources; one that also waits for nothing loses all its
        records. A payer loses its records together with the last of its owners.
        """
        if self._grants_held.get(owner, 0) == 0:
            self._grants_held.pop(owner, None)
            self._usage.pop(owner, None)
            if owner not in self._by_owner:
                for records in (self._last_grant, self._turns, self._alarms):
                    records.pop(owner, None)
                pays = payer(owner)
                if not any(payer(other) == pays for others in (self._grants_held, self._by_owner) for other in others):
                    self._paid.pop(pays, None)
                    self._last_paid.pop(pays, None)

    def _too_large(self, request: PlaceRequest) -> str:
        """Return the error message for a request that no host could hold even if it were empty."""
        hosts = ", ".join(f"{host.name} {host.capacity}" for host in self._hosts.values())
        where = f" on host {request.only}" if request.only else ""
        return f"a sandbox of {request.demand} fits nowhere{where}, not even alone; the hosts have {hosts or 'nothing'}"


def payer(owner: str) -> str:
    """Return the name of the payer of an owner's sandboxes: the token of a service, the part before the slash."""
    return owner.partition("/")[0]


def _shape(request: PlaceRequest) -> _Shape:
    """Return the key of a request's queue: requests of one owner and key are served strictly in their order."""
    return request.demand, request.only, request.warm_key
