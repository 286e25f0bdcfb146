"""Processes that a supervisor starts. Each is forked from a server process that has imported its modules already.

A machine has one such server for its trainer ranks, and one for its node loop and the engines of that loop. A node loop
is the event loop of a machine, with its engines and episodes, and on the first node also with the hub. A server starts
when the first process is forked from it. It outlives that process, so that a restarted process needs no imports, which
take seconds of CPU time. A server ends with its launch. A launcher that was itself forked from a server with all of
these imports starts no server: all processes of its launch are forked from that server.

`flash.run.processes.supervisor.Processes` starts a `JobProcess`, which calls `flash.run.processes.worker.main`.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import cast

import msgspec

from flash.config.tree import Config
from flash.foreign.forking import ForkedProcess, ForkServer, set_process_title, use_own_resource_tracker
from flash.run.processes.hub_place import HubPlace

WORKER_MODULE = "flash.run.processes.worker"
"""Module that every server imports: the entry point of all processes."""
RANK_MODULES = (WORKER_MODULE, "flash.run.trainer_rank", "flash.trainer.loop", "flash.weights.publisher")
"""Modules that the server of trainer ranks imports."""
LOOP_MODULES = (WORKER_MODULE, "flash.run.joined")
"""Modules that the server of node loops imports."""
ENGINE_MODULE = "flash.rollout.vllm.fork_server"
"""Module that the server of node loops also imports if the node has engines."""
PASSIVE = "OMP_WAIT_POLICY"
"""Environment variable of OpenMP. With the value `passive`, threads that wait for each other sleep. Threads that spin
would take the CPU cores of engines and other processes."""


def ranks_server() -> ForkServer:
    """Return a new server from which trainer ranks are forked, for `Processes.fork_from`. It is not started yet."""
    # With this variable, torch checks for a GPU without initialising CUDA. CUDA cannot be used in a process that is
    # forked after its initialisation.
    without_cuda = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return ForkServer(*RANK_MODULES, variables={PASSIVE: os.environ.get(PASSIVE, "passive"), **without_cuda})


def loops_server(config: Config, node: int) -> ForkServer:
    """Return a new server from which the node loop of machine `node` and its engines are forked, for
    `Processes.fork_from`. It is not started yet."""
    if not config.engines_on(node):
        return ForkServer(*LOOP_MODULES)
    from flash.rollout.vllm.start import server_variables

    return ForkServer(*LOOP_MODULES, ENGINE_MODULE, variables=server_variables(config, node))


class ProcessOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Arguments that a process gets from its launcher, in addition to its role and the file of the configuration."""

    node: int
    """Number of the machine in its job. A machine that joins without a job has the number of nodes with trainers, which
    is the first number of a node that has engines only."""
    restarts: int = 0
    """Number of counted restarts of the part that this process belongs to."""
    local: int = 0
    """Number of a trainer rank on this machine; 0 for other processes."""
    place: HubPlace = HubPlace()
    """Place of the hub, for a node loop that joins."""
    digest: str = ""
    """Digest of the run's configuration as the hub reports it, for a node loop that joins."""
    begun: float = 0.0
    """Time at which the launcher began to start the node loop, in Unix seconds, for a node loop that joins."""


class JobProcess(ForkedProcess):
    """A process of the job, forked from a server, in a session of its own.

    Args:
        server: the server that the process is forked from.
        role: role of the process, one of `flash.run.processes.worker.Role`.
        file: file of the configuration.
        order: arguments of this process.
        variables: environment variables of the process, in addition to those of the supervisor.
    """

    def __init__(
        self, server: ForkServer, role: str, file: Path, order: ProcessOrder, variables: Mapping[str, str]
    ) -> None:
        super().__init__(name=f"{role} {order.local}")
        self.server = server
        self.variables |= variables
        self._role = role
        self._file = file
        self._order = order

    def enter(self) -> None:
        """Set up the new process: signals, session, resource tracker, title, import path and output streams.

        `run` calls this first, in the new process.
        """
        # Only the launcher sends signals to this process. A shell script starts background commands with SIGINT
        # ignored, and then an interrupt that comes before the event loop runs would be lost.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        super().enter()
        os.setsid()
        use_own_resource_tracker()
        set_process_title(f"flash.run.processes.worker {self._role} {self._order.local} {self._file}")
        # Each line is written at once, also to a pipe or a file. A process that is killed would lose its buffer.
        for stream in (sys.stdout, sys.stderr):
            cast("io.TextIOWrapper", stream).reconfigure(line_buffering=True)

    def run(self) -> None:
        """Run the worker in the new process, and exit with the exit code that the worker returns.

        The fork calls this; it is the whole life of the process.
        """
        self.enter()
        code: int = import_module(WORKER_MODULE).main(self._role, self._file, self._order)
        # `os._exit` does not flush. The reader of the output may be gone: an error here would make the exit code 1,
        # which the supervisor takes for a failure of this process.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        # `os._exit` does not wait for threads of libraries, which may wait for a dead peer. Engines watch this process
        # and end with it.
        os._exit(code)
