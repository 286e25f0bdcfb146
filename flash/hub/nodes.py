"""The hub's state of the rollout nodes and of their engines' weights, and its answers to the nodes.

`Nodes` answers the requests about a node itself: to join, to report, to leave. `WeightVersions` answers the requests
about the weights of a node's engines. `flash.hub.work` answers the requests for leases (a lease assigns one task to one
node). The methods of both classes run in the tasks of the nodes' requests. There are two exceptions: `Nodes.watch` runs
in a task of `Hub.run`, and `WeightVersions.announce` runs in the task of a trainer rank's request.

A *signal* is a name with which `RunProgress.send` wakes the requests that wait for a change. A *long poll* is a request
that the hub answers only when it has news, but after some seconds at the latest. A *guest* is a process that asks to
become a node. An *activity* is something that a worker did, which is drawn as a bar on the run's timeline. A *canary*
is a fixed text; by its log-probs an engine proves that it has loaded the right weights.
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
"""Errors of one node that end the whole run, because the weights that all engines have loaded, or the counts of samples
and tokens, may be wrong."""


class Nodes:
    """State of the nodes while they join, work, fall silent and leave.

    Args:
        context: the shared objects of the hub.
        registry: gives numbers to nodes, and knows which nodes have joined.
        work: holds the leases, and takes them back from nodes that are lost.
    """

    def __init__(self, context: HubContext, registry: NodeRegistry, work: NodeWork) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._fleet = context.progress, context.fleet
        self._registry = registry
        self._work = work
        self._leaving: dict[int, str] = {}
        """Nodes that have announced that they leave. The text is the error that is the reason, or empty."""
        self._asked_to_leave: set[int] = set()
        """Nodes that a person has asked to leave, and that have not been notified yet."""
        self._silent: set[int] = set()
        """Nodes that have lost their leases because they were silent, and have sent no heartbeat since then. A node is
        *silent* if it has not sent its next `CancelRequest` within `deadlines.request` after the last reply."""
        self._heartbeats = Heartbeats(self._config.deadlines.request)
        self._statuses = NodeStatuses()
        self._poll_s = waits.long_poll_s(self._config)

    @property
    def all_left(self) -> bool:
        """True if no node is present, not even one whose engines are starting. The hub's owner waits for this."""
        return not (self._fleet or self._heartbeats)

    # -- nodes that are present --------------------------------------------------------------------------------------

    def join(self, request: p.JoinRequest) -> p.JoinReply:
        """Make a guest a node of the run. The reply has no node number if the run is ending.

        Raises:
            PeerLostError: the run has failed, or the registry refuses the guest (`NodeRegistry.join`).
            ConfigError: the registry refuses the guest.
        """
        if self._progress.ending:
            return p.JoinReply(None, 0)
        self._progress.refuse_if_failed()
        reply = self._registry.join(request)
        engines = f"{request.engines} engine{'s' if request.engines > 1 else ''}"
        self._observer.note(f"node {reply.node} joins with {engines}")
        return reply

    async def cancels(self, request: p.CancelRequest) -> p.CancelReply:
        """Answer a node with the leases that it must cancel, and say if a person has asked it to leave.

        Waits until one of the two changes, for at most one long poll. The signal `("cancels", node)` and the end of the
        run wake the request. The request is also the node's heartbeat: a silent node that sends it is not silent any
        more.

        Raises:
            FlashError: the run has failed while this request waited; this is its error.
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
        """Keep the status of a node for people, and report the engines that have died since the last status."""
        for death in self._statuses.report(request.node, request.status, self._now()):
            self._observer.failure("engine_died", death)

    def overview(self, rank_nodes: Collection[int]) -> list[NodeNow]:
        """Describe all nodes for people: the nodes of the run, then the nodes that left last.

        `rank_nodes` are the nodes of the trainer ranks that are present.
        """
        return [*(self._describe(node, rank_nodes) for node in self._registry.numbers), *reversed(self._statuses.gone)]

    def _describe(self, node: int, rank_nodes: Collection[int]) -> NodeNow:
        """Describe one node for people. `rank_nodes` are the nodes of the trainer ranks that are present."""
        status, holders = self._statuses.of(node), self._work.holders
        if status is not None:
            # The status is some seconds old. Reports of engines come at once, so their versions are shown.
            known = {engine.index: engine.version for engine in self._fleet.engines_of(node)}
            engines = [replace(engine, version=known.get(engine.number, engine.version)) for engine in status.engines]
            status = replace(status, engines=engines)
        # A node that has not reported a status yet is still starting. A node without engines never reports a status: it
        # counts as present while the trainer ranks of its machine are connected.
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
        """Ask a node to leave after it has finished or returned its tasks.

        The node's waiting `CancelRequest` is answered at once, with `leave` set. `flash drain` calls this through a
        `DrainRequest`.

        Raises:
            ConfigError: no node of this number has joined. The hub's own node has not joined in this sense: it cannot
                be asked to leave.
        """
        self._registry.check_joined(node)
        self._asked_to_leave.add(node)
        self._progress.send(("cancels", node))

    def leave(self, request: p.Leave) -> None:
        """Record that a node has announced that it leaves, perhaps because of an error. The node gets no more leases.

        When its connection ends, the tasks of its leases are queued again (`disconnected`). An error ends the run if it
        is one of `RUN_ERRORS`, or if no other node has engines. Otherwise the other nodes go on, and people get a note.
        """
        node = request.node
        if request.error:
            error = error_of(request.error, request.message) or FlashError(request.message)
            error.args = (f"node {node}: {request.message}",)
            if isinstance(error, RUN_ERRORS) or not self._fleet.others_have_engines(node):
                self._progress.fail(error)
                return
            self._observer.note(f"node {node} cannot go on, and the others do its work: {request.message}")
        elif not self._progress.done:  # At the end of the run all nodes leave, which is worth no note.
            self._observer.note(
                f"node {node} leaves: it takes no more samples, and finishes those that it has or hands them back"
            )
        self._leaving[node] = request.error and f"{request.error}: {request.message}"
        self._work.stop_leasing_to(node)

    async def watch(self) -> None:
        """Take all leases from silent nodes, and take back single leases that have lasted too long.

        Runs until it is cancelled. It sleeps until the next moment at which a node could become silent. Each time it
        wakes, it also takes back the leases that are older than `waits.lease_s`. The tasks of a silent node are queued
        again. A lease that lasted too long counts as a failed attempt of its task. People get a note about both. Ends
        the run with an error if the hub's own node is silent and no other node has an engine.
        """
        limit = waits.lease_s(self._config)
        while True:
            # Silence is measured with `anyio.current_time`. The event loop of a run
            # (`flash.run.loop_watch.WatchedLoop`) stops this clock while it knows that user code blocks the loop. The
            # hub reads no requests in that time, so the time must not count as silence of a node.
            await anyio.sleep(self._heartbeats.next_silence(anyio.current_time()))
            if self._heartbeats.silent(anyio.current_time()):
                # If the hub's own loop was blocked, a request may have arrived that is not read yet.
                await anyio.sleep(waits.SECOND_LOOK_S)
            for node in self._heartbeats.silent(anyio.current_time()):
                self._handle_silence(node)
            for node, lease in self._work.holders.granted_before(self._now() - limit):
                message = f"node {node} did not end lease {lease.lease_id} within {limit:g} s"
                self._observer.note(f"{message}: its task is tried again")
                self._work.take_back(node, lease, message)

    def _handle_silence(self, node: int) -> None:
        """Take the leases of a silent node, and report it to people.

        Ends the run if the node is the hub's own node and no engine is left. Every other node has joined the run later,
        and may join again.
        """
        limit = self._config.deadlines.request
        look_at = f"the output of node {node}: its event loop is blocked, or its machine is stopped or cut off"
        self._take_leases(node)
        self._silent.add(node)
        self._observer.failure("node_silent", f"node {node} has not asked for anything for {limit:g} s; see {look_at}")
        if self._fleet or node != HUB_NODE:
            then = "the others do its work" if self._fleet else "no other node has engines"
            self._observer.note(f"node {node} has been silent for {limit:g} s, and {then}; see {look_at}")
        else:
            self._progress.fail(DeadlineError(f"node {node} to ask for anything", limit, look_at))

    def disconnected(self, node: int) -> None:
        """Handle the end of a node's connection: the tasks of its leases are queued again, and its number is free.

        People get a note, and a failure is recorded if the node did not leave in order. In a run that has failed, the
        leases stay as they are: the node presents them to the next hub.
        """
        stopping, leaving = self._progress.stopping is not None, self._leaving.get(node)
        if not self._progress.done and self._progress.error is None:
            # While the run stops, processes end in any order, so each end counts as one in order.
            announced = "" if stopping else leaving
            why = self._statuses.left(node, self._now(), silent=node in self._silent, leaving=announced)
            if why:
                self._observer.failure("node_lost", why)
        if node not in (HUB_NODE, *self._silent) and not self._progress.done and not stopping:
            # People get no note about a silent node, because its silence was reported before. They get no note about
            # the hub's own node, because the hub ends together with that node and reports an error.
            self._note_loss(node)
        self._silent.discard(node)
        self._leaving.pop(node, None)
        self._work.node_left(node)
        self._asked_to_leave.discard(node)
        if self._progress.error is None:
            self._take_leases(node)
        self._registry.left(node)

    def _note_loss(self, node: int) -> None:
        """Write a note for people: how many engines are gone with a node, how many are left, and what replaces them.

        A node in `_leaving` has announced that it leaves. The text there is empty if the node leaves in order. For a
        node that leaves because of an error, `leave` has already written a note, so nothing is written if the node had
        no engine.
        """
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
            note += ". It joins again by itself if its command still runs; `flash join` adds another node"
        self._observer.note(note)

    def _take_leases(self, node: int) -> None:
        """Queue the tasks of a node's leases again. The node is not watched for silence until it sends its next
        request."""
        self._heartbeats.lost(node)
        self._work.node_lost(node)


class WeightVersions:
    """State of the weight versions: the version that engines should load, and the version that each engine has.

    Args:
        context: the shared objects of the hub.
        work: grants leases to waiting nodes (`grant_leases`). `NodeShares` keeps a share for a node that is loading a
            version.
    """

    def __init__(self, context: HubContext, work: NodeWork) -> None:
        self._config, self._observer, self._now = context.config, context.observer, context.now
        self._progress, self._metrics, self._fleet = context.progress, context.metrics, context.fleet
        self._work, self._shares = work, work.shares

    def announce(self, version: int) -> None:
        """Let all engines load a newly published version, and grant the leases that this version admits.

        This wakes the requests of `newer`. While a node loads the version, its share of the tasks is kept for it, for
        at most `flash.hub.shares.KEPT_S`.
        """
        self._progress.newest = version
        self._shares.version_published(self._now())
        self._progress.send("versions")
        self._work.grant_leases()

    async def newer(self, request: p.VersionRequest) -> p.VersionReply:
        """Answer a node with a version that is newer than `request.after`, the version that one of its engines has.

        Waits for such a version, for at most one long poll. The signal `versions` and the end of the run wake the
        request. The reply has no version if there is no newer one. If it has one, the node counts from then on as
        loading this version. The next version is announced only when the node has loaded it.

        Raises:
            FlashError: the run has failed while this request waited; this is its error.
        """
        with anyio.move_on_after(waits.long_poll_s(self._config)):
            await self._progress.until("versions", lambda: self._progress.done or self._has_newer(request))
        if not self._has_newer(request):
            return p.VersionReply(None, done=self._progress.done)
        self._fleet.given_version(request.node)
        return p.VersionReply(self._progress.published, done=self._progress.done)

    def _has_newer(self, request: p.VersionRequest) -> bool:
        """Return True if there is a newer version, and the trainer ranks that hold it are alive."""
        return self._progress.publisher_alive and self._progress.newest > request.after

    async def load_failed(self, request: p.LoadFailed) -> p.LoadFailedReply:
        """Reply to a node whose engine could not load a version. The reply is True if the version's publisher is lost.

        If it is lost, the failure is not the engine's fault, and the engine waits for the next version. The publisher
        is the incarnation that holds the version. An incarnation is the set of trainer ranks that run from one restart
        of the ranks to the next. Waits up to `waits.echo_s` for the loss, because the engine may notice it before the
        hub does. At the end of the run the ranks leave, which counts as a loss, too.

        Raises:
            FlashError: the run has failed while this request waited; this is its error.
        """

        def publisher_gone() -> bool:
            """Return True if the run is over, or the ranks that published the engine's version are gone."""
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
        """Store the report of a node about its engines: versions, canary errors, activities, notes and restarts.

        The versions count only if no later report of the node has arrived before this one. If the newest version on the
        node has changed, leases are granted. The numbers of restarts, blocked seconds and abandoned calls count only
        the time since the previous report. They are added to the metrics in any case, because no other report has them.
        """
        self._metrics.add_canaries(request.engines)
        self._metrics.add_engine_restarts(request.restarts)
        self._metrics.add_misbehaviour(request.blocked_s, request.abandoned)
        self._observer.activities(request.activities)
        # An interrupt may end engines before their node ends. Notes about such ends would only alarm people.
        if self._progress.stopping != "interrupted":
            for note in request.notes:
                self._observer.note(note)
        node = request.node
        before = max(self._fleet.versions(node), default=-1)
        if not self._fleet.report(request):
            return p.Ack()  # A later report of the node has arrived already.
        self._progress.send("run", "engines")
        newest = max(self._fleet.versions(node), default=-1)
        # A share of the tasks may be kept for this node while it loads the newest version. The share is kept no longer
        # if the node has loaded it, or has no engine that could load it.
        if newest < 0:
            self._shares.engines_died(node)
        elif newest >= self._progress.newest:
            self._shares.version_loaded(node)
        if newest != before:
            self._work.grant_leases()
        return p.Ack()
