"""A process that a supervisor starts: forked from one that has imported what such a process is made of.

A machine has one such server for its trainer ranks, and one for its node loop and the engines of that. They begin with
the first process that is forked, stay where that ends, and so spare the next one seconds of a processor. They end with
the launch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import msgspec

from flash.config.tree import Config
from flash.foreign.forking import ForkedProcess, ForkServer, set_process_title, use_own_resource_tracker
from flash.run.processes.hub_place import HubPlace

OF_ALL = "flash.run.processes.worker"
OF_RANKS = (OF_ALL, "flash.run.trainer_rank", "flash.trainer.loop", "flash.weights.publisher")
OF_LOOPS = (OF_ALL, "flash.run.joined")
OF_ENGINES = "flash.rollout.vllm.fork_server"
PASSIVE = "OMP_WAIT_POLICY"
"""Threads that spin while they wait for each other take the cores that engines and others work on."""


def ranks_server() -> ForkServer:
    """What trainer ranks are forked from."""
    # Else torch might initialise CUDA when it is asked whether there is one, and no fork could.
    without_cuda = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return ForkServer(*OF_RANKS, variables={PASSIVE: os.environ.get(PASSIVE, "passive"), **without_cuda})


def loops_server(config: Config, node: int) -> ForkServer:
    """What the node loop of a machine is forked from, and its engines."""
    if not config.engines_on(node):
        return ForkServer(*OF_LOOPS)
    from flash.rollout.vllm.start import server_variables

    return ForkServer(*OF_LOOPS, OF_ENGINES, variables=server_variables(config, node))


class ProcessOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process is told by its launcher, beside the configuration."""

    node: int
    """The number of the machine in its job; of one that no job has started, the number of nodes with trainers."""
    restarts: int = 0
    """How often its part has started again."""
    local: int = 0
    """Of a trainer rank: its number on this machine."""
    place: HubPlace = HubPlace()
    """Of a node loop that joins: where the hub is."""
    digest: str = ""
    """Of a node loop that joins: of the run's configuration, as the hub has it."""
    begun: float = 0.0
    """Of a node loop that joins: when the launcher began with it, in Unix seconds."""


class JobProcess(ForkedProcess):
    """See the module's docstring.

    Args:
        server: what it is forked from.
        role: as of `flash.run.processes.worker`.
        file: of its configuration.
        order: its own.
        variables: of its environment, beside those of this process.
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
        """As of `ForkedProcess`."""
        super().enter()
        os.setsid()
        use_own_resource_tracker()
        set_process_title(f"flash.run.processes.worker {self._role} {self._order.local} {self._file}")
        # As `python -m` has it; and nobody waits for what a process says until a buffer is full.
        sys.path.insert(0, os.getcwd())
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if OF_ENGINES in sys.modules:
            from flash.rollout.vllm.processes import SERVER

            SERVER.use_parent_server()

    def run(self) -> None:
        """As of `Process`, in the new process."""
        self.enter()
        code: int = import_module(OF_ALL).main(self._role, self._file, self._order)
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of libraries that wait on a dead peer must not keep the process: engines watch it and end with it.
        os._exit(code)
