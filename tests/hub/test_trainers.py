"""Trainer ranks that die and start again while the run goes on, on the virtual clock.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import pytest

from flash.config import waits
from flash.config.tree import Config
from flash.errors import ContractError, FlashError, PeerLostError, RecordingError
from flash.hub import protocol as p
from flash.hub.context import RunEnd, RunProgress
from flash.hub.gate import Gate
from flash.hub.hub import Hub
from flash.hub.protocol import fetch_shard
from flash.hub.recovery import HubState, Persistence, RecoveredState, TrainerStart
from flash.hub.trainers import Incarnations
from flash.observe.observer import MemoryObserver
from flash.samples.journal import MemoryJournal, Replay
from flash.transport.frames import ReplyT, Request
from flash.transport.server import Peer
from flash.types import Batch, Canary, Published, Shard
from tests.hub.test_hub import make_config
from tests.samples.cases import KeptStates, trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


class FakeHistory:
    """A run history in memory: the batches that the observer got, and the checkpoints that were written."""

    def __init__(self, observer: MemoryObserver, kept: KeptStates) -> None:
        self._observer = observer
        self._kept = kept
        self.damaged: set[int] = set()
        """Steps whose batches cannot be read."""

    async def choose_start(self, version: int) -> TrainerStart:
        """Return the newest checkpoint; version 0 if there is none."""
        newest = max(self._kept.by_version, default=0)
        return TrainerStart(newest, f"step-{newest}")

    async def batch(self, step: int) -> Batch:
        """Return the batch of a step, after the time that a disk may take. Raises RecordingError for `damaged`."""
        await anyio.sleep(0.1)
        if step in self.damaged:
            raise RecordingError(f"step-{step}.bin is damaged")
        return Batch(step, step, self._observer.samples[step], [])

    def same_weights(self, one: Published, other: Published) -> bool:
        """Return True if two publications have the same `update_info`, which stands for the weights here."""
        return one.update_info == other.update_info


class Rank:
    """A connected trainer rank. Its weights are the list of the batches that it has trained, in order.

    Args:
        world: the hub to which the rank connects at once.
        number: number of the connection.
        index: number of the rank.
    """

    def __init__(self, world: World, number: int, index: int = 0) -> None:
        self.peer = Peer(number, f"trainer-{index}", "127.0.0.1:1")
        self._world = world
        self.index = index
        self.process = 1000 + number
        """Process id, different for each connection."""
        self.version = 0
        """Version that the rank holds."""
        self.shards: dict[int, Shard] = {}
        """Shard of each step that the rank has fetched."""
        world.gate.arrived(self.peer)

    async def call(self, request: Request[ReplyT], timeout: float = 60.0) -> ReplyT:
        """Send a request through the gate. `timeout` is there for `fetch_shard`, and not used."""
        reply: Any = await self._world.gate.handle(self.peer, request)
        return reply

    async def begin(self) -> p.IncarnationReply:
        """Ask for the starting point, and take its version. Returns the reply."""
        reply = await self.call(p.IncarnationRequest(self.index, self.process, f"host-{self.index}"))
        self.version = int((reply.checkpoint or "0").removeprefix("step-"))
        return reply

    async def publish(self, weights: bytes = b"") -> None:
        """Publish the version that the rank holds. `weights`: other weights than the usual ones of this version."""
        canary = Canary([1, 2], [-1.0 if not weights else -1.25])
        made = Published(self.version, "tcp", weights or str(self.version).encode(), canary)
        await self.call(p.PublishRequest(made))

    async def fetch(self) -> p.BatchReply:
        """Fetch the shard of the next step. Returns the reply, which has no shard if training ends."""
        reply = await fetch_shard(self, self.index, self.version, 60.0)
        if reply.shard is not None:
            self.shards[self.version] = reply.shard
        return reply

    async def commit(self) -> None:
        """Commit the step whose shard was fetched."""
        await self.call(p.Commit(self.version, {}))
        self.version += 1

    async def step(self) -> p.BatchReply:
        """Train one whole step and publish its version. Returns the reply with the shard."""
        reply = await self.fetch()
        await self.commit()
        await self.publish()
        return reply

    def die(self) -> None:
        """End the connection, as the death of the process does."""
        self._world.gate.left(self.peer)


class World:
    """A hub behind its gate, trainer ranks, and a node that runs every task it can get.

    Args:
        config: the configuration of the run; None: the one of `make_config`.
        history: True if the hub keeps the batches that restarted ranks train again.
    """

    def __init__(self, config: Config | None = None, *, history: bool = True) -> None:
        self.config = config or make_config()
        self.observer, self.kept, self.journal = MemoryObserver(), KeptStates(), MemoryJournal()
        self.history = FakeHistory(self.observer, self.kept)
        self.open(self.history if history else None, None, TrainerStart(0, ""))

    def open(
        self, history: FakeHistory | None, state: HubState | None, start: TrainerStart, incarnation: int = 0
    ) -> None:
        """Start a hub.

        Args:
            history: checkpoints and batches for restarted ranks; None if there are none.
            state: state of the previous hub; None in a new run.
            start: starting point of the first ranks.
            incarnation: number of the hub process.
        """
        self.hub = Hub(
            self.config,
            self.observer,
            now=anyio.current_time,
            recovered=RecoveredState(state, {0}, start, incarnation),
            persistence=Persistence(self.kept, self.journal, history),
        )
        self.gate = Gate(self.hub, self.config)
        self.reports = 0
        """Number of reports on the engine so far."""
        self.engine = -1
        """Version of the node's engine; -1 if it has none."""
        self.ranks = 10
        """Number of the last connection of a rank."""
        self.ended: list[RunEnd | FlashError] = []
        """Result or error of the run, once it has ended."""
        self.over = anyio.Event()
        """Set when the run has ended."""

    def reopen(self, incarnation: int = 0) -> None:
        """Kill the hub, and start the next one at the same version, with ranks that start from version 0."""
        replay = Replay(None, 0)
        for event in self.journal.events:
            replay.apply(event)
        buffer = replay.state(replay.reached)
        assert buffer is not None
        self.open(self.history, HubState(replay.reached, buffer, journal=0), TrainerStart(0, "step-0"), incarnation)

    def rank(self, index: int = 0) -> Rank:
        """Return rank `index` with a new connection."""
        self.ranks += 1
        return Rank(self, self.ranks, index)

    async def trained(self, steps: int) -> Rank:
        """Return the only rank of a new incarnation, after it has published and trained this many steps."""
        rank = self.rank()
        await rank.begin()
        await rank.publish()
        for _ in range(steps):
            await rank.step()
        return rank

    async def report(self, version: int) -> None:
        """Report that the engine has this version."""
        self.engine, self.reports = version, self.reports + 1
        status = p.EngineStatus(0, version, 0.0, 1.0, 0.0)
        await self.hub.handle(p.EngineReport(0, self.reports, [status], []))

    async def roll_out(self) -> None:
        """Run a node whose engine loads versions and makes samples in no time."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.load)
            tasks.start_soon(self.listen)
            while True:
                reply = await self.hub.handle(p.LeaseRequest(0, 64))
                ended = [p.EndedLease(one.lease_id, trajectory(one.task, self.engine)) for one in reply.leases]
                await self.hub.handle(p.DeliverRequest(0, ended, 64))
                if reply.done:
                    return

    async def until_it_fails(self) -> None:
        """Run the node until the run is over. An error of the run reaches the node, too, and is ignored here."""
        try:
            await self.roll_out()
        except* FlashError:
            pass

    async def load(self) -> None:
        """Let the engine load each new version, until the run is over."""
        while True:
            reply = await self.hub.handle(p.VersionRequest(0, self.engine))
            if reply.published is not None:
                await self.report(reply.published.version)
            if reply.done:
                return

    async def listen(self) -> None:
        """Ask for leases to cancel until the run is over. These requests are also the heartbeats of the node."""
        while not (await self.hub.handle(p.CancelRequest(0))).done:
            pass

    async def watch(self) -> None:
        """Run the hub, and keep its result or its error."""
        try:
            self.ended.append(await self.hub.run())
        except FlashError as error:
            self.ended.append(error)
        self.over.set()

    async def play(self, trainers: Callable[[], Awaitable[None]]) -> None:
        """Run the node and the hub beside `trainers`. After that the run has to end by itself."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.watch)
            tasks.start_soon(self.until_it_fails)
            await trainers()
            with anyio.move_on_after(5):
                await self.over.wait()
            tasks.cancel_scope.cancel()

    async def to_the_end(self, rank: Rank) -> None:
        """Let the only rank train all steps that are left, write a checkpoint, and leave."""
        while (await rank.fetch()).shard is not None:
            await rank.commit()
            await rank.publish()
        await rank.call(p.SnapshotRequest())
        await rank.call(p.Goodbye(0, []))


def tasks_of(shard: Shard) -> list[int]:
    """Return the numbers of the tasks of a shard's samples."""
    return [sample.trajectory.task.task_id for sample in shard.samples]


async def test_the_picture_of_the_cluster_has_the_host_of_each_rank() -> None:
    world = World()
    assert [rank.host for rank in world.hub.overview().ranks] == [""]

    async def trainers() -> None:
        rank = await world.trained(0)
        assert [rank.host for rank in world.hub.overview().ranks] == ["host-0"]
        rank.die()
        world.hub.interrupt()

    await world.play(trainers)


async def test_the_next_incarnation_trains_the_same_batches_and_nothing_is_booked_twice() -> None:
    world = World()

    async def trainers() -> None:
        first = world.rank()
        assert await first.begin() == p.IncarnationReply(1, "")
        await first.publish()
        for _ in range(2):
            await first.step()
        await first.fetch()
        first.die()
        await anyio.sleep(30)
        second = world.rank()
        assert await second.begin() == p.IncarnationReply(2, "step-0")
        await second.publish()
        assert not (await second.step()).may_save
        with pytest.raises(ContractError, match="but step 1 is trained"):
            await second.call(p.SnapshotRequest())
        assert world.hub.progress.published_version == 2
        assert not (await second.step()).may_save, "the batch of version 2 was handed out already"
        await second.fetch()
        for step in range(3):
            assert tasks_of(second.shards[step]) == tasks_of(first.shards[step])
        await second.commit()
        await second.publish()
        await world.to_the_end(second)

    await world.play(trainers)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert (end.reason, end.version) == ("finished", 4)
    assert [row["step"] for row in world.observer.steps] == [0, 1, 2, 3]
    assert [row["trainer_restarts"] for row in world.observer.steps] == [0, 0, 1, 0]
    assert end.ledger["issued"] == end.ledger["trained"] == 16
    lost, back = (note for note in world.observer.notes if "trainer rank" in note)
    assert lost == (
        "trainer rank 0 is gone without an error message: its process was killed, or crashed. The trainer ranks start "
        "again, and the engines go on meanwhile"
    )
    assert back == (
        "the trainer ranks are back at version 2 after 30 s, in which they have trained 2 steps again: the same "
        "weights as before"
    )


async def test_the_ranks_of_the_next_hub_train_the_same_batches_and_the_run_goes_on_where_it_was() -> None:
    world = World()

    async def before() -> None:
        first = ranks[0]
        await first.begin()
        await first.publish()
        for _ in range(2):
            await first.step()
        await first.fetch()

    async def after() -> None:
        rank = ranks[1]
        assert await rank.begin() == p.IncarnationReply(1, "step-0")
        await anyio.sleep(30)
        for step, keeps in enumerate((False, True)):
            await rank.publish()
            assert world.hub.progress.published_version == -1
            assert (await rank.fetch()).may_save == keeps
            assert tasks_of(rank.shards[step]) == tasks_of(ranks[0].shards[step])
            await rank.commit()
        await rank.publish()
        assert world.hub.progress.published_version == 2
        await rank.fetch()
        assert tasks_of(rank.shards[2]) == tasks_of(ranks[0].shards[2]), "what was formed is formed again"
        await world.to_the_end(rank)

    ranks = [world.rank()]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.watch)
        tasks.start_soon(world.until_it_fails)
        await before()
        tasks.cancel_scope.cancel()
    rows = list(world.observer.steps)
    world.reopen()
    ranks.append(world.rank())
    await world.play(after)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert (end.reason, end.version) == ("finished", 4)
    assert world.observer.steps[:2] == rows
    assert [row["step"] for row in world.observer.steps] == [0, 1, 2, 3]
    assert [row["trainer_restarts"] for row in world.observer.steps] == [0, 0, 0, 0]
    assert end.ledger["issued"] == end.ledger["trained"] == 16
    assert world.observer.notes == [
        "the trainer ranks are back at version 2 after 30 s, in which they have trained 2 steps again"
    ]


async def test_an_interrupt_waits_for_no_rank_that_the_next_hub_has_not_seen() -> None:
    world = World()

    async def trainers() -> None:
        await world.trained(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.watch)
        tasks.start_soon(world.until_it_fails)
        await trainers()
        tasks.cancel_scope.cancel()
    world.reopen()

    async def nobody() -> None:
        await anyio.sleep(1)
        world.hub.interrupt()

    await world.play(nobody)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert (end.reason, end.version) == ("interrupted", 1)


async def test_a_death_between_commit_and_publication_a_second_one_on_the_way_back_and_one_after_goodbye() -> None:
    world = World()

    async def trainers() -> None:
        first = await world.trained(1)
        await first.call(p.SnapshotRequest())
        await first.fetch()
        await first.commit()
        first.die()
        assert world.hub.progress.published_version == 1
        second = world.rank()
        assert (await second.begin()).checkpoint == "step-1"
        await second.publish()
        await second.fetch()
        second.die()
        third = world.rank()
        assert await third.begin() == p.IncarnationReply(3, "step-1")
        await third.publish()
        assert (await third.step()).may_save, "no batch of version 2 is out"
        assert world.hub.progress.published_version == 2
        await world.to_the_end(third)
        third.die()

    await world.play(trainers)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert [row["step"] for row in world.observer.steps] == [0, 1, 2, 3]
    assert world.observer.notes[-1].startswith("the trainer ranks are back at version 2 after ")
    assert world.observer.notes[-1].endswith("in which they have trained 1 step again")


async def test_what_a_lost_incarnation_still_says_is_refused_and_what_it_had_begun_is_whole_or_not_done() -> None:
    config = make_config()
    config = msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, trainer_ranks=2))
    world = World(config)
    refused: list[str] = []
    new: list[Rank] = []

    async def until_over(rank: Rank, request: Request[Any]) -> None:
        try:
            await rank.call(request)
        except PeerLostError as error:
            refused.append(str(error))

    async def trainers() -> None:
        ranks = [world.rank(0), world.rank(1)]
        for rank in ranks:
            await rank.begin()
        await ranks[0].publish()
        for rank in ranks:
            await rank.fetch()
        async with anyio.create_task_group() as group:
            for request in (p.RankHeartbeat(0), p.Fatal("CollectiveError", "trainer rank 0: a collective failed")):
                group.start_soon(until_over, ranks[0], request)
            await anyio.sleep(0.1)
            ranks[1].die()
            await anyio.sleep(0.1)
            assert len(refused) == 1, "the watch ended; the last word is never answered"
            for request in (p.Commit(0, {}), p.PublishRequest(Published(0, "tcp", b"", Canary([], []), 0))):
                await until_over(ranks[0], request)
            new.extend([world.rank(0), world.rank(1)])
            assert {(await rank.begin()).number for rank in new} == {2}
            ranks[0].die()
            await anyio.sleep(2 * waits.ECHO_S)
            group.cancel_scope.cancel()
        assert len(refused) == 3
        assert not world.ended
        await new[0].publish()
        for rank in new:
            await rank.fetch()
        await new[0].commit()

    await world.play(trainers)
    assert not world.ended
    assert [row["step"] for row in world.observer.steps] == [0]
    assert [note for note in world.observer.notes if "gone" in note] != []


async def test_other_weights_than_before_are_told_and_the_run_goes_on() -> None:
    world = World()

    async def trainers() -> None:
        first = await world.trained(1)
        first.die()
        second = await world.trained(0)
        await second.fetch()
        await second.commit()
        await second.publish(b"other")
        await world.to_the_end(second)

    await world.play(trainers)
    assert isinstance(world.ended[0], RunEnd)
    assert "log-probs of the canary differ by up to 0.25, and the run goes on from here" in world.observer.notes[-1]


async def test_no_engine_is_given_a_version_whose_publisher_is_gone() -> None:
    world = World()
    rank = world.rank()
    await rank.begin()
    await rank.publish()
    rank.die()
    late: list[p.VersionReply] = []

    async def ask() -> None:
        while not late or late[-1].published is None:
            late.append(await world.hub.handle(p.VersionRequest(0, -1)))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.sleep(100)
        assert {reply.published for reply in late} == {None}
        assert (await world.hub.handle(p.LoadFailed(0, 1))).gone
        await world.trained(0)
    assert late[-1].published is not None
    assert late[-1].published.incarnation == 2
    assert not (await world.hub.handle(p.LoadFailed(0, 2))).gone
    assert (await world.hub.handle(p.LoadFailed(0, 1))).gone


async def test_where_they_cannot_come_back_the_run_ends_and_says_why() -> None:
    whole = msgspec.to_builtins(make_config()) | {"checkpoint": {"batches": "none"}}
    world = World(msgspec.convert(whole, Config))

    async def trainers() -> None:
        rank = world.rank()
        await rank.begin()
        rank.die()

    await world.play(trainers)
    (error,) = world.ended
    assert isinstance(error, PeerLostError)
    why = 'All processes start again with it, as checkpoint.batches = "none" leaves nothing to train again'
    assert why in str(error)


async def test_a_damaged_batch_ends_the_run_with_an_error_that_a_restart_can_mend() -> None:
    world = World()
    world.history.damaged = {1}

    async def trainers() -> None:
        first = await world.trained(2)
        first.die()
        second = await world.trained(1)
        with pytest.raises(PeerLostError, match=r"step-1\.bin is damaged"):
            await second.fetch()

    await world.play(trainers)
    (error,) = world.ended
    assert not isinstance(error, RunEnd)
    assert not error.fatal
    assert "cannot come back to version 2 by themselves: step-1.bin is damaged" in str(error)


async def test_an_interrupt_waits_for_no_rank_that_is_away() -> None:
    world = World()

    async def trainers() -> None:
        rank = await world.trained(1)
        rank.die()
        world.hub.interrupt()

    await world.play(trainers)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert (end.reason, end.version) == ("interrupted", 1)


async def test_an_interrupt_on_the_way_back_ends_the_ranks_without_a_checkpoint() -> None:
    world = World()

    async def trainers() -> None:
        first = await world.trained(2)
        first.die()
        second = await world.trained(0)
        await second.fetch()
        world.hub.interrupt()
        await second.commit()
        await second.publish()
        assert await second.fetch() == p.BatchReply(None, may_save=False)
        await second.call(p.Goodbye(0, []))

    await world.play(trainers)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert (end.reason, end.version) == ("interrupted", 2)


async def test_ranks_that_stay_away_end_the_run_by_its_deadline() -> None:
    world = World()

    async def trainers() -> None:
        rank = await world.trained(1)
        rank.die()
        await anyio.sleep(world.config.deadlines.rendezvous + 1)

    await world.play(trainers)
    (error,) = world.ended
    assert "the trainer ranks to start again, at version 1" in str(error)


RANKS = 3
"""Number of ranks of a `Run`."""
STEPS = 12
"""Number of steps of a `Run`."""


class Run:
    """A run as `Incarnations` sees it: ranks die at random moments, and so does the hub, which then goes on."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.progress = RunProgress(0)
        self.incarnations = Incarnations(RANKS, self.progress, 0)
        self.hubs = 1
        """Number of hub processes so far."""
        self.booked: list[int] = []
        """Steps that were counted, in order."""
        self.spread: list[int] = []
        """Versions that engines were given, in order."""
        self.trained: dict[tuple[int, int], list[int]] = {}
        """Steps that each incarnation of each hub has trained, in order."""
        self.checkpoints = [0]
        """Versions with a checkpoint, in order."""
        self.late: list[int] = []
        """Incarnations that are over and whose ranks may still send something."""

    def begin(self) -> int:
        """Let all ranks of an incarnation connect and load a checkpoint. Returns its number."""
        numbers = {self.incarnations.rank_arrived(rank) for rank in self.dice.sample(range(RANKS), RANKS)}
        (number,) = numbers
        assert self.incarnations.present == list(range(RANKS))
        if number > 1:
            self.incarnations.start_from(self.checkpoints[-1])
        self.trained[self.hubs, number] = []
        self.publish(number)
        return number

    def publish(self, incarnation: int) -> None:
        """Publish the version of the ranks, if their incarnation is not over."""
        if self.incarnations.is_current(incarnation) and self.incarnations.publish():
            self.spread.append(self.progress.trainer_version)

    def commit(self, incarnation: int) -> None:
        """Commit the step of the ranks, if their incarnation is not over."""
        if not self.incarnations.is_current(incarnation):
            return
        step = self.progress.trainer_version
        self.trained[self.hubs, incarnation].append(step)
        if self.incarnations.commit():
            self.booked.append(step)
            self.progress.version += 1

    def die(self, incarnation: int) -> None:
        """Kill one rank, or several at once; the hub learns of each."""
        for _ in self.dice.sample(range(RANKS), self.dice.randint(1, RANKS)):
            if self.incarnations.is_current(incarnation):
                assert self.incarnations.ranks_lost([self.dice.randrange(RANKS)])
        self.late.append(incarnation)

    def hub_dies(self) -> None:
        """Kill the hub: all connections end, and the next hub knows the run's version and the checkpoint."""
        self.late.clear()
        self.hubs += 1
        self.progress = RunProgress(self.progress.version)
        self.incarnations = Incarnations(RANKS, self.progress, self.checkpoints[-1])
        assert self.incarnations.recovering == self.progress.trainers_behind

    def say_late(self) -> None:
        """Send requests of ranks whose incarnation is over, which must have no effect."""
        for incarnation in self.late:
            self.commit(incarnation)
            self.publish(incarnation)

    def until_it_ends(self) -> None:
        """Let random events happen until the run has trained all steps."""
        incarnation = self.begin()
        while self.progress.version < STEPS:
            event = self.dice.random()
            if event < 0.2:
                self.die(incarnation)
                self.say_late()
                incarnation = self.begin()
            elif event < 0.25:
                self.hub_dies()
                incarnation = self.begin()
            elif event < 0.3:
                self.say_late()
            else:
                self.commit(incarnation)
                if self.dice.random() < 0.9:  # else it dies between the two
                    self.publish(incarnation)
                else:
                    self.die(incarnation)
                    incarnation = self.begin()
                if self.progress.trainer_version == self.progress.version and self.dice.random() < 0.2:
                    self.checkpoints.append(self.progress.version)


def test_each_step_is_booked_once_and_engines_never_go_back() -> None:
    for seed in range(100):
        run = Run(seed)
        run.until_it_ends()
        assert run.booked == list(range(STEPS))
        assert run.spread == sorted(run.spread)
        for number, steps in run.trained.items():
            assert not steps or steps == list(range(steps[0], steps[0] + len(steps))), f"hub and incarnation {number}"


def test_the_ranks_of_a_lost_incarnation_are_not_heard_before_the_next_one_has_begun_either() -> None:
    incarnations = Incarnations(2, RunProgress(5), 5)
    assert [incarnations.rank_arrived(0), incarnations.rank_arrived(1)] == [1, 1]
    assert incarnations.ranks_lost([1])
    assert not incarnations.is_current(1)
    assert incarnations.recovering
    assert incarnations.rank_arrived(0) == 2
    assert incarnations.is_current(2)
    assert not incarnations.is_current(1)
    assert incarnations.present == [0]


async def test_a_rank_that_hangs_after_another_has_left_holds_the_end_of_the_run_until_it_counts_as_silent() -> None:
    config = make_config()
    two = msgspec.structs.replace(config.cluster, trainer_ranks=2)
    short = msgspec.structs.replace(config.deadlines, request=12.0)
    world = World(msgspec.structs.replace(config, cluster=two, deadlines=short))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.watch)
        await anyio.sleep(1.0)
        for rank in range(2):
            world.hub.incarnations.rank_arrived(rank)
            tasks.start_soon(world.hub.handle, p.RankHeartbeat(rank))
        await anyio.sleep(waits.BEAT_S)
        tasks.start_soon(world.hub.handle, p.Interrupt("signal"))
        await world.hub.handle(p.Goodbye(0, []))
        left = anyio.current_time()
        await world.over.wait()
        assert anyio.current_time() - left <= short.request + waits.SECOND_LOOK_S < short.shutdown
        tasks.cancel_scope.cancel()
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert end.unfinished == ""


def test_after_the_first_goodbye_nothing_is_lost_with_a_rank() -> None:
    incarnations = Incarnations(2, RunProgress(5), 5)
    incarnations.rank_arrived(0)
    incarnations.rank_arrived(1)
    incarnations.rank_left(1)
    assert not incarnations.ranks_lost([0])
    assert incarnations.finished
    assert not incarnations.recovering


def test_an_incarnation_cannot_begin_beyond_the_run() -> None:
    incarnations = Incarnations(1, RunProgress(5), 5)
    incarnations.end()
    incarnations.rank_arrived(0)
    with pytest.raises(ContractError, match="start from version 6 of a run that is at 5"):
        incarnations.start_from(6)


@pytest.mark.parametrize("beat", [4.693, 34.529, 1e6 + 0.1])
def test_a_rank_is_silent_at_the_moment_until_which_the_watch_sleeps(beat: float) -> None:
    incarnations = Incarnations(1, RunProgress(0), 0)
    incarnations.ranks[0].heartbeat = beat
    assert list(incarnations.silent(12.0, beat + 12.0)) == [0]  # 4.693 + 12.0 - 4.693 < 12.0
