"""The training steps: a batch is formed, dealt to the trainer ranks, trained, counted and published.

`flash.hub.work.NodeWork.deliver` completes groups. When enough groups are complete, `TrainingSteps.batch` takes them
from the sample buffer and deals them: it divides the samples into *shards*, one for each data rank. The ranks fetch
their shards in parts, one message for each part (`fetch_shard_blocking`). Ranks that train the same samples together (a
*data rank*) fetch the same shard. A step has one *round*, or several if it begins before its batch is whole: when the
ranks have trained a round, they ask for the next one, and after the last one they update the weights. `commit` counts
the step in the ledger, the totals of all samples and tokens. `publish` announces the new version to the engines.

Until `commit`, all rounds of the step stay here: ranks that start again get the same rounds. A hub that is lost before
the batch is whole leaves the step's groups to the next hub as ready groups. So does an interrupt (`put_back`).

An *incarnation* is the set of trainer ranks that run from one restart of the ranks to the next. After a restart the
ranks may be *behind* the run: they hold an older version. The ranks then get the recorded batches of earlier steps, and
none of these steps is counted again. Between two steps `snapshot` writes the hub's state into a checkpoint. A *stage*
of the run is the event that it waits for, with a deadline (`flash.hub.stages`). A *lease* assigns one task to one node.

This module owns no anyio task: its methods run in the tasks of the ranks' requests, which the end of the incarnation
cancels. Work that must not be left half done is shielded from this cancellation.
"""

from __future__ import annotations

import anyio
import msgspec

from flash.errors import ContractError, FlashError
from flash.hub import protocol as p
from flash.hub.context import HubContext
from flash.hub.metrics import BranchCounts
from flash.hub.nodes import WeightVersions
from flash.hub.recovery import HubState
from flash.hub.trainers import TrainerRanks
from flash.hub.work import NodeWork
from flash.samples.batches import (
    gather,
    join_rounds,
    mean_metrics,
    next_place,
    sample_metrics,
    split_into_messages,
    split_into_shards,
    split_rounds,
)
from flash.transport.frames import encoded_pieces
from flash.types import ONLY_ROUND, Batch, Published, Round, Shard
from flash.waiting import free_in_slices, run_in_slices


class _RepeatedStep(msgspec.Struct):
    """A step that an incarnation of the ranks trains again. The batch of the step is read from the disk once for all
    ranks, and has the same rounds as the first time."""

    incarnation: int
    step: int
    may_save: bool
    """True if a checkpoint may follow the step: it is the last step to train again, and the batch of the next step was
    not begun before the loss. This is decided when the first rank requests the step."""
    rounds: list[list[list[Shard]]] = []
    """Parts of each shard of each round; empty while they are read."""


class TrainingSteps:
    """Forms and deals batches, counts steps, and announces versions.

    A request that waits when the run fails raises the error of the run.

    Args:
        context: the shared objects of the hub.
        work: grants the leases for which a step makes room.
        versions: announces versions to the engines.
        trainers: the ranks and their incarnations.
        part_bytes: bytes of a shard that one message may hold.
    """

    def __init__(
        self, context: HubContext, work: NodeWork, versions: WeightVersions, trainers: TrainerRanks, part_bytes: int
    ) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._metrics, self._fleet = context.progress, context.metrics, context.fleet
        self._contract, self._buffer, self._samples = context.contract, context.buffer, context.buffer.samples
        self._evaluations, self._persistence = context.evaluations, context.persistence
        self._work = work
        self._versions = versions
        self._trainers = trainers
        self._incarnations = trainers.incarnations
        self._part_bytes = part_bytes
        self._rounds: list[list[list[Shard]]] = []
        """For each round of the running step: the parts of each shard, by data rank. Empty between two steps."""
        self._batches: list[Batch] = []
        """Samples of each round of the running step; empty if the batch is whole."""
        self._place = ONLY_ROUND
        """Position of the next round in the running step."""
        self._asking = 0
        """Number of ranks' requests that wait for a batch."""
        self._publishing = 0
        """Number of publications that wait for engines."""
        self._save_after_next = False
        """True if the observer has asked for a checkpoint; it follows the step of the next batch that is formed."""
        self._save_after_this = False
        """True if the ranks must write a checkpoint after the running step, because the observer has asked for it."""
        self._end_reply: p.BatchReply | None = None
        """Reply that ends training, equal for all ranks; None while the run trains."""
        self._snapshot = self._checkpoint = (0, -1)
        """Incarnation of the ranks and version of the last snapshot, and of the last checkpoint that is known to be
        written; (0, -1) if there is none."""
        self._repeated: _RepeatedStep | None = None
        """Step that the ranks train again, or trained again last; None once the ranks have published the run's
        version."""

    @property
    def ranks_train(self) -> bool:
        """True if any rank trains a round, or rank 0 has not reported yet that the step is trained."""
        if self._progress.batch == "dealt":
            return True
        return bool(self._rounds) and self._asking < self._config.trainer_world_size

    @property
    def step_begun(self) -> bool:
        """True if the ranks have begun the running step: a round of it was dealt."""
        return bool(self._rounds)

    @property
    def weights_between_versions(self) -> bool:
        """True if the ranks must write no checkpoint when the run ends now: they have made an update in a step that
        they cannot finish."""
        return self._partly_updated if self._end_reply is None else not self._end_reply.may_save

    @property
    def ranks_wait_for_batch(self) -> bool:
        """True if any rank waits for a round."""
        return self._asking > 0

    @property
    def ranks_wait_for_engines(self) -> bool:
        """True if rank 0 waits until engines have loaded the version before the one that it publishes."""
        return self._publishing > 0

    @property
    def checkpoint_written(self) -> bool:
        """True if the ranks have written a checkpoint of the run's version, so that they do not write it a second
        time."""
        return self._incarnations.saved or self._checkpoint == (self._incarnations.number, self._progress.version)

    @property
    def ranks_export(self) -> bool:
        """True if the ranks export the model, or still have to export it. The model is exported only in a run that has
        trained all steps."""
        ended = self._end_reply is not None and self._end_reply.finished
        return ended and not self._incarnations.saved

    # -- a batch is formed and dealt ---------------------------------------------------------------------------------

    async def batch(self, request: p.BatchRequest) -> p.BatchReply:
        """Answer a rank with a part of its shard of a round, or with the end of training.

        All ranks get the same rounds. Waits until the round is dealt, or until the run has trained all steps or is
        interrupted. The signal `batches` wakes this request. The first rank whose request finds enough complete groups
        forms the round for all ranks. A rank that is behind the run gets the recorded batch of its step instead. The
        rank's activities (bars on the run's timeline) go to the observer.

        Raises:
            ContractError: the rank requests another step than the one that the ranks have to train, a round that does
                not follow, or a part that its shard does not have.
            FlashError: the run has failed while this request waited, or the recorded batch of an earlier step cannot be
                read, which ends the run.
        """
        progress, number = self._progress, request.round
        if request.step != progress.trainer_version:
            raise ContractError(
                f"rank {request.rank} asks for step {request.step}, but the ranks hold version "
                f"{progress.trainer_version}"
            )
        self._observer.activities(request.activities)
        incarnation = self._incarnations.number
        if progress.trainers_behind:
            return await self._repeat_step(request, incarnation)
        if self._snapshot == (incarnation, request.step):
            # A rank asks for a batch only after the whole checkpoint is written, which takes longer than the snapshot.
            self._checkpoint = self._snapshot
        # A rank may ask for a round that was dealt, or for the next one. No round follows a whole batch.
        follows = number < len(self._rounds) + (progress.batch != "dealt")
        if self._end_reply is None and not follows:
            raise ContractError(
                f"rank {request.rank} asks for round {number} of step {request.step}, which has {len(self._rounds)}"
            )
        # The stage of the run depends on whether ranks wait here, so `run` is sent at both ends of the wait.
        self._asking += 1
        progress.send("run")
        try:
            # A round that is being formed is still dealt if the run stops meanwhile.
            while number == len(self._rounds) and (progress.stopping is None or progress.batch == "forming"):
                await progress.until("batches", lambda: number < len(self._rounds) or self._work.ranks_can_proceed())
                if number == len(self._rounds) and progress.stopping is None:
                    # This request forms the round for all ranks. The other ranks must get it even if this rank is lost
                    # meanwhile.
                    with anyio.CancelScope(shield=True):
                        await self._form_round()
        finally:
            self._asking -= 1
            progress.send("run")
        if number < len(self._rounds):
            return self._part(self._rounds, request, incarnation, may_save=True, must_save=self._save_after_this)
        # The first request fixes the reply for all ranks. The export of the model is a collective, so an interrupt
        # between their requests must not give them different replies.
        if self._end_reply is None:
            may_save = not self.weights_between_versions
            self._end_reply = p.BatchReply(None, progress.stopping == "finished", may_save=may_save)
            if progress.batch == "open":
                self._give_up_step()
        return self._end_reply

    @property
    def _partly_updated(self) -> bool:
        """True if the ranks have made an update in the running step, although its batch is not whole yet.

        The ranks update the weights whenever they have trained all groups of a minibatch. With n minibatches, each has
        an n-th of the step's groups. So they have made an update once they have trained that many groups.
        """
        # Before the first round is dealt, both numbers of groups are 0, and there was no update.
        minibatches = self._config.train.minibatches
        return self._place.groups_before * minibatches >= max(self._place.groups, 1)

    def _give_up_step(self) -> None:
        """Make the groups of a step ready again whose batch is not whole, because the run was interrupted."""
        self._rounds, self._batches, self._place = [], [], ONLY_ROUND
        self._progress.batch = "none"
        with self._work.buffer_errors_end_run():
            self._buffer.put_back()
        self._progress.send("backlog")

    async def _form_round(self) -> None:
        """Take groups of the step from the buffer and deal them. After the last step, close the buffer.

        Other requests are served meanwhile. If the buffer has too few complete groups after all, nothing changes, and
        the ranks wait on. At the end all waiting ranks are woken.
        """
        progress = self._progress
        progress.batch = "forming"
        try:
            if progress.version >= self._config.run.steps:
                progress.stopping = "finished"
                progress.send("run")
                with self._work.buffer_errors_end_run():
                    self._buffer.close()
                await self._work.tidy()
                return
            groups = self._buffer.next_round(progress.version)
            while groups is None and self._samples.backlog:
                await self._work.tidy()
                groups = self._buffer.next_round(progress.version)
            if groups is None:
                return
            is_whole = not self._samples.batches.open  # False if the step takes more groups in later rounds
            # The groups have left the buffer. A whole batch may withdraw leases that have become useless, and makes
            # room for new leases.
            self._work.pass_on_withdrawals()
            self._work.grant_leases()
            if not self._rounds and not is_whole:
                # This is the first of several rounds. The ranks need the number of groups of the whole batch, to find
                # the minibatch of each group.
                self._place = Round(groups=self._contract.groups_per_batch)
            place = msgspec.structs.replace(self._place, last=is_whole)
            min_version = self._contract.min_token_version(progress.version)
            batch = gather(groups, progress.version, min_version)
            shards = await self._split(batch, place)
            self._batches.append(batch)
            if is_whole:
                # This wait comes before any rank updates its weights: ranks that start again must get the same batch,
                # even from the next hub.
                await self._persistence.journal.written()
                self._observer.batch(join_rounds(self._batches))
                self._save_after_this, self._save_after_next = self._save_after_next, False
                self._batches = []
            self._place = next_place(batch, place, groups=place.groups)
            self._rounds.append(shards)
            progress.batch = "dealt" if is_whole else "open"
            progress.stages_ended += 1
        finally:
            if progress.batch == "forming":
                progress.batch = "open" if self._rounds else "none"
            progress.send("run", "batches")

    async def _split(self, batch: Batch, place: Round) -> list[list[Shard]]:
        """Divide a round into one shard per data rank, balanced by tokens, and each shard into parts of one message."""
        minibatches = self._config.train.minibatches
        shards = await run_in_slices(split_into_shards(batch, self._config.data_shards, minibatches, place))
        return [await run_in_slices(split_into_messages(shard, self._part_bytes)) for shard in shards]

    def _part(
        self,
        rounds: list[list[list[Shard]]],
        request: p.BatchRequest,
        incarnation: int,
        *,
        may_save: bool,
        must_save: bool,
    ) -> p.BatchReply:
        """Return the reply with the requested part of the rank's shard. Notes when the rank has received the last part.

        A step can be committed only after every rank has got the last part of its last round. `rounds` has the parts of
        the shard for each round of the step, by data rank. `incarnation` is the incarnation of the rank when the
        request arrived. `may_save` and `must_save` are fields of the reply, about a checkpoint after the step. Raises
        ContractError if the step has no such round, or the shard has no such part.
        """
        if request.round >= len(rounds):
            raise ContractError(f"rank {request.rank} asks for round {request.round} of the {len(rounds)} of its step")
        parts = rounds[request.round][self._config.parallel.data_shard(request.rank)]
        if not 0 <= request.part < len(parts):
            raise ContractError(f"rank {request.rank} asks for part {request.part} of the {len(parts)} of its shard")
        left = len(parts) - 1 - request.part
        is_last = left == 0 and parts[0].round.last
        if is_last and self._incarnations.is_current(incarnation):  # the incarnation may have ended meanwhile
            self._incarnations.ranks[request.rank].fetched = True
        return p.BatchReply(parts[request.part], may_save=may_save, parts_left=left, must_save=must_save)

    async def _repeat_step(self, request: p.BatchRequest, incarnation: int) -> p.BatchReply:
        """Answer a rank that is behind the run: with a part of the batch that the step trained the first time.

        The first request for a step reads the batch, and the other ranks wait for it under the signal `batches`. An
        interrupted run is not trained up to its version again: the reply then ends training.

        Raises:
            PeerLostError: the batch cannot be read. The run has failed with this error.
            ContractError: the step has no such round, or the shard has no such part (`_part`).
        """
        history = self._persistence.history
        assert history is not None, "without a history no incarnation is behind"
        progress, repeated = self._progress, self._repeated
        if repeated is None or (repeated.incarnation, repeated.step) != (incarnation, request.step):
            if progress.stopping == "interrupted":
                return p.BatchReply(None, may_save=False)
            # After this step the ranks hold the run's version, and the hub's state is still the one between two steps.
            may_save = request.step + 1 == progress.version and progress.batch == "none"
            # The other ranks find the step here and wait for its rounds. If the read below is cancelled, this rank is
            # lost, and the incarnation with it. The ranks of the next incarnation do not match this entry.
            repeated = self._repeated = _RepeatedStep(incarnation, request.step, may_save)
            try:
                batch = await history.batch(request.step)
            except FlashError as error:
                raise self._trainers.end_without_recovery(error) from error
            # A resumed run may have a setting that needs the whole batch.
            is_streamed = self._samples.rules.round is not None
            rounds = split_rounds(batch) if is_streamed else [(batch, ONLY_ROUND)]
            repeated.rounds = [await self._split(one, place) for one, place in rounds]
            progress.send("batches")
        await progress.until("batches", lambda: bool(repeated.rounds))
        return self._part(repeated.rounds, request, incarnation, may_save=repeated.may_save, must_save=False)

    # -- a step is counted -------------------------------------------------------------------------------------------

    async def commit(self, request: p.Commit) -> p.Ack:
        """Count a step that all ranks have trained, unless an earlier incarnation has trained it before.

        In both cases the ranks hold the next version then, and the stage of the run (`Stage.STEP` or `Stage.REPEATING`)
        ends. Rank 0 sends this for all ranks. Raises ContractError if the ranks are at another step, or if a rank has
        not fetched its whole shard.
        """
        version = self._progress.trainer_version
        if request.step != version:
            raise ContractError(f"step {request.step} was committed while the ranks hold version {version}")
        if missing := [number for number, rank in enumerate(self._incarnations.ranks) if not rank.fetched]:
            ranks = ", ".join(map(str, missing))
            raise ContractError(f"step {request.step} was committed, but not fetched to its end by rank {ranks}")
        if self._incarnations.commit():
            with anyio.CancelScope(shield=True):
                await self._count_step(request)
        self._progress.stages_ended += 1
        self._progress.send("run")
        return p.Ack()

    async def _count_step(self, request: p.Commit) -> None:
        """Count the running step in the ledger, the metrics and the journal. The run then has its next version.

        The observer gets the row of the step, and may stop the run or ask for a checkpoint. Returns when the journal (a
        file with every change of the samples, from which the next hub recovers) has the step: rank 0 must not go on
        from a step that the next hub would not know.
        """
        # These lists are emptied in slices below. Freeing all samples at once would block the event loop for as long as
        # all other work of this method takes. `entries` lists all samples of the batch; the first part of every
        # shard has the samples of its round.
        entries = [entry for shards in self._rounds for entry in shards[0][0].batch]
        dealt = [list(part.samples) for shards in self._rounds for parts in shards for part in parts]
        self._rounds, self._place, self._progress.batch = [], ONLY_ROUND, "none"
        with self._work.buffer_errors_end_run():
            self._buffer.commit(self._progress.version)
        self._progress.version += 1
        await self._work.tidy()
        branches = BranchCounts()
        trained = branches.count(sample.trajectory for samples in dealt for sample in samples)
        measures = await run_in_slices(mean_metrics(map(sample_metrics, trained)))
        await run_in_slices(free_in_slices(entries))
        for samples in dealt:
            await run_in_slices(free_in_slices(samples))
        self._observer.trained(request.step, request.seen)
        row = self._metrics.row(
            version=self._progress.version,
            batch=branches.metrics(request.trained) | measures,
            trainer=request.metrics,
            samples=self._samples,
            engines=list(self._fleet.engines()),
            now=self._now(),
        )
        wish = self._observer.step(row)  # "stop", "checkpoint" or None
        if wish == "stop":
            self._progress.interrupt()
        self._save_after_next = wish is not None
        await self._persistence.journal.written()

    # -- a version is published --------------------------------------------------------------------------------------

    async def publish(self, published: Published) -> p.Ack:
        """Announce a version to the engines, once all of them have loaded the version before it.

        So engines are at most one version behind. The deadline of `Stage.LOADING` or `Stage.STARTING` bounds the wait,
        and the signal `engines` ends it. An interrupted run does not wait. While ranks train earlier steps again, none
        of their versions is announced until they have reached the run's version. A new version may also make an
        evaluation due. Ranks that have started again publish the run's version a second time: it is then not announced
        as new, but engines that have not loaded it yet can fetch it from these ranks.
        """
        progress = self._progress
        if self._incarnations.publish():
            # A version whose publisher is gone cannot be loaded any more, so it makes no sense to wait for engines.
            if progress.publisher_alive and not self._fleet.up_to_date(progress.newest):
                self._publishing += 1
                progress.send("run")
                try:
                    await progress.until(
                        "engines",
                        lambda: progress.stopping == "interrupted" or self._fleet.up_to_date(progress.newest),
                    )
                finally:
                    self._publishing -= 1
                    progress.send("run")
            self._repeated = None
            self._trainers.note_recovery(published)
            is_new = progress.published_version < published.version
            progress.published = msgspec.structs.replace(published, incarnation=self._incarnations.number)
            progress.publisher_alive = True
            if is_new:
                self._evaluations.published(published.version)
                self._versions.announce(published.version)
            # This is sent even if the version is not new: engines that could not load it from the earlier incarnation
            # can load it now.
            progress.send("versions")
        progress.stages_ended += 1
        progress.send("run")
        return p.Ack()

    # -- a checkpoint, and the end -----------------------------------------------------------------------------------

    async def snapshot(self) -> p.SnapshotReply:
        """Write the hub's state of this moment into the checkpoint that the ranks are writing.

        Nodes deliver results and get leases while it is written. These changes go into a new file of the journal, which
        begins at this moment. The observer gets the totals of the ledger, for people. Raises ContractError if the run
        is not between two steps.
        """
        await self._work.tidy()
        # Most groups are copied ahead, in slices. Below, the state of one moment is taken without any await in between,
        # so only groups that have changed meanwhile are copied then.
        await run_in_slices(self._samples.pool.copy_ahead())
        # Results that came meanwhile may have left a backlog again, which no snapshot may have.
        await self._work.tidy()
        if self._progress.batch != "none" or self._progress.trainers_behind:
            step = self._progress.trainer_version
            raise ContractError(f"a snapshot belongs between two steps, but step {step} is trained")
        self._observer.ledger(self._samples.totals())
        version, buffer = self._progress.version, self._samples.snapshot()
        self._snapshot = (self._incarnations.number, version)
        state = HubState(version, buffer, self._persistence.journal.begin(version))
        return await self._persistence.save_state(version, encoded_pieces(state))

    async def goodbye(self, request: p.Goodbye) -> None:
        """Let a rank leave once the last evaluation is over, or at once if the run was interrupted.

        During the last evaluation an engine may start, in a node that joins or in place of an engine that died. Such an
        engine needs the weights that the ranks hold, so the ranks have to stay until then. The signal `run` wakes this
        request.
        """
        self._observer.activities(request.activities)
        self._incarnations.ranks[request.rank].saved = True
        progress = self._progress
        progress.send("run")
        await progress.until("run", lambda: progress.stopping == "interrupted" or self._evaluations.done)
        # An engine that is still loading from the ranks when they leave is not at fault, and the run needs no engine
        # any more.
        progress.publisher_alive = False
        self._trainers.leave(request.rank)
