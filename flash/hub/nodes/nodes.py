"""Nodes: the hub's side of the rollout nodes. They get leases and cancels, and bring results; they come and go.

What they and their engines are told and tell of weights is in `flash.hub.nodes.versions`.

It owns no task: its methods run in the tasks of the nodes' requests, and `watch` and `catch_up` in those of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import anyio
from anyio.lowlevel import checkpoint

from flash.config import waits
from flash.errors import ContractError, DeadlineError, FlashError, PeerLostError, WeightsError, error_of
from flash.hub import protocol as p
from flash.hub.metrics import FAILURES
from flash.hub.nodes.claims import Claims
from flash.hub.nodes.dealing import Dealer
from flash.hub.nodes.fleet import Fleet, Statuses
from flash.hub.nodes.members import HUBS_OWN, Members
from flash.hub.nodes.versions import Versions
from flash.hub.parts import Parts
from flash.types import Activity, Failure, Lease, Outcome, Trajectory

SECOND_LOOK_S = 1.0
"""Between the moment in which a node seems silent and the verdict: a loop that was blocked itself has to read first."""
OF_ALL = (WeightsError, ContractError)
"""Errors that end the run whoever has them: what was sent to all engines, or the books, may be wrong."""
RESULTS_AT_ONCE = 256
"""Results taken before others are served: each costs some 30 microseconds."""


class Nodes:
    """See the module's docstring. `fleet` knows the engines, `versions` what they are to load.

    Args:
        parts: what all parts of the hub are given.
        members: tell nodes that come and go from the hub's own.
        known: the newest version that engines may have of a former hub.
        batch_at_hand: whether a trainer rank that waits for its batch would get on.
    """

    def __init__(
        self,
        parts: Parts,
        members: Members,
        known: int,
        batch_at_hand: Callable[[], bool],
    ) -> None:
        self._config = parts.config
        self._observer = parts.observer
        self._now = parts.now
        self._progress = parts.progress
        self._buffer = parts.buffer
        self._evaluations = parts.evaluations
        self._metrics = parts.metrics
        self._members = members
        self.leaving: dict[int, str] = {}
        """Nodes that have said that they go, and why; empty: in order."""
        self._sent_off: set[int] = set()
        """Nodes that are still to be told to go."""
        self.silent: set[int] = set()
        """Nodes that have lost their work for their silence, and have not spoken since."""
        self._batch_at_hand = batch_at_hand
        self.fleet = Fleet(self._config.deadlines.request, known)
        rollout = self._config.rollout
        together = 1 if rollout.replicate_prompts else rollout.group_size + rollout.extra_per_group
        self._dealer = Dealer(self._tasks_at_hand, self._next_leases, together)
        self.claims = Claims(self._buffer.leases, lambda node: members.has_joined(node) and not members.fixed)
        if self.claims.void:
            self._buffer.revoke(self.claims.void)
        self.versions = Versions(parts, self.fleet, self._dealer.shares, self.offer)
        self.holders = self._dealer.holders
        self.statuses = Statuses()
        self._poll_s = waits.long_poll_s(self._config)
        self._openings = 0
        self._evaluating_since: float | None = None

    # -- leases ------------------------------------------------------------------------------------------------------

    async def lease(self, request: p.LeaseRequest) -> p.LeaseReply:
        """Hand out tasks. Waits for a share of those that the age contract has room for, at most one long poll."""
        if request.node in self.leaving:  # it asked before it could stop itself
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
        kept, now = self._dealer.shares.kept_until, self._now()
        with anyio.move_on_after(kept - now if kept > now else math.inf):
            await self._progress.until(
                ("leases", node), lambda: bool(reply) or self._progress.done or self._dealer.shares.kept_until != kept
            )
            return
        self.offer()

    def offer(self) -> None:
        """There may be work that was not there before: those who wait for some get their shares."""
        if self._progress.error is None:
            for node in self._dealer.deal(self._now()):
                self._progress.signals.send(("leases", node))
            if self._dealer.unfinished:
                self._progress.signals.send("put off")

    def _tasks_at_hand(self) -> int:
        newest = self.fleet.newest
        tasks = self._evaluations.at_hand(newest)
        if newest >= 0 and self._progress.stopping is None and not self._evaluations.measuring_start:
            tasks += self._buffer.at_hand(newest)
        return tasks

    @property
    def _takers(self) -> Collection[int]:
        """The nodes that could run a task now: what has failed on all of them goes to any."""
        return self.fleet.able - self.leaving.keys() if self.leaving else self.fleet.able

    def _next_leases(self, node: int) -> list[Lease]:
        """The next task for a node, or the next whole group."""
        versions = self.fleet.versions(node)
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
        self._dealer.holders.lend(request.node, kept, self._now())
        return p.ClaimReply([lease.lease_id for lease in kept])

    def expire_claims(self) -> None:
        """It is too late to claim anything: what nobody has claimed goes back."""
        if left := self.claims.expire():
            self._observer.note(f"samples given out again, as no node has come that has them in hand: {len(left)}")
            self._buffer.revoke(left)
            self._progress.signals.send("batches", "put off")
            self.offer()

    # -- results -----------------------------------------------------------------------------------------------------

    async def deliver(self, request: p.DeliverRequest) -> p.Ack:
        """Take results; others are served after each slice."""
        for number, ended in enumerate(request.ended, start=1):
            self._dealer.holders.ended(ended.lease_id)
            self._take(request.node, ended.lease_id, ended.result)
            if number % RESULTS_AT_ONCE == 0:
                await checkpoint()
        self._dealer.shares.tells(request.node, request.capacity)
        self.spread_word()
        if self._buffer.openings != self._openings or any(ended.result.task.split == "eval" for ended in request.ended):
            self._openings = self._buffer.openings
            self.offer()
        if self._buffer.untidy:
            await self.tidy()
        elif self._batch_at_hand():
            self._progress.signals.send("batches")
        await self._buffer.journal.written()
        return p.Ack()

    def _take(self, node: int, lease_id: int, result: Trajectory | Failure) -> None:
        if isinstance(result, Failure) and result.outcome in FAILURES:
            self._observer.failure(result.outcome, f"node {node}: {result.message}")
        if result.task.split == "eval":
            if (row := self._evaluations.finish(lease_id, result, node)) is not None:
                now = self._now()
                self._observer.evaluation(row | {"time": now})
                if self._evaluating_since is not None:
                    self._observer.activities([Activity("evaluation", "evaluate", self._evaluating_since, now)])
                self._evaluating_since = None
                self._progress.signals.send("run")
            return
        try:
            self._buffer.finish(lease_id, result, node)
        except FlashError as error:
            self._progress.fail(error)

    async def tidy(self) -> None:
        """Do what the buffer has put off; others are served after each slice. When it returns, nothing is left."""
        while self._buffer.untidy:
            try:
                self._buffer.tidy()
            except FlashError as error:
                self._progress.fail(error)
            self.spread_word()
            await checkpoint()
        self.spread_word()
        self._openings = self._buffer.openings
        self.offer()
        self._progress.signals.send("batches")

    async def catch_up(self) -> None:
        """Do the rest of what nobody waits for: a lost node's leases go back, and many tasks go out at once.

        Consumes what was put off. Waits for more of it. Produces leases; others are served after each slice.
        """
        while self._progress.error is None:
            if self._buffer.untidy:
                await self.tidy()
            elif self._dealer.unfinished:
                await checkpoint()
                self.offer()
            else:
                await self._progress.signals.wait("put off")

    def spread_word(self) -> None:
        """Keep what the buffer has withdrawn for the nodes' cancel requests, and pass its notes on."""
        for node in self._dealer.holders.withdraw(self._buffer.leases.withdrawn):
            self._progress.signals.send(("cancels", node))
        self._buffer.leases.withdrawn.clear()
        for note in self._buffer.notes:
            self._observer.note(note)
        self._buffer.notes.clear()

    async def cancels(self, request: p.CancelRequest) -> p.CancelReply:
        """Tell a node what has become pointless. Waits for some of it, at most one long poll."""
        node = request.node
        self.fleet.asked(node)
        self.silent.discard(node)
        with anyio.move_on_after(self._poll_s):
            await self._progress.until(
                ("cancels", node),
                lambda: self._progress.done or self._dealer.holders.has_cancels(node) or node in self._sent_off,
            )
        self.fleet.answered(node, self._now())
        leave = node in self._sent_off
        self._sent_off.discard(node)
        return p.CancelReply(self._dealer.holders.take_cancels(node), done=self._progress.done, leave=leave)

    # -- who comes and goes ------------------------------------------------------------------------------------------

    def joins(self, node: int, engines: int) -> None:
        """A node has become a member of the run; its engines are still to start, or to load a version."""
        self._observer.note(f"node {node} joins with {engines} engine{'s' if engines > 1 else ''}")

    def told(self, request: p.StatusReport) -> None:
        """A node tells how it is."""
        for death in self.statuses.told(request.node, request.status, self._now()):
            self._observer.failure("engine_died", death)

    def send_off(self, node: int) -> None:
        """Somebody wants a node to leave in order: it is told with its next cancels."""
        self._sent_off.add(node)
        self._progress.signals.send(("cancels", node))

    def leaves(self, request: p.Leave) -> None:
        """A node that came by itself goes, in order or with an error; what it holds goes back when it is gone."""
        node = request.node
        self._dealer.shares.lost(node)
        if request.error:
            error = error_of(request.error, request.message) or FlashError(request.message)
            error.args = (f"node {node}: {request.message}",)
            if isinstance(error, OF_ALL) or not self.fleet.has_beside(node):
                self._progress.fail(error)
                return
            self._observer.note(f"node {node} cannot go on, and the others do its work: {request.message}")
        elif self._members.fixed and self._progress.stopping is None:
            self._observer.note(f"node {node} was told to end, and weights.backend = nccl cannot do without it")
            self._progress.interrupt()
        elif not self._progress.done:
            self._observer.note(f"node {node} leaves: it takes no more work, and ends what it has or hands it back")
        self.leaving[node] = request.error and f"{request.error}: {request.message}"
        self.offer()

    async def watch(self) -> None:
        """Take the work from nodes that do not answer.

        Waits for the moment in which a node could be silent or a lease too old. Produces notes and tasks to be given
        out again, or the error that ends the run when no other node has an engine.
        """
        limit = waits.lease_s(self._config)
        while True:
            await anyio.sleep(self.fleet.next_silence(self._now()))
            if self.fleet.silent(self._now()):
                await anyio.sleep(SECOND_LOOK_S)
            for node in self.fleet.silent(self._now()):
                self._fell_silent(node)
            for node, lease in self._dealer.holders.lent_before(self._now() - limit):
                message = f"node {node} did not end lease {lease.lease_id} within {limit:g} s"
                self._observer.note(f"{message}: its task is tried again")
                self._take_back(node, lease.lease_id, Failure(lease.task, Outcome.ENGINE_ERROR, message, 0))

    def _fell_silent(self, node: int) -> None:
        limit = self._config.deadlines.request
        look_at = f"the output of node {node}: its event loop is blocked, or its machine is stopped or cut off"
        self._give_up(node)
        self.silent.add(node)
        self._observer.failure("node_silent", f"node {node} has not asked for anything for {limit:g} s; see {look_at}")
        if self.fleet or self._members.has_joined(node):
            then = "the others do its work" if self.fleet else "no other node has engines"
            self._observer.note(f"node {node} has been silent for {limit:g} s, and {then}; see {look_at}")
        else:
            self._progress.fail(DeadlineError(f"node {node} to ask for anything", limit, look_at))

    def _take_back(self, node: int, lease_id: int, failure: Failure) -> None:
        """A node keeps a lease for too long: it is told to end it, and the task failed there."""
        self._dealer.holders.withdraw([lease_id])
        self._progress.signals.send(("cancels", node), "batches", "put off")
        self._dealer.holders.ended(lease_id)
        self._take(node, lease_id, failure)
        self.offer()

    def left(self, node: int) -> None:
        """A node's connection ended: its leases go back."""
        stopping, leaving = self._progress.stopping is not None, self.leaving.get(node)
        if not self._progress.done and self._progress.error is None:
            said = "" if stopping else leaving
            if why := self.statuses.left(node, self._now(), silent=node in self.silent, leaving=said):
                self._observer.failure("node_lost", why)
        if node not in (HUBS_OWN, *self.silent) and not self._progress.done and not stopping:
            # With its own node's loop the hub ends itself, and the error says why. Of a silent one all is said.
            self._note_loss(node)
        self.silent.discard(node)
        self.leaving.pop(node, None)
        self._sent_off.discard(node)
        if self._progress.error is None:  # else it takes what it has to the next hub
            self._give_up(node)

    def _note_loss(self, node: int) -> None:
        """Say what is left, and who brings the rest back."""
        lost = len(self.fleet.versions(node))
        if not lost:
            if node not in self.leaving:
                self._observer.note(f"node {node} is gone while no engine of it was ready: its output says why")
            elif self.leaving.get(node) == "":
                self._observer.note(f"node {node} has left, when no engine of it was ready any more")
            return
        left = sum(1 for _ in self.fleet.engines()) - lost
        how = "has left" if node in self.leaving else "is gone"
        then = f"the other {left} do its work" if left else "no engine is left to make samples"
        said = f"node {node} {how}, and {lost} of {left + lost} engines with it: {then}"
        if self._members.fixed:
            self._progress.fail(PeerLostError(f"{said}, but weights.backend = nccl cannot do without it"))
            return
        if node not in self.leaving:
            said += ". It joins again by itself where its command still runs; `flash join` brings another"
        self._observer.note(said)

    def _give_up(self, node: int) -> None:
        self.fleet.lost(node)
        training: list[int] = []
        for lease in self._dealer.lost(node):
            if lease.task.split == "eval":
                self._evaluations.revoke(lease.lease_id)
            else:
                training.append(lease.lease_id)
        self._buffer.revoke(training)
        self._progress.signals.send("run", "batches", "engines", "put off")
        self.offer()
