"""Supervisor of the processes of one machine: starts, watches, restarts and ends them.

The *launcher* is the process of the command itself. A machine has a *node loop* (the event loop with engines and
episodes, on the first node also with the hub), trainer ranks, or both. Each of the two is a `SupervisedPart` with its
own count of restarts. A subclass decides which processes to start, and how to interpret their exit codes. Every process
is a child of the launcher in a session of its own. So a terminal's signals reach it only through the launcher, and it
can be killed with all processes that it has started.

`flash.run.processes.launch.Launch` keeps the parts of a machine running, and ends them together.

Law: a part that was asked to end never starts again.
"""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import describe_exit_code
from flash.foreign.forking import SERVER_GONE, ForkedProcess, ForkServer
from flash.run.processes.forked import JobProcess, ProcessOrder
from flash.text import harmless
from flash.waiting import first_error

KILLED_S = 2.0
"""Seconds to wait for the exit of a killed process. The wait blocks the event loop."""
RETRY_S = 1.0
"""Seconds before the next attempt if the system could not start a process."""
SIGNAL_SPREAD_S = 2.0
"""Seconds within which a signal that killed a process may also reach the launcher: Slurm sends it to every process of a
job."""


class End(IntEnum):
    """Exit codes of supervised processes. They decide whether the supervisor restarts the part."""

    OVER = 0
    """The run is over, or the process was asked to leave."""
    FAILED = 1
    """The process failed with an error that a restart may fix. It has reported the error."""
    FINAL = 3
    """The process failed with an error that no restart can fix. It has reported the error."""
    WITH_PEER = 75
    """The process lost its hub or another rank. It is not at fault, and its restart is not counted."""
    INTERRUPTED = 130
    """A signal interrupted the process: 128 + SIGINT, as in shells."""


class EndedProcess(NamedTuple):
    """Result of a process that has ended."""

    local: int
    """Number of the process among those that started together."""
    pid: int
    """Process id."""
    code: int
    """Exit code; −N if signal N killed the process."""


class NotStartedError(Exception):
    """Error of `Processes.run`: the system could not start a process. `keep_running` counts it as a failure."""


class Processes:
    """Group of processes that start together. When one of them fails, the others are ended.

    Lifecycle: `fork_from` names a server, and `run` starts the processes and waits until all have ended; both may be
    called again for a restart. `end_server` is the last call. All methods are called on one event loop, except the last
    `end_server`, which comes after the loop.
    """

    linger_s = 10.0
    """Seconds after the first failure until the remaining processes are killed. A process that does not hang notices
    the failure and exits before."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        """Server from which processes are forked; None before `fork_from`."""
        self._living: dict[int, ForkedProcess] = {}
        """Running processes, by their number in this start."""
        self._starting = False
        """True while a process is being started."""
        self._last_signal: signal.Signals | None = None
        """Last signal that was sent to all processes. Processes that start later get it, too."""
        self.killed: set[int] = set()
        """Ids of the processes of the last start that this supervisor has killed."""

    @property
    def pids(self) -> set[int]:
        """Process ids of the running processes."""
        return {_id_of(process) for process in self._living.values()}

    def fork_from(self, server: ForkServer) -> None:
        """Fork later processes from `server`. Each part calls this before `run`, also before a restart.

        If the present server has the same environment variables, it is kept, because its modules are imported already.
        """
        if self._server is None or self._server.variables != server.variables:
            self.end_server()
            self._server = server

    def end_server(self) -> None:
        """Kill the fork server, because no more processes are needed, or because another server replaces it.

        Processes that were forked from it are not killed by this. Does nothing before `fork_from`.
        """
        if self._server is not None:
            self._server.end()

    async def run(
        self, role: str, file: Path, orders: Sequence[ProcessOrder], variables: Sequence[Mapping[str, str]] = ()
    ) -> list[EndedProcess]:
        """Start one process for each order, and wait until all have ended. Returns their results in the order of their
        ends.

        When a process has failed, the others are killed `linger_s` seconds later. If this call is cancelled, all of
        them are killed at once.

        Args:
            role: role of all processes, a `flash.run.processes.worker.Role`.
            file: file from which they read the configuration.
            orders: arguments of each process.
            variables: additional environment variables of each process; empty: none has any.

        Raises:
            NotStartedError: the system could not start a process.
        """
        ended: list[EndedProcess] = []
        failing = anyio.Event()
        self.killed.clear()
        try:
            async with anyio.create_task_group() as outer:
                outer.start_soon(self._end_rest, failing)
                async with anyio.create_task_group() as tasks:  # ends when all processes have ended
                    for number, order in enumerate(orders):
                        process = self.process(role, file, order, variables[number] if variables else {})
                        await self._begin(process)
                        tasks.start_soon(self._follow, number, process, ended, failing)
                outer.cancel_scope.cancel()
        except* (OSError, EOFError) as errors:
            raise NotStartedError(f"a process cannot be started: {first_error(errors)}") from None
        return ended

    def process(self, role: str, file: Path, order: ProcessOrder, variables: Mapping[str, str]) -> ForkedProcess:
        """Return a new process that is not started yet. Tests replace this method. The parameters are those of
        `JobProcess`."""
        assert self._server is not None, "`fork_from` names the server before `run`"
        return JobProcess(self._server, role, file, order, variables)

    async def _begin(self, process: ForkedProcess) -> None:
        """Start a process, in a thread. This takes seconds if the server has to import its modules first.

        If this task is cancelled, the server is killed: only then does the thread end. Raises OSError or EOFError if
        the server is gone, or the system cannot start a process.
        """
        self._starting = True
        try:
            await anyio.to_thread.run_sync(process.start, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            process.server.end()
            raise
        finally:
            self._starting = False

    async def _follow(
        self, number: int, process: ForkedProcess, ended: list[EndedProcess], failing: anyio.Event
    ) -> None:
        """Wait until a process has ended, and add its result to `ended`. Sets `failing` if it did not end in order.

        A process that still runs when this task is cancelled, or when its server is gone, is killed. If the server is
        gone, the exit code of the process cannot be known. `number` counts the processes that started together.
        """
        self._living[number] = process
        if self._last_signal is not None:  # the group was asked to end while this process was being started
            _send(process, self._last_signal)
        try:
            await anyio.wait_readable(process.sentinel)
        finally:
            if process.exitcode in (None, SERVER_GONE):
                _kill(process)
            process.join(KILLED_S)
            del self._living[number]
        code = process.exitcode  # None if even SIGKILL has not ended the process, which then waits for a device
        ended.append(EndedProcess(number, _id_of(process), SERVER_GONE if code is None else code))
        if code != End.OVER:
            failing.set()

    async def _end_rest(self, failing: anyio.Event) -> None:
        """Wait until a process has failed, and kill the others `linger_s` seconds later.

        `run` cancels this task when all processes have ended.
        """
        await failing.wait()
        await anyio.sleep(self.linger_s)
        self.kill(self.pids)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group, and to each process that starts later.

        The part must not restart after this. Child processes of the group's processes, such as those of engines, do not
        get the signal.
        """
        self._last_signal = number
        for process in self._living.values():
            _send(process, number)

    def kill_all(self) -> None:
        """Kill all processes with their child processes, also a process that is just being started.

        `Launch` calls this when the time for an end in order is over, and at once if no such end is possible: at a
        later SIGINT, if no hub can end the run, and on machines without the hub when the run is over. A process that
        has just been started is killed by `_follow`, and does not enter `killed`. No part restarts afterwards, so
        nothing depends on that.
        """
        self._last_signal = signal.SIGKILL  # for a process that the server has forked already
        self.kill(self.pids)
        if self._starting:
            # The thread of `_begin` may still wait for the server's imports. Without the server it gets OSError or
            # EOFError, and `run` raises NotStartedError.
            self.end_server()

    def kill(self, pids: Collection[int]) -> None:
        """Kill the processes with these process ids, and their child processes. Ignores ids of other processes.

        The ids are recorded in `killed`, because `judge` does not count processes that this supervisor has killed.
        """
        for process in self._living.values():
            if (pid := process.pid) is not None and pid in pids:
                self.killed.add(pid)
                _kill(process)


class SupervisedPart(ABC):
    """Part of the work of a machine, for example its trainer ranks. It is restarted when it fails.

    `Launch` calls `keep_running` once. A subclass implements `run_once`.

    Args:
        config: the run's configuration; None if it is not known yet.
        restart_line: sentence that is printed before a restart, for example "the trainer ranks start again".
        failure: reason for the final failure if `run_once` returns no message; empty if the error was reported already.
        aftermath: text that is added to the line that is printed when no restart is left, for example that the run goes
            on without this node.
    """

    def __init__(self, config: Config | None, restart_line: str, failure: str = "", aftermath: str = "") -> None:
        self.config = config
        self._restart_line = restart_line
        self._failure = failure
        self._aftermath = aftermath
        self.processes = Processes()
        """Processes of the part."""
        self.hung: set[int] = set()
        """Ids of the processes of the last start that were killed because they hung."""
        self.hang_reason = ""
        """Reason why the processes in `hung` were considered to hang; empty if no process ever hung, or no reason was
        given."""
        self.ending = anyio.Event()
        """Event that is set when the part must end, and not restart."""
        self.restarts = 0
        """Number of counted restarts."""
        self.final_reason = ""
        """Reason why the part has ended for good. Set when no restart is left and the error was not reported; empty
        otherwise."""

    @property
    def grace_s(self) -> int:
        """Seconds that a process has to exit after it was asked to."""
        assert self.config is not None, "without a configuration nothing has started"
        return grace_s(self.config)

    def kill_hanging(self, pids: Collection[int], why: str = "") -> None:
        """Kill processes of this part that hang. `why` is the reason why they are considered to hang.

        Called when the hub does not answer, or reports that ranks hang. The process ids and the reason stay in `hung`
        and `hang_reason`, so that `run_once` counts the end as a failure.
        """
        self.hung.update(pids)
        self.hang_reason = why
        self.processes.kill(pids)

    @abstractmethod
    async def run_once(self, restarts: int) -> tuple[End, list[str]]:
        """Run the processes of the part once, and return how they ended.

        Also returns a sentence for each process that ended without an error message, for example because a signal
        killed it. `restarts` is the number of counted restarts before this run.

        Raises:
            NotStartedError: a process could not be started, which counts as a failure of the part.
            FlashError: the part cannot run at all, for example because there is no hub.
        """

    async def keep_running(self, ending: anyio.Event) -> End:
        """Run the part, and restart it until it is over, cannot go on, or `ending` is set. Returns how it ended.

        A restart counts only if the part itself has failed, and not if it has lost its hub or another rank. If no
        restart is left and nobody has reported the error, `final_reason` is set.

        Raises:
            FlashError: the part cannot run at all (`run_once`).
        """
        self.ending, self.restarts = ending, 0
        while True:
            self.hung.clear()
            try:
                end, messages = await self.run_once(self.restarts)
            except NotStartedError as error:
                await anyio.sleep(RETRY_S)
                end, messages = End.FAILED, [str(error)]
            if end in (End.OVER, End.FINAL) or self.ending.is_set():
                return end
            if end == End.WITH_PEER:  # not at fault: restart without counting
                continue
            assert self.config is not None, "without a configuration nothing has started"
            most = self.config.cluster.max_restarts
            for line in messages:
                say(line)
            if self.restarts >= most:
                spent = f"no restart is left of cluster.max_restarts = {most}"
                say(spent + self._aftermath)
                if reasons := messages or [self._failure] * bool(self._failure):
                    self.final_reason = "; ".join([*reasons, spent])
                return end
            self.restarts += 1
            say(f"{self._restart_line} (restart {self.restarts} of {most})")


async def judge(
    ended: Sequence[EndedProcess], killed: Collection[int], ending: anyio.Event
) -> tuple[End, list[EndedProcess]]:
    """Combine the exit codes of processes that started together into one result.

    The `run_once` of each part calls this when all processes of a start have ended. Also returns the processes that
    ended without an error message, whose end the caller must report. That list is empty unless the result is FAILED.

    Args:
        ended: all processes of the start.
        killed: ids of processes that the supervisor has killed. They do not count, because another process caused their
            end.
        ending: event of the part that is set when the launcher ends it. This function only waits for it.
    """
    own = [one for one in ended if one.pid not in killed]
    # A signal that ended a process may also have been sent to the launcher, which then sets `ending`. The caller must
    # see that before it decides about a restart.
    if any(one.code in (-signal.SIGTERM, -signal.SIGINT) for one in own):
        with anyio.move_on_after(SIGNAL_SPREAD_S):
            await ending.wait()
    codes = {one.code for one in own}
    if codes == {0} and len(own) == len(ended):
        return End.OVER, []
    # From here on at least one process has failed or was killed. FINAL is stronger than FAILED, and any failure of a
    # process itself is stronger than the loss of a peer.
    if End.FINAL in codes:
        return End.FINAL, []
    silent = [one for one in own if one.code not in tuple(End)]  # a crash or a signal: no code of `worker`
    if silent or End.FAILED in codes:
        return End.FAILED, silent
    return (End.INTERRUPTED if End.INTERRUPTED in codes else End.WITH_PEER), []


def describe(name: str, process: EndedProcess) -> str:
    """Return a sentence about how a process ended, for the user. Called for processes that have printed no error
    message. `name` is a phrase for the process."""
    return f"{name} (process {process.pid}) {describe_exit_code(process.code)}"


def say(line: str) -> None:
    """Print one line for the user to standard error. An OSError is ignored, because the reader may be gone."""
    with suppress(OSError):
        sys.stderr.write(f"flash: {harmless(line)}\n")
        sys.stderr.flush()


def _id_of(process: ForkedProcess) -> int:
    """Return the id of a process, which must have been started."""
    assert process.pid, "a signal to process 0 would reach the launcher's own group"
    return process.pid


def _send(process: ForkedProcess, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):  # it has ended
        os.kill(_id_of(process), number)


def _kill(process: ForkedProcess) -> None:
    """Kill a process and its session, to which all of its child processes belong."""
    # The process may not have begun its session yet, so the process itself is killed first.
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):  # it has ended
            kill(_id_of(process), signal.SIGKILL)
