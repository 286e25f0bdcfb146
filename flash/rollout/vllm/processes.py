"""The processes of one vLLM engine: its *core*, which schedules steps, and the core's *workers*, which compute.

vLLM starts processes through contexts of multiprocessing. `VLLMEngine` gives vLLM the context `CORES` for the core, and
the core gives it `_Workers`. So our own code runs first in each process. The core is forked from a *fork server*, a
process that has imported vLLM (`flash.rollout.vllm.fork_server`), and it forks its workers. All of them are in one
process group.

The processes end by themselves when the node loop (the process of `VLLMEngine`) ends in any way. When one of them ends,
the engine is dead, and `EngineProcesses` reports how. When the engine is closed, all of them are ended.

A core whose worker was killed by a signal ends at once, with an exit code that names the signal. So the node loop can
report the cause. vLLM would only report the consequences.
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
from flash.foreign import grammars, vllm_processes
from flash.foreign.forking import SERVER_GONE, ForkedProcess, ForkServer
from flash.weights.engine_process import NODE_PID, follow, register

WORKER_KILLED = 128
"""A core whose worker was killed by a signal exits with this code plus the number of the signal."""
FIND_CORE_S = 0.1
"""Seconds between two checks if vLLM, in another thread, has started the core."""
REMEMBER_S = 0.5
"""Seconds between two calls of `remember` while an engine starts."""
CORE_FOLLOWS_S = 2.0
"""Seconds that a core has to end after one of its workers has ended. Its exit code then says how the worker ended."""
CORE_ENDS_S = 0.05
"""Seconds to wait for the exit code of a core that vLLM reports as dead. The wait blocks the event loop, but only once
per engine."""

SERVER = ForkServer("flash.rollout.vllm.fork_server")
"""Fork server of cores. If a launcher has started the node loop, the node loop itself was forked from a fork server,
and cores are forked from that server, too."""


class _Starting(threading.local):
    """The engine that the current thread is about to start. It is kept per thread, because vLLM starts the core without
    saying for which engine."""

    engine: EngineProcesses | None = None


_starting = _Starting()


class ForkServerGoneError(Exception):
    """Failure of a core's start because the fork server has ended. The next core starts another fork server."""


class Core(ForkedProcess):
    """The core process of the engine that the current thread starts."""

    server = SERVER

    def start(self) -> None:
        """Start the process, and give it to the engine that this thread starts.

        Raises:
            ForkServerGoneError: the fork server has ended.
        """
        try:
            super().start()
        except (EOFError, ConnectionError) as error:
            raise ForkServerGoneError("the process from which engines are forked has ended") from error
        if _starting.engine is not None:
            _starting.engine.set_core(self)

    def enter(self) -> None:
        """Set up the core before any other code runs in it; called in the new process.

        The core leads a process group, so that it can be killed together with its workers. The core ends when the node
        loop ends.
        """
        super().enter()
        os.setpgid(0, 0)
        # Start a thread that ends the core when the node loop ends.
        follow(int(os.environ[NODE_PID]))
        vllm_processes.apply_offline_mode()
        # Never collect the fork server's objects as garbage: a scan of them would copy their memory pages.
        vllm_processes.keep_frozen()
        # Python has read the variable in the fork server, which may have another value.
        if os.environ.get("PYTHONWARNINGS") == "ignore":
            warnings.simplefilter("ignore")
        # Register our receiver of weights with vLLM; workers inherit it.
        register()
        # A response that has moved here from another engine goes on with its grammar after the tokens of that engine.
        grammars.continue_grammars()
        vllm_processes.start_workers_with(_Workers())
        vllm_processes.on_killed_worker(_end_as_worker)


class _Cores(ForkServerContext):
    """Context of multiprocessing whose processes are cores."""

    Process = Core


class _Worker(ForkProcess):
    """A worker process of a core, which forks it."""

    def run(self) -> None:
        """Let the worker end with the node loop, and bind it to its CPU cores; called in the new process."""
        follow(int(os.environ[NODE_PID]))
        # OpenMP has read its variables in the fork server, before this worker existed, so the worker is bound to its
        # cores here. The variable has the cores of each worker, in the order of their ranks, separated by |.
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
    """End this core at once, after a worker was killed by signal `number`. The exit code tells the node loop the
    signal.

    The other workers end with the core.
    """
    os._exit(WORKER_KILLED + number)


def _killed_worker(code: int) -> bool:
    """Return True if a core's exit code says that a worker was killed by a signal.

    `SERVER_GONE` (255) is no such code: it only says that the fork server is gone.
    """
    return WORKER_KILLED < code <= WORKER_KILLED + signal.NSIG


class EngineProcesses:
    """Starts, watches and ends the processes of one engine.

    Lifecycle: `starting` and `set_core` are called while vLLM's constructor runs, then `watch`, `unwatch` and `end`. If
    the start fails, `killed_in_start` and `end_starting` are called instead.

    Args:
        on_end: called at most once, with a text that says which process has ended and how.
    """

    def __init__(self, on_end: Callable[[str], object]) -> None:
        self._report = on_end
        self._core: BaseProcess | None = None
        """The core; None until it was started."""
        self._given_up = False
        """True if the start was given up. A core that starts afterwards is killed at once."""
        self._lost_worker: int | None = None
        """Process id of the first worker that has ended; None while all run."""
        self._workers: dict[int, int] = {}
        """Descriptor (pidfd) of each worker, by its process id. The descriptor becomes readable when the worker
        ends."""
        self._core_end: int | None = None
        """Descriptor (pidfd) of the core, which becomes readable when the core ends. The sentinel of multiprocessing is
        not enough: the fork server, the parent of the core, passes on the exit code. If the fork server ends first, the
        sentinel says too early that the core has ended."""
        self._watching = False
        """True while the ends of processes are reported."""
        self._started = False
        """True if the start was complete, so that the core is ended by `end` and not by `end_starting`."""

    @property
    def core(self) -> int:
        """Process id of the core. The core must have been started."""
        pid = self._started_core.pid
        assert pid is not None, "the core has started"
        return pid

    @property
    def _started_core(self) -> BaseProcess:
        """The core, which must have been started."""
        assert self._core is not None, "the core has started"
        return self._core

    @contextmanager
    def starting(self) -> Generator[None]:
        """Let a core that this thread starts within the block belong to this engine. vLLM's constructor runs inside."""
        _starting.engine = self
        try:
            yield
        finally:
            _starting.engine = None

    def set_core(self, core: BaseProcess) -> None:
        """Note the core that the thread has just started. If the start was given up meanwhile, kill the core.

        The thread then waits until the core is ready or has ended.
        """
        self._core = core
        if self._given_up:
            self._kill(core)

    async def follow_start(self, remember: Callable[[int], None]) -> None:
        """Call `remember` with the core's process id every `REMEMBER_S` seconds, in a thread, until cancelled.

        `remember` records what must be cleaned up after the engine. This cannot wait until the engine serves, because
        an event that kills a starting engine may kill this process, too.
        """
        while self._core is None:  # noqa: ASYNC110 (another thread starts it)
            await anyio.sleep(FIND_CORE_S)
        while True:
            await anyio.to_thread.run_sync(remember, self.core)
            await anyio.sleep(REMEMBER_S)

    def killed_in_start(self, error: Exception) -> str | None:
        """Return a text that says which process was killed during a start that failed with `error`.

        Returns None if no process was killed: then another start would fail in the same way. Must be called before
        `end_starting`, which kills the processes itself.
        """
        if isinstance(error, ForkServerGoneError):
            return str(error)
        if self._core is None or not vllm_processes.is_end_of_starting_core(error):
            return None
        # A negative code means that a signal has killed the core itself.
        text, code = self.how_core_ended(), self._core.exitcode
        return text if code is not None and (code < 0 or code == SERVER_GONE or _killed_worker(code)) else None

    def watch(self) -> None:
        """Report from now on when the core or one of its workers ends. This is called when the engine is ready.

        Without this, the death of a worker would only show as failing requests. If a process has ended already, this is
        reported at once.
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
        """Stop reporting the ends of processes.

        This is called when the engine is closed or has died, always before `end`, which closes the descriptors that the
        loop watches. A second call does nothing.
        """
        if not self._watching:
            return
        self._watching = False
        for descriptor in (self._started_core.sentinel, *self._workers.values()):
            asyncio.get_running_loop().remove_reader(descriptor)

    def end(self, seconds: float) -> None:
        """Kill the processes of an engine, and block for at most `seconds` until they have ended.

        The memory of the processes is then free for another engine. Does nothing if the core was never started.
        """
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
        """Kill the core of an engine whose start is given up, and block for at most `seconds` until it has ended.

        If the thread of the start is only about to start the core, `set_core` will kill it.
        """
        self._given_up = True
        if self._core is not None and not self._started:
            self._kill(self._core)
            self._core.join(seconds)

    def _kill(self, core: BaseProcess) -> None:
        """Kill a core, and its process group if the core has formed it already."""
        core.kill()
        _kill_group(core.pid)

    def _on_core_end(self) -> None:
        """Report the end of the core. The loop calls this when the core's sentinel becomes readable."""
        self._on_end(self.how_core_ended())

    def _on_worker_end(self, pid: int) -> None:
        """Note the end of a worker, and give the core `CORE_FOLLOWS_S` seconds to end, too.

        Only the core, the parent of the worker, learns how the worker ended. The exit code of the core then says it
        (`_on_core_end`).
        """
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._workers[pid])
        if self._lost_worker is None:
            self._lost_worker = pid
            loop.call_later(CORE_FOLLOWS_S, self._on_core_late)

    def _on_core_late(self) -> None:
        """Report the end of a worker whose core has not ended in time."""
        self._on_end(f"its worker process {self._lost_worker} has ended")

    def _on_end(self, cause: str) -> None:
        """Report the first end of a process. Later ends follow from it, so they are not reported."""
        if self._watching:
            self.unwatch()
            self._report(cause)

    def how_core_ended(self) -> str:
        """Return a text for error messages that says how the dead core has ended, or which worker ended before it."""
        connection.wait([self._started_core.sentinel], CORE_ENDS_S)
        code = self._started_core.exitcode
        if code == SERVER_GONE:
            return f"the process from which its core, process {self.core}, was forked has ended"
        # vLLM says that the core has failed, but its process has not ended yet.
        if code is None:
            return f"its core, process {self.core}, failed"
        worker = self._lost_worker or next((pid for pid, end in self._workers.items() if _ended(end)), None)
        named = "one of its worker processes" if worker is None else f"its worker process {worker}"
        # A negative code stands for a signal.
        if _killed_worker(code):
            return f"{named} {describe_exit_code(WORKER_KILLED - code)}"
        # A core also ends, with another exit code, after a worker that has ended without a signal.
        if code >= 0 and self._lost_worker is not None:
            return f"{named} has ended, and its core, process {self.core}, with it"
        return f"its process {self.core} {describe_exit_code(code)}"


def _ended(descriptor: int) -> bool:
    """Return True if the process of a descriptor (`os.pidfd_open`) has ended."""
    return bool(select.select([descriptor], [], [], 0)[0])


def _kill_group(core: int | None) -> None:
    """Kill the process group that a core leads, so the core and its workers. Does nothing if there is no such group."""
    if core is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(core, signal.SIGKILL)
