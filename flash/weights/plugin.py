"""vLLM's entry points into Flash, which run in each of vLLM's processes; and how these follow their node loop.

`no_platform` (`vllm.platform_plugins`) comes before all else: vLLM asks it for a platform, of which we have none.
`register` (`vllm.general_plugins`) registers our weight receiver.
"""

from __future__ import annotations

import logging
import os
import select
import threading

from flash.foreign import vllm, vllm_processes
from flash.weights.update import RECEIVER

NODE_PID = "FLASH_NODE_PID"
"""Environment variable that holds the process id of the node loop that owns the engine."""

SPIN_S = 0.002
"""Seconds for which a process of an engine on a CPU spins for the next message: about a step of a small model."""

_registered = threading.Event()


def register() -> None:
    """Called by vLLM in each process, possibly several times."""
    if _registered.is_set():
        return
    _registered.set()
    vllm.register_backend(RECEIVER, "flash.weights.tcp_engine", "TcpWeightEngine")
    vllm_processes.spin_less(SPIN_S)


def no_platform() -> None:
    """Offer no platform, and let nobody warn of Triton, which has nothing for a CPU.

    vLLM's CPU build would, before it sets up its logging, and so at any level that is asked for; torch where that build
    is not installed.
    """
    for name in ("vllm.triton_utils", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)


def follow(node_pid: int) -> None:
    """Make this process end when process `node_pid` ends, however that went."""
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
