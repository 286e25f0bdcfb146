"""vLLM's entry points into Flash, and how vLLM's processes end with the node loop that owns them.

vLLM imports this module in each of its processes, because `pyproject.toml` names it:
- `no_platform` (`vllm.platform_plugins`) runs before everything else. vLLM asks it for a platform; we have none.
- `register` (`vllm.general_plugins`) registers our weight receiver.

`follow` is called by the processes that `flash.rollout.vllm.processes` forks. This module imports neither torch nor
vLLM, as `no_platform` has to set log levels before they are imported.
"""

from __future__ import annotations

import logging
import os
import select
import threading

from flash.foreign import vllm, vllm_processes

RECEIVER = "flash"
"""Name under which our weight receiver is registered in vLLM. The ipc backend uses vLLM's own receiver."""
NODE_PID = "FLASH_NODE_PID"
"""Environment variable that holds the process id of the node loop that owns the engine."""

SPIN_S = 0.002
"""Seconds for which a process of an engine on a CPU spins for the next message: about a step of a small model."""

_registered = threading.Event()


def register() -> None:
    """Register our weight receiver in this process. vLLM may call this several times."""
    if _registered.is_set():
        return
    _registered.set()
    vllm.register_backend(RECEIVER, "flash.weights.worker", "WeightReceiver")
    vllm_processes.spin_less(SPIN_S)


def no_platform() -> None:
    """Offer no platform, and silence warnings that Triton has nothing for a CPU.

    vLLM's CPU build logs them before it sets up its logging, and so at any configured level. Where that build is not
    installed, torch logs them.
    """
    for name in ("vllm.triton_utils", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)


def follow(node_pid: int) -> None:
    """End this process when process `node_pid` ends, however that ended."""
    try:
        descriptor = os.pidfd_open(node_pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(descriptor,), name="flash-follow-node", daemon=True).start()


def _exit_after(descriptor: int) -> None:
    """Wait until the process behind a pidfd ends, then end this one.

    Waits without a deadline, because the process that owns this one may live as long as it likes.
    """
    select.select([descriptor], [], [])
    # Not sys.exit: the main thread may be inside a collective that will never return.
    os._exit(1)
