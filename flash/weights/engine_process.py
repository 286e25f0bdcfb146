"""Steps of each process that imports vLLM for Flash: fewer warnings, our weight receiver, an end with the node loop.

The *node loop* is the process that runs the engines of a machine. `flash.rollout.vllm` calls the functions of this
module: `silence_triton` before the first import of vLLM, `register` in the node loop and in the core of each engine,
and `follow` in each process of an engine. Flash has no entry point of vLLM, so that a vLLM which somebody else starts
in the same Python environment is unchanged.

This module imports neither torch nor vLLM, because `silence_triton` has to set log levels before they are imported.
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


def silence_triton() -> None:
    """Silence all warnings of two loggers, which say that Triton does not support a CPU. Errors are still logged.

    vLLM's CPU build logs the warnings under the first name, before it sets up its logging, so no configured level hides
    them. In the other builds of vLLM, torch logs them under the second name.
    """
    for name in ("vllm.triton_utils", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)


def register() -> None:
    """Register our weight receiver in this process, and limit how long an engine on a CPU polls (`SPIN_S`).

    The weight receiver is the class with which vLLM's workers take new weights from the trainer. Workers inherit the
    registration, because they are forked from the core. Only the first call in a process has an effect.
    """
    if _registered.is_set():
        return
    _registered.set()
    vllm.register_backend(RECEIVER, "flash.weights.worker", "WeightReceiver")
    vllm_processes.spin_less(SPIN_S)


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
