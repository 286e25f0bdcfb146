"""Nodes that join and leave during a run: their numbers, their leases, and the notes and pictures for people.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.config.load import dump
from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError, PeerLostError, WeightsError
from flash.hub import protocol as p
from flash.hub.fleet import CUT_OFF, IN_ORDER, Heartbeats, NodeRegistry, RunOrigin, config_digest
from flash.observe.cluster import MOST_GONE, MOST_LEASES, Cluster
from flash.types import Failure, Lease, Outcome
from tests.hub.test_hub import Driver, all_leases, make_config
from tests.hub.test_stages import Run, with_deadlines
from tests.observe.clusters import cluster, status_of

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


def with_cluster(gpus: int = 0, backend: str = "auto", **cluster: Any) -> Config:
    """Return a run with this number of GPUs on each node and this backend for weights.

    `cluster` replaces settings of `[cluster]`.
    """
    config = make_config()
    return msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(config.cluster, gpus_per_node=gpus, **cluster),
        weights=msgspec.structs.replace(config.weights, backend=backend),
        engine=msgspec.structs.replace(config.engine, count=max(1, gpus)),
    )


def ask(members: NodeRegistry, engines: int, own: int = 0) -> tuple[int | None, int]:
    """Let a node with this number of engines join. Returns the number of the node, and of its first engine.

    `own`: number that a node with trainer ranks has in the job.
    """
    run = members.describe_run(p.RunRequest(p.dialect()), 0, ending=False)
    reply = members.join(p.JoinRequest(run.digest, engines, own))
    return reply.node, reply.first_engine


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=30), st.integers(1, 3))
def test_no_two_living_members_or_engines_have_the_same_number(
    events: list[tuple[bool, int]], trainer_nodes: int
) -> None:
    members = NodeRegistry(with_cluster(nodes=4, trainer_nodes=trainer_nodes), RunOrigin())
    engines = {0: {0}}
    for joins, number in events:
        if joins:
            node, first = ask(members, number)
            assert node is not None
            assert node not in engines
            engines[node] = set(range(first, first + number))
        elif len(engines) > 1:
            gone = sorted(engines)[-1 - number % (len(engines) - 1)]
            members.left(gone)
            del engines[gone]
        taken = [engine for numbers in engines.values() for engine in numbers]
        assert len(taken) == len(set(taken))
        assert members.joined == [node for node in members.joined if node in engines and node > 0]


def test_a_node_takes_the_place_of_one_that_is_gone() -> None:
    members = NodeRegistry(with_cluster(), RunOrigin())
    assert [ask(members, engines) for engines in (2, 3, 2)] == [(1, 1), (2, 3), (3, 6)]
    members.left(2)
    assert ask(members, 3) == (2, 3)
    members.left(2)
    assert ask(members, 4) == (2, 8), "other engines than those that are gone"


def test_a_node_with_trainer_ranks_keeps_the_number_that_it_has_in_the_job() -> None:
    members = NodeRegistry(with_cluster(nodes=4, trainer_nodes=3), RunOrigin())
    # Numbers below 3 are kept for the nodes with trainer ranks.
    assert [ask(members, 1), ask(members, 1, own=2), ask(members, 1, own=1)] == [(3, 1), (2, 2), (1, 3)]
    assert ask(members, 1, own=2) == (4, 4), "the one before it is not gone yet"
    members.left(2)
    assert ask(members, 1, own=2) == (2, 2)


def test_a_node_of_another_version_is_told_before_it_joins() -> None:
    with pytest.raises(ConfigError, match="install the same version of Flash on both"):
        NodeRegistry(with_cluster(), RunOrigin()).describe_run(p.RunRequest("older"), 0, ending=False)


def test_a_node_that_has_heard_of_another_incarnation_of_the_run_asks_again() -> None:
    members = NodeRegistry(with_cluster(), RunOrigin())
    with pytest.raises(PeerLostError, match="has restarted with another configuration"):
        members.join(p.JoinRequest("0" * 16, 1))


def test_nodes_join_the_group_of_nccl_as_they_do_over_tcp() -> None:
    members = NodeRegistry(with_cluster(gpus=2, backend="nccl", nodes=2), RunOrigin())
    assert [ask(members, 1), ask(members, 2), ask(members, 4)] == [(1, 1), (2, 2), (3, 4)]


def test_nodes_with_trainers_have_their_own_numbers() -> None:
    members = NodeRegistry(with_cluster(nodes=3, trainer_nodes=2), RunOrigin())
    assert [ask(members, 2), ask(members, 1, own=1)] == [(2, 1), (1, 3)]


def test_nobody_joins_engines_that_share_the_trainers_memory() -> None:
    with pytest.raises(ConfigError, match="ipc works only on the trainers' machine"):
        ask(NodeRegistry(with_cluster(gpus=1, backend="ipc"), RunOrigin()), 1)


class Joined(Driver):
    """A run in which node 0 has an engine, and other nodes join."""

    async def join(self) -> int:
        """Let a node with one engine join. Returns its number."""
        run = await self.hub.handle(p.RunRequest(p.dialect()))
        reply = await self.hub.handle(p.JoinRequest(run.digest, 1))
        assert reply.node is not None
        return reply.node

    async def serve(self, node: int) -> None:
        """Report that the engine of a node has version 0."""
        status = p.EngineStatus(index=node, version=0, idle_s=0.0, lifetime_s=1.0, canary_error=0.0)
        await self.hub.handle(p.EngineReport(node, next(self.numbers), [status], []))


async def test_a_node_joins_works_dies_and_another_comes_in_its_place() -> None:
    driver = Joined(make_config())
    await driver.begin(0)
    assert await driver.join() == 1
    await driver.serve(1)
    leases = await driver.lease(1, 2)
    driver.hub.peer_lost("node-1")
    driver.hub.samples.check()
    assert await driver.join() == 1
    await driver.serve(1)
    again = await driver.lease(1, 2)
    assert [lease.task for lease in again] == [lease.task for lease in leases]
    await driver.bring(1, *again)
    driver.hub.samples.check()
    first, lost, second = driver.observer.notes
    assert first == second == "node 1 joins with 1 engine"
    assert lost.startswith(
        "node 1 is gone, and 1 of 2 engines with it: the other 1 do its work. It joins again by itself"
    )


async def test_a_node_that_is_drained_gets_no_more_work_and_goes_without_alarm() -> None:
    driver = Joined(make_config())
    await driver.begin(0)
    await driver.serve(await driver.join())
    first, second = await driver.lease(1, 2)
    assert len(await driver.lease(0, 8)) == 2
    got: list[int] = []

    async def ask() -> None:
        got.append(len(await driver.lease(1, 8)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        await driver.hub.handle(p.Leave(1))
        tasks.start_soon(ask)
        await driver.bring(1, first)
        back = Failure(second.task, Outcome.CANCELLED, "handed back", 1)
        await driver.hub.handle(p.DeliverRequest(1, [p.EndedLease(second.lease_id, back)], 8))
    assert got == [0, 0]
    (again,) = await driver.lease(0, 8)
    assert again.task == second.task, "it was no failure"
    driver.hub.peer_lost("node-1")
    driver.hub.samples.check()
    assert driver.observer.notes[1:] == [
        "node 1 leaves: it takes no more samples, and finishes those that it has or hands them back",
        "node 1 has left, and 1 of 2 engines with it: the other 1 do its work",
    ]


async def test_a_task_that_has_failed_elsewhere_does_not_wait_for_a_node_that_leaves() -> None:
    driver = Joined(make_config(retries=2))
    await driver.begin(0)
    await driver.serve(await driver.join())
    held = await all_leases(driver, 0)
    got: list[Lease] = []

    async def ask() -> None:
        got.extend(await driver.lease(0, 64))

    await driver.fail(0, *held)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert got == []
        await driver.hub.handle(p.Leave(1))
    assert {lease.task.task_id for lease in got} == {lease.task.task_id for lease in held}


async def test_a_person_may_have_a_node_leave_that_has_joined_and_no_other() -> None:
    driver = Joined(make_config())
    await driver.begin(0)
    for node in (0, 1):
        with pytest.raises(ConfigError, match=rf"no node {node} has joined this run \(those that have: none\)"):
            await driver.hub.handle(p.DrainRequest(node))
    await driver.serve(await driver.join())
    told: list[bool] = []

    async def listen() -> None:
        told.extend([(await driver.hub.handle(p.CancelRequest(1))).leave for _ in range(2)])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        await driver.hub.handle(p.DrainRequest(1))
    assert told == [True, False]


async def test_an_error_of_one_node_of_several_ends_that_node_alone() -> None:
    driver = Joined(make_config())
    await driver.begin(0)
    await driver.join()
    await driver.hub.handle(p.Leave(1, "ConfigError", "there is no model here"))
    driver.hub.peer_lost("node-1")
    assert driver.observer.notes[1:] == ["node 1 cannot go on, and the others do its work: there is no model here"]
    assert await driver.lease(0, 1), "the run goes on"


@pytest.mark.parametrize("begun", [False, True])
async def test_an_error_ends_the_run_that_has_no_other_engines_or_whose_weights_are_wrong(begun: bool) -> None:
    run = Run(make_config())
    if begun:
        await run.begin(0)
    kind = "WeightsError" if begun else "ConfigError"
    await run.hub.handle(p.Leave(1, kind, "it is wrong"))
    with pytest.raises(WeightsError if begun else ConfigError, match="node 1: it is wrong"):
        await run.hub.run()


async def test_a_run_whose_last_node_is_gone_waits_for_another_and_says_so() -> None:
    run = Run(with_deadlines(make_config(), step=200, request=60))

    async def scenario() -> None:
        await run.begin(1)
        run.hub.peer_lost("node-1")

    begun = anyio.current_time()
    error = await run.watched(scenario, run.ask)
    assert isinstance(error, DeadlineError)
    assert anyio.current_time() - begun == 200
    assert "no node has an engine: `flash join` brings one" in str(error)


async def test_whoever_joins_at_the_end_is_told_that_there_is_nothing_to_do() -> None:
    driver = Joined(make_config())
    await driver.begin(0)
    run = await driver.hub.handle(p.RunRequest(p.dialect()))
    driver.hub.interrupt()
    assert (await driver.hub.handle(p.RunRequest(p.dialect()))).ending
    assert (await driver.hub.handle(p.JoinRequest(run.digest, 1))).node is None


async def test_a_hub_that_is_about_to_end_takes_nobody_so_that_they_wait_for_the_next() -> None:
    driver = Joined(make_config())
    await driver.begin(0)
    run = await driver.hub.handle(p.RunRequest(p.dialect()))
    with anyio.move_on_after(1):
        await driver.hub.handle(p.Fatal("ContractError", "trainer rank 0: the books are wrong"))
    requests: list[Any] = [p.RunRequest(p.dialect()), p.JoinRequest(run.digest, 1)]
    for request in requests:
        with pytest.raises(PeerLostError, match="about to end"):
            await driver.hub.handle(request)


async def tell(run: Run, node: int, **changes: object) -> None:
    """Report the status of a node with one engine."""
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
    config = with_deadlines(make_config(), step=500, request=60)
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


@pytest.mark.parametrize("answered", [4.693, 34.529, 1e6 + 0.1])
def test_a_node_is_silent_at_the_moment_until_which_the_watch_sleeps(answered: float) -> None:
    heartbeats = Heartbeats(12.0)
    heartbeats.answered(3, answered)
    now = answered + 12.0  # In floats, 4.693 + 12.0 - 4.693 < 12.0.
    assert heartbeats.next_silence(now) == 0.0
    assert heartbeats.silent(now) == [3]
