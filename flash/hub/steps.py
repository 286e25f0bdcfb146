"""Steps: what the hub does for the trainer ranks. A batch is formed, dealt to their data shards and
committed. Ranks that train the same samples each fetch the one that is theirs together.

Versions are announced, and between two steps the state is handed out for a checkpoint. Ranks that are behind the run,
after a restart, are given the batches of that time; nothing of these steps is booked again. It owns no task: what must
not be left half done goes on when the rank that has asked for it is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import msgspec

from flash.errors import ContractError, FlashError
from flash.hub import protocol as p
from flash.hub.context import HubContext, HubPart
from flash.hub.metrics import Branches
from flash.hub.nodes import WeightVersions
from flash.hub.recovery import HubState
from flash.hub.trainers import TrainerRanks
from flash.hub.work import NodeWork
from flash.samples.batches import cut, deal, gather, mean_metrics, sample_metrics
from flash.transport.frames import encoded_pieces
from flash.types import Batch, Published, Shard
from flash.waiting import free_in_slices, run_in_slices


class _Again(msgspec.Struct):
    """The step that an incarnation trains again, read and dealt once for all data shards."""

    incarnation: int
    step: int
    keeps: bool
    """Whether a checkpoint may follow it; the first rank that asks settles it."""
    shards: list[list[Shard]] = []
    """In parts; empty while they are read."""


class TrainingSteps(HubPart):
    """See the module's docstring.

    Args:
        parts: of the hub.
        work: of the nodes, who are given what a step makes room for.
        versions: are announced there.
        trainers: the ranks, and which of their incarnations counts.
        part_bytes: of a shard, what one message may hold.
    """

    def __init__(
        self, parts: HubContext, work: NodeWork, versions: WeightVersions, trainers: TrainerRanks, part_bytes: int
    ) -> None:
        super().__init__(parts)
        self._work = work
        self._versions = versions
        self._trainers = trainers
        self._incarnations = trainers.incarnations
        self._part_bytes = part_bytes
        self._kept_waiting = 0
        """Publications that wait for engines."""
        self._shards: list[list[Shard]] = []
        """In parts."""
        self._wanted = self._saves = False
        """Whether a checkpoint is wanted after the next batch, and after this one."""
        self._asking = 0
        """Ranks that wait for a batch."""
        self._last_reply: p.BatchReply | None = None
        self._again: _Again | None = None

    @property
    def training(self) -> bool:
        """Whether the ranks have a batch."""
        return self._progress.batch == "dealt"

    @property
    def asked(self) -> bool:
        """Whether a rank waits for a batch."""
        return self._asking > 0

    @property
    def waits_for_engines(self) -> bool:
        """Whether the ranks are kept until engines have loaded what was published."""
        return self._kept_waiting > 0

    # -- batches -----------------------------------------------------------------------------------------------------

    async def batch(self, request: p.BatchRequest) -> p.BatchReply:
        """Give a rank a part of its shard. Waits for enough complete groups; all ranks get the same answer."""
        if request.step != self._progress.held:
            held = self._progress.held
            raise ContractError(f"rank {request.rank} asks for step {request.step}; the ranks hold {held}")
        self._observer.activities(request.activities)
        incarnation = self._incarnations.number
        if self._progress.behind:
            return await self._trained_before(request, incarnation)
        await self._until_formed()
        if not self.training:
            # The same to all ranks, whatever comes between their questions: they export the model together.
            self._last_reply = self._last_reply or p.BatchReply(None, finished=self._progress.stopping == "finished")
            return self._last_reply
        return self._part(self._shards, request, incarnation, keeps=True, saves=self._saves)

    async def _until_formed(self) -> None:
        """Wait until there is a batch, or the run is stopping; the first to see that one can be formed forms it."""
        self._asking += 1
        self._progress.send("run")
        try:
            while not self.training and (self._progress.stopping is None or self._progress.batch == "forming"):
                await self._progress.until("batches", self._work.batch_at_hand)
                if not self.training and self._progress.stopping is None:
                    with anyio.CancelScope(shield=True):
                        await self._form_batch()
        finally:
            self._asking -= 1
            self._progress.send("run")

    async def _trained_before(self, request: p.BatchRequest, incarnation: int) -> p.BatchReply:
        """A part of what an incarnation before this one has trained at the same step; none when it is too late."""
        assert self._past is not None, "without a past no incarnation is behind"
        progress, again = self._progress, self._again
        if again is None or (again.incarnation, again.step) != (incarnation, request.step):
            if progress.stopping == "interrupted":
                return p.BatchReply(None, keeps=False)
            # Afterwards they hold the run's version, and its state is still as it was between two steps.
            keeps = request.step + 1 == progress.version and progress.batch == "none"
            again = self._again = _Again(incarnation, request.step, keeps)
            try:
                again.shards = await self._dealt(await self._past.batch(request.step))
            except FlashError as error:
                raise self._trainers.cannot_come_back(error) from error
            progress.send("batches")
        await progress.until("batches", lambda: bool(again.shards))
        return self._part(again.shards, request, incarnation, keeps=again.keeps)

    async def _dealt(self, batch: Batch) -> list[list[Shard]]:
        """Its shards, in parts."""
        shards = await run_in_slices(deal(batch, self._config.data_shards, self._config.train.minibatches))
        return [await run_in_slices(cut(shard, self._part_bytes)) for shard in shards]

    def _part(
        self, shards: list[list[Shard]], request: p.BatchRequest, incarnation: int, *, keeps: bool, saves: bool = False
    ) -> p.BatchReply:
        parts = shards[self._config.parallel.data_shard(request.rank)]
        if not 0 <= request.part < len(parts):
            raise ContractError(f"rank {request.rank} asks for part {request.part} of the {len(parts)} of its shard")
        left = len(parts) - 1 - request.part
        if left == 0 and self._incarnations.counts(incarnation):  # else the rank is gone by now
            self._incarnations.ranks[request.rank].fetched = True
        return p.BatchReply(parts[request.part], keeps=keeps, left=left, saves=saves)

    async def _form_batch(self) -> None:
        """Take a batch and deal it, or close after the last one; one rank does it for all."""
        self._progress.batch = "forming"
        try:
            if self._progress.version >= self._config.run.steps:
                self._progress.stopping = "finished"
                self._progress.send("run")
                self._buffer.close()
                await self._work.tidy()
                return
            groups = self._buffer.next_batch(self._progress.version)
            while groups is None and self._samples.backlog:
                await self._work.tidy()
                groups = self._buffer.next_batch(self._progress.version)
            if groups is None:
                return
            self._work.spread_word()
            self._work.offer()
            min_version = self._contract.min_token_version(self._progress.version)
            batch = gather(groups, self._progress.version, min_version)
            shards = await self._dealt(batch)
            await self._journal.written()  # ranks that start again are given the same batch
            self._shards = shards
            self._progress.batch = "dealt"
            self._wanted, self._saves = False, self._wanted
            self._observer.batch(batch)
            self._progress.stages_ended += 1
        finally:
            if not self.training:
                self._progress.batch = "none"
            self._progress.send("run", "batches")

    async def commit(self, request: p.Commit) -> p.Ack:
        """The ranks have trained a step: it is booked, unless an incarnation before this one has booked it."""
        ranks, held = self._incarnations, self._progress.held
        if request.step != held or not all(rank.fetched for rank in ranks.ranks):
            raise ContractError(f"step {request.step} was committed while the ranks hold {held}")
        if ranks.commits():
            with anyio.CancelScope(shield=True):
                await self._book(request)
        self._progress.stages_ended += 1
        self._progress.send("run")
        return p.Ack()

    async def _book(self, request: p.Commit) -> None:
        # Emptied in slices below: to free them all at once would take as long as all the rest.
        entries = list(self._shards[0][0].batch)
        dealt = [list(part.samples) for parts in self._shards for part in parts]
        self._shards, self._progress.batch = [], "none"
        self._buffer.commit(self._progress.version)
        self._progress.version += 1
        await self._work.tidy()
        branches = Branches()
        trained = branches.count(sample.trajectory for samples in dealt for sample in samples)
        measures = await run_in_slices(mean_metrics(map(sample_metrics, trained)))
        await run_in_slices(free_in_slices(entries))
        for samples in dealt:
            await run_in_slices(free_in_slices(samples))
        engines, seen = list(self._fleet.engines()), branches.metrics() | measures
        self._observer.trained(request.step, request.seen)
        wish = self._observer.step(
            self._metrics.row(self._progress.version, seen, request.metrics, self._samples, engines, self._now())
        )
        if wish == "stop":
            self._progress.interrupt()
        self._wanted = wish is not None
        await self._journal.written()

    # -- versions and checkpoints ------------------------------------------------------------------------------------

    async def publish(self, published: Published) -> p.Ack:
        """Announce a version once every engine has left the ones before the newest: engines are at most one behind.

        Of ranks that are behind the run no engine is to have anything. Nobody can load any more what was published by
        ranks that are gone.
        """
        progress = self._progress
        if self._incarnations.publishes():
            if progress.reachable:
                await self._until_engines(lambda: self._fleet.up_to_date(progress.newest))
            self._again = None
            self._trainers.returned(published)
            news = progress.published_version < published.version
            progress.published = msgspec.structs.replace(published, incarnation=self._incarnations.number)
            progress.reachable = True
            if news:
                self._evaluations.published(published.version)
                self._versions.published(published.version)
            # Again for those who lack it.
            progress.send("versions")
        progress.stages_ended += 1
        progress.send("run")
        return p.Ack()

    async def _until_engines(self, ready: Callable[[], bool]) -> None:
        """Wait for engines, under the deadline of `Stage.LOADING` or `Stage.STARTING`; not in an interrupted run."""
        if ready():
            return
        self._kept_waiting += 1
        self._progress.send("run")
        try:
            await self._progress.until("engines", lambda: self._progress.stopping == "interrupted" or ready())
        finally:
            self._kept_waiting -= 1
            self._progress.send("run")

    async def snapshot(self) -> p.SnapshotReply:
        """Have the state of this moment written; results come in and leases go out meanwhile."""
        await self._work.tidy()
        await run_in_slices(self._samples.pool.copy_ahead())
        await self._work.tidy()
        if self._progress.batch != "none" or self._progress.behind:
            raise ContractError(f"a snapshot belongs between two steps, and step {self._progress.version} is trained")
        self._observer.ledger(self._samples.totals())
        version, kept = self._progress.version, self._samples.snapshot()
        state = HubState(version, kept, self._journal.begin(version))
        return await self._keep_state(version, encoded_pieces(state))

    async def goodbye(self, request: p.Goodbye) -> None:
        """Let a rank leave once the last evaluation is over.

        An engine that starts before that, in a node that joins or in place of one that died, needs the weights.
        """
        self._observer.activities(request.activities)
        self._incarnations.ranks[request.rank].saved = True
        progress = self._progress
        progress.send("run")
        await progress.until("run", lambda: progress.stopping == "interrupted" or self._evaluations.done)
        # An engine that is still loading from the ranks is not at fault: the run needs it no more.
        progress.reachable = False
        self._trainers.leaves(request.rank)
