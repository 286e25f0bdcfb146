"""The processes of one vLLM engine: its core, and the core's workers.

The core is forked from a process that has imported vLLM (`flash.rollout.vllm.fork_server`), and forks its workers; all
of them are in one process group. They end by themselves when the node loop ends, however it ended. When one of them
ends, the engine is dead and `EngineProcesses` reports how; when the engine is closed, all of them are ended.

A core whose worker was killed by a signal ends at once, with an exit code that names the signal. So the node loop can
report the cause; vLLM would only report its consequences.
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

from flash.errors import describe_exit_code
from flash.foreign import vllm_processes
from flash.foreign.forking import SERVER_GONE, ForkedProcess, ForkServer
from flash.weights.plugin import NODE_PID, follow

WORKER_KILLED = 128
"""Base of a core's exit code if a worker was killed: the number of the signal is added to it."""
FIND_CORE_S = 0.1
"""Seconds between two checks if the core has been started."""
REMEMBER_S = 0.5
"""Seconds between two calls of `remember` while an engine starts."""
CORE_FOLLOWS_S = 2.0
"""Seconds that a core has to end after one of its workers has; its exit code then says how the worker ended."""
CORE_ENDS_S = 0.05
"""Seconds to wait for the end of a core that vLLM reports as dead. This blocks the loop, once in an engine's life."""

SERVER = ForkServer("flash.rollout.vllm.fork_server")
"""Process from which cores are forked. The node loop is forked from it too, if a launcher has started the node loop."""


class _Starting(threading.local):
    """The engine that the current thread is about to start."""

    engine: EngineProcesses | None = None


_starting = _Starting()


class ForkServerGoneError(Exception):
    """Failure of a core's start because the fork server has ended. The next core starts another fork server."""


class Core(ForkedProcess):
    """The core process of the engine that the current thread starts."""

    server = SERVER

    def start(self) -> None:
        """See `Process`."""
        try:
            super().start()
        except (EOFError, ConnectionError) as error:
            raise ForkServerGoneError("the process from which engines are forked has ended") from error
        if _starting.engine is not None:
            _starting.engine.set_core(self)

    def enter(self) -> None:
        """See `ForkedProcess`. Runs in the new process."""
        super().enter()
        os.setpgid(0, 0)
        follow(int(os.environ[NODE_PID]))
        vllm_processes.apply_offline_mode()
        if os.environ.get("PYTHONWARNINGS") == "ignore":
            warnings.simplefilter("ignore")
        vllm_processes.start_workers_with(_Workers())
        vllm_processes.on_killed_worker(_end_as_worker)


class _Cores(ForkServerContext):
    """Context of multiprocessing whose processes are cores."""

    Process = Core


class _Worker(ForkProcess):
    """A worker process of a core, which forks it."""

    def run(self) -> None:
        """See `Process`. Runs in the new process."""
        follow(int(os.environ[NODE_PID]))
        # OpenMP has read these variables in the process that all are forked from, so the threads are bound here.
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if bound != "nobind":
            share = bound.split("|")[vllm_processes.worker_rank(self.name)]
            os.sched_setaffinity(0, map(int, share.split(",")))
        super().run()


class _Workers(ForkContext):
    """Context of multiprocessing whose processes are workers."""

    Process = _Worker


CORES = _Cores()
"""The multiprocessing context with which vLLM starts cores."""


def _end_as_worker(number: int) -> None:
    """End this core at once, after a worker was killed by signal `number`. The other workers end with it."""
    os._exit(WORKER_KILLED + number)


def _killed_worker(code: int) -> bool:
    """Return True if a core's exit code says that a worker was killed by a signal. 255 says nothing."""
    return WORKER_KILLED < code <= WORKER_KILLED + signal.NSIG


class EngineProcesses:
    """Starts, watches and ends the processes of one engine. See the module's docstring.

    Args:
        on_end: called once, with a text that says which process has ended and how.
    """

    def __init__(self, on_end: Callable[[str], object]) -> None:
        self._report = on_end
        self._core: BaseProcess | None = None
        self._given_up = False
        """True once the start was given up: a core that starts afterwards is killed at once."""
        self._lost_worker: int | None = None
        """Process id of the first worker that ended."""
        self._workers: dict[int, int] = {}
        """Descriptors that become readable when a worker ends, by its process id."""
        self._core_end: int | None = None
        """Descriptor that becomes readable when the core ends. The core may outlive the process that gets its exit
        code."""
        self._watching = False
        self._started = False

    @property
    def core(self) -> int:
        """Process id of the core, which must have started."""
        return self._started_core.pid or 0

    @property
    def _started_core(self) -> BaseProcess:
        assert self._core is not None, "the core has started"
        return self._core

    @contextmanager
    def starting(self) -> Generator[None]:
        """Within the block, a core that this thread starts belongs to this engine."""
        _starting.engine = self
        try:
            yield
        finally:
            _starting.engine = None

    def set_core(self, core: BaseProcess) -> None:
        """Remember the core that was started. The thread that started it waits until the core is ready or has ended."""
        self._core = core
        if self._given_up:
            self._kill(core)

    async def follow_start(self, remember: Callable[[int], None]) -> None:
        """Call `remember` with the core's process id every `REMEMBER_S` seconds, in a thread, until cancelled.

        Whatever kills a starting engine may kill this process too, so this cannot wait until the engine serves.
        """
        while self._core is None:  # noqa: ASYNC110 (another thread starts it)
            await anyio.sleep(FIND_CORE_S)
        while True:
            await anyio.to_thread.run_sync(remember, self.core)
            await anyio.sleep(REMEMBER_S)

    def killed_in_start(self, error: Exception) -> str | None:
        """Return a text that says which process was killed during a start that ended with `error`.

        None if the start failed by itself. Must be called before `end_starting`, which kills the processes too.
        """
        if isinstance(error, ForkServerGoneError):
            return str(error)
        if self._core is None or not vllm_processes.is_end_of_starting_core(error):
            return None
        text, code = self.how_core_ended(), self._core.exitcode
        return text if code is not None and (code < 0 or code == SERVER_GONE or _killed_worker(code)) else None

    def watch(self) -> None:
        """Report from now on when the core or one of its workers ends. The core must have started.

        Without this, the death of a worker would only show as failing requests.
        """
        self._started = True
        try:
            self._core_end = os.pidfd_open(self.core)
            for pid in vllm_processes.worker_pids(self.core):
                self._workers[pid] = os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):
            # The core or a worker has ended since the engine was ready.
            self._report(self.how_core_ended())
            return
        self._watching = True
        loop = asyncio.get_running_loop()
        loop.add_reader(self._started_core.sentinel, self._on_core_end)
        for pid, descriptor in self._workers.items():
            loop.add_reader(descriptor, self._on_worker_end, pid)

    def unwatch(self) -> None:
        """Report no more ends of processes."""
        if not self._watching:
            return
        self._watching = False
        for descriptor in (self._started_core.sentinel, *self._workers.values()):
            asyncio.get_running_loop().remove_reader(descriptor)

    def end(self, seconds: float) -> None:
        """Kill the processes of a started engine and wait until their memory is free; blocks."""
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
        """Kill the core of an engine that has not started yet, also one that its thread is about to start; blocks."""
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
        """Wait for the core to end too: as the worker's parent it alone learns how the worker ended."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._workers[pid])
        if self._lost_worker is None:
            self._lost_worker = pid
            loop.call_later(CORE_FOLLOWS_S, self._on_core_late)

    def _on_core_late(self) -> None:
        self._on_end(f"its worker process {self._lost_worker} has ended")

    def _on_end(self, cause: str) -> None:
        if self._watching:
            self.unwatch()
            self._report(cause)

    def how_core_ended(self) -> str:
        """Return a text that says how the dead core has ended."""
        connection.wait([self._started_core.sentinel], CORE_ENDS_S)
        code = self._started_core.exitcode
        if code == SERVER_GONE:
            return f"the process from which its core, process {self.core}, was forked has ended"
        if code is None:
            return f"its core, process {self.core}, failed"
        worker = self._lost_worker or next((pid for pid, end in self._workers.items() if _ended(end)), None)
        named = "one of its worker processes" if worker is None else f"its worker process {worker}"
        if _killed_worker(code):
            return f"{named} {describe_exit_code(WORKER_KILLED - code)}"
        # A core also ends, with an exit code of its own, after a worker that ended without a signal.
        if code >= 0 and self._lost_worker is not None:
            return f"{named} has ended, and its core, process {self.core}, with it"
        return f"its process {self.core} {describe_exit_code(code)}"


def _ended(descriptor: int) -> bool:
    """Return True if the process of a descriptor (`os.pidfd_open`) has ended."""
    return bool(select.select([descriptor], [], [], 0)[0])


def _kill_group(core: int | None) -> None:
    """Kill the process group of a core."""
    if core is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(core, signal.SIGKILL)
