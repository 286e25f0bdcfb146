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
from contextlib import AbstractAsyncContextManager, suppress

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
from flash.run.processes.hub_place import TOKEN_VARIABLE, HubAddress
from flash.run.processes.rendezvous import RETRY_S, HubSearch
from flash.run.processes.supervisor import End
from flash.run.processes.supervisor import say as warn
from flash.text import harmless
from flash.transport.client import connect
from flash.transport.frames import ReplyT, Request
from flash.waiting import first_error, unwrapped_group


def run_joined_loop(order: ProcessOrder, config: Config) -> End:
    """Serve the hubs of a run with this machine's engines. Returns how the loop ended; see `JoinedNode.run`.

    `flash.run.processes.worker` calls this in the process of the node loop, once its configuration is read. Raises the
    error that ended the node, if one did.
    """
    # Removed from the environment variables, so that neither engines nor environments inherit the token.
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
        """Send a request to the hub and return the reply within `timeout` seconds. Implements `HubCaller.call`.

        Sets `over`, `lost` and `serves` by the request and its result. `JoinedNode` calls this to join, and the rollout
        node for all that follows.

        Raises:
            FlashError: the hub has refused the request, or is gone.
        """
        try:
            reply = await self._caller.call(request, timeout)
        except TransportError as error:
            # A fatal error, such as a message that the protocol does not allow, does not mean that the hub is gone.
            self.lost = self.lost or not error.fatal
            raise
        if isinstance(reply, p.LeaseReply | p.CancelReply | p.VersionReply):
            self.over = self.over or reply.done
        # The version of an engine is negative until it has loaded weights of the run.
        if isinstance(request, p.EngineReport) and not self.serves and any(e.version >= 0 for e in request.engines):
            self.serves = True
            self._on_serving(request.node)
        return reply


async def _roll_out(config: Config, order: ProcessOrder, token: str | None) -> End:
    """Run a `JoinedNode` and its signal handler on the event loop of this process. Returns how the node ended. The
    arguments are those of `JoinedNode`."""
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
        """Digest of the run's configuration with which this process was started. The hub's must be equal."""
        self._begun = order.begun
        """Time at which the launcher began to start this process, in Unix seconds."""
        self._search = HubSearch(order.place, token)
        self._run: p.RunReply | None = None
        """Description of the run by the last hub that was found; None before the first one."""
        self._env = LoadedEnvironment(config.env.path, config.env.options)
        self._node: RolloutNode | None = None
        """The rollout node; None before the first hub has numbered it."""
        self._serving = False
        """True from the moment at which the node has joined a hub until this hub is lost or the node has ended. In this
        time the node can leave the run in order."""
        self._makes_samples = False
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

        Raises:
            FlashError: the next hub was not found in time, or refuses this node.
            Exception: the error that ended the node.
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
        while (end := await self._serve_next(tasks, wait_s)) is None:  # None: this hub is gone
            if self._leaving:  # without the hub nothing can be delivered
                return End.OVER
            if self._node is None:  # without engines there is nothing to keep: the launcher starts a new process
                return End.WITH_PEER
            wait_s = self._config.deadlines.rendezvous
            # A hub that can be found but not used must not be asked without a pause.
            await anyio.sleep(RETRY_S)
        return end

    async def _work(self) -> None:
        """Run the node from its start to its end, and record how it ended in `_failure`, for `_serve`.

        A task of its own, which goes on while there is no hub.
        """
        assert self._node is not None, "`_serve` has made the node before it started this task"
        try:
            await self._node.work()
        except Exception as error:  # any error: the task that talks to the hub reports it
            self._failure = error
        self._ended = True
        self._wake.set()

    def lose_hub(self, error: TransportError) -> None:
        """Record that the hub is lost, and wake `_serve`. The rollout node calls this when a request has failed."""
        self._lost = error
        self._wake.set()

    def _print_ready(self, number: int) -> None:
        """Print how long the start of the node has taken. `HubConnection.call` calls this when a hub knows the first
        engine of the node, whose number in the run is `number`. Prints nothing after the first hub that does."""
        assert self._node is not None, "without a node there is no report of engines"
        if self._makes_samples:  # an earlier hub knew an engine, and `_serve` has printed that the node goes on
            return
        self._makes_samples = True
        # vLLM may have been imported before this process was started, in the process from which it was forked. Then the
        # imports took no time of this start.
        imports_s = Imports.seconds if Imports.begun > self._begun else 0.0
        start_s, elapsed_s = imports_s + self._node.start_s, time.time() - self._begun
        say(f"node {number} makes samples after {elapsed_s:.1f} s; its engines took {start_s:.1f} s of them to start")

    async def _print_start(self) -> None:
        """Print a line every STARTUP_LINE_S seconds while the engines start, since a start can take minutes. `_serve`
        has printed a line at the very beginning.

        A task that `_serve` starts together with `_work`. Waits only for the clock. Ends when a hub knows the first
        engine, or when the node has ended.
        """
        begun = anyio.current_time()
        await anyio.sleep(STARTUP_LINE_S)
        while not self._makes_samples and not self._ended:
            seconds = anyio.current_time() - begun
            say(f"{STARTING_ENGINES} … {seconds:.0f} s{explain_engine_start(seconds, self._config)}")
            await anyio.sleep(STARTUP_LINE_S)

    async def make_node(self, link: HubLink) -> RolloutNode:
        """Return a rollout node for the hub of `link`. Its engines are not started yet. Tests replace this method."""
        return await make_node(self._place, link, self._config, self._env, unix_clock(), self.lose_hub)

    async def find_hub(self, wait_s: float, before: p.RunReply | None) -> tuple[HubAddress, p.RunReply] | None:
        """Wait for the hub, like `HubSearch.find`. Simulations replace this method."""
        return await self._search.find(wait_s, before)

    def connect(self, address: HubAddress) -> AbstractAsyncContextManager[p.HubCaller]:
        """Return the connection to the hub at `address`, for the time of a block. Simulations replace this method."""
        seconds = self._config.deadlines.request
        return connect(address.host, address.port, address.token, f"guest-{os.getpid()}", seconds)

    async def handle_signals(self, whole_scope: anyio.CancelScope) -> None:
        """Leave the run in order at SIGINT or SIGTERM: finish the episodes, and take no more tasks.

        Without a hub nothing could be delivered, so `whole_scope`, the scope of all work, is cancelled instead. A
        second Ctrl-C needs no code here, because the launcher kills this process.

        A task beside `run`. Consumes signals, and waits for the next one, until it is cancelled or has cancelled all.
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
        """Look for a hub for `wait_s` seconds, and serve it. `tasks` runs the tasks that outlive the hub.

        Returns the result of `run`, or None if the hub is gone (or was never found) and the next one is to be served.

        Raises:
            FlashError: no hub was found in time, although one was found before.
            Exception: the error that ended the node. If a restart cannot fix it, the hub has got it, too.
        """
        try:
            found = await self.find_hub(wait_s, self._run)
        except FlashError:
            if self._run is None:  # the launcher had found a hub a moment ago
                return None
            raise
        if found is None:
            say("the run is over")
            return End.OVER
        address, self._run = found
        # The run has another configuration than before. The engines of this process cannot change theirs.
        if self._run.digest != self._digest:
            return End.WITH_PEER
        # The engines hold weights of a version that the run will make again, with other values.
        if self._node is not None and self._node.newest_version > self._run.version:
            say(f"the run has gone back to version {self._run.version}: this node starts again")
            return End.WITH_PEER
        hub: HubConnection | None = None
        try:
            async with self.connect(address) as caller:
                hub = HubConnection(caller, self._print_ready)
                return await self._serve(hub, tasks)
        except Exception as error:
            # The class of the error does not show whether the hub or this node has failed: a hub that has ended the run
            # closes the connection, too. `hub` has recorded what happened.
            if hub is not None and hub.over:
                say("the run is over")
                return End.OVER
            if isinstance(error, TransportError) and (hub is None or hub.lost) and not error.fatal:
                warn(f"the hub at {address.host}:{address.port} is gone: {error}")
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
        # 0 lets the hub choose a number, since the number 0 is its own node's.
        own_number = self._place if self._trains else 0
        joined = await hub.call(p.JoinRequest(self._digest, engines, own_number), seconds)
        if joined.node is None:  # the run is ending
            return End.OVER
        who, what = f"node {joined.node} of {config.run.name}", f"{engines} engine{'s' * (engines != 1)}"
        self._lost = None
        if self._node is None:
            say(f"{who}: starting {what}")
            self._node = await self.make_node(HubLink(joined.node, joined.first_engine, hub))
            tasks.start_soon(self._work)
            tasks.start_soon(self._print_start)
        else:
            leases_before = self._node.leases_held
            await self._node.move(HubLink(joined.node, joined.first_engine, hub))
            # The new hub accepts only leases that are open in its state, so the node may have lost some.
            kept = f"{self._node.leases_held} of the {leases_before} samples that it had in hand"
            say(f"{who}: goes on with {what}, and {kept}" if self._makes_samples else f"{who}: starting {what}")
        self._serving = True
        try:
            # `lose_hub` and `_work` change these fields only while this task waits, so no change is missed.
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
