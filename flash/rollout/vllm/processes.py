"""The processes of one vLLM engine: its core, and the workers of that.

The core is forked from a process that has imported vLLM (`flash.rollout.vllm.fork_server`), and forks its workers; all
of them share a process group of their own. They end by themselves when the node loop is gone, however it went. When one
of them ends the engine is lost, and is told so; when it is closed, all end. A core that loses a worker to a signal ends
at once, and tells it by its exit code: the node loop names the cause, of which vLLM would only tell the consequences.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext
from multiprocessing.process import BaseProcess

import anyio
import anyio.to_thread

from flash.errors import how_it_ended
from flash.foreign import vllm_processes
from flash.foreign.forking import ALONE, ForkedProcess, Server
from flash.weights.plugin import NODE_PID, follow

WORKER_KILLED = 128
"""Exit codes of a core above this: the number of the signal that has killed one of its workers is added to it."""
FIND_S = 0.1
"""Seconds between two looks for a core that is about to be started."""
REMEMBER_S = 0.5
"""Seconds between two notes of what a starting engine keeps on this machine."""
FOLLOWS_S = 2.0
"""Seconds in which a core follows its worker, and tells by its own end how that one ended."""
ENDS_S = 0.05
"""Seconds in which a core ends of which vLLM says that it is dead; blocks, once in an engine's life."""


SERVER = Server("flash.rollout.vllm.fork_server")
"""Of which cores are forked; of which the node loop was, where a launcher has started it."""


class _Starting(threading.local):
    """What a thread is about to start."""

    engine: EngineProcesses | None = None


_starting = _Starting()


class ForkServerGoneError(Exception):
    """The process from which a core was to be forked has ended; the next core begins another one."""


class Core(ForkedProcess):
    """The core of the engine that its thread starts; see the module's docstring."""

    server = SERVER

    def start(self) -> None:
        """As of `Process`."""
        try:
            super().start()
        except (EOFError, ConnectionError) as error:
            raise ForkServerGoneError("the process from which engines are forked has ended") from error
        if _starting.engine is not None:
            _starting.engine.begun(self)

    def enter(self) -> None:
        """As of `ForkedProcess`."""
        super().enter()
        os.setpgid(0, 0)
        follow(int(os.environ[NODE_PID]))
        vllm_processes.stay_offline()
        if os.environ.get("PYTHONWARNINGS") == "ignore":
            warnings.simplefilter("ignore")
        vllm_processes.begin_workers_with(_Workers())
        vllm_processes.on_killed_worker(_end_as_worker)


class _Cores(ForkServerContext):
    Process = Core


class _Worker(ForkProcess):
    def run(self) -> None:
        """As of `Process`, in the new process."""
        follow(int(os.environ[NODE_PID]))
        # OpenMP has read where its threads are to run in the process that all are forked from.
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if bound != "nobind":
            share = bound.split("|")[vllm_processes.worker_rank(self.name)]
            os.sched_setaffinity(0, map(int, share.split(",")))
        super().run()


class _Workers(ForkContext):
    Process = _Worker


CORES = _Cores()
"""multiprocessing, as vLLM begins cores with it."""


def _end_as_worker(number: int) -> None:
    """End this core, without a word: its workers end with it."""
    os._exit(WORKER_KILLED + number)


def _killed_worker(code: int) -> bool:
    """Whether a core's exit code tells that a signal has killed a worker; 255 tells that nobody knows how it ended."""
    return WORKER_KILLED < code <= WORKER_KILLED + signal.NSIG


class EngineProcesses:
    """See the module's docstring. `on_end` is told, once, which process has ended and how."""

    def __init__(self, on_end: Callable[[str], object]) -> None:
        self._tell = on_end
        self._core: BaseProcess | None = None
        self._given_up = False
        self._lost_worker: int | None = None
        """The first worker that ended."""
        self._workers: dict[int, int] = {}
        """By process id, a descriptor that becomes readable when it ends."""
        self._core_end: int | None = None
        """The same of the core, which may outlive the one who tells how it ended."""
        self._watches = False
        self._started = False

    @property
    def core(self) -> int:
        """The process id of the core, which has begun."""
        return self._begun.pid or 0

    @property
    def _begun(self) -> BaseProcess:
        assert self._core is not None, "it has begun"
        return self._core

    @contextmanager
    def starting(self) -> Generator[None]:
        """The core that this thread begins in the block is this engine's."""
        _starting.engine = self
        try:
            yield
        finally:
            _starting.engine = None

    def begun(self, core: BaseProcess) -> None:
        """This is the core; the thread that has begun it waits until it is ready, or has ended."""
        self._core = core
        if self._given_up:
            self._kill(core)

    async def follow_start(self, remember: Callable[[int], None]) -> None:
        """Until it is cancelled, tell `remember` of the core again and again, in a thread.

        What kills an engine that starts may kill this process too.
        """
        while self._core is None:  # noqa: ASYNC110 (the thread that begins it is not the loop's)
            await anyio.sleep(FIND_S)
        while True:
            await anyio.to_thread.run_sync(remember, self.core)
            await anyio.sleep(REMEMBER_S)

    def killed_in_start(self, error: Exception) -> str | None:
        """Which process of a start that ended with this error a signal has killed; None: it has failed by itself.

        To be asked before `end_starting`, which kills them too.
        """
        if isinstance(error, ForkServerGoneError):
            return str(error)
        if self._core is None or not vllm_processes.is_end_of_starting_core(error):
            return None
        words, code = self.how_core_ended(), self._core.exitcode
        return words if code is not None and (code < 0 or code == ALONE or _killed_worker(code)) else None

    def watch(self) -> None:
        """Notice the death of the core or one of its workers, without which it only fails. It has started."""
        self._started = True
        try:
            self._core_end = os.pidfd_open(self.core)
            for pid in vllm_processes.worker_pids(self.core):
                self._workers[pid] = os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):  # since it was ready, one of them has ended
            self._tell(self.how_core_ended())
            return
        self._watches = True
        loop = asyncio.get_running_loop()
        loop.add_reader(self._begun.sentinel, self._on_core_end)
        for pid, descriptor in self._workers.items():
            loop.add_reader(descriptor, self._on_worker_end, pid)

    def unwatch(self) -> None:
        """Notice nothing any more."""
        if not self._watches:
            return
        self._watches = False
        for descriptor in (self._begun.sentinel, *self._workers.values()):
            asyncio.get_running_loop().remove_reader(descriptor)

    def end(self, seconds: float) -> None:
        """End what is left of a started engine, and wait for that, so that its memory is free; blocks."""
        if self._core is None:
            return
        _kill_group(self._core.pid)
        end = time.monotonic() + seconds
        self._core.join(seconds)
        for descriptor in (*self._workers.values(), *([] if self._core_end is None else [self._core_end])):
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll(1000 * max(0.0, end - time.monotonic()))
            os.close(descriptor)
        self._workers, self._core_end = {}, None

    def end_starting(self, seconds: float) -> None:
        """End the core that the starting thread has begun, or is about to, and nobody watches yet; blocks."""
        self._given_up = True
        if self._core is not None and not self._started:
            self._kill(self._core)
            self._core.join(seconds)

    def _kill(self, core: BaseProcess) -> None:
        core.kill()
        _kill_group(core.pid)

    def _on_core_end(self) -> None:
        self._on_end(self.how_core_ended())

    def _on_worker_end(self, pid: int) -> None:
        """Only its parent, the core, learns how it ended, and follows it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._workers[pid])
        if self._lost_worker is None:
            self._lost_worker = pid
            loop.call_later(FOLLOWS_S, self._on_core_late)

    def _on_core_late(self) -> None:
        self._on_end(f"its worker process {self._lost_worker} has ended")

    def _on_end(self, cause: str) -> None:
        if self._watches:
            self.unwatch()
            self._tell(cause)

    def how_core_ended(self) -> str:
        """How the core ended that is dead, in words."""
        connection.wait([self._begun.sentinel], ENDS_S)
        code = self._begun.exitcode
        if code == ALONE:
            return f"the process from which its core, process {self.core}, was forked has ended"
        return f"its core, process {self.core}, failed" if code is None else self._with_code(code)

    def _with_code(self, code: int) -> str:
        worker = self._lost_worker or next((pid for pid, end in self._workers.items() if _ended(end)), None)
        named = "one of its worker processes" if worker is None else f"its worker process {worker}"
        if _killed_worker(code):
            return f"{named} {how_it_ended(WORKER_KILLED - code)}"
        if code >= 0 and self._lost_worker is not None:
            return f"{named} has ended, and its core, process {self.core}, with it"
        return f"its process {self.core} {how_it_ended(code)}"


def _ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _kill_group(core: int | None) -> None:
    if core is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(core, signal.SIGKILL)
