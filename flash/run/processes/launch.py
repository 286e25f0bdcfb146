"""One launch: the parts of this machine, from their start to their end, and what signals do to them.

The first node's loop has the hub: it is told of a signal, ends the run in order, and nothing outlives it. On another
machine the loop is a node that has joined, which leaves; where there are trainer ranks the whole run is interrupted.
Who does not end in time is killed, and a Ctrl-C after the first signal kills at once.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Generator
from contextlib import contextmanager

import anyio
from anyio.abc import ObjectReceiveStream, TaskGroup

from flash.errors import PeerLostError, RanksGoneError
from flash.hub import protocol as p
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.ranks import Ranks
from flash.run.processes.supervisor import End, SupervisedPart
from flash.waiting import first_error, run_apart

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a launch. Processes of its own take the last for SIGTERM."""
NAMED = 2
"""Exit code of a run that an error with a name has ended, as of every command."""
LOST = 75
"""Exit code of a launch whose node has failed for good, while the run goes on; launch.sh knows it."""


class Launch:
    """See the module's docstring.

    Args:
        loop: the node loop of this machine, if it has one.
        ranks: its trainer ranks, if it has any.
        marker: where the error is left that ends the run; None: it is no machine of the run's own job.
        has_hub: whether the loop has the hub.
    """

    def __init__(
        self,
        loop: SupervisedPart | None,
        ranks: Ranks | None = None,
        marker: ErrorMarker | None = None,
        *,
        has_hub: bool = False,
    ) -> None:
        self._loop = loop
        self._ranks = ranks
        self._marker = marker
        self._has_hub = has_hub
        self._parts: list[SupervisedPart] = [part for part in (loop, ranks) if part is not None]
        self._told = False
        """Whether a signal has asked for the end."""
        self._ranks_failed = False
        self._early: list[int] = []
        self._hear = self._early.append
        """Takes a signal, in whatever thread handlers run."""

    def run(self) -> int:
        """Run to the end; the exit code. The caller is the main thread, whose handlers of signals are kept.

        Raises:
            FlashError: as of the parts.
        """
        with self._heeding_signals():
            try:
                return run_apart(self._run)
            except BaseExceptionGroup as group:  # of the task groups below
                raise first_error(group) from None
            finally:
                for part in self._parts:
                    part.processes.end_server()

    @contextmanager
    def _heeding_signals(self) -> Generator[None]:
        heeded = [one for one in HEEDED if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]  # nohup
        before = {number: signal.signal(number, lambda heard, _: self._hear(heard)) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _run(self) -> int:
        send, receive = anyio.create_memory_object_stream[int](math.inf)
        loop = asyncio.get_running_loop()
        self._hear = lambda number: loop.call_soon_threadsafe(send.send_nowait, number)
        for number in self._early:
            send.send_nowait(number)
        ending = anyio.Event()
        end = End.OVER  # also where it is told to end before anything runs
        with send, receive:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._heed, receive, ending, tasks)
                end = await self.keep(ending)
                tasks.cancel_scope.cancel()
        self._hear = self._early.append
        return self._exit_code(end)

    async def _heed(self, signals: ObjectReceiveStream[int], ending: anyio.Event, tasks: TaskGroup) -> None:
        """Consumes signals. Waits for the next one. Produces the end of what runs."""
        async for number in signals:
            if self._told and number == signal.SIGINT:
                self._kill()
            elif not self._told:
                self._told = True
                ending.set()
                tasks.start_soon(self._end, signal.Signals(number), tasks.cancel_scope)

    def _exit_code(self, end: End) -> int:
        if self._told:
            return End.INTERRUPTED if self._has_hub or self._ranks is not None else 0
        if self._ranks_failed or (self._has_hub and end != End.OVER):
            return NAMED if self._marker is not None and self._marker.stands() else 1
        return 0 if end == End.OVER else LOST

    async def keep(self, ending: anyio.Event) -> End:
        """Keep the parts going, until all are over, or the hub's is; how the loop ended."""
        end, ranks_over = End.OVER, anyio.Event()
        async with anyio.create_task_group() as tasks:
            if self._ranks is not None:
                tasks.start_soon(self._keep_ranks, self._ranks, ending, ranks_over)
                tasks.start_soon(self._heed_hub, self._ranks, ending)
            if self._loop is not None:
                end = await self._loop.keep(ending)
            if self._has_hub:
                self._mark(self._loop, PeerLostError)
            if self._ranks is not None:
                if self._has_hub:
                    await self._end_with_hub(self._ranks, ending, ranks_over)
                await ranks_over.wait()
            tasks.cancel_scope.cancel()
        return end

    async def _end_with_hub(self, ranks: Ranks, ending: anyio.Event, over: anyio.Event) -> None:
        """Without a hub they can do nothing: those that never had one end by a signal, the others know it."""
        ending.set()
        ranks.processes.signal(signal.SIGTERM)
        with anyio.move_on_after(ranks.grace_s):
            await over.wait()
        ranks.processes.kill_all()

    def _mark(self, part: SupervisedPart | None, kind: type[PeerLostError]) -> None:
        """Leave the error behind that has ended the run, where the processes could not."""
        if part is not None and part.why and self._marker is not None and not self._marker.stands():
            self._marker.write(kind(part.why))

    async def _keep_ranks(self, ranks: Ranks, ending: anyio.Event, over: anyio.Event) -> None:
        """Produces the end of the run where they cannot go on."""
        end = await ranks.keep(ending)
        if end != End.OVER and not ending.is_set():
            self._ranks_failed = True
            self._mark(ranks, RanksGoneError)
            said = self._marker and self._marker.message()
            message = said or f"the trainer ranks of node {ranks.node} cannot go on: their output says why"
            if not await ranks.tell_hub(p.Fatal(RanksGoneError.__name__, message)):
                ending.set()
                if self._loop is not None:
                    self._loop.processes.signal(signal.SIGTERM)
        over.set()

    async def _heed_hub(self, ranks: Ranks, ending: anyio.Event) -> None:
        await ranks.heed_hub(self._hub_hangs)
        if not self._has_hub:
            ending.set()
            ranks.processes.kill_all()

    def _hub_hangs(self, why: str) -> None:
        """The hub is silent: here is where its process can be ended."""
        if self._has_hub and self._loop is not None:
            self._loop.kill_hanging(self._loop.processes.pids, why)

    async def _end(self, number: signal.Signals, all_of_it: anyio.CancelScope) -> None:
        """End in order what runs, at a signal; what does not end in time is killed."""
        if not any(part.processes.pids for part in self._parts):
            all_of_it.cancel()
            return
        with anyio.move_on_after(max(part.grace_s for part in self._parts)):
            if self._loop is not None and (self._has_hub or self._ranks is None):
                self._loop.processes.signal(signal.SIGTERM if number == signal.SIGHUP else number)
                await anyio.sleep_forever()
            ranks = self._ranks
            if ranks and await ranks.tell_hub(p.Interrupt(f"node {ranks.node} received {number.name}")):
                await anyio.sleep_forever()
        self._kill()  # late, or without a hub that ends the run

    def _kill(self) -> None:
        for part in self._parts:
            part.processes.kill_all()
