"""The signals of the run's progress: each wakes its own waiters."""

from __future__ import annotations

import anyio
import pytest

from flash.hub.context import RunProgress, Signal

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


async def woken_by(sent: list[Signal]) -> list[Signal]:
    """Let a task wait for each of four signals, send `sent`, and return the signals whose tasks were woken."""
    signals = RunProgress(0)
    woken: list[Signal] = []

    async def wait(signal: Signal) -> None:
        await signals.wait(signal)
        woken.append(signal)

    async with anyio.create_task_group() as tasks:
        for signal in ("run", "batches", ("cancels", 0), ("cancels", 1)):
            tasks.start_soon(wait, signal)
        await anyio.sleep(1)
        signals.send(*sent)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    return woken


async def test_a_signal_wakes_those_who_wait_for_it_and_nobody_else() -> None:
    assert set(await woken_by([("cancels", 1), "run", "versions"])) == {"run", ("cancels", 1)}


async def test_a_signal_that_nobody_waits_for_is_not_remembered() -> None:
    signals = RunProgress(0)
    signals.send("run")
    with anyio.move_on_after(1) as scope:
        await signals.wait("run")
    assert scope.cancelled_caught


async def test_the_end_of_the_run_wakes_everybody() -> None:
    signals = RunProgress(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(signals.wait, "run")
        tasks.start_soon(signals.wait, ("cancels", 3))
        await anyio.sleep(1)
        signals.end()
