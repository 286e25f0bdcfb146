"""Nodes: the hub's side of the rollout nodes' coming and going. They join, tell how they are, fall silent and leave.

What they are given to do is in `flash.hub.work`, what they and their engines are told of weights in
`flash.hub.nodes`. It owns no task: its methods run in the tasks of the nodes' requests, and `watch` in one of
the run.
"""

from __future__ import annotations

import anyio

from flash.config import waits
from flash.errors import ContractError, DeadlineError, FlashError, WeightsError, error_of
from flash.hub import protocol as p
from flash.hub.context import HubContext, HubPart
from flash.hub.fleet import HUB_NODE, Attendance, NodeRegistry, NodeStatuses
from flash.hub.work import NodeWork

OF_ALL = (WeightsError, ContractError)
"""Errors that end the run whoever has them: what was sent to all engines, or the books, may be wrong."""


class Nodes(HubPart):
    """See the module's docstring. `members` tell nodes that come and go from the hub's own."""

    def __init__(self, parts: HubContext, members: NodeRegistry) -> None:
        super().__init__(parts)
        self._members = members
        self.leaving: dict[int, str] = {}
        """Nodes that have said that they go, and why; empty: in order."""
        self._sent_off: set[int] = set()
        """Nodes that are still to be told to go."""
        self.silent: set[int] = set()
        """Nodes that have lost their work for their silence, and have not spoken since."""
        self._attendance = Attendance(self._config.deadlines.request)
        self.statuses = NodeStatuses()
        self.work = NodeWork(parts, self.leaving.keys(), members.has_joined)
        self.holders = self.work.holders
        self._poll_s = waits.long_poll_s(self._config)

    @property
    def deserted(self) -> bool:
        """Whether no node is there, not even one whose engines start."""
        return not (self._fleet or self._attendance)

    async def cancels(self, request: p.CancelRequest) -> p.CancelReply:
        """Tell a node what has become pointless. Waits for some of it, at most one long poll."""
        node = request.node
        self._attendance.asked(node)
        self.silent.discard(node)
        with anyio.move_on_after(self._poll_s):
            await self._progress.until(
                ("cancels", node),
                lambda: self._progress.done or self.holders.has_cancels(node) or node in self._sent_off,
            )
        self._attendance.answered(node, anyio.current_time())
        leave = node in self._sent_off
        self._sent_off.discard(node)
        return p.CancelReply(self.holders.take_cancels(node), done=self._progress.done, leave=leave)

    # -- who comes and goes ------------------------------------------------------------------------------------------

    def join(self, request: p.JoinRequest) -> p.JoinReply:
        """A peer becomes a node of the run. Raises as `Members.join`."""
        if self._progress.ending:
            return p.JoinReply(None, 0)
        self._progress.refuse_at_end()
        reply = self._members.join(request)
        engines = f"{request.engines} engine{'s' if request.engines > 1 else ''}"
        self._observer.note(f"node {reply.node} joins with {engines}")
        return reply

    def told(self, request: p.StatusReport) -> None:
        """A node tells how it is."""
        for death in self.statuses.told(request.node, request.status, self._now()):
            self._observer.failure("engine_died", death)

    def send_off(self, node: int) -> None:
        """Somebody wants a node to leave in order: it is told with its next cancels."""
        self._sent_off.add(node)
        self._progress.send(("cancels", node))

    def leaves(self, request: p.Leave) -> None:
        """A node that came by itself goes, in order or with an error; what it holds goes back when it is gone."""
        node = request.node
        self.work.takes_no_more(node)
        if request.error:
            error = error_of(request.error, request.message) or FlashError(request.message)
            error.args = (f"node {node}: {request.message}",)
            if isinstance(error, OF_ALL) or not self._fleet.has_beside(node):
                self._progress.fail(error)
                return
            self._observer.note(f"node {node} cannot go on, and the others do its work: {request.message}")
        elif not self._progress.done:
            self._observer.note(f"node {node} leaves: it takes no more work, and ends what it has or hands it back")
        self.leaving[node] = request.error and f"{request.error}: {request.message}"
        self.work.offer()

    async def watch(self) -> None:
        """Take the work from nodes that do not answer.

        Waits for the moment in which a node could be silent or a lease too old. Produces notes and tasks to be given
        out again, or the error that ends the run when no other node has an engine.
        """
        limit = waits.lease_s(self._config)
        while True:
            # On the loop's clock, which stands still while a user's code blocks the loop and nobody reads requests.
            await anyio.sleep(self._attendance.next_silence(anyio.current_time()))
            if self._attendance.silent(anyio.current_time()):
                await anyio.sleep(waits.SECOND_LOOK_S)
            for node in self._attendance.silent(anyio.current_time()):
                self._fell_silent(node)
            for node, lease in self.holders.lent_before(self._now() - limit):
                message = f"node {node} did not end lease {lease.lease_id} within {limit:g} s"
                self._observer.note(f"{message}: its task is tried again")
                self.work.take_back(node, lease, message)

    def _fell_silent(self, node: int) -> None:
        limit = self._config.deadlines.request
        look_at = f"the output of node {node}: its event loop is blocked, or its machine is stopped or cut off"
        self._give_up(node)
        self.silent.add(node)
        self._observer.failure("node_silent", f"node {node} has not asked for anything for {limit:g} s; see {look_at}")
        if self._fleet or self._members.has_joined(node):
            then = "the others do its work" if self._fleet else "no other node has engines"
            self._observer.note(f"node {node} has been silent for {limit:g} s, and {then}; see {look_at}")
        else:
            self._progress.fail(DeadlineError(f"node {node} to ask for anything", limit, look_at))

    def left(self, node: int) -> None:
        """A node's connection ended: its leases go back."""
        stopping, leaving = self._progress.stopping is not None, self.leaving.get(node)
        if not self._progress.done and self._progress.error is None:
            said = "" if stopping else leaving
            if why := self.statuses.left(node, self._now(), silent=node in self.silent, leaving=said):
                self._observer.failure("node_lost", why)
        if node not in (HUB_NODE, *self.silent) and not self._progress.done and not stopping:
            # With its own node's loop the hub ends itself, and the error says why. Of a silent one all is said.
            self._note_loss(node)
        self.silent.discard(node)
        self.leaving.pop(node, None)
        self._sent_off.discard(node)
        if self._progress.error is None:  # else it takes what it has to the next hub
            self._give_up(node)

    def _note_loss(self, node: int) -> None:
        """Say what is left, and who brings the rest back."""
        lost = len(self._fleet.versions(node))
        if not lost:
            if node not in self.leaving:
                self._observer.note(f"node {node} is gone while no engine of it was ready: its output says why")
            elif self.leaving.get(node) == "":
                self._observer.note(f"node {node} has left, when no engine of it was ready any more")
            return
        left = sum(1 for _ in self._fleet.engines()) - lost
        how = "has left" if node in self.leaving else "is gone"
        then = f"the other {left} do its work" if left else "no engine is left to make samples"
        said = f"node {node} {how}, and {lost} of {left + lost} engines with it: {then}"
        if node not in self.leaving:
            said += ". It joins again by itself where its command still runs; `flash join` brings another"
        self._observer.note(said)

    def _give_up(self, node: int) -> None:
        self._attendance.lost(node)
        self.work.lost(node)


class WeightVersions(HubPart):
    """See the module's docstring. A node that loads is given its share of the `work` later."""

    def __init__(self, parts: HubContext, work: NodeWork) -> None:
        super().__init__(parts)
        self._work, self._shares = work, work.shares

    def published(self, version: int) -> None:
        """There is a version for all nodes to load."""
        self._progress.newest = version
        self._shares.loading(self._now())
        self._progress.send("versions")
        self._work.offer()

    async def newer(self, request: p.VersionRequest) -> p.VersionReply:
        """Give an engine the newest version. Waits for one that it does not have, at most one long poll."""
        with anyio.move_on_after(waits.long_poll_s(self._config)):
            await self._progress.until("versions", lambda: self._progress.done or self._has_newer(request))
        if not self._has_newer(request):
            return p.VersionReply(None, done=self._progress.done)
        self._fleet.given(request.node)
        return p.VersionReply(self._progress.published, done=self._progress.done)

    def _has_newer(self, request: p.VersionRequest) -> bool:
        return self._progress.reachable and self._progress.newest > request.after

    async def load_failed(self, request: p.LoadFailed) -> p.LoadFailedReply:
        """Reply whether an engine could not load because its publisher is gone, which it may notice before the hub."""

        def gone() -> bool:
            published = self._progress.published
            return (
                self._progress.done
                or not self._progress.reachable
                or published is None
                or published.incarnation != request.incarnation
            )

        with anyio.move_on_after(waits.echo_s(self._config)):
            await self._progress.until("run", gone)
        return p.LoadFailedReply(gone())

    def engines_changed(self, request: p.EngineReport) -> p.Ack:
        """A node tells of its engines."""
        self._metrics.canaries(request.engines)
        self._metrics.restarted(request.restarts)
        self._metrics.misbehaved(request.blocked_s, request.abandoned)
        self._observer.activities(request.activities)
        if self._progress.stopping != "interrupted":  # its engines may end before their node
            for note in request.notes:
                self._observer.note(note)
        before = self._fleet.versions(request.node)
        if self._fleet.report(request):
            self._progress.send("run", "engines")
            self._loaded(request.node, max(before, default=-1))
        return p.Ack()

    def _loaded(self, node: int, before: int) -> None:
        """A node has told its versions; `before` was the newest of them."""
        newest = max(self._fleet.versions(node), default=-1)
        if newest < 0:
            self._shares.away(node)
        elif newest >= self._progress.newest:
            self._shares.loaded(node)
        if newest != before:
            self._work.offer()
