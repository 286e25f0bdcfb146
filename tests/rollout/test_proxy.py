"""LLMProxy over fake engines, on the virtual clock: failover, swaps, limits, cancellation.

A fake engine gives a token per second to each request that it runs, unless a test says otherwise. A swap is the load of
a version, which takes `SWAP_S`. Most scenarios begin with a load of version 0, so their requests begin at `SWAP_S`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.errors import DeadlineError, EngineDeadError, EngineError, WeightsError
from flash.rollout.engine import ResponseRequest
from flash.rollout.engine_state import OutageClock
from flash.rollout.fake_engine import FakeEngine
from flash.rollout.proxy import MAX_FAILED_IN_A_ROW, LLMProxy, ProxySettings
from flash.rollout.routing import SUSPECTED
from flash.simulate.clock import run_virtual
from flash.types import Canary, Completion, Published, VersionRun

Mode = Literal["recompute", "keep", "abort", "drain", "beside"]
MODES: list[Mode] = ["recompute", "keep", "abort", "drain"]
SLOTS = 4
"""Largest number of requests of an engine at once."""
SWAP_S = 0.5
"""Seconds of a load."""
TIMEOUT_S = 1000.0
"""Seconds after which a response is too late. Outages do not count."""
RETURN_S = 5000.0
"""Longest time without an engine that does not count, in seconds."""


def answer(prompt: Sequence[int]) -> list[int]:
    """Return a response of `prompt[1]` tokens, which no prompt with another first token gives."""
    return [prompt[0] * 1000 + at for at in range(prompt[1])]


def engine(seconds_per_token: float = 1.0, slots: int = SLOTS) -> FakeEngine:
    """Return a fake engine that gives a token every `seconds_per_token`."""
    return FakeEngine(answer, seconds_per_token, SWAP_S, slots)


def published(version: int) -> Published:
    """Return a published version without content."""
    return Published(version, "tcp", b"", Canary([], []))


class House:
    """A proxy over engines, and the result of each request. Each task has one request, which it names.

    `swap`, `bind`, `drain_s` and `slots` are the fields `swap`, `bind_groups`, `drain_s` and `max_sequences` of
    `ProxySettings`.
    """

    def __init__(
        self,
        *engines: FakeEngine,
        swap: Mode = "recompute",
        bind: bool = False,
        drain_s: float = 500.0,
        slots: int = SLOTS,
    ) -> None:
        self.engines = engines
        self.on_room: Callable[[], None] = lambda: None
        """Function that is called when an engine may have more room."""
        self.outages = OutageClock(RETURN_S)
        self.proxy = LLMProxy(
            engines,
            0,
            ProxySettings(slots, swap, bind, swap_s=50.0, drain_s=drain_s),
            self.outages,
            on_room=lambda: self.on_room(),
            now=anyio.current_time,
        )
        self.done: dict[int, Completion] = {}
        """Complete responses, by task."""
        self.failed: dict[int, Exception] = {}
        """Errors of requests that failed, by task."""
        self.ended_at: dict[int, float] = {}
        """Times at which requests completed or failed, in seconds, by task."""
        self.progress: dict[int, int] = {}
        """Numbers of tokens that `on_tokens` has got, by task."""

    async def load_all(self, version: int = 0) -> None:
        """Load a version into all engines at once."""
        async with anyio.create_task_group() as group:
            for index in range(len(self.engines)):
                group.start_soon(self.proxy.load, index, published(version))

    async def ask(
        self,
        task: int,
        length: int,
        *,
        group: int | None = None,
        min_version: int = 0,
        episode: anyio.CancelScope | None = None,
        seed: int | None = None,
    ) -> None:
        """Send a request whose response has `length` tokens, and keep its result, a completion or an error.

        `group`: the task's group; None: a group of its own. `episode`: scope of the caller's deadline, which outages
        extend, too.
        """

        def progress(tokens: Sequence[int]) -> None:
            """Count the tokens of a piece."""
            self.progress[task] = self.progress.get(task, 0) + len(tokens)

        request = ResponseRequest(
            [task, length],
            100,
            key=task,
            seed=seed,
            group_id=task if group is None else group,
            task_id=task,
            min_version=min_version,
            timeout_s=TIMEOUT_S,
            on_tokens=progress,
        )
        try:
            with self.outages.extending(episode or anyio.CancelScope()):
                self.done[task] = await self.proxy.generate(request)
        except (EngineError, DeadlineError) as error:
            self.failed[task] = error
        self.ended_at[task] = anyio.current_time()

    def check(self, task: int, length: int) -> None:
        """Check that the response of a task has all its `length` tokens, with log-probs and versions."""
        completion = self.done[task]
        assert completion.token_ids == answer([task, length])
        assert len(completion.logprobs) == length
        assert sum(run.count for run in completion.versions) == length

    def check_empty(self) -> None:
        """Check that no request waits or runs in the proxy or in an engine."""
        router = self.proxy._router
        assert router.waiting == 0
        assert [view.held for view in router.views] == [0] * len(self.engines)
        assert [engine.running + engine.waiting for engine in self.engines] == [0] * len(self.engines)


def served_by(house: House) -> list[list[int]]:
    """Return the tasks of the requests that each engine has got, in their order."""
    return [[request.prompt[0] for request in engine.requests] for engine in house.engines]


def run(scenario: Callable[[], Awaitable[Any]]) -> None:
    """Run a scenario on the virtual clock."""
    run_virtual(scenario)


def test_requests_beyond_the_limit_wait_in_the_proxy_and_start_oldest_task_first() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            # The first four requests fill the engine, and end together. Then the lowest task of the others comes first.
            for task in (9, 8, 7, 6, 5, 4, 3, 2):
                group.start_soon(house.ask, task, 10 if task > 5 else 3)
                await anyio.sleep(0.01)
            assert (house.engines[0].running, house.engines[0].waiting) == (SLOTS, 0)
            assert house.proxy.capacity() == 0
        assert served_by(house) == [[9, 8, 7, 6, 2, 3, 4, 5]]
        house.check_empty()
        assert house.proxy.capacity() == SLOTS

    run(scenario)


def test_a_freed_slot_is_taken_at_the_same_instant() -> None:
    async def scenario() -> None:
        house = House(engine(slots=1), slots=1)
        await house.load_all()
        start = anyio.current_time()
        async with anyio.create_task_group() as group:
            for task in range(5):
                group.start_soon(house.ask, task, 10)
        assert anyio.current_time() - start == pytest.approx(50.0)

    run(scenario)


def test_a_full_kv_cache_lowers_the_number_of_requests_that_an_engine_gets() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        most = 0

        async def watch() -> None:
            """Keep the largest number of running requests, once the proxy has learned from the first responses."""
            nonlocal most
            await anyio.sleep(25)
            while True:
                most = max(most, house.engines[0].running)
                await anyio.sleep(1)

        # A response and its prompt have 12 tokens. The cache has room for two that are not of the same age.
        house.engines[0].kv_tokens = 20
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            async with anyio.create_task_group() as requests:
                for task in range(12):
                    requests.start_soon(house.ask, task, 10)
            group.cancel_scope.cancel()
        assert most == 2
        assert len(house.done) == 12

    run(scenario)


def test_a_request_waits_until_an_engine_has_its_version() -> None:
    async def scenario() -> None:
        house = House(engine(), engine())
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: house.ask(1, 3, min_version=1))
            await anyio.sleep(10)
            assert served_by(house) == [[], []]
            await house.proxy.load(1, published(1))
        assert served_by(house) == [[], [1]]
        assert house.done[1].versions == [VersionRun(1, 3)]

    run(scenario)


def test_a_group_that_is_bound_shares_one_engine() -> None:
    async def scenario() -> None:
        house = House(engine(), engine(), bind=True)
        await house.load_all()
        async with anyio.create_task_group() as group:
            for task in range(12):
                group.start_soon(lambda task=task: house.ask(task, 3, group=task // 6))
        groups = [{task // 6 for task in tasks} for tasks in served_by(house)]
        assert groups == [{0}, {1}]

    run(scenario)


def test_a_response_without_end_before_its_deadline_is_an_error_that_says_where_to_look() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        request = ResponseRequest([1, 50], 100, key=0, timeout_s=5.5)
        with pytest.raises(DeadlineError, match=r"engine 0 has version 0 and 0 of 4 requests; 0 requests wait"):
            await house.proxy.generate(request)
        house.check_empty()

    run(scenario)


def test_a_response_keeps_its_deadline_when_it_moves_to_another_engine() -> None:
    async def scenario() -> None:
        house = House(engine(), engine(), swap="abort")
        await house.load_all()
        ended_at: list[float] = []

        async def ask() -> None:
            """Send a request whose response takes 50 s, and note when it fails."""
            with pytest.raises(DeadlineError):
                await house.proxy.generate(ResponseRequest([1, 50], 100, key=0, timeout_s=8.25))
            ended_at.append(anyio.current_time())

        start = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.sleep(4.5)
            await house.proxy.load(0, published(1))
        assert [len(each.requests) for each in house.engines] == [1, 1]
        assert ended_at == [start + 8.25]
        house.check_empty()

    run(scenario)


# -- failover ------------------------------------------------------------------------------------------------------


def test_a_response_whose_deadline_has_passed_fails_at_once_and_reaches_no_engine() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        # The proxy has not noticed yet. If the request found out, it would wait for the next engine.
        house.engines[0].kill()
        start = anyio.current_time()
        with pytest.raises(DeadlineError, match=r"deadlines\.generate"):
            await house.proxy.generate(ResponseRequest([1, 50], 100, key=0, timeout_s=0))
        assert anyio.current_time() == start
        assert house.engines[0].requests == []

    run(scenario)


def test_a_dead_engines_requests_go_on_elsewhere_with_their_tokens_so_far() -> None:
    async def scenario() -> None:
        house = House(engine(), engine())
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            group.start_soon(house.ask, 1, 20)
            await anyio.sleep(0.1)
            await house.proxy.load(1, published(1))
            await anyio.sleep(5.0)
            # Engine 0 has given 5 tokens in 5.6 s. Engine 1, with version 1, gives the other 15.
            house.engines[0].kill()
            house.proxy.retire(0, EngineDeadError("killed"))
        house.check(1, 20)
        assert house.done[1].versions == [VersionRun(0, 5), VersionRun(1, 15)]
        assert house.progress == {1: 19}, "the last token comes with the completion"
        (moved,) = house.engines[1].requests
        assert moved.prompt == [1, 20, *answer([1, 5])]
        assert (moved.generated, moved.max_new_tokens, moved.key) == (5, 95, 1)
        house.check_empty()

    run(scenario)


def test_an_engines_death_is_noticed_by_its_own_requests_too() -> None:
    async def scenario() -> None:
        house = House(engine(), engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            for task in range(8):
                group.start_soon(house.ask, task, 10)
            await anyio.sleep(3.5)
            house.engines[0].kill()
        for task in range(8):
            house.check(task, 10)
        assert house.proxy.versions() == [-1, 0]
        assert [status.index for status in house.proxy.report()[0]] == [1]
        house.check_empty()

    run(scenario)


def test_the_timeline_leaves_out_idle_time_also_after_a_report_and_a_swap() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        await house.ask(0, 2)
        first = house.proxy.report()[1]
        await anyio.sleep(10)
        await house.ask(1, 2)
        await anyio.sleep(10)
        await house.proxy.load(0, published(1))
        await house.ask(2, 2)
        bars = [(bar.name, bar.start, bar.stop) for bar in [*first, *house.proxy.report()[1]]]
        assert bars == [
            ("swap", 0.0, 0.5),
            ("generate", 0.5, 2.5),
            ("generate", 12.5, 14.5),
            ("swap", 24.5, 25.0),
            ("generate", 25.0, 27.0),
        ]

    run(scenario)


def test_a_request_that_an_engine_fails_is_tried_on_each_other_engine_once() -> None:
    async def scenario() -> None:
        house = House(engine(), engine())
        await house.load_all()
        house.engines[0].fail_next()
        house.engines[1].fail_next()
        await house.ask(1, 10)
        assert served_by(house) == [[1], [1]]
        assert "told to fail" in str(house.failed[1])
        await house.ask(2, 10)
        house.check(2, 10)
        house.check_empty()

    run(scenario)


def test_a_request_that_several_engines_fail_is_given_up() -> None:
    async def scenario() -> None:
        house = House(*(engine() for _ in range(5)))
        await house.load_all()
        for fake in house.engines:
            fake.fail_next()
        await house.ask(1, 10)
        assert sum(len(tasks) for tasks in served_by(house)) == 3, "`MAX_FAILURES` engines have tried"
        assert isinstance(house.failed[1], EngineError)

    run(scenario)


def test_after_the_last_engines_death_requests_neither_fail_nor_start() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            for task in range(10):
                group.start_soon(house.ask, task, 10)
            await anyio.sleep(3.5)
            house.engines[0].kill()
            house.proxy.retire(0, EngineDeadError("killed"))
            group.start_soon(house.ask, 99, 1)
            await anyio.sleep(500)
            assert (house.done, house.failed) == ({}, {}), "they end with their node, and count as never tried"
            assert house.proxy.versions() == [-1]
            assert house.proxy.capacity() == 0
            group.cancel_scope.cancel()

    run(scenario)


@pytest.mark.parametrize("bind", [False, True])
def test_requests_without_an_engine_go_on_at_the_next_one_with_their_tokens_the_oldest_first(bind: bool) -> None:
    async def scenario() -> None:
        house = House(engine(), bind=bind)
        await house.load_all()
        async with anyio.create_task_group() as group:
            for task in range(10):
                group.start_soon(house.ask, task, 10)
            await anyio.sleep(3.5)
            house.engines[0].kill()
            await house.proxy.wait_dead(0)
            await anyio.sleep(20)
            group.start_soon(house.ask, 99, 10)
            await anyio.sleep(20)
            # The four running requests had 3 tokens each. The new engine gets none before it has a version.
            new = engine()
            await house.proxy.replace(0, new)
            assert house.proxy.versions() == [-1]
            assert not new.requests
            await house.proxy.load(0, published(5))
            back = anyio.current_time()
        assert house.failed == {}
        assert sorted(house.done) == [*range(10), 99]
        assert [request.key for request in new.requests] == [*range(10), 99]
        assert [request.generated for request in new.requests] == [3] * SLOTS + [0] * 7
        for task, completion in house.done.items():
            assert completion.token_ids == answer([task, 10])
            moved = 3 if task < SLOTS else 0
            assert completion.versions == [VersionRun(0, 3)] * (moved > 0) + [VersionRun(5, 10 - moved)]
        house.engines = (new,)
        house.check_empty()
        statuses, activities = house.proxy.report()
        assert [(status.version, status.lifetime_s) for status in statuses] == [(5, anyio.current_time() - back)]
        busy = [(bar.start, bar.stop) for bar in activities if bar.name == "generate"]
        assert busy == [(SWAP_S, SWAP_S + 3.5), (back, anyio.current_time())], "not from one engine to the next"

    run(scenario)


def test_time_without_an_engine_is_not_the_responses_own() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            group.start_soon(house.ask, 0, 90)
            await anyio.sleep(10.5)
            house.engines[0].kill()
            await house.proxy.wait_dead(0)
            await anyio.sleep(3 * TIMEOUT_S)
            group.start_soon(house.ask, 1, 90)
            await anyio.sleep(TIMEOUT_S + 1)
            # The outage is shorter than `RETURN_S`. On the slow engine 90 tokens take 900 s. The limit of 100
            # tokens takes 1000 s, which is too long.
            await house.proxy.replace(0, engine(seconds_per_token=10.0))
            await house.proxy.load(0, published(1))
            group.start_soon(house.ask, 2, 101)
        assert sorted(house.done) == [0, 1]
        assert isinstance(house.failed[2], DeadlineError), "the slow engine has its own time, and no more"

    run(scenario)


def test_time_without_an_engine_is_not_the_episodes_own() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        with anyio.move_on_after(40) as before, anyio.move_on_after(3000) as during:
            async with anyio.create_task_group() as group:
                group.start_soon(functools.partial(house.ask, 0, 15, episode=before))
                await anyio.sleep(10.5)
                house.engines[0].kill()
                await house.proxy.wait_dead(0)
                await anyio.sleep(2000)
                group.start_soon(functools.partial(house.ask, 1, 15, episode=during))
                await anyio.sleep(2000)
                await house.proxy.replace(0, engine())
                await house.proxy.load(0, published(1))
        assert sorted(house.done) == [0, 1]
        # The deadlines begin at `SWAP_S`. The outage lasts 4000 s and a load; the second request waits for half of it.
        assert before.deadline == pytest.approx(SWAP_S + 40 + 4000 + SWAP_S)
        assert during.deadline == pytest.approx(SWAP_S + 3000 + 2000 + SWAP_S)

    run(scenario)


def test_an_engine_that_does_not_come_back_fails_its_responses_after_the_time_that_it_had() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            group.start_soon(house.ask, 0, 90)
            await anyio.sleep(10.5)
            house.engines[0].kill()
            await house.proxy.wait_dead(0)
            await anyio.sleep(50)
            group.start_soon(house.ask, 1, 90)
        # The first request began after the first load, with 5000 s of outage to come. The second one began 50 s after
        # the death, at 61 s, with 4950 s to come.
        assert house.ended_at[0] == pytest.approx(SWAP_S + TIMEOUT_S + RETURN_S)
        assert house.ended_at[1] == pytest.approx(SWAP_S + 10.5 + TIMEOUT_S + RETURN_S)
        assert all(isinstance(error, DeadlineError) for error in house.failed.values())

    run(scenario)


def test_the_next_engine_in_a_place_takes_its_share_and_is_not_blamed_for_the_one_before() -> None:
    async def scenario() -> None:
        house = House(engine(), engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            for task in range(2 * SLOTS):
                group.start_soon(house.ask, task, 30)
            await anyio.sleep(2.5)
            house.engines[0].kill()
            await house.proxy.wait_dead(0)
            new = engine()
            await house.proxy.replace(0, new)
            await house.proxy.load(0, published(1))
            await anyio.sleep(1)
            assert new.running == SLOTS
            dead = anyio.Event()

            async def watch() -> None:
                await house.proxy.wait_dead(0)
                dead.set()

            group.start_soon(watch)
            await anyio.sleep(50)
            assert not dead.is_set()
            new.kill()
            await dead.wait()
        assert sorted(house.done) == list(range(2 * SLOTS))
        assert house.failed == {}

    run(scenario)


def test_an_engine_that_only_fails_is_dead_and_its_requests_go_elsewhere() -> None:
    async def scenario() -> None:
        house = House(engine(), engine())
        await house.load_all()
        # More failures than engine 0 gets requests, so that it fails all of them.
        house.engines[0].fail_next(1000)
        async with anyio.create_task_group() as group:
            for task in range(40):
                group.start_soon(house.ask, task, 5)
            death = await house.proxy.wait_dead(0)
            assert (
                f"engine 0 failed {MAX_FAILED_IN_A_ROW} requests in a row; the last: the fake engine was told"
                in str(death)
            )
        assert sorted(house.done) == list(range(40))
        assert house.failed == {}

    run(scenario)


def test_an_engine_is_not_blamed_for_requests_that_it_refuses_or_failures_far_between() -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        for task in range(4 * MAX_FAILED_IN_A_ROW):
            house.engines[0].fail_next()
            await house.ask(2 * task, 5)
            await house.ask(2 * task + 1, 5)
        house.engines[0].refuse_next(1000)
        for task in range(2 * MAX_FAILED_IN_A_ROW):
            await house.ask(1000 + task, 5)
        assert house.proxy.versions() == [0]
        assert len(house.done) == 4 * MAX_FAILED_IN_A_ROW

    run(scenario)


# -- swaps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", MODES)
def test_a_swap_with_a_full_queue_loses_nothing(swap: Mode) -> None:
    async def scenario() -> None:
        house = House(engine(), swap=swap)
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            for task in range(10):
                group.start_soon(house.ask, task, 10)
            # The swap begins when the running requests have 4 tokens, and other requests wait.
            await anyio.sleep(4.5)
            await house.proxy.load(0, published(1))
        for task in range(10):
            house.check(task, 10)
        mixed = {task for task, completion in house.done.items() if len(completion.versions) > 1}
        assert mixed == (set() if swap == "drain" else set(range(SLOTS)))
        assert house.engines[0].kept_cache == [False, swap == "keep"], "at first there is none to be kept"
        house.check_empty()

    run(scenario)


@pytest.mark.parametrize("swap", ["recompute", "keep", "abort", "beside"])
def test_a_pause_with_a_full_queue_takes_no_longer_than_the_step_in_flight(swap: Mode) -> None:
    async def scenario() -> None:
        house = House(engine(), swap=swap)
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            for task in range(50):
                group.start_soon(house.ask, task, 10)
            await anyio.sleep(4.5)
            start = anyio.current_time()
            await house.proxy.load(0, published(1))
            assert anyio.current_time() - start <= 1.0 + SWAP_S, "a step takes a second"

    run(scenario)


def test_a_drained_swap_waits_for_what_runs_and_for_nothing_that_waits() -> None:
    async def scenario() -> None:
        house = House(engine(), swap="drain")
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            for task in range(50):
                group.start_soon(house.ask, task, 10)
            await anyio.sleep(4.5)
            start = anyio.current_time()
            await house.proxy.load(0, published(1))
            assert anyio.current_time() - start == pytest.approx(5.5 + SWAP_S), "the rest of responses of 10 s"
        assert all(len(completion.versions) == 1 for completion in house.done.values())

    run(scenario)


@pytest.mark.parametrize("swap", ["abort", "drain"])
def test_nothing_starts_on_an_engine_that_is_being_emptied_or_swapped(swap: Mode) -> None:
    async def scenario() -> None:
        house = House(engine(), swap=swap)
        await house.load_all(0)
        begun: list[int] = []
        async with anyio.create_task_group() as group:
            for task in range(8):
                group.start_soon(house.ask, task, 10 + task)
            await anyio.sleep(4.5)
            # The load begins to empty the engine, whose requests end at different times. None may take their place.
            begun = [len(house.engines[0].requests)]
            group.start_soon(house.proxy.load, 0, published(1))
            await anyio.lowlevel.checkpoint()
            while house.engines[0].version == 0:
                assert len(house.engines[0].requests) == begun[0]
                await anyio.sleep(0.1)
        assert len(house.done) == 8

    run(scenario)


def test_requests_told_to_leave_go_to_an_engine_with_room() -> None:
    async def scenario() -> None:
        house = House(engine(), engine(), swap="abort")
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            group.start_soon(house.ask, 1, 10)
            await anyio.sleep(4.5)
            # The load aborts the request when it has 4 tokens. The other engine gets it with these.
            await house.proxy.load(0, published(1))
        house.check(1, 10)
        assert [request.generated for request in house.engines[1].requests] == [4]
        assert house.done[1].versions == [VersionRun(0, 10)]

    run(scenario)


def test_an_engine_that_reaches_a_version_later_is_given_its_share_of_what_the_first_one_took() -> None:
    async def scenario() -> None:
        house = House(engine(slots=8), engine(slots=8), slots=8)
        await house.load_all()
        await house.proxy.load(0, published(1))
        async with anyio.create_task_group() as group:
            # Only engine 0 has version 1, so it gets all 8 requests. When engine 1 has it, too, half of them move.
            for task in range(8):
                group.start_soon(lambda task=task: house.ask(task, 10, min_version=1))
            await anyio.sleep(2.5)
            await house.proxy.load(1, published(1))
        assert [engine.running for engine in house.engines] == [0, 0]
        assert len(served_by(house)[1]) == 4
        for task in range(8):
            house.check(task, 10)
        house.check_empty()

    run(scenario)


@pytest.mark.parametrize(("after_s", "moved"), [(0.5, [4, 5, 6, 7]), (2.5, [])])
def test_what_is_drawn_with_a_seed_moves_only_before_it_has_a_token(after_s: float, moved: list[int]) -> None:
    """Engine 1 may take the requests `after_s` seconds after they began on engine 0. `moved`: tasks that then move."""

    async def scenario() -> None:
        house = House(engine(slots=8), engine(slots=8), slots=8)
        await house.load_all()
        await house.proxy.load(0, published(1))
        async with anyio.create_task_group() as group:
            for task in range(8):
                group.start_soon(lambda task=task: house.ask(task, 10, min_version=1, seed=task))
            await anyio.sleep(after_s - SWAP_S)
            await house.proxy.load(1, published(1))
        assert sorted(served_by(house)[1]) == moved
        assert all(request.generated == 0 for engine in house.engines for request in engine.requests)
        for task in range(8):
            house.check(task, 10)

    run(scenario)


def test_a_swap_in_the_middle_of_balanced_work_moves_nothing() -> None:
    async def scenario() -> None:
        house = House(engine(slots=8), engine(slots=8), slots=8)
        await house.load_all()
        async with anyio.create_task_group() as group:
            for task in range(9):
                group.start_soon(lambda task=task: house.ask(task, 10))
            await anyio.sleep(2.5)
            await house.load_all(1)
            assert sum(len(engine.requests) for engine in house.engines) == 9

    run(scenario)


def test_an_engine_that_runs_dry_is_given_its_share_with_the_tokens_so_far() -> None:
    async def scenario() -> None:
        house = House(engine(slots=8), engine(slots=8), slots=8)
        await house.load_all()
        async with anyio.create_task_group() as group:
            # Even tasks go to engine 0 and odd ones to engine 1, whose short responses end after 5 s.
            for task in range(10):
                group.start_soon(lambda task=task: house.ask(task, 5 if task % 2 else 60))
            await anyio.sleep(20.5)
            assert sum(len(engine.requests) for engine in house.engines) == 12, "two of five have moved, once"
            assert [engine.running for engine in house.engines] == [3, 2]
            await house.load_all(1)
        moved = [request for request in house.engines[1].requests if request.generated]
        assert len(moved) == 2
        for task in range(10):
            house.check(task, 5 if task % 2 else 60)
        for request in moved:
            completion = house.done[request.prompt[0]]
            assert [run.version for run in completion.versions] == [0, 1]
            assert completion.versions[0].count > request.generated, "tokens of both engines"
            assert house.progress[request.prompt[0]] == 59, "each token is told once, the last with the completion"
        house.check_empty()

    run(scenario)


def test_the_shortest_contexts_move_and_not_what_has_come_last() -> None:
    async def scenario() -> None:
        house = House(engine(slots=8), engine(slots=8), slots=8)
        await house.load_all()
        async with anyio.create_task_group() as group:
            for task in range(2):
                group.start_soon(house.ask, task, 90)
            # Each engine has a request of 40 tokens. Engine 0 alone has version 1 and gets four young requests.
            await anyio.sleep(40.0)
            await house.proxy.load(0, published(1))
            for task in range(2, 6):
                group.start_soon(lambda task=task: house.ask(task, 60, min_version=1))
            await anyio.sleep(2.2)
            # The old request of engine 1 comes to engine 0 last, with its 43 tokens.
            house.engines[1].kill()
            await anyio.sleep(2.0)
            assert [request.generated for request in house.engines[0].requests] == [0] * 5 + [43]
            new = engine(slots=8)
            await house.proxy.replace(1, new)
            await house.proxy.load(1, published(1))
            await anyio.sleep(0.1)
            assert sorted(request.prompt[0] for request in new.requests) == [3, 4, 5]
        house.check_empty()

    run(scenario)


def test_of_several_engines_that_run_dry_at_once_each_is_given_its_share() -> None:
    async def scenario() -> None:
        house = House(*[engine(slots=8) for _ in range(3)], slots=8)
        await house.load_all()
        async with anyio.create_task_group() as group:
            # Tasks 0, 3, 6 … are on one engine, and their responses are long. The other two engines run dry at 5 s.
            for task in range(18):
                group.start_soon(house.ask, task, 5 if task % 3 else 90)
            await anyio.sleep(10.0)
            running = [engine.running for engine in house.engines]
            assert (sum(running), max(running)) == (6, 3), "none is clearly fuller than another"
            assert sum(len(engine.requests) for engine in house.engines) == 18 + 3
            group.cancel_scope.cancel()

    run(scenario)


@pytest.mark.parametrize("why", ["it swaps", "it has failed them", "they may kill it"])
def test_nothing_moves_to_an_engine_that_would_not_take_it(why: str) -> None:
    """Engine 1 gets room, and engine 0 is fuller. No request moves, because of `why`.

    A request that moved in vain would be computed again where it was, whenever a response ends beside it.
    """

    async def scenario() -> None:
        # A load of engine 1 takes 20 s, longer than the rest of the scenario.
        other = FakeEngine(answer, 1.0, 20.0, 8)
        house = House(engine(slots=8), other, slots=8)
        await house.load_all()
        ends = [anyio.CancelScope() for _ in range(12)]

        async def ask(task: int) -> None:
            """Ask for a response of 60 tokens, unless the task's scope in `ends` is cancelled before."""
            with ends[task]:
                await house.ask(task, 60)

        async with anyio.create_task_group() as group:
            for task in range(12):
                group.start_soon(ask, task)
            await anyio.sleep(5.5)
            # Each engine runs six requests. Prepare the reason for which those of engine 0 must stay.
            for routed in house.proxy.records[0].running.values():
                if why == "it has failed them":
                    routed.barred = frozenset({1})
                elif why == "they may kill it":
                    routed.deaths = SUSPECTED
            if why == "it swaps":
                group.start_soon(house.proxy.load, 1, published(1))
            await anyio.sleep(1.0)
            # Five of the six requests of engine 1 end, so it has room.
            for request in other.requests[:5]:
                ends[request.prompt[0]].cancel()
                await anyio.sleep(0.1)
            assert [engine.running for engine in house.engines] == [6, 1]
            assert sum(len(engine.requests) for engine in house.engines) == 12
            group.cancel_scope.cancel()

    run(scenario)


def test_what_may_soon_reach_its_greatest_length_stays_where_it_is() -> None:
    async def scenario() -> None:
        house = House(engine(slots=8), engine(slots=8), slots=8)
        await house.load_all()
        async with anyio.create_task_group() as group:
            # At 97.5 s engine 1 is empty, and the requests of engine 0 are close to their limit of 100 tokens.
            for task in range(10):
                group.start_soon(lambda task=task: house.ask(task, 95 if task % 2 else 99))
            await anyio.sleep(97.5)
            assert [engine.running for engine in house.engines] == [5, 0]
        assert all(request.generated == 0 for engine in house.engines for request in engine.requests)

    run(scenario)


def test_requests_that_do_not_end_before_a_drained_swap_stop_it_with_an_error() -> None:
    async def scenario() -> None:
        house = House(engine(), swap="drain", drain_s=20.0)
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            group.start_soon(house.ask, 1, 90)
            await anyio.sleep(4.5)
            with pytest.raises(DeadlineError, match=r"1 requests of engine 0 to end before its swap"):
                await house.proxy.load(0, published(1))

    run(scenario)


def test_an_engine_whose_weights_failed_gets_no_request_any_more() -> None:
    class Damaged(FakeEngine):
        async def load(self, published: Published, *, keep_cache: bool) -> float:
            if published.version == 1:
                raise WeightsError("a tensor is damaged")
            return await super().load(published, keep_cache=keep_cache)

    async def scenario() -> None:
        house = House(Damaged(answer, 1.0), swap="abort")
        await house.load_all(0)
        async with anyio.create_task_group() as group:
            group.start_soon(house.ask, 1, 10)
            await anyio.sleep(4.5)
            with pytest.raises(WeightsError):
                await house.proxy.load(0, published(1))
            await anyio.sleep(50)
            assert len(house.engines[0].requests) == 1
            group.cancel_scope.cancel()

    run(scenario)


# -- cancellation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", MODES)
@pytest.mark.parametrize("at", [0.0, 0.5, 4.5, 4.7, 5.2, 6.1, 10.5, 12.5])
def test_cancelling_requests_at_any_time_leaves_nothing_behind(swap: Mode, at: float) -> None:
    async def scenario() -> None:
        house = House(engine(), swap=swap)
        await house.load_all(0)
        start = anyio.current_time()
        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as doomed:

                async def cancel() -> None:
                    """Cancel the requests with even numbers at the time `at`."""
                    await anyio.sleep(at)
                    doomed.cancel_scope.cancel()

                for task in range(0, 12, 2):
                    doomed.start_soon(house.ask, task, 10)
                for task in range(1, 12, 2):
                    group.start_soon(house.ask, task, 10)
                group.start_soon(cancel)

                async def swap_soon() -> None:
                    """Load version 1 while the first requests run."""
                    await anyio.sleep(4.6)
                    await house.proxy.load(0, published(1))

                group.start_soon(swap_soon)
            assert anyio.current_time() - start <= max(at, 40.0)
        for task in range(1, 12, 2):
            house.check(task, 10)
        house.check_empty()
        assert house.proxy.capacity() == SLOTS
        assert house.engines[0].version == 1

    run(scenario)


@pytest.mark.parametrize("natively", [False, True], ids=["by its scope", "by asyncio"])
def test_a_request_cancelled_at_the_instant_it_gets_its_slot_gives_it_to_the_next(natively: bool) -> None:
    async def scenario() -> None:
        house = House(engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            # Task 0 ends at 10 s and frees the slot for which tasks 50 and 60 wait, in this order.
            for task in range(SLOTS):
                group.start_soon(house.ask, task, 10 if task == 0 else 30)
            await anyio.sleep(1)
            async with anyio.create_task_group() as doomed:
                tasks: list[asyncio.Task[Any]] = []

                async def unlucky() -> None:
                    """Wait for the slot as task 50, which is cancelled when it gets the slot."""
                    tasks.extend([running] if (running := asyncio.current_task()) else [])
                    await house.ask(50, 10)

                doomed.start_soon(unlucky)
                group.start_soon(house.ask, 60, 10)
                await anyio.sleep(1)
                # The proxy calls `on_room` after it has given the slot to task 50, which has not continued yet.
                house.on_room = tasks[0].cancel if natively else doomed.cancel_scope.cancel
                await anyio.sleep(9)
            assert 0 in house.done
            house.on_room = lambda: None
        assert sorted(house.done) == [0, 1, 2, 3, 60]
        assert house.ended_at[60] == house.ended_at[0] + 10
        house.check_empty()

    run(scenario)


# -- everything at once ----------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "cancel", "swap", "kill", "fail", "press"]),
        st.integers(0, 7),
        st.sampled_from([0.0, 0.3, 1.0, 2.7]),
    ),
    max_size=30,
)
"""Random events, each with a number that chooses the engine, length or request, and the seconds until the next one.
`press` fills the KV cache that an engine reports, or empties it."""


@pytest.mark.slow
@settings(max_examples=120)
@given(EVENTS, st.sampled_from(MODES), st.booleans())
def test_every_request_ends_exactly_once_with_all_its_tokens(
    events: list[tuple[str, int, float]], swap: Mode, bind: bool
) -> None:
    async def scenario() -> None:
        house = House(engine(), engine(0.7), engine(1.3), swap=swap, bind=bind)
        await house.load_all(0)
        lengths: dict[int, int] = {}
        scopes: dict[int, anyio.CancelScope] = {}
        cancelled: set[int] = set()
        loading = [anyio.Lock() for _ in house.engines]

        async def one(task: int) -> None:
            """Ask for the response of a task, and note if it was cancelled."""
            with scopes[task]:
                await house.ask(task, lengths[task], group=task // 4)
                return
            cancelled.add(task)

        async def load(index: int) -> None:
            """Load the next version into an engine that lives, one load at a time, as the supervisor does."""
            async with loading[index]:
                if house.engines[index].version >= 0 and house.proxy.records[index].alive:
                    try:
                        await house.proxy.load(index, published(house.engines[index].version + 1))
                    except EngineDeadError as error:
                        house.proxy.retire(index, error)

        async with anyio.create_task_group() as group:
            for kind, number, pause in events:
                fake = house.engines[number % 3]
                if kind == "ask":
                    task = len(lengths)
                    lengths[task], scopes[task] = 1 + number * 3, anyio.CancelScope()
                    group.start_soon(one, task)
                elif kind == "cancel" and scopes:
                    scopes[number % len(scopes)].cancel()
                elif kind == "swap":
                    group.start_soon(load, number % 3)
                elif kind == "kill":
                    fake.kill()
                    house.proxy.retire(number % 3, EngineDeadError("killed"))
                elif kind == "fail":
                    fake.fail_next()
                elif kind == "press":
                    fake.kv_used = 0.99 if fake.kv_used == 0 else 0.0
                await anyio.sleep(pause)
        ends = [set(house.done), set(house.failed), cancelled]
        assert sum(len(end) for end in ends) == len(lengths)
        assert set().union(*ends) == set(lengths)
        for task in house.done:
            house.check(task, lengths[task])
        house.check_empty()

    run(scenario)
