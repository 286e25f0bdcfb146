"""vLLM's entry points into Flash, and a thread that ends vLLM's processes when the node loop that owns them has ended.

The *node loop* is the process that runs the engines of a machine. vLLM imports this module in each of its processes,
because `pyproject.toml` names it:
- `no_platform` (`vllm.platform_plugins`) runs before everything else, because vLLM calls it to find a platform. The
  function returns no platform. It only uses the early moment to silence warnings.
- `register` (`vllm.general_plugins`) registers our *weight receiver*, the class with which vLLM's workers take new
  weights from the trainer. On a CPU it also shortens the time for which waiting processes poll before they sleep.

`flash.rollout.vllm.processes` forks processes. Each of them calls `follow` first. This module imports neither torch nor
vLLM, because `no_platform` has to set log levels before torch and vLLM are imported.
"""

from __future__ import annotations

import logging
import os
import select
import threading

from flash.foreign import vllm, vllm_processes

RECEIVER = "flash"
"""Name under which our weight receiver is registered in vLLM. `flash.rollout.vllm.start` names it in an engine's
arguments. With `weights.backend = "ipc"` (engine and trainer on one GPU), vLLM's own receiver is used instead."""
NODE_PID = "FLASH_NODE_PID"
"""Environment variable that holds the process id of the node loop that owns the engine."""

SPIN_S = 0.002
"""Seconds for which a process of an engine on a CPU polls for the next message before it sleeps. vLLM's own limit is a
second, in which the process occupies a core that the trainer or environments need. The value is about the duration of
one step of a small model, so that the process is still awake when the next step follows."""

_registered = threading.Event()
"""Set when `register` has run in this process."""


def register() -> None:
    """Register our weight receiver in this process, and limit how long an engine on a CPU polls (`SPIN_S`).

    vLLM calls this in each of its processes, and may call it several times; only the first call has an effect.
    """
    if _registered.is_set():
        return
    _registered.set()
    vllm.register_backend(RECEIVER, "flash.weights.worker", "WeightReceiver")
    vllm_processes.spin_less(SPIN_S)


def no_platform() -> None:
    """Silence all warnings of two loggers, which say that Triton does not support a CPU. Errors are still logged.

    vLLM calls this as a platform plugin. The function returns None, so vLLM does not take Flash for a platform. vLLM's
    CPU build logs the warnings under the first name, before it sets up its logging, so no configured level hides them.
    In the other builds of vLLM, torch logs them under the second name.
    """
    for name in ("vllm.triton_utils", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)


def follow(node_pid: int) -> None:
    """Start a thread that ends this process when process `node_pid` ends, even if that process is killed.

    Without this, a killed node loop would leave engines that hold the GPU's memory. If `node_pid` has already ended,
    this process ends at once.
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
