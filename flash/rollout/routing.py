"""Which engine serves which request, as a pure state machine.

A request goes to the least loaded engine that is recent enough for its lease; the one that served the same task before
is preferred as long as it is not much fuller, and among equals the one that served its group. What fits nowhere waits,
and leaves in the order of its tasks, the oldest first. With bound groups all requests of a group go to one engine, and
wait for it.

Invariant (work conservation): no engine with room waits beside a request that it may serve.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

TASK_SLACK = 0.25
"""How much fuller, as a share of its requests, the engine that served a task before may be than the emptiest one: it
saves computing the whole context. The one that served a sibling saves only the prompt, and decides between equals."""
UNEVEN = 0.25
"""By how much of its requests an engine must be fuller than another to give some away: moving costs their prefill."""
REMEMBERED = 1 << 16
"""Tasks and groups whose engine is remembered: more than live at once on a node."""


class Ticket:
    """One request that wants an engine. `affinity`: its group's and its task's number."""

    def __init__(self, affinity: tuple[int, int], min_version: int) -> None:
        self.affinity = affinity
        self.min_version = min_version
        self.barred: frozenset[int] = frozenset()
        """Engines that failed it."""
        self.place: int | None = None
        """Its number in the order of arrival while it waits."""
        self.bound: int | None = None
        """The only engine it waits for, if any."""
        self.settled = True
        """Whether the engine that served its task or group before is preferred."""


class Lane:
    """One engine as the router sees it."""

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

    @property
    def open(self) -> bool:
        """Whether it takes one more request."""
        return self.alive and not self.closed and self.held < self.limit

    @property
    def load(self) -> float:
        """How full it is, what waits for it included."""
        return (self.held + self.bound) / self.limit


class _Need(NamedTuple):
    """What a waiting request asks of its engine."""

    engine: int | None
    min_version: int
    barred: frozenset[int]


_Entry = tuple[tuple[int, int], int, Ticket]
"""A place in a queue: the ticket's affinity, which is its age, the order of arrival, and the ticket."""


class Router:
    """Places tickets on lanes."""

    def __init__(self, limit: int, versions: Sequence[int], *, bind_groups: bool) -> None:
        self.lanes = [Lane(index, limit, version) for index, version in enumerate(versions)]
        self._bind = bind_groups
        self._queues: dict[_Need, list[_Entry]] = {}
        self._arrivals = 0
        self.waiting = 0
        """Tickets that wait."""
        self._task_engine: dict[int, int] = {}
        self._group_engine: dict[int, int] = {}

    @property
    def alive(self) -> bool:
        """Whether an engine lives."""
        return any(lane.alive for lane in self.lanes)

    def hopeless(self, ticket: Ticket) -> bool:
        """Whether every living engine has failed this ticket."""
        return all(lane.index in ticket.barred for lane in self.lanes if lane.alive)

    def room(self) -> int:
        """Requests that could start now, beyond those that wait."""
        free = sum(lane.limit - lane.held for lane in self.lanes if lane.open and lane.version >= 0)
        return max(0, free - self.waiting)

    # -- tickets -----------------------------------------------------------------------------------------------------

    def ask(self, ticket: Ticket) -> int | None:
        """Place a ticket and return its engine, or let it wait. Some engine has to live."""
        if self.hopeless(ticket):
            # The engine that could still serve it has died: those that have failed it get another chance.
            ticket.barred = frozenset()
        bound = self._bound_lane(ticket) if self._bind else None
        if bound is None:
            lane = self._choose(ticket)
        else:
            lane = bound if bound.open and bound.version >= ticket.min_version else None
        if lane is None:
            self._wait(ticket, bound)
            return None
        self._hold(lane, ticket)
        return lane.index

    def withdraw(self, ticket: Ticket) -> None:
        """A waiting ticket is not wanted any more."""
        self._leave(ticket)

    def release(self, engine: int) -> None:
        """A placed ticket has left its engine."""
        self.lanes[engine].held -= 1

    def fill(self, engine: int) -> list[Ticket]:
        """Place waiting tickets on an engine that may have got room; the oldest first."""
        lane = self.lanes[engine]
        placed: list[Ticket] = []
        while lane.open and self.waiting and (ticket := self._oldest(lane)) is not None:
            self._leave(ticket)
            self._hold(lane, ticket)
            placed.append(ticket)
        return placed

    def surplus(self, engine: int) -> list[tuple[int, int]]:
        """How many requests each fuller engine should give to one that has just become free: (engine, count) pairs.

        None are given unless the fullest is clearly fuller, nor while others wait anyway.
        """
        lane = self.lanes[engine]
        if self._bind or self.waiting or not lane.open:
            return []
        held = {other.index: other.held for other in self.lanes if other.alive and not other.closed}
        gives: dict[int, int] = {}
        fuller = [index for index in held if self.lanes[index].version <= lane.version]
        least = max(2, math.ceil(UNEVEN * max(held[index] for index in fuller)))
        while held[engine] < lane.limit:
            giver = max(fuller, key=lambda index: (held[index], index))
            if held[giver] - held[engine] < least:
                break
            least = 2
            held[giver] -= 1
            held[engine] += 1
            gives[giver] = gives.get(giver, 0) + 1
        return list(gives.items())

    # -- engines -----------------------------------------------------------------------------------------------------

    def set_limit(self, engine: int, limit: int) -> None:
        """An engine may hold this many requests."""
        self.lanes[engine].limit = limit

    def begin_swap(self, engine: int, *, closed: bool) -> None:
        """An engine begins to load a version; `closed`: nothing may start on it meanwhile."""
        self.lanes[engine].swapping, self.lanes[engine].closed = True, closed

    def end_swap(self, engine: int, version: int) -> None:
        """An engine has loaded this version."""
        lane = self.lanes[engine]
        lane.swapping, lane.closed, lane.version = False, False, version

    def fail(self, engine: int) -> list[Ticket]:
        """An engine is gone for good; returns the tickets that it alone could serve, to be asked again."""
        self.lanes[engine].alive = False
        alive = {lane.index for lane in self.lanes if lane.alive}
        left: list[Ticket] = []
        for need in [need for need in self._queues if need.engine == engine or alive <= need.barred]:
            left += [entry[2] for entry in sorted(self._queues.pop(need), key=_by_age) if _waits(entry)]
        for ticket in left:
            self._leave(ticket)
        return left

    # -- choice ------------------------------------------------------------------------------------------------------

    def _choose(self, ticket: Ticket) -> Lane | None:
        best: Lane | None = None
        best_key = (True, 0.0, True)
        group, task = ticket.affinity
        mine = self._task_engine.get(task) if ticket.settled else None
        ours = self._group_engine.get(group) if ticket.settled else None
        for lane in self.lanes:
            if not lane.open or lane.version < ticket.min_version or lane.index in ticket.barred:
                continue
            # A swapping engine would make the request wait for its pause.
            slack = 1 + TASK_SLACK * lane.held if lane.index == mine else 0.0
            key = (lane.swapping, lane.load - slack / lane.limit, lane.index != ours)
            if best is None or key < best_key:
                best, best_key = lane, key
        return best

    def _bound_lane(self, ticket: Ticket) -> Lane:
        """The engine of the ticket's group; chosen once, and again only when it dies or fails the ticket."""
        group = ticket.affinity[0]
        engine = self._group_engine.get(group)
        if engine is not None and self.lanes[engine].alive and engine not in ticket.barred:
            return self.lanes[engine]
        fit = [lane for lane in self.lanes if lane.alive and lane.index not in ticket.barred]
        lane = min(fit, key=lambda lane: (lane.version < ticket.min_version, lane.closed, lane.load, lane.index))
        _remember(self._group_engine, group, lane.index)
        return lane

    def _hold(self, lane: Lane, ticket: Ticket) -> None:
        lane.held += 1
        group, task = ticket.affinity
        _remember(self._task_engine, task, lane.index)
        if not self._bind:
            _remember(self._group_engine, group, lane.index)

    # -- queue -------------------------------------------------------------------------------------------------------

    def _wait(self, ticket: Ticket, bound: Lane | None) -> None:
        ticket.bound = bound.index if bound is not None else None
        ticket.place = self._arrivals
        self._arrivals += 1
        need = _Need(ticket.bound, ticket.min_version, ticket.barred)
        heapq.heappush(self._queues.setdefault(need, []), (ticket.affinity, ticket.place, ticket))
        self.waiting += 1
        if bound is not None:
            bound.bound += 1

    def _leave(self, ticket: Ticket) -> None:
        """A ticket stops waiting; its entry in the heap is cleared when it comes to the top."""
        assert ticket.place is not None, "only a waiting ticket can leave the queue"
        ticket.place = None
        self.waiting -= 1
        if ticket.bound is not None:
            self.lanes[ticket.bound].bound -= 1

    def _oldest(self, lane: Lane) -> Ticket | None:
        oldest: _Entry | None = None
        for need, queue in list(self._queues.items()):
            while queue and not _waits(queue[0]):
                heapq.heappop(queue)
            if not queue:
                del self._queues[need]
                continue
            mine = need.engine is None or need.engine == lane.index
            if mine and need.min_version <= lane.version and lane.index not in need.barred:
                oldest = queue[0] if oldest is None or _by_age(queue[0]) < _by_age(oldest) else oldest
        return oldest[2] if oldest is not None else None


def _waits(entry: _Entry) -> bool:
    """Whether the ticket still waits at this place: it may have left, and come back at another."""
    return entry[2].place == entry[1]


def _by_age(entry: _Entry) -> tuple[tuple[int, int], int]:
    return entry[:2]


def _remember(memory: dict[int, int], name: int, engine: int) -> None:
    """Newest last; the oldest is forgotten."""
    memory.pop(name, None)
    memory[name] = engine
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
