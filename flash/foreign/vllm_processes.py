"""Functions for the start, the waiting and the end of a vLLM engine's processes, beyond vLLM's documented interface.

An engine has a *core* process, which schedules steps, and *workers*, which compute these steps and are children of the
core. `flash.rollout.vllm.processes` calls most functions: in the node loop, whose child the core is, or in a core.

The attributes of vLLM that are used are listed in `flash.foreign.vllm_touched.TOUCHED`. vLLM is imported inside the
functions.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import connection
from pathlib import Path
from typing import Any, cast

WORKER_TITLE = b"VLLM::Worker"
"""Beginning of the command line of a vLLM worker."""
CORE_ENDED = "Failed core proc(s)"
"""Part of vLLM's error message when a core has ended before it was ready."""
WORKER_DIED = "Worker proc %s died unexpectedly (exit code: %s)"
"""Beginning of the message that a core logs for a worker that has ended."""
RECHECK_MS = 10
"""Milliseconds after which a sleeping process of a CPU engine checks for a message that it may have missed."""
PRELOADED = (("vllm", "libtcmalloc*.so*", "libs"), ("torch", "libgomp*.so*", "../torch.libs", "lib"))
"""For each library that vLLM's CPU build preloads: package, pattern of the file's name, and folders relative to the
package. Without these libraries all threads of vLLM may run on one CPU core."""
EXIT_CODE_S = 0.5
"""Seconds to wait for the exit code of a worker whose loss the core has noticed. The exit code may be known a little
later."""


def import_engine() -> None:
    """Import the modules that a node loop needs for an engine, which takes seconds. Called in a fork server, so that
    the node loops forked from it need no imports."""
    import_module("vllm.v1.engine.async_llm")


def import_core() -> None:
    """Import the modules of an engine's core and workers, in a fork server from which these processes are forked.

    On a machine with GPUs, modules of workers are left out: they may initialise CUDA, which does not work in a process
    that is forked afterwards.
    """
    from vllm.platforms import current_platform

    import_module("vllm.v1.engine.core")
    if current_platform.is_cpu():
        import_module("vllm.v1.executor.multiproc_executor")
        import_module("vllm.v1.worker.cpu_worker")
        # Each worker would import this module when it loads its model, which takes a third of a second.
        import_module("vllm.model_executor.layers.quantization.online.base")


def preload_libraries() -> str:
    """Return the value of LD_PRELOAD for vLLM's CPU build; empty if the libraries are not installed.

    vLLM sets the variable itself, but later: a forked process has already loaded its libraries. So the fork server must
    be started with this variable.
    """
    named: list[str] = []
    for package, pattern, *folders in PRELOADED:
        found = find_spec(package)
        if found is not None and found.origin is not None:
            here = Path(found.origin).parent
            named += [str(file) for beside in folders for file in (here / beside).resolve().glob(pattern)][:1]
    return ":".join(named)


def apply_offline_mode() -> None:
    """Apply the environment variable HF_HUB_OFFLINE of this forked process. Called when a core begins.

    The library of the Hugging Face Hub has read the variable in the fork server, where it may have another value.
    """
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        constants: Any = import_module("huggingface_hub.constants")
        constants.HF_HUB_OFFLINE = True


def keep_frozen() -> None:
    """Let this forked process never collect the objects of its fork server as garbage. Called when a core begins.

    When an engine ends, vLLM lets the collector scan all objects, and runs it, for engines in a process that goes on.
    Here the process ends, too. The scan would take a second or more of CPU time, because it copies the memory pages of
    the fork server.
    """
    cast(Any, gc).unfreeze = _do_nothing


def _do_nothing() -> None:
    """Stand in for `gc.unfreeze`."""


def start_cores_with(context: Any) -> None:
    """Let vLLM start cores through a multiprocessing context of ours, which forks them from a fork server. This is
    called in a node loop."""
    utils: Any = import_module("vllm.v1.engine.utils")
    utils.get_mp_context = lambda: context


def start_workers_with(context: Any) -> None:
    """Let vLLM start workers through a multiprocessing context of ours, which forks them from a fork server. This is
    called in a core."""
    executors: Any = import_module("vllm.v1.executor.multiproc_executor")
    executors.get_mp_context = lambda: context


def spin_less(seconds: float) -> None:
    """On a CPU, limit to `seconds` how long an engine's processes spin while they wait for each other's messages.

    The node loop and the core of each engine call this. To spin is to ask again and again without sleeping.
    vLLM lets processes spin for a second after each message, on a CPU core that the trainer, the node loop or
    environments could use. A sleeping process may miss a message. vLLM lets it check again after five seconds, in which
    the engine would stand still, so this time is shortened, too.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        spinning: Any = shm_broadcast
        spinning.SpinCondition = partial(shm_broadcast.SpinCondition, busy_loop_s=seconds)
        spinning.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS


def worker_pids(core_pid: int) -> list[int]:
    """Return the process ids of a running core's workers; empty if the core computes itself. Called in the node loop
    once the engine has started. Raises FileNotFoundError if the core has ended."""
    children: list[str] = []
    for thread in Path(f"/proc/{core_pid}/task").iterdir():
        with suppress(OSError):  # the thread may have ended meanwhile
            children += (thread / "children").read_text().split()
    return [int(pid) for pid in children if _command(pid).startswith(WORKER_TITLE)]


def worker_rank(name: str) -> int:
    """Return the rank of a worker in its engine from the name that vLLM gives its process, such as VllmWorker-0."""
    return int(name.rpartition("-")[2])


def _command(pid: str) -> bytes:
    """Return the command line of a process, which a process title replaces; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_end_of_starting_core(error: BaseException) -> bool:
    """Return True if the start of an engine failed because its core has ended before it was ready."""
    return CORE_ENDED in str(error)


def on_killed_worker(report: Callable[[int], None]) -> None:
    """Let this core call `report` with the number of the signal if a signal kills one of its workers. Called when a
    core begins.

    vLLM ends the other workers, by signals too, when a worker has ended. `report` is called before that, so that the
    first cause is known. It may end this core, and then does not return. vLLM's own log message about a killed worker
    is left out: it only repeats the report.
    """
    from vllm.v1.executor import multiproc_executor

    executor: Any = multiproc_executor.MultiprocExecutor
    end_all = executor._ensure_worker_termination

    held_back: list[logging.LogRecord] = []  # messages about lost workers

    def hold_back(record: logging.LogRecord) -> bool:
        """Filter vLLM's log: hold back the message about a lost worker until its exit code is known."""
        if not str(record.msg).startswith(WORKER_DIED):
            return True
        held_back.append(record)
        return False

    def report_and_end_all(workers: Sequence[Any]) -> None:
        """Report a killed worker. If none was killed, log vLLM's message that was held back. Then end all workers as
        vLLM does, unless `report` has ended this core."""
        killed = _killing_signal(workers)
        if killed is not None:
            report(killed)
        else:
            for record in held_back:
                multiproc_executor.logger.callHandlers(record)
        held_back.clear()
        end_all(workers)

    executor._ensure_worker_termination = staticmethod(report_and_end_all)
    multiproc_executor.logger.addFilter(hold_back)


def _killing_signal(workers: Sequence[Any]) -> int | None:
    """Return the number of the signal that has killed one of the worker processes; None if none was killed.

    Called before vLLM ends all workers: when the core has noticed that a worker has ended, and at each shutdown. Waits
    up to EXIT_CODE_S for the first exit code. Workers that still run are not ended.
    """
    connection.wait([worker.sentinel for worker in workers], EXIT_CODE_S)
    for worker in workers:
        if connection.wait([worker.sentinel], 0):
            worker.join(EXIT_CODE_S)
    codes = [worker.exitcode for worker in workers]
    return next((-code for code in codes if code is not None and code < 0), None)
