"""Hub, node, scheduler, proxy and episode together, on the virtual clock, around fakes.

Unless a test says otherwise, a run has 4 steps of 8 samples in groups of 2, an engine that answers `yes` with a token
every 0.1 s, an environment without delay that pays 1 for `yes`, and a trainer that takes a second for a step. The
*ledger* counts the tasks of training: issued, trained, tried again (retried), given up, in flight.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from flash.config.tree import Config
from flash.environment.interface import HELD_OUT
from flash.environment.shared import shared
from flash.environment.threaded import wrap
from flash.errors import BreakerError, DeadlineError, EngineDeadError, PeerLostError, SandboxStartError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.hub.hub import Hub, InProcessCaller
from flash.hub.recovery import HubState, Persistence, RecoveredState
from flash.observe.observer import MemoryObserver
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.fake_engine import FakeEngine, FakeLine
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.proxy import MAX_FAILED_IN_A_ROW
from flash.rollout.scheduler import HubLink
from flash.rollout.supervisor import same_engine
from flash.rollout.teacher import ServedTeacher
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.rules import ONE_KIND
from flash.simulate.clock import run_virtual
from flash.transport.frames import ReplyT, Request
from flash.types import Canary, Outcome, Published, Shard, Tool
from tests.samples.cases import KeptStates


class CharTokenizer(Tokenizer):
    """A tokenizer with one token for each character, without an end of a turn."""

    def render(self, observation: Any, tools: Sequence[Tool] = ()) -> list[int]:
        """Return a token for each character."""
        return [ord(c) for c in observation]

    def follow(self, observation: Any, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return a token for each character."""
        return self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the characters of the tokens."""
        return "".join(chr(t) for t in token_ids)


class Echo:
    """An environment that pays 1 for the answer `yes`. `step_seconds` returns the seconds of a step, given the seed."""

    def __init__(self, step_seconds: Callable[[int], float] = lambda seed: 0.0) -> None:
        self._seconds = step_seconds

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Return a prompt with the seed."""
        self._seed = seed
        return f"say {seed}", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the seconds of the seed, pay for the answer, and end the episode."""
        await anyio.sleep(self._seconds(self._seed))
        return "", float(action == "yes"), True, False, {}

    async def close(self) -> None:
        """Do nothing."""
        return None


def make_config(**changes: Any) -> Config:
    """Return the configuration of a small run without GPUs. `changes` replace keys of the sections that they name."""
    base: dict[str, Any] = {
        "run": {"name": "test", "steps": 4},
        "model": {"path": "fake", "max_length": 64},
        "env": {"path": "fake:Fake"},
        "rollout": {"group_size": 2, "max_concurrent": 64, "max_new_tokens": 16, "retries": 1, "breaker": 8},
        # `FakeTrainer` asks once for each step.
        "train": {"batch_size": 8, "async_ratio": 1.0, "stream": False},
        "eval": {"every": 2, "problems": 3, "samples": 2},
        "cluster": {"gpus_per_node": 0},
        "deadlines": {"env_step": 5.0, "generate": 50.0, "step": 100.0},
    }
    for section, values in changes.items():
        base[section] = base.get(section, {}) | values
    return msgspec.convert(base, Config)


class FakeTrainer:
    """A trainer rank without a model: it publishes versions, trains for a set time, and commits."""

    def __init__(self, hub: Hub, seconds: float, snapshots: Mapping[int, bytes], version: int = 0) -> None:
        self._hub = InProcessCaller(hub)
        self._seconds = seconds
        self.version = version
        """Version that was published last."""
        self.shards: list[Shard] = []
        """Batches that were trained, or are being trained."""
        self.snapshots = snapshots
        """States that the hub has kept, by version."""
        self.stepped = anyio.Event()
        """Event that is set after each step. `reached` replaces it."""
        self.finished = False
        """True if the hub has said that the run has all its steps."""

    async def run(self) -> None:
        """Publish a version, then train a batch, commit it and publish the next version, until the hub has no more
        batches."""
        await self._publish()
        while True:
            reply = await self._hub.call(p.BatchRequest(0, self.version, []), timeout=1000)
            self.finished = reply.finished
            if reply.shard is None:
                break
            self.shards.append(reply.shard)
            await anyio.sleep(self._seconds)
            await self._hub.call(p.Commit(self.version, {}), timeout=60)
            self.version += 1
            await self._publish()
            await self._hub.call(p.SnapshotRequest(), timeout=60)
            self.stepped.set()
        await self._hub.call(p.Goodbye(0, []), timeout=1000)

    async def reached(self, version: int) -> None:
        """Wait until this version's snapshot is taken."""
        while version not in self.snapshots:
            self.stepped = anyio.Event()
            await self.stepped.wait()

    async def _publish(self) -> None:
        """Publish the present version, which has no content."""
        published = Published(self.version, "tcp", b"", Canary([1, 2], [-1.0]))
        await self._hub.call(p.PublishRequest(published), timeout=60)


class World:
    """A run on the virtual clock: a hub with a trainer and one node.

    Args:
        config: the configuration of the run.
        env: makes an environment.
        engines: makers of the engines, one for each place. None: one place with an engine that says `answer`.
        train_seconds: seconds of a step of the trainer.
        answer: response of the usual engine.
        tokenizer: tokenizer of the node.
        state: state from which the hub goes on; None: a new run.
        evaluated: steps whose evaluations are complete already.
        kind_of: returns the kind of the problem of a seed.
        prepare: prepares the environment of the node.
        journal: journal of the hub.
        incarnation: number of the hub in the run.
    """

    status_s: float | None = None
    """Seconds between two status reports of the node; None: it sends none."""
    teacher: ServedTeacher | None = None
    """Teacher that the node asks; None: there is none."""

    def __init__(
        self,
        config: Config,
        *,
        env: Callable[[], Any] = Echo,
        engines: Sequence[Callable[[], FakeEngine]] | None = None,
        train_seconds: float = 1.0,
        answer: str = "yes",
        tokenizer: Tokenizer | None = None,
        state: bytes | None = None,
        evaluated: Collection[int] = (),
        kind_of: Callable[[int], str] = lambda seed: "",
        prepare: Callable[[], Awaitable[None]] | None = None,
        journal: Journal = NO_JOURNAL,
        incarnation: int = 0,
    ) -> None:
        self.config = config
        self._journal, self._incarnation = journal, incarnation
        self._prepare = prepare
        self._tokenizer = tokenizer or CharTokenizer()
        self._kind_of = kind_of
        self.observer = MemoryObserver()
        usual = partial(FakeEngine, lambda prompt: [ord(c) for c in answer], 0.1)
        self.lines = [FakeLine(make) for make in engines or [usual]]
        self._env, self._train_seconds = env, train_seconds
        self._state = HubState.restore(state, config) if state is not None else None
        self._evaluated = evaluated

    @property
    def engines(self) -> list[FakeEngine]:
        """Newest engine of each place."""
        return [line.newest for line in self.lines]

    def build(self) -> Hub:
        """Make the hub, its trainer and its node, and return the hub."""
        now = anyio.current_time
        kept = KeptStates()
        self.hub = Hub(
            self.config,
            self.observer,
            now=now,
            problems=ONE_KIND._replace(kind_of=self._kind_of),
            recovered=RecoveredState(self._state, self._evaluated, hub_number=self._incarnation),
            persistence=Persistence(kept, self._journal),
        )
        version = self._state.version if self._state is not None else 0
        self.trainer = FakeTrainer(self.hub, self._train_seconds, kept.by_version, version)
        self.node = RolloutNode(
            self.config,
            HubLink(0, 0, InProcessCaller(self.hub)),
            self.lines,
            self._tokenizer,
            NodeEnvironment(lambda kind: wrap(self._env()), prepare=self._prepare),
            now=now,
            status_s=self.status_s,
            teacher=self.teacher,
        )
        return self.hub

    async def run(self) -> RunEnd:
        """Build the run, and run it until the hub ends. Returns the end."""
        self.build()
        self.begun = anyio.current_time()
        ends: list[RunEnd] = []
        async with anyio.create_task_group() as group:
            group.start_soon(self.node.run)
            group.start_soon(self.trainer.run)
            ends.append(await self.hub.run())
        self.took = anyio.current_time() - self.begun
        return ends[0]


def run(world: World) -> RunEnd:
    """Run a world, the hub with its trainer and nodes, on the virtual clock until its end."""
    return run_virtual(world.run)


def ages(world: World) -> list[int]:
    """Return the ages, in steps, of the trained tokens whose versions are not too old for their shards."""
    return [
        shard.step - version
        for shard in world.trainer.shards
        for sample in shard.samples
        for version in sample.trajectory.action_versions().tolist()
        if version >= shard.min_version
    ]


def test_law_8_a_run_on_the_virtual_clock_trains_all_its_steps_and_the_ledger_balances() -> None:
    world = World(make_config())
    end = run(world)
    assert (end.reason, end.version) == ("finished", 4)
    assert end.ledger["trained"] == 32
    assert end.ledger["in_flight"] == 0
    assert [row["step"] for row in world.observer.steps] == [0, 1, 2, 3]
    assert world.trainer.finished


def test_evaluations_happen_at_the_start_in_between_and_at_the_end() -> None:
    world = World(make_config())
    run(world)
    assert [row["step"] for row in world.observer.evaluations] == [0, 2, 4]
    for row in world.observer.evaluations:
        assert (row["mean_reward"], row["problems"], row["samples"], row["best_of_k"]) == (1.0, 3, 6, 1.0)


def test_the_first_evaluation_sees_only_the_untrained_policy() -> None:
    world = World(make_config())
    run(world)
    first = world.observer.evaluations[0]
    assert (first["version_min"], first["version_max"]) == (0, 0)


@pytest.mark.parametrize("windows", [1, 4, None])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_law_3_no_trained_token_is_older_than_the_limit(alpha: float, windows: int | None) -> None:
    limit = None if windows is None else windows * math.ceil(alpha)
    train = {"async_ratio": alpha, "max_token_age": limit}
    world = World(make_config(train=train, run={"steps": 6}), env=lambda: Echo(lambda s: s % 7 / 2))
    run(world)
    assert max(ages(world)) <= (4 * math.ceil(alpha) if limit is None else limit)


def test_a_ratio_of_zero_is_synchronous_training() -> None:
    world = World(make_config(train={"async_ratio": 0.0}))
    run(world)
    assert set(ages(world)) == {0}


@pytest.mark.slow
def test_generation_and_training_overlap_only_with_a_positive_ratio() -> None:
    slow = {"eval": {"every": 0}, "run": {"steps": 10}}
    sync = World(make_config(train={"async_ratio": 0.0}, **slow), train_seconds=0.3)
    overlapped = World(make_config(train={"async_ratio": 1.0}, **slow), train_seconds=0.3)
    run(sync)
    run(overlapped)
    # A step takes 0.3 s of training, and about as long for its answers. Overlapped, the two take nearly half the time.
    assert sync.took / overlapped.took > 1.5


def test_law_5_an_environment_error_is_typed_retried_and_never_a_reward() -> None:
    class Flaky(Echo):
        calls = 0

        async def step(self, action: str) -> Any:
            Flaky.calls += 1
            if Flaky.calls % 5 == 0:
                raise OSError("disk on fire")
            return await super().step(action)

    world = World(make_config(), env=Flaky)
    end = run(world)
    assert end.ledger["retried_env_error"] > 0
    assert {entry.reward for shard in world.trainer.shards for entry in shard.batch} == {1.0}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (("", float("nan"), True, False, {}), "reward"),
        (("", "1", True, False, {}), "reward"),
        (("", 1.0, True), "step"),
    ],
)
def test_an_environment_that_breaks_its_interface_stops_the_run_with_its_reason(result: Any, text: str) -> None:
    class Broken(Echo):
        async def step(self, action: str) -> Any:
            return result

    with pytest.raises(BaseExceptionGroup) as caught:
        run(World(make_config(eval={"problems": 1, "samples": 1}), env=Broken))
    assert caught.group_contains(BreakerError, match=re.escape(text))


def test_an_environment_that_hangs_is_given_up_after_its_deadline() -> None:
    class Hanging(Echo):
        async def step(self, action: str) -> Any:
            if self._seed == 1:
                await anyio.sleep_forever()
            return await super().step(action)

    world = World(make_config(), env=Hanging)
    end = run(world)
    assert end.ledger[f"given_up_{Outcome.ENV_TIMEOUT}"] == 2, "both samples of the problem"
    assert end.ledger["issued"] == end.ledger["trained"] + end.ledger["given_up"]


def test_when_all_environments_of_one_kind_stop_answering_the_others_carry_the_run_to_its_end() -> None:
    class HalfDead(Echo):
        async def step(self, action: str) -> Any:
            if self._seed % 2:
                await anyio.sleep_forever()
            return await super().step(action)

    config = make_config(rollout={"retries": 0, "breaker": 16}, eval={"every": 0, "problems": 1})
    world = World(config, env=HalfDead, kind_of=lambda seed: "odd" if seed % 2 else "even")
    end = run(world)
    assert (end.reason, end.version) == ("finished", 4)
    assert [note for note in world.observer.notes if "'odd' are in quarantine" in note]
    assert end.ledger["issued"] == end.ledger["trained"] + end.ledger["given_up"]
    assert end.ledger["trained"] == 32
    assert {s.trajectory.task.kind for shard in world.trainer.shards for s in shard.samples} == {"even"}


def test_when_all_environments_stop_answering_the_run_ends_with_the_cause() -> None:
    class Dead(Echo):
        async def step(self, action: str) -> Any:
            if self._seed < HELD_OUT:
                await anyio.sleep_forever()
            return await super().step(action)

    with pytest.raises(BaseExceptionGroup) as caught:
        run(World(make_config(), env=Dead))
    breaker = caught.value.subgroup(BreakerError)
    assert breaker is not None
    assert "env_timeout): environment step 1 (seed" in str(breaker.exceptions[0])
    assert "raise deadlines.env_step" in str(breaker.exceptions[0])


def test_a_prompt_without_room_for_an_answer_is_an_error_that_names_the_limit() -> None:
    class Long(Echo):
        async def reset(self, seed: int) -> Any:
            return "x" * 64, {}

    with pytest.raises(BaseExceptionGroup) as caught:
        run(World(make_config(), env=Long))
    assert caught.group_contains(BreakerError, match=r"model\.max_length is 64")


def test_an_answer_cut_at_the_limit_is_truncated() -> None:
    # `rollout.max_new_tokens` is 16.
    world = World(make_config(), answer="n" * 40)
    run(world)
    assert {s.trajectory.outcome for shard in world.trainer.shards for s in shard.samples} == {Outcome.TRUNCATED}
    assert {s.trajectory.action_count for shard in world.trainer.shards for s in shard.samples} == {16}


def test_a_swap_in_flight_stamps_later_tokens_with_the_new_version() -> None:
    config = make_config(train={"async_ratio": 2.0}, run={"steps": 8})
    world = World(config, answer="yes and more", train_seconds=0.1)
    run(world)
    mixed = [s.trajectory.versions for shard in world.trainer.shards for s in shard.samples]
    assert any(len(runs) > 1 for runs in mixed)
    assert all([r.version for r in runs] == sorted(r.version for r in runs) for runs in mixed)


@pytest.mark.parametrize("how", ["killed", "failing"])
def test_a_dead_engine_ends_the_node_with_its_reason_and_blames_no_sample(how: str) -> None:
    # Samples in flight, and the samples that an engine may fail before it counts as dead, are within the breaker.
    breaker = 1 if how == "killed" else MAX_FAILED_IN_A_ROW
    rollout = {"retries": 0, "breaker": breaker, "max_concurrent": 4}
    world = World(make_config(rollout=rollout, cluster={"max_restarts": 0}))

    async def killed() -> None:
        """Run the world, and kill or break its engine after two seconds."""
        async with anyio.create_task_group() as group:
            group.start_soon(world.run)
            await anyio.sleep(2)
            if how == "killed":
                world.engines[0].kill()
            else:
                world.engines[0].fail_next(1000)

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(killed)
    assert caught.group_contains(EngineDeadError, match=how if how == "killed" else "failed 8 requests in a row")
    assert not caught.group_contains(BreakerError)
    assert [
        note
        for note in world.observer.notes
        if "the last one of node 0, which ends with it: cluster.max_restarts is 0" in note
    ]


def test_an_interrupt_stops_after_the_running_step_and_leaves_the_rest_untrained() -> None:
    world = World(make_config(run={"steps": 100}))

    async def interrupted() -> RunEnd:
        """Run the world, and interrupt the hub after ten seconds."""
        ends: list[RunEnd] = []

        async def go() -> None:
            world.build()
            async with anyio.create_task_group() as group:
                group.start_soon(world.node.run)
                group.start_soon(world.trainer.run)
                ends.append(await world.hub.run())
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(go)
            await anyio.sleep(10)
            world.hub.interrupt()
        return ends[0]

    end = run_virtual(interrupted)
    assert end.reason == "interrupted"
    assert 0 < end.version < 100
    assert not world.trainer.finished


def test_law_2_the_ledger_balances_across_a_restart() -> None:
    first = World(make_config(run={"steps": 6}))

    async def crash_after_two_steps() -> None:
        """Run the first world until it has trained two steps."""
        first.build()
        async with anyio.create_task_group() as group:
            group.start_soon(first.node.run)
            group.start_soon(first.trainer.run)
            await first.trainer.reached(2)
            group.cancel_scope.cancel()

    run_virtual(crash_after_two_steps)
    second = World(make_config(run={"steps": 6}), state=first.trainer.snapshots[2])
    end = run(second)
    assert end.version == 6
    assert end.ledger["trained"] == 48
    assert end.ledger["issued"] == end.ledger["trained"] + end.ledger["given_up"]
    assert [row["step"] for row in second.observer.steps] == [2, 3, 4, 5]
    assert [row["step"] for row in second.observer.evaluations] == [2, 4, 6], "that of version 2 was lost in the crash"


def test_a_lost_trainer_rank_ends_the_run() -> None:
    world = World(make_config())

    async def lose() -> None:
        """Run a hub that loses its only trainer rank."""
        world.build()
        world.hub.incarnations.rank_arrived(0)
        world.hub.peer_lost("trainer-0")
        await world.hub.run()

    with pytest.raises(PeerLostError, match="trainer rank 0"):
        run_virtual(lose)


def test_the_leases_of_a_lost_node_go_to_another() -> None:
    world = World(make_config(), env=lambda: Echo(lambda seed: 4.0))

    async def lose() -> RunEnd:
        """Run the world, whose node is lost after eight seconds, and then another node."""
        hub = world.build()
        ends: list[RunEnd] = []

        async def go() -> None:
            ends.append(await hub.run())

        async with anyio.create_task_group() as group:
            group.start_soon(world.trainer.run)
            group.start_soon(go)
            async with anyio.create_task_group() as doomed:
                doomed.start_soon(world.node.run)
                await anyio.sleep(8)
                doomed.cancel_scope.cancel()
            hub.peer_lost("node-0")
            other = RolloutNode(
                world.config,
                HubLink(1, 1, InProcessCaller(hub)),
                [FakeLine(partial(FakeEngine, lambda prompt: [ord(c) for c in "yes"], 0.1))],
                CharTokenizer(),
                NodeEnvironment(lambda kind: wrap(Echo())),
                now=anyio.current_time,
            )
            await other.run()
        return ends[0]

    end = run_virtual(lose)
    assert end.ledger["trained"] == 32
    assert end.ledger["retried_cancelled"] > 0


class SlowToStart(FakeEngine):
    """A fake engine that takes five seconds to start."""

    closed = False

    async def start(self) -> None:
        """Take five seconds."""
        await anyio.sleep(5)

    async def close(self) -> None:
        """Note the call."""
        self.closed = True
        await super().close()


@pytest.mark.parametrize(
    ("after", "by"),
    [
        *((1.0, "signal"), (1.0, "hub"), (9.0, "signal"), (9.0, "hub")),
        *((9.0, "signal to all"), (9.0, "signal to engines")),
    ],
)
def test_a_node_that_is_drained_goes_and_nothing_that_it_had_is_lost_or_counts_as_failed(after: float, by: str) -> None:
    """The drain comes `after` so many seconds: while the engine starts, or while episodes run.

    `by`: a signal, or a request of the hub. The signal may go to all processes and so end the engine, too, shortly
    after the node has it (`to all`) or before (`to engines`).
    """
    config = make_config(run={"steps": 12}, deadlines={"env_step": 200.0, "step": 300.0})
    world = World(config, env=lambda: Echo(lambda seed: 1.0))
    engine = SlowToStart(lambda prompt: [ord(c) for c in "yes"], 0.1)

    async def drain() -> tuple[RunEnd, float]:
        """Run the world with a second node that leaves. Returns the end of the run, and the time at which the node had
        left."""
        hub = world.build()
        ends: list[RunEnd] = []
        gone: list[float] = []

        async def go() -> None:
            ends.append(await hub.run())

        other = RolloutNode(
            world.config,
            HubLink(1, 1, InProcessCaller(hub)),
            [same_engine(engine)],
            CharTokenizer(),
            NodeEnvironment(lambda kind: wrap(Echo(lambda seed: 1.0 + 99.0 * (seed % 2)))),
            now=anyio.current_time,
        )

        async def serve() -> None:
            """Run the second node until it has left."""
            async with anyio.create_task_group() as serving:
                serving.start_soon(leave)
                await other.run()
                serving.cancel_scope.cancel()
            gone.append(anyio.current_time())
            hub.peer_lost("node-1")
            hub.samples.check()

        async def leave() -> None:
            """Let the second node join, and leave after `after` seconds."""
            run = await hub.handle(p.RunRequest(p.dialect()))
            await hub.handle(p.JoinRequest(run.digest, 1))
            await anyio.sleep(after)
            if by == "signal to engines":
                engine.kill()
                await anyio.sleep(0.1)
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(partial(hub.handle, p.DrainRequest(1)) if by == "hub" else other.drain)
                await anyio.sleep(0.1)
                if by == "signal to all":
                    engine.kill()

        async with anyio.create_task_group() as group:
            for task in (world.trainer.run, go, world.node.run, serve):
                group.start_soon(task)
        return ends[0], gone[0]

    end, gone = run_virtual(drain)
    assert gone <= after + (1.0 if by.startswith("signal to") else config.deadlines.shutdown)
    assert engine.closed
    assert end.ledger["trained"] == 96
    assert end.ledger["given_up"] == 0
    assert any(note.startswith("node 1 leaves") for note in world.observer.notes)


def test_a_run_that_ends_does_not_wait_for_a_node_whose_engine_still_starts_for_the_first_time() -> None:
    config = make_config(run={"steps": 6})
    world = World(config)
    engine = FakeEngine(lambda prompt: [], start_seconds=1000.0)
    gone: list[float] = []
    ends: list[RunEnd] = []

    async def until_all_have_left() -> RunEnd:
        """Run the world with a second node whose engine still starts at the end."""
        hub = world.build()
        make_env, now = lambda kind: wrap(Echo()), anyio.current_time
        link, env = HubLink(1, 1, InProcessCaller(hub)), NodeEnvironment(make_env)
        other = RolloutNode(config, link, [same_engine(engine)], CharTokenizer(), env, now=now)

        async def serve() -> None:
            await other.run()
            gone.append(now())
            hub.peer_lost("node-1")

        async with anyio.create_task_group() as group:
            for task in (world.trainer.run, world.node.run, serve):
                group.start_soon(task)
            ends.append(await hub.run())
            ended = now()
            hub.peer_lost("node-0")
            with anyio.fail_after(config.deadlines.request):
                await hub.all_nodes_left()
            assert gone == [ended], "it was told before the hub left"
        return ends[0]

    end = run_virtual(until_all_have_left)
    assert (end.reason, end.ledger["trained"]) == ("finished", 48)
    assert engine.closed


class LostHub:
    """A connection to a hub that is lost a second after each request."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Lose the hub after a second."""
        await anyio.sleep(1)
        raise PeerLostError("the connection to the hub ended")


def test_the_start_of_the_engines_goes_on_when_the_hub_is_lost_meanwhile() -> None:
    engine = FakeEngine(lambda prompt: [], start_seconds=5.0)

    async def until_it_ends() -> float:
        """Run a node without a hub. Returns the seconds that the start of its engine took."""
        env, now = NodeEnvironment(lambda kind: wrap(Echo())), anyio.current_time
        node = RolloutNode(
            make_config(), HubLink(0, 0, LostHub()), [same_engine(engine)], CharTokenizer(), env, now=now
        )
        with pytest.raises(ExceptionGroup):
            await node.run()
        return node.start_s

    assert run_virtual(until_it_ends) == 5.0
    assert engine.closed


class Service:
    """A resource that the episodes of a node share. It records when it is opened, used and closed."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Service]:
        """Open the resource for the time of the block, and close it a second after."""
        self.events.append("opened")
        try:
            yield self
        finally:
            await anyio.sleep(1)
            self.events.append("closed")

    async def prepare(self) -> None:
        """Open the resource for all environments of the node."""
        await shared("service", self.open)


def test_what_environments_share_is_opened_before_the_engines_start_and_closed_after_the_last_episode() -> None:
    service = Service()

    class Sharer(Echo):
        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            assert await shared("service", service.open) is service
            service.events.append("used")
            return await super().step(action)

    world = World(make_config(), env=Sharer, prepare=service.prepare)
    end = run(world)
    assert end.reason == "finished"
    assert service.events[0] == "opened"
    assert service.events[-1] == "closed"
    assert set(service.events[1:-1]) == {"used"}


def test_an_environment_that_cannot_be_prepared_ends_the_node_with_its_error() -> None:
    async def prepare() -> None:
        raise SandboxStartError("there is no image")

    with pytest.raises(ExceptionGroup) as caught:
        run(World(make_config(), prepare=prepare))
    assert caught.group_contains(SandboxStartError, match="there is no image")


def test_an_environment_that_is_never_ready_ends_the_node_after_a_deadline() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(World(make_config(), prepare=anyio.sleep_forever))
    assert caught.group_contains(DeadlineError, match="waited 5 s for the environment to be ready")
