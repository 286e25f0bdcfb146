"""The watch over a loop: blocks are named once with a count, and no deadline passes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from flash.environment import places
from flash.environment.calls import UserTask
from flash.environment.places import is_users, place_in
from flash.run.loop_watch import BLOCKED_S, REPEAT_S, TICK_S, Blocks, WatchedLoop, run_watched

USERS = "/somewhere/bad.py:23"
"""Line of a user's code."""
LOOKS = round((BLOCKED_S - TICK_S) / TICK_S)
"""Looks after which a loop counts as blocked."""


def looked(blocks: Blocks, *places: str) -> list[str]:
    """Make a check for each of these places, and return the messages."""
    return [message for place in places if (message := blocks.check(place)) is not None]


def test_a_block_is_reported_once_with_the_place_that_was_seen_most_and_an_advice() -> None:
    blocks = Blocks()
    told = looked(blocks, *[USERS] * (LOOKS - 2), "/elsewhere/good.py:1", *[USERS] * 5)
    assert told == [
        f"{USERS} blocked the event loop for 1 s: use plain `def`, which runs in a thread, or await",
    ]
    assert blocks.blocked
    blocks.heartbeat()
    assert not blocks.blocked


def test_a_line_whose_thread_got_no_processor_is_not_blamed_alone() -> None:
    blocks = Blocks()
    (told,) = [message for _ in range(LOOKS) if (message := blocks.check(USERS, ran_s=TICK_S / 10))]
    assert told.startswith(f"{USERS} blocked the event loop for 1 s: use plain `def`")
    assert "only 0.1 s of processor time" in told
    assert "it is not to blame" in told


def test_generated_code_at_the_bottom_of_the_stack_of_a_forked_process_is_not_named_as_the_users() -> None:
    place = place_in([("<string>", 1), (asyncio.__file__, 7)])
    assert place == f"{asyncio.__file__}:7"
    assert not is_users(place)


def test_a_folder_beside_flash_whose_name_begins_like_its_own_is_the_users() -> None:
    flash = Path(places.__file__).parents[1]
    place = place_in([(f"{flash}_tasks/env.py", 5), (str(flash / "environment" / "calls.py"), 7)])
    assert place == f"{flash}_tasks/env.py:5"
    assert is_users(place)


def test_a_place_is_reported_again_the_tenth_and_the_hundredth_time() -> None:
    blocks = Blocks()
    told: list[str] = []
    for _ in range(100):
        told += looked(blocks, *[USERS] * LOOKS)
        blocks.heartbeat()
    assert [" 10 times" in text or " 100 times" in text for text in told] == [False, True, True]
    assert blocks.counts == {USERS: 100}


def test_a_block_that_does_not_end_is_reported_again() -> None:
    told = looked(Blocks(), *[USERS] * round(2 * REPEAT_S / TICK_S))
    assert [f"still blocks the event loop, for {seconds:g} s" in told[-1] for seconds in (REPEAT_S, 2 * REPEAT_S)] == [
        False,
        True,
    ]
    assert len(told) == 3


@pytest.mark.parametrize("places", [[""] * 100, [USERS] * (LOOKS - 1), ["", "", USERS] * 20])
def test_a_loop_that_waits_for_events_or_turns_is_not_blocked(places: list[str]) -> None:
    assert looked(Blocks(), *places) == []


def test_code_that_is_not_the_users_gets_no_advice() -> None:
    (told,) = looked(Blocks(), *[asyncio.__file__ + ":7"] * LOOKS)
    assert "def" not in told


@pytest.mark.may_block
def test_while_a_users_code_blocks_the_loop_no_deadline_passes_and_its_line_is_named() -> None:
    told: list[str] = []

    async def blocks() -> tuple[float, float, float]:
        """Block the loop for 4 s. Returns the seconds on the loop's clock, on the wall clock, and those that the loop
        has lost."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        begun, real = loop.time(), time.monotonic()
        with anyio.fail_after(60):
            time.sleep(4)  # noqa: ASYNC251
            await anyio.sleep(2 * TICK_S)
            return loop.time() - begun, time.monotonic() - real, loop.lost_s

    passed, took, lost = run_watched(told.append, blocks)
    assert took >= 4
    assert 0 < lost < took
    assert passed == pytest.approx(took - lost, abs=0.5)
    assert [f"{__file__}:" in text and "blocked the event loop" in text for text in told] == [True]
    assert "processor time" in told[0], "the line sleeps"


@pytest.mark.slow
@pytest.mark.may_block
def test_a_line_that_computes_is_blamed_without_doubt() -> None:
    told: list[str] = []

    async def computes() -> None:
        """Compute for four times `BLOCKED_S`."""
        until = time.thread_time() + 4 * BLOCKED_S
        while time.thread_time() < until:
            pass

    # The machine of the test may be busy itself, and the doubt is right then: half of the time must be its own.
    begun, own = time.monotonic(), time.thread_time()
    run_watched(told.append, computes)
    if time.thread_time() - own > 0.9 * (time.monotonic() - begun):
        assert ["processor time" in text for text in told] == [False]


def test_tasks_that_swallow_their_cancellation_do_not_hold_the_end_of_the_loop() -> None:
    async def swallows() -> None:
        """Swallow every cancellation."""
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(1000)

    async def leaves_some() -> str:
        """Leave a task that swallows cancellations."""
        task = asyncio.create_task(swallows())
        await anyio.lowlevel.checkpoint()
        assert not task.done()
        return "over"

    assert run_watched(lambda text: None, leaves_some) == "over"


@pytest.mark.may_block
def test_a_loop_that_was_blocked_reads_messages_between_the_calls_that_block_it() -> None:
    order: list[str] = []

    async def blocks(number: int) -> None:
        """Block the loop if `number` is 0, and note the call."""
        time.sleep(2 * BLOCKED_S if number == 0 else 0.0)  # noqa: ASYNC251
        order.append(f"call {number}")

    async def messages() -> None:
        """Take three turns of the loop, as the reading of a message does."""
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        order.append("message")

    async def calls() -> None:
        """Block the loop, and start three calls and the reading of a message in one turn."""
        first = UserTask("first", lambda: blocks(0))
        await first.wait(60)
        await anyio.sleep(2 * TICK_S)
        some = [UserTask("another", partial(blocks, number)) for number in range(1, 4)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(messages)
            for one in some:
                assert await one.wait(60)

    run_watched(lambda text: None, calls)
    assert order == ["call 0", "message", "call 1", "call 2", "call 3"]
