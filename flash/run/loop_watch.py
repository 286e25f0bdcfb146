"""Watch over a process's event loop: it names the code that blocks the loop, and stops the loop's clock meanwhile.

A user's `async def step` that computes or sleeps without `await` stops every other task of its process. Without the
watch, a peer would be declared dead because its messages are not read. While the loop is known to be blocked, its clock
stands still, so no deadline of this process expires. `WatchedLoop.lost_s` is the difference to the wall time.

Lifecycle: call `run_watched` instead of `anyio.run`; node loops, `flash eval`, `flash rollout` and the dry run do.
`flash.run.play` has a watched loop that runs for the whole life of its process. The loop runs a *heartbeat*, a callback
every TICK_S seconds. One daemon thread checks these heartbeats until the loop ends.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from asyncio import base_events
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, TypeVarTuple, cast

import anyio

from flash.environment.places import is_logged, is_users, lines_of, place_in
from flash.foreign.abandoned import unregister

ResultT = TypeVar("ResultT")
"""Result of the function that `run_watched` runs."""
ArgsT = TypeVarTuple("ArgsT")
"""Arguments of the function that `run_watched` runs."""

BLOCKED_S = 1.0
"""Seconds without a heartbeat after which a loop counts as blocked, if its thread was busy in at least half of them."""

TICK_S = 0.2
"""Seconds between two heartbeats, and between two checks of the heartbeat."""

REPEAT_S = 15.0
"""Seconds between further messages about a loop that stays blocked. They show why a peer may kill the process."""

SLOW_S = 60.0
"""Seconds after a block in which a user's coroutines are resumed one by one (`WatchedLoop.turn`), with turns of the
loop in between. A turn is one pass of the loop over the callbacks that are ready."""

TURNS_BETWEEN = 10
"""Number of turns of the loop between two such coroutines. A message needs fewer turns from its arrival to the
reply."""

LEFTOVERS_S = 1.0
"""Seconds that tasks which user code left behind have to end when the loop ends."""


class Blocks:
    """Detector of blocks: decides from checks every TICK_S seconds when a loop is blocked, and by which code.

    Pure state without a clock. A *place* is a line of code, as file and line number. An *interval* lasts from one
    heartbeat to the next. Invariant: an interval in which the loop is blocked is counted once, for the place that was
    seen most often until the loop counted as blocked. It is reported if `is_logged` allows it. Time is measured by the
    number of checks, because no check runs while the whole process is stopped, and the loop is not to blame then.
    """

    def __init__(self) -> None:
        self._checks = 0
        """Number of checks since the last heartbeat."""
        self._seen: Counter[str] = Counter()
        """Number of checks at each place since the last heartbeat."""
        self._ran_s = 0.0
        """Seconds of processor time that the loop's thread has used since the last heartbeat."""
        self._place = ""
        """Place that blocks the loop in this interval; empty while none is known. `is_logged` may leave its message
        out."""
        self.counts: Counter[str] = Counter()
        """Number of intervals in which each place blocked the loop."""

    @property
    def blocked(self) -> bool:
        """True while the loop is known to be blocked."""
        return bool(self._place)

    def heartbeat(self) -> None:
        """Handle a heartbeat: the loop is not blocked, and a new interval begins."""
        self._checks, self._ran_s, self._place = 0, 0.0, ""
        self._seen.clear()

    def check(self, place: str, ran_s: float = TICK_S) -> str | None:
        """Do one check. Returns a message for the user; None if there is nothing new to report.

        The watching thread calls this every TICK_S seconds (`WatchedLoop._watch`).

        Args:
            place: line that the loop's thread executes; empty if the loop waits for events.
            ran_s: seconds of processor time that the thread has used since the last check.
        """
        self._checks += 1
        self._ran_s += ran_s
        if place:
            self._seen[place] += 1
        seconds = self._checks * TICK_S
        if self._place:
            again = f"{self._place} still blocks the event loop, for {seconds:g} s"
            return again if seconds % REPEAT_S == 0 else None
        # A loop that waits for events in at least half of the checks is not blocked. It has no heartbeat because its
        # process gets no CPU time. The last heartbeat was up to TICK_S before the first check.
        if seconds < BLOCKED_S - TICK_S or 2 * self._seen.total() < self._checks:
            return None
        self._place = self._seen.most_common(1)[0][0]
        self.counts[self._place] += 1
        return self._message()

    def _message(self) -> str | None:
        """Return the message about a new interval; None if its place was reported often enough already."""
        count = self.counts[self._place]
        if not is_logged(count):
            return None
        times = f" {count} times, each" if count > 1 else ""
        advice = "the event loop's process can do nothing else meanwhile"
        if is_users(self._place):
            advice = "use plain `def`, which runs in a thread, or await"
        # A thread that gets no processor stands at a line that is not to blame.
        if self._ran_s < self._checks * TICK_S / 2:
            advice += (
                f". It used only {self._ran_s:.1f} s of processor time: if this line does not wait for anything, the "
                "machine or other threads were too busy to let it run, and it is not to blame"
            )
        return f"{self._place} blocked the event loop{times} for {BLOCKED_S:g} s: {advice}"


class WatchedLoop(asyncio.SelectorEventLoop):
    """Event loop with a clock that stands still while a callback is known to block it."""

    def __init__(self) -> None:
        self.lost_s = 0.0
        """Seconds that the loop's clock has skipped."""
        self._stopped_at: float | None = None
        """Time on the loop's clock while it stands still; None while it runs."""
        self.blocks = Blocks()
        """Detector that decides if the loop is blocked."""
        self._state_lock = threading.Lock()
        """Lock of `blocks`, `lost_s` and `_stopped_at`, which the loop and the watching thread change."""
        self._over = threading.Event()
        """Event that is set when the loop is closed, and ends the watching thread."""
        self._slow_until = 0.0
        """Time on the loop's clock until which a user's coroutines are resumed one by one."""
        self._turn_lock = asyncio.Lock()
        """Lock that lets one user's coroutine after the other pass `turn`."""
        super().__init__()

    async def turn(self) -> None:
        """Wait until a user's coroutine may be resumed. Returns at once unless the loop was blocked a moment ago.

        `flash.environment.calls` waits for this before each step of a user's coroutine. If 64 coroutines that block for
        a second each were resumed in one turn of the loop, the messages of peers would stay unread for more than a
        minute. Peers would then pass their deadlines.
        """
        if self.time() < self._slow_until:
            async with self._turn_lock:
                for _ in range(TURNS_BETWEEN):
                    await asyncio.sleep(0)

    def time(self) -> float:
        """Return the seconds of a monotonic clock, without those in which the loop was known to be blocked."""
        # Without the lock: only the loop's thread, which calls this, changes `lost_s`. The watching thread holds the
        # lock when it calls this.
        stopped = self._stopped_at
        return time.monotonic() - self.lost_s if stopped is None else stopped

    def watch(self, warn: Callable[[str], None]) -> None:
        """Start to watch the loop. Must be called once, in the loop's thread (`run_watched`, `flash.run.play`).

        `warn` is called with each message for the user, in the watching thread, because the loop's thread is blocked.
        """
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        threading.Thread(target=self._watch, args=(thread, clock, warn), name="flash loop watch", daemon=True).start()
        self._beat()

    def close(self) -> None:
        """Close the loop, and end the watch."""
        self._over.set()
        super().close()

    def _beat(self) -> None:
        """Handle a heartbeat: let the clock run again if it stands still. Schedules the next heartbeat.

        The loop calls this, so it is late while the loop is blocked.
        """
        with self._state_lock:
            self.blocks.heartbeat()
            if self._stopped_at is not None:
                # The clock goes on from the time at which it stopped.
                self.lost_s = time.monotonic() - self._stopped_at
                self._stopped_at = None
                self._slow_until = self.time() + SLOW_S
        self.call_later(TICK_S, self._beat)

    def _watch(self, loop_thread: int, cpu_clock: int, warn: Callable[[str], None]) -> None:
        """Check every TICK_S seconds which line the loop's thread executes, until the loop is closed.

        Runs in the watching thread, and waits only for the clock. If the loop is found to be blocked, this stops the
        loop's clock (`_stopped_at`), and calls `warn` with the message for the user, if there is one.

        Args:
            loop_thread: id of the loop's thread.
            cpu_clock: id of the clock that counts this thread's processor time (`time.pthread_getcpuclockid`).
            warn: function that is called with each message.
        """
        used_s = time.clock_gettime(cpu_clock)
        while not self._over.wait(TICK_S):
            used_before_s, used_s = used_s, time.clock_gettime(cpu_clock)
            frame = sys._current_frames().get(loop_thread)  # pyright: ignore[reportPrivateUsage]
            lines = lines_of(frame)
            # The loop waits in its own selector. A selector of user code, as in `subprocess.run`, counts as a block.
            # There is no line if the thread has ended.
            loop_waits = [file for file, _ in lines[-2:]] in ([], [base_events.__file__, selectors.__file__])
            with self._state_lock:
                message = self.blocks.check("" if loop_waits else place_in(lines), used_s - used_before_s)
                if self.blocks.blocked and self._stopped_at is None:
                    self._stopped_at = self.time()
            if message is not None:
                warn(message)


def blocked_seconds() -> float:
    """Return the seconds, since the running loop started, in which it was known to be blocked; 0 for a loop that is not
    watched. Nodes report these seconds to the hub."""
    loop = asyncio.get_running_loop()
    return loop.lost_s if isinstance(loop, WatchedLoop) else 0.0


def run_watched(
    warn: Callable[[str], None], function: Callable[[*ArgsT], Awaitable[ResultT]], *args: *ArgsT
) -> ResultT:
    """Run a coroutine function to its end, as `anyio.run` does, on a watched loop. Returns its result.

    Node loops, `flash eval`, `flash rollout` and the dry run do all their asynchronous work in it. Tasks that user code
    left behind cannot delay the end of the loop, even if they ignore their cancellation.

    Args:
        warn: called in another thread, with a message for the user, when the loop is blocked.
        function: the coroutine function.
        args: its arguments.
    """

    async def main() -> ResultT:
        """Start the watch, and run the function on this loop."""
        cast("WatchedLoop", asyncio.get_running_loop()).watch(warn)
        try:
            return await function(*args)
        finally:
            await _end_leftovers()

    return anyio.run(main, backend="asyncio", backend_options={"loop_factory": WatchedLoop})


async def _end_leftovers() -> None:
    """Cancel the other tasks of this loop, and wait at most LEFTOVERS_S seconds for them. The last work of the loop.

    Tasks that do not end in time are unregistered, so that asyncio does not wait for them. Flash's own tasks have ended
    by now, so these are tasks of user code.
    """
    left: set[asyncio.Task[Any]] = {one for one in asyncio.all_tasks() if one is not asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        with anyio.CancelScope(shield=True):
            _, left = await asyncio.wait(left, timeout=LEFTOVERS_S)
    for task in left:
        unregister(task)
