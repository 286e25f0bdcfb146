"""A peer that has proven the token can do nothing to the hub but what its kind does in a run.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from flash.config.waits import SILENT_S
from flash.errors import ContractError, ProtocolError
from flash.hub import protocol as p
from flash.hub.gate import Gate
from flash.hub.hub import Hub
from flash.hub.recovery import HubState, RecoveredState
from flash.observe.observer import MemoryObserver
from flash.samples.journal import MemoryJournal, Replay
from flash.sampling import Kept, Routes
from flash.transport.server import Peer
from flash.types import Activity, Canary, Failure, Lease, Outcome, Published, Span, Turn, VersionRun
from tests.hub.test_hub import Driver, make_config
from tests.metrics_page import unlisted
from tests.observe.clusters import status_of
from tests.samples.cases import trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


def peer(name: str, number: int = 1) -> Peer:
    """Return connection `number`, of a peer with this name."""
    return Peer(number, name, "127.0.0.1:1")


class GuardedHub(Driver):
    """The hub behind its gate, with two nodes and a trainer rank."""

    def __init__(self, **rollout: Any) -> None:
        config = make_config(**rollout)
        super().__init__(config)
        self.gate = Gate(self.hub, config)
        self.nodes = [peer("node-0", 1), peer("guest-77", 2)]
        self.trainer = peer("trainer-0", 3)
        for one in (*self.nodes, self.trainer):
            self.gate.arrived(one)

    async def begin(self, *nodes: int) -> None:
        """Begin as the driver does, after the second node has joined."""
        assert (await self.join(self.nodes[1])).node == 1
        await super().begin(*nodes)

    async def join(self, guest: Peer, engines: int = 1) -> p.JoinReply:
        """Let a guest become a node with this number of engines."""
        run = await self.gate.handle(guest, p.RunRequest(p.dialect()))
        assert isinstance(run, p.RunReply)
        reply = await self.gate.handle(guest, p.JoinRequest(run.digest, engines))
        assert isinstance(reply, p.JoinReply)
        return reply

    async def lease(self, node: int, capacity: int) -> list[Lease]:
        """Ask for leases for a node, through the gate."""
        reply = await self.gate.handle(self.nodes[node], p.LeaseRequest(node, capacity))
        assert isinstance(reply, p.LeaseReply)
        return reply.leases

    async def bring(self, node: int, *leases: Lease) -> None:
        """Deliver a finished sample of version 0 for each lease of a node, through the gate."""
        ended = [p.EndedLease(lease.lease_id, trajectory(lease.task, 0)) for lease in leases]
        await self.gate.handle(self.nodes[node], p.DeliverRequest(node, ended, 0))

    async def refuse(self, who: Peer, request: Any, why: str) -> None:
        """Send a request that the gate must refuse for this reason, and check that the samples are unchanged."""
        before = self.hub.samples.totals()
        name = "node-1" if who.name == "guest-77" else who.name
        with pytest.raises(ProtocolError, match=f"{name} sent a {type(request).__name__}: .*{why}"):
            await self.gate.handle(who, request)
        assert self.hub.samples.totals() == before
        self.hub.samples.check()


async def test_a_node_that_has_outlived_a_hub_without_a_state_may_report_its_version() -> None:
    config = make_config()
    gate = Gate(Hub(config, MemoryObserver(), now=anyio.current_time, recovered=RecoveredState(hub_number=2)), config)
    guest = peer("guest-77", 2)
    gate.arrived(guest)
    run = await gate.handle(guest, p.RunRequest(p.dialect()))
    assert isinstance(run, p.RunReply)
    await gate.handle(guest, p.JoinRequest(run.digest, 1))
    status = p.EngineStatus(index=1, version=run.version, idle_s=0.0, lifetime_s=1.0, canary_error=0.0)
    assert await gate.handle(guest, p.EngineReport(1, 1, [status], [])) == p.Ack()


async def test_a_sample_of_versions_that_the_next_hub_has_not_reached_again_is_taken() -> None:
    config, journal = make_config(), MemoryJournal()
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, async_ratio=1.0))
    driver = Driver(config, journal=journal, recovered=RecoveredState(hub_number=1))
    run = await driver.hub.handle(p.RunRequest(p.dialect()))
    await driver.hub.handle(p.JoinRequest(run.digest, 1))
    await driver.begin(0, 1)
    leases = await driver.lease(1, 8)
    # The first hub forms the batch of step 0 from other groups. This lease outlives the hub.
    late = leases[-1]
    await driver.bring(1, *(lease for lease in leases if lease.task.group_id != late.task.group_id))
    await driver.hub.handle(p.BatchRequest(0, 0, []))
    replay = Replay(None, 0)
    for event in journal.events:
        replay.apply(event)
    state = replay.state(0)
    assert state is not None
    assert state.formed, "the trainer has trained step 0, and the engines have loaded version 1"
    again = Hub(
        *(config, MemoryObserver()),
        now=anyio.current_time,
        recovered=RecoveredState(HubState(0, state, journal=0), {0}, hub_number=2),
    )
    gate, guest = Gate(again, config), peer("guest-77", 2)
    gate.arrived(guest)
    run = await gate.handle(guest, p.RunRequest(p.dialect()))
    assert isinstance(run, p.RunReply)
    await gate.handle(guest, p.JoinRequest(run.digest, 1))
    assert await gate.handle(guest, p.ClaimRequest(1, [late])) == p.ClaimReply([late.lease_id])
    assert again.progress.newest == 0
    newer, made = (p.EndedLease(late.lease_id, trajectory(late.task, version)) for version in (2, 1))
    with pytest.raises(ProtocolError, match="the newest is 1"):
        await gate.handle(guest, p.DeliverRequest(1, [newer], 0))
    await gate.handle(guest, p.DeliverRequest(1, [made], 0))
    again.samples.check()


@pytest.mark.parametrize(
    "name",
    [
        "node-x",
        "node--1",
        "node-1",
        "guest-",
        "node-00",
        "node-１",
        "trainer-1",
        "messenger-7",
        "hub",
        "",
        "node-0\n",
        "node-" + "9" * 5000,
    ],
)
async def test_nobody_is_admitted_whom_the_run_does_not_await(name: str) -> None:
    guarded = GuardedHub()
    stranger = peer(name, 9)
    with pytest.raises(ProtocolError, match="no peer of this run is called"):
        guarded.gate.arrived(stranger)
    guarded.gate.left(stranger)


async def test_a_second_connection_of_a_living_peers_name_is_refused_and_takes_nothing_from_it() -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    (lease,) = await guarded.lease(0, 1)
    await anyio.sleep(SILENT_S - 2)
    assert guarded.gate.connection_to_replace("node-0") is None
    twin = peer("node-0", 9)
    # `SILENT_S` is 9 s.
    with pytest.raises(ProtocolError, match="node-0 is connected already, and was heard 7 s ago"):
        guarded.gate.arrived(twin)
    guarded.gate.left(twin)
    ended = [p.EndedLease(lease.lease_id, trajectory(lease.task, 0))]
    await guarded.gate.handle(guarded.nodes[0], p.DeliverRequest(0, ended, 0))
    assert guarded.hub.samples.ledger.generated_tokens == 3, "the sample has 3 tokens and is counted once"


async def test_who_leaves_with_the_hub_is_not_lost() -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    # Number of the newest incarnation of the trainer ranks.
    incarnation = next(number for number in range(9) if guarded.hub.incarnations.is_current(number))
    guarded.gate.close()
    guarded.gate.left(guarded.trainer)
    assert guarded.hub.incarnations.is_current(incarnation)


async def test_a_rank_whose_former_connection_is_silent_takes_its_place_and_begins_the_next_incarnation() -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    assert guarded.gate.connection_to_replace("trainer-0") is None
    await anyio.sleep(SILENT_S + 1)
    incarnation = next(number for number in range(9) if guarded.hub.incarnations.is_current(number))
    assert guarded.gate.connection_to_replace("trainer-0") == guarded.trainer.id
    guarded.gate.left(guarded.trainer)
    assert guarded.gate.connection_to_replace("trainer-0") is None
    assert not guarded.hub.incarnations.is_current(incarnation)
    guarded.gate.arrived(peer("trainer-0", 9))
    assert guarded.hub.incarnations.is_current(incarnation + 1)


@pytest.mark.parametrize(
    ("sender", "request_", "why"),
    [
        ("node", p.BatchRequest(0, 0, []), "a node may not"),
        ("node", p.Commit(0, {}), "a node may not"),
        ("trainer", p.LeaseRequest(0, 1), "a trainer may not"),
        ("node", p.LeaseRequest(1, 1), "it speaks for node 1"),
        ("trainer", p.BatchRequest(7, 0, []), "it speaks for trainer 7"),
        ("trainer", p.BatchRequest(-1, 0, []), "it speaks for trainer -1"),
        ("trainer", p.Goodbye(0, [Activity("a", "b", 0.0, float("nan"))]), "an activity from 0.0 to nan"),
        ("trainer", p.PublishRequest(Published(3, "tcp", b"", Canary([1, 2], [-1.0]))), "the ranks hold 0"),
        ("node", p.EngineReport(0, 1, [p.EngineStatus(0, 9, 0.0, 0.0, 0.0)], []), "the newest is 0"),
        ("node", p.EngineReport(0, 1, [p.EngineStatus(0, 0, float("inf"), 0.0, 0.0)], []), "impossible numbers"),
        ("node", p.EngineReport(0, 1, [p.EngineStatus(0, 0, 0.0, 0.0, 0.0, 1, 2)], []), "2 of 1 drafted tokens"),
        ("node", p.EngineReport(0, 1, [p.EngineStatus(0, 0, 0.0, 0.0, 0.0)] * 2, []), "an engine twice"),
        ("node", p.EngineReport(0, 1, [], [], restarts=-1), "-1 restarts"),
        ("trainer", p.IncarnationRequest(0, 1, 300 * "x"), "a host's name of 300 characters"),
        ("trainer", p.StatusReport(0, status_of(0, 0.0)), "a trainer may not"),
        ("node", p.StatusReport(1, status_of(1, 0.0)), "it speaks for node 1"),
        ("node", p.StatusReport(0, status_of(0, 0.0, figures={"load_s": float("nan")})), "a number that is not finite"),
        (
            "node",
            p.StatusReport(0, status_of(0, 0.0, figures={"power": 1.0})),
            "a figure of an engine with an unknown name",
        ),
        ("node", p.StatusReport(0, status_of(0, 0.0, why=100_000 * "x")), "a text of 100000 characters"),
        ("node", p.StatusReport(0, status_of(0, 0.0, engines=2000)), "2000 engines"),
    ],
)
async def test_a_peer_speaks_for_itself_and_says_what_its_kind_may_say(sender: str, request_: Any, why: str) -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    await guarded.refuse(guarded.trainer if sender == "trainer" else guarded.nodes[0], request_, why)


async def test_a_node_hands_over_only_leases_that_it_holds_and_each_once() -> None:
    guarded = GuardedHub()
    await guarded.begin(0, 1)
    (mine,), (other,) = await guarded.lease(0, 1), await guarded.lease(1, 1)
    theirs = p.EndedLease(other.lease_id, trajectory(other.task, 0))
    await guarded.refuse(guarded.nodes[0], p.DeliverRequest(0, [theirs], 0), "it does not hold lease")
    await guarded.refuse(
        guarded.nodes[0], p.DeliverRequest(0, [p.EndedLease(10**9, theirs.result)], 0), "it does not hold"
    )
    own = p.EndedLease(mine.lease_id, trajectory(mine.task, 0))
    await guarded.refuse(guarded.nodes[0], p.DeliverRequest(0, [own, own], 0), "it does not hold lease")
    swapped = p.EndedLease(mine.lease_id, trajectory(other.task, 0))
    await guarded.refuse(guarded.nodes[0], p.DeliverRequest(0, [swapped], 0), "it was for another task")
    await guarded.gate.handle(guarded.nodes[0], p.DeliverRequest(0, [own], 0))
    await guarded.refuse(guarded.nodes[0], p.DeliverRequest(0, [own], 0), "it does not hold lease")
    await guarded.gate.handle(guarded.nodes[1], p.DeliverRequest(1, [theirs], 0))
    assert guarded.hub.samples.ledger.generated_tokens == 6


async def test_what_the_hub_has_withdrawn_may_still_come_home() -> None:
    """A cancelled lease ends with a failure, and a lease that was taken from a silent node may end with any result."""
    guarded = GuardedHub(extra_per_group=1)
    await guarded.begin(0)
    leases = await guarded.lease(0, 3)
    await guarded.bring(0, *leases[:2])
    (cancelled,) = await guarded.cancels(0)
    assert cancelled == leases[2].lease_id
    await guarded.bring(0, leases[2])
    guarded.hub.samples.check()


BRANCHED: dict[str, Any] = {
    "branches": (0, 2),
    "action_spans": [Span(1, 2), Span(3, 5)],
    "turns": [Turn("p", "c", 1.0, 0.0, 0.0, 0.0, branch=1), Turn("p", "c", 0.0, 0.0, 0.0, 0.0)],
}
"""Fields that make the trajectory of a test, which has five tokens, a valid one with two branches.

Its first turn is in the second branch, which has two of the three sampled tokens.
"""


async def test_what_was_drawn_from_some_tokens_comes_with_them() -> None:
    guarded = GuardedHub(top_k=4)
    await guarded.begin(0)
    (lease,) = await guarded.lease(0, 1)
    made = trajectory(lease.task, 0)
    with pytest.raises(ProtocolError, match="no kept sets, and drawn with top_k = 4"):
        await guarded.gate.handle(guarded.nodes[0], p.DeliverRequest(0, [p.EndedLease(lease.lease_id, made)], 0))
    # Each kept set has only the drawn token, which is not stored.
    whole = msgspec.structs.replace(made, kept=Kept.of([], [0] * made.action_count))
    await guarded.gate.handle(guarded.nodes[0], p.DeliverRequest(0, [p.EndedLease(lease.lease_id, whole)], 0))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"token_ids": b"123"}, "in the middle of a number"),
        ({"logprobs": b"12345"}, "in the middle of a number"),
        ({"action_spans": [Span(2, 9)]}, r"tokens \[2, 9\) of 5"),
        ({"action_spans": [Span(-3, 0)]}, r"tokens \[-3, 0\) of 5"),
        ({"action_spans": [Span(2, 5), Span(2, 5)]}, r"tokens \[2, 5\) of 5, after 5"),
        ({"versions": [VersionRun(0, 2**62)]}, f"log-probs and {2**62} versions"),
        ({"versions": []}, "log-probs and 0 versions"),
        ({"versions": [VersionRun(0, 5), VersionRun(0, -2)]}, "the newest is 0"),
        ({"versions": [VersionRun(1, 3)]}, "the newest is 0"),
        ({"turns": []}, "0 turns, 1 responses"),
        ({"reward": float("nan")}, "not finite"),
        ({"turns": [Turn("p", "c", 1.0, 0.0, 0.0, 0.0, {"x": float("inf")})]}, "not finite"),
        ({"token_ids": b"\xff" * 20}, "a token below 0"),
        ({"lost_tokens": -1}, "-1 lost tokens"),
        ({"lost_tokens": 2**63 - 1}, "lost tokens"),
        ({"kept": Kept.of([5], [1])}, "3 sampled tokens, but kept sets for 1, with 1 tokens"),
        ({"kept": Kept(b"1", b"")}, "kept sets whose bytes are not whole int32"),
        ({"routes": Routes(b"123", 2, 2)}, "5 tokens, but 3 bytes of experts for 2 layers"),
        ({"teacher": b"12345678"}, "3 sampled tokens, and 8 bytes of teacher log-probs"),
        ({"turns": [Turn("p", "c", 1.0, 0.0, 0.0, 0.0, branch=1)]}, "a response in no branch"),
        ({"branches": ()}, r"branches that begin at \(\) of 5"),
        ({"branches": (1,)}, r"branches that begin at \(1,\) of 5"),
        ({"branches": (0, 5)}, r"branches that begin at \(0, 5\) of 5"),
        ({"branches": (0, 3, 2)}, "branches that begin at"),
        ({"branches": (0, 1)}, r"branch 0 at tokens \[0, 1\) with the responses"),
        (BRANCHED | {"branches": (0, 3)}, r"branch 1 at tokens \[3, 5\) with the responses"),
        (BRANCHED | {"branches": (0, 2), "action_spans": [Span(0, 2), Span(4, 5)]}, "branch 0 at tokens"),
        (BRANCHED | {"turns": [Turn("p", "c", 1.0, 0.0, 0.0, 0.0, branch=at) for at in (0, 2)]}, "branch 1 at tokens"),
        ({"outcome": Outcome.STALE}, "a Trajectory whose outcome is stale"),
        ({"action_spans": [], "logprobs": b"", "versions": [], "turns": []}, "0 sampled tokens"),
    ],
)
async def test_a_trajectory_that_does_not_go_together_is_refused(changed: dict[str, Any], why: str) -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    (lease,) = await guarded.lease(0, 1)
    made = msgspec.structs.replace(trajectory(lease.task, 0), **changed)
    await guarded.refuse(guarded.nodes[0], p.DeliverRequest(0, [p.EndedLease(lease.lease_id, made)], 0), why)


async def test_a_trajectory_with_branches_is_taken_and_its_row_tells_of_them() -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guarded.gate.handle, guarded.trainer, p.BatchRequest(0, 0, []))
        for number, lease in enumerate(await guarded.lease(0, 4)):
            made = msgspec.structs.replace(trajectory(lease.task, 0), **({} if number else BRANCHED))
            await guarded.gate.handle(guarded.nodes[0], p.DeliverRequest(0, [p.EndedLease(lease.lease_id, made)], 0))
    await guarded.gate.handle(guarded.trainer, p.Commit(0, {}))
    (row,) = guarded.observer.steps
    assert row["samples"] == 4, "an episode counts once"
    assert guarded.hub.samples.ledger.trained_tokens == 12
    # One of the four episodes has a second branch, which has 2 of all 12 sampled tokens.
    assert (row["branches"], row["branch_token_share"]) == (5 / 4, 2 / 12)
    assert unlisted(row) == []


async def test_a_failure_that_cannot_be_is_refused() -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    (lease,) = await guarded.lease(0, 1)
    for outcome, tokens, why in (
        (Outcome.OK, 0, "a Failure whose outcome is ok"),
        (Outcome.STALE, -5, "-5 tokens"),
        (Outcome.STALE, 2**63, "tokens"),
    ):
        ended = p.EndedLease(lease.lease_id, Failure(lease.task, outcome, "x", tokens))
        await guarded.refuse(guarded.nodes[0], p.DeliverRequest(0, [ended], 0), why)


async def test_a_snapshot_in_the_middle_of_a_step_is_refused_and_ends_nothing() -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guarded.gate.handle, guarded.trainer, p.BatchRequest(0, 0, []))
        for lease in await guarded.lease(0, 4):
            await guarded.bring(0, lease)
    with pytest.raises(ContractError, match="a snapshot belongs between two steps"):
        await guarded.gate.handle(guarded.trainer, p.SnapshotRequest())


async def test_environments_that_measure_huge_numbers_end_nothing() -> None:
    guarded = GuardedHub()
    await guarded.begin(0)
    # The sum over the four samples would be larger than any float.
    turns = [Turn("p", "c", 1.0, 0.0, 0.0, 0.0, {"huge": 1.7e308})]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guarded.gate.handle, guarded.trainer, p.BatchRequest(0, 0, []))
        for lease in await guarded.lease(0, 4):
            made = msgspec.structs.replace(trajectory(lease.task, 0), turns=turns)
            await guarded.gate.handle(guarded.nodes[0], p.DeliverRequest(0, [p.EndedLease(lease.lease_id, made)], 0))
    await guarded.gate.handle(guarded.trainer, p.Commit(0, {}))
    (row,) = guarded.observer.steps
    assert row["env/huge"] == pytest.approx(1.7e308)
