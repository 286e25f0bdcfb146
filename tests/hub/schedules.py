"""Random schedules of a whole hub: the topology, the rules, and what happens to nodes, samples and steps are drawn.

The trainer ranks die and come back: each of their incarnations is given the same batch of a step, and each step is
booked once. They hold the weights, without which no engine loads, until the last evaluation is over: until then
everything may die and join. The hub dies too: the next one goes on from the version that it had, or, as where a
recorded batch is damaged, from any since the checkpoint; nodes that outlive it keep what they hold, if the next one
knows of it. Or the whole run is resumed, with other options, domains and problems. Kinds of which all samples fail go
into quarantine. What holds on all of them is in `test_schedules`, which passes its laws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from flash.ages import window
from flash.config.tree import Config
from flash.environment.interface import Domain
from flash.hub import protocol as p
from flash.hub.context import SliceLimits
from flash.hub.dealing import KEPT_S
from flash.hub.hub import Hub
from flash.hub.recovery import HubState, Persistence, RecoveredState, TrainerStart
from flash.observe.observer import MemoryObserver
from flash.samples.buffer import MEMBERS_AT_ONCE
from flash.samples.journal import MemoryJournal
from flash.samples.replay import Replay
from flash.samples.rules import Problems
from flash.simulate.clock import run_virtual
from flash.types import Batch, Failure, Lease, Outcome, Published, Shard, Trajectory, VersionRun
from tests.branching import joined
from tests.hub.ranks import Ranks
from tests.samples.cases import KeptStates, trajectory

EVENTS = 30
NEVER = 10_000
"""More failures in a row than there are."""
ROUNDS = 200
"""Of everything that can be done, in which a schedule makes a step."""
WEIGHTS = {
    "load": 8,
    "finish": 12,
    "all but one": 4,
    "cancels": 3,
    "commit": 4,
    "die": 1,
    "drain": 1,
    "join": 2,
    "time": 2,
    "engine dies": 2,
    "engine back": 3,
    "hub dies": 2,
    "trainer dies": 3,
}
"""How often what happens."""
FAILURES = (Outcome.ENV_ERROR, Outcome.ENGINE_ERROR, Outcome.CANCELLED, Outcome.REWARD_ERROR)


def draw_config(dice: random.Random, calm: bool) -> Config:
    group = dice.choice([1, 2, 4, 8])
    groups = dice.randint(1, 4)
    rollout = {
        "group_size": group,
        "breaker": NEVER,
        "extra_per_group": 0 if calm else dice.choice([0, 0, 1, 2]),
        "drop_equal_rewards": not calm and group > 1 and dice.random() < 0.3,
    }
    evaluation = {"every": dice.choice([0, 1, 2]), "problems": dice.randint(1, 6), "samples": dice.randint(1, 2)}
    ranks, tensor = dice.choice([(1, 1), (1, 1), (2, 1), (3, 1), (2, 2), (4, 2)])
    base: dict[str, Any] = {
        "run": {"name": "test", "steps": dice.randint(2, 5)},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "rollout": rollout,
        "train": {"batch_size": group * groups},
        "eval": evaluation,
        "cluster": {"gpus_per_node": 0, "trainer_ranks": ranks},
        "parallel": {"tensor": tensor},
    }
    return with_options(dice, msgspec.convert(base, Config), calm)


def with_options(dice: random.Random, config: Config, calm: bool) -> Config:
    """The same run with those options drawn that may be others when it is resumed."""
    groups = config.train.batch_size // config.rollout.group_size
    alpha = dice.randint(0, 3 * groups) / groups if calm else dice.choice([0.0, 1.0, 2.0, dice.uniform(0, 3)])
    on_expire = dice.choice(["mask", "requeue", "wait"])
    bound = dice.choice([None, None, window(alpha) + dice.randint(0, 3)]) if alpha else None
    rollout = {
        "retries": dice.randint(0, 3),
        "quarantine": NEVER if calm or config.rollout.drop_equal_rewards else dice.choice([1, 2, 4, NEVER]),
        "on_expire": on_expire,
        "fifo_window": dice.choice([None, None, 1.0, 1.5]),
        "share_drift": dice.choice([0.0, 0.5, 1.0]),
        "extra_groups": 0 if calm or on_expire == "wait" else dice.choice([0, 0, 1, 2]),
        "queue_scheduling": dice.random() < 0.8,
        "replicate_prompts": dice.random() < 0.7,
    }
    return msgspec.structs.replace(
        config,
        rollout=msgspec.structs.replace(config.rollout, **rollout),
        train=msgspec.structs.replace(config.train, async_ratio=alpha, max_token_age=bound),
    )


def draw_domains(dice: random.Random, config: Config, calm: bool) -> dict[str, Domain]:
    """Several in one run of two, each with a weight and a size of its own."""
    if calm or config.rollout.fifo_window is not None or dice.random() < 1 / 2:
        return {}
    least = 2 if config.rollout.drop_equal_rewards else 1
    return {
        name: Domain(weight=dice.choice([1, 2, 5, 50]), group_size=dice.choice([None, least, 3]))
        for name in dice.sample("abc", dice.randint(2, 3))
    }


class Node:
    """A node of some engines: it asks whenever it has room, and works on nothing by itself."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        dice = schedule.dice
        self.number = number
        self.slow = dice.random() < 0.2
        self.engines: list[int | None] = [-1] * dice.randint(1, 4)
        """Their versions; None of those that are dead."""
        self.room = len(self.engines) * dice.choice([1, 2, 8])
        self.held: dict[int, Lease] = {}
        self.waits = False
        self._schedule = schedule
        self._reports = count()
        self._withdrawn: list[int] = []
        self.begin()

    def begin(self) -> None:
        """It is about to `run`."""
        self._more = anyio.Event()
        self._scope = anyio.CancelScope()
        self._gone = anyio.Event()

    async def run(self) -> None:
        with self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen)
                await self._ask()
        self._gone.set()

    async def end(self) -> None:
        """The hub is told of a lost connection when the last handler of its requests has ended."""
        self._scope.cancel()
        await self._gone.wait()

    async def _listen(self) -> None:
        done = False
        while not done:
            reply = await self._schedule.hub.handle(p.CancelRequest(self.number))
            self._withdrawn += reply.lease_ids
            done = reply.done

    async def _ask(self) -> None:
        while True:
            while max(self.versions, default=-1) < 0 or len(self.held) >= self.room:
                self._more = anyio.Event()
                await self._more.wait()
            self.waits = True
            reply = await self._schedule.hub.handle(p.LeaseRequest(self.number, self.room - len(self.held)))
            self.waits = False
            self.held |= {lease.lease_id: lease for lease in reply.leases}
            if reply.done:
                return

    @property
    def versions(self) -> list[int]:
        """Of the engines that live."""
        return [version for version in self.engines if version is not None]

    async def load(self, engine: int) -> None:
        """Not without the ranks that have published it: they hold the weights."""
        if self._schedule.hub.progress.publisher_alive:
            await self.becomes(engine, self._schedule.published)

    async def becomes(self, engine: int, version: int | None) -> None:
        """An engine has loaded a version, died (None), or come back without one (−1)."""
        self.engines[engine] = version
        await self.report()

    async def report(self) -> None:
        statuses = [p.EngineStatus(i, v, 0.0, 1.0, 0.0) for i, v in enumerate(self.engines) if v is not None]
        await self._schedule.hub.handle(p.EngineReport(self.number, next(self._reports), statuses, []))
        self._more.set()

    async def bring(self, *ended: p.EndedLease) -> None:
        for each in ended:
            self.held.pop(each.lease_id)
        free = max(0, self.room - len(self.held))
        await self._schedule.hub.handle(p.DeliverRequest(self.number, list(ended), free))
        self._more.set()

    async def heed(self) -> None:
        """End what the hub has withdrawn."""
        gone = [self.held[lease_id] for lease_id in self._withdrawn if lease_id in self.held]
        self._withdrawn.clear()
        ended = [p.EndedLease(lease.lease_id, Failure(lease.task, Outcome.CANCELLED, "x", 1)) for lease in gone]
        if ended:
            await self.bring(*ended)

    @property
    def behind(self) -> list[int]:
        published = self._schedule.published
        return [i for i, version in enumerate(self.engines) if version is not None and version < published]

    @property
    def dead(self) -> list[int]:
        return [i for i, version in enumerate(self.engines) if version is None]

    @property
    def ready(self) -> list[Lease]:
        """Leases that can end: the others wait for an engine that comes back, or loads their version."""
        return [lease for lease in self.held.values() if lease.min_version <= max(self.versions, default=-1)]


class Recording(MemoryObserver):
    """Remembers whole batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: dict[int, Batch] = {}

    def batch(self, batch: Batch) -> None:
        super().batch(batch)
        self.batches[batch.step] = batch


class RecordedHistory:
    """See `flash.hub.recovery.RunHistory`."""

    def __init__(self, recording: Recording, kept: KeptStates) -> None:
        self._recording = recording
        self._kept = kept

    async def start(self, version: int) -> TrainerStart:
        await anyio.lowlevel.checkpoint()
        newest = max(self._kept.by_version, default=0)
        return TrainerStart(newest, str(newest))

    async def batch(self, step: int) -> Batch:
        await anyio.lowlevel.checkpoint()
        return self._recording.batches[step]

    def same_weights(self, one: Published, other: Published) -> bool:
        return True


class Laws(NamedTuple):
    """What is asked on the way."""

    of_every_moment: Callable[[Schedule], None]
    """After each event."""
    of_a_batch: Callable[[Schedule, Sequence[Shard]], None]
    """When the ranks have all of their shards of a step."""


class Schedule:
    """One run."""

    def __init__(self, seed: int, members_at_once: int, laws: Laws) -> None:
        self.laws = laws
        self.dice = random.Random(seed)
        self.limits = SliceLimits(members_at_once)
        self.calm = seed % 4 == 0
        """Every sample ends before the next version, and whole groups are admitted: nothing may be stale."""
        self.config = draw_config(self.dice, self.calm)
        self.failing = self.dice.choice([0.0, 0.1, 0.5])
        """Share of the samples that fail at their end."""
        if self.calm or self.config.rollout.drop_equal_rewards:
            self.failing = (
                0.0  # groups that failures leave with one sample are all filtered out, until the run gives up
            )
        self.domains = draw_domains(self.dice, self.config, self.calm)
        self.bad = self.dice.choice("abc")
        """The kind of which all samples fail, in runs that have it and in which kinds go into quarantine."""
        self.problems = 0
        """The number of the environment: each has problems of its own."""
        self.environments: dict[int, str] = {}
        """That of each group of which a sample was trained."""
        self.observer = Recording()
        self.kept, self.journal = KeptStates(), MemoryJournal()
        self.hubs = 0
        self.hub = self.start_hub(None)
        self.nodes: dict[int, Node] = {}
        self.published = -1
        self.floor = -1
        """The newest version that engines ever had, of a run that has not gone back since."""
        self.version = 0
        self.shards: dict[int, list[int]] = {}
        """The tasks of each step, as they were dealt."""
        self.commit_now = anyio.Event()
        self.incarnation = anyio.CancelScope()
        self.deaths_left = self.dice.choice([0, 0, 2, 5])
        """Of the trainer, while everybody else does what there is to do."""
        self.hub_deaths_left = 0 if self.calm else self.dice.choice([0, 0, 1, 3])
        """The same of the hub."""
        self.resumed = False
        """Whether the run was resumed with other options."""
        self.finished = False
        self.trainer = anyio.CancelScope()
        self.world = self.config.trainer_world_size
        self.number = 0
        """Of their incarnation, at this hub."""
        self.expiry = anyio.CancelScope()

    def start_hub(self, state: HubState | None, held: int = 0) -> Hub:
        """The hub, whose trainer ranks begin with the checkpoint of a version."""
        version = state.version if state is not None else 0
        self.hubs += 1
        evaluated = [int(row["step"]) for row in self.observer.evaluations if row["version_max"] <= version]
        return Hub(
            self.config,
            self.observer,
            now=anyio.current_time,
            problems=Problems.of(
                self.config,
                lambda seed: list(self.domains)[seed % len(self.domains)] if self.domains else "",
                self.domains,
            ),
            recovered=RecoveredState(state, evaluated, TrainerStart(held, str(held)), self.hubs),
            persistence=Persistence(self.kept, self.journal, RecordedHistory(self.observer, self.kept)),
            limits=self.limits,
        )

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._train)
            for _ in range(self.dice.choice([1, 2, 2, 3, 4, 6, 8])):
                await self.join(tasks)
            await self.settle()
            for _ in range(0 if self.calm else EVENTS):
                await self.happen(tasks)
                await self.settle()
                self.laws.of_every_moment(self)
            if self.hub_deaths_left == 0 and not self.calm:
                await self.hub_dies(tasks)  # whatever that leaves behind has no later death to save it
            await self.end(tasks)
            tasks.cancel_scope.cancel()

    async def settle(self) -> None:
        for _ in range(25):
            await anyio.lowlevel.checkpoint()

    async def join(self, tasks: TaskGroup) -> None:
        """The node of the trainers comes back where it is gone; others are numbered by the hub."""
        number = 0
        if number in self.nodes:
            run = await self.hub.handle(p.RunRequest(p.dialect()))
            reply = await self.hub.handle(p.JoinRequest(run.digest, self.dice.randint(1, 4)))
            assert reply.node is not None
            number = reply.node
        assert number not in self.nodes, "two nodes of one number"
        node = self.nodes[number] = Node(self, number)
        tasks.start_soon(node.run)

    async def die(self, node: Node) -> None:
        await node.end()
        del self.nodes[node.number]
        self.hub.peer_lost(f"node-{node.number}")

    async def hub_dies(self, tasks: TaskGroup) -> None:
        """Everybody starts again: the hub from where it was, the trainers from the newest checkpoint."""
        if self.finished:
            return
        for node in self.nodes.values():
            await node.end()
        resumed = self.dice.random() < 0.6
        """Whether people go on with the run, and end all that is left of it."""
        stay = 0.0 if resumed else 0.6
        outlive = [node for number, node in self.nodes.items() if number > 0 and self.dice.random() < stay]
        self.trainer.cancel()
        self.expiry.cancel()
        await self.settle()
        self.finished = False  # what the ranks were told meanwhile counts no more
        ledger, reached = self.hub.samples.ledger, self.hub.progress.version
        stored = self.kept.by_version
        kept = HubState.restore(stored[max(stored)], self.config) if stored else None
        held, number = (kept.version, kept.journal) if kept is not None else (0, 0)
        replay = Replay(kept.buffer if kept is not None else None, held)
        for event in self.journal.after(number):
            replay.apply(event)
        assert replay.reached == reached
        self.version = reached if self.dice.random() < 0.7 else self.dice.randint(held, reached)
        buffer = replay.state(until=self.version)
        assert buffer is not None
        assert (buffer.ledger.issued, buffer.ledger.generated_tokens) == (
            ledger.issued,
            ledger.generated_tokens,
        )
        if self.version == reached:
            assert buffer.ledger.trained == ledger.trained, "what was trained is taken back"
        else:
            self.floor = -1
        if resumed:
            self.resumed = True
            allowed = self.config.train.max_age
            self.config = with_options(self.dice, self.config, self.calm)
            if self.config.train.max_age < allowed:  # what was not trained yet is put together anew
                self.shards = {step: dealt for step, dealt in self.shards.items() if step < self.version}
            self.domains = draw_domains(self.dice, self.config, self.calm)
            if self.dice.random() < 0.5:
                self.problems += 1
                env = msgspec.structs.replace(self.config.env, options={"number": self.problems})
                self.config = msgspec.structs.replace(self.config, env=env)
        self.hub = self.start_hub(HubState(self.version, buffer, journal=0), held)
        self.nodes, self.published = {}, -1
        self.observer.steps = [row for row in self.observer.steps if row["step"] < self.version]
        tasks.start_soon(self._train)
        tasks.start_soon(self._expire_claims)
        await self.join(tasks)
        for node in outlive:
            if max(node.versions, default=-1) <= self.version:
                await self.settle()
                await self.move(node, tasks)

    async def _expire_claims(self) -> None:
        with anyio.CancelScope() as self.expiry:
            await self.hub.work.expire_claims()

    async def move(self, node: Node, tasks: TaskGroup) -> None:
        """It goes on at the next hub, with what that one lets it keep, once."""
        run = await self.hub.handle(p.RunRequest(p.dialect()))
        reply = await self.hub.handle(p.JoinRequest(run.digest, len(node.engines)))
        assert reply.node is not None
        node.number = reply.node
        presented = list(node.held.values())
        kept = (await self.hub.handle(p.ClaimRequest(node.number, presented))).lease_ids
        assert set(kept) <= node.held.keys()
        assert not (await self.hub.handle(p.ClaimRequest(node.number, presented))).lease_ids, "two have the same lease"
        node.held = {lease_id: node.held[lease_id] for lease_id in kept}
        self.nodes[node.number] = node
        await node.report()
        node.begin()
        tasks.start_soon(node.run)

    async def drain(self, node: Node) -> None:
        """It ends some of what it has, hands some back, and the rest goes back by itself."""
        await self.hub.handle(p.Leave(node.number))
        before = set(node.held)
        self.commit_now.set()
        await self.settle()
        assert set(node.held) <= before, "a node that leaves was given more"
        for lease in node.ready:
            back = Failure(lease.task, Outcome.CANCELLED, "x", 1)
            if self.dice.random() < 0.7:
                await node.bring(self.dice.choice([self.ended(node, lease), p.EndedLease(lease.lease_id, back)]))
        await self.die(node)

    # -- what happens ------------------------------------------------------------------------------------------------

    async def happen(self, tasks: TaskGroup) -> None:
        dice = self.dice
        node = dice.choice(list(self.nodes.values())) if self.nodes else None
        event = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if event == "commit":
            self.commit_now.set()
        elif event == "hub dies":
            await self.hub_dies(tasks)
        elif event == "trainer dies":
            self.incarnation.cancel()
        elif event == "time":
            await anyio.sleep(dice.choice([0.1, KEPT_S, 30.0]))
        elif event == "join" and len(self.nodes) < 8:
            await self.join(tasks)
        elif node is None:
            return
        elif event == "die":
            await self.die(node)
        elif event == "drain" and node.number != 0:
            await self.drain(node)
        elif event == "cancels":
            await node.heed()
        elif event == "engine dies":
            if node.versions:
                await node.becomes(dice.choice([i for i in range(len(node.engines)) if i not in node.dead]), None)
        elif event == "engine back":
            if node.dead:
                await node.becomes(dice.choice(node.dead), -1)
        elif event == "load":
            if node.behind and (not node.slow or dice.random() < 0.3):
                await node.load(dice.choice(node.behind))
        elif (ready := node.ready) and (event != "finish" or not node.slow):
            chosen = dice.sample(ready, len(ready) if event != "all but one" else len(ready) - 1)
            if event == "finish":
                chosen = chosen[: dice.randint(1, len(chosen))]
            await node.bring(*(self.ended(node, lease) for lease in chosen))

    def ended(self, node: Node, lease: Lease) -> p.EndedLease:
        dice = self.dice
        failing = self.failing
        if self.config.rollout.quarantine < NEVER:  # only the one may come into it, or nothing is left to train on
            failing = float(lease.task.kind == self.bad)
        if dice.random() < failing:
            return p.EndedLease(lease.lease_id, Failure(lease.task, dice.choice(FAILURES), "x", 1))
        start = min(version for version in node.versions if version >= lease.min_version)
        later = min(self.published, start + (0 if self.calm else dice.randint(0, 2)))
        runs = [VersionRun(start, 2)] + [VersionRun(later, 1)] * (later > start)
        made: Trajectory = trajectory(
            lease.task, start, sum(run.count for run in runs), float(dice.randint(0, 1)), runs
        )
        made = msgspec.structs.replace(
            made, turns=[msgspec.structs.replace(made.turns[0], observation=str(self.problems))]
        )
        later_branches = dice.choice([0, 0, 1, 2])
        return p.EndedLease(lease.lease_id, joined([made, *[trajectory(lease.task, start)] * later_branches]))

    async def _train(self) -> None:
        """The trainer ranks, one incarnation after the other."""
        with anyio.CancelScope() as self.trainer:
            while not self.finished:
                with anyio.CancelScope() as self.incarnation:
                    await self._live(await self._begin())
                if not self.finished:
                    for rank in self.dice.sample(range(self.world), self.dice.randint(1, self.world)):
                        if self.hub.incarnations.is_current(self.number):
                            self.hub.peer_lost(f"trainer-{rank}")

    def _arrive(self) -> None:
        (self.number,) = {self.hub.incarnations.rank_arrived(rank) for rank in range(self.world)}

    async def _begin(self) -> Ranks:
        """An incarnation begins with a checkpoint."""
        self._arrive()
        begun = [await self.hub.handle(p.IncarnationRequest(rank, 1, "")) for rank in range(self.world)]
        return Ranks(self.world, self.config.parallel.tensor, int(begun[0].checkpoint or 0))

    async def _live(self, ranks: Ranks) -> None:
        """They commit what is new when they are told to, and write a checkpoint now and then."""
        while True:
            if ranks.published < ranks.version:
                await ranks.publish(self.hub)
                self.published = self.hub.progress.published_version
                if self.published >= 0:
                    assert self.published >= self.floor, "the engines' version went back"
                    self.floor = self.published
            if not await ranks.fetch(self.hub, self.dice):
                if self.dice.random() < 0.7:
                    await self.hub.handle(p.SnapshotRequest())
                await ranks.leave(self.hub)
                self.finished = True
                return
            self.laws.of_a_batch(self, ranks.shards)
            if ranks.version == self.version:
                self.commit_now = anyio.Event()
                await self.commit_now.wait()
            await ranks.commit(self.hub)
            self.version = self.hub.progress.version
            if ranks.keeps and self.dice.random() < 0.3:
                await self.hub.handle(p.SnapshotRequest())

    async def end(self, tasks: TaskGroup) -> None:
        """From here on everybody does what there is to do."""
        if not self.nodes:
            await self.join(tasks)
        rounds, version = 0, self.version
        while rounds < ROUNDS:
            rounds, version = (rounds + 1, version) if version == self.version else (0, self.version)
            for node in list(self.nodes.values()):
                await node.heed()
                for engine in node.dead:
                    await node.becomes(engine, -1)
                for engine in node.behind:
                    await node.load(engine)
            if self.deaths_left and self.dice.random() < 0.3:
                self.deaths_left -= 1
                self.incarnation.cancel()
            if self.hub_deaths_left and self.dice.random() < 0.2:
                self.hub_deaths_left -= 1
                await self.hub_dies(tasks)
            await self.settle()
            self.laws.of_every_moment(self)
            ended = {node: [self.ended(node, lease) for lease in node.ready] for node in self.nodes.values()}
            for node, results in ended.items():
                await node.bring(*results)
            await self.settle()
            self.laws.of_every_moment(self)
            if self.finished:
                break
            if not any(ended.values()):
                await anyio.sleep(KEPT_S)
                self.commit_now.set()
                await self.settle()


def run_one(seed: int, laws: Laws) -> Schedule:
    """One schedule, at its end. Raises what breaks a law on its way, with the seed."""

    async def run() -> Schedule:
        schedule = Schedule(seed, members_at_once, laws)
        await schedule.run()
        return schedule

    members_at_once = random.Random(f"slices of {seed}").choice([1, 8, 16, MEMBERS_AT_ONCE])
    try:
        return run_virtual(run)
    except BaseException as error:
        raise AssertionError(f"python -m tests.hub.test_schedules 1 {seed}") from error
