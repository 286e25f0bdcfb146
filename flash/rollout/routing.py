"""Which engine serves which request, as a pure state machine.

A request goes to the least loaded engine that is recent enough for its lease; the one that served the same task before
is preferred as long as it is not much fuller, and among equals the one that served its group. What fits nowhere waits,
and leaves in the order of its tasks, the oldest first; while nothing waits for it, an engine with room is given its
share of what clearly fuller ones run. With bound groups all requests of a group go to one engine, and wait for it.

An engine that dies by itself may have been killed by one of its requests. One under which engines have died twice, none
of which had given a token of it, is a *suspect*, until another engine gives one. An engine has one suspect at a time,
so that the next death convicts the right one.

Invariant (work conservation): no engine with room waits beside a request that it may serve.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from flash.rollout.engine import ResponseRequest

TASK_SLACK = 0.25
"""How much fuller, as a share of its requests, the engine that served a task before may be than the emptiest one: it
saves computing the whole context. The one that served a sibling saves only the prompt, and decides between equals."""
UNEVEN = 0.25
"""By how much of its requests an engine must be fuller than another to give some away: moving costs their prefill."""
SUSPECTED = 2
"""Engines that have died under a suspect: once may be chance, and suspects wait for each other."""
MAX_DEATHS = 3
"""Engines that may die under a request, none of which had given a token of it, before it is given to no other one."""
REMEMBERED = 1 << 16
"""Tasks and groups whose engine is remembered: more than live at once on a node."""


class RequestRecord:
    """The router's own record of one request: where it waits, and what has become of it so far. Mutable."""

    def __init__(self, request: ResponseRequest) -> None:
        self.request = request
        self.order = (request.group_id, request.task_id)
        """Position in the wait queue: the smaller, the older."""
        self.min_version = request.min_version
        self.barred: frozenset[int] = frozenset()
        """Engines that failed the request."""
        self.place: int | None = None
        """Number in the order of arrival; None unless the request waits."""
        self.need: Need | None = None
        """Requirements on the engine; None unless the request waits."""
        self.settled = True
        """True if the router prefers the engine that served the task or group before."""
        self.proven = False
        """True if the engine that holds the request has given a token of it."""
        self.deaths = 0
        """Engines that have died under the request since one of them has given a token of it."""
        self.death = ""
        """How the last of these engines died."""

    @property
    def movable(self) -> bool:
        """True if the request may move to balance the load. With a seed it may not once it has tokens.

        A moved request goes on with other draws, which no other run of the same seed would repeat.
        """
        return not (self.request.seed is not None and self.proven)

    @property
    def suspected(self) -> bool:
        """Whether it may be what kills engines."""
        return self.deaths >= SUSPECTED

    def died_under(self, death: str) -> None:
        """The engine that ran it has died by itself."""
        if not self.proven:
            self.deaths, self.death = self.deaths + 1, death


class EngineView:
    """One engine as the router sees it: its owner says what becomes of it, the router what is placed on it."""

    def __init__(self, index: int, limit: int, version: int) -> None:
        self.index = index
        self.limit = limit
        self.version = version
        self.held = 0
        """Requests placed on it."""
        self.bound = 0
        """Requests that wait for it alone."""
        self.alive = True
        self.closed = False
        """It takes no request before its swap is over."""
        self.swapping = False
        self.suspect: RequestRecord | None = None
        """Of its requests the one that may kill it."""

    @property
    def open(self) -> bool:
        """Whether it takes one more request."""
        return self.alive and not self.closed and self.held < self.limit

    def takes(self, suspect: bool) -> bool:
        """Whether it takes one more such request."""
        return self.open and not (suspect and self.suspect is not None)

    @property
    def load(self) -> float:
        """How full it is, what waits for it included."""
        return (self.held + self.bound) / self.limit

    def begin_swap(self, *, closed: bool) -> None:
        """It begins to load a version; `closed`: nothing may start on it meanwhile."""
        self.swapping, self.closed = True, closed

    def end_swap(self, version: int) -> None:
        """It has loaded this version."""
        self.swapping, self.closed, self.version = False, False, version

    def release(self, record: RequestRecord) -> None:
        """A request that was placed on it has left it."""
        self.held -= 1
        self.acquit(record)

    def acquit(self, record: RequestRecord) -> None:
        """It has given a token of a request, or the request has left it: it may have another suspect."""
        if self.suspect is record:
            self.suspect = None


class Need(NamedTuple):
    """Requirements of a waiting request on its engine."""

    engine: int | None
    min_version: int
    barred: frozenset[int]
    suspect: bool


_Entry = tuple[tuple[int, int], int, RequestRecord]
"""A place in a queue: the request's `order`, which is its age, its order of arrival, and the request."""


class Router:
    """Places requests on engines."""

    def __init__(self, views: Sequence[EngineView], *, bind_groups: bool) -> None:
        self.views = views
        self._bind = bind_groups
        self._queues: dict[Need, list[_Entry]] = {}
        self._counts: Counter[Need] = Counter()
        """Of them those that still wait; never 0."""
        self._arrivals = 0
        self._task_engine: dict[int, int] = {}
        self._group_engine: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._counts.total()

    @property
    def alive(self) -> bool:
        """Whether an engine lives."""
        return any(view.alive for view in self.views)

    def hopeless(self, record: RequestRecord) -> bool:
        """Whether every living engine has failed this request."""
        return all(view.index in record.barred for view in self.views if view.alive)

    def room(self) -> int:
        """Requests that could start now, beyond those that wait for the same engines."""
        ready = [view for view in self.views if view.open and view.version >= 0]
        free = sum(view.limit - view.held for view in ready)
        # Also who waits for a version alone: what a hub hands out next needs that one, too.
        first = sum(count for need, count in self._counts.items() if any(_suits(view, need) for view in ready))
        return max(0, free - first)

    # -- requests ----------------------------------------------------------------------------------------------------

    def ask(self, record: RequestRecord) -> int | None:
        """Place a request and return its engine, or let it wait."""
        if self.hopeless(record):
            # The engine that could still serve it has died: those that have failed it get another chance.
            record.barred = frozenset()
        bound = self._bound_view(record) if self._bind and self.alive else None
        if bound is None:
            view = self._choose(record)
        else:
            served = bound.takes(record.suspected) and bound.version >= record.min_version
            view = bound if served else None
        if view is None:
            self._wait(record, bound)
            return None
        self._hold(view, record)
        return view.index

    def fill(self, engine: int) -> list[RequestRecord]:
        """Place waiting requests on an engine that may have got room; the oldest first."""
        view = self.views[engine]
        placed: list[RequestRecord] = []
        while view.open and self._counts and (record := self._oldest(view)) is not None:
            self.withdraw(record)
            self._hold(view, record)
            placed.append(record)
        return placed

    def surplus(self, engine: int) -> list[tuple[int, int]]:
        """How many requests each fuller engine should give to one that has room: (engine, count) pairs.

        None are given unless the fullest is clearly fuller, nor while others wait that it may serve, nor to one that
        swaps.
        """
        view = self.views[engine]
        if self._bind or not view.open or view.swapping:
            return []
        if self._counts and self._oldest(view) is not None:
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
            least = 0.0
            held[giver] -= 1
            held[engine] += 1
            gives[giver] = gives.get(giver, 0) + 1
        return list(gives.items())

    def adopted(self, engine: int, requests: Iterable[RequestRecord], count: int) -> list[RequestRecord]:
        """Return the first `count` of these requests of a fuller engine that may move to this engine."""
        fit = (one for one in requests if one.movable and not one.suspected and engine not in one.barred)
        return list(islice(fit, count))

    # -- engines -----------------------------------------------------------------------------------------------------

    def fail(self, engine: int) -> list[RequestRecord]:
        """An engine is gone; returns the requests that it alone could serve, to be asked again."""
        self.views[engine].alive = False
        alive = {view.index for view in self.views if view.alive}
        return self._expel(lambda need: engine == need.engine or alive <= need.barred)

    def replace(self, engine: int, limit: int, version: int) -> list[RequestRecord]:
        """Another engine takes the place of one that is gone; returns the requests to be asked again.

        They have waited without any engine, and could not be bound to one.
        """
        first = not self.alive
        view = self.views[engine]
        assert not view.alive, "a place is taken when it is empty"
        assert not view.held, "a place is taken when it is empty"
        view.limit, view.version = limit, version
        view.alive, view.closed, view.swapping = True, False, False
        return self._expel(lambda need: first)

    def _expel(self, which: Callable[[Need], bool]) -> list[RequestRecord]:
        """Take requests out of the queue by what they need, the oldest of each kind first."""
        left: list[RequestRecord] = []
        for need in [need for need in self._queues if which(need)]:
            left += [entry[2] for entry in sorted(self._queues.pop(need), key=_by_age) if _waits(entry)]
        for record in left:
            self.withdraw(record)
        return left

    # -- choice ------------------------------------------------------------------------------------------------------

    def _choose(self, record: RequestRecord) -> EngineView | None:
        best: EngineView | None = None
        best_key = (True, 0.0, True)
        suspect = record.suspected
        group, task = record.order
        mine = self._task_engine.get(task) if record.settled else None
        ours = self._group_engine.get(group) if record.settled else None
        for view in self.views:
            if not view.takes(suspect) or view.version < record.min_version or view.index in record.barred:
                continue
            # A swapping engine would make the request wait for its pause.
            slack = 1 + TASK_SLACK * view.held if view.index == mine else 0.0
            key = (view.swapping, view.load - slack / view.limit, view.index != ours)
            if best is None or key < best_key:
                best, best_key = view, key
        return best

    def _bound_view(self, record: RequestRecord) -> EngineView:
        """The engine of the request's group; chosen once, and again only when it dies or fails the request."""
        group = record.order[0]
        engine = self._group_engine.get(group)
        if engine is not None and self.views[engine].alive and engine not in record.barred:
            return self.views[engine]
        fit = [view for view in self.views if view.alive and view.index not in record.barred]
        view = min(fit, key=lambda view: (view.version < record.min_version, view.closed, view.load, view.index))
        _remember(self._group_engine, group, view.index)
        return view

    def _hold(self, view: EngineView, record: RequestRecord) -> None:
        view.held += 1
        if record.suspected:
            view.suspect = record
        group, task = record.order
        _remember(self._task_engine, task, view.index)
        if not self._bind:
            _remember(self._group_engine, group, view.index)

    # -- queue -------------------------------------------------------------------------------------------------------

    def _wait(self, record: RequestRecord, bound: EngineView | None) -> None:
        record.place = self._arrivals
        self._arrivals += 1
        only = None if bound is None else bound.index
        record.need = need = Need(only, record.min_version, record.barred, record.suspected)
        heapq.heappush(self._queues.setdefault(need, []), (record.order, record.place, record))
        self._counts[need] += 1
        if bound is not None:
            bound.bound += 1

    def withdraw(self, record: RequestRecord) -> None:
        """A request waits no more; its entry in the heap is cleared when it comes to the top."""
        need = record.need
        assert need is not None, "only a waiting request can leave the queue"
        record.place = record.need = None
        self._counts[need] -= 1
        if not self._counts[need]:
            del self._counts[need]
        if need.engine is not None:
            self.views[need.engine].bound -= 1

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
    """True if an engine may serve requests with this need as soon as its version is new enough."""
    only = need.engine in (None, view.index) and view.takes(need.suspect)
    return only and view.index not in need.barred


def _waits(entry: _Entry) -> bool:
    """True if the request still waits at this place; it may have left, and come back at another place."""
    return entry[2].place == entry[1]


def _by_age(entry: _Entry) -> tuple[tuple[int, int], int]:
    return entry[:2]


def _remember(memory: dict[int, int], name: int, engine: int) -> None:
    """Newest last; the oldest is forgotten."""
    memory.pop(name, None)
    memory[name] = engine
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
