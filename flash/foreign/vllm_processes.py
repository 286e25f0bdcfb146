"""The processes of a vLLM engine beyond what it documents: how they begin, wait for each other, and end.

What is touched here is listed in `flash.foreign.vllm.TOUCHED`, and imported where it is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import connection
from pathlib import Path
from typing import Any

WORKER_TITLE = b"VLLM::Worker"
"""How vLLM has the command line of a worker begin."""
CORE_ENDED = "Failed core proc(s)"
"""In vLLM's error when a core has ended before it was ready."""
WORKER_DIED = "Worker proc %s died unexpectedly (exit code: %s)"
"""How what a core logs of a worker that has ended begins."""
LOOK_AGAIN_MS = 10
"""After which a sleeping process of a CPU engine looks whether it has been called."""
PRELOADED = (("vllm", "libtcmalloc*.so*", "libs"), ("torch", "libgomp*.so*", "../torch.libs", "lib"))
"""Packages, libraries and folders there from which vLLM's CPU build has them preloaded: else its threads may all run on
one core."""
SETTLE_S = 0.5
"""Seconds from the moment in which the core misses a worker to that in which the system tells how it ended."""


def import_engine() -> None:
    """Import what an engine is made of, which takes seconds."""
    import_module("vllm.v1.engine.async_llm")


def import_core() -> None:
    """Import what an engine's core and workers are made of, for processes that are forked from this one.

    Where there are GPUs no more than vLLM itself has imported where it forks: nothing that may initialise CUDA.
    """
    from vllm.platforms import current_platform

    import_module("vllm.v1.engine.core")
    if current_platform.is_cpu():
        for module in ("vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"):
            import_module(module)


def preloaded() -> str:
    """What the CPU build has ld.so preload into engines, as it would say in LD_PRELOAD, which it can only once it runs.

    Empty: it is not installed.
    """
    named: list[str] = []
    for package, pattern, *folders in PRELOADED:
        found = find_spec(package)
        if found is not None and found.origin is not None:
            here = Path(found.origin).parent
            named += [str(file) for beside in folders for file in (here / beside).resolve().glob(pattern)][:1]
    return ":".join(named)


def stay_offline() -> None:
    """Heed HF_HUB_OFFLINE, which was read where this process was forked."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        constants: Any = import_module("huggingface_hub.constants")
        constants.HF_HUB_OFFLINE = True


def begin_cores_with(context: Any) -> None:
    """In a node loop: have vLLM begin cores through this context of multiprocessing."""
    utils: Any = import_module("vllm.v1.engine.utils")
    utils.get_mp_context = lambda: context


def begin_workers_with(context: Any) -> None:
    """In a core: the same of workers."""
    executors: Any = import_module("vllm.v1.executor.multiproc_executor")
    executors.get_mp_context = lambda: context


def spin_less(seconds: float) -> None:
    """On a CPU, have processes of an engine that wait for each other's messages spin no longer, and then sleep.

    vLLM's spin for a second after each, on a core that trainer, node loop or environments have a use for. Who sleeps
    may miss that he is called: vLLM has him look again after five seconds, in which the engine would stand still.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        spinning: Any = shm_broadcast
        spinning.SpinCondition = partial(shm_broadcast.SpinCondition, busy_loop_s=seconds)
        spinning.SHM_READER_RECHECK_INTERVAL_MS = LOOK_AGAIN_MS


def worker_pids(core_pid: int) -> list[int]:
    """The processes that compute for a core that has started; none where it computes itself."""
    children: list[str] = []
    for thread in Path(f"/proc/{core_pid}/task").iterdir():
        with suppress(OSError):  # threads come and go meanwhile
            children += (thread / "children").read_text().split()
    return [int(pid) for pid in children if _command(pid).startswith(WORKER_TITLE)]


def worker_rank(name: str) -> int:
    """The place of a worker among those of its engine, by the name that vLLM gives its process: VllmWorker-0."""
    return int(name.rpartition("-")[2])


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended meanwhile


def is_end_of_starting_core(error: BaseException) -> bool:
    """Whether a start has failed because the engine's core has ended, by itself or not."""
    return CORE_ENDED in str(error)


def on_killed_worker(tell: Callable[[int], None]) -> None:
    """In a core: have the number of the signal told that has killed a worker, and vLLM not speak of the consequences.

    It is told before vLLM ends the other workers, by signals as well.
    """
    from vllm.v1.executor import multiproc_executor

    executor: Any = multiproc_executor.MultiprocExecutor
    end_all = executor._ensure_worker_termination

    held: list[logging.LogRecord] = []

    def hold_back(record: logging.LogRecord) -> bool:
        """vLLM tells that a worker is gone before the system tells how it ended."""
        if not str(record.msg).startswith(WORKER_DIED):
            return True
        held.append(record)
        return False

    def look_and_end_all(workers: Sequence[Any]) -> None:
        killed = _killed_one(workers)
        if killed is not None:
            tell(killed)
        else:
            for record in held:
                multiproc_executor.logger.callHandlers(record)
        held.clear()
        end_all(workers)

    executor._ensure_worker_termination = staticmethod(look_and_end_all)
    multiproc_executor.logger.addFilter(hold_back)


def _killed_one(workers: Sequence[Any]) -> int | None:
    """The signal that has killed one of these processes; those that still run are left alone."""
    connection.wait([worker.sentinel for worker in workers], SETTLE_S)
    for worker in workers:
        if connection.wait([worker.sentinel], 0):
            worker.join(SETTLE_S)
    codes = [worker.exitcode for worker in workers]
    return next((-code for code in codes if code is not None and code < 0), None)
