"""Grant leases of tasks to nodes, and book the results that come back.

`NodeWork.lease` answers a node with leases from the sample buffer. The node runs them (`flash.rollout.scheduler`).
`NodeWork.deliver` stores the results in the buffer, where they complete groups. When the buffer can form a batch, the
waiting trainer ranks are woken, and `flash.hub.steps.TrainingSteps.batch` continues.

A lease is the right and the duty of a node to run one task. Invariant of the buffer: issued = trained + filtered +
given_up + in_flight. For this module it means that every lease that the buffer has granted is finished, revoked or
withdrawn exactly once, even if its node is lost. The methods run in the tasks of the nodes' requests, except that
`work_off_backlog` and `expire_claims` run in tasks of `Hub.run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import anyio
from anyio.lowlevel import checkpoint

from flash.config import waits
from flash.errors import FlashError
from flash.hub import protocol as p
from flash.hub.context import HubContext
from flash.hub.dealing import LeaseDealer
from flash.hub.metrics import FAILURES
from flash.samples.leases import LeaseTable
from flash.types import Activity, Failure, Lease, Outcome, Trajectory

RESULTS_AT_ONCE = 256
"""Number of results that are stored before other tasks are served. Each result takes some 30 microseconds."""


class LeaseClaims:
    """Set of the leases that previous hubs granted and that no node has presented to this hub yet. Pure state.

    A node that outlives a hub continues its work, and presents its leases to the next hub. The next hub knows from its
    recovered state which leases are out: granted, and neither finished nor withdrawn. The node may keep these leases
    and drops all others. If no node claims a lease within some time, its task is queued again.

    Invariant: each lease of a previous hub is claimed by a node, or is revoked, or had ended before. Exactly one of
    these happens, and only once.

    Args:
        leases: the training leases as the previous hub has left them.
        survives: returns True for a node that may have outlived the previous hub.
    """

    def __init__(self, leases: LeaseTable, survives: Callable[[int], bool]) -> None:
        self._leases = leases
        self._open = {lease_id for lease_id, member in leases.out.items() if survives(member.node)}
        """Numbers of the leases that no node has claimed yet."""
        self.void = [lease_id for lease_id in leases.out if lease_id not in self._open]
        """Numbers of the leases whose nodes ended together with the previous hub. The owner revokes these leases."""

    def __bool__(self) -> bool:
        """Return True if any lease can still be claimed."""
        return bool(self._open)

    def claim(self, presented: Iterable[Lease]) -> list[Lease]:
        """Return the presented leases that the node may keep. No other node can claim them any more."""
        kept: list[Lease] = []
        for lease in presented:
            member = self._leases.out.get(lease.lease_id) if lease.lease_id in self._open else None
            # A node may present anything, so a lease counts only if its task and version are those that were granted.
            if member is not None and (member.task, member.oldest_version) == (lease.task, lease.min_version):
                self._open.discard(lease.lease_id)
                kept.append(lease)
        return kept

    def expire(self) -> list[int]:
        """End the time for claims. Returns the numbers of the unclaimed leases that are still out."""
        left = [lease_id for lease_id in sorted(self._open) if lease_id in self._leases.out]
        self._open.clear()
        return left


class NodeWork:
    """Grants leases to nodes and books their results.

    Args:
        context: the shared objects of the hub.
        survives: returns True for a node that may have outlived the previous hub.
    """

    def __init__(self, context: HubContext, survives: Callable[[int], bool]) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._metrics, self._fleet = context.progress, context.metrics, context.fleet
        self._buffer, self._samples = context.buffer, context.buffer.samples
        self._evaluations, self._journal = context.evaluations, context.persistence.journal
        self._leaving: set[int] = set()
        """Nodes that are leaving, and get no more leases."""
        rollout = self._config.rollout
        unit = 1 if rollout.replicate_prompts else rollout.group_size + rollout.extra_per_group
        self._dealer = LeaseDealer(self._available_tasks, self._lease_next, unit)
        # `holders` records which node has which lease; `shares` decides how many of the tasks each node gets.
        self.holders, self.shares = self._dealer.holders, self._dealer.shares
        self.claims = LeaseClaims(self._samples.leases, survives)
        if self.claims.void:
            self._buffer.revoke(self.claims.void)
        self._poll_s = waits.long_poll_s(self._config)
        self._openings = 0
        """Value of `admission.openings`, which counts the events that may have made a lease possible, at the last deal
        after a delivery. If the counter has changed since then, leases are dealt again."""
        self._evaluation_start: float | None = None
        """Unix seconds of the first lease of the running evaluation; None while none runs."""

    # -- leases go out -----------------------------------------------------------------------------------------------

    async def lease(self, request: p.LeaseRequest) -> p.LeaseReply:
        """Reply to a node with leases: its share of the tasks that can run now (`flash.hub.dealing`).

        If there is none, waits for at most `waits.long_poll_s`; the reply may be empty then. `deal` appends leases to
        the list `reply` and wakes this request. The end of the run wakes it, too, and so does the end of the time for
        which tasks were kept for other nodes.
        """
        if request.node in self._leaving:
            # A node that leaves asks for leases until it has the reply to `Leave`. If it got an empty reply at once, it
            # would ask again and again.
            await anyio.sleep(self._poll_s)
            return p.LeaseReply([], done=self._progress.done)
        reply = self._dealer.open_reply(request.node, request.capacity)
        self.deal()
        try:
            with anyio.move_on_after(self._poll_s):
                while not reply and not self._progress.done:
                    await self._wait_for_leases(request.node, reply)
        finally:
            self._dealer.close_reply(request.node, reply)
        return p.LeaseReply(reply, done=self._progress.done)

    async def _wait_for_leases(self, node: int, reply: list[Lease]) -> None:
        """Wait until the reply has leases, the run is over, or the time for which shares are kept was changed.

        If that time passes first, deal again: the tasks that were kept for other nodes are free then.
        """
        kept, now = self.shares.kept_until, self._now()
        with anyio.move_on_after(kept - now if kept > now else math.inf):
            await self._progress.until(
                ("leases", node), lambda: bool(reply) or self._progress.done or self.shares.kept_until != kept
            )
            return
        self.deal()

    def deal(self) -> None:
        """Lease a slice of the available tasks to the waiting nodes, by their shares (`flash.hub.dealing`).

        This is called whenever tasks may have become available, or a node may have room again. If tasks are left for
        another slice, `work_off_backlog` calls this again.
        """
        if self._progress.error is None:
            for node in self._dealer.deal(self._now()):
                self._progress.send(("leases", node))
            if self._dealer.unfinished:
                self._progress.send("backlog")

    def _available_tasks(self) -> int:
        """Return the number of tasks that a node with the newest version could get. The number may be too high."""
        newest = self._progress.newest
        tasks = self._evaluations.available(newest)
        if newest >= 0 and self._progress.stopping is None and not self._evaluations.evaluates_untrained:
            tasks += self._buffer.available(newest)
        return tasks

    @property
    def _able_nodes(self) -> Collection[int]:
        """Nodes that could run a task now. A task that has failed on all of them may go to any of them."""
        able = self._fleet.able_nodes
        return able - self._leaving if self._leaving else able

    def _lease_next(self, node: int) -> list[Lease]:
        """Grant a node the next task; without `rollout.replicate_prompts`, all members of the next training group.

        Evaluation tasks come first, one at a time. Returns an empty list if there is no task for this node: no engine
        of the node has a version, the run stops, the untrained policy is being evaluated, or the age contract admits
        none. An error of the buffer ends the run.
        """
        versions = self._fleet.versions(node)
        if (lease := self._evaluations.lease(versions, node, nodes=self._able_nodes)) is not None:
            self._evaluation_start = self._now() if self._evaluation_start is None else self._evaluation_start
            return [lease]
        # No training task goes out while the untrained policy is evaluated.
        untrained = self._evaluations.evaluates_untrained
        if max(versions, default=-1) < 0 or self._progress.stopping is not None or untrained:
            return []
        try:
            lease = self._buffer.lease(versions, node, nodes=self._able_nodes)
        except FlashError as error:
            self._progress.fail(error)
            return []
        if lease is None:
            return []
        self._metrics.sampling_began(self._now())
        if self._config.rollout.replicate_prompts:
            return [lease]
        return [lease, *self._buffer.lease_rest(lease, versions, node)]

    # -- results come in ---------------------------------------------------------------------------------------------

    async def deliver(self, request: p.DeliverRequest) -> p.Ack:
        """Store the results of leases, in slices. Then lease the tasks that they make possible, and wake the ranks.

        Returns when the journal has the results. Only then may the node forget them, because the next hub recovers
        results only from the journal. The ranks are woken if they can continue (`ranks_can_proceed`).
        """
        for number, ended in enumerate(request.ended, start=1):
            self.holders.ended(ended.lease_id)
            self._book(request.node, ended.lease_id, ended.result)
            if number % RESULTS_AT_ONCE == 0:
                await checkpoint()
        self.shares.set_capacity(request.node, request.capacity)
        self.pass_on_withdrawals()
        if self._samples.admission.openings != self._openings or any(
            ended.result.task.split == "eval" for ended in request.ended
        ):
            self._openings = self._samples.admission.openings
            self.deal()
        if self._samples.backlog:
            await self.tidy()
        elif self.ranks_can_proceed():
            self._progress.send("batches")
        await self._journal.written()
        return p.Ack()

    def _book(self, node: int, lease_id: int, result: Trajectory | Failure) -> None:
        """Store one result in the evaluation or in the sample buffer. An error of the buffer ends the run."""
        if isinstance(result, Failure) and result.outcome in FAILURES:
            self._observer.failure(result.outcome, f"node {node}: {result.message}")
        if result.task.split == "eval":
            if (row := self._evaluations.deliver(lease_id, result, node)) is not None:
                now = self._now()
                self._observer.evaluation(row | {"time": now})
                if self._evaluation_start is not None:
                    self._observer.activities([Activity("evaluation", "evaluate", self._evaluation_start, now)])
                self._evaluation_start = None
                self._progress.send("run")
            return
        try:
            self._buffer.deliver(lease_id, result, node)
        except FlashError as error:
            self._progress.fail(error)

    async def tidy(self) -> None:
        """Do all work in the buffer's backlog, in slices. Other tasks are served after each slice."""
        while self._samples.backlog:
            try:
                self._buffer.do_slice()
            except FlashError as error:
                self._progress.fail(error)
            self.pass_on_withdrawals()
            await checkpoint()
        self.pass_on_withdrawals()
        self._openings = self._samples.admission.openings
        self.deal()
        self._progress.send("batches")

    async def work_off_backlog(self) -> None:
        """Do the postponed work for which no request waits.

        Consumes the buffer's backlog, and tasks that `deal` has left for a further slice. Waits for more such work.
        Unblocked by the signal `backlog`. Produces leases and queued tasks. Other tasks are served after each slice.
        The loop ends when the run fails.
        """
        while self._progress.error is None:
            if self._samples.backlog:
                await self.tidy()
            elif self._dealer.unfinished:
                await checkpoint()
                self.deal()
            else:
                await self._progress.wait("backlog")

    def pass_on_withdrawals(self) -> None:
        """Pass withdrawn leases of the buffer to the cancel requests of their nodes, and its notes to the observer."""
        for node in self.holders.withdraw(self._samples.leases.to_cancel):
            self._progress.send(("cancels", node))
        self._samples.leases.to_cancel.clear()
        for note in self._samples.notes:
            self._observer.note(note)
        self._samples.notes.clear()

    def ranks_can_proceed(self) -> bool:
        """Return True if a rank that waits for its shard can form a batch, fetch it, or learn that the run stops."""
        progress = self._progress
        if progress.batch == "forming":
            return False
        if progress.batch == "dealt" or progress.stopping is not None:
            return True
        return progress.version >= self._config.run.steps or self._buffer.has_batch(progress.version)

    # -- leases of previous hubs -------------------------------------------------------------------------------------

    def claim(self, request: p.ClaimRequest) -> p.ClaimReply:
        """Let a node that has outlived the previous hub keep the leases that it presents and that are still out."""
        kept = self.claims.claim(request.leases)
        if kept:
            self._metrics.sampling_began(self._now())
        self.holders.granted(request.node, kept, self._now())
        return p.ClaimReply([lease.lease_id for lease in kept])

    async def expire_claims(self) -> None:
        """Queue the tasks of leases again that previous hubs granted and that no node has claimed in time.

        Waits once, for `flash.config.waits.claim_s`. Returns at once if there is no lease to claim.
        """
        if not self.claims:
            return
        await anyio.sleep(waits.claim_s(self._config))
        if left := self.claims.expire():
            self._observer.note(f"samples that queue again, since their nodes did not come back: {len(left)}")
            self._buffer.revoke(left)
            self._progress.send("batches", "backlog")
            self.deal()

    # -- leases of nodes that leave, hang or are lost ----------------------------------------------------------------

    def stop_dealing_to(self, node: int) -> None:
        """Give no more leases to a node that leaves, until `node_left`."""
        self.shares.lost(node)
        self._leaving.add(node)
        self.deal()

    def node_left(self, node: int) -> None:
        """Remove a node from the leaving ones, because another node may get its number."""
        self._leaving.discard(node)

    def take_back(self, node: int, lease: Lease, message: str) -> None:
        """End a lease that a node has held for too long. The node must cancel it, and the task counts as failed on it.

        `message`: the reason, for the failure.
        """
        self.holders.withdraw([lease.lease_id])
        self._progress.send(("cancels", node), "batches", "backlog")
        self.holders.ended(lease.lease_id)
        self._book(node, lease.lease_id, Failure(lease.task, Outcome.ENGINE_ERROR, message, 0))
        self.deal()

    def node_lost(self, node: int) -> None:
        """Queue the tasks of all leases of a node again, because the node is lost or silent."""
        self._fleet.lost(node)
        training: list[int] = []
        for lease in self._dealer.lost(node):
            if lease.task.split == "eval":
                self._evaluations.revoke(lease.lease_id)
            else:
                training.append(lease.lease_id)
        self._buffer.revoke(training)
        self._progress.send("run", "batches", "engines", "backlog")
        self.deal()
