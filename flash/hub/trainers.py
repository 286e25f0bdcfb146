"""The hub's state of the trainer ranks, and its answers to their requests, from their start to a loss and a restart.

An *incarnation* is the set of trainer ranks that run from one restart of the ranks to the next. If one of them is lost
or hangs, the incarnation is over, but the run continues. The hub ends the requests of the ranks. The launchers (one
process per machine, which starts the others) ask `processes_of_node` and kill the processes. The engines continue with
the weights that they have. The next incarnation loads a checkpoint, and trains again the steps that the run has trained
after that checkpoint. The first incarnation under a restarted hub does this, too. If the steps cannot be trained again,
the run ends with an error, and the launchers start all processes again.

`Incarnations` is the pure state (it has no tasks, clocks or files). `TrainerRanks` answers requests; its `watch` runs
in a task of `Hub.run`. A *signal* is a name with which `RunProgress.send` wakes the tasks that wait for a change. A
*collective* is an operation of `torch.distributed` in which all ranks take part, so it fails or hangs if a rank is
lost. A *stage* is the event that the run waits for, with a deadline (`flash.hub.stages`). The answers to requests for
batches and commits are in `flash.hub.steps`.

Invariants: each step is counted once, by the incarnation that commits it first. Each incarnation trains every step
after its checkpoint, in order. Engines are given only the run's version, so they never load an older one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import anyio
import msgspec

from flash.config import waits
from flash.config.tree import Config
from flash.errors import CollectiveError, ContractError, FlashError, IncarnationOverError, PeerLostError, error_of
from flash.hub import protocol as p
from flash.hub.context import HubContext, RunProgress
from flash.hub.recovery import TrainerStart
from flash.observe.cluster import RankNow
from flash.types import Published

INCARNATION_OVER = "this incarnation of the trainer ranks is over, as one of them is gone or hangs"
"""Message of the IncarnationOverError for a rank whose incarnation is over."""


class RankState(msgspec.Struct):
    """State of one trainer rank."""

    present: bool = False
    """True if the rank has connected in the newest incarnation."""
    process: int | None = None
    """Process id of the rank on its node. None before the rank has reported it, after the rank has left, and after the
    end of its incarnation."""
    ended_process: int | None = None
    """Last process id of the rank in an incarnation that is over; None if there is none. The process may hang, so the
    launcher kills it."""
    host: str = ""
    """Name of the rank's machine; empty before the rank has first reported it."""
    since: float | None = None
    """Unix seconds at which the rank last reported a new process; None before the first report."""
    heartbeat: float | None = None
    """Time of the last heartbeat, in seconds on the loop's clock. None before the first heartbeat, after the rank has
    left, and after its incarnation has ended."""
    fetched: bool = False
    """True if the rank has all parts of its shard (the part of the batch that it trains) of the running step."""
    saved: bool = False
    """True if the rank has done all of its work, also its checkpoint, and waits for the end of the run."""
    left: bool = False
    """True if the rank has left normally at the end of the run, or was lost after another rank had left normally."""


class Incarnations:
    """State of the newest incarnation: the number, the ranks, and the version that the ranks hold. Pure state.

    A rank belongs to the incarnation in which it has connected. After the end of an incarnation the hub ignores its
    ranks, and the next rank that connects begins the next incarnation.

    Args:
        ranks: number of ranks of an incarnation.
        progress: the versions of the run. This class sets its `trainer_version`.
        version: the version that the first incarnation starts from.
        number: the number of the first incarnation.
    """

    def __init__(self, ranks: int, progress: RunProgress, version: int, number: int = 1) -> None:
        self.ranks = [RankState() for _ in range(ranks)]
        self._progress = progress
        self._first = self.number = number
        """Number of the newest incarnation."""
        self.repeated = 0
        """Number of steps that the newest incarnation has trained again."""
        self.start_from(version)
        self.recovering = progress.trainers_behind
        """True if an incarnation was lost, perhaps under a previous hub, and the next incarnation has published no
        version yet."""
        self._over = False
        """True if the newest incarnation is over and no rank has connected since."""

    # -- ranks that are present --------------------------------------------------------------------------------------

    @property
    def restarts(self) -> int:
        """Number of restarts of the ranks under this hub process."""
        return self.number - self._first

    @property
    def present(self) -> list[int]:
        """Numbers of the ranks that have connected in the newest incarnation."""
        return [number for number, rank in enumerate(self.ranks) if rank.present]

    @property
    def saved(self) -> bool:
        """True if all ranks have done all of their work and wait for the end of the run."""
        return all(rank.saved for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """True if all ranks have left, so that the run needs no rank any more."""
        return all(rank.left for rank in self.ranks)

    def is_current(self, number: int) -> bool:
        """Return True if incarnation `number` is the newest one and is not over, so that its ranks are answered."""
        return number == self.number and not self._over

    def rank_arrived(self, rank: int) -> int:
        """Add a rank that has connected. Returns the number of its incarnation: the next one if the newest is over.

        `Gate.arrived` calls this, and remembers the number to recognize connections of incarnations that are over.
        """
        if self._over:
            self._over = False
            self.number += 1
        self.ranks[rank].present = True
        return self.number

    def silent(self, seconds: float, now: float) -> dict[int, float]:
        """Return the ranks whose last heartbeat is at least `seconds` old, each with the age of that heartbeat.

        The age is in seconds. `now` is on the clock of the event loop, like the times of heartbeats.
        """
        beats = {number: rank.heartbeat for number, rank in enumerate(self.ranks) if rank.heartbeat is not None}
        # `TrainerRanks.watch` sleeps until this sum. The condition `now - beat >= seconds` is rounded in another way:
        # it could still be false at that moment.
        return {number: now - beat for number, beat in beats.items() if now >= beat + seconds}

    def rank_left(self, rank: int) -> None:
        """Record that a rank has left, or counts as left. No heartbeat of it is expected any more."""
        self.ranks[rank].left = True
        self.ranks[rank].process = self.ranks[rank].heartbeat = None

    def ranks_lost(self, ranks: Iterable[int]) -> bool:
        """Record that ranks of the newest incarnation are lost. Returns True if this has ended the incarnation.

        If True, the caller ends the requests of all ranks, or the run. After the first rank has left, a loss ends
        nothing: a rank leaves only after all ranks have saved everything, so a lost rank counts as left.
        """
        if any(rank.left for rank in self.ranks):
            for number in ranks:
                self.rank_left(number)
            return False
        self.end()
        return True

    def end(self) -> None:
        """Mark the newest incarnation as over. The next rank that connects begins the next incarnation.

        The process of each rank is kept as `ended_process`, so that its launcher can kill it.
        """
        self._over = self.recovering = True
        for rank in self.ranks:
            rank.ended_process = rank.ended_process if rank.process is None else rank.process
            rank.present, rank.process, rank.heartbeat = False, None, None
            rank.fetched, rank.saved = False, False

    # -- versions ----------------------------------------------------------------------------------------------------

    def start_from(self, version: int) -> None:
        """Record the version from which all ranks of the newest incarnation start.

        Raises:
            ContractError: the run has not reached this version.
        """
        if version > self._progress.version:
            raise ContractError(
                f"the trainers would start from version {version} of a run that is at {self._progress.version}"
            )
        self._progress.trainer_version, self.repeated = version, 0

    def publish(self) -> bool:
        """Record that the ranks have published a version. Returns True if engines should load this version.

        Returns False while the ranks train earlier steps again, because then the engines have a newer version.
        """
        self.recovering = False
        return not self._progress.trainers_behind

    def commit(self) -> bool:
        """Record that the ranks have trained a step. Returns True if no earlier incarnation has committed the step.

        Only then the caller counts the step in the ledger (the totals of samples and tokens) and the metrics.
        """
        new = not self._progress.trainers_behind
        self._progress.trainer_version += 1
        for rank in self.ranks:
            rank.fetched = False
        self.repeated += not new
        return new


class TrainerRanks:
    """Answers requests of the trainer ranks and of their launchers, and ends incarnations.

    A request that waits when the run fails raises the error of the run. The server sends it to the peer.

    Args:
        context: the objects that the parts of the hub share.
        start: the starting point of the first incarnation.
        number: the number of the first incarnation.
    """

    def __init__(self, context: HubContext, start: TrainerStart, number: int) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._metrics = context.progress, context.metrics
        self._history = context.persistence.history
        self._restart_obstacle = "" if self._history is None else why_no_retraining(self._config)
        """Reason why the loss of an incarnation ends the run. None: the ranks start again, and the run continues. Empty
        if the hub keeps no history of batches: the loss then ends the run too, but the error gives no reason, because
        no setting of the user causes this."""
        self.incarnations = Incarnations(self._config.trainer_world_size, self._progress, start.version, number)
        self._start: TrainerStart | None = start
        """Starting point of the newest incarnation; None until it is chosen."""
        self._choosing = False
        """True while a starting point is being chosen."""
        self._store: str | None = None
        """Address of the store at which the ranks of the newest incarnation connect to each other. None until rank 0
        has reported it."""
        self._causes: set[tuple[int, int]] = set()
        """Processes that caused the newest end of an incarnation, each as (node, process id)."""
        self._missing = ""
        """Sentence that names the ranks which had not connected when an incarnation ended last. Empty if all had
        connected, or if the end of a rank's connection ended that incarnation."""
        self._calls: set[anyio.CancelScope] = set()
        """Scopes of the running requests of the ranks. The end of the incarnation cancels these scopes."""
        self._changes = 0
        """Counter of changes of the rank processes. A launcher sends the value that it has last received, and waits
        until the counter has another value (`processes_of_node`)."""
        self._lost_at = self._now() if self.incarnations.recovering else None
        """Unix seconds at which the ranks were lost, or at which this hub began with ranks that are behind the run.
        None if no ranks were lost, or if the ranks have published the run's version again."""

    @property
    def done(self) -> bool:
        """True if the run need not wait for trainer ranks any more: all have left.

        An interrupted run does not wait for ranks that are only starting, because they have nothing new to save. Such
        ranks start again after a loss, or are the first ranks of a run before all of them have connected.
        """
        progress, incarnations = self._progress, self.incarnations
        if progress.stopping == "interrupted" and (
            incarnations.recovering
            or (progress.published is None and not all(rank.present for rank in incarnations.ranks))
        ):
            return True
        return incarnations.finished

    def overview(self) -> list[RankNow]:
        """Describe all ranks for people."""
        node_of = self._config.cluster.node_of
        return [
            RankNow(number, node_of(number), rank.process, rank.since, rank.host)
            for number, rank in enumerate(self.incarnations.ranks)
        ]

    # -- requests of ranks and of their launchers --------------------------------------------------------------------

    async def start(self, request: p.IncarnationRequest) -> p.IncarnationReply:
        """Answer a rank with the starting point of its incarnation, and note its process for its launcher.

        Waits until rank 0 has reported its store and a starting point is chosen. The request of the first rank that
        asks chooses the starting point for all ranks. The signal `batches` wakes the waiting requests. The reply has no
        checkpoint if all ranks have left: then nothing is left to do.

        Raises:
            PeerLostError: the run has failed before, or the ranks cannot train up to the run's version again.
            FlashError: the run has failed while this request waited; this is its error.
        """
        # The first step comes before any wait: the launcher must know the process of a rank that hangs later.
        rank = self.incarnations.ranks[request.rank]
        rank.process, rank.host, rank.since = request.process, request.host, self._now()
        self._processes_changed()
        self._progress.refuse_if_failed()
        if request.rank == 0:
            self._store = request.store
            self._progress.send("batches")
        while self._start is None and not self.incarnations.finished:
            if self._choosing:
                # If the request that chooses is cancelled, this one takes its place.
                await self._progress.until("batches", lambda: not self._choosing)
                continue
            self._choosing = True
            try:
                self._start = await self._choose_start()
            finally:
                self._choosing = False
                self._progress.send("batches")
        await self._progress.until("batches", lambda: self._store is not None or self.incarnations.finished)
        checkpoint = self._start.checkpoint if self._start is not None and not self.incarnations.finished else None
        return p.IncarnationReply(self.incarnations.number, checkpoint, self._store or "")

    async def _choose_start(self) -> TrainerStart:
        """Choose the newest checkpoint. From there the ranks train again up to the run's version.

        Raises:
            PeerLostError: a checkpoint cannot be read, or a recorded batch is missing. The run has failed with this
                error.
        """
        assert self._history is not None, "without a history no incarnation follows the first"
        try:
            start = await self._history.choose_start(self._progress.version)
        except FlashError as error:
            raise self.end_without_recovery(error) from error
        self.incarnations.start_from(start.version)
        return start

    def end_without_recovery(self, error: FlashError) -> PeerLostError:
        """End the run with an error, because the ranks cannot train up to the run's version again.

        `error` is the reason. Returns the error that ends the run, and the caller raises it. The returned error is a
        PeerLostError, which makes the launchers start all processes again.
        """
        failed = PeerLostError(
            f"the trainer ranks cannot come back to version {self._progress.version} by themselves: {error}"
        )
        self._progress.fail(failed)
        return failed

    async def heartbeat(self, request: p.RankHeartbeat) -> None:
        """Record the heartbeat of a rank, and wait `waits.BEAT_S` before the reply.

        The rank sends its next heartbeat after the reply.
        """
        # The event loop of a run (`flash.run.loop_watch.WatchedLoop`) stops this clock while it knows that user code
        # blocks the loop. The hub reads no heartbeats in that time, so the time must not count as silence of a rank.
        self.incarnations.ranks[request.rank].heartbeat = anyio.current_time()
        await anyio.sleep(waits.BEAT_S)

    async def processes_of_node(self, request: p.RanksRequest) -> p.RanksReply:
        """Answer a launcher with the rank processes of its node: which live, which it must kill, and which were the
        cause.

        Waits until a rank process of any node has started or ended since the launcher's last request, for at most
        `waits.news_s`. The signal `ranks` wakes the request. If nothing changes, the reply comes after this time, and
        shows the launcher that the hub is alive.
        """
        with anyio.move_on_after(waits.news_s(self._config)):
            await self._progress.until("ranks", lambda: request.after != self._changes)
        node_of = self._config.cluster.node_of
        ranks = [rank for number, rank in enumerate(self.incarnations.ranks) if node_of(number) == request.node]
        living = [rank.process for rank in ranks if rank.process is not None]
        ended = [rank.ended_process for rank in ranks if rank.ended_process is not None]
        # The system may have given the id of an ended process to a new one, which must not be killed.
        ended = [process for process in ended if process not in living]
        causes = [process for process in ended if (request.node, process) in self._causes]
        return p.RanksReply(self._changes, living, ended, causes, self._missing if ended else "")

    def _processes_changed(self) -> None:
        """Wake the launchers that wait in `processes_of_node`."""
        self._changes += 1
        self._progress.send("ranks")

    def leave(self, rank: int) -> None:
        """Let a rank leave at the end of the run, and wake the launchers and `Hub.run`, which wait for this."""
        self.incarnations.rank_left(rank)
        self._processes_changed()
        self._progress.send("run")

    @contextmanager
    def within_incarnation(self) -> Generator[None]:
        """Answer a request of a rank in this block, which the end of the incarnation cancels.

        `Hub` uses it for every request of a rank, so that no request of an incarnation that is over keeps waiting.

        Raises:
            IncarnationOverError: the incarnation has ended while the block was waiting.
        """
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                yield
            finally:
                self._calls.discard(scope)
        if scope.cancelled_caught:
            raise IncarnationOverError(INCARNATION_OVER)

    # -- the end of an incarnation -----------------------------------------------------------------------------------

    def disconnected(self, rank: int) -> None:
        """End the incarnation because the connection of one of its ranks has ended.

        The run ends instead if the ranks cannot start again (`_end_incarnation`). After the first rank has left
        normally, this ends nothing, and the lost rank counts as left. A rank that has not connected in the newest
        incarnation is ignored.
        """
        if rank not in self.incarnations.present:
            return
        self._progress.send("run")
        # Describe the ranks before `ranks_lost` clears their state. A silent rank may be the cause of this loss, so the
        # error names it, too.
        hanging, causes = self._describe_silent(), self._processes_of({rank, *self._silent()})
        if self.incarnations.ranks_lost([rank]):
            lost = f"trainer rank {rank} is gone without an error message: its process was killed, or crashed"
            self._end_incarnation(PeerLostError("; ".join([lost, *hanging])), causes)

    def deadline_exceeded(self, exceeded: str) -> None:
        """End the newest incarnation because it has exceeded a deadline: the deadline of a stage, or of a heartbeat.

        The run ends instead if the ranks cannot start again, or if it was interrupted (`_end_incarnation`). After the
        first rank has left normally, all other ranks count as left, and the run does not wait for them any more: a rank
        leaves only after all ranks have saved everything.

        `exceeded`: clause that names the deadline, for the error message.
        """
        # Describe the ranks before `ranks_lost` clears their state.
        missing = self._describe_missing()
        hanging = [*self._describe_silent(), *filter(None, [missing])]
        hanging = hanging or [f"{self._describe_rank(rank)} hangs" for rank in self.incarnations.present]
        causes = self._processes_of(self._silent() or self.incarnations.present)
        if self.incarnations.ranks_lost(range(len(self.incarnations.ranks))):
            self._end_incarnation(PeerLostError(f"{' and '.join(hanging)}: {exceeded}"), causes, missing)
        else:
            # Without this signal `Hub.run` would not notice that all ranks count as left now.
            self._progress.send("run")

    async def watch(self) -> None:
        """Watch the heartbeats, and end the incarnation if one of its ranks is silent. Runs until it is cancelled.

        The deadline of a stage would also end such an incarnation, but much later. This loop sleeps until the next
        moment at which the last heartbeat of a rank could be too old. Before it ends the incarnation, it waits
        `waits.SECOND_LOOK_S`: if the hub's own loop was blocked, a heartbeat may have arrived that is not read yet.
        """
        # A heartbeat comes only every `waits.BEAT_S`, so with a limit below `waits.SILENT_S` a healthy rank could seem
        # silent.
        limit = max(self._config.deadlines.request, waits.SILENT_S)
        while True:
            beats = [rank.heartbeat for rank in self.incarnations.ranks if rank.heartbeat is not None]
            await anyio.sleep(min(beats) + limit - anyio.current_time() if beats else limit)
            if self.incarnations.silent(limit, anyio.current_time()):
                await anyio.sleep(waits.SECOND_LOOK_S)
            if self.incarnations.silent(limit, anyio.current_time()):
                self.deadline_exceeded(
                    f"a rank that runs sends a heartbeat at least every {limit:g} s (deadlines.request)"
                )

    async def fatal(self, request: p.Fatal, describe_wait: Callable[[], str]) -> None:
        """End the run with the error that a peer reports, or end only the incarnation if a collective failed.

        A failed collective, or an error of an unknown class, may be only a consequence of the loss of another rank. So
        the hub first waits `waits.echo_s`, and ignores this error if the incarnation has ended meanwhile.

        `describe_wait`: returns a phrase for the event that the run waits for.
        """
        error = error_of(request.error, request.message)
        if error is None or isinstance(error, CollectiveError):
            incarnation = self.incarnations.number
            await anyio.sleep(waits.echo_s(self._config))
            if not self.incarnations.is_current(incarnation):
                return
        if isinstance(error, CollectiveError):
            self._collective_failed(error, describe_wait())
        else:
            self._progress.fail(error or FlashError(request.message))

    def _collective_failed(self, error: CollectiveError, awaited: str) -> None:
        """End the incarnation because a collective failed or exceeded its deadline, although no rank was lost.

        `awaited`: phrase for the event that the run waited for.
        """
        seconds = f"a collective may take {self._config.deadlines.collective:g} s (deadlines.collective)"
        missing = self._describe_missing()
        reasons = [
            *self._describe_silent(),
            *filter(None, [missing]),
            f"{error}; the run waited for {awaited}, in which {seconds}",
        ]
        causes = self._processes_of(self._silent() or self.incarnations.present)
        self._end_incarnation(CollectiveError(": ".join(reasons)), causes, missing)

    def _end_incarnation(self, error: FlashError, causes: set[tuple[int, int]], missing: str = "") -> None:
        """End the newest incarnation, or the run if the ranks cannot start again or the run was interrupted.

        If the run is over already, nothing ends.

        Args:
            error: the reason.
            causes: the processes that caused the end, each as (node, process id).
            missing: sentence that names the ranks which never connected in the incarnation; empty if there are none.
        """
        progress, self._causes, self._missing = self._progress, causes, missing
        if progress.error is not None or progress.done:
            return
        if self._restart_obstacle is not None or progress.stopping == "interrupted":
            if self._restart_obstacle:
                error.args = (f"{error}. All processes start again with it, as {self._restart_obstacle}",)
            progress.fail(error)
            return
        if self._lost_at is None:
            self._lost_at = self._now()
        self.incarnations.end()
        self._processes_changed()
        # Nothing of the old incarnation may reach the next one: not its starting point, not its store, and no waiting
        # request of its ranks.
        self._start = self._store = None
        progress.publisher_alive = False
        progress.stages_ended += 1
        for call in self._calls:
            call.cancel()
        progress.send("run", "batches", "engines")
        self._observer.failure("trainers_lost", str(error))
        self._observer.note(f"{error}. The trainer ranks start again, and the engines go on meanwhile")

    def _silent(self) -> dict[int, float]:
        """Return the ranks without a heartbeat for `waits.SILENT_S`, each with the seconds since its last heartbeat."""
        return self.incarnations.silent(waits.SILENT_S, anyio.current_time())

    def _processes_of(self, ranks: Iterable[int]) -> set[tuple[int, int]]:
        """Return the known processes of ranks as (node, process id), because process ids of two nodes may be equal."""
        processes = ((self._config.cluster.node_of(rank), self.incarnations.ranks[rank].process) for rank in ranks)
        return {(node, process) for node, process in processes if process is not None}

    def _describe_silent(self) -> list[str]:
        """Return a sentence for each silent rank, for the error that ends the incarnation."""
        silent = self._silent().items()
        return [f"{self._describe_rank(rank)} hangs: it has been silent for {age:.0f} s" for rank, age in silent]

    def _describe_missing(self) -> str:
        """Return a sentence that names the ranks which have not connected in the newest incarnation, with their nodes.

        Empty if all ranks have connected or left. The sentence is part of error messages.
        """
        places: dict[str, list[str]] = {}
        for rank, state in enumerate(self.incarnations.ranks):
            if not state.present and not state.left:
                host = f" ({state.host})" * bool(state.host)
                places.setdefault(f"node {self._config.cluster.node_of(rank)}{host}", []).append(str(rank))
        named = [f"trainer rank {', '.join(ranks)} of {place}" for place, ranks in places.items()]
        return f"{' and '.join(named)} did not come, and the run needs that machine back" if named else ""

    def _describe_rank(self, rank: int) -> str:
        """Return a phrase for error messages that names a rank and its node, and its process if it has reported it."""
        where = f"on node {self._config.cluster.node_of(rank)}"
        if (process := self.incarnations.ranks[rank].process) is not None:
            where = f"process {process} {where}"
        return f"trainer rank {rank} ({where})"

    # -- recovery ----------------------------------------------------------------------------------------------------

    def note_recovery(self, published: Published) -> None:
        """Write a note for people that the ranks have published the run's version again after a loss.

        The note says how long this took, how many steps were trained again, and whether the weights are the same. A
        restart of the ranks alone is also counted in the metrics. Does nothing if no ranks were lost.

        `published`: the version that the ranks have published. The caller has not stored it yet, so
        `RunProgress.published` is still the publication before.
        """
        if self._lost_at is None:
            return
        seconds, self._lost_at = self._now() - self._lost_at, None
        if self.incarnations.restarts:  # otherwise the whole run has restarted, not only the ranks
            self._metrics.add_trainer_restart()
        steps = self.incarnations.repeated
        note = f"the trainer ranks are back at version {published.version} after {seconds:.0f} s"
        if steps:
            note += f", in which they have trained {steps} step{'s' * (steps > 1)} again"
        before = self._progress.published
        if before is not None and before.version == published.version:
            note += f": {self._compare_weights(before, published)}"
        self._observer.note(note)

    def _compare_weights(self, before: Published, published: Published) -> str:
        """Return a phrase for people that says whether the weights of a version are the same as before the loss.

        If they are not, the phrase says by how much the log-probs of the *canary* differ: the fixed text on which
        engines are checked.

        Args:
            before: the version as it was published before the loss.
            published: the same version as it was published after the restart.
        """
        assert self._history is not None, "without a history no ranks start again"
        if self._history.same_weights(before, published):
            return "the same weights as before"
        text = "other weights than before, because other hardware, or another number of ranks, sums in another order; "
        if before.canary.token_ids == published.canary.token_ids:
            pairs = zip(before.canary.logprobs, published.canary.logprobs, strict=True)
            gap = max((abs(old - new) for old, new in pairs), default=0.0)
            text += f"log-probs of the canary differ by up to {gap:.2g}, and "
        return text + "the run goes on from here"


def why_no_retraining(config: Config) -> str | None:
    """Return the reason why restarted ranks cannot train earlier steps again; None if they can.

    The ranks need the recorded batches for this, so the reason is a clause about the setting that keeps no batches.
    """
    if config.checkpoint.batches == "none":
        return 'checkpoint.batches = "none" leaves nothing to train again'
    return None
