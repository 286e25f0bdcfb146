"""vLLM's entry points into Flash, and a thread that ends vLLM's processes when the node loop that owns them has ended.

vLLM imports this module in each of its processes, because `pyproject.toml` names it:
- `no_platform` (`vllm.platform_plugins`) runs before everything else. vLLM calls it to find a platform. It returns none
  and is used only because it runs so early.
- `register` (`vllm.general_plugins`) registers our weight receiver.

The processes that `flash.rollout.vllm.processes` forks call `follow`. This module imports neither torch nor vLLM,
because `no_platform` has to set log levels before these are imported.
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
"""Seconds for which a process of an engine on a CPU polls for the next message before it sleeps: about the duration of
one step of a small model."""

_registered = threading.Event()


def register() -> None:
    """Register our weight receiver in this process. vLLM may call this several times."""
    if _registered.is_set():
        return
    _registered.set()
    vllm.register_backend(RECEIVER, "flash.weights.worker", "WeightReceiver")
    vllm_processes.spin_less(SPIN_S)


def no_platform() -> None:
    """Silence the warnings that Triton does not support a CPU, and return no platform.

    vLLM's CPU build logs these warnings before it sets up its logging, so no configured level hides them. In other
    builds torch logs them.
    """
    for name in ("vllm.triton_utils", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)


def follow(node_pid: int) -> None:
    """Start a thread that ends this process when process `node_pid` ends, even if that process is killed.

    Without this, a killed node loop would leave engines that hold the GPU's memory.
    """
    try:
        descriptor = os.pidfd_open(node_pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(descriptor,), name="flash-follow-node", daemon=True).start()


def _exit_after(descriptor: int) -> None:
    """Wait until the process behind a pidfd ends, then end this process.

    The wait has no deadline: the node loop may run for any time.
    """
    select.select([descriptor], [], [])
    # Not sys.exit: the main thread may be inside a collective that will never return.
    os._exit(1)
