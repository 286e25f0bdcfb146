"""Router: any order of requests, ends, swaps and deaths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flash.rollout.engine import ResponseRequest
from flash.rollout.routing import TASK_SLACK, EngineView, RequestRecord, Router

ENGINES = 3
LIMIT = 4
"""Largest number of requests of an engine at once."""


def views(limit: int, versions: Sequence[int]) -> list[EngineView]:
    """Return engines that may hold `limit` requests each, with these versions."""
    return [EngineView(index, limit, version) for index, version in enumerate(versions)]


def only(request: RequestRecord) -> int | None:
    """Return the index of the only engine that a waiting request may get; None if it may get any."""
    return request.need and request.need.engine


def record(group: int, task: int, min_version: int = 0) -> RequestRecord:
    """Return the router's record of a request of one token."""
    return RequestRecord(ResponseRequest([1], 1, key=task, group_id=group, task_id=task, min_version=min_version))


def place(router: Router, group: int, task: int, min_version: int = 0) -> int | None:
    """Ask the router for an engine for a new request. Returns the index of the engine, or None if the request waits."""
    return router.ask(record(group, task, min_version))


def test_requests_spread_over_the_engines() -> None:
    router = Router(views(LIMIT, [0, 0, 0]), bind_groups=False)
    assert sorted(place(router, task, task) or 0 for task in range(6)) == [0, 0, 1, 1, 2, 2]


def test_the_engine_that_served_the_task_or_else_the_group_is_preferred() -> None:
    router = Router(views(16, [0, 0]), bind_groups=False)
    assert place(router, 0, 0) == 0
    assert place(router, 1, 100) == 1
    assert place(router, 1, 101) == 1, "its group's prompt is there"
    router.views[1].held -= 1
    router.views[1].held -= 1
    assert place(router, 1, 100) == 1, "its own tokens are there"


def test_the_samples_of_a_prompt_are_spread_evenly() -> None:
    router = Router(views(16, [0, 0]), bind_groups=False)
    for task in range(16):
        place(router, 0, task)
        assert abs(router.views[0].held - router.views[1].held) <= 1


def test_the_preference_for_a_tasks_own_engine_ends_where_that_is_much_fuller() -> None:
    router = Router(views(16, [0, 0]), bind_groups=False)
    assert place(router, 0, 0) == 0
    router.views[0].held = 8
    router.views[1].held = 6
    # The slack is one request and a quarter of the 8 that the engine holds: 3 in all.
    assert place(router, 0, 0) == 0
    router.views[1].held = 3
    assert place(router, 0, 0) == 1


def test_a_request_goes_only_to_an_engine_that_is_recent_enough() -> None:
    router = Router(views(LIMIT, [0, 3]), bind_groups=False)
    assert [place(router, 0, task, min_version=2) for task in range(LIMIT)] == [1] * LIMIT
    assert place(router, 0, LIMIT, min_version=2) is None
    assert place(router, 0, LIMIT + 1, min_version=0) == 0


def test_a_swapping_engine_is_the_last_choice() -> None:
    router = Router(views(LIMIT, [0, 0]), bind_groups=False)
    router.views[0].begin_swap(closed=False)
    assert [place(router, task, task) for task in range(LIMIT + 1)] == [1] * LIMIT + [0]


def test_what_waits_leaves_in_the_order_of_its_tasks() -> None:
    router = Router(views(1, [0]), bind_groups=False)
    place(router, 0, 0)
    requests = [record(task // 2, task) for task in (5, 1, 3)]
    for request in requests:
        assert router.ask(request) is None
    order: list[int] = []
    for _ in requests:
        router.views[0].held -= 1
        order += [request.order[1] for request in router.fill(0)]
    assert order == [1, 3, 5]


def test_a_bound_group_stays_on_its_engine_though_others_are_empty() -> None:
    router = Router(views(2, [0, 0]), bind_groups=True)
    assert [place(router, 7, task) for task in range(3)] == [0, 0, None]
    assert place(router, 8, 10) == 1
    router.views[0].held -= 1
    assert [request.order for request in router.fill(0)] == [(7, 2)]


def test_groups_are_bound_to_the_engine_with_the_least_to_do_and_to_wait_for() -> None:
    router = Router(views(1, [0, 0]), bind_groups=True)
    for task in range(4):
        place(router, 0, task)
    place(router, 1, 4)
    assert place(router, 2, 5) is None
    router.views[1].held -= 1
    assert [request.order for request in router.fill(1)] == [(2, 5)]


def test_a_dead_engines_groups_are_bound_anew() -> None:
    router = Router(views(1, [0, 0]), bind_groups=True)
    place(router, 0, 0)
    waiting = record(0, 1)
    assert router.ask(waiting) is None
    assert router.retire(0) == [waiting]
    assert router.ask(waiting) == 1


def test_what_no_living_engine_but_the_failed_ones_can_serve_gets_another_chance() -> None:
    router = Router(views(1, [0, 0]), bind_groups=False)
    place(router, 0, 0)
    place(router, 1, 1)
    request = record(2, 2)
    request.barred = frozenset({0})
    assert router.ask(request) is None
    assert router.retire(1) == [request]
    router.views[0].held -= 1
    assert router.ask(request) == 0


def test_room_counts_what_waits_and_only_engines_with_a_version() -> None:
    router = Router(views(LIMIT, [-1, 0]), bind_groups=False)
    assert router.room() == LIMIT
    place(router, 0, 0)
    place(router, 0, 1, min_version=1)
    assert router.room() == LIMIT - 2, "what is handed out next needs that version, too"
    router.views[1].begin_swap(closed=True)
    assert router.room() == 0
    router.views[1].end_swap(1)
    assert router.room() == LIMIT - 2, "what waits goes first"


def test_what_no_engine_with_room_may_serve_takes_no_room() -> None:
    router = Router(views(LIMIT, [0, 0]), bind_groups=False)
    barred = record(1, 1)
    barred.barred = frozenset({0})
    router.views[1].begin_swap(closed=True)
    assert router.ask(barred) is None
    assert router.room() == LIMIT
    router.views[1].end_swap(1)
    assert router.room() == 2 * LIMIT - 1, "the one that has swapped may serve it"


def test_an_engine_with_room_takes_its_share_by_what_each_could_hold() -> None:
    router = Router(views(60, [0, 0, 0]), bind_groups=False)
    # Engine 0 is full, engine 1 half full, and engine 2 empty. At the end all have about the same share of their
    # limits.
    for view, held, limit in zip(router.views, (24, 30, 0), (24, 60, 60), strict=True):
        view.held, view.limit = held, limit
    assert dict(router.surplus(2)) == {0: 15, 1: 7}, "9 of 24, 23 of 60 and 22 of 60 remain"
    router.views[2].version = -1
    assert router.surplus(2) == [], "what the others serve may need their version"


def test_what_is_but_a_little_fuller_gives_nothing() -> None:
    router = Router(views(60, [0, 0]), bind_groups=False)
    # After a move the difference would be 5, less than a quarter of 30 (`UNEVEN`).
    router.views[0].held, router.views[1].held = 30, 23
    assert router.surplus(1) == []
    router.views[1].held = 15
    assert router.surplus(1) == [(0, 7)]


def test_nothing_moves_to_an_engine_while_others_wait_that_it_may_serve() -> None:
    router = Router(views(60, [0, 0]), bind_groups=False)
    router.views[0].held, router.views[1].held = 30, 1
    assert router.surplus(1) == [(0, 14)]
    router.views[0].closed = router.views[1].closed = True
    assert router.ask(record(0, 0)) is None, "both are closed"
    router.views[0].closed = router.views[1].closed = False
    assert router.surplus(1) == []


def test_one_that_no_engine_may_serve_does_not_keep_others_from_sharing() -> None:
    router = Router(views(60, [0, 0]), bind_groups=False)
    router.views[0].held, router.views[1].held = 30, 15
    assert place(router, 0, 0, min_version=1) is None
    assert router.surplus(1) == [(0, 7)]


class Traffic(RuleBasedStateMachine):
    """Requests come and go while engines swap, shrink and die."""

    bind = False

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(views(LIMIT, [0] * ENGINES), bind_groups=self.bind)
        self.held: dict[RequestRecord, int] = {}
        """Index of the engine that holds each request."""
        self.waiting: list[RequestRecord] = []
        self.tasks = 0
        """Number of requests so far, each of a task of its own."""

    def ask(self, request: RequestRecord) -> None:
        """Ask the router about a request, and note if it is held or waits."""
        engine = self.router.ask(request)
        if engine is None:
            self.waiting.append(request)
        else:
            self.hold(request, engine)

    def hold(self, request: RequestRecord, engine: int) -> None:
        """Note that an engine holds a request, and check that the engine may serve it."""
        view = self.router.views[engine]
        assert view.alive
        assert not view.closed
        assert view.version >= request.min_version
        assert engine not in request.barred
        assert view.held <= view.limit
        self.held[request] = engine

    def fill(self, engine: int) -> None:
        """Let the router fill an engine, and check that the oldest request that fits comes first."""
        eldest = min((t.order for t in self.waiting if self.fits(t, engine)), default=None)
        for number, request in enumerate(self.router.fill(engine)):
            assert number > 0 or request.order == eldest
            self.waiting.remove(request)
            self.hold(request, engine)

    def fits(self, request: RequestRecord, engine: int) -> bool:
        """Return True if an engine may serve a request, whether or not it has room."""
        view = self.router.views[engine]
        mine = only(request) in (None, engine)
        return mine and view.version >= request.min_version and engine not in request.barred

    @rule(group=st.integers(0, 5), behind=st.integers(0, 2))
    def arrive(self, group: int, behind: int) -> None:
        """Send a request that needs the version after the newest one, or an older one by `behind`."""
        newest = max(view.version for view in self.router.views)
        self.tasks += 1
        self.ask(record(group, self.tasks, max(0, newest + 1 - behind)))

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        """Let a held request end."""
        if self.held:
            self.take(data.draw(st.sampled_from(list(self.held))))

    def take(self, request: RequestRecord) -> int:
        """Remove a request from its engine, fill the engine, and return its index."""
        engine = self.held.pop(request)
        self.router.views[engine].held -= 1
        self.fill(engine)
        return engine

    @rule(data=st.data())
    def fail_and_move(self, data: Any) -> None:
        """Let an engine fail a request, which then asks for another engine if one is left."""
        if self.held:
            request = data.draw(st.sampled_from(list(self.held)))
            request.barred |= {self.take(request)}
            if not self.router.failed_by_all(request):
                self.ask(request)

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        """Cancel a waiting request."""
        if self.waiting:
            request = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(request)
            self.router.withdraw(request)

    @rule(engine=st.integers(0, ENGINES - 1), closed=st.booleans())
    def swap(self, engine: int, closed: bool) -> None:
        """Begin a swap, unless one goes on."""
        if not self.router.views[engine].swapping:
            self.router.views[engine].begin_swap(closed=closed)

    @rule(engine=st.integers(0, ENGINES - 1))
    def swapped(self, engine: int) -> None:
        """End a swap with the next version, also if none was begun."""
        view = self.router.views[engine]
        view.end_swap(view.version + 1)
        self.fill(engine)

    @rule(engine=st.integers(0, ENGINES - 1), limit=st.integers(1, LIMIT))
    def resize(self, engine: int, limit: int) -> None:
        """Change the number of requests that an engine may hold."""
        self.router.views[engine].limit = limit
        self.fill(engine)

    @rule(engine=st.integers(0, ENGINES - 1))
    def die(self, engine: int) -> None:
        """Let an engine die. Its requests, and those that waited for it alone, ask again."""
        left = self.router.retire(engine)
        moved = [request for request, place in self.held.items() if place == engine]
        for request in moved:
            self.take(request)
        for request in left:
            self.waiting.remove(request)
        for request in left + moved:
            self.ask(request)

    @rule(engine=st.integers(0, ENGINES - 1))
    def come_back(self, engine: int) -> None:
        """Put a new engine without a version into the place of a dead one."""
        if self.router.views[engine].alive:
            return
        for request in (left := self.router.replace(engine, LIMIT, -1)):
            self.waiting.remove(request)
        for request in left:
            self.ask(request)

    @invariant()
    def every_request_is_waiting_or_held_once(self) -> None:
        """Check the router's counts of held and waiting requests."""
        for view in self.router.views:
            assert view.held == sum(engine == view.index for engine in self.held.values())
        assert self.router.waiting == len(self.waiting)

    @invariant()
    def no_engine_has_room_beside_a_request_that_it_may_serve(self) -> None:
        """Check the conservation of work."""
        for view in self.router.views:
            if view.open:
                assert not [request for request in self.waiting if self.fits(request, view.index)]

    @invariant()
    def a_waiting_request_has_an_engine_that_may_come_to_serve_it(self) -> None:
        """Check that no request waits for ever."""
        for request in self.waiting:
            assert not self.router.alive or not self.router.failed_by_all(request)
            assert (bound := only(request)) is None or self.router.views[bound].alive


class BoundTraffic(Traffic):
    """Random traffic in which all requests of a group go to one engine."""

    bind = True


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
BoundTraffic.TestCase.settings = Traffic.TestCase.settings
TestTraffic = Traffic.TestCase
TestBoundTraffic = BoundTraffic.TestCase


@given(st.lists(st.integers(0, 3), max_size=40))
def test_without_limits_in_the_way_loads_differ_by_no_more_than_the_slack(groups: list[int]) -> None:
    router = Router(views(64, [0, 0, 0]), bind_groups=False)
    for task, group in enumerate(groups):
        place(router, group, task)
    held = [view.held for view in router.views]
    assert max(held) - min(held) <= 1 + TASK_SLACK * max(held)
