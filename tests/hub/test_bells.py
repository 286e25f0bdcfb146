"""Who is woken by what."""

from __future__ import annotations

import anyio
import pytest

from flash.hub.bells import Bell, Bells

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


async def woken_by(ring: list[Bell]) -> list[Bell]:
    bells = Bells()
    woken: list[Bell] = []

    async def wait(bell: Bell) -> None:
        await bells.heard(bell)
        woken.append(bell)

    async with anyio.create_task_group() as tasks:
        for bell in ("run", "batches", ("cancels", 0), ("cancels", 1)):
            tasks.start_soon(wait, bell)
        await anyio.sleep(1)
        bells.ring(*ring)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    return woken


async def test_a_ring_wakes_those_who_wait_for_it_and_nobody_else() -> None:
    assert set(await woken_by([("cancels", 1), "run", "versions"])) == {"run", ("cancels", 1)}


async def test_a_ring_that_nobody_waits_for_is_not_remembered() -> None:
    bells = Bells()
    bells.ring("run")
    with anyio.move_on_after(1) as scope:
        await bells.heard("run")
    assert scope.cancelled_caught


async def test_ring_all_wakes_everybody() -> None:
    bells = Bells()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bells.heard, "run")
        tasks.start_soon(bells.heard, ("cancels", 3))
        await anyio.sleep(1)
        bells.ring_all()
