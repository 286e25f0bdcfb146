"""Router: decides which engine serves which request. A pure state machine.

`flash.rollout.proxy.LLMProxy` calls `ask` for each request, `fill` when an engine has room, and `retire` and `replace`
when an engine has died or a new engine has its place. The proxy carries out the decisions.

A *version* is the state of the policy's weights after one training step. Each request has a `min_version`, the oldest
version that may serve it: with older weights its tokens would be too old when they are trained.

A request goes to the least loaded engine whose version is new enough. A *task* asks for one sample, whose episode sends
a request for each turn. A *group* is the tasks with one prompt. The engine that served the same task before is
preferred as long as it is not much fuller, and then the engine that served the group: their caches hold a part of the
context. If no engine can take a request, it waits in a queue, from which the requests of the oldest tasks are taken
first. When an engine has room and no request waits for it, it is given requests that clearly fuller engines run. With
*bound groups* all requests of a group go to one engine, and wait for that engine.

An engine that dies by itself may have been killed by one of its requests. A request is a *suspect* if `SUSPECTED`
engines have died under it and none of them had given a token of it. The request is no suspect any more when an engine
gives a token of it (it is then *proven*). An engine has at most one suspect at a time, so its death shows which one is
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
"""Difference in load up to which the engine that served a task before is preferred to the emptiest engine: one request,
and this share of the requests that it holds. That engine has the whole context of the task in its cache. The engine
that served another sample of the group has only the prompt in its cache, so it is preferred only among engines that are
equally full."""
UNEVEN = 0.25
"""Share of its load by which an engine must be fuller than another engine before requests are moved. A move costs
time: the other engine has to compute the context of the request again."""
SUSPECTED = 2
"""Number of deaths of engines that make a request a suspect. One death is too few: it may be chance, and suspects are
served more slowly, because they may have to wait for one another."""
MAX_DEATHS = 3
"""Number of deaths of engines after which a request is given to no other engine. Only engines that had given no token
of the request count. Three deaths under one request are hardly chance, and a further death would cost the work of
another engine."""
REMEMBERED = 1 << 16
"""Number of tasks, and of groups, whose engine is remembered. This is more than a node runs at once; older entries
would only fill memory."""


class RequestRecord:
    """The router's record of one request: its place in the queue, and the engines that have failed or died under it.

    The proxy makes one for each `generate` call, and changes it when an engine gives a token, fails or dies.
    """

    def __init__(self, request: ResponseRequest) -> None:
        self.request = request
        self.order = (request.group_id, request.task_id)
        """Order in the wait queue: requests with smaller numbers are taken first."""
        self.min_version = request.min_version
        """Oldest version that may serve the request."""
        self.barred: frozenset[int] = frozenset()
        """Indices of engines that have failed the request. These engines get the request again only when all living
        engines have failed it."""
        self.arrival: int | None = None
        """Number in the order of arrival in the queue; None if the request does not wait."""
        self.need: Need | None = None
        """Requirements on the engine; None if the request does not wait."""
        self.sticky = True
        """True if the engine that served the task or group before is preferred. False after the request was moved to
        balance the load: with the preference it would go back to the engine that it has left."""
        self.proven = False
        """True if the engine that holds the request has given a token of it. So the request does not kill this
        engine."""
        self.deaths = 0
        """Number of engines that have died under the request since an engine last gave a token of it."""
        self.death = ""
        """Text that says how an engine died, from the death that was counted last; empty before the first death."""

    @property
    def suspected(self) -> bool:
        """True if the request may be the cause of deaths of engines."""
        return self.deaths >= SUSPECTED

    def died_under(self, death: str) -> None:
        """Note that the engine that ran the request has died by itself. `death` says how, for the error message."""
        if not self.proven:
            self.deaths, self.death = self.deaths + 1, death


class EngineView:
    """State of one engine that the router's decisions depend on. `EngineRecord` of the proxy has the further state."""

    def __init__(self, index: int, limit: int, version: int) -> None:
        self.index = index
        """Number of the engine's place on the node, from 0: its position in `Router.views`."""
        self.limit = limit
        """Largest number of requests that the engine may hold now."""
        self.version = version
        """Version that the engine has loaded; −1 before the first one."""
        self.held = 0
        """Number of requests placed on the engine."""
        self.bound_waiting = 0
        """Number of requests that wait for this engine alone, because their group is bound to it."""
        self.alive = True
        """False from the death of the engine until another one has its place."""
        self.closed = False
        """True if the engine takes no request until its swap, the load of a new version, is over. The proxy closes an
        engine that must be free of requests before the load."""
        self.swapping = False
        """True while the engine loads a version."""
        self.suspect: RequestRecord | None = None
        """Suspect that the engine holds; None if it holds none."""

    @property
    def open(self) -> bool:
        """True if the engine has room for one more request that is no suspect."""
        return self.alive and not self.closed and self.held < self.limit

    def takes(self, suspect: bool) -> bool:
        """Return True if the engine has room for one more request. `suspect` is True if that request is a suspect."""
        return self.open and not (suspect and self.suspect is not None)

    @property
    def load(self) -> float:
        """Requests that the engine holds or that wait for it alone, divided by the limit."""
        return (self.held + self.bound_waiting) / self.limit

    def begin_swap(self, *, closed: bool) -> None:
        """Note that a swap of the engine begins. If `closed` is True, the engine takes no request until it is over."""
        self.swapping, self.closed = True, closed

    def end_swap(self, version: int) -> None:
        """Note that the engine has loaded a version, and takes requests again."""
        self.swapping, self.closed, self.version = False, False, version

    def release(self, record: RequestRecord) -> None:
        """Note that a request has left the engine."""
        self.held -= 1
        self.clear_suspect(record)

    def clear_suspect(self, record: RequestRecord) -> None:
        """If a request is the engine's suspect, note that it is none any more, so that the engine may get another.

        This is called when the engine has given a token of the request, or no longer holds it.
        """
        if self.suspect is record:
            self.suspect = None


class Need(NamedTuple):
    """Requirements of a waiting request on its engine. Requests with equal needs wait in one queue."""

    engine: int | None
    """Index of the only engine that may serve the request, because its group is bound to it. None: any engine."""
    min_version: int
    """Oldest version that the engine may have."""
    barred: frozenset[int]
    """Indices of engines that have failed the request and may not serve it."""
    suspect: bool
    """True if the request is a suspect."""


_Entry = tuple[tuple[int, int], int, RequestRecord]
"""Entry of a wait queue: the record's `order`, its arrival, and the record."""


class Router:
    """Places requests on engines. The module's docstring has the rules.

    Args:
        views: the engines of the node.
        bind_groups: True if all requests of a group go to one engine (for comparison).
    """

    def __init__(self, views: Sequence[EngineView], *, bind_groups: bool) -> None:
        self.views = views
        self._bind = bind_groups
        self._queues: dict[Need, list[_Entry]] = {}
        """Heaps of waiting requests, one for each need. A request that no longer waits may still have an entry, because
        an entry in the middle of a heap cannot be removed cheaply."""
        self._waiting_by_need: Counter[Need] = Counter()
        """Number of requests that still wait with each need; needs with which no request waits are left out."""
        self._arrivals = 0
        """Number of requests that have entered the queue so far."""
        self._task_engine: dict[int, int] = {}
        """Index of the engine that last served each task. The newest entry is at the end; old ones are forgotten."""
        self._group_engine: dict[int, int] = {}
        """Index of the engine that last served each group, or to which the group is bound. Ordered as
        `_task_engine`."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._waiting_by_need.total()

    @property
    def alive(self) -> bool:
        """True if an engine lives."""
        return any(view.alive for view in self.views)

    def failed_by_all(self, record: RequestRecord) -> bool:
        """Return True if every living engine has failed this request, and also if no engine is alive."""
        return all(view.index in record.barred for view in self.views if view.alive)

    def room(self) -> int:
        """Return how many more requests could start now; the scheduler starts that many episodes.

        Engines without a version do not count. Room that waiting requests will take is subtracted.
        """
        ready = [view for view in self.views if view.open and view.version >= 0]
        free = sum(view.limit - view.held for view in ready)
        # `_suits` ignores versions, so requests that wait for a newer version take room, too: tasks that the hub leases
        # next will need this version as well, so they could not start either.
        first = sum(count for need, count in self._waiting_by_need.items() if any(_suits(view, need) for view in ready))
        return max(0, free - first)

    # -- requests ----------------------------------------------------------------------------------------------------

    def ask(self, record: RequestRecord) -> int | None:
        """Place a request on an engine and return the engine's index, or put it into the queue and return None.

        The proxy calls this for a new request, and for a request that has left its engine or the queue.
        """
        if self.failed_by_all(record):
            # All living engines have failed the request. Each of them may try again, because otherwise the request
            # would wait for ever.
            record.barred = frozenset()
        # With bound groups the request waits for the engine of its group, even if another engine has room.
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
        """Place waiting requests on an engine as long as it has room, the oldest first, and return them.

        The proxy calls this when the engine may have more room or a newer version, and wakes the tasks of the requests.
        """
        view = self.views[engine]
        placed: list[RequestRecord] = []
        while view.open and self._waiting_by_need and (record := self._oldest(view)) is not None:
            self.withdraw(record)
            self._assign(view, record)
            placed.append(record)
        return placed

    def surplus(self, engine: int) -> list[tuple[int, int]]:
        """Return how many requests fuller engines should give to `engine`, as (engine, count) pairs.

        The proxy moves them, because the fullest engine is the slowest. The result is empty if `engine` has no room or
        loads a version, if a request waits that it could serve, if no engine is clearly fuller, or with bound groups.
        Engines with a newer version than `engine` give none, because their responses would continue with older weights.
        """
        view = self.views[engine]
        if self._bind or not view.open or view.swapping:
            return []
        if self._waiting_by_need and self._oldest(view) is not None:
            return []
        # Count the moves in `held`, one at a time, from the fullest engine to `engine`, which may itself be the
        # fullest.
        # A closed engine gives none: all its requests leave, or end, before its swap anyway.
        held = {other.index: other.held for other in self.views if other.alive and not other.closed}
        fuller = [index for index in held if self.views[index].version <= view.version]

        def load(index: int, more: int = 0) -> float:
            """Return the load of an engine after these moves, if it held `more` requests more."""
            return (held[index] + more) / self.views[index].limit

        gives: dict[int, int] = {}
        least = UNEVEN
        while held[engine] < view.limit:
            giver = max(fuller, key=lambda index: (load(index), index))
            # Compare the loads that the two engines would have after one more move.
            if load(giver, -1) - load(engine, 1) < least * load(giver):
                break
            # Only the first move needs a clear difference. Further moves go on until the loads are equal.
            least = 0.0
            held[giver] -= 1
            held[engine] += 1
            gives[giver] = gives.get(giver, 0) + 1
        return list(gives.items())

    def movable(self, engine: int, records: Iterable[RequestRecord], count: int) -> list[RequestRecord]:
        """Return the first `count` of `records` that may move to `engine` to balance the load.

        `records` are requests that a fuller engine runs. These stay where they are: suspects, requests that `engine`
        has failed before, and requests with a seed of which the fuller engine has given a token.
        """

        def may_move(record: RequestRecord) -> bool:
            """Return True if a request may continue on `engine`."""
            # A request with a seed must get the same response in every run. Another engine would draw the rest of the
            # response differently, so such a request moves only before its first token on the engine that holds it.
            repeatable = record.request.seed is None or not record.proven
            return repeatable and not record.suspected and engine not in record.barred

        return list(islice(filter(may_move, records), count))

    # -- engines -----------------------------------------------------------------------------------------------------

    def retire(self, engine: int) -> list[RequestRecord]:
        """Mark an engine as dead, and return the waiting requests that only this engine could have served.

        The requests leave the queue, and the proxy lets each of them `ask` again.
        """
        self.views[engine].alive = False
        alive = {view.index for view in self.views if view.alive}
        return self._remove_waiting(lambda need: engine == need.engine or alive <= need.barred)

    def replace(self, engine: int, limit: int, version: int) -> list[RequestRecord]:
        """Note that another engine has taken the place of a dead engine.

        `limit` and `version` are those of the new engine: the number of requests that it may hold, and the version that
        it has loaded (−1: none). If it is the only living engine, this returns all waiting requests. The requests leave
        the queue, and the proxy lets each of them `ask` again, because while no engine was alive, no group could be
        bound to an engine.
        """
        first = not self.alive
        view = self.views[engine]
        assert not view.alive, "only a dead engine is replaced"
        assert not view.held, "a dead engine is replaced when its requests have left it"
        view.limit, view.version = limit, version
        view.alive, view.closed, view.swapping = True, False, False
        return self._remove_waiting(lambda need: first)

    def _remove_waiting(self, which: Callable[[Need], bool]) -> list[RequestRecord]:
        """Take all requests whose need `which` accepts out of the queue, and return them.

        Requests with the same need are sorted by age, the oldest first, so that they ask again in this order.
        """
        left: list[RequestRecord] = []
        for need in [need for need in self._queues if which(need)]:
            left += [entry[2] for entry in sorted(self._queues.pop(need), key=_by_age) if _waits(entry)]
        for record in left:
            self.withdraw(record)
        return left

    # -- choice ------------------------------------------------------------------------------------------------------

    def _choose(self, record: RequestRecord) -> EngineView | None:
        """Return the best engine for a request by the rules of the module's docstring; None if none can take it now."""
        best: EngineView | None = None
        best_key = (True, 0.0, True)
        suspect = record.suspected
        group, task = record.order
        task_engine = self._task_engine.get(task) if record.sticky else None
        group_engine = self._group_engine.get(group) if record.sticky else None
        for view in self.views:
            if not view.takes(suspect) or view.version < record.min_version or view.index in record.barred:
                continue
            # The smallest key wins. An engine that loads a version is the last choice, because the request would have
            # to wait for the load.
            slack = 1 + TASK_SLACK * view.held if view.index == task_engine else 0.0
            key = (view.swapping, view.load - slack / view.limit, view.index != group_engine)
            if best is None or key < best_key:
                best, best_key = view, key
        return best

    def _bound_view(self, record: RequestRecord) -> EngineView:
        """Return the engine to which the request's group is bound, even if that engine has no room now.

        Binds the group to an engine if it has none yet, or if its engine has died or has failed this request. At least
        one engine must be alive.
        """
        group = record.order[0]
        engine = self._group_engine.get(group)
        if engine is not None and self.views[engine].alive and engine not in record.barred:
            return self.views[engine]
        # `ask` has made sure that there is such an engine. The best one has a version that is new enough, takes
        # requests, and is the least loaded.
        fit = [view for view in self.views if view.alive and view.index not in record.barred]
        view = min(fit, key=lambda view: (view.version < record.min_version, view.closed, view.load, view.index))
        _remember(self._group_engine, group, view.index)
        return view

    def _assign(self, view: EngineView, record: RequestRecord) -> None:
        """Place a request on an engine, and remember the engine for later requests of the task and the group."""
        view.held += 1
        if record.suspected:
            view.suspect = record
        group, task = record.order
        _remember(self._task_engine, task, view.index)
        if not self._bind:
            _remember(self._group_engine, group, view.index)

    # -- queue -------------------------------------------------------------------------------------------------------

    def _enqueue(self, record: RequestRecord, bound: EngineView | None) -> None:
        """Put a request into the queue. `bound`: the engine to which its group is bound; None if it may have any."""
        record.arrival = self._arrivals
        self._arrivals += 1
        only = None if bound is None else bound.index
        record.need = need = Need(only, record.min_version, record.barred, record.suspected)
        heapq.heappush(self._queues.setdefault(need, []), (record.order, record.arrival, record))
        self._waiting_by_need[need] += 1
        if bound is not None:
            bound.bound_waiting += 1

    def withdraw(self, record: RequestRecord) -> None:
        """Take a waiting request out of the queue: it was placed, has to ask again, or was cancelled.

        The entry of the request stays in the heap until it comes to the top (`_oldest`).
        """
        need = record.need
        assert need is not None, "only a waiting request can leave the queue"
        record.arrival = record.need = None
        self._waiting_by_need[need] -= 1
        if not self._waiting_by_need[need]:
            del self._waiting_by_need[need]
        if need.engine is not None:
            self.views[need.engine].bound_waiting -= 1

    def _oldest(self, view: EngineView) -> RequestRecord | None:
        """Return the oldest waiting request that an engine may serve now; None if there is none.

        Also removes entries of requests that no longer wait from the tops of the heaps, and removes empty heaps.
        """
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
    """Return True if an engine has room for a request with this need and may serve it. Ignores the engine's version."""
    only = need.engine in (None, view.index) and view.takes(need.suspect)
    return only and view.index not in need.barred


def _waits(entry: _Entry) -> bool:
    """Return True if the request still waits with this entry, and not with a later entry or not at all."""
    return entry[2].arrival == entry[1]


def _by_age(entry: _Entry) -> tuple[tuple[int, int], int]:
    """Return the sort key of an entry: the age of the task, then the arrival. The record itself cannot be compared."""
    return entry[:2]


def _remember(engine_of: dict[int, int], key: int, engine: int) -> None:
    """Set the engine of a task or group as the newest entry of `engine_of`. Keep at most `REMEMBERED` entries."""
    engine_of.pop(key, None)
    engine_of[key] = engine
    if len(engine_of) > REMEMBERED:
        del engine_of[next(iter(engine_of))]
