"""vLLM's entry points into Flash, which run in each of vLLM's processes.

`no_platform` (`vllm.platform_plugins`) comes before all else: vLLM asks it for a platform, of which we have none. It
ties the life of an engine's processes to their node loop: they leave the launcher's process group, so that an interrupt
reaches the node loop alone and it closes its engines in order, and they end by themselves when the node loop is gone,
however it went; a core that starts would wait for it for minutes. `register` (`vllm.general_plugins`) registers the tcp
weight receiver. A core that loses a worker to a signal ends at once, and its exit code says so: the node loop names the
cause, of which vLLM would only tell the consequences.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import threading

from flash.foreign import vllm
from flash.weights.update import TCP_BACKEND

NODE_PID = "FLASH_NODE_PID"
"""Environment variable that holds the process id of the node loop that owns the engine."""

WORKER_KILLED = 128
"""Exit codes of a core above this: the number of the signal that has killed one of its workers is added to it."""

SPIN_S = 0.002
"""Seconds for which a process of an engine on a CPU spins for the next message: about a step of a small model."""

_registered, _follows = threading.Event(), threading.Event()


def register() -> None:
    """Called by vLLM in each process, possibly several times."""
    if _registered.is_set():
        return
    _registered.set()
    vllm.register_backend(TCP_BACKEND, "flash.weights.tcp_engine", "TcpWeightEngine")
    vllm.spin_less(SPIN_S)
    if _node() is not None and multiprocessing.current_process().name.startswith(vllm.CORE_PROCESS):
        vllm.on_killed_worker(_end_as_worker)


def _node() -> int | None:
    """The node loop that this process belongs to, and is not."""
    node_pid = int(os.environ.get(NODE_PID, os.getpid()))
    return None if node_pid == os.getpid() else node_pid


def _end_as_worker(number: int) -> None:
    """End this core, without a word: its workers end with it."""
    os._exit(WORKER_KILLED + number)


def no_platform() -> None:
    """Offer no platform, follow the node loop, and let nobody warn of Triton, which has nothing for a CPU.

    vLLM's CPU build would, before it sets up its logging, and so at any level that is asked for; torch where that build
    is not installed.
    """
    for name in ("vllm.triton_utils", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if (node_pid := _node()) is not None and not _follows.is_set():
        _follows.set()
        follow(node_pid)


def follow(node_pid: int) -> None:
    """Make this process end when process `node_pid` ends."""
    if os.getppid() == node_pid:
        os.setpgid(0, 0)
    try:
        descriptor = os.pidfd_open(node_pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(descriptor,), name="flash-follow-node", daemon=True).start()


def _exit_after(descriptor: int) -> None:
    """Wait for the end of the process behind a pidfd, then end this one.

    Waits without a deadline, as it lasts as long as the process that owns this one.
    """
    select.select([descriptor], [], [])
    # Not sys.exit: the main thread may be inside a collective that will never return.
    os._exit(1)
