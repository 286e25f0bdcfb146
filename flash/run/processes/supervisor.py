"""Supervises the processes of one machine: how they are started, watched, started again and ended.

A machine has a node loop, trainer ranks, or both. Each of the two is a `SupervisedPart` with restarts of its own; a
subclass says what it starts, and what an end of it means. Every process is a child of the launcher, in a session of its
own, so that a terminal's signals come through the launcher, and what a process has started can be ended with it.

Law: a part whose end was asked for never starts again.
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
from flash.foreign.forking import ALONE, ForkedProcess, ForkServer
from flash.run.processes.forked import JobProcess, ProcessOrder
from flash.text import harmless
from flash.waiting import first_error

KILLED_S = 2.0
"""Seconds in which a process ends that is killed; blocks."""
RETRY_S = 1.0
"""Before a process that the system would not start is tried again."""
TOLD_S = 2.0
"""Seconds in which a signal that has ended a process may reach the launcher too: Slurm sends it to all of a job."""


class End(IntEnum):
    """Exit codes of the processes that are supervised."""

    OVER = 0
    """The run is over, or it was told to leave."""
    FAILED = 1
    """With an error that may not come again; it has been told."""
    FINAL = 3
    """With an error that would come again; it has been told."""
    WITH_PEER = 75
    """With its hub, or with another rank: nothing is wrong with it, and starting it again counts as no restart."""
    INTERRUPTED = 130
    """By a signal: 128 + SIGINT, as shells have it."""


class EndedProcess(NamedTuple):
    """A process that has ended."""

    local: int
    pid: int
    code: int
    """Below 0: the signal that killed it."""


class NotStartedError(Exception):
    """The system does not start a process."""


class Processes:
    """Processes that start together, and end once one of them has failed."""

    linger_s = 10.0
    """Seconds in which those end of which another one has failed: they know it already, and who hangs does not end."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._living: dict[int, ForkedProcess] = {}
        self._begins = False
        """Whether one is about to start."""
        self._told: signal.Signals | None = None
        """What those that start from now on are told as well."""
        self.killed: set[int] = set()
        """Of the processes of the last start, those that we have killed."""

    @property
    def pids(self) -> set[int]:
        """The process ids of those that live."""
        return {process.pid or 0 for process in self._living.values()}

    def fork_from(self, server: ForkServer) -> None:
        """What is started from now on is forked from this one, or one that has imported the same."""
        if self._server is None or self._server.variables != server.variables:
            self.end_server()
            self._server = server

    def end_server(self) -> None:
        """Nothing more is to be started."""
        if self._server is not None:
            self._server.end()

    async def run(
        self, role: str, file: Path, orders: Sequence[ProcessOrder], variables: Sequence[Mapping[str, str]] = ()
    ) -> list[EndedProcess]:
        """Start one process for each order, each with variables of its own, and wait until all have ended.

        Raises:
            NotStartedError: the system does not start one.
        """
        ended: list[EndedProcess] = []
        failing = anyio.Event()
        self.killed.clear()
        try:
            async with anyio.create_task_group() as outer:
                outer.start_soon(self._end_rest, failing)
                async with anyio.create_task_group() as tasks:
                    for number, order in enumerate(orders):
                        process = self.process(role, file, order, variables[number] if variables else {})
                        await self._begin(process)
                        tasks.start_soon(self._follow, number, process, ended, failing)
                outer.cancel_scope.cancel()
        except* (OSError, EOFError) as errors:
            raise NotStartedError(f"a process cannot be started: {first_error(errors)}") from None
        return ended

    def process(self, role: str, file: Path, order: ProcessOrder, variables: Mapping[str, str]) -> ForkedProcess:
        """One of them, not started."""
        assert self._server is not None, "it was named before"
        return JobProcess(self._server, role, file, order, variables)

    async def _begin(self, process: ForkedProcess) -> None:
        """Waits until its server has imported all, at the first of them for seconds."""
        self._begins = True
        try:
            await anyio.to_thread.run_sync(process.start, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            process.server.end()
            raise
        finally:
            self._begins = False

    async def _follow(
        self, number: int, process: ForkedProcess, ended: list[EndedProcess], failing: anyio.Event
    ) -> None:
        """Waits for the end of a process, which is also the end of what it has started where we are cancelled."""
        self._living[number] = process
        if self._told is not None:
            _send(process, self._told)
        try:
            await anyio.wait_readable(process.sentinel)
        finally:
            if process.exitcode in (None, ALONE):
                _kill(process)
            process.join(KILLED_S)
            del self._living[number]
        code = process.exitcode
        ended.append(EndedProcess(number, process.pid or 0, ALONE if code is None else code))
        if code != End.OVER:
            failing.set()

    async def _end_rest(self, failing: anyio.Event) -> None:
        await failing.wait()
        await anyio.sleep(self.linger_s)
        self.kill(self.pids)

    def signal(self, number: signal.Signals) -> None:
        """Ask for the end of all, also of those that are about to start; what they have started is not asked."""
        self._told = number
        for process in self._living.values():
            _send(process, number)

    def kill_all(self) -> None:
        """End all at once, also those that are about to start, with what they have started."""
        self._told = signal.SIGKILL
        self.kill(self.pids)
        if self._begins:
            self.end_server()

    def kill(self, pids: Collection[int]) -> None:
        """End those of ours with these process ids at once, with what they have started."""
        for process in self._living.values():
            if (pid := process.pid) is not None and pid in pids:
                self.killed.add(pid)
                _kill(process)


class SupervisedPart(ABC):
    """A part of a machine that is started again when it fails.

    Args:
        config: the run; None: it is still to be learned.
        follows: what a restart is, in words.
        failed: what has failed, where no process has a word for it; empty: that has been told.
        without: what is said when no restart is left.
    """

    def __init__(self, config: Config | None, follows: str, failed: str = "", without: str = "") -> None:
        self.config = config
        self._follows = follows
        self._failed = failed
        self._without = without
        self.processes = Processes()
        self.hung: set[int] = set()
        """Of the processes of the last start, those that were killed since they hang."""
        self.hang = ""
        """By what that showed."""
        self.ending = anyio.Event()
        self.restarts = 0
        """Those that counted, so far."""
        self.why = ""
        """What has ended it for good, when it was started again too often, and nobody has told why."""

    @property
    def grace_s(self) -> int:
        """Seconds in which it ends that was told to."""
        assert self.config is not None, "without a configuration nothing has started"
        return grace_s(self.config)

    def kill_hanging(self, pids: Collection[int], why: str = "") -> None:
        """End those of its processes that hang, by which it fails."""
        self.hung.update(pids)
        self.hang = why
        self.processes.kill(pids)

    @abstractmethod
    async def once(self, restarts: int) -> tuple[End, list[str]]:
        """From a start to its end; what has killed processes that had no voice, in words."""

    async def keep(self, ending: anyio.Event) -> End:
        """Start it again until it is over, cannot go on, or its end is asked for, which is `ending`; how it ended.

        Consumes ends of processes. Waits for the next one. Produces the next processes.
        """
        self.ending, self.restarts = ending, 0
        while True:
            self.hung.clear()
            try:
                end, words = await self.once(self.restarts)
            except NotStartedError as error:
                await anyio.sleep(RETRY_S)
                end, words = End.FAILED, [str(error)]
            if end in (End.OVER, End.FINAL) or self.ending.is_set():
                return end
            if end == End.WITH_PEER:
                continue
            assert self.config is not None, "without a configuration nothing has started"
            most = self.config.cluster.max_restarts
            for line in words:
                say(line)
            if self.restarts >= most:
                spent = f"no restart is left of cluster.max_restarts = {most}"
                say(spent + self._without)
                if reasons := words or [self._failed] * bool(self._failed):
                    self.why = "; ".join([*reasons, spent])
                return end
            self.restarts += 1
            say(f"{self._follows} (restart {self.restarts} of {most})")


async def judge(
    ended: Sequence[EndedProcess], killed: Collection[int], ending: anyio.Event
) -> tuple[End, list[EndedProcess]]:
    """What the ends of processes that started together come to, and which of them had no voice.

    Whom we have killed has ended with another one. One that a signal has ended may not be the only one that heard it.
    """
    own = [one for one in ended if one.pid not in killed]
    if any(one.code in (-signal.SIGTERM, -signal.SIGINT) for one in own):
        with anyio.move_on_after(TOLD_S):
            await ending.wait()
    codes = {one.code for one in own}
    if codes == {0} and len(own) == len(ended):
        return End.OVER, []
    if End.FINAL in codes:
        return End.FINAL, []
    silent = [one for one in own if one.code not in tuple(End)]
    if silent or End.FAILED in codes:
        return End.FAILED, silent
    return (End.INTERRUPTED if End.INTERRUPTED in codes else End.WITH_PEER), []


def describe(who: str, process: EndedProcess) -> str:
    """How a process has ended, in words."""
    return f"{who} (process {process.pid}) {describe_exit_code(process.code)}"


def say(words: str) -> None:
    """One line for people; who read it may be gone."""
    with suppress(OSError):
        sys.stderr.write(f"flash: {harmless(words)}\n")
        sys.stderr.flush()


def _send(process: ForkedProcess, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(process.pid or 0, number)


def _kill(process: ForkedProcess) -> None:
    """At once, with its session, which it may just be about to begin."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):  # it has ended
            kill(process.pid or 0, signal.SIGKILL)
