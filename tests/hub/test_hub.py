"""The hub's protocol as a node and a trainer see it, on the virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import BreakerError
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.observe.observer import MemoryObserver
from flash.types import Canary, Failure, Lease, Outcome, Published
from tests.hub.cases import trajectory
from tests.metrics_page import unlisted

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


def make_config(**rollout: Any) -> Config:
    base = {
        "run": {"name": "test", "steps": 4},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "rollout": {"group_size": 2, "retries": 0} | rollout,
        "train": {"batch_size": 4, "async_ratio": 0.0},
        "eval": {"every": 0, "problems": 1},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(base, Config)


class Driver:
    """Speaks for the nodes and the only trainer rank."""

    def __init__(self, config: Config, kind_of: Callable[[int], str] = lambda seed: "") -> None:
        self.observer = MemoryObserver()
        self.hub = Hub(config, self.observer, now=anyio.current_time, kind_of=kind_of)

    async def begin(self, *nodes: int) -> None:
        """Version 0 is published and loaded, and the first evaluation is over."""
        published = Published(0, "tcp", b"", Canary([1, 2], [-1.0]))
        await self.hub.handle(p.PublishRequest(published))
        for node in nodes:
            status = p.EngineStatus(index=node, version=0, idle_s=0.0, lifetime_s=1.0, canary_error=0.0)
            await self.hub.handle(p.EngineReport(node, [status], []))
        for lease in await self.lease(nodes[0], 1):
            await self.bring(nodes[0], lease)

    async def lease(self, node: int, capacity: int) -> list[Lease]:
        reply = await self.hub.handle(p.LeaseRequest(node, capacity))
        return reply.leases

    async def bring(self, node: int, *leases: Lease) -> None:
        results = [p.EndedLease(lease.lease_id, trajectory(lease.task, 0)) for lease in leases]
        await self.hub.handle(p.DeliverRequest(node, results))

    async def fail(self, node: int, *leases: Lease) -> None:
        results = [p.EndedLease(lease.lease_id, Failure(lease.task, Outcome.ENV_ERROR, "boom", 0)) for lease in leases]
        await self.hub.handle(p.DeliverRequest(node, results))

    async def cancels(self, node: int) -> list[int]:
        reply = await self.hub.handle(p.CancelRequest(node))
        return reply.lease_ids


async def took(call: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
    start = anyio.current_time()
    result = await call()
    return result, anyio.current_time() - start


async def test_the_losers_of_a_group_are_cancelled_at_once_on_the_node_that_runs_them() -> None:
    driver = Driver(make_config(extra_per_group=1))
    await driver.begin(0, 1)
    first, second = await driver.lease(0, 2)
    (third,) = await driver.lease(1, 1)
    told: list[tuple[list[int], float]] = []

    async def listen() -> None:
        told.append(await took(lambda: driver.cancels(1)))

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await anyio.sleep(3)
        await driver.bring(0, first, second)
    assert told == [([third.lease_id], 3.0)]


async def test_nothing_to_cancel_is_answered_empty_after_the_long_poll() -> None:
    driver = Driver(make_config())
    await driver.begin(0)
    assert await took(lambda: driver.cancels(0)) == ([], p.LONG_POLL_S)


async def test_a_loser_that_came_home_first_is_booked_as_waste_and_nothing_else() -> None:
    driver = Driver(make_config(extra_per_group=1))
    await driver.begin(0)
    leases = await driver.lease(0, 3)
    await driver.bring(0, *leases)
    assert driver.hub.buffer.ledger.discarded_tokens == {Outcome.CANCELLED: 3}
    assert driver.hub.buffer.ready_groups == 1
    driver.hub.buffer.check()


async def test_the_leases_of_a_lost_node_go_to_another_and_its_cancels_are_forgotten() -> None:
    driver = Driver(make_config(extra_per_group=1))
    await driver.begin(0, 1)
    first, second, third = await driver.lease(0, 3)
    await driver.bring(0, first, second)
    driver.hub.peer_lost("node-0")
    driver.hub.buffer.check()
    assert third.task.task_id not in [lease.task.task_id for lease in await driver.lease(1, 8)]
    assert (await driver.cancels(0)) == []


async def test_without_prompt_replication_a_group_goes_to_one_node_as_a_whole() -> None:
    driver = Driver(make_config(replicate_prompts=False))
    await driver.begin(0, 1)
    assert [lease.task.task_id for lease in await driver.lease(0, 1)] == [0, 1]
    assert [lease.task.task_id for lease in await driver.lease(1, 1)] == [2, 3]


async def test_a_quarantine_is_told_to_people() -> None:
    driver = Driver(make_config(quarantine=1), kind_of=lambda seed: "bad" if seed % 2 else "good")
    await driver.begin(0)
    leases = await driver.lease(0, 4)
    await driver.fail(0, *[lease for lease in leases if lease.task.kind == "bad"][:1])
    assert any("'bad' are in quarantine" in note for note in driver.observer.notes)
    await driver.bring(0, *[lease for lease in leases if lease.task.kind == "good"])
    assert {lease.task.kind for lease in await driver.lease(0, 4)} == {"good"}


async def test_when_nothing_is_left_to_issue_the_run_ends_with_the_reason() -> None:
    driver = Driver(make_config(quarantine=1), kind_of=lambda seed: "bad")
    await driver.begin(0)
    leases = await driver.lease(0, 4)
    await driver.fail(0, leases[0])
    with pytest.raises(BreakerError, match=r"every kind of environment keeps failing \(bad\)"):
        await driver.lease(0, 4)


async def test_what_environments_measure_is_averaged_over_each_batch_and_each_evaluation() -> None:
    driver = Driver(make_config())

    def measured(lease: Lease, **metrics: float) -> p.EndedLease:
        made = trajectory(lease.task, 0)
        turns = [msgspec.structs.replace(made.turns[0], metrics=metrics)]
        return p.EndedLease(lease.lease_id, msgspec.structs.replace(made, turns=turns))

    await driver.hub.handle(p.PublishRequest(Published(0, "tcp", b"", Canary([1, 2], [-1.0]))))
    await driver.hub.handle(p.EngineReport(0, [p.EngineStatus(0, 0, 0.0, 1.0, 0.0)], []))
    (held_out,) = await driver.lease(0, 1)
    await driver.hub.handle(p.DeliverRequest(0, [measured(held_out, won=1.0)]))
    assert driver.observer.evaluations[0]["env/won"] == 1.0

    one, two, three, four = await driver.lease(0, 4)
    results = [measured(one, won=1.0), measured(two, won=0.0, moves=3.0), measured(three, moves=5.0), measured(four)]
    await driver.hub.handle(p.DeliverRequest(0, results))
    await driver.hub.handle(p.BatchRequest(0, 0, []))
    await driver.hub.handle(p.Commit(0, {"loss": 0.1}))
    (row,) = driver.observer.steps
    assert {name: row[name] for name in row if name.startswith("env/")} == {"env/moves": 4.0, "env/won": 0.5}
    assert (row["samples"], row["loss"]) == (4, 0.1)
    assert unlisted(row) == []
    assert unlisted(driver.observer.evaluations[0], "evals.jsonl") == []


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_trainer_stays_until_every_engine_has_its_last_version(interrupted: bool) -> None:
    driver = Driver(make_config())
    await driver.begin(0, 1)
    await driver.hub.handle(p.PublishRequest(Published(1, "tcp", b"", Canary([1, 2], [-1.0]))))
    left = anyio.Event()

    async def leave() -> None:
        await driver.hub.handle(p.Goodbye(0, []))
        left.set()

    async def load(node: int) -> None:
        status = p.EngineStatus(index=node, version=1, idle_s=0.0, lifetime_s=1.0, canary_error=0.0)
        await driver.hub.handle(p.EngineReport(node, [status], []))
        await anyio.sleep(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        await load(0)
        assert not left.is_set()
        if interrupted:
            driver.hub.interrupt()
        else:
            await load(1)
        with anyio.fail_after(1):
            await left.wait()
