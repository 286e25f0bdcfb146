"""torchrun's agents of a node: one for its node loop, one for its trainer ranks, each with restarts of its own.

What both share: how torchrun is called, and what is said when a process has failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import PeerLostError, how_it_ended
from flash.foreign.torch import HEEDED, Ended, Interrupted, NotMet, Overseer, torchrun
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.rendezvous import hub_place
from flash.run.processes.scratch import VARIABLE as SCRATCH

Role = Literal["node", "trainer"]
"""What a process becomes."""

STANDALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
"""torchrun's options for processes that meet nobody of another machine: at an address, since this machine's name, which
torchrun's own `--standalone` takes, leads nowhere on some. There nothing would start."""

ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables of all processes where no trainer rank is elsewhere: gloo looks for this machine's name, too, and torch
warns of each look in vain."""

INTERRUPTED = 130
"""Exit code of a run that a signal ended: 128 + SIGINT, as shells have it."""
ENDED_WITH_PEER = 75
"""Exit code of a trainer rank whose hub is gone, or another rank of its life: nothing is wrong with it."""
SPOKEN = (1, INTERRUPTED, ENDED_WITH_PEER)
"""Exit codes of a process that has said itself why it ends, or whose end another one explains."""


def run_agent(config: Config, role: Role, options: Sequence[str], arguments: Sequence[str], overseer: Overseer) -> int:
    """Run the processes of this node that have a role to their end; the exit code: 0, 1 or INTERRUPTED.

    Args:
        config: the run.
        role: of the processes.
        options: of torchrun.
        arguments: what the processes read the configuration from.
        overseer: of the processes.

    Raises:
        PeerLostError: the nodes of the job did not meet, or lost each other.
        KeyboardInterrupt: a second Ctrl-C has killed the processes.
    """
    # As a variable, since not every torch that we work with has the option.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_s(config))
    shared = [f"--max-restarts={config.cluster.max_restarts}", f"--log-dir={os.environ[SCRATCH]}"]
    heeded = f"--signals-to-handle={','.join(number.name for number in HEEDED)}"
    command = [*options, *shared, heeded, "-m", "flash.run.processes.worker", role, *arguments]
    try:
        return 0 if torchrun(command, overseer, grace_s(config)) else 1
    except Interrupted as interrupt:
        if interrupt.at_once:
            raise KeyboardInterrupt from None
        return INTERRUPTED
    except NotMet as error:
        raise PeerLostError(f"the nodes with trainers did not meet: {error}; start the command on each again") from None


def stay_on_this_machine() -> None:
    """Have the processes to come look for no name of this machine; what people have set themselves stays."""
    for name, value in ON_ONE_MACHINE.items():
        os.environ.setdefault(name, value)


def tell(config: Config, role: Role, marker: ErrorMarker, ended: Sequence[Ended], restarts_left: int) -> bool:
    """Say which processes have failed, and what happens next; an error that ends the run has been told already.

    Returns whether the restart is one of theirs: those who end with another process start again as often as that.
    """
    if marker.stands():
        return True
    if ended and all(process.exit_code == ENDED_WITH_PEER for process in ended):
        return False
    node, most = int(os.environ.get("FLASH_NODE_RANK", "0")), config.cluster.max_restarts
    silent = [describe(process, role, first_rank(config, node)) for process in ended if process.exit_code not in SPOKEN]
    if role == "trainer" and not silent and restarts_left > 0 and not hub_place(config, os.environ).announced:
        return True  # They have ended with the hub, whose end is told: after an interrupt nothing starts again.
    for words in silent:
        sys.stderr.write(f"flash: {words}\n")
    if restarts_left > 0:
        sys.stderr.write(f"flash: {follows(role, node)} (restart {most - restarts_left + 1} of {most})\n")
    else:
        spent = f"no restart is left of cluster.max_restarts = {most}"
        sys.stderr.write(f"flash: {spent}\n")
        if role == "trainer":
            marker.write(PeerLostError("; ".join([*(silent or ["the trainer ranks have failed"]), spent])))
        elif silent and node == 0:
            marker.write(PeerLostError("; ".join(silent)))
    sys.stderr.flush()
    return True


def follows(role: Role, node: int) -> str:
    """What happens when a process of this role has failed on a node."""
    if role == "trainer":
        return "the trainer ranks start again"
    if node > 0:
        return "the node loop of this node starts again"
    return "the node loop starts again, with its engines and the trainer ranks"


def first_rank(config: Config, node: int) -> int:
    """The number of a node's first trainer rank."""
    return sum(config.trainer_ranks_on(before) for before in range(node))


def describe(process: Ended, role: Role, first: int) -> str:
    """How a process has ended, in words; the trainer ranks of its node are numbered from the first one."""
    who = "the node loop" if role == "node" else f"trainer rank {first + process.local}"
    return f"{who} (process {process.pid}) {how_it_ended(process.exit_code)}"
