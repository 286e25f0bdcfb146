"""Loop of a node that has joined a run. Every node except the first has such a loop.

`flash.run.processes.worker` calls `run_joined_loop` in a process that `flash.run.processes.launcher.JoinedLoop` has
started. The loop connects to the hub as a guest (a peer that has no number yet), and the hub numbers the node and its
engines. A `flash.rollout.node.RolloutNode` then leases tasks from the hub and delivers samples.

If the hub is gone, the node's episodes go on. The node waits for the next hub of the run, and continues there with the
samples in hand. At SIGTERM the node leaves the run in order.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from flash.config.tree import Config
from flash.environment.load import LoadedEnvironment
from flash.environment.shared import sharing
from flash.errors import FlashError, TransportError
from flash.foreign.forking import Imports
from flash.hub import protocol as p
from flash.hub.stages import STARTING_ENGINES
from flash.rollout.node import RolloutNode
from flash.rollout.scheduler import HubLink
from flash.run.loop_watch import run_watched
from flash.run.node_loop import STARTUP_LINE_S, explain_engine_start, make_node, unix_clock
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.hub_place import TOKEN_VARIABLE
from flash.run.processes.rendezvous import RETRY_S, HubSearch
from flash.run.processes.supervisor import End
from flash.run.processes.supervisor import say as warn
from flash.text import harmless
from flash.transport.client import connect
from flash.transport.frames import ReplyT, Request
from flash.waiting import first_error, unwrapped_group


def run_joined_loop(order: ProcessOrder, config: Config) -> End:
    """Serve the hubs of a run with this machine's engines. Returns how the loop ended; see `JoinedNode.run`."""
    # Removed from the environment, so that neither engines nor environments inherit the token.
    return run_watched(warn, _roll_out, config, order, os.environ.pop(TOKEN_VARIABLE, None))


class HubConnection:
    """Connection to the hub that records how it ended, because the error of a call alone does not show it.

    `JoinedNode` makes one for each hub, and gives it to the rollout node.

    Args:
        caller: the connection itself.
        on_serving: called once with the node's number, when the hub knows a ready engine of this node.
    """

    def __init__(self, caller: p.HubCaller, on_serving: Callable[[int], None]) -> None:
        self._caller = caller
        self._on_serving = on_serving
        self.over = False
        """True if the hub has reported that there is no more work."""
        self.lost = False
        """True if a call failed because the hub is gone."""
        self.serves = False
        """True if the hub knows an engine of this node that has a version."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request to the hub and return the reply. Implements `HubCaller.call`.

        Sets `over`, `lost` and `serves` by the request and its result.
        """
        try:
            reply = await self._caller.call(request, timeout)
        except TransportError as error:
            self.lost = self.lost or not error.fatal
            raise
        if isinstance(reply, p.LeaseReply | p.CancelReply | p.VersionReply):
            self.over = self.over or reply.done
        if isinstance(request, p.EngineReport) and not self.serves and any(e.version >= 0 for e in request.engines):
            self.serves = True
            self._on_serving(request.node)
        return reply


async def _roll_out(config: Config, order: ProcessOrder, token: str | None) -> End:
    """Run a `JoinedNode` and its signal handler. Returns how the node ended."""
    end = End.OVER  # also if a signal arrives while there is no hub
    try:
        async with sharing(config.run.name, close_s=config.deadlines.close), anyio.create_task_group() as group:
            node = JoinedNode(config, order, token)
            group.start_soon(node.handle_signals, group.cancel_scope)
            end = await node.run()
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:  # of the task groups above: show the error with the most information
        raise first_error(errors) from None
    return end


class JoinedNode:
    """Work of a joined node loop: serves the hubs of a run one after the other, with the same rollout node.

    Args:
        config: the run's configuration on this machine.
        order: the launcher's order: number of this machine, place of the hub, digest of the configuration, and time of
            the start.
        token: the value of FLASH_TOKEN; None if it is not set.
    """

    def __init__(self, config: Config, order: ProcessOrder, token: str | None) -> None:
        self._config = config
        self._place = order.node
        """Number of this machine in its job."""
        self._trains = order.node < config.cluster.trainer_nodes
        """True if this machine also has trainer ranks, so that the hub must give it the number of its place."""
        self._digest = order.digest
        """Digest of the configuration with which this process was started."""
        self._begun = order.begun
        """Time at which the launcher began to start this process, in Unix seconds."""
        self._search = HubSearch(order.place, token)
        self._run: p.RunReply | None = None
        """Description of the run that the last hub has given; None before the first hub."""
        self._env = LoadedEnvironment(config.env.path, config.env.options)
        self._node: RolloutNode | None = None
        """The rollout node; None before the first hub has numbered it."""
        self._rejoins = False
        """True if the node had running engines when it joined the present hub."""
        self._serving = False
        """True while the node works for a hub, so that it can leave the run in order."""
        self._samples = False
        """True if the engines have started and a hub knows one of them."""
        self._wake = anyio.Event()
        """Event that is set when the hub is lost or the node has ended."""
        self._lost: TransportError | None = None
        """Error by which the hub was lost; None while it is there."""
        self._ended = False
        """True if the node has ended."""
        self._failure: Exception | None = None
        """Error with which the node ended; None if it ended without one."""
        self._leaving = False
        """True if a signal has asked this process to leave."""

    async def run(self) -> End:
        """Serve hubs until the run is over, a signal arrives, or the next hub cannot use this node.

        Returns how it ended: OVER, or WITH_PEER if this process must be replaced by a new one to serve the next hub.
        """
        try:
            async with unwrapped_group() as tasks:
                end = await self._serve_all(tasks)
                tasks.cancel_scope.cancel()
            return end
        finally:
            if self._node is not None:
                await self._node.close()

    async def _serve_all(self, tasks: TaskGroup) -> End:
        """Serve one hub after the other. Returns the result of `run`. `tasks` runs the tasks that outlive a hub."""
        wait_s = 0.0  # the launcher has just found the first hub
        while (end := await self._serve_next(tasks, wait_s)) is None:
            # Without engines there is nothing to keep, so the launcher starts a new process for the next hub.
            if self._node is None or self._leaving:
                return End.WITH_PEER
            wait_s = self._config.deadlines.rendezvous
            await anyio.sleep(RETRY_S)
        return end

    async def _work(self) -> None:
        """Run the node from its start to its end, and record how it ended."""
        assert self._node is not None, "`_serve` has made the node before it started this task"
        try:
            await self._node.work()
        except Exception as error:  # any error: the task that talks to the hub reports it
            self._failure = error
        self._ended = True
        self._wake.set()

    def lose_hub(self, error: TransportError) -> None:
        """Record that the node has lost the hub, and wake `_serve`. The node calls this."""
        self._lost = error
        self._wake.set()

    def _print_ready(self, number: int) -> None:
        """Print how long the start has taken. Called when the hub knows the first engine of node `number`."""
        assert self._node is not None, "without a node there is no report of engines"
        self._samples = True
        if self._rejoins:
            return  # `_serve` prints a line about it instead
        imports_s = Imports.seconds if Imports.begun > self._begun else 0.0
        start_s, elapsed_s = imports_s + self._node.start_s, time.time() - self._begun
        say(f"node {number} makes samples after {elapsed_s:.1f} s; its engines took {start_s:.1f} s of them to start")

    async def _print_start(self) -> None:
        """Print a line every STARTUP_LINE_S seconds while the engines start, since a start can take minutes.

        Waits for the clock. Ends when samples are made, or when the node has ended.
        """
        begun = anyio.current_time()
        while not self._samples and not self._ended:
            if (seconds := anyio.current_time() - begun) > 0:
                say(f"{STARTING_ENGINES} … {seconds:.0f} s{explain_engine_start(seconds, self._config)}")
            await anyio.sleep(STARTUP_LINE_S)

    async def make_node(self, link: HubLink) -> RolloutNode:
        """Return a rollout node. Its engines are not started yet. Tests replace this method."""
        return await make_node(self._place, link, self._config, self._env, unix_clock(), self.lose_hub)

    async def handle_signals(self, whole_scope: anyio.CancelScope) -> None:
        """Leave the run in order at a signal: finish the episodes, and take no more tasks.

        Without a hub nothing could be delivered, so `whole_scope`, the scope of all work, is cancelled instead. A
        second Ctrl-C needs no code here, because the launcher kills this process.

        Consumes signals. Waits for the next one, until cancelled.
        """
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for received in signals:
                if not self._leaving:
                    again = "; Ctrl-C again ends it now" if received == signal.SIGINT else ""
                    within = f"within {self._config.deadlines.shutdown:g} s{again}"
                    name = signal.Signals(received).name
                    warn(f"{name}: this node takes no more work, and leaves the run {within}")
                self._leaving = True
                if self._node is None or not self._serving:
                    whole_scope.cancel()
                    return
                await self._node.drain()

    async def _serve_next(self, tasks: TaskGroup, wait_s: float) -> End | None:
        """Look for a hub for `wait_s` seconds, and serve it. Returns how that ended; None if the hub is gone.

        Raises:
            FlashError: no hub was found in time, although one was served before.
            Exception: the error that ended the node. If a restart cannot fix it, the hub has got it, too.
        """
        try:
            found = await self._search.find(wait_s, self._run)
        except FlashError:
            if self._run is None:  # the launcher had found a hub a moment ago
                return None
            raise
        if found is None:
            say("the run is over")
            return End.OVER
        address, self._run = found
        # The configuration has changed, which this process and its engines cannot take over.
        if self._run.digest != self._digest:
            return End.WITH_PEER
        # The engines hold weights of a version that the run will make again, with other values.
        if self._node is not None and self._node.newest_version > self._run.version:
            say(f"the run has gone back to version {self._run.version}: this node starts again")
            return End.WITH_PEER
        host, port, name = address.host, address.port, f"guest-{os.getpid()}"
        hub: HubConnection | None = None
        try:
            async with connect(host, port, address.token, name, self._config.deadlines.request) as caller:
                hub = HubConnection(caller, self._print_ready)
                return await self._serve(hub, tasks)
        except Exception as error:  # the conditions below find the cause
            if hub is not None and hub.over:
                say("the run is over")
                return End.OVER
            if isinstance(error, TransportError) and (hub is None or hub.lost) and not error.fatal:
                warn(f"the hub at {host}:{port} is gone: {error}")
                return None
            raise

    async def _serve(self, hub: HubConnection, tasks: TaskGroup) -> End:
        """Join the hub, and serve it until it has no more work or a signal arrives.

        The first time, this makes the node and starts its tasks in `tasks`, where they outlive this hub. Later it moves
        the node to the new hub.

        Raises:
            TransportError: the hub is gone.
            Exception: the error that ended the node.
        """
        config, seconds = self._config, self._config.deadlines.request
        engines = config.engines_on(self._place)
        own = self._place if self._trains else 0
        joined = await hub.call(p.JoinRequest(self._digest, engines, own), seconds)
        if joined.node is None:
            return End.OVER
        self._rejoins = self._node is not None
        who, what = f"node {joined.node} of {config.run.name}", f"{engines} engine{'s' * (engines > 1)}"
        self._lost = None
        if self._node is None:
            say(f"{who}: starting {what}")
            self._node = await self.make_node(HubLink(joined.node, joined.first_engine, hub))
            tasks.start_soon(self._work)
            tasks.start_soon(self._print_start)
        else:
            leases_before = self._node.leases_held
            await self._node.move(HubLink(joined.node, joined.first_engine, hub))
            samples = f"{self._node.leases_held} of the {leases_before} samples that it had in hand"
            say(f"{who}: goes on with {what}, and {samples}")
        self._serving = True
        try:
            while self._lost is None and not self._ended:
                self._wake = anyio.Event()
                await self._wake.wait()
        finally:
            self._serving = False
        if not self._ended and self._lost is not None:
            raise self._lost
        if (failure := self._failure) is not None:
            error = first_error(failure) if isinstance(failure, ExceptionGroup) else failure
            if isinstance(error, FlashError) and error.fatal:  # a restart would fail too, so the hub gets the error
                with suppress(FlashError):
                    await hub.call(p.Leave(joined.node, type(error).__name__, str(error)), seconds)
            raise error from None
        say("the run is over" if hub.over else f"node {joined.node} has left the run")
        return End.OVER


def say(line: str) -> None:
    """Print one line for the user, in the format of the first node.

    Errors are ignored, because the reader of the output may be gone.
    """
    with suppress(OSError):
        sys.stdout.write(f"[{harmless(line)}]\n")
        sys.stdout.flush()
