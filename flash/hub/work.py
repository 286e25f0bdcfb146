"""The hub's leases: how tasks get to nodes, and how results come back.

A *lease* assigns one task to one node. `NodeWork.lease` answers a node with leases from the sample buffer, and
`NodeWork.deliver` gives the results of the node to the buffer, where they complete groups. When the buffer can form a
batch, the waiting trainer ranks are woken, and `flash.hub.steps.TrainingSteps.batch` continues. `flash.hub.hub.Hub`
makes the one `NodeWork` of a run and calls it for each request of a node.

`flash.hub.shares.NodeShares` decides which *share* of the available tasks each waiting node gets.

Invariants:
- Every lease that the buffer has granted is finished, revoked or withdrawn exactly once, even if its node is lost.
- No task waits while a waiting node could run it, except the tasks of a share that is kept for another node.

`LeaseClaims` is pure state: it owns no tasks, clocks or files. The methods of `NodeWork` run in the tasks of requests,
except that `work_off_backlog` and `expire_claims` run in tasks of `Hub.run`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from itertools import islice, takewhile

import anyio
from anyio.lowlevel import checkpoint

from flash.config import waits
from flash.errors import FlashError
from flash.hub import protocol as p
from flash.hub.context import HubContext
from flash.hub.fleet import HUB_NODE
from flash.hub.metrics import FAILURES
from flash.hub.shares import NodeShares
from flash.samples.tasks import LeaseTable
from flash.types import Activity, Failure, Lease, Outcome, Trajectory

RESULTS_AT_ONCE = 256
"""Number of results that are stored before other tasks are served. Each result takes about 30 microseconds, so other
tasks wait for at most 8 ms."""
LEASES_AT_ONCE = 256
"""Largest number of leases in one reply, so that one reply takes only a few milliseconds: granting a lease takes about
10 microseconds. The node then asks at once for the rest of its share."""
SLICE = 128
"""Number of leases of a slice. After each slice, other tasks of the hub are served, so that no other request waits for
more than some milliseconds. A slice may have more leases: the reply that is being filled when this number is reached
still gets the whole share of its node, up to `LEASES_AT_ONCE`."""


# -- leases of nodes -------------------------------------------------------------------------------------------------


class Holders:
    """Records which node holds which lease, and which leases each node has to cancel.

    Training leases and evaluation leases are recorded alike. The sample buffer and the evaluations know the tasks that
    are leased, but need not know the nodes. A node holds a lease until it has delivered a result, even if the lease was
    withdrawn. Times are Unix seconds.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Lease, float]] = {}
        """Node, lease, and time at which it was granted, by the number of the lease, in the order of the times."""
        self._of_node: dict[int, dict[int, Lease]] = {}
        """Leases of each node, by the number of the lease."""
        self._cancels: dict[int, list[int]] = {}
        """Numbers of the leases that the node must cancel and has not been notified about, by node."""

    def granted(self, node: int, leases: Iterable[Lease], now: float) -> None:
        """Record that a node was given leases at the time `now`."""
        for lease in leases:
            self._held[lease.lease_id] = node, lease, now
            self._of_node.setdefault(node, {})[lease.lease_id] = lease

    def held(self, node: int) -> int:
        """Return the number of leases that a node holds."""
        return len(self._of_node.get(node, ()))

    def granted_before(self, then: float) -> list[tuple[int, Lease]]:
        """Return the leases that were granted before a time, each with its node. The hub takes them back as too old."""
        # The leases are in the order of their times, so the search ends at the first one that is young enough.
        held = self._held.values()
        return [(node, lease) for node, lease, _ in takewhile(lambda each: each[2] < then, held)]

    def oldest(self, most: int) -> list[tuple[int, Lease, float]]:
        """Return the `most` oldest leases, each with its node and the time at which it was granted."""
        return list(islice(self._held.values(), most))

    def oldest_of(self, node: int) -> float | None:
        """Return the time at which the oldest lease of a node was granted; None if the node holds no lease."""
        first = next(iter(self._of_node.get(node, ())), None)
        return None if first is None else self._held[first][2]

    def ended(self, lease_id: int) -> None:
        """Record that a lease was delivered or taken back by the hub. An unknown lease is ignored."""
        if (held := self._held.pop(lease_id, None)) is not None:
            del self._of_node[held[0]][lease_id]

    def lost(self, node: int) -> list[Lease]:
        """Forget a lost or silent node, and the leases that it should have cancelled. Returns the leases that it
        held."""
        self._cancels.pop(node, None)
        leases = list(self._of_node.pop(node, {}).values())
        for lease in leases:
            del self._held[lease.lease_id]
        return leases

    def withdraw(self, lease_ids: Iterable[int]) -> set[int]:
        """Record that nodes have to cancel these leases, and return the nodes. Leases without a node are ignored."""
        nodes: set[int] = set()
        for lease_id in lease_ids:
            if lease_id in self._held:
                node = self._held[lease_id][0]
                self._cancels.setdefault(node, []).append(lease_id)
                nodes.add(node)
        return nodes

    def has_cancels(self, node: int) -> bool:
        """Return True if a node has leases to cancel."""
        return node in self._cancels

    def take_cancels(self, node: int) -> list[int]:
        """Return the leases that a node has to cancel, and forget them, because a node is notified once.

        Some of them may have ended since then. The node ignores a lease that it does not hold any more.
        """
        return self._cancels.pop(node, [])


# -- leases of previous hubs -----------------------------------------------------------------------------------------


class LeaseClaims:
    """Set of the leases that previous hubs granted and that no node has presented to this hub yet. This is pure state.

    A node that outlives a hub continues its work, and presents its leases to the next hub. The next hub knows from its
    recovered state which leases are *out*: granted, and neither finished nor withdrawn. The node may keep these leases
    and drops all others. If no node claims a lease within some time, its task is queued again.

    Invariant: each lease of a previous hub is claimed by a node, or is revoked, or had ended before. Exactly one of
    these happens, and only once.

    Args:
        leases: the training leases as the previous hub has left them.
        ended_node: number of the node that ended together with the previous hub, because it ran that hub.
    """

    def __init__(self, leases: LeaseTable, ended_node: int) -> None:
        self._leases = leases
        self._open = {lease_id for lease_id, member in leases.out.items() if member.node != ended_node}
        """Numbers of the leases that no node has claimed yet."""
        self.void = [lease_id for lease_id in leases.out if lease_id not in self._open]
        """Numbers of the leases of `ended_node`. The owner revokes these leases."""

    def __bool__(self) -> bool:
        """Return True if any lease can still be claimed."""
        return bool(self._open)

    def claim(self, presented: Iterable[Lease]) -> list[Lease]:
        """Return the presented leases that the node may keep. No other node can claim them any more."""
        kept: list[Lease] = []
        for lease in presented:
            member = self._leases.out.get(lease.lease_id) if lease.lease_id in self._open else None
            # A node may present anything. So a lease counts only if its task, and the oldest version that may sample
            # for it, are equal to what the hub has granted.
            if member is not None and (member.task, member.oldest_version) == (lease.task, lease.min_version):
                self._open.discard(lease.lease_id)
                kept.append(lease)
        return kept

    def expire(self) -> list[int]:
        """End the time for claims. Returns the numbers of the unclaimed leases that are still out.

        A lease may have ended without a claim, for example because its group was withdrawn.
        """
        left = [lease_id for lease_id in sorted(self._open) if lease_id in self._leases.out]
        self._open.clear()
        return left


# -- leases and results ----------------------------------------------------------------------------------------------


class NodeWork:
    """Grants leases to nodes and stores their results.

    It has two sources of tasks: the sample buffer (training tasks) and the evaluations. Waiting requests are woken by
    *signals*, which are names of things that may change (`flash.hub.context`).

    Args:
        context: the shared objects of the hub.
    """

    def __init__(self, context: HubContext) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._metrics, self._fleet = context.progress, context.metrics, context.fleet
        self._buffer, self._samples = context.buffer, context.buffer.samples
        self._evaluations, self._journal = context.evaluations, context.persistence.journal
        self._leaving: set[int] = set()
        """Nodes that are leaving, and get no more leases."""
        rollout = self._config.rollout
        # With `group` in `rollout.barriers`, all members of a group go to one node together.
        unit = rollout.group_size + rollout.extra_per_group if "group" in rollout.barriers else 1
        self.holders = Holders()
        """Leases that each node holds, and leases that each node has to cancel."""
        self.shares = NodeShares(self.holders.held, unit)
        """Decides how many of the available tasks each node gets."""
        self._replies: dict[int, list[Lease]] = {}
        """Replies to the waiting nodes, to which `grant_leases` still appends leases, by node."""
        self._kept_until = self.shares.kept_until
        """Value of `shares.kept_until` after the last `grant_leases`."""
        self.slice_full = False
        """True if the last slice of `grant_leases` ended because it was full, so that tasks may be left for another."""
        self.claims = LeaseClaims(self._samples.leases, HUB_NODE)
        # The hub's own node has ended together with the previous hub. An error ends the start of this hub, which no
        # request waits for yet, so it is raised and not passed to the run (`buffer_errors_end_run`).
        if self.claims.void:
            self._buffer.revoke(self.claims.void)
        self._poll_s = waits.long_poll_s(self._config)
        """Seconds after which a request for leases is answered at the latest."""
        self._openings = 0
        """Value of `admission.openings` when `deliver` or `tidy` last granted leases. `admission.openings` counts the
        events after which a lease may be possible. If it has changed since then, `deliver` grants leases again."""
        self._evaluation_start: float | None = None
        """Unix seconds of the first lease of the running evaluation; None while no evaluation runs."""

    @contextmanager
    def buffer_errors_end_run(self) -> Generator[None]:
        """Run a block that changes the sample buffer. If the buffer raises an error, the run ends with this error.

        The error is not raised in the caller, because it need not concern the caller's request: a change may do a slice
        of the backlog, which is work that other events have postponed.
        """
        try:
            yield
        except FlashError as error:
            self._progress.fail(error)

    # -- leases go out -----------------------------------------------------------------------------------------------

    async def lease(self, request: p.LeaseRequest) -> p.LeaseReply:
        """Reply to a node with leases: its share of the tasks that can run now.

        If no task can run, the request waits for at most `waits.long_poll_s`; the reply may be empty then.
        `grant_leases` appends leases to the list `reply` and wakes this request. The end of the run wakes it, too, and
        so does the end of the time for which tasks were kept for other nodes. If the connection of the node ends
        meanwhile, this request is cancelled, and `node_lost` queues the tasks of the leases in the reply again. If the
        run has failed, its error is raised.
        """
        node = request.node
        if node in self._leaving:
            # A node that leaves asks for leases until it has the reply to `Leave`. If it got an empty reply at once, it
            # would ask again and again.
            await anyio.sleep(self._poll_s)
            return p.LeaseReply([], done=self._progress.done)
        reply: list[Lease] = []
        self.shares.node_waits(node, request.capacity)
        self._replies[node] = reply
        self.grant_leases()
        try:
            with anyio.move_on_after(self._poll_s):
                while not reply and not self._progress.done:
                    await self._wait_for_leases(node, reply)
        finally:
            # Nothing stops a node from asking again before this request has ended. Then the reply to its later request
            # is in this place, and stays open.
            if self._replies.get(node) is reply:
                del self._replies[node]
                self.shares.stops_waiting(node)
        return p.LeaseReply(reply, done=self._progress.done)

    async def _wait_for_leases(self, node: int, reply: list[Lease]) -> None:
        """Wait until the reply has leases, the run is over, or the time for which shares are kept was changed.

        If the time for which shares are kept ends first, grant leases again: the tasks of these shares are free then.
        The caller calls this again until its own deadline. Raises the error of the run if the run has failed.
        """
        kept, now = self.shares.kept_until, self._now()
        with anyio.move_on_after(kept - now if kept > now else math.inf):
            await self._progress.until(
                ("leases", node), lambda: bool(reply) or self._progress.done or self.shares.kept_until != kept
            )
            return
        self.grant_leases()

    def grant_leases(self) -> None:
        """Lease one slice of the available tasks to the waiting nodes, by their shares, and wake these nodes.

        This is called whenever tasks may have become available, or a node may have room again. If the slice was full,
        `work_off_backlog` calls this again, after other tasks were served. Does nothing in a run that has failed.
        """
        if self._progress.error is not None:
            return
        self.slice_full = self._grant_slice(self._now())
        woken = [node for node, reply in self._replies.items() if reply]
        if self.shares.kept_until != self._kept_until:
            # The request of each waiting node sleeps until the old time (`_wait_for_leases`), and must be woken to
            # learn the new time.
            self._kept_until = self.shares.kept_until
            woken = list(self._replies)
        for node in woken:
            self._progress.send(("leases", node))
        if self.slice_full:
            self._progress.send("backlog")

    def _grant_slice(self, now: float) -> bool:
        """Append leases to the open replies, until the slice is full or no waiting node can be given a task any more.

        Returns True if the slice is full: `SLICE` leases were granted, and nodes with a share of the rest are left.
        """
        unable: set[int] = set()
        granted = 0
        while self.shares.any_waiting and (tasks := self._available_tasks()):
            shares = self.shares.compute(tasks, now, unable)
            if not shares:
                break
            for node, share in shares.items():
                if granted >= SLICE:
                    return True
                reply = self._replies[node]
                wanted = min(share, LEASES_AT_ONCE - len(reply))
                leases: list[Lease] = []
                while len(leases) < wanted and (more := self._grant_next(node)):
                    leases += more
                self.holders.granted(node, leases, now)
                reply += leases
                granted += len(leases)
                if len(leases) < wanted:
                    # The node cannot run any task that is left, for example because it lacks the version for it.
                    unable.add(node)
                elif wanted < share:  # the reply is full
                    self.shares.reply_full(node, now)
        return False

    def _available_tasks(self) -> int:
        """Return the number of tasks that a node with the newest version could get.

        The number may be too high, but it is 0 only if no node can get a task.
        """
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

    def _grant_next(self, node: int) -> list[Lease]:
        """Grant a node the next task. With `group` in `rollout.barriers`, grant all members of the next group.

        Evaluation tasks come first, one at a time in both cases. Returns an empty list if there is no task for this
        node. This is so if no engine of the node has a version, if the run stops, while the untrained policy is being
        evaluated, or if the age contract admits none. The age contract bounds how far sampling may be ahead of
        training. An error of the buffer ends the run.
        """
        versions = self._fleet.versions(node)
        if (lease := self._evaluations.lease(versions, node, nodes=self._able_nodes)) is not None:
            self._evaluation_start = self._now() if self._evaluation_start is None else self._evaluation_start
            return [lease]
        # The untrained policy is evaluated alone, before any training task.
        untrained = self._evaluations.evaluates_untrained
        if max(versions, default=-1) < 0 or self._progress.stopping is not None or untrained:
            return []
        with self.buffer_errors_end_run():
            lease = self._buffer.lease(versions, node, nodes=self._able_nodes)
        if lease is None:
            return []
        self._metrics.sampling_began(self._now())
        if "group" in self._config.rollout.barriers:
            return [lease, *self._buffer.lease_rest(lease, versions, node)]  # issues nothing, so it raises no error
        return [lease]

    # -- results come in ---------------------------------------------------------------------------------------------

    async def deliver(self, request: p.DeliverRequest) -> p.Ack:
        """Store the results of leases that a node delivers, in slices.

        Then it passes on the leases that the results have made useless, and grants the tasks that the results make
        possible. It wakes the trainer ranks if they can continue (`ranks_can_proceed`). The reply goes out when the
        journal, a file with every change of the samples, has the results. Only then may the node forget them, because
        the next hub recovers results only from the journal. `Gate` has checked that the node holds all of these leases.
        """
        for number, ended in enumerate(request.ended, start=1):
            self.holders.ended(ended.lease_id)
            self._store_result(request.node, ended.lease_id, ended.result)
            if number % RESULTS_AT_ONCE == 0:
                await checkpoint()
        self.shares.set_capacity(request.node, request.capacity)
        self.pass_on_withdrawals()
        # Most results make no task available, and granting leases would cost time in each of many thousand deliveries.
        # So leases are granted only after an opening, or after a result of an evaluation: the end of an evaluation may
        # make other tasks available.
        if self._samples.admission.openings != self._openings or any(
            ended.result.task.split == "eval" for ended in request.ended
        ):
            self._openings = self._samples.admission.openings
            self.grant_leases()
        if self._samples.backlog:
            await self.tidy()
        elif self.ranks_can_proceed():
            self._progress.send("batches")
        await self._journal.written()
        return p.Ack()

    def _store_result(self, node: int, lease_id: int, result: Trajectory | Failure) -> None:
        """Store one result in the evaluation or in the sample buffer. An error of the buffer ends the run.

        A failure is also reported to the observer, for people. With the last result of an evaluation, the observer gets
        the row of the evaluation and its *activity* (a bar on the run's timeline). The result also wakes the tasks that
        wait for the next stage of the run, such as its end.
        """
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
        with self.buffer_errors_end_run():
            self._buffer.deliver(lease_id, result, node)

    async def tidy(self) -> None:
        """Do all work in the buffer's backlog, in slices, then grant the leases that it made possible.

        The backlog is work on many groups that one event has begun; no batch is formed while it has work. Other tasks
        are served after each slice. Several tasks may call this at the same time: each does slices of the one backlog.
        Wakes the ranks that wait for a batch. An error of the buffer ends the run.
        """
        while self._samples.backlog:
            with self.buffer_errors_end_run():
                self._buffer.do_slice()
            self.pass_on_withdrawals()
            await checkpoint()
        self.pass_on_withdrawals()
        self._openings = self._samples.admission.openings
        self.grant_leases()
        self._progress.send("batches")

    async def work_off_backlog(self) -> None:
        """Do the postponed work for which no request waits.

        This loop does the buffer's backlog (`tidy`), and grants the tasks that `grant_leases` has left for a further
        slice. Other tasks are served after each slice. Without such work the loop waits for the signal `backlog`. The
        loop ends when the run fails. At the end of the run, `Hub.run` cancels it.
        """
        while self._progress.error is None:
            if self._samples.backlog:
                await self.tidy()
            elif self.slice_full:
                await checkpoint()
                self.grant_leases()
            else:
                # The event that sent the signal may have withdrawn leases without leaving a backlog: `take_back`, for
                # example, does the first slice of the buffer's work at once.
                self.pass_on_withdrawals()
                await self._progress.wait("backlog")

    def pass_on_withdrawals(self) -> None:
        """Pass on the leases that the buffer has withdrawn, and the notes that it has written for people.

        A note tells, for example, about the first failure of a kind. The results of withdrawn leases are not needed any
        more. The signal `cancels` wakes the `CancelRequest` that waits for the node, and the reply names the leases.
        `deliver`, `tidy` and `flash.hub.steps.TrainingSteps` call this after operations of the buffer that may withdraw
        leases. After all other such operations, which send the signal `backlog`, `work_off_backlog` calls this.
        """
        for node in self.holders.withdraw(self._samples.leases.to_cancel):
            self._progress.send(("cancels", node))
        self._samples.leases.to_cancel.clear()
        for note in self._samples.notes:
            self._observer.note(note)
        self._samples.notes.clear()

    def ranks_can_proceed(self) -> bool:
        """Return True if a rank that waits for its shard can form a round, fetch it, or learn that the run stops.

        A round is the samples of a step that the ranks train before they ask for more. A shard is the part of a round
        that one trainer rank trains. While another rank's request forms the round, all ranks wait.
        """
        progress = self._progress
        if progress.batch == "forming":
            return False
        if progress.batch == "dealt" or progress.stopping is not None:
            return True
        return progress.version >= self._config.run.steps or self._buffer.has_round(progress.version)

    # -- leases of previous hubs -------------------------------------------------------------------------------------

    def claim(self, request: p.ClaimRequest) -> p.ClaimReply:
        """Let a node that has outlived the previous hub keep the leases that it presents and that are still out.

        The node sends this request right after it has joined. Like a new lease, a kept lease may begin the time over
        which the next step's waits and rates are measured (`StepMetrics.sampling_began`).
        """
        kept = self.claims.claim(request.leases)
        if kept:
            self._metrics.sampling_began(self._now())
        self.holders.granted(request.node, kept, self._now())
        return p.ClaimReply([lease.lease_id for lease in kept])

    async def expire_claims(self) -> None:
        """Queue again the tasks of leases that previous hubs granted and that no node has claimed in time.

        `Hub.run` starts this once. This method waits once, for `flash.config.waits.claim_s`, queues the tasks and ends.
        It returns at once if there is no lease to claim. The note for people calls the tasks samples.
        """
        if not self.claims:
            return
        await anyio.sleep(waits.claim_s(self._config))
        if left := self.claims.expire():
            self._observer.note(f"samples that queue again, since their nodes did not come back: {len(left)}")
            with self.buffer_errors_end_run():
                self._buffer.revoke(left)
            # `revoke` queues the first tasks at once and leaves the rest to the backlog. Waiting ranks check again
            # whether a step is possible, because this also depends on the leases that are out
            # (`SampleBuffer.has_round`).
            self._progress.send("batches", "backlog")
            self.grant_leases()

    # -- leases of nodes that leave, hang or are lost ----------------------------------------------------------------

    def stop_leasing_to(self, node: int) -> None:
        """Stop leasing to a node that has announced that it leaves, until `node_left`. Other nodes get its share."""
        self.shares.remove(node)
        self._leaving.add(node)
        self.grant_leases()

    def node_left(self, node: int) -> None:
        """Forget that a node was leaving. Its connection has ended, so another node may get its number."""
        self._leaving.discard(node)

    def take_back(self, node: int, lease: Lease, message: str) -> None:
        """End a lease that a node has held for too long.

        The node must cancel the episode. The task counts as failed on this node, and is tried again as after any other
        failure of an engine.

        `message`: the reason, for the failure.
        """
        # `withdraw` comes before `ended`, because `ended` forgets which node must cancel the lease. The tasks that the
        # signals wake run only after this method has returned.
        self.holders.withdraw([lease.lease_id])
        self._progress.send(("cancels", node), "batches", "backlog")
        self.holders.ended(lease.lease_id)
        self._store_result(node, lease.lease_id, Failure(lease.task, Outcome.ENGINE_ERROR, message, 0))
        self.grant_leases()

    def node_lost(self, node: int) -> None:
        """Queue the tasks of all leases of a node again, because the node is lost or silent.

        The node's engines do not count in the fleet any more, and its open reply gets no more leases.
        """
        self._fleet.lost(node)
        self._replies.pop(node, None)
        self.shares.remove(node)
        training: list[int] = []
        for lease in self.holders.lost(node):
            if lease.task.split == "eval":
                self._evaluations.revoke(lease.lease_id)
            else:
                training.append(lease.lease_id)
        with self.buffer_errors_end_run():
            self._buffer.revoke(training)
        self._progress.send("run", "batches", "engines", "backlog")
        self.grant_leases()
