"""The loop of a node that has joined a run, as every node but the first does.

It connects to the hub as a guest, and is given its number and those of its engines. When the hub is gone its episodes
go on; it waits for the next one of the run, and goes on there with what it has in hand. SIGTERM makes it leave in
order.
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
from flash.rollout.hub_client import HubLink
from flash.rollout.node import RolloutNode
from flash.run.loop_watch import run_watched
from flash.run.node_loop import NodeNumbers, make_node, unix_clock
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.hub_search import RETRY_S, HubSearch
from flash.run.processes.supervisor import End
from flash.run.processes.supervisor import say as warn
from flash.run.processes.token import VARIABLE
from flash.run.startup import EVERY_S, start_of_engines
from flash.text import harmless
from flash.transport.client import connect
from flash.transport.frames import ReplyT, Request
from flash.waiting import first_error, unwrapped_group


def run_joined_loop(order: ProcessOrder, config: Config) -> End:
    """Serve the hubs of a run with this machine's engines, until it is over, or as `JoinedNode` says."""
    # Taken out, so that neither engines nor environments inherit it.
    return run_watched(warn, _roll_out, config, order, os.environ.pop(VARIABLE, None))


class HubConnection:
    """A connection to the hub that remembers how it ended. `serves` is told, once, that this node makes samples."""

    def __init__(self, caller: p.HubCaller, serves: Callable[[int], None]) -> None:
        self._caller = caller
        self._tell = serves
        self.over = False
        """Whether the hub has said that there is no more work."""
        self.lost = False
        """Whether it could not be asked any more."""
        self.serves = False
        """Whether it knows of an engine of ours that has a version."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """As of `HubCaller`."""
        try:
            reply = await self._caller.call(request, timeout)
        except TransportError as error:
            self.lost = self.lost or not error.fatal
            raise
        if isinstance(reply, p.LeaseReply | p.CancelReply | p.VersionReply):
            self.over = self.over or reply.done
        if isinstance(request, p.EngineReport) and not self.serves and any(e.version >= 0 for e in request.engines):
            self.serves = True
            self._tell(request.node)
        return reply


async def _roll_out(config: Config, order: ProcessOrder, token: str | None) -> End:
    end = End.OVER  # also of a signal that comes while it has no hub
    try:
        async with sharing(config.run.name, close_s=config.deadlines.close), anyio.create_task_group() as group:
            node = JoinedNode(config, order, token)
            group.start_soon(node.heed_signals, group.cancel_scope)
            end = await node.run()
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:  # of the task groups above: people see the error that tells most
        raise first_error(errors) from None
    return end


class JoinedNode:
    """What a node loop does: it serves one hub of its run after the other, with the same node.

    Args:
        config: of the run, on this machine.
        order: the launcher's.
        token: the value of FLASH_TOKEN.
    """

    def __init__(self, config: Config, order: ProcessOrder, token: str | None) -> None:
        self._config = config
        self._place = order.node
        self._trains = order.node < config.cluster.trainer_nodes
        self._digest = order.digest
        self._begun = order.begun
        self._search = HubSearch(order.place, token)
        self._run: p.RunReply | None = None
        """What the last hub said."""
        self._env = LoadedEnvironment(config.env.path, config.env.options)
        self._node: RolloutNode | None = None
        self._rejoins = False
        """Whether it has come to this hub with engines that run."""
        self._serving = False
        self._samples = False
        """Whether its engines have started, and a hub knows of one."""
        self._news = anyio.Event()
        """Either of the next two."""
        self._lost: TransportError | None = None
        """Why the hub is gone."""
        self._ended = False
        """Whether the node has ended."""
        self._failure: Exception | None = None
        """With this error."""
        self._told = False
        """Whether a signal has told us to leave."""

    async def run(self) -> End:
        """Until the run is over, a signal comes, or the next hub wants another node than this one."""
        try:
            async with unwrapped_group() as tasks:
                end = await self._serve_all(tasks)
                tasks.cancel_scope.cancel()
            return end
        finally:
            if self._node is not None:
                await self._node.close()

    async def _serve_all(self, tasks: TaskGroup) -> End:
        wait_s = 0.0
        while (end := await self._serve_next(tasks, wait_s)) is None:
            if self._node is None or self._told:
                return End.WITH_PEER
            wait_s = self._config.deadlines.rendezvous
            await anyio.sleep(RETRY_S)
        return end

    async def _work(self) -> None:
        """The node, from its start to its end."""
        assert self._node is not None, "it was made just now"
        try:
            await self._node.work()
        except Exception as error:  # whatever it is: who speaks with the hub tells of it
            self._failure = error
        self._ended = True
        self._news.set()

    def lose_hub(self, error: TransportError) -> None:
        """The node could not ask the hub any more."""
        self._lost = error
        self._news.set()

    def _tell_beginning(self, number: int) -> None:
        assert self._node is not None, "without a node there is no report"
        self._samples = True
        if self._rejoins:
            return  # it says itself what it goes on with
        imports_s = Imports.seconds if Imports.begun > self._begun else 0.0
        start_s, words = imports_s + self._node.start_s, f"after {time.time() - self._begun:.1f} s"
        say(f"node {number} makes samples {words}, of which its engines took {start_s:.1f} s to start")

    async def _tell_start(self) -> None:
        """Say how long the engines have been starting. Waits for the clock. Produces lines, until they make samples."""
        begun = anyio.current_time()
        while not self._samples and not self._ended:
            if (seconds := anyio.current_time() - begun) > 0:
                say(f"{STARTING_ENGINES} … {seconds:.0f} s{start_of_engines(seconds, self._config)}")
            await anyio.sleep(EVERY_S)

    async def make_node(self, numbers: NodeNumbers, hub: HubConnection) -> RolloutNode:
        """The node, with engines that are still to start."""
        parts = (self._place, numbers, self._config, self._env, hub)
        return await make_node(*parts, unix_clock(), on_loss=self.lose_hub)

    async def heed_signals(self, all_of_it: anyio.CancelScope) -> None:
        """Leave in order."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for received in signals:
                if not self._told:
                    again = "; Ctrl-C again ends it now" if received == signal.SIGINT else ""
                    within = f"within {self._config.deadlines.shutdown:g} s{again}"
                    name = signal.Signals(received).name
                    warn(f"{name}: this node takes no more work, and leaves the run {within}")
                self._told = True
                if self._node is None or not self._serving:
                    all_of_it.cancel()
                    return
                await self._node.drain()

    async def _serve_next(self, tasks: TaskGroup, wait_s: float) -> End | None:
        """Look for a hub, for so long, and serve it. None: it is gone.

        Raises:
            Exception: what ended the node; the hub knows of a `FlashError` that would come again.
        """
        try:
            found = await self._search.find(wait_s, self._run)
        except FlashError:
            if self._run is None:  # it was there a moment ago
                return None
            raise
        if found is None:
            say("the run is over")
            return End.OVER
        address, self._run = found
        if self._run.digest != self._digest:
            return End.WITH_PEER
        if self._node is not None and self._node.newest_version > self._run.version:
            say(f"the run has gone back to version {self._run.version}: this node starts again")
            return End.WITH_PEER
        host, port, name = address.host, address.port, f"guest-{os.getpid()}"
        hub: HubConnection | None = None
        try:
            async with connect(host, port, address.token, name, self._config.deadlines.connect) as caller:
                hub = HubConnection(caller, self._tell_beginning)
                return await self._serve(hub, tasks)
        except Exception as error:  # what ends it is told apart below
            if hub is not None and hub.over:
                say("the run is over")
                return End.OVER
            if isinstance(error, TransportError) and (hub is None or hub.lost) and not error.fatal:
                warn(f"the hub at {host}:{port} is gone: {error}")
                return None
            raise

    async def _serve(self, hub: HubConnection, tasks: TaskGroup) -> End:
        """Join, and serve until the hub has no more work or a signal comes. Errors as of `_serve_next`."""
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
            self._node = await self.make_node(NodeNumbers(joined.node, joined.first_engine), hub)
            tasks.start_soon(self._work)
            tasks.start_soon(self._tell_start)
        else:
            had = self._node.in_hand
            await self._node.move(HubLink(joined.node, joined.first_engine, hub))
            say(f"{who}: goes on with {what}, and {self._node.in_hand} of the {had} samples that it had in hand")
        self._serving = True
        try:
            while self._lost is None and not self._ended:
                self._news = anyio.Event()
                await self._news.wait()
        finally:
            self._serving = False
        if not self._ended and self._lost is not None:
            raise self._lost
        if (failure := self._failure) is not None:
            error = first_error(failure) if isinstance(failure, ExceptionGroup) else failure
            if isinstance(error, FlashError) and error.fatal:  # the hub is told of what would come again
                with suppress(FlashError):
                    await hub.call(p.Leave(joined.node, type(error).__name__, str(error)), seconds)
            raise error from None
        say("the run is over" if hub.over else f"node {joined.node} has left the run")
        return End.OVER


def say(words: str) -> None:
    """One line for people, as the first node writes them; who read it may be gone."""
    with suppress(OSError):
        sys.stdout.write(f"[{harmless(words)}]\n")
        sys.stdout.flush()
