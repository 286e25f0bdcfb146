"""The processes of one vLLM engine: its core, a child of this process, and the workers of that.

When one of them ends the engine is lost, and is told so; when it is closed, all of them end. Workers share the process
group that their core has opened. A core that loses a worker to a signal tells it by its exit code
(`flash.weights.plugin`).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from flash.errors import how_it_ended
from flash.foreign import vllm
from flash.weights.plugin import WORKER_KILLED

FIND_S = 0.1
"""Seconds between two looks for a core that is about to be started."""
REMEMBER_S = 0.5
"""Seconds between two notes of what a starting engine keeps on this machine."""
FOLLOWS_S = 2.0
"""Seconds in which a core follows its worker, and tells by its own end how that one ended."""
LOOKS, LOOK_S = 50, 0.001
"""How often, and after how many seconds, it is asked again how the core ended; blocks, once in an engine's life. Twenty
times as often where it has ended: on a busy machine the thread that was told may not get to note it for long."""

_running_cores: set[int] = set()
"""Process ids of this process's started engine cores: the others are still starting."""


class EngineProcesses:
    """See the module's docstring. `on_end` is told, once, which process has ended and how."""

    def __init__(self, on_end: Callable[[str], object]) -> None:
        self._tell = on_end
        self._starter: int | None = None
        self._core: Any = None
        self._lost_worker: int | None = None
        """The first worker that ended."""
        self._workers: dict[int, int] = {}
        """By process id, a descriptor that becomes readable when it ends."""
        self._core_end: int | None = None
        """The same of the core."""
        self._watches = False

    @property
    def core(self) -> int:
        """The process id of the core, which has started."""
        return self._core.pid

    def start_here(self) -> None:
        """This thread is about to start the core."""
        self._starter = threading.get_native_id()

    async def follow_start(self, remember: Callable[[int], None]) -> None:
        """Find the core as soon as the starting thread has begun it: once it has ended nobody else knows how.

        Then, until it is cancelled, it tells `remember` of the core again and again, in a thread: what kills an engine
        that starts may kill this process too.
        """
        while not self._look():  # noqa: ASYNC110 (nothing tells when a thread has begun a process)
            await anyio.sleep(FIND_S)
        while True:
            await anyio.to_thread.run_sync(remember, self.core)
            await anyio.sleep(REMEMBER_S)

    def _look(self) -> bool:
        """Whether the core that the starting thread has begun is known."""
        with suppress(OSError):  # the thread has ended, which it does not do with a core half started
            begun = {int(pid) for pid in Path(f"/proc/self/task/{self._starter}/children").read_text().split()}
            for core in multiprocessing.active_children():
                started = core.pid in _running_cores
                if core.name.startswith(vllm.CORE_PROCESS) and core.pid in begun and not started:
                    self._core = core
        return self._core is not None

    def killed_in_start(self, error: Exception) -> str | None:
        """Which process of a start that ended with this error a signal has killed; None: it has failed by itself.

        To be asked before `end_starting`, which kills them too.
        """
        if self._core is None or not vllm.is_end_of_starting_core(error):
            return None
        words, code = self.how_core_ended(), self._core.exitcode
        return words if code is not None and (code < 0 or code > WORKER_KILLED) else None

    def watch(self, llm: Any) -> None:
        """Notice the death of the core or one of its workers, without which it only fails."""
        self._core = vllm.core_process(llm)
        _running_cores.add(self._core.pid)
        try:
            self._core_end = os.pidfd_open(self._core.pid)
            for pid in vllm.worker_pids(self._core.pid):
                self._workers[pid] = os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):  # since it was ready, one of them has ended
            self._tell(self.how_core_ended())
            return
        self._watches = True
        loop = asyncio.get_running_loop()
        loop.add_reader(self._core_end, self._on_core_end)
        for pid, descriptor in self._workers.items():
            loop.add_reader(descriptor, self._on_worker_end, pid)

    def unwatch(self) -> None:
        """Notice nothing any more."""
        if not self._watches:
            return
        self._watches = False
        for descriptor in (self._core_end, *self._workers.values()):
            assert descriptor is not None, "it is watched"
            asyncio.get_running_loop().remove_reader(descriptor)

    def end(self, seconds: float) -> None:
        """End what is left of a started engine, and wait for that, so that its memory is free; blocks."""
        if self._core is None:
            return
        _kill_group(self._core.pid)
        end = time.monotonic() + seconds
        self._core.join(seconds)
        for descriptor in self._workers.values():
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll(1000 * max(0.0, end - time.monotonic()))
        _running_cores.discard(self._core.pid)
        if self._core_end is not None:
            for descriptor in (self._core_end, *self._workers.values()):
                os.close(descriptor)
            self._core_end, self._workers = None, {}

    def end_starting(self, seconds: float) -> None:
        """End the core that the starting thread has begun and nobody watches yet, if there is one; blocks."""
        if self._look() and self._core.pid not in _running_cores:
            self._core.kill()
            _kill_group(self._core.pid)
            self._core.join(seconds)

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
        """A thread of vLLM's may be asking the system at this moment, which answers once: it notes the answer then."""
        for _ in range(LOOKS * (20 if _ended(self._core.sentinel) else 1)):
            if self._core.exitcode is not None:
                return self._with_code(self._core.exitcode)
            time.sleep(LOOK_S)
        return f"its core, process {self._core.pid}, failed"

    def _with_code(self, code: int) -> str:
        worker = self._lost_worker or next((pid for pid, end in self._workers.items() if _ended(end)), None)
        named = "one of its worker processes" if worker is None else f"its worker process {worker}"
        if code > WORKER_KILLED:
            return f"{named} {how_it_ended(WORKER_KILLED - code)}"
        if code >= 0 and self._lost_worker is not None:
            return f"{named} has ended, and its core, process {self._core.pid}, with it"
        return f"its process {self._core.pid} {how_it_ended(code)}"


def _ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _kill_group(core: int | None) -> None:
    if core is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(core, signal.SIGKILL)
