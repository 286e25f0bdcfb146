"""Whose cache an engine holds: any order of turns, ends and times; and who is served when memory is short."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flash.rollout.routing import RoutedRequest, Router
from flash.rollout.sessions import PATIENCE, Sessions
from tests.rollout.test_routing import views

MEMORY = 100
KEEP_S = 10.0


def sessions_of(engines: int = 1) -> Sessions:
    sessions = Sessions(KEEP_S)
    for engine in range(engines):
        sessions.caches[engine].memory = MEMORY
    return sessions


def turn(sessions: Sessions, session: int, prompt: int, end: int, engine: int = 0) -> None:
    sessions.wants(session)
    sessions.runs(engine, session, prompt)
    sessions.rests(session, end)


def test_an_idle_session_keeps_others_out_until_it_ends() -> None:
    sessions = sessions_of()
    turn(sessions, 1, 50, 60)
    assert not sessions.fits(0, 2, 50)
    assert sessions.fits(0, 1, 65)
    assert sessions.ends(1) == 0
    assert sessions.fits(0, 2, 50)


def test_a_session_that_grows_presses_out_the_one_that_has_idled_longest() -> None:
    sessions = sessions_of()
    for session in (1, 2, 3):
        sessions.at(session)
        turn(sessions, session, 30, 30)
    turn(sessions, 2, 40, 40)
    assert [sessions.home(session) for session in (1, 2, 3)] == [0, 0, 0]
    turn(sessions, 3, 50, 50)
    assert [sessions.home(session) for session in (1, 2, 3)] == [None, 0, 0]
    assert sessions.caches[0].used == 90


def test_who_idles_for_too_long_is_held() -> None:
    sessions = sessions_of()
    turn(sessions, 1, 60, 60)
    sessions.at(PATIENCE * KEEP_S - 1)
    assert sessions.home(1) == 0
    sessions.at(PATIENCE * KEEP_S)
    assert sessions.home(1) is None
    assert sessions.begun(1)
    assert sessions.caches[0].used == 0


def test_while_environments_are_slow_in_the_mean_nothing_is_counted_and_later_it_is_again() -> None:
    sessions = sessions_of()
    now = 0.0
    for _ in range(100):
        turn(sessions, 1, 60, 60)
        now += 2 * KEEP_S
        sessions.at(now)
    sessions.wants(1)
    assert not sessions.counted
    assert sessions.fits(0, 2, 99)
    for _ in range(200):
        turn(sessions, 1, 60, 60)
    assert sessions.counted
    assert not sessions.fits(0, 2, 99)


def test_a_new_session_needs_room_to_grow_and_one_that_has_begun_does_not() -> None:
    sessions = sessions_of()
    turn(sessions, 1, 60, 60)
    turn(sessions, 2, 5, 5, engine=1)
    sessions.hold(2)
    assert sessions.fits(0, 2, 40)
    assert not sessions.fits(0, 3, 40)


def test_room_is_counted_in_sessions_of_the_mean_size() -> None:
    sessions = sessions_of()
    assert sessions.room(0) == math.inf, "nothing is known of their size"
    turn(sessions, 1, 20, 30)
    assert sessions.room(0) == 2


# -- with the router -------------------------------------------------------------------------------------------------


def ask(router: Router, task: int, prompt: int) -> tuple[RoutedRequest, int | None]:
    request = RoutedRequest((task, task), 0, task, prompt)
    return request, router.ask(request)


def rest(router: Router, task: int, tokens: int, engine: int = 0) -> list[int]:
    router.sessions.rests(task, tokens)
    router.views[engine].held -= 1
    return [request.session for request in router.fill(engine)]


def test_those_that_have_begun_go_on_before_new_ones_start_whatever_their_age() -> None:
    router = Router(views(8, [0]), bind_groups=False, sessions=sessions_of())
    assert ask(router, 5, 60)[1] == 0
    assert ask(router, 7, 30)[1] == 0
    assert rest(router, 7, 30) == []
    router.sessions.hold(7)
    assert ask(router, 6, 30)[1] == 0
    assert ask(router, 1, 30)[1] is None, "new, and older"
    assert ask(router, 7, 35)[1] is None
    router.sessions.ends(6)
    router.views[0].held -= 1
    assert [request.session for request in router.fill(0)] == [7]


def test_a_smaller_new_session_does_not_overtake_a_larger_one_that_waits() -> None:
    router = Router(views(8, [0]), bind_groups=False, sessions=sessions_of())
    assert ask(router, 0, 70)[1] == 0
    assert ask(router, 1, 50)[1] is None
    assert ask(router, 2, 10)[1] is None


def test_an_engine_that_runs_nothing_takes_what_waits_though_its_memory_is_kept() -> None:
    router = Router(views(8, [0]), bind_groups=False, sessions=sessions_of())
    ask(router, 0, 70)
    assert ask(router, 1, 70)[1] is None
    assert rest(router, 0, 90) == [1]
    assert router.sessions.home(0) is None


def test_a_session_that_fits_elsewhere_moves_with_its_count() -> None:
    router = Router(views(8, [0, 0]), bind_groups=False, sessions=sessions_of(2))
    first = ask(router, 0, 60)[1]
    second = ask(router, 1, 60)[1]
    assert {first, second} == {0, 1}
    assert first is not None
    rest(router, 0, 60, first)
    router.fail(first)
    assert router.sessions.caches[first].used == 0
    assert ask(router, 0, 60)[1] is None
    assert rest(router, 1, 60, 1 - first) == [0]
    assert router.sessions.caches[1 - first].used == 60, "the other one idles, and was pressed out"


class Turns(RuleBasedStateMachine):
    """Sessions take turns on two engines whose memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = sessions_of(2)
        self.router = Router(views(4, [0, 0]), bind_groups=False, sessions=self.sessions)
        self.tokens: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.waiting: dict[int, RoutedRequest] = {}
        self.now = 0.0
        self.begun = 0

    def want(self, session: int) -> None:
        request, engine = ask(self.router, session, self.tokens[session])
        if engine is None:
            self.waiting[session] = request
        else:
            self.running[session] = engine

    def fill(self, engine: int) -> None:
        self.sessions.at(self.now)
        for request in self.router.fill(engine):
            del self.waiting[request.session]
            self.running[request.session] = engine

    @rule(prompt=st.integers(1, 90))
    def begin(self, prompt: int) -> None:
        self.begun += 1
        self.tokens[self.begun] = prompt
        self.want(self.begun)

    @rule(data=st.data(), grown=st.integers(1, 30))
    def end_turn(self, data: Any, grown: int) -> None:
        if self.running:
            session = data.draw(st.sampled_from(sorted(self.running)))
            engine = self.running.pop(session)
            self.tokens[session] += grown
            self.sessions.rests(session, self.tokens[session])
            self.router.views[engine].held -= 1
            self.fill(engine)

    @rule(data=st.data(), shown=st.integers(0, 10))
    def next_turn(self, data: Any, shown: int) -> None:
        if self.idle:
            session = data.draw(st.sampled_from(self.idle))
            self.tokens[session] += shown
            self.want(session)

    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        if self.idle:
            session = data.draw(st.sampled_from(self.idle))
            del self.tokens[session]
            if (engine := self.sessions.ends(session)) is not None:
                self.fill(engine)

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.sessions.at(self.now)

    @property
    def idle(self) -> list[int]:
        return [name for name in self.tokens if name not in self.running and name not in self.waiting]

    @invariant()
    def an_engines_count_is_the_sum_over_its_sessions(self) -> None:
        for engine in (0, 1):
            here = [each.tokens for each in self.sessions._sessions.values() if each.engine == engine]
            assert self.sessions.caches[engine].used == pytest.approx(sum(here))

    @invariant()
    def only_what_runs_or_wants_to_exceeds_the_memory(self) -> None:
        for engine in (0, 1):
            if self.sessions.caches[engine].used > MEMORY + 1e-6:
                assert not [name for name in self.idle if self.sessions.home(name) == engine]

    @invariant()
    def no_request_waits_beside_an_engine_that_runs_nothing(self) -> None:
        if self.waiting:
            assert set(self.running.values()) == {0, 1}

    @invariant()
    def what_runs_has_its_place(self) -> None:
        for name, engine in self.running.items():
            assert self.sessions.home(name) == engine


Turns.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTurns = Turns.TestCase
