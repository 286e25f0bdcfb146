"""Random schedules of a whole hub: the topology, the rules, and the events of nodes, samples and steps are drawn.

- The trainer ranks die and start again. Each incarnation gets the same batch of a step, and each step is booked once.
  The ranks hold the weights, without which no engine loads, until the last evaluation is over. Until then every process
  may die or join.
- The hub dies. The next hub goes on from the same version, or from any version since the checkpoint, as if a recorded
  batch was damaged. Nodes that outlive the hub keep those of their leases that the next hub knows.
- The whole run is resumed with other options, domains and problems.
- Kinds of problems whose samples all fail go into quarantine.

`test_schedules` holds the laws, which it passes to `run_one`.
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
from flash.hub.hub import Hub
from flash.hub.recovery import HubState, Persistence, RecoveredState, TrainerStart
from flash.hub.shares import KEPT_S
from flash.observe.observer import MemoryObserver
from flash.samples.buffer import MEMBERS_PER_SLICE
from flash.samples.journal import MemoryJournal, Replay
from flash.samples.rules import ProblemKinds
from flash.simulate.clock import run_virtual
from flash.types import Batch, Failure, Lease, Outcome, Published, Shard, Trajectory, VersionRun
from tests.branching import joined
from tests.hub.ranks import Ranks
from tests.samples.cases import KeptStates, trajectory

EVENTS = 30
"""Number of random events of a schedule, before all processes only do their work."""
NEVER = 10_000
"""Number of failures in a row that no schedule reaches."""
ROUNDS = 200
"""Number of rounds at the end of a schedule, each with all possible events, within which it must make a step."""
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
"""Relative frequencies of the events."""
FAILURES = (Outcome.ENV_ERROR, Outcome.ENGINE_ERROR, Outcome.CANCELLED, Outcome.REWARD_ERROR)
"""Outcomes from which the outcome of a failed sample is drawn."""


def draw_config(dice: random.Random, calm: bool) -> Config:
    """Return a random configuration. A calm run (`Schedule.calm`) has no redundant samples and filters nothing out."""
    group = dice.choice([1, 2, 4, 8])
    groups = dice.randint(1, 4)
    rollout = {
        "group_size": group,
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
    """Return the configuration with random values for those options that may change when a run is resumed."""
    groups = config.train.batch_size // config.rollout.group_size
    alpha = dice.randint(0, 3 * groups) / groups if calm else dice.choice([0.0, 1.0, 2.0, dice.uniform(0, 3)])
    on_expire = dice.choice(["mask", "requeue", "wait"])
    bound = dice.choice([None, window(alpha), window(alpha) + dice.randint(0, 3)]) if alpha else None
    rollout = {
        "retries": dice.randint(0, 3),
        "breaker": NEVER if calm or config.rollout.drop_equal_rewards else dice.choice([4, 8, 16, NEVER]),
        "on_expire": on_expire,
        "fifo_window": dice.choice([None, None, 1.0, 1.5]),
        "extra_groups": 0 if calm or on_expire == "wait" else dice.choice([0, 0, 1, 2]),
        "barriers": [barrier for barrier, odds in (("batch", 0.2), ("group", 0.3)) if dice.random() < odds],
    }
    return msgspec.structs.replace(
        config,
        rollout=msgspec.structs.replace(config.rollout, **rollout),
        train=msgspec.structs.replace(config.train, async_ratio=alpha, max_token_age=bound, stream=dice.random() < 0.7),
    )


def draw_domains(dice: random.Random, config: Config, calm: bool) -> dict[str, Domain]:
    """Return no domains, or, in every second run, several with random weights and group sizes."""
    if calm or config.rollout.fifo_window is not None or dice.random() < 1 / 2:
        return {}
    least = 2 if config.rollout.drop_equal_rewards else 1
    return {
        name: Domain(weight=dice.choice([1, 2, 5, 50]), group_size=dice.choice([None, least, 3]))
        for name in dice.sample("abc", dice.randint(2, 3))
    }


class Node:
    """A node with some engines. It asks for leases whenever it has room; the schedule decides when they end."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        dice = schedule.dice
        self.number = number
        self.slow = dice.random() < 0.2
        """True if few of the schedule's events load a version here or end a lease."""
        self.engines: list[int | None] = [-1] * dice.randint(1, 4)
        """Versions of the engines; None for a dead engine, -1 for an engine without a version."""
        self.room = len(self.engines) * dice.choice([1, 2, 8])
        """Number of leases that the node can hold at once."""
        self.held: dict[int, Lease] = {}
        """Leases of the node, by number."""
        self.waits = False
        """True while a request for leases waits at the hub."""
        self._schedule = schedule
        self._reports = count()
        """Numbers of the reports on engines."""
        self._withdrawn: list[int] = []
        """Numbers of the leases that the hub has asked the node to cancel."""
        self.begin()

    def begin(self) -> None:
        """Prepare the events for a new call of `run`."""
        self._more = anyio.Event()
        self._scope = anyio.CancelScope()
        self._gone = anyio.Event()

    async def run(self) -> None:
        """Ask the hub for leases and for cancels, until the run is over or `end` is called."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen)
                await self._ask()
        self._gone.set()

    async def end(self) -> None:
        """End the node's requests, and wait until the last one has ended: only then does the hub hear of the loss."""
        self._scope.cancel()
        await self._gone.wait()

    async def _listen(self) -> None:
        """Note which leases the hub cancels, until the run is over."""
        done = False
        while not done:
            reply = await self._schedule.hub.handle(p.CancelRequest(self.number))
            self._withdrawn += reply.lease_ids
            done = reply.done

    async def _ask(self) -> None:
        """Ask for leases whenever the node has room and an engine with a version, until the run is over."""
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
        """Versions of the living engines."""
        return [version for version in self.engines if version is not None]

    async def load(self, engine: int) -> None:
        """Let an engine load the newest version, if the ranks that hold its weights are alive."""
        if self._schedule.hub.progress.publisher_alive:
            await self.set_version(engine, self._schedule.published)

    async def set_version(self, engine: int, version: int | None) -> None:
        """Set the version of an engine, and report it: None if it has died, -1 if it has restarted."""
        self.engines[engine] = version
        await self.report()

    async def report(self) -> None:
        """Report the living engines to the hub, and ask for leases again if there is room."""
        statuses = [p.EngineStatus(i, v, 0.0, 1.0, 0.0) for i, v in enumerate(self.engines) if v is not None]
        await self._schedule.hub.handle(p.EngineReport(self.number, next(self._reports), statuses, []))
        self._more.set()

    async def deliver(self, *ended: p.EndedLease) -> None:
        """Deliver the results of leases, and ask for leases again."""
        for each in ended:
            self.held.pop(each.lease_id)
        free = max(0, self.room - len(self.held))
        await self._schedule.hub.handle(p.DeliverRequest(self.number, list(ended), free))
        self._more.set()

    async def deliver_cancelled(self) -> None:
        """Deliver the leases that the hub has cancelled."""
        gone = [self.held[lease_id] for lease_id in self._withdrawn if lease_id in self.held]
        self._withdrawn.clear()
        ended = [p.EndedLease(lease.lease_id, Failure(lease.task, Outcome.CANCELLED, "x", 1)) for lease in gone]
        if ended:
            await self.deliver(*ended)

    @property
    def behind(self) -> list[int]:
        """Indices of the living engines that do not have the newest version."""
        published = self._schedule.published
        return [i for i, version in enumerate(self.engines) if version is not None and version < published]

    @property
    def dead(self) -> list[int]:
        """Indices of the dead engines."""
        return [i for i, version in enumerate(self.engines) if version is None]

    @property
    def ready(self) -> list[Lease]:
        """Leases that can end. The others need a version that no living engine has."""
        return [lease for lease in self.held.values() if lease.min_version <= max(self.versions, default=-1)]


class Recording(MemoryObserver):
    """An observer that keeps all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: dict[int, Batch] = {}
        """Whole batch of each step."""

    def batch(self, batch: Batch) -> None:
        """Keep the batch of a step, in place of an earlier batch of this step."""
        super().batch(batch)
        self.batches[batch.step] = batch


class RecordedHistory:
    """A `flash.hub.recovery.RunHistory` in memory."""

    def __init__(self, recording: Recording, kept: KeptStates) -> None:
        self._recording = recording
        self._kept = kept

    async def choose_start(self, version: int) -> TrainerStart:
        """Return the newest checkpoint; version 0 if there is none."""
        await anyio.lowlevel.checkpoint()
        newest = max(self._kept.by_version, default=0)
        return TrainerStart(newest, str(newest))

    async def batch(self, step: int) -> Batch:
        """Return the recorded batch of a step."""
        await anyio.lowlevel.checkpoint()
        return self._recording.batches[step]

    def same_weights(self, one: Published, other: Published) -> bool:
        """Return True: the weights of a schedule follow from the batches alone."""
        return True


class Laws(NamedTuple):
    """Checks that run during a schedule."""

    after_each_event: Callable[[Schedule], None]
    """Called after each event."""
    for_each_batch: Callable[[Schedule, Sequence[Shard]], None]
    """Called when the ranks have all shards of a step."""


class Schedule:
    """Random run: its processes, and the events that befall them.

    Args:
        seed: seed of all random choices, so that a schedule can be repeated.
        members_per_slice: number of samples whose groups the hub processes at once, before it serves other tasks.
        laws: checks that run during the schedule.
    """

    def __init__(self, seed: int, members_per_slice: int, laws: Laws) -> None:
        self.laws = laws
        self.dice = random.Random(seed)
        self.limits = SliceLimits(members_per_slice)
        self.calm = seed % 4 == 0
        """True if every sample ends before the next version and whole groups are admitted: no token may be stale."""
        self.config = draw_config(self.dice, self.calm)
        self.failing = self.dice.choice([0.0, 0.1, 0.5])
        """Probability that a sample fails."""
        if self.calm or self.config.rollout.drop_equal_rewards:
            self.failing = (
                0.0  # groups that failures leave with one sample are all filtered out, until the run gives up
            )
        self.domains = draw_domains(self.dice, self.config, self.calm)
        self.failing_kind = self.dice.choice("abc")
        """Kind of problems whose samples all fail, in runs with quarantine."""
        self.problems = 0
        """Number of the environment. A resumed run may have another one, with other problems."""
        self.environments: dict[int, str] = {}
        """Environment of each group that was trained."""
        self.observer = Recording()
        self.states, self.journal = KeptStates(), MemoryJournal()
        self.hubs = 0
        """Number of hub processes so far."""
        self.hub = self.start_hub(None)
        self.nodes: dict[int, Node] = {}
        """Living nodes, by number."""
        self.published = -1
        """Newest version that the living hub has announced; -1 if there is none."""
        self.floor = -1
        """Newest version that engines ever had; -1 after the run has gone back."""
        self.version = 0
        """Version that the run has reached."""
        self.shards: dict[int, list[int]] = {}
        """Tasks of each step, in the order in which they were dealt."""
        self.commit_now = anyio.Event()
        """Set when the schedule lets the ranks commit the running step."""
        self.incarnation = anyio.CancelScope()
        """Scope of the running incarnation of the ranks. Its cancellation is the death of the ranks."""
        self.deaths_left = self.dice.choice([0, 0, 2, 5])
        """Number of times that the ranks still die at the end of the schedule."""
        self.hub_deaths_left = 0 if self.calm else self.dice.choice([0, 0, 1, 3])
        """Number of times that the hub still dies at the end of the schedule."""
        self.resumed = False
        """True if the run was resumed with other options."""
        self.finished = False
        """True if the ranks have left at the end of the run."""
        self.trainer = anyio.CancelScope()
        """Scope of all incarnations of the ranks under the living hub."""
        self.world = self.config.trainer_world_size
        """Number of trainer ranks."""
        self.number = 0
        """Number of the ranks' incarnation."""
        self.expiry = anyio.CancelScope()
        """Scope of the time in which nodes may claim leases of the previous hub."""

    def start_hub(self, state: HubState | None, held: int = 0) -> Hub:
        """Return a hub with a recovered state, whose ranks start from the checkpoint of version `held`."""
        version = state.version if state is not None else 0
        self.hubs += 1
        evaluated = [int(row["step"]) for row in self.observer.evaluations if row["version_max"] <= version]
        return Hub(
            self.config,
            self.observer,
            now=anyio.current_time,
            problems=ProblemKinds.of(
                self.config,
                lambda seed: list(self.domains)[seed % len(self.domains)] if self.domains else "",
                self.domains,
            ),
            recovered=RecoveredState(state, evaluated, TrainerStart(held, str(held)), self.hubs),
            persistence=Persistence(self.states, self.journal, RecordedHistory(self.observer, self.states)),
            limits=self.limits,
        )

    async def run(self) -> None:
        """Run the random events, each followed by the checks of the laws. Then let the run come to its end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._train)
            for _ in range(self.dice.choice([1, 2, 2, 3, 4, 6, 8])):
                await self.join(tasks)
            await self.settle()
            for _ in range(0 if self.calm else EVENTS):
                await self.happen(tasks)
                await self.settle()
                self.laws.after_each_event(self)
            if self.hub_deaths_left == 0 and not self.calm:
                # A fault that this death leaves behind is not hidden by a later death.
                await self.hub_dies(tasks)
            await self.end(tasks)
            tasks.cancel_scope.cancel()

    async def settle(self) -> None:
        """Let all tasks run until they wait. The number of turns is more than any chain of wakings needs."""
        for _ in range(25):
            await anyio.lowlevel.checkpoint()

    async def join(self, tasks: TaskGroup) -> None:
        """Start node 0 if it is gone, and otherwise a new node, to which the hub gives a number."""
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
        """Kill a node: its requests end, and the hub hears of the loss."""
        await node.end()
        del self.nodes[node.number]
        self.hub.peer_lost(f"node-{node.number}")

    async def hub_dies(self, tasks: TaskGroup) -> None:
        """Kill the hub, the ranks and all nodes but those that outlive it. Restart them from the recovered state."""
        if self.finished:
            return
        for node in self.nodes.values():
            await node.end()
        # A person resumes the run: all old processes are ended before.
        resumed = self.dice.random() < 0.6
        stay = 0.0 if resumed else 0.6
        outlive = [node for number, node in self.nodes.items() if number > 0 and self.dice.random() < stay]
        self.trainer.cancel()
        self.expiry.cancel()
        await self.settle()
        self.finished = False  # The ranks may have ended with the old hub. The next hub needs ranks again.
        ledger, reached = self.hub.samples.ledger, self.hub.progress.version
        stored = self.states.by_version
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
            # With a smaller largest age of tokens, batches that were formed and not trained are formed again.
            if self.config.train.max_age < allowed:
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
        """Let the hub queue the leases that no node claims. The death of the hub cancels this."""
        with anyio.CancelScope() as self.expiry:
            await self.hub.work.expire_claims()

    async def move(self, node: Node, tasks: TaskGroup) -> None:
        """Move a node to the next hub. It keeps the leases that it may claim, and can claim each only once."""
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
        """Let a node leave: it finishes some leases, hands some back, and the others queue again when it is gone."""
        await self.hub.handle(p.Leave(node.number))
        before = set(node.held)
        self.commit_now.set()
        await self.settle()
        assert set(node.held) <= before, "a node that leaves was given more"
        for lease in node.ready:
            back = Failure(lease.task, Outcome.CANCELLED, "x", 1)
            if self.dice.random() < 0.7:
                await node.deliver(self.dice.choice([self.ended(node, lease), p.EndedLease(lease.lease_id, back)]))
        await self.die(node)

    # -- what happens ------------------------------------------------------------------------------------------------

    async def happen(self, tasks: TaskGroup) -> None:
        """Let one random event happen (`WEIGHTS`), or none if it is not possible now."""
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
            await node.deliver_cancelled()
        elif event == "engine dies":
            if node.versions:
                await node.set_version(dice.choice([i for i in range(len(node.engines)) if i not in node.dead]), None)
        elif event == "engine back":
            if node.dead:
                await node.set_version(dice.choice(node.dead), -1)
        elif event == "load":
            if node.behind and (not node.slow or dice.random() < 0.3):
                await node.load(dice.choice(node.behind))
        # The events "finish" and "all but one" deliver results.
        elif (ready := node.ready) and (event != "finish" or not node.slow):
            chosen = dice.sample(ready, len(ready) if event != "all but one" else len(ready) - 1)
            if event == "finish":
                chosen = chosen[: dice.randint(1, len(chosen))]
            await node.deliver(*(self.ended(node, lease) for lease in chosen))

    def ended(self, node: Node, lease: Lease) -> p.EndedLease:
        """Return a random result of a lease: a failure, or a sample with one or several branches and versions."""
        dice = self.dice
        failing = self.failing
        # With quarantine, only one kind of problems fails. If every kind went into quarantine, nothing would be left.
        if self.config.rollout.breaker < NEVER:
            failing = float(lease.task.kind == self.failing_kind)
        if dice.random() < failing:
            return p.EndedLease(lease.lease_id, Failure(lease.task, dice.choice(FAILURES), "x", 1))
        start = min(version for version in node.versions if version >= lease.min_version)
        later = min(self.published, start + (0 if self.calm else dice.randint(0, 2)))
        runs = [VersionRun(start, 2)] + [VersionRun(later, 1)] * (later > start)
        made: Trajectory = trajectory(
            lease.task, start, sum(run.count for run in runs), float(dice.randint(0, 1)), runs
        )
        # The observation has the number of the environment, by which a law sees from which one a sample is.
        made = msgspec.structs.replace(
            made, turns=[msgspec.structs.replace(made.turns[0], observation=str(self.problems))]
        )
        later_branches = dice.choice([0, 0, 1, 2])
        return p.EndedLease(lease.lease_id, joined([made, *[trajectory(lease.task, start)] * later_branches]))

    async def _train(self) -> None:
        """Run the trainer ranks, one incarnation after the other."""
        with anyio.CancelScope() as self.trainer:
            while not self.finished:
                with anyio.CancelScope() as self.incarnation:
                    await self._train_incarnation(await self._start_incarnation())
                if not self.finished:
                    for rank in self.dice.sample(range(self.world), self.dice.randint(1, self.world)):
                        if self.hub.incarnations.is_current(self.number):
                            self.hub.peer_lost(f"trainer-{rank}")

    def _connect(self) -> None:
        """Connect all ranks. The hub puts all of them into one incarnation."""
        (self.number,) = {self.hub.incarnations.rank_arrived(rank) for rank in range(self.world)}

    async def _start_incarnation(self) -> Ranks:
        """Start an incarnation from its checkpoint."""
        self._connect()
        begun = [await self.hub.handle(p.IncarnationRequest(rank, 1, "")) for rank in range(self.world)]
        return Ranks(self.world, self.config.parallel.tensor, int(begun[0].checkpoint or 0))

    async def _train_incarnation(self, ranks: Ranks) -> None:
        """Train until the hub ends it: commit new steps when the schedule says so, and sometimes write a checkpoint."""
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
            self.laws.for_each_batch(self, ranks.shards)
            if ranks.version == self.version:
                self.commit_now = anyio.Event()
                await self.commit_now.wait()
            await ranks.commit(self.hub)
            self.version = self.hub.progress.version
            if ranks.may_save and self.dice.random() < 0.3:
                await self.hub.handle(p.SnapshotRequest())

    async def end(self, tasks: TaskGroup) -> None:
        """End the schedule: from here on every process does its work, and the run must come to its end."""
        if not self.nodes:
            await self.join(tasks)
        rounds, version = 0, self.version
        while rounds < ROUNDS:
            rounds, version = (rounds + 1, version) if version == self.version else (0, self.version)
            for node in list(self.nodes.values()):
                await node.deliver_cancelled()
                for engine in node.dead:
                    await node.set_version(engine, -1)
                for engine in node.behind:
                    await node.load(engine)
            if self.deaths_left and self.dice.random() < 0.3:
                self.deaths_left -= 1
                self.incarnation.cancel()
            if self.hub_deaths_left and self.dice.random() < 0.2:
                self.hub_deaths_left -= 1
                await self.hub_dies(tasks)
            await self.settle()
            self.laws.after_each_event(self)
            ended = {node: [self.ended(node, lease) for lease in node.ready] for node in self.nodes.values()}
            for node, results in ended.items():
                await node.deliver(*results)
            await self.settle()
            self.laws.after_each_event(self)
            if self.finished:
                break
            if not any(ended.values()):
                await anyio.sleep(KEPT_S)
                self.commit_now.set()
                await self.settle()


def run_one(seed: int, laws: Laws) -> Schedule:
    """Run one schedule and return it. Raises AssertionError with the command that repeats it if a law is broken."""

    async def run() -> Schedule:
        """Make the schedule on the virtual event loop and run it."""
        schedule = Schedule(seed, members_per_slice, laws)
        await schedule.run()
        return schedule

    members_per_slice = random.Random(f"slices of {seed}").choice([1, 8, 16, MEMBERS_PER_SLICE])
    try:
        return run_virtual(run)
    except BaseException as error:
        raise AssertionError(f"python -m tests.hub.test_schedules 1 {seed}") from error
