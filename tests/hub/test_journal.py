"""The hub and its journal: nothing is acknowledged that is not written, and the next hub goes on from it."""

from __future__ import annotations

import anyio
import pytest

from flash.hub import protocol as p
from flash.hub.recovery import HubState, RecoveredState
from flash.samples.journal import Committed, MemoryJournal
from tests.hub.test_hub import Driver, make_config
from tests.samples.test_replay import replayed

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


class Slow(MemoryJournal):
    """Is written when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = anyio.Event()

    async def written(self) -> None:
        await self.disk.wait()


async def test_nothing_is_acknowledged_before_it_is_written() -> None:
    journal = Slow()
    journal.disk.set()
    driver = Driver(make_config(), journal=journal)
    await driver.begin(0)
    leases = await driver.lease(0, 8)
    acknowledged: list[str] = []

    async def bring() -> None:
        await driver.bring(0, *leases)
        acknowledged.append("results")

    async def train() -> None:
        await driver.hub.handle(p.BatchRequest(0, 0, []))
        await driver.hub.handle(p.Commit(0, {}))
        acknowledged.append("step")

    async with anyio.create_task_group() as tasks:
        for work, name in ((bring, "results"), (train, "step")):
            journal.disk = anyio.Event()
            tasks.start_soon(work)
            await anyio.sleep(1)
            assert name not in acknowledged
            journal.disk.set()
            await anyio.sleep(1)
            assert name in acknowledged
    assert isinstance(journal.events[-1], Committed)


async def test_a_hub_that_starts_again_gives_the_trainers_their_batches_and_the_nodes_nothing_that_was_delivered() -> (
    None
):
    journal, config = MemoryJournal(), make_config()
    driver = Driver(config, journal=journal)
    await driver.begin(0)
    leases = await driver.lease(0, 8)
    await driver.bring(0, *leases)
    first = await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {}))
    generated = driver.hub.samples.ledger.generated_tokens

    state = replayed(None, 0, journal.events).state(until=0)
    assert state is not None
    again = Driver(config, recovered=RecoveredState(HubState(0, state, journal=0), {0}))
    await again.begin(0)
    assert await again.lease(0, 8) == []
    assert (await again.hub.handle(p.BatchRequest(0, 0, []))).shard == first.shard
    await again.hub.handle(p.Commit(0, {}))
    (row,) = again.observer.steps
    assert (row["samples"], row["generated_tokens"]) == (4, generated)
