"""The Hub: the only stateful place of a run. It wires tasks, buffer, batching and evaluation, and speaks the protocol.

Lifecycle: trainers publish the first version → first evaluation → leases and batches until the last step or an
interrupt → trainer ranks say goodbye → last evaluation → nodes are told that there is no more work.
The hub owns no task: its methods run in the tasks of whoever calls them, and `run` watches deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Literal

import anyio
import msgspec

from flash.config.tree import Config
from flash.errors import ContractError, FlashError, PeerLostError, error_of
from flash.hub import protocol as p
from flash.hub.batching import deal
from flash.hub.buffer import BufferState, SampleBuffer
from flash.hub.contract import AgeContract
from flash.hub.evaluation import Evaluations
from flash.hub.leases import Holders
from flash.hub.metrics import StepMetrics
from flash.hub.rules import buffer_rules
from flash.hub.tasks import TaskSource
from flash.observe.observer import Observer
from flash.transport.request import ReplyT, Request, answered
from flash.types import Activity, Failure, Lease, Published, Shard, Trajectory
from flash.waiting import deadline

LEASES_AT_ONCE = 256
"""Leases of one reply: thousands would hold the loop for a quarter of a second, and the node asks again at once."""


class HubState(msgspec.Struct):
    """What a checkpoint keeps of the hub."""

    version: int
    buffer: BufferState


class RunEnd(msgspec.Struct, frozen=True):
    """How the run ended."""

    reason: Literal["finished", "interrupted"]
    version: int
    ledger: dict[str, int]


class Hub:
    """Serves nodes and trainer ranks. `now` gives Unix seconds on the loop's clock."""

    def __init__(
        self,
        config: Config,
        observer: Observer,
        *,
        now: Callable[[], float],
        state: bytes | None = None,
        kind_of: Callable[[int], str] = lambda seed: "",
    ) -> None:
        restored = msgspec.msgpack.decode(state, type=HubState) if state is not None else None
        self._config = config
        self._observer = observer
        self._now = now
        self._version = restored.version if restored else 0
        rollout = config.rollout
        self._contract = AgeContract(
            config.train.async_ratio,
            config.train.batch_size,
            rollout.group_size,
            config.run.steps,
            rollout.extra_groups,
        )
        cursor = restored.buffer.cursor if restored else None
        members = rollout.group_size + rollout.extra_per_group
        lease_ids = count()
        self.buffer = SampleBuffer(
            self._contract,
            TaskSource(config.run.seed, members, kind_of, cursor),
            buffer_rules(rollout),
            step=self._version,
            state=restored.buffer if restored else None,
            lease_ids=lease_ids,
        )
        self._evaluations = Evaluations(
            config.eval, rollout.retries, self._version, config.run.steps, kind_of, lease_ids
        )
        self._published: Published | None = None
        self._engines: dict[int, dict[int, p.EngineStatus]] = {}
        self._holders = Holders()
        self._shards: list[Shard] = []
        self._fetched: set[int] = set()
        self._evaluating_since: float | None = None
        self._gone: set[int] = set()
        self._stopping: Literal["finished", "interrupted"] | None = None
        self._done = False
        self._error: FlashError | None = None
        self._changed = anyio.Event()
        self._progress = 0
        self._metrics = StepMetrics(self.buffer.ledger.generated_tokens)

    @staticmethod
    def version_of(state: bytes) -> int:
        """The policy version a stored state belongs to."""
        return msgspec.msgpack.decode(state, type=HubState).version

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait, under the caller's deadline, until a change makes the condition true or the run has failed."""
        while not condition():
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    def fail(self, error: FlashError) -> None:
        """End the run with this error; the first one wins."""
        self._error = self._error or error
        self._notify()

    def interrupt(self) -> None:
        """Stop after the running step, leaving a checkpoint."""
        self._stopping = self._stopping or "interrupted"
        self._notify()

    async def run(self) -> RunEnd:
        """Watch the run from the first version to the last goodbye.

        Waits for progress of the trainers, under deadlines.step while they hold a batch and deadlines.batch while they
        wait for one. Raises the error that ended the run.
        """
        deadlines = self._config.deadlines
        world = self._config.trainer_world_size
        while len(self._gone) < world:
            seen, training = self._progress, bool(self._shards)
            seconds = deadlines.step if training else deadlines.batch
            if self._stopping == "interrupted":
                seconds = deadlines.shutdown
            elif self._published is None:
                seconds = deadlines.rendezvous
            look_at = "the trainer ranks" if training else "engines and environments"
            with deadline(seconds, partial(self._stalled, training), look_at):
                stopping = self._stopping
                await self._until(
                    lambda seen=seen, stopping=stopping: (
                        self._progress != seen or self._stopping != stopping or len(self._gone) == world
                    )
                )
        if self._stopping != "interrupted":
            with deadline(deadlines.step, "the last evaluation", "the engines and eval.problems"):
                await self._until(lambda: self._evaluations.done)
        self._done = True
        self._notify()
        self.buffer.check()
        return RunEnd(self._stopping or "finished", self._version, self.buffer.ledger.totals(self.buffer.in_flight))

    async def all_nodes_left(self) -> None:
        """Wait, under the caller's deadline, until every node has taken note of the end and closed its connection."""
        await self._until(lambda: not self._engines)

    def _stalled(self, training: bool) -> str:
        """What the run waits for."""
        if training:
            return f"the trainer ranks to finish step {self._version}"
        where = f"{self.buffer.ready_groups} of {self._contract.groups_per_batch} groups are complete"
        return f"a batch for step {self._version} ({where})"

    # -- requests ----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request[ReplyT]) -> ReplyT:
        """Answer one request of the protocol."""
        return answered(request, await self._answer(request))

    async def _answer(self, request: msgspec.Struct) -> msgspec.Struct:
        match request:
            case p.LeaseRequest():
                return await self._lease(request)
            case p.DeliverRequest():
                return self._deliver(request)
            case p.CancelRequest():
                return await self._next_cancels(request)
            case p.VersionRequest():
                return await self._next_version(request)
            case p.EngineReport():
                return self._engine_report(request)
            case p.BatchRequest():
                return await self._batch(request)
            case p.Commit():
                return self._commit(request)
            case p.PublishRequest():
                return await self._publish(request.published)
            case p.SnapshotRequest():
                state = HubState(self._version, self.buffer.snapshot())
                return p.SnapshotReply(msgspec.msgpack.encode(state))
            case p.Goodbye():
                self._observer.activities(request.activities)
                await self._until(lambda: self._stopping == "interrupted" or self._all_have_newest())
                self._gone.add(request.rank)
            case p.Interrupt():
                self._observer.note(request.reason)
                self.interrupt()
            case p.Fatal():
                self.fail(error_of(request.error, request.message) or FlashError(request.message))
                await anyio.sleep_forever()  # a peer that left now would have torchrun end us before we say why
            case _:
                raise ContractError(f"the hub does not serve a {type(request).__name__}")
        self._notify()
        return p.Ack()

    def peer_lost(self, name: str) -> None:
        """A connection ended. A node's leases go back; a trainer rank that did not say goodbye ends the run."""
        kind, _, number = name.partition("-")
        if kind == "trainer" and int(number) not in self._gone:
            self.fail(PeerLostError(f"trainer rank {number} is gone; its own output says why"))
        if kind == "node":
            self._engines.pop(int(number), None)
            for lease in self._holders.lost(int(number)):
                owner = self._evaluations if lease.task.split == "eval" else self.buffer
                owner.revoke(lease.lease_id)
        self._notify()

    # -- rollout nodes -----------------------------------------------------------------------------------------------

    async def _lease(self, request: p.LeaseRequest) -> p.LeaseReply:
        """Hand out tasks. Waits for room under the age contract, at most one long poll."""
        leases: list[Lease] = []

        def granted() -> bool:
            leases.extend(self._grant(request.node, request.capacity))
            return bool(leases) or self._done

        with anyio.move_on_after(p.LONG_POLL_S):
            await self._until(granted)
        return p.LeaseReply(leases, done=self._done)

    def _grant(self, node: int, capacity: int) -> list[Lease]:
        versions = [engine.version for engine in self._engines.get(node, {}).values()]
        leases: list[Lease] = []
        while len(leases) < min(capacity, LEASES_AT_ONCE) and (granted := self._next_leases(node, versions)):
            leases += granted
        self._holders.lend(node, leases)
        return leases

    def _next_leases(self, node: int, versions: list[int]) -> list[Lease]:
        """The next task for a node, or the next whole group."""
        if (lease := self._evaluations.lease(versions)) is not None:
            self._evaluating_since = self._now() if self._evaluating_since is None else self._evaluating_since
            return [lease]
        if max(versions, default=-1) < 0 or self._stopping is not None or self._evaluations.measuring_start:
            return []
        try:
            lease = self.buffer.lease(versions, node, nodes=self._engines.keys())
        except FlashError as error:
            self.fail(error)
            return []
        if lease is None:
            return []
        self._metrics.began(self._now())
        if self._config.rollout.replicate_prompts:
            return [lease]
        return [lease, *self.buffer.lease_rest(lease, versions)]

    def _deliver(self, request: p.DeliverRequest) -> p.Ack:
        for ended in request.ended:
            self._holders.ended(ended.lease_id)
            self._take(request.node, ended.lease_id, ended.result)
        self._spread_word()
        self._notify()
        return p.Ack()

    def _take(self, node: int, lease_id: int, result: Trajectory | Failure) -> None:
        if result.task.split == "eval":
            if (row := self._evaluations.finish(lease_id, result, node)) is not None:
                now = self._now()
                self._observer.evaluation(row | {"time": now})
                if self._evaluating_since is not None:
                    self._observer.activities([Activity("evaluation", "evaluate", self._evaluating_since, now)])
                self._evaluating_since = None
            return
        try:
            self.buffer.finish(lease_id, result, node)
        except FlashError as error:
            self.fail(error)

    def _spread_word(self) -> None:
        """Keep what the buffer has withdrawn for the nodes' cancel requests, and pass its notes on."""
        self._holders.withdraw(self.buffer.leases.withdrawn)
        self.buffer.leases.withdrawn.clear()
        for note in self.buffer.notes:
            self._observer.note(note)
        self.buffer.notes.clear()

    async def _next_cancels(self, request: p.CancelRequest) -> p.CancelReply:
        with anyio.move_on_after(p.LONG_POLL_S):
            await self._until(lambda: self._done or self._holders.has_cancels(request.node))
        return p.CancelReply(self._holders.take_cancels(request.node), done=self._done)

    async def _next_version(self, request: p.VersionRequest) -> p.VersionReply:
        def newer() -> bool:
            return self._done or (self._published is not None and self._published.version > request.after)

        with anyio.move_on_after(p.LONG_POLL_S):
            await self._until(newer)
        published = self._published
        if published is not None and published.version <= request.after:
            published = None
        return p.VersionReply(published, done=self._done)

    def _engine_report(self, request: p.EngineReport) -> p.Ack:
        self._engines[request.node] = {engine.index: engine for engine in request.engines}
        self._metrics.canaries(request.engines)
        self._observer.activities(request.activities)
        self._notify()
        return p.Ack()

    # -- trainer ranks -----------------------------------------------------------------------------------------------

    async def _publish(self, published: Published) -> p.Ack:
        """Announce a version once every engine has left the ones before the newest: engines are at most one behind."""
        await self._until(self._all_have_newest)
        self._published = published
        self._progress += 1
        self._evaluations.published(published.version)
        self._notify()
        return p.Ack()

    def _all_have_newest(self) -> bool:
        """Whether no engine needs the trainers' weights any more."""
        newest = self._published.version if self._published is not None else -1
        return all(engine.version >= newest for engines in self._engines.values() for engine in engines.values())

    async def _batch(self, request: p.BatchRequest) -> p.BatchReply:
        """Give a rank its shard. Waits for enough complete groups; all ranks of a step get the same answer."""
        if request.step != self._version:
            raise ContractError(f"rank {request.rank} asks for step {request.step}; the run is at {self._version}")
        self._observer.activities(request.activities)
        await self._until(self._form_batch)
        if not self._shards:
            return p.BatchReply(None, finished=self._stopping == "finished")
        self._fetched.add(request.rank)
        return p.BatchReply(self._shards[request.rank])

    def _form_batch(self) -> bool:
        if self._shards:
            return True
        if self._version >= self._config.run.steps and self._stopping is None:
            self._stopping = "finished"
            self.buffer.close()
            self._spread_word()
        if self._stopping is not None:
            return True
        groups = self.buffer.take(self._version)
        if groups is None:
            return False
        self._spread_word()
        min_version = self._contract.min_token_version(self._version)
        self._shards = deal(groups, self._version, min_version, self._config.trainer_world_size)
        self._observer.trajectories(self._version, [t for group in groups for t in group.trajectories()])
        self._progress += 1
        self._notify()
        return True

    def _commit(self, request: p.Commit) -> p.Ack:
        if request.step != self._version or len(self._fetched) != self._config.trainer_world_size:
            raise ContractError(f"step {request.step} was committed while the run is at {self._version}")
        trained = [sample.trajectory for shard in self._shards for sample in shard.samples]
        self._shards, self._fetched = [], set()
        self.buffer.commit(self._version)
        self._version += 1
        self._progress += 1
        engines = [engine for node in self._engines.values() for engine in node.values()]
        self._observer.step(
            self._metrics.row(self._version, trained, request.metrics, self.buffer, engines, self._now())
        )
        self._notify()
        return p.Ack()
