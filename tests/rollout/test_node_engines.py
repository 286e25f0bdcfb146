"""A node with several engines, on the virtual clock: slots stay full, engines die and swap, losers are cancelled."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.config.tree import Config
from flash.config.waits import LONG_POLL_S
from flash.environment.threaded import wrap
from flash.errors import DeadlineError, EngineError, FlashError
from flash.hub import protocol as p
from flash.rollout.fake_engine import FakeEngine
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.rollout.supervisor import same_engine
from flash.simulate.clock import run_virtual
from flash.transport.frames import ReplyT, Request, check_reply
from flash.types import Canary, Failure, Lease, Outcome, Published, Task, Trajectory
from tests.rollout.test_node import CharTokenizer, Echo, World, ages, make_config, run

SLOTS = 3
"""Largest number of requests of an engine at once."""


def engine(slots: int = SLOTS, text: str = "yes", seconds: float = 0.5, swap: float = 0.1) -> FakeEngine:
    """Return a fake engine that answers every prompt with `text`. `seconds` is the time of a token, `swap` of a
    load."""
    return FakeEngine(lambda prompt: [ord(c) for c in text], seconds, swap, slots)


def config(**changes: Any) -> Config:
    """Return the configuration of engines with few slots, and of as many episodes as keep them full."""
    return make_config(
        **{
            "rollout": {"max_concurrent": "auto", **changes.pop("rollout", {})},
            "engine": {"max_sequences": SLOTS},
            **changes,
        }
    )


class FakeHub:
    """A hub that gives leases while it has some, and announces one version after another. It keeps all results."""

    def __init__(self, leases: int, min_version: Callable[[int], int] = lambda number: 0) -> None:
        self.ready = [Lease(n, Task(n, n // 2, n % 2, n // 2), min_version(n)) for n in range(leases)]
        """Leases that no node has yet. Each group has two samples."""
        self.left = leases
        """Number of leases without a result. The hub has no more work when it is 0."""
        self.version = 0
        """Newest version that is announced."""
        self.lost = False
        """True if nobody holds the published version any more."""
        self.cancels: list[int] = []
        """Leases that were withdrawn, and that the node does not know of yet."""
        self.results: dict[int, Trajectory | Failure] = {}
        """Results by the number of the lease."""
        self.reports: list[p.EngineReport] = []
        self.changed = anyio.Event()
        """Event that is set, and replaced by a new one, at each change."""

    def change(self) -> None:
        """Wake the requests that wait for a change."""
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, but at most as long as a hub keeps a request open."""
        with anyio.move_on_after(LONG_POLL_S):
            while not condition():
                await self.changed.wait()

    def publish(self) -> None:
        """Announce the next version."""
        self.version += 1
        self.change()

    def cancel(self, *lease_ids: int) -> None:
        """Withdraw leases."""
        self.cancels += lease_ids
        self.change()

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Answer a request of the node, as `HubCaller` does."""
        return check_reply(request, await self.answer(request))

    async def answer(self, request: msgspec.Struct) -> msgspec.Struct:
        """Return the hub's reply to a request."""
        match request:
            case p.LeaseRequest():
                await self.until(lambda: bool(self.ready) or self.left == 0)
                granted, self.ready = self.ready[: request.capacity], self.ready[request.capacity :]
                return p.LeaseReply(granted, done=self.left == 0)
            case p.DeliverRequest():
                for ended in request.ended:
                    assert ended.lease_id not in self.results
                    self.results[ended.lease_id] = ended.result
                    self.left -= 1
                self.change()
            case p.VersionRequest():
                await self.until(lambda: self.version > request.after and not self.lost)
                new = self.version > request.after and not self.lost
                return p.VersionReply(Published(self.version, "tcp", b"", Canary([], [])) if new else None, done=False)
            case p.LoadFailed():
                return p.LoadFailedReply(gone=self.lost)
            case p.CancelRequest():
                await self.until(lambda: bool(self.cancels))
                cancels, self.cancels = self.cancels, []
                return p.CancelReply(cancels, done=False)
            case p.EngineReport():
                self.reports.append(request)
            case _:
                raise AssertionError(f"a node does not send {type(request).__name__}")
        return p.Ack()


class Steps(Echo):
    """An environment of `turns` turns, each of which takes `seconds`. The class counts the open environments."""

    alive = 0

    def __init__(self, turns: int, seconds: float) -> None:
        super().__init__()
        self._turns, self._step_s = turns, seconds
        type(self).alive += 1

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await anyio.sleep(self._step_s)
        self._turns -= 1
        return "go on", 1.0, self._turns == 0, False, {}

    async def close(self) -> None:
        type(self).alive -= 1


def node_of(hub: FakeHub, engines: list[FakeEngine], env: Callable[[], Any] = Echo, **changes: Any) -> RolloutNode:
    """Return a node at `hub` with one place for each of `engines`. `changes` replace keys of the configuration."""
    now = anyio.current_time
    makers = [same_engine(fake) for fake in engines]
    link, played = HubLink(0, 0, hub), NodeEnvironment(lambda kind: wrap(env()))
    return RolloutNode(config(**changes), link, makers, CharTokenizer(), played, now=now)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0.0, 2.0, 4.3]),
    st.sampled_from(["recompute", "keep"]),
)
def test_no_engine_slot_is_empty_while_the_hub_has_a_lease(
    leases: int, engines: int, turns: int, env_s: float, swap: str
) -> None:
    async def scenario() -> None:
        hub = FakeHub(leases)
        fakes = [engine(text="x" * (3 + index), seconds=0.5) for index in range(engines)]
        node = node_of(hub, fakes, lambda: Steps(turns, env_s), rollout={"swap": swap})

        async def watch() -> None:
            """Check every 0.1 s that all slots are full while the hub has a lease."""
            await anyio.sleep(0.15)  # everything happens at multiples of 0.1 s, the end of the first swap included
            for _ in range(200):
                assert not hub.ready or all(fake.running == SLOTS for fake in fakes)
                assert all(fake.waiting == 0 for fake in fakes)
                await anyio.sleep(0.1)

        async def publish() -> None:
            """Announce a version while episodes run."""
            await anyio.sleep(3.8)
            hub.publish()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            group.start_soon(publish)
            await node.run()
        assert sorted(hub.results) == list(range(leases))
        assert all(isinstance(result, Trajectory) for result in hub.results.values())

    run_virtual(scenario)


@pytest.mark.parametrize("mode", ["recompute", "keep", "abort", "drain"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_law_3_holds_in_every_mode_of_swapping(mode: str, alpha: float) -> None:
    world = World(
        config(
            rollout={"swap": mode},
            train={"async_ratio": alpha, "max_token_age": math.ceil(alpha)},
            run={"steps": 6},
        ),
        env=lambda: Echo(lambda seed: seed % 7 / 2),
        engines=[partial(engine, text="yes" * (1 + 3 * index)) for index in range(2)],
    )
    end = run(world)
    assert end.ledger["issued"] == end.ledger["trained"] + end.ledger["given_up"]
    assert max(ages(world)) <= math.ceil(alpha)


@pytest.mark.parametrize("mode", ["recompute", "keep", "abort", "drain"])
def test_a_run_goes_on_without_the_engines_that_die_and_loses_nothing(mode: str) -> None:
    never = {"max_restarts": 0}
    world = World(config(rollout={"swap": mode}, run={"steps": 6}, cluster=never), engines=[engine] * 3)

    async def killed() -> Any:
        """Run the world, and kill two of its three engines."""
        ends: list[Any] = []

        async def go() -> None:
            ends.append(await world.run())

        async with anyio.create_task_group() as group:
            group.start_soon(go)
            await anyio.sleep(3.2)
            world.engines[0].kill()
            await anyio.sleep(5)
            world.engines[2].kill()
        return ends[0]

    end = run_virtual(killed)
    assert end.ledger["trained"] == 48
    assert end.ledger["issued"] == 48
    assert "retried_engine_error" not in end.ledger


def test_a_dead_engines_tokens_are_kept_and_its_node_stops_listing_it() -> None:
    async def scenario() -> None:
        hub = FakeHub(2 * SLOTS)
        fakes = [engine(text="abcdefghij"), engine(text="abcdefghij")]
        async with anyio.create_task_group() as group:
            group.start_soon(node_of(hub, fakes, cluster={"max_restarts": 0}).run)
            await anyio.sleep(2.7)
            fakes[0].kill()
        # The reports: after each of two loads, after the death, and at the end.
        assert [len(report.engines) for report in hub.reports] == [2, 2, 1, 1]
        # The engine died at 2.7 s. With tokens every 0.5 s from 0.1 s on, its requests had 5 tokens.
        assert {len(request.prompt) for request in fakes[1].requests if request.generated} == {len("say 0") + 5}
        for result in hub.results.values():
            assert isinstance(result, Trajectory)
            said = result.action_mask()
            assert "".join(map(chr, result.tokens()[said])) == "abcdefghij"
            assert result.action_count == result.action_versions().size == 10

    run_virtual(scenario)


def test_a_lease_is_served_only_by_engines_that_have_its_version() -> None:
    async def scenario() -> None:
        hub = FakeHub(12, lambda number: int(number >= 6))
        async with anyio.create_task_group() as group:
            group.start_soon(node_of(hub, [engine(), engine()], lambda: Steps(2, 0.2)).run)
            await anyio.sleep(1.1)
            hub.publish()
        for lease_id, result in hub.results.items():
            assert isinstance(result, Trajectory)
            assert result.oldest_version >= int(lease_id >= 6)

    run_virtual(scenario)


def test_the_samples_of_a_prompt_share_one_engine_when_prompts_are_not_replicated() -> None:
    async def scenario() -> None:
        hub = FakeHub(12)
        fakes = [engine(), engine()]
        await node_of(hub, fakes, rollout={"barriers": ["group"]}).run()
        prompts = [{tuple(request.prompt) for request in fake.requests} for fake in fakes]
        assert not prompts[0] & prompts[1]
        assert all(prompts)

    run_virtual(scenario)


# In turns of 1.5 s generation and 1 s environment: while it generates, between two tokens, steps, generates again.
@pytest.mark.parametrize(("at", "tokens"), [(0.9, 1), (1.2, 2), (2.0, 3), (3.7, 5)])
def test_a_loser_named_by_the_hub_ends_at_once_with_its_tokens_and_its_slot_is_refilled(at: float, tokens: int) -> None:
    async def scenario() -> None:
        Steps.alive = 0
        hub = FakeHub(SLOTS + 1)
        fakes = [engine(swap=0.1)]
        async with anyio.create_task_group() as group:
            group.start_soon(node_of(hub, fakes, lambda: Steps(3, 1.0), rollout={"max_concurrent": SLOTS}).run)
            await anyio.sleep(0.1 + at)
            hub.cancel(1, 99)
            await anyio.sleep(0.01)
            loser = hub.results[1]
            assert isinstance(loser, Failure)
            assert (loser.outcome, loser.tokens) == (Outcome.CANCELLED, tokens)
            assert Steps.alive == SLOTS, "its environment is closed, and the next one's is open"
        assert sorted(hub.results) == [0, 1, 2, 3]
        assert Steps.alive == 0

    run_virtual(scenario)


@pytest.mark.parametrize("error", [EngineError("connection refused"), DeadlineError("engine 0 to load", 5, "it")])
def test_an_engine_that_loses_its_publisher_waits_for_the_next_one_with_its_requests(error: FlashError) -> None:
    async def scenario() -> None:
        hub, one = FakeHub(4 * SLOTS), engine()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node_of(hub, [one]).run)
            await anyio.sleep(1)
            one.load_error = error
            hub.publish()
            await anyio.lowlevel.checkpoint()  # the engine has the version to load, and then its publisher dies
            hub.lost = True
            await anyio.sleep(20)
            assert one.version == 0
            before = len(hub.results)
            assert before < 4 * SLOTS, "its weights are undefined, and it makes no token"
            one.load_error, hub.lost = None, False
            hub.change()
        assert one.version == 1
        assert all(isinstance(result, Trajectory) for result in hub.results.values())
        assert [note for report in hub.reports for note in report.notes] == []

    run_virtual(scenario)
