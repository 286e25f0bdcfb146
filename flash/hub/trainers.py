"""Trainers: the hub's side of the trainer ranks' coming and going. It owns no task.

An incarnation of theirs (`flash.hub.trainers`) that is lost does not end the run: its calls are ended,
and so are its ranks, by their node's launcher, which asks here. The engines go on with what they have.
The next incarnation is told which checkpoint to load, and trains again what the run has trained since; so does the
first one of a hub that has started again. Where that cannot be, the run ends with an error after which all processes
start again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio
import msgspec

from flash.config import waits
from flash.config.tree import Config
from flash.errors import CollectiveError, ContractError, FlashError, IncarnationOverError, PeerLostError, error_of
from flash.hub import protocol as p
from flash.hub.context import HubContext, HubPart, RunProgress
from flash.hub.recovery import TrainerStart
from flash.types import Published

T = TypeVar("T")

INCARNATION_OVER = "this incarnation of the trainer ranks is over, as one of them is gone or hangs"
"""What a rank of it is told."""


class TrainerRanks(HubPart):
    """See the module's docstring.

    Args:
        parts: of the hub.
        start: what the first incarnation begins with.
        number: of the first incarnation.
    """

    def __init__(self, parts: HubContext, start: TrainerStart, number: int) -> None:
        super().__init__(parts)
        self._why_not = "" if self._past is None else why_no_retraining(self._config)
        self.incarnations = Incarnations(self._config.trainer_world_size, self._progress, start.version, number)
        self._start: TrainerStart | None = start
        """What the newest incarnation begins with, once that is known."""
        self._choosing = False
        self._store: str | None = None
        """Where the ranks of the newest incarnation meet, once its rank 0 has said so."""
        self._causes: set[tuple[int, int]] = set()
        """By which the last incarnation ended that did: each a node, and a process on it."""
        self._missing = ""
        """The ranks that had never come to it, as a sentence; empty if all had come."""
        self._calls: set[anyio.CancelScope] = set()
        self._changes = 0
        """Of which processes the incarnations have."""
        self._lost_at = self._now() if self.incarnations.away else None
        """When the last incarnation was lost that held the run's version, or this hub began, until the next does."""

    @property
    def done(self) -> bool:
        """Whether nobody has to wait for a trainer rank any more.

        An interrupted run does not wait for ranks that are only starting: they would have nothing new to save.
        """
        progress, incarnations = self._progress, self.incarnations
        if progress.stopping == "interrupted" and (
            incarnations.away or (progress.published is None and not all(rank.here for rank in incarnations.ranks))
        ):
            return True
        return incarnations.finished

    # -- incarnations ------------------------------------------------------------------------------------------------

    async def begins(self, request: p.IncarnationRequest) -> p.IncarnationReply:
        """What a rank is to begin with. The first of its incarnation that asks has it chosen; all wait for rank 0."""
        rank = self.incarnations.ranks[request.rank]
        rank.process, rank.host, rank.since = request.process, request.host, self._now()
        self._changed()
        self._progress.refuse_at_end()
        if request.rank == 0:
            self._store = request.store
            self._progress.send("batches")
        while self._start is None and not self.incarnations.finished:
            if self._choosing:
                await self._progress.until("batches", lambda: not self._choosing)
                continue
            self._choosing = True
            try:
                self._start = await self._choose()
            finally:
                self._choosing = False
                self._progress.send("batches")
        await self._progress.until("batches", lambda: self._store is not None or self.incarnations.finished)
        checkpoint = self._start.checkpoint if self._start is not None and not self.incarnations.finished else None
        return p.IncarnationReply(self.incarnations.number, checkpoint, self._store or "")

    async def _choose(self) -> TrainerStart:
        assert self._past is not None, "without a past no incarnation follows the first"
        version = self._progress.version
        try:
            start = await self._past.start(version)
        except FlashError as error:
            raise self.cannot_come_back(error) from error
        self.incarnations.begins_at(start.version)
        return start

    def cannot_come_back(self, error: FlashError) -> PeerLostError:
        """What the run ends with, after which all processes start again."""
        failed = PeerLostError(
            f"the trainer ranks cannot come back to version {self._progress.version} by themselves: {error}"
        )
        self._progress.fail(failed)
        return failed

    def lost(self, rank: int) -> None:
        """A rank of the newest incarnation is gone."""
        if rank not in self.incarnations.present:
            return
        self._progress.send("run")
        silent, causes = self._silent(), self._processes_of({rank, *self._quiet()})
        if self.incarnations.ends_by([rank]):
            words = f"trainer rank {rank} is gone without a word: its process was killed, or crashed"
            self._end(PeerLostError("; ".join([words, *silent])), causes)

    def hang(self, waited: str) -> None:
        """The ranks of the newest incarnation, of which some are here, have not done in time what the run waits for."""
        missing = self._not_here()
        hanging = [*self._silent(), *filter(None, [missing])]
        hanging = hanging or [f"{self._named(rank)} hangs" for rank in self.incarnations.present]
        causes = self._processes_of(self._quiet() or self.incarnations.present)
        if self.incarnations.ends_by(range(len(self.incarnations.ranks))):
            self._end(PeerLostError(f"{' and '.join(hanging)}: {waited}"), causes, missing)

    async def watch(self) -> None:
        """End an incarnation of which a rank does not show any more that it runs, before a stage is too long for that.

        Waits for the moment in which one could be silent for too long. Produces the end of its incarnation.
        """
        limit = max(self._config.deadlines.request, waits.SILENT_S)
        while True:
            beats = [rank.beat for rank in self.incarnations.ranks if rank.beat is not None]
            await anyio.sleep(min(beats) + limit - anyio.current_time() if beats else limit)
            if self.incarnations.silent(limit, anyio.current_time()):
                await anyio.sleep(waits.SECOND_LOOK_S)
            if self.incarnations.silent(limit, anyio.current_time()):
                self.hang(f"every rank shows now and then that it runs, within {limit:g} s (deadlines.request)")

    def _collective_failed(self, error: CollectiveError, awaited: str) -> None:
        """A rank says that a collective failed, or outlived its deadline, and none is gone."""
        seconds = f"a collective may take {self._config.deadlines.collective:g} s (deadlines.collective)"
        missing = self._not_here()
        words = [
            *self._silent(),
            *filter(None, [missing]),
            f"{error}; the run waited for {awaited}, in which {seconds}",
        ]
        causes = self._processes_of(self._quiet() or self.incarnations.present)
        self._end(CollectiveError(": ".join(words)), causes, missing)

    async def failed(self, request: p.Fatal, waited_for: Callable[[], str]) -> None:
        """End the run with a peer's error, unless it is the echo of the end of another one that has no voice."""
        error = error_of(request.error, request.message)
        if error is None or isinstance(error, CollectiveError):
            incarnation = self.incarnations.number
            await anyio.sleep(waits.echo_s(self._config))
            if not self.incarnations.counts(incarnation):
                return
        if isinstance(error, CollectiveError):
            self._collective_failed(error, waited_for())
        else:
            self._progress.fail(error or FlashError(request.message))

    def leaves(self, rank: int) -> None:
        """A rank has said goodbye."""
        self.incarnations.leaves(rank)
        self._changed()
        self._progress.send("run")

    def _silent(self) -> list[str]:
        """The ranks that are not heard of any more, in words, for the error that ends their incarnation."""
        quiet = self._quiet().items()
        return [f"{self._named(rank)} hangs: it has been silent for {seconds:.0f} s" for rank, seconds in quiet]

    def _not_here(self) -> str:
        """Return a sentence that names the ranks which have not come to the newest incarnation; empty if all have."""
        places: dict[str, list[str]] = {}
        for rank, state in enumerate(self.incarnations.ranks):
            if not state.here and not state.left:
                host = f" ({state.host})" * bool(state.host)
                places.setdefault(f"node {self._config.cluster.node_of(rank)}{host}", []).append(str(rank))
        named = [f"trainer rank {', '.join(ranks)} of {place}" for place, ranks in places.items()]
        return f"{' and '.join(named)} did not come, and the run needs that machine back" if named else ""

    def _quiet(self) -> dict[int, float]:
        return self.incarnations.silent(waits.SILENT_S, anyio.current_time())

    def _processes_of(self, ranks: Iterable[int]) -> set[tuple[int, int]]:
        """Of those that have said which they are, with their nodes: on two nodes a process may have the same number."""
        processes = ((self._config.cluster.node_of(rank), self.incarnations.ranks[rank].process) for rank in ranks)
        return {(node, process) for node, process in processes if process is not None}

    def _named(self, rank: int) -> str:
        where = f"on node {self._config.cluster.node_of(rank)}"
        if (process := self.incarnations.ranks[rank].process) is not None:
            where = f"process {process} {where}"
        return f"trainer rank {rank} ({where})"

    async def watched(self, request: p.IncarnationWatch) -> None:
        """Show a rank, after a while, that its incarnation goes on."""
        # On the loop's clock, which stands still while a user's code blocks the loop and nobody reads beats.
        self.incarnations.ranks[request.rank].beat = anyio.current_time()
        await anyio.sleep(waits.BEAT_S)

    async def ranks_of(self, request: p.RanksRequest) -> p.RanksReply:
        """The processes of a node's ranks, once there is news of any, or so that their launcher sees that we run."""
        with anyio.move_on_after(waits.news_s(self._config)):
            await self._progress.until("ranks", lambda: request.after != self._changes)
        node_of = self._config.cluster.node_of
        ranks = [rank for number, rank in enumerate(self.incarnations.ranks) if node_of(number) == request.node]
        living = [rank.process for rank in ranks if rank.process is not None]
        ended = [rank.ended for rank in ranks if rank.ended is not None and rank.ended not in living]
        causes = [one for one in ended if (request.node, one) in self._causes]
        return p.RanksReply(self._changes, living, ended, causes, self._missing if ended else "")

    def _changed(self) -> None:
        self._changes += 1
        self._progress.send("ranks")

    def _end(self, error: FlashError, causes: set[tuple[int, int]], missing: str = "") -> None:
        """End the newest incarnation for this reason.

        Args:
            error: the reason.
            causes: the processes that caused it, each with its node.
            missing: names the ranks that had never come to it.
        """
        progress, self._causes, self._missing = self._progress, causes, missing
        if progress.error is not None or progress.done:
            return
        if self._why_not is not None or progress.stopping == "interrupted":
            if self._why_not:
                error.args = (f"{error}. All processes start again with it, as {self._why_not}",)
            progress.fail(error)
            return
        if self._lost_at is None:
            self._lost_at = self._now()
        self.incarnations.end()
        self._changed()
        # Nothing more is answered to it; the next one begins with what is chosen then.
        self._start = self._store = None
        progress.reachable = False
        progress.stages_ended += 1
        for call in self._calls:
            call.cancel()
        progress.send("run", "batches", "engines")
        self._observer.failure("trainers_lost", str(error))
        self._observer.note(f"{error}. The trainer ranks start again, and the engines go on meanwhile")

    async def while_it_lasts(self, answer: Callable[[], Awaitable[T]]) -> T:
        """The answer to a rank of the newest incarnation. Raises IncarnationOverError: that one ended before."""
        with anyio.CancelScope() as call:
            self._calls.add(call)
            try:
                return await answer()
            finally:
                self._calls.discard(call)
        raise IncarnationOverError(INCARNATION_OVER)

    # -- who comes back ----------------------------------------------------------------------------------------------

    def returned(self, published: Published) -> None:
        """The ranks hold the run's version, and publish it now: after a loss, people are told what it is like."""
        if self._lost_at is None:
            return
        seconds, self._lost_at = self._now() - self._lost_at, None
        if self.incarnations.followed:  # else they were not lost alone
            self._metrics.trainers_returned()
        steps = self.incarnations.repeated
        words = f"the trainer ranks are back at version {published.version} after {seconds:.0f} s"
        if steps:
            words += f", in which they have trained {steps} step{'s' * (steps > 1)} again"
        before = self._progress.published
        if before is not None and before.version == published.version:
            words += f": {self._compared(before, published)}"
        self._observer.note(words)

    def _compared(self, before: Published, published: Published) -> str:
        assert self._past is not None, "without a past nobody comes back"
        if self._past.same_weights(before, published):
            return "the same weights as before"
        words = "not the weights that they had, as other hardware or another number of ranks adds up in another order; "
        if before.canary.token_ids == published.canary.token_ids:
            pairs = zip(before.canary.logprobs, published.canary.logprobs, strict=True)
            gap = max((abs(one - other) for one, other in pairs), default=0.0)
            words += f"log-probs of the canary differ by up to {gap:.2g}, and "
        return words + "the run goes on from here"


def why_no_retraining(config: Config) -> str | None:
    """Why ranks that start again cannot come to the run's version from a checkpoint before it; None: they can."""
    if config.checkpoint.batches == "none":
        return 'checkpoint.batches = "none" leaves nothing to train again'
    return None


class RankState(msgspec.Struct):
    """A trainer rank, as it was last heard of. Times are the caller's."""

    here: bool = False
    """Whether it is of the newest incarnation, and has come."""
    process: int | None = None
    """Its process id on its own node, while its incarnation lasts."""
    ended: int | None = None
    """That of its last process whose incarnation is over; it may hang."""
    host: str = ""
    """Of its node; empty before it has first come."""
    since: float | None = None
    """When it came."""
    beat: float | None = None
    """When it has last shown that its process runs, whatever it waits for."""
    fetched: bool = False
    """Whether it has all of its shard."""
    saved: bool = False
    """True if it has done all of its work, and waits for the end of the run."""
    left: bool = False
    """Whether it has left in order, or after one that has."""


class Incarnations:
    """See the module's docstring.

    Args:
        ranks: how many make an incarnation.
        progress: the versions of the run.
        held: what the first incarnation begins with.
        number: of the first incarnation.
    """

    def __init__(self, ranks: int, progress: RunProgress, held: int, number: int = 1) -> None:
        self.ranks = [RankState() for _ in range(ranks)]
        self._progress = progress
        self._first = self.number = number
        """Of the newest incarnation."""
        self.repeated = 0
        """Steps that it has trained again."""
        self.begins_at(held)
        self.away = progress.behind
        """Whether an incarnation was lost, be it with a former hub, and the next one has published nothing yet."""
        self._over = False
        """Whether the newest incarnation is over, and nobody of the next one is here."""

    # -- who is there ------------------------------------------------------------------------------------------------

    @property
    def followed(self) -> int:
        """Incarnations that were lost under this hub, and followed by another one."""
        return self.number - self._first

    @property
    def present(self) -> list[int]:
        """The ranks of this incarnation that have come."""
        return [number for number, rank in enumerate(self.ranks) if rank.here]

    @property
    def saved(self) -> bool:
        """True if all ranks have done all of their work."""
        return all(rank.saved for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether all ranks have left in order."""
        return all(rank.left for rank in self.ranks)

    def counts(self, number: int) -> bool:
        """Whether the ranks of this incarnation are still listened to."""
        return number == self.number and not self._over

    def arrives(self, rank: int) -> int:
        """A rank is there; the incarnation that it belongs to."""
        if self._over:
            self._over = False
            self.number += 1
        self.ranks[rank].here = True
        return self.number

    def silent(self, seconds: float, now: float) -> dict[int, float]:
        """The ranks of this incarnation whose last beat is so long ago, each with the seconds."""
        quiet = {number: now - rank.beat for number, rank in enumerate(self.ranks) if rank.beat is not None}
        return {number: since for number, since in quiet.items() if since >= seconds}

    def leaves(self, rank: int) -> None:
        """A rank has said goodbye."""
        self.ranks[rank].left = True
        self.ranks[rank].process = self.ranks[rank].beat = None

    def ends_by(self, ranks: Iterable[int]) -> bool:
        """These ranks of this incarnation are gone, or hang; whether that ends the incarnation.

        Not when any has said goodbye: by then all have saved what there was to save.
        """
        if any(rank.left for rank in self.ranks):
            for number in ranks:
                self.leaves(number)
            return False
        self.end()
        return True

    def end(self) -> None:
        """This incarnation is over."""
        self._over = self.away = True
        for rank in self.ranks:
            rank.ended = rank.ended if rank.process is None else rank.process
            rank.here, rank.process, rank.beat, rank.fetched, rank.saved = False, None, None, False, False

    # -- how far they are --------------------------------------------------------------------------------------------

    def begins_at(self, held: int) -> None:
        """All ranks of this incarnation start from this version. Raises ContractError: the run has not reached it."""
        if held > self._progress.version:
            raise ContractError(
                f"the trainers would start from version {held} of a run that is at {self._progress.version}"
            )
        self._progress.held, self.repeated = held, 0

    def publishes(self) -> bool:
        """The ranks have a version ready; whether it is the one that the engines are to have."""
        self.away = False
        return not self._progress.behind

    def commits(self) -> bool:
        """The ranks have trained a step; whether that is news, and to be booked."""
        news = not self._progress.behind
        self._progress.held += 1
        for rank in self.ranks:
            rank.fetched = False
        self.repeated += not news
        return news
