"""Work: what the hub gives nodes to do, and what they bring. Leases go out in shares, results come home.

It owns no task: its methods run in the tasks of the nodes' requests, and `catch_up` in one of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet

import anyio
from anyio.lowlevel import checkpoint

from flash.config import waits
from flash.errors import FlashError
from flash.hub import protocol as p
from flash.hub.context import HubContext, HubPart
from flash.hub.dealing import LeaseDealer
from flash.hub.metrics import FAILURES
from flash.samples.leases import LeaseTable
from flash.types import Activity, Failure, Lease, Outcome, Trajectory

RESULTS_AT_ONCE = 256
"""Results taken before others are served: each costs some 30 microseconds."""


class NodeWork(HubPart):
    """See the module's docstring. `holders` knows who has which lease, `shares` who gets the next ones.

    Args:
        parts: what all parts of the hub are given.
        leaving: nodes that take no more work.
        survives: whether this node may have outlived a hub.
    """

    def __init__(self, parts: HubContext, leaving: AbstractSet[int], survives: Callable[[int], bool]) -> None:
        super().__init__(parts)
        self._leaving = leaving
        rollout = self._config.rollout
        together = 1 if rollout.replicate_prompts else rollout.group_size + rollout.extra_per_group
        self._dealer = LeaseDealer(self._tasks_at_hand, self._next_leases, together)
        self.holders, self.shares = self._dealer.holders, self._dealer.shares
        self.claims = LeaseClaims(self._samples.leases, survives)
        if self.claims.void:
            self._buffer.revoke(self.claims.void)
        self._poll_s = waits.long_poll_s(self._config)
        self._openings = 0
        self._evaluating_since: float | None = None

    # -- leases ------------------------------------------------------------------------------------------------------

    async def lease(self, request: p.LeaseRequest) -> p.LeaseReply:
        """Hand out tasks. Waits for a share of those that the age contract has room for, at most one long poll."""
        if request.node in self._leaving:  # it asked before it could stop itself
            await anyio.sleep(self._poll_s)
            return p.LeaseReply([], done=self._progress.done)
        reply = self._dealer.asks(request.node, request.capacity)
        self.offer()
        try:
            with anyio.move_on_after(self._poll_s):
                while not reply and not self._progress.done:
                    await self._until_dealt(request.node, reply)
        finally:
            self._dealer.leaves(request.node, reply)
        return p.LeaseReply(reply, done=self._progress.done)

    async def _until_dealt(self, node: int, reply: list[Lease]) -> None:
        """Wait until a node has got leases, or shares were kept for others long enough."""
        kept, now = self.shares.kept_until, self._now()
        with anyio.move_on_after(kept - now if kept > now else math.inf):
            await self._progress.until(
                ("leases", node), lambda: bool(reply) or self._progress.done or self.shares.kept_until != kept
            )
            return
        self.offer()

    def offer(self) -> None:
        """There may be work that was not there before: those who wait for some get their shares."""
        if self._progress.error is None:
            for node in self._dealer.deal(self._now()):
                self._progress.send(("leases", node))
            if self._dealer.unfinished:
                self._progress.send("put off")

    def _tasks_at_hand(self) -> int:
        newest = self._progress.newest
        tasks = self._evaluations.available(newest)
        if newest >= 0 and self._progress.stopping is None and not self._evaluations.measuring_start:
            tasks += self._buffer.available(newest)
        return tasks

    @property
    def _takers(self) -> Collection[int]:
        """The nodes that could run a task now: what has failed on all of them goes to any."""
        return self._fleet.able - self._leaving if self._leaving else self._fleet.able

    def _next_leases(self, node: int) -> list[Lease]:
        """The next task for a node, or the next whole group."""
        versions = self._fleet.versions(node)
        if (lease := self._evaluations.lease(versions, node, nodes=self._takers)) is not None:
            self._evaluating_since = self._now() if self._evaluating_since is None else self._evaluating_since
            return [lease]
        if max(versions, default=-1) < 0 or self._progress.stopping is not None or self._evaluations.measuring_start:
            return []
        try:
            lease = self._buffer.lease(versions, node, nodes=self._takers)
        except FlashError as error:
            self._progress.fail(error)
            return []
        if lease is None:
            return []
        self._metrics.began(self._now())
        if self._config.rollout.replicate_prompts:
            return [lease]
        return [lease, *self._buffer.lease_rest(lease, versions, node)]

    def claims_of(self, request: p.ClaimRequest) -> p.ClaimReply:
        """A node has outlived the hub before this one, and presents what it holds."""
        kept = self.claims.take(request.leases)
        if kept:
            self._metrics.began(self._now())
        self.holders.lend(request.node, kept, self._now())
        return p.ClaimReply([lease.lease_id for lease in kept])

    async def expire_claims(self) -> None:
        """Wait for nodes that have outlived the hub before this one; what nobody has claimed goes back then."""
        if not self.claims:
            return
        await anyio.sleep(waits.claim_s(self._config))
        if left := self.claims.expire():
            self._observer.note(f"samples given out again, as no node has come that has them in hand: {len(left)}")
            self._buffer.revoke(left)
            self._progress.send("batches", "put off")
            self.offer()

    # -- results -----------------------------------------------------------------------------------------------------

    async def deliver(self, request: p.DeliverRequest) -> p.Ack:
        """Take results; others are served after each slice."""
        for number, ended in enumerate(request.ended, start=1):
            self.holders.ended(ended.lease_id)
            self._take(request.node, ended.lease_id, ended.result)
            if number % RESULTS_AT_ONCE == 0:
                await checkpoint()
        self.shares.tells(request.node, request.capacity)
        self.spread_word()
        if self._samples.admission.openings != self._openings or any(
            ended.result.task.split == "eval" for ended in request.ended
        ):
            self._openings = self._samples.admission.openings
            self.offer()
        if self._samples.backlog:
            await self.tidy()
        elif self.batch_at_hand():
            self._progress.send("batches")
        await self._journal.written()
        return p.Ack()

    def _take(self, node: int, lease_id: int, result: Trajectory | Failure) -> None:
        if isinstance(result, Failure) and result.outcome in FAILURES:
            self._observer.failure(result.outcome, f"node {node}: {result.message}")
        if result.task.split == "eval":
            if (row := self._evaluations.deliver(lease_id, result, node)) is not None:
                now = self._now()
                self._observer.evaluation(row | {"time": now})
                if self._evaluating_since is not None:
                    self._observer.activities([Activity("evaluation", "evaluate", self._evaluating_since, now)])
                self._evaluating_since = None
                self._progress.send("run")
            return
        try:
            self._buffer.deliver(lease_id, result, node)
        except FlashError as error:
            self._progress.fail(error)

    async def tidy(self) -> None:
        """Do what the buffer has put off; others are served after each slice. When it returns, nothing is left."""
        while self._samples.backlog:
            try:
                self._buffer.tidy()
            except FlashError as error:
                self._progress.fail(error)
            self.spread_word()
            await checkpoint()
        self.spread_word()
        self._openings = self._samples.admission.openings
        self.offer()
        self._progress.send("batches")

    async def catch_up(self) -> None:
        """Do the rest of what nobody waits for: a lost node's leases go back, and many tasks go out at once.

        Consumes what was put off. Waits for more of it. Produces leases; others are served after each slice.
        """
        while self._progress.error is None:
            if self._samples.backlog:
                await self.tidy()
            elif self._dealer.unfinished:
                await checkpoint()
                self.offer()
            else:
                await self._progress.wait("put off")

    def spread_word(self) -> None:
        """Keep what the buffer has withdrawn for the nodes' cancel requests, and pass its notes on."""
        for node in self.holders.withdraw(self._samples.leases.withdrawn):
            self._progress.send(("cancels", node))
        self._samples.leases.withdrawn.clear()
        for note in self._samples.notes:
            self._observer.note(note)
        self._samples.notes.clear()

    def batch_at_hand(self) -> bool:
        """Whether a rank that waits for its shard can do something about it."""
        progress = self._progress
        if progress.batch == "forming":
            return False
        if progress.batch == "dealt" or progress.stopping is not None:
            return True
        return progress.version >= self._config.run.steps or self._buffer.has_batch(progress.version)

    # -- who goes ----------------------------------------------------------------------------------------------------

    def takes_no_more(self, node: int) -> None:
        """A node leaves: no share is for it."""
        self.shares.lost(node)

    def take_back(self, node: int, lease: Lease, message: str) -> None:
        """A node keeps a lease for too long: it is told to end it, and the task failed there."""
        self.holders.withdraw([lease.lease_id])
        self._progress.send(("cancels", node), "batches", "put off")
        self.holders.ended(lease.lease_id)
        self._take(node, lease.lease_id, Failure(lease.task, Outcome.ENGINE_ERROR, message, 0))
        self.offer()

    def lost(self, node: int) -> None:
        """A node is gone, or silent: what it had goes back."""
        self._fleet.lost(node)
        training: list[int] = []
        for lease in self._dealer.lost(node):
            if lease.task.split == "eval":
                self._evaluations.revoke(lease.lease_id)
            else:
                training.append(lease.lease_id)
        self._buffer.revoke(training)
        self._progress.send("run", "batches", "engines", "put off")
        self.offer()


class LeaseClaims:
    """See the module's docstring.

    Args:
        leases: of training, as the former incarnations have left them.
        survives: whether this node may have outlived the hub.
    """

    def __init__(self, leases: LeaseTable, survives: Callable[[int], bool]) -> None:
        self._leases = leases
        self._open = {lease_id for lease_id, member in leases.out.items() if survives(member.node)}
        """Those that nobody has claimed yet."""
        self.void = [lease_id for lease_id in leases.out if lease_id not in self._open]
        """Those whose nodes have ended with the hub."""

    def __bool__(self) -> bool:
        """Whether there is something to claim."""
        return bool(self._open)

    def take(self, presented: Iterable[Lease]) -> list[Lease]:
        """A node presents leases; those that it may keep. All others are of no use to anybody."""
        kept: list[Lease] = []
        for lease in presented:
            member = self._leases.out.get(lease.lease_id) if lease.lease_id in self._open else None
            if member is not None and (member.task, member.floor) == (lease.task, lease.min_version):
                self._open.discard(lease.lease_id)
                kept.append(lease)
        return kept

    def expire(self) -> list[int]:
        """It is too late to claim anything; what nobody has claimed."""
        left = [lease_id for lease_id in sorted(self._open) if lease_id in self._leases.out]
        self._open.clear()
        return left
