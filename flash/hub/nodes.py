"""The hub's side of the rollout nodes: they join, report, load weights, fall silent and leave.

`Nodes` answers the requests about a node itself, `WeightVersions` those about the weights of its engines; the tasks of
nodes are in `flash.hub.work`. Neither owns a task: their methods run in the tasks of the nodes' requests, except
`Nodes.watch`, which runs in a task of `Hub.run`, and `WeightVersions.announce`, which runs in that of a trainer rank.
"""

from __future__ import annotations

from collections.abc import Collection

import anyio
from msgspec.structs import replace

from flash.config import waits
from flash.errors import ContractError, DeadlineError, FlashError, WeightsError, error_of
from flash.hub import protocol as p
from flash.hub.context import HubContext
from flash.hub.fleet import HUB_NODE, Heartbeats, NodeRegistry, NodeStatuses
from flash.hub.work import NodeWork
from flash.observe.cluster import NodeNow, NodeState

RUN_ERRORS = (WeightsError, ContractError)
"""Errors of one node that end the whole run: the weights that all engines were given, or the books, may be wrong."""


class Nodes:
    """The nodes that come, are present, and go.

    Args:
        context: the shared objects of the hub.
        registry: numbers the nodes, and tells those that have joined from the hub's own.
        work: takes the leases back from nodes that are lost.
    """

    def __init__(self, context: HubContext, registry: NodeRegistry, work: NodeWork) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._fleet = context.progress, context.fleet
        self._registry = registry
        self._work = work
        self._leaving: dict[int, str] = {}
        """Nodes that have announced that they leave, with the error that is the reason; empty for none."""
        self._asked_to_leave: set[int] = set()
        """Nodes that a person wants to leave and that are still to be told."""
        self._silent: set[int] = set()
        """Nodes that have lost their leases because they were silent, and have not asked for anything since."""
        self._heartbeats = Heartbeats(self._config.deadlines.request)
        self._statuses = NodeStatuses()
        self._poll_s = waits.long_poll_s(self._config)

    @property
    def all_left(self) -> bool:
        """True if no node is present, not even one whose engines are starting."""
        return not (self._fleet or self._heartbeats)

    # -- nodes that are present --------------------------------------------------------------------------------------

    def join(self, request: p.JoinRequest) -> p.JoinReply:
        """Make a guest a node of the run. Raises ConfigError or PeerLostError, as `NodeRegistry.join`."""
        if self._progress.ending:
            return p.JoinReply(None, 0)
        self._progress.refuse_if_failed()
        reply = self._registry.join(request)
        engines = f"{request.engines} engine{'s' if request.engines > 1 else ''}"
        self._observer.note(f"node {reply.node} joins with {engines}")
        return reply

    async def cancels(self, request: p.CancelRequest) -> p.CancelReply:
        """Answer a node with the leases that it must cancel. Waits for some, for at most one long poll.

        Unblocked by the signal `("cancels", node)` and by the end of the run. The request is also the node's heartbeat.
        """
        node = request.node
        self._heartbeats.asked(node)
        self._silent.discard(node)
        holders = self._work.holders
        with anyio.move_on_after(self._poll_s):
            await self._progress.until(
                ("cancels", node),
                lambda: self._progress.done or holders.has_cancels(node) or node in self._asked_to_leave,
            )
        self._heartbeats.answered(node, anyio.current_time())
        leave = node in self._asked_to_leave
        self._asked_to_leave.discard(node)
        return p.CancelReply(holders.take_cancels(node), done=self._progress.done, leave=leave)

    def report_status(self, request: p.StatusReport) -> None:
        """Keep the status of a node, and report the engines that have died."""
        for death in self._statuses.report(request.node, request.status, self._now()):
            self._observer.failure("engine_died", death)

    def overview(self, rank_nodes: Collection[int]) -> list[NodeNow]:
        """Describe all nodes for people: those of the run, then the last ones that left.

        `rank_nodes` are the nodes with a trainer rank that has come.
        """
        return [*(self._describe(node, rank_nodes) for node in self._registry.numbers), *reversed(self._statuses.gone)]

    def _describe(self, node: int, rank_nodes: Collection[int]) -> NodeNow:
        status, holders = self._statuses.of(node), self._work.holders
        if status is not None:
            # The status is some seconds old, but engine reports come at once: show the versions of these.
            known = {engine.index: engine.version for engine in self._fleet.engines_of(node)}
            engines = [replace(engine, version=known.get(engine.number, engine.version)) for engine in status.engines]
            status = replace(status, engines=engines)
        present = status is not None or (self._config.engines_on(node) == 0 and node in rank_nodes)
        state: NodeState = "here" if present else "starting"
        if node in self._silent:
            state = "silent"
        elif node in self._leaving:
            state = "leaving"
        return NodeNow(
            node=node,
            state=state,
            heard_at=self._statuses.heard_at(node),
            status=status,
            leases=holders.held(node),
            oldest_lease=holders.oldest_of(node),
        )

    # -- nodes that leave, fall silent or are lost -------------------------------------------------------------------

    def ask_to_leave(self, node: int) -> None:
        """Ask a node, in its next cancel reply, to leave in order. Raises ConfigError if no such node has joined."""
        self._registry.check_may_leave(node)
        self._asked_to_leave.add(node)
        self._progress.send(("cancels", node))

    def leave(self, request: p.Leave) -> None:
        """Note that a node leaves, in order or with an error. Its leases queue again when its connection ends.

        An error ends the run if it is one of `RUN_ERRORS`, or if no other node has engines.
        """
        node = request.node
        if request.error:
            error = error_of(request.error, request.message) or FlashError(request.message)
            error.args = (f"node {node}: {request.message}",)
            if isinstance(error, RUN_ERRORS) or not self._fleet.others_have_engines(node):
                self._progress.fail(error)
                return
            self._observer.note(f"node {node} cannot go on, and the others do its work: {request.message}")
        elif not self._progress.done:
            self._observer.note(
                f"node {node} leaves: it takes no more samples, and finishes those that it has or hands them back"
            )
        self._leaving[node] = request.error and f"{request.error}: {request.message}"
        self._work.stop_dealing_to(node)

    async def watch(self) -> None:
        """Take the leases from nodes that are silent, and single leases that were not ended in time.

        Consumes heartbeats. Waits for the next moment in which a node could be silent. Produces notes and queued tasks,
        or the error that ends the run if no other node has an engine.
        """
        limit = waits.lease_s(self._config)
        while True:
            # Measured on the loop's clock, which stands still while user code blocks the loop: the requests of nodes
            # are not read then, and no node must count as silent for that.
            await anyio.sleep(self._heartbeats.next_silence(anyio.current_time()))
            if self._heartbeats.silent(anyio.current_time()):
                await anyio.sleep(waits.SECOND_LOOK_S)
            for node in self._heartbeats.silent(anyio.current_time()):
                self._handle_silence(node)
            for node, lease in self._work.holders.lent_before(self._now() - limit):
                message = f"node {node} did not end lease {lease.lease_id} within {limit:g} s"
                self._observer.note(f"{message}: its task is tried again")
                self._work.take_back(node, lease, message)

    def _handle_silence(self, node: int) -> None:
        limit = self._config.deadlines.request
        look_at = f"the output of node {node}: its event loop is blocked, or its machine is stopped or cut off"
        self._take_leases(node)
        self._silent.add(node)
        self._observer.failure("node_silent", f"node {node} has not asked for anything for {limit:g} s; see {look_at}")
        if self._fleet or self._registry.has_joined(node):
            then = "the others do its work" if self._fleet else "no other node has engines"
            self._observer.note(f"node {node} has been silent for {limit:g} s, and {then}; see {look_at}")
        else:
            self._progress.fail(DeadlineError(f"node {node} to ask for anything", limit, look_at))

    def disconnected(self, node: int) -> None:
        """Handle the end of a node's connection: its leases queue again, and its number is free."""
        stopping, leaving = self._progress.stopping is not None, self._leaving.get(node)
        if not self._progress.done and self._progress.error is None:
            announced = "" if stopping else leaving
            why = self._statuses.left(node, self._now(), silent=node in self._silent, leaving=announced)
            if why:
                self._observer.failure("node_lost", why)
        if node not in (HUB_NODE, *self._silent) and not self._progress.done and not stopping:
            # The loss of a silent node was reported before. The hub ends with its own node, with an error of its own.
            self._note_loss(node)
        self._silent.discard(node)
        self._leaving.pop(node, None)
        self._work.node_left(node)
        self._asked_to_leave.discard(node)
        if self._progress.error is None:  # otherwise the node presents its leases to the next hub
            self._take_leases(node)
        self._registry.left(node)

    def _note_loss(self, node: int) -> None:
        """Tell people how many engines are left, and how to get the others back."""
        lost = len(self._fleet.versions(node))
        if not lost:
            if node not in self._leaving:
                self._observer.note(f"node {node} is gone while no engine of it was ready: its output says why")
            elif self._leaving.get(node) == "":
                self._observer.note(f"node {node} has left, when no engine of it was ready any more")
            return
        left = sum(1 for _ in self._fleet.engines()) - lost
        how = "has left" if node in self._leaving else "is gone"
        then = f"the other {left} do its work" if left else "no engine is left to make samples"
        note = f"node {node} {how}, and {lost} of {left + lost} engines with it: {then}"
        if node not in self._leaving:
            note += ". It joins again by itself if its command still runs; `flash join` brings another"
        self._observer.note(note)

    def _take_leases(self, node: int) -> None:
        self._heartbeats.lost(node)
        self._work.node_lost(node)


class WeightVersions:
    """The weight versions that engines load, and those that they have.

    Args:
        context: the shared objects of the hub.
        work: deals tasks; a node that is loading gets its share later.
    """

    def __init__(self, context: HubContext, work: NodeWork) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._metrics, self._fleet = context.progress, context.metrics, context.fleet
        self._work, self._shares = work, work.shares

    def announce(self, version: int) -> None:
        """Let all engines load a newly published version, and deal the tasks that it admits."""
        self._progress.newest = version
        self._shares.version_published(self._now())
        self._progress.send("versions")
        self._work.deal()

    async def newer(self, request: p.VersionRequest) -> p.VersionReply:
        """Answer with a version that the engine does not have. Waits for one, for at most one long poll.

        Unblocked by the signal `versions` and by the end of the run.
        """
        with anyio.move_on_after(waits.long_poll_s(self._config)):
            await self._progress.until("versions", lambda: self._progress.done or self._has_newer(request))
        if not self._has_newer(request):
            return p.VersionReply(None, done=self._progress.done)
        self._fleet.given_version(request.node)
        return p.VersionReply(self._progress.published, done=self._progress.done)

    def _has_newer(self, request: p.VersionRequest) -> bool:
        return self._progress.publisher_alive and self._progress.newest > request.after

    async def load_failed(self, request: p.LoadFailed) -> p.LoadFailedReply:
        """Answer if an engine could not load a version because its publisher is gone.

        Waits a moment for that news, since the engine may notice it before the hub does.
        """

        def publisher_gone() -> bool:
            published = self._progress.published
            return (
                self._progress.done
                or not self._progress.publisher_alive
                or published is None
                or published.incarnation != request.incarnation
            )

        with anyio.move_on_after(waits.echo_s(self._config)):
            await self._progress.until("run", publisher_gone)
        return p.LoadFailedReply(publisher_gone())

    def report_engines(self, request: p.EngineReport) -> p.Ack:
        """Take the report of a node about its engines, and deal tasks if its newest version has changed."""
        self._metrics.add_canaries(request.engines)
        self._metrics.add_engine_restarts(request.restarts)
        self._metrics.add_misbehaviour(request.blocked_s, request.abandoned)
        self._observer.activities(request.activities)
        # An interrupt may end the engines before their node, and nobody needs to read of their deaths then.
        if self._progress.stopping != "interrupted":
            for note in request.notes:
                self._observer.note(note)
        node = request.node
        before = max(self._fleet.versions(node), default=-1)
        if self._fleet.report(request):
            self._progress.send("run", "engines")
            newest = max(self._fleet.versions(node), default=-1)
            if newest < 0:
                self._shares.engines_died(node)
            elif newest >= self._progress.newest:
                self._shares.version_loaded(node)
            if newest != before:
                self._work.deal()
        return p.Ack()
