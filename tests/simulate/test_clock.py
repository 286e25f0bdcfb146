from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
import anyio.to_thread
import pytest

from flash.errors import ContractError
from flash.simulate.clock import VirtualLoop, run_virtual


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_marked_test_runs_on_the_virtual_clock():
    assert isinstance(asyncio.get_running_loop(), VirtualLoop)
    before = anyio.current_time()
    await anyio.sleep(1e4)
    assert anyio.current_time() - before == pytest.approx(1e4)


@pytest.mark.anyio
async def test_an_unmarked_test_runs_on_the_real_clock():
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)


def test_the_clock_starts_at_zero_and_the_result_is_returned():
    async def tell(offset: float) -> float:
        return anyio.current_time() + offset

    assert run_virtual(tell, 3.0) == 3.0


def test_timers_fire_in_the_order_of_their_times_however_far_apart():
    async def record(delays: list[float]) -> list[tuple[float, float]]:
        woken: list[tuple[float, float]] = []

        async def wait(delay: float) -> None:
            await anyio.sleep(delay)
            woken.append((delay, anyio.current_time()))

        async with anyio.create_task_group() as tasks:
            for delay in delays:
                tasks.start_soon(wait, delay)
        return woken

    chooser = random.Random(0)
    delays = [chooser.choice([1e-6, 1.0, 3600.0, 1e7]) * chooser.random() for _ in range(500)]
    woken = run_virtual(record, delays)
    assert [delay for delay, _ in woken] == sorted(delays)
    # The loop's own resolution is 1 ns, and a float at 1e7 s resolves 2 ns.
    assert all(at == pytest.approx(delay, rel=1e-12, abs=2e-9) for delay, at in woken)


@pytest.mark.parametrize("years", [0.5, 30.0, 3000.0])
def test_timers_still_fire_after_years(years):
    async def two_sleeps() -> float:
        await anyio.sleep(years * 365 * 86400)
        before = anyio.current_time()
        await anyio.sleep(0.01)
        return anyio.current_time() - before

    assert run_virtual(two_sleeps) == pytest.approx(0.01, rel=0.01)


def test_a_deadline_fires_before_the_work_that_outlives_it():
    async def wait() -> float:
        with anyio.move_on_after(30):
            await anyio.sleep(31)
        return anyio.current_time()

    assert run_virtual(wait) == pytest.approx(30)


def test_two_runs_take_the_same_course():
    async def race() -> list[int]:
        order: list[int] = []

        async def run(number: int) -> None:
            for _ in range(3):
                await anyio.sleep(number % 3)
                order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(run, number)
        return order

    assert run_virtual(race) == run_virtual(race)


def test_a_deadlock_raises_and_names_the_waiting_tasks_and_lines():
    async def wait_for_nobody() -> None:
        await anyio.Event().wait()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_nobody, name="the forgotten one")

    with pytest.raises(ContractError, match="nothing can happen any more") as caught:
        run_virtual(main)
    assert "the forgotten one" in str(caught.value)
    assert "in test_a_deadlock_raises_and_names_the_waiting_tasks_and_lines.<locals>.wait_for_nobody" in str(
        caught.value
    )


def test_a_deadlock_in_an_async_generator_names_the_line_in_it():
    async def stream() -> AsyncGenerator[int]:
        await anyio.Event().wait()
        yield 1

    async def main() -> None:
        async with aclosing(stream()) as numbers:
            async for _ in numbers:
                pass

    with pytest.raises(ContractError, match=r"\.<locals>\.stream"):
        run_virtual(main)


def test_a_deadlocked_task_of_a_library_alone_says_so():
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.Event().wait, name="a library's")

    with pytest.raises(ContractError, match=r"a library's: inside of asyncio or anyio"):
        run_virtual(main)


def test_a_task_that_sleeps_forever_hides_no_deadlock():
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            await anyio.Event().wait()

    with pytest.raises(ContractError, match="nothing can happen any more"):
        run_virtual(main)


def test_a_task_that_sleeps_forever_can_be_cancelled():
    async def main() -> float:
        with anyio.move_on_after(5):
            await anyio.sleep_forever()
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(5)


def test_a_deadlock_of_many_tasks_lists_only_some():
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(anyio.Event().wait)

    with pytest.raises(ContractError, match="and 81 more"):
        run_virtual(main)


def test_a_deadlock_lets_the_tasks_clean_up():
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await anyio.Event().wait()
        finally:
            cleaned.append("main")

    with pytest.raises(ContractError):
        run_virtual(main)
    assert cleaned == ["main"]


def test_a_socket_cannot_be_awaited():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ContractError, match="the socket or pipe"):
        run_virtual(anyio.wait_readable, ours)


def test_a_host_name_cannot_be_looked_up():
    with pytest.raises(ContractError, match="thread"):
        run_virtual(anyio.getaddrinfo, "localhost", 80)


def test_a_process_cannot_be_awaited():
    async def start() -> None:
        await anyio.run_process([sys.executable, "-c", ""], stdout=subprocess.DEVNULL)

    with pytest.raises(ContractError, match="the process"):
        run_virtual(start)


def test_asyncio_threads_are_refused():
    with pytest.raises(ContractError, match="thread"):
        run_virtual(asyncio.to_thread, sum, [1])


def test_a_thread_that_wakes_the_loop_is_refused():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(print,), name="an intruder")
        thread.start()
        thread.join()
        await anyio.sleep(1)

    with pytest.raises(ContractError, match="an intruder"):
        run_virtual(main)


def test_an_anyio_thread_is_refused_rather_than_waited_for():
    async def main() -> None:
        await anyio.to_thread.run_sync(threading.Event().wait, 0.05, abandon_on_cancel=True)

    with pytest.raises(ContractError, match="thread"):
        run_virtual(main)


def test_an_error_of_the_program_passes_through():
    async def fail() -> None:
        await anyio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(fail)


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_an_error_of_a_callback_passes_through(delay: float):
    async def main() -> None:
        asyncio.get_running_loop().call_later(delay, [].remove, "missing")
        await anyio.sleep(10.0)

    with pytest.raises(ValueError, match="not in list"):
        run_virtual(main)
