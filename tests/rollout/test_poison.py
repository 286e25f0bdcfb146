"""Requests that kill each engine that they are given to, and engines that die by themselves, on the virtual clock."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator

import anyio
import pytest

from flash.errors import EngineDeadError, PoisonError
from flash.rollout.engine import Progress, ResponseRequest
from flash.rollout.fake_engine import FakeEngine
from flash.rollout.routing import RequestRecord, Router
from flash.types import Completion
from tests.rollout.test_proxy import SLOTS, SWAP_S, House, answer, engine, published, run
from tests.rollout.test_routing import views


class Mortal(FakeEngine):
    """An engine that dies half a second after it has begun a request of certain tasks, before its first token."""

    def __init__(self, *deadly: int, seconds_per_token: float = 1.0) -> None:
        super().__init__(answer, seconds_per_token, SWAP_S, SLOTS)
        self._deadly = deadly

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Die if the request is deadly, else stream the response."""
        if request.prompt[0] in self._deadly:
            await anyio.sleep(0.5)
            self.kill()
        async for piece in super().generate(request):
            yield piece


class Ward(House):
    """A proxy over engines that die and are replaced by others like them. It counts the deaths."""

    deaths = 0

    async def keep(self, *deadly: int) -> None:
        """Put another engine into each place whose engine dies."""

        async def place(index: int) -> None:
            """Replace the engines of one place, with one version more each time."""
            version = 0
            while True:
                await self.proxy.wait_dead(index)
                self.deaths += 1
                version += 1
                await self.proxy.replace(index, new := Mortal(*deadly))
                self.engines = (*self.engines[:index], new, *self.engines[index + 1 :])
                await self.proxy.load(index, published(version))

        async with anyio.create_task_group() as group:
            for index in range(len(self.engines)):
                group.start_soon(place, index)


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("engines", [1, 3])
def test_a_request_that_kills_every_engine_is_given_up_after_three_and_costs_no_other(engines: int, bind: bool) -> None:
    async def scenario() -> None:
        house = Ward(*(Mortal(0) for _ in range(engines)), bind=bind)
        await house.load_all()
        async with anyio.create_task_group() as outer:
            outer.start_soon(house.keep, 0)
            async with anyio.create_task_group() as group:
                for task in range(1, 2 * SLOTS):
                    group.start_soon(house.ask, task, 20)
                await anyio.sleep(2.5)
                group.start_soon(house.ask, 0, 20)
                await anyio.sleep(0.2)
                for task in range(2 * SLOTS, 4 * SLOTS):
                    group.start_soon(house.ask, task, 20)
            outer.cancel_scope.cancel()
        assert isinstance(house.failed.pop(0), PoisonError)
        assert house.failed == {}
        assert sorted(house.done) == list(range(1, 4 * SLOTS))
        assert house.deaths == 3
        house.check_empty()

    run(scenario)


def test_the_message_about_a_request_that_kills_names_the_last_death() -> None:
    async def scenario() -> None:
        house = Ward(Mortal(7))
        await house.load_all()
        async with anyio.create_task_group() as outer:
            outer.start_soon(house.keep, 7)
            await house.ask(7, 5)
            outer.cancel_scope.cancel()
        assert str(house.failed[7]) == (
            "3 engines died before they had given a token of it: the fake engine was killed"
        )

    run(scenario)


def test_of_all_that_begin_on_an_engine_with_one_that_kills_it_only_that_one_is_given_up() -> None:
    async def scenario() -> None:
        house = Ward(Mortal(2), Mortal(2))
        await house.load_all()
        async with anyio.create_task_group() as outer:
            outer.start_soon(house.keep, 2)
            async with anyio.create_task_group() as group:
                for task in range(2 * SLOTS):
                    group.start_soon(house.ask, task, 20)
            outer.cancel_scope.cancel()
        assert list(house.failed) == [2]
        assert isinstance(house.failed[2], PoisonError)
        assert sorted({*house.done, 2}) == list(range(2 * SLOTS))
        house.check_empty()

    run(scenario)


def test_all_suspects_of_a_group_are_given_up_with_the_first_that_is_convicted() -> None:
    async def scenario() -> None:
        house = Ward(Mortal(*range(SLOTS)))
        await house.load_all()
        async with anyio.create_task_group() as outer:
            outer.start_soon(house.keep, *range(SLOTS))
            async with anyio.create_task_group() as group:
                for task in range(SLOTS):
                    group.start_soon(functools.partial(house.ask, task, 20, group=0))
            outer.cancel_scope.cancel()
        assert sorted(house.failed) == list(range(SLOTS))
        assert all(isinstance(error, PoisonError) for error in house.failed.values())
        assert house.deaths == 3

    run(scenario)


def test_requests_with_tokens_of_the_engine_that_died_are_not_blamed_however_often() -> None:
    async def scenario() -> None:
        house = Ward(Mortal())
        await house.load_all()
        async with anyio.create_task_group() as outer:
            outer.start_soon(house.keep)
            async with anyio.create_task_group() as group:
                for task in range(SLOTS):
                    group.start_soon(house.ask, task, 40)
                for _ in range(6):
                    await anyio.sleep(5)
                    house.engines[0].kill()
            outer.cancel_scope.cancel()
        assert house.failed == {}
        assert house.deaths == 6
        for task in range(SLOTS):
            house.check(task, 40)

    run(scenario)


def test_failures_to_load_and_engines_that_only_fail_blame_no_request() -> None:
    async def scenario() -> None:
        house = House(engine(), engine(), engine())
        await house.load_all()
        async with anyio.create_task_group() as group:
            group.start_soon(house.ask, 0, 20)
            for place in (0, 1, 2):
                await anyio.sleep(0.5)
                if house.engines[place].running and place < 2:
                    house.proxy.retire(place, EngineDeadError("it could not load version 1"))
        assert house.failed == {}
        house.check(0, 20)

    run(scenario)


def record(task: int) -> RequestRecord:
    """Return the router's record of the only request of a task."""
    return RequestRecord(ResponseRequest([1], 1, key=task, group_id=task, task_id=task))


def test_a_suspect_that_is_cancelled_or_ends_makes_room_for_the_next_one() -> None:
    router = Router(views(4, [0]), bind_groups=False)
    first, second = record(0), record(1)
    for request in (first, second):
        request.died_under("once")
    assert not first.suspected, "once may be chance"
    for request in (first, second):
        request.died_under("boom")
    assert router.ask(first) == 0
    assert router.ask(second) is None
    assert router.ask(record(2)) == 0, "what is no suspect may run beside one"
    router.views[0].release(first)
    assert router.fill(0) == [second]
