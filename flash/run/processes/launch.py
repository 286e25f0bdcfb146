"""Launch: runs the parts of this machine from their start to their end, and handles signals.

The parts are a node loop (engines and episodes, on the first node also the hub) and the trainer ranks of this machine.
`flash.run.processes.launcher` makes them, and `SupervisedPart.keep_running` restarts each of them when it fails.

On the first node, the node loop receives a signal and ends the run in order, and all other parts end with it. On
another node with trainer ranks, a signal interrupts the whole run: the launch asks the hub for that. On another node
without trainer ranks, the node loop leaves the run, which goes on. Processes that do not end in time are killed. A
Ctrl-C after the first signal kills all processes at once.
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
from flash.run.processes.launch_state import ErrorMarker
from flash.run.processes.ranks import Ranks
from flash.run.processes.supervisor import End, SupervisedPart
from flash.waiting import first_error, run_apart

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a launch. The launch passes SIGHUP on to its processes as SIGTERM, which they handle."""
NAMED = 2
"""Exit code of a run that ended with a FlashError, an error that Flash itself has named; all commands use it."""
LOST = 75
"""Exit code of a launch if its node has failed and the run continues without it; `launch.sh` relies on this value."""


class Launch:
    """Parts of this machine: a node loop, trainer ranks, or both, run until they end.

    Args:
        loop: the node loop of this machine, or the ranks of `flash sft`; None if it has neither.
        ranks: the trainer ranks of this machine; None if it has none.
        marker: file for the error that ends the run. None: this machine is not part of the run's own job.
        has_hub: True if the end of `loop` is the end of the run: the node loop has the hub, or `loop` are the ranks of
            `flash sft`.
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
        self._interrupted = False
        """True if a signal has asked for the end of the launch."""
        self._ranks_failed = False
        """True if the trainer ranks of this machine have failed for good."""
        self._early_signals: list[int] = []
        """Numbers of the signals that arrived before the event loop ran."""
        self._on_signal = self._early_signals.append
        """Function that takes the number of a signal. Python calls it in the main thread. The event loop may run in
        another thread, so signals pass to it through a stream."""

    def run(self) -> int:
        """Run the parts to their end, and return the exit code. The caller must be the main thread.

        `flash.run.processes.launcher` calls this once, when it has made the parts. The signal handlers of the thread
        are restored at the end.

        Raises:
            FlashError: a part has failed; see the parts.
        """
        with self._catching_signals():
            try:
                return run_apart(self._run)
            except BaseExceptionGroup as group:  # raised by the task groups below
                raise first_error(group) from None
            finally:
                for part in self._parts:
                    part.processes.end_server()

    @contextmanager
    def _catching_signals(self) -> Generator[None]:
        """Pass signals to `_on_signal` while the block runs, and restore the handlers of the caller afterwards."""
        # nohup ignores SIGHUP, which then must not end the launch.
        handled = [one for one in HANDLED_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
        before = {number: signal.signal(number, lambda received, _: self._on_signal(received)) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _run(self) -> int:
        """Run the parts and the signal handler on the event loop. Returns the exit code."""
        send, receive = anyio.create_memory_object_stream[int](math.inf)
        loop = asyncio.get_running_loop()
        # Python runs signal handlers in the main thread, which may not be the thread of this loop.
        self._on_signal = lambda number: loop.call_soon_threadsafe(send.send_nowait, number)
        for number in self._early_signals:
            send.send_nowait(number)
        ending = anyio.Event()
        end = End.OVER  # also if a signal comes before any process runs
        with send, receive:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._handle_signals, receive, ending, tasks)
                end = await self.keep_running(ending)
                tasks.cancel_scope.cancel()
        self._on_signal = self._early_signals.append
        return self._exit_code(end)

    async def _handle_signals(self, signals: ObjectReceiveStream[int], ending: anyio.Event, tasks: TaskGroup) -> None:
        """Handle signals: the first starts the end of all parts, and a later SIGINT kills them.

        `ending` is set at the first signal, so that no part restarts. Further signals other than SIGINT have no effect,
        because Slurm may send several. `tasks` is the task group of `_run`.

        Consumes signals. Waits for the next one, until `_run` cancels this task.
        """
        async for number in signals:
            if self._interrupted and number == signal.SIGINT:
                self._kill()
            elif not self._interrupted:
                self._interrupted = True
                ending.set()
                tasks.start_soon(self._end, signal.Signals(number), tasks.cancel_scope)

    def _exit_code(self, end: End) -> int:
        """Return the exit code of the launch. `end` is the end of its node loop; OVER if it has none.

        A failed run has NAMED if the marker holds its error; 1 if nobody has named the error.
        """
        if self._interrupted:
            # A node without trainer ranks has left the run in order, which is a success.
            return End.INTERRUPTED if self._has_hub or self._ranks is not None else 0
        # Without its ranks or its hub the run has failed. Without any other node loop it goes on.
        if self._ranks_failed or (self._has_hub and end != End.OVER):
            return NAMED if self._marker is not None and self._marker.exists() else 1
        return 0 if end == End.OVER else LOST

    async def keep_running(self, ending: anyio.Event) -> End:
        """Run the parts until all are over, or until the hub's part is over. Returns how the node loop ended.

        If the part with the hub is over, the trainer ranks are ended. `ending` is set when a part must end, and not
        restart: by the signal handler, or by the methods of this class.

        Raises:
            FlashError: a part cannot run at all, for example because there is no hub. The other parts are then
                cancelled, which kills their processes.
        """
        end, ranks_over = End.OVER, anyio.Event()
        async with anyio.create_task_group() as tasks:
            if self._ranks is not None:
                tasks.start_soon(self._keep_ranks, self._ranks, ending, ranks_over)
                tasks.start_soon(self._watch_hub, self._ranks, ending)
            if self._loop is not None:
                end = await self._loop.keep_running(ending)
            if self._has_hub:
                # Without an error of a process, the marker names the loss of the hub as the error of the run.
                self._mark(self._loop, PeerLostError)
            if self._ranks is not None:
                if self._has_hub:
                    await self._end_with_hub(self._ranks, ending, ranks_over)
                await ranks_over.wait()
            tasks.cancel_scope.cancel()
        return end

    async def _end_with_hub(self, ranks: Ranks, ending: anyio.Event, over: anyio.Event) -> None:
        """End the trainer ranks after the hub has ended, since they cannot go on without it.

        Args:
            ranks: the trainer ranks of this machine.
            ending: set here, so that no part restarts.
            over: set by `_keep_ranks` when the ranks are over.
        """
        # Ranks that were connected to the hub notice its end themselves. The signal ends ranks that never reached it.
        ending.set()
        ranks.processes.signal(signal.SIGTERM)
        with anyio.move_on_after(ranks.grace_s):
            await over.wait()
        ranks.processes.kill_all()

    def _mark(self, part: SupervisedPart | None, kind: type[PeerLostError]) -> None:
        """Write the reason for the final failure of `part` to the marker, if no process has written an error there.

        Called when `part` has ended; does nothing if it ended in order. `kind` is the class of the error that the
        marker then names.
        """
        if part is not None and part.final_reason and self._marker is not None and not self._marker.exists():
            self._marker.write(kind(part.final_reason))

    async def _keep_ranks(self, ranks: Ranks, ending: anyio.Event, over: anyio.Event) -> None:
        """Keep the trainer ranks running, and set `over` when they are over.

        If they fail for good, the hub ends the run with their error. If no hub can be reached, this machine's part of
        the run is ended instead. This is a task of `keep_running`.
        """
        end = await ranks.keep_running(ending)
        if end != End.OVER and not ending.is_set():
            self._ranks_failed = True
            self._mark(ranks, RanksGoneError)
            reported = self._marker and self._marker.message()
            message = reported or f"the trainer ranks of node {ranks.node} cannot go on: see their output"
            if not await ranks.send_to_hub(p.Fatal(RanksGoneError.__name__, message)):
                ending.set()
                if self._loop is not None:
                    self._loop.processes.signal(signal.SIGTERM)
        over.set()

    async def _watch_hub(self, ranks: Ranks, ending: anyio.Event) -> None:
        """Watch the hub until the run is over, and then end the ranks, except on the hub's own machine.

        There `keep_running` ends them, after the node loop with the hub has ended. This is a task of `keep_running`.
        Raises the errors of `Ranks.watch_hub`.
        """
        await ranks.watch_hub(self._hub_hangs)
        if not self._has_hub:
            ending.set()
            ranks.processes.kill_all()

    def _hub_hangs(self, why: str) -> None:
        """Kill the process that has the hub, because the hub does not answer. `why` describes how it was noticed.

        The node loop with the hub then restarts. Does nothing on other machines, which cannot kill that process.
        """
        if self._has_hub and self._loop is not None:
            self._loop.kill_hanging(self._loop.processes.pids, why)

    async def _end(self, number: signal.Signals, whole_scope: anyio.CancelScope) -> None:
        """End the running parts in order after a signal, and kill processes that do not end in time.

        A task that `_handle_signals` starts at the first signal, `number`. `whole_scope`, the scope of the whole
        launch, is cancelled if no process runs. Otherwise this task waits until `_run` cancels it, because all parts
        are over, or until the time for the end is over.
        """
        if not any(part.processes.pids for part in self._parts):
            whole_scope.cancel()
            return
        with anyio.move_on_after(max(part.grace_s for part in self._parts)):
            # A node loop with the hub interrupts the run, and a node loop alone leaves it. Both run on after the
            # signal.
            if self._loop is not None and (self._has_hub or self._ranks is None):
                self._loop.processes.signal(signal.SIGTERM if number == signal.SIGHUP else number)
                await anyio.sleep_forever()
            # Ranks cannot leave the run, so the hub must interrupt the whole run.
            ranks = self._ranks
            if ranks and await ranks.send_to_hub(p.Interrupt(f"node {ranks.node} received {number.name}")):
                await anyio.sleep_forever()
        self._kill()  # the time is over, or no hub can end the run

    def _kill(self) -> None:
        """Kill all processes of all parts."""
        for part in self._parts:
            part.processes.kill_all()
