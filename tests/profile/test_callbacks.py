"""What held an event loop up, by name."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
from functools import partial
from pathlib import Path

import anyio
import pytest

from flash.profile.callbacks import COLLECTION, CallbackWatch


class Clock:
    """Seconds that pass when a callback says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


def watch_of(clock: Clock) -> CallbackWatch:
    return CallbackWatch("a loop", 1.0, clock, clock)


async def busy(clock: Clock, seconds: float) -> None:
    await asyncio.sleep(0)
    clock.pass_s(seconds)


async def outer(clock: Clock, seconds: float) -> None:
    await busy(clock, seconds)


def plain(clock: Clock, seconds: float) -> None:
    clock.pass_s(seconds)


@pytest.mark.parametrize("spread", ["task", "group"])
def test_a_slow_piece_of_a_coroutine_is_named_by_its_task_and_by_where_it_went_on(spread: str) -> None:
    clock = Clock()
    watch = watch_of(clock)

    async def all_of_it() -> None:
        if spread == "task":
            await asyncio.create_task(outer(clock, 3.0))
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(outer, clock, 3.0)

    with watch.watching():
        asyncio.run(all_of_it())
    (slow,) = watch.slow
    assert slow.name == "outer › busy"
    line = busy.__code__.co_firstlineno + 1
    assert slow.where == f"tests/profile/test_callbacks.py:{line}"
    assert slow.seconds == slow.cpu_s == 3.0


def test_a_task_that_is_slow_before_its_first_wait_has_the_name_that_it_was_given() -> None:
    clock = Clock()
    watch = watch_of(clock)

    async def at_once() -> None:
        clock.pass_s(2.0)

    async def all_of_it() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(at_once)

    with watch.watching():
        asyncio.run(all_of_it())
    assert [slow.name.rpartition(".")[2] for slow in watch.slow] == ["at_once"]


def test_functions_are_named_and_every_callback_is_counted_with_its_time() -> None:
    clock = Clock()
    watch = watch_of(clock)

    async def all_of_it() -> None:
        loop = asyncio.get_running_loop()
        for seconds in (0.5, 5.0):
            loop.call_soon(partial(plain, clock, seconds))
            loop.call_later(0, plain, clock, seconds)
        await asyncio.sleep(0.01)

    with watch.watching():
        asyncio.run(all_of_it())
    assert [slow.name for slow in watch.slow] == ["plain", "plain"]
    assert {slow.where for slow in watch.slow} == {f"tests/profile/test_callbacks.py:{plain.__code__.co_firstlineno}"}
    assert watch.busy_s == 11.0
    assert watch.count >= 4


def test_outside_of_the_block_nothing_is_watched_and_an_error_passes() -> None:
    clock = Clock()
    watch = watch_of(clock)
    before = asyncio.Handle._run  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ZeroDivisionError), watch.watching():
        raise ZeroDivisionError
    assert asyncio.Handle._run is before  # pyright: ignore[reportPrivateUsage]
    asyncio.run(outer(clock, 3.0))
    assert watch.count == 0
    gc.collect()
    assert watch.slow == []


def test_a_pause_for_garbage_is_kept_by_itself() -> None:
    clock = Clock()
    watch = watch_of(clock)

    class Slow:
        def __del__(self) -> None:
            clock.pass_s(4.0)

    with watch.watching():
        circle = [Slow()]
        circle.append(circle)  # pyright: ignore[reportArgumentType]
        del circle
        gc.collect()
    (slow,) = watch.slow
    assert (slow.name, slow.where, slow.seconds) == (COLLECTION, "generation 2", 4.0)


def test_its_file_is_a_trace_and_a_folder_that_is_gone_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    watch = watch_of(clock)
    with watch.watching():
        asyncio.run(outer(clock, 3.0))
    watch.write(tmp_path / "node-0.json.gz")
    made = json.loads(gzip.decompress((tmp_path / "node-0.json.gz").read_bytes()))
    (event,) = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert event["name"] == "outer › busy"
    assert event["dur"] == 3e6
    assert made["flash"]["who"] == "a loop"
    assert made["flash"]["steps"] == watch.count
    watch.write(tmp_path / "gone" / "node-0.json.gz")
    assert "the profile of a loop was not written to" in caplog.text
