"""The fakes against the contract of engines, on the virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import anyio
import pytest

from flash.config.simulate import SimulateConfig
from flash.rollout.engine import Engine
from flash.rollout.fake_engine import FakeEngine
from flash.simulate.engine import SimEngine
from flash.types import Canary, Published
from tests.rollout import engine_contract as contract
from tests.rollout.engine_contract import ENDLESS

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


class Fake:
    """A fake engine as the contract's subject."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._versions = count()

    def publish(self) -> Published:
        return Published(next(self._versions), "tcp", b"", Canary([], []))

    async def kill(self) -> None:
        await anyio.sleep(0.003)
        self.engine.kill()  # type: ignore[attr-defined]


def simulated() -> Fake:
    """Return a simulated engine: its tokens need a version, and it accepts every prompt."""
    settings = SimulateConfig(step_s=0.01, sequence_s=0, context_s=0, prefill_s=0, swap_s=0.05)
    return Fake(SimEngine(settings, 64, lambda key: 10 * ENDLESS, 8))


def fake() -> Fake:
    """Return a fake engine whose responses end at their limit only."""
    return Fake(FakeEngine(lambda prompt: list(range(10 * ENDLESS)), seconds_per_token=0.01))


@pytest.mark.parametrize("check", contract.WHILE_IT_LIVES, ids=lambda check: check.__name__)
async def test_the_fake_engine(check: Callable[[Any], Awaitable[None]]) -> None:
    subject = fake()
    await subject.engine.start()
    await check(subject)


@pytest.mark.parametrize("check", contract.WHILE_IT_LIVES, ids=lambda check: check.__name__)
async def test_the_simulated_engine(check: Callable[[Any], Awaitable[None]]) -> None:
    if check is not contract.an_empty_prompt_is_refused_and_the_engine_is_well:
        subject = simulated()
        await subject.engine.load(subject.publish(), keep_cache=False)
        await check(subject)


async def test_the_simulated_engine_dies_as_an_engine_does() -> None:
    subject = simulated()
    assert "was killed" in await contract.a_death_ends_everything_at_once(subject, subject.kill)
    subject = simulated()
    await contract.a_death_in_a_swap_ends_the_swap(subject, subject.kill)


async def test_the_fake_engine_begins_and_ends_as_an_engine_does() -> None:
    await contract.tokens_before_the_first_load_carry_no_version(fake())
    subject = fake()
    assert "was killed" in await contract.a_death_ends_everything_at_once(subject, subject.kill)
    subject = fake()
    await contract.a_death_in_a_swap_ends_the_swap(subject, subject.kill)
    await contract.a_closed_engine_serves_nobody(fake())
