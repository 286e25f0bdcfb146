"""Sandboxes that are lent a bounded number at a time, each for one use."""

from __future__ import annotations

import anyio
import pytest

from envs.sandbox.api import Spec
from envs.sandbox.open import BoundedSandboxes
from flash.errors import SandboxBusyError, SandboxLostError
from tests.envs.sandboxes import ScriptedProvider

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

SPEC = Spec(image="any")


async def test_no_more_are_lent_at_a_time_than_are_allowed_and_each_is_lent_once():
    provider = ScriptedProvider(start_s=0.1)
    sandboxes = BoundedSandboxes(provider, owner="run", most=2)

    async def use() -> None:
        async with sandboxes.borrow(SPEC, 60.0):
            await anyio.sleep(1.0)

    async with anyio.create_task_group() as tasks:
        for _ in range(7):
            tasks.start_soon(use)
        await anyio.sleep(0.5)
        stock = sandboxes.stock()
        assert (stock.in_use, stock.waiting, stock.most) == (2, 5, 2)
    assert (provider.most, provider.out, len(provider.sandboxes)) == (2, 0, 7)
    assert (sandboxes.stock().in_use, sandboxes.stock().made) == (0, 7)


async def test_a_caller_that_waits_too_long_is_told_and_takes_no_place():
    sandboxes = BoundedSandboxes(ScriptedProvider(), owner="run", most=1)
    async with sandboxes.borrow(SPEC, 60.0):
        with pytest.raises(SandboxBusyError, match="waited 3 s while all 1 sandboxes"):
            async with sandboxes.borrow(SPEC, 3.0):
                raise AssertionError
    assert sandboxes.stock().in_use == 0


async def test_a_place_is_free_again_after_a_failed_start_and_after_a_cancelled_use():
    sandboxes = BoundedSandboxes(ScriptedProvider(failures=1), owner="run", most=1)
    with pytest.raises(SandboxLostError):
        async with sandboxes.borrow(SPEC, 60.0):
            raise AssertionError
    with anyio.move_on_after(1.0):
        async with sandboxes.borrow(SPEC, 60.0):
            await anyio.sleep_forever()
    async with sandboxes.borrow(SPEC, 1.0):
        assert sandboxes.stock().in_use == 1
