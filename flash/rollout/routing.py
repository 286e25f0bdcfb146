"""Router: decides which engine serves which request. A pure state machine.

`flash.rollout.proxy.LLMProxy` calls `ask` for each request, and `fill` when an engine has room.

A request goes to the least loaded engine whose version is new enough. The engine that served the same task before is
preferred as long as it is not much fuller. Among engines that are equally full, the engine that served another sample
of the same group is preferred. If no engine can take a request, it waits in a queue, from which the requests of the
oldest tasks are taken first. When an engine has room and no request waits for it, it is given requests that clearly
fuller engines run, so that the loads become equal. With bound groups all requests of a group go to one engine, and wait
for that engine.

An engine that dies by itself may have been killed by one of its requests. A request is a *suspect* if `SUSPECTED`
engines have died under it and none of them had given a token of it. It is cleared when an engine gives a token of it
(the request is then *proven*). An engine has at most one suspect at a time, so that its death shows which request was
the cause.

Invariant (work conservation): no request waits while an engine that may serve it has room.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from flash.rollout.engine import ResponseRequest

TASK_SLACK = 0.25
"""Share of its requests by which the engine that served a task before may be fuller than the emptiest one and still be
preferred: it has the whole context of the task in its cache. The engine that served another sample of the group has
only the prompt in its cache, so it is preferred only among engines that are equally full."""
UNEVEN = 0.25
"""Share of its requests by which an engine must be fuller than another one before requests are moved. A move is not
free: the other engine has to prefill the context of the request again."""
SUSPECTED = 2
"""Number of deaths of engines that make a request a suspect. One is too few: a single death may be chance, and suspects
are served more slowly, because they may have to wait for one another."""
MAX_DEATHS = 3
"""Number of deaths of engines after which a request is given to no other engine. Only engines that had given no token
of it count."""
REMEMBERED = 1 << 16
"""Number of tasks, and of groups, whose engine is remembered. This is more than a node runs at once."""


class RequestRecord:
    """The router's record of one request: its place in the queue, and the engines that have died under it. Mutable."""

    def __init__(self, request: ResponseRequest) -> None:
        self.request = request
        self.order = (request.group_id, request.task_id)
        """Order in the wait queue: requests with smaller numbers are taken first."""
        self.min_version = request.min_version
        self.barred: frozenset[int] = frozenset()
        """Engines that have failed the request. They do not get it again before all living engines have failed it."""
        self.arrival: int | None = None
        """Number in the order of arrival in the queue; None unless the request waits."""
        self.need: Need | None = None
        """Requirements on the engine; None unless the request waits."""
        self.sticky = True
        """True if the engine that served the task or group before is preferred. False after the request was moved to
        balance the load, because the preference would move it back."""
        self.proven = False
        """True if the engine that holds the request has given a token of it. It has thereby not killed this engine."""
        self.deaths = 0
        """Number of engines that have died under the request since an engine last gave a token of it."""
        self.death = ""
        """Text that says how an engine died, from the death that was counted last; empty before the first death."""

    @property
    def suspected(self) -> bool:
        """True if the request may be what kills engines."""
        return self.deaths >= SUSPECTED

    def died_under(self, death: str) -> None:
        """Note that the engine that ran the request has died by itself. `death` says how, for the error message."""
        if not self.proven:
            self.deaths, self.death = self.deaths + 1, death


class EngineView:
    """State of one engine, as far as the router's decisions depend on it."""

    def __init__(self, index: int, limit: int, version: int) -> None:
        self.index = index
        self.limit = limit
        """Largest number of requests that the engine may hold now."""
        self.version = version
        self.held = 0
        """Number of requests placed on the engine."""
        self.bound_waiting = 0
        """Number of requests that wait for this engine alone, because their group is bound to it."""
        self.alive = True
        self.closed = False
        """True if the engine takes no request before its swap, the load of a new version, is over."""
        self.swapping = False
        """True while the engine loads a version."""
        self.suspect: RequestRecord | None = None
        """Suspect that the engine holds; None if it holds none."""

    @property
    def open(self) -> bool:
        """True if the engine takes one more request."""
        return self.alive and not self.closed and self.held < self.limit

    def takes(self, suspect: bool) -> bool:
        """Return True if the engine takes one more request. `suspect` is True if that request is a suspect."""
        return self.open and not (suspect and self.suspect is not None)

    @property
    def load(self) -> float:
        """Requests that the engine holds or that wait for it alone, as a share of the limit."""
        return (self.held + self.bound_waiting) / self.limit

    def begin_swap(self, *, closed: bool) -> None:
        """Note that the engine begins to load a version. With `closed` it takes no request meanwhile."""
        self.swapping, self.closed = True, closed

    def end_swap(self, version: int) -> None:
        """Note that the engine has loaded a version."""
        self.swapping, self.closed, self.version = False, False, version

    def release(self, record: RequestRecord) -> None:
        """Note that a request has left the engine."""
        self.held -= 1
        self.clear_suspect(record)

    def clear_suspect(self, record: RequestRecord) -> None:
        """Note that a request is no danger to this engine: the engine gave a token of it, or no longer holds it.

        The engine may then get another suspect.
        """
        if self.suspect is record:
            self.suspect = None


class Need(NamedTuple):
    """Requirements of a waiting request on its engine."""

    engine: int | None
    """The only engine that may serve the request. None: any engine."""
    min_version: int
    """Oldest version that the engine may have."""
    barred: frozenset[int]
    """Engines that may not serve the request."""
    suspect: bool
    """True if the request is a suspect."""


_Entry = tuple[tuple[int, int], int, RequestRecord]
"""Entry of a wait queue: the record's `order`, its arrival, and the record."""


class Router:
    """Places requests on engines. The module's docstring has the rules.

    Args:
        views: the engines of the node.
        bind_groups: True if all requests of a group go to one engine.
    """

    def __init__(self, views: Sequence[EngineView], *, bind_groups: bool) -> None:
        self.views = views
        self._bind = bind_groups
        self._queues: dict[Need, list[_Entry]] = {}
        """Heaps of waiting requests, one for each need. A request that no longer waits may still have an entry."""
        self._waiting_by_need: Counter[Need] = Counter()
        """Number of requests in each queue that still wait; never 0."""
        self._arrivals = 0
        self._task_engine: dict[int, int] = {}
        """Engine that last served each task; the entry that was set last is at the end."""
        self._group_engine: dict[int, int] = {}
        """Engine that last served each group, or to which the group is bound; in the order of `_task_engine`."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._waiting_by_need.total()

    @property
    def alive(self) -> bool:
        """True if an engine lives."""
        return any(view.alive for view in self.views)

    def failed_by_all(self, record: RequestRecord) -> bool:
        """Return True if every living engine has failed this request."""
        return all(view.index in record.barred for view in self.views if view.alive)

    def room(self) -> int:
        """Return how many more requests could start now, in addition to the waiting requests that could start."""
        ready = [view for view in self.views if view.open and view.version >= 0]
        free = sum(view.limit - view.held for view in ready)
        # Requests that only wait for a version take room, too: tasks that the hub leases next will need this version as
        # well.
        first = sum(count for need, count in self._waiting_by_need.items() if any(_suits(view, need) for view in ready))
        return max(0, free - first)

    # -- requests ----------------------------------------------------------------------------------------------------

    def ask(self, record: RequestRecord) -> int | None:
        """Place a request on an engine and return the engine's index, or put it into the queue and return None."""
        if self.failed_by_all(record):
            # All living engines have failed the request, so each of them may try again.
            record.barred = frozenset()
        # With bound groups the request waits for its engine, even if another one has room.
        bound = self._bound_view(record) if self._bind and self.alive else None
        if bound is None:
            view = self._choose(record)
        else:
            served = bound.takes(record.suspected) and bound.version >= record.min_version
            view = bound if served else None
        if view is None:
            self._enqueue(record, bound)
            return None
        self._assign(view, record)
        return view.index

    def fill(self, engine: int) -> list[RequestRecord]:
        """Place waiting requests on an engine as long as it has room, the oldest first, and return them."""
        view = self.views[engine]
        placed: list[RequestRecord] = []
        while view.open and self._waiting_by_need and (record := self._oldest(view)) is not None:
            self.withdraw(record)
            self._assign(view, record)
            placed.append(record)
        return placed

    def surplus(self, engine: int) -> list[tuple[int, int]]:
        """Return how many requests fuller engines should give to `engine`, as (engine, count) pairs.

        Empty if `engine` has no room or loads a version, if a request waits that it could serve, or if no engine is
        clearly fuller. Empty with bound groups.
        """
        view = self.views[engine]
        if self._bind or not view.open or view.swapping:
            return []
        if self._waiting_by_need and self._oldest(view) is not None:
            return []
        held = {other.index: other.held for other in self.views if other.alive and not other.closed}
        fuller = [index for index in held if self.views[index].version <= view.version]

        def load(index: int, more: int = 0) -> float:
            return (held[index] + more) / self.views[index].limit

        gives: dict[int, int] = {}
        least = UNEVEN
        while held[engine] < view.limit:
            giver = max(fuller, key=lambda index: (load(index), index))
            if load(giver, -1) - load(engine, 1) < least * load(giver):
                break
            # Only the first move needs a clear difference; the others then make the loads equal.
            least = 0.0
            held[giver] -= 1
            held[engine] += 1
            gives[giver] = gives.get(giver, 0) + 1
        return list(gives.items())

    def movable(self, engine: int, records: Iterable[RequestRecord], count: int) -> list[RequestRecord]:
        """Return the first `count` of `records` that may move to `engine` to balance the load.

        `records` are requests that a fuller engine runs.
        """

        def may_move(record: RequestRecord) -> bool:
            # A request with a seed must get the same response in every run. Another engine would draw the rest of the
            # response differently, so such a request moves only before its first token.
            repeatable = record.request.seed is None or not record.proven
            return repeatable and not record.suspected and engine not in record.barred

        return list(islice(filter(may_move, records), count))

    # -- engines -----------------------------------------------------------------------------------------------------

    def retire(self, engine: int) -> list[RequestRecord]:
        """Note that an engine is gone, and return the waiting requests that only this engine could have served.

        The caller lets each of them `ask` again.
        """
        self.views[engine].alive = False
        alive = {view.index for view in self.views if view.alive}
        return self._remove_waiting(lambda need: engine == need.engine or alive <= need.barred)

    def replace(self, engine: int, limit: int, version: int) -> list[RequestRecord]:
        """Note that another engine has taken the place of one that is gone.

        If it is the only one alive, returns all waiting requests, and the caller lets each of them `ask` again: they
        could not be bound to an engine while none was alive.
        """
        first = not self.alive
        view = self.views[engine]
        assert not view.alive, "a place is taken when it is empty"
        assert not view.held, "a place is taken when it is empty"
        view.limit, view.version = limit, version
        view.alive, view.closed, view.swapping = True, False, False
        return self._remove_waiting(lambda need: first)

    def _remove_waiting(self, which: Callable[[Need], bool]) -> list[RequestRecord]:
        """Take all requests whose need `which` accepts out of the queue, and return them.

        Requests with the same need are in the order of their age, the oldest first.
        """
        left: list[RequestRecord] = []
        for need in [need for need in self._queues if which(need)]:
            left += [entry[2] for entry in sorted(self._queues.pop(need), key=_by_age) if _waits(entry)]
        for record in left:
            self.withdraw(record)
        return left

    # -- choice ------------------------------------------------------------------------------------------------------

    def _choose(self, record: RequestRecord) -> EngineView | None:
        """Return the best engine for a request, or None if no engine can take it now."""
        best: EngineView | None = None
        best_key = (True, 0.0, True)
        suspect = record.suspected
        group, task = record.order
        task_engine = self._task_engine.get(task) if record.sticky else None
        group_engine = self._group_engine.get(group) if record.sticky else None
        for view in self.views:
            if not view.takes(suspect) or view.version < record.min_version or view.index in record.barred:
                continue
            # An engine that loads a version is the last choice, because the request would have to wait for the load.
            slack = 1 + TASK_SLACK * view.held if view.index == task_engine else 0.0
            key = (view.swapping, view.load - slack / view.limit, view.index != group_engine)
            if best is None or key < best_key:
                best, best_key = view, key
        return best

    def _bound_view(self, record: RequestRecord) -> EngineView:
        """Return the engine to which the request's group is bound. It binds a group that has none.

        A group gets another engine only if its engine has died or has failed the request. Some engine must be alive.
        """
        group = record.order[0]
        engine = self._group_engine.get(group)
        if engine is not None and self.views[engine].alive and engine not in record.barred:
            return self.views[engine]
        fit = [view for view in self.views if view.alive and view.index not in record.barred]
        view = min(fit, key=lambda view: (view.version < record.min_version, view.closed, view.load, view.index))
        _remember(self._group_engine, group, view.index)
        return view

    def _assign(self, view: EngineView, record: RequestRecord) -> None:
        """Place a request on an engine."""
        view.held += 1
        if record.suspected:
            view.suspect = record
        group, task = record.order
        _remember(self._task_engine, task, view.index)
        if not self._bind:
            _remember(self._group_engine, group, view.index)

    # -- queue -------------------------------------------------------------------------------------------------------

    def _enqueue(self, record: RequestRecord, bound: EngineView | None) -> None:
        """Put a request into the queue; `bound` is the only engine that may serve it, if there is one."""
        record.arrival = self._arrivals
        self._arrivals += 1
        only = None if bound is None else bound.index
        record.need = need = Need(only, record.min_version, record.barred, record.suspected)
        heapq.heappush(self._queues.setdefault(need, []), (record.order, record.arrival, record))
        self._waiting_by_need[need] += 1
        if bound is not None:
            bound.bound_waiting += 1

    def withdraw(self, record: RequestRecord) -> None:
        """Take a request out of the queue. Its entry in the heap is removed later, when it comes to the top."""
        need = record.need
        assert need is not None, "only a waiting request can leave the queue"
        record.arrival = record.need = None
        self._waiting_by_need[need] -= 1
        if not self._waiting_by_need[need]:
            del self._waiting_by_need[need]
        if need.engine is not None:
            self.views[need.engine].bound_waiting -= 1

    def _oldest(self, view: EngineView) -> RequestRecord | None:
        """Return the oldest waiting request that an engine may serve."""
        oldest: _Entry | None = None
        for need, queue in list(self._queues.items()):
            while queue and not _waits(queue[0]):
                heapq.heappop(queue)
            if not queue:
                del self._queues[need]
                continue
            if need.min_version <= view.version and _suits(view, need):
                oldest = queue[0] if oldest is None or _by_age(queue[0]) < _by_age(oldest) else oldest
        return None if oldest is None else oldest[2]


def _suits(view: EngineView, need: Need) -> bool:
    """Return True if an engine may serve requests with this need as soon as its version is new enough."""
    only = need.engine in (None, view.index) and view.takes(need.suspect)
    return only and view.index not in need.barred


def _waits(entry: _Entry) -> bool:
    """Return True if the request still waits with this entry. It may have left the queue, and entered it again with a
    new entry."""
    return entry[2].arrival == entry[1]


def _by_age(entry: _Entry) -> tuple[tuple[int, int], int]:
    """Return the sort key of an entry. The record itself cannot be compared."""
    return entry[:2]


def _remember(engine_of: dict[int, int], key: int, engine: int) -> None:
    """Remember the engine of a task or group. The newest entry is the last, and the oldest is forgotten when there are
    too many."""
    engine_of.pop(key, None)
    engine_of[key] = engine
    if len(engine_of) > REMEMBERED:
        del engine_of[next(iter(engine_of))]
