"""What the hub shows people of its cluster: who is there, what is on its way, and what has failed."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from flash.config.load import dump
from flash.hub import protocol as p
from flash.hub.fleet import CUT_OFF, IN_ORDER, config_digest
from flash.observe.cluster import MOST_GONE, MOST_LEASES, Cluster
from flash.types import Failure, Outcome
from tests.hub.test_hub import make_config
from tests.hub.test_stages import Run, with_deadlines
from tests.observe.clusters import cluster, status_of

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


async def tell(run: Run, node: int, **changes: object) -> None:
    """A node tells how its engine is."""
    await run.hub.handle(p.StatusReport(node, status_of(node, 500.0, **changes)))


async def test_nodes_are_shown_with_what_they_tell_and_the_samples_that_they_hold() -> None:
    run = Run(make_config())
    assert [(node.node, node.state, node.status) for node in run.hub.overview().nodes] == [(0, "starting", None)]
    await run.begin(0)
    await anyio.sleep(3)
    await tell(run, 0)
    leases = await run.lease(0, 4)
    await anyio.sleep(5)
    picture = run.hub.overview()
    (node,) = picture.nodes
    assert (node.state, node.leases, node.oldest_lease, node.heard_at) == ("here", 4, picture.at - 5, picture.at - 5)
    assert node.status == status_of(0, 500.0, version=0), "of its versions the hub hears at once"
    assert [(lease.group_id, lease.sample_index) for lease in picture.leases] == [
        (lease.task.group_id, lease.task.sample_index) for lease in leases
    ]
    assert (picture.flow.in_flight, picture.flow.leased, picture.flow.queued) == (4, 4, 0)
    assert picture.flow.most >= 4
    await run.bring(0, *leases)
    assert run.hub.overview().leases == []
    assert "version 0" in picture.doing


async def test_a_picture_has_room_for_the_oldest_samples_alone() -> None:
    run = Run(make_config())
    await run.begin(0)
    held = await run.lease(0, 64)
    assert len(run.hub.overview().leases) == min(MOST_LEASES, len(held))


async def test_a_node_that_is_lost_is_shown_with_when_and_why_and_counts_as_a_failure() -> None:
    run = Run(make_config())
    await run.begin(0, 1)
    await tell(run, 1)
    await anyio.sleep(7)
    run.hub.peer_lost("node-1")
    picture = run.hub.overview()
    (gone,) = (node for node in picture.nodes if node.state == "gone")
    assert (gone.node, gone.gone_at, gone.why) == (1, picture.at, CUT_OFF)
    assert gone.status is not None
    assert gone.status.host == "host-1"
    assert run.observer.failures == [("node_lost", f"node 1: {CUT_OFF}")]
    for _ in range(2 * MOST_GONE):
        run.hub.peer_lost("node-1")
    assert len(run.hub.overview().nodes) <= MOST_GONE + 1


async def test_a_node_that_leaves_in_order_is_no_failure_and_one_that_cannot_go_on_says_why() -> None:
    run = Run(make_config())
    await run.begin(0, 1, 2)
    await run.hub.handle(p.Leave(1))
    run.hub.peer_lost("node-1")
    assert run.observer.failures == []
    await run.hub.handle(p.Leave(2, "EngineError", "no engine is left"))
    run.hub.peer_lost("node-2")
    assert run.observer.failures == [("node_lost", "node 2: EngineError: no engine is left")]
    gone = [node.why for node in run.hub.overview().nodes if node.state == "gone"]
    assert gone == ["EngineError: no engine is left", IN_ORDER]


async def test_the_death_of_an_engine_is_told_once() -> None:
    run = Run(make_config())
    await run.begin(0)
    await tell(run, 0)
    for _ in range(3):
        await tell(run, 0, state="returning", deaths=1, died_at=1.0, why="engine 0 was killed")
    await tell(run, 0, deaths=2, died_at=2.0, why="engine 0 was killed again")
    assert run.observer.failures == [
        ("engine_died", "engine 0 was killed"),
        ("engine_died", "engine 0 was killed again"),
    ]


async def test_samples_that_fail_are_told_with_their_node_and_cancelled_ones_are_not() -> None:
    run = Run(make_config())
    await run.begin(0)
    first, second = await run.lease(0, 2)
    await run.fail(0, first)
    cancelled = p.EndedLease(second.lease_id, Failure(second.task, Outcome.CANCELLED, "no use", 0))
    await run.hub.handle(p.DeliverRequest(0, [cancelled], 0))
    assert run.observer.failures == [("env_error", "node 0: boom")]


async def test_a_silent_node_is_shown_as_such_and_so_is_one_that_leaves() -> None:
    config = with_deadlines(make_config(), batch=500, request=60)
    run = Run(config)
    states: list[list[str]] = []

    async def scenario() -> None:
        for _ in range(2):
            await run.hub.handle(p.JoinRequest(config_digest(dump(config)), 1))
        await run.begin(0, 1, 2)
        for node in (0, 1, 2):
            await tell(run, node)
        await run.hub.handle(p.Leave(2))
        await run.cancels(1)
        await anyio.sleep(70)
        states.append([node.state for node in run.hub.overview().nodes])
        await run.cancels(1)
        states.append([node.state for node in run.hub.overview().nodes])

    await run.watched(scenario, lambda: run.talk(0))
    assert states == [["here", "silent", "leaving"], ["here", "here", "leaving"]]
    assert {kind for kind, _ in run.observer.failures} == {"node_silent"}


async def test_a_picture_can_be_kept_and_read_again() -> None:
    run = Run(make_config())
    await run.begin(0)
    await tell(run, 0)
    whole = cluster(1.0, run.hub.overview())
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Cluster) == whole
