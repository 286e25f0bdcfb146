"""Starts a node with trainers: its node loop, under torchrun in this process, and beside it its trainer ranks.

Each of the two has an agent of its own, so that the death of a trainer rank costs the trainers' work alone
(`flash.run.processes.trainers`). In a job of several nodes every node runs the same command with `FLASH_NNODES`,
`FLASH_NODE_RANK` and `FLASH_RDZV_ENDPOINT` set (launch.sh does it under SLURM). The trainer ranks of all nodes meet in
torchrun's rendezvous, which on one machine is private to the job; nodes without any join the run (`flash.run.join`).

While it runs, a launch is the only one to write its run directory, and the owner of a folder for temporary files; its
processes end when it is gone.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from flash.config.objects import share_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import ConfigError
from flash.run.join import join
from flash.run.processes.agents import INTERRUPTED, STANDALONE, run_agent, stay_on_this_machine, tell
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.locks import run_held
from flash.run.processes.overseer import Overseer
from flash.run.processes.rendezvous import RENDEZVOUS, hub_place
from flash.run.processes.requeue import refuse_idle_requeues
from flash.run.processes.scratch import scratch_folder
from flash.run.processes.starter_watch import begin_launch
from flash.run.processes.token import VARIABLE as TOKEN
from flash.run.processes.token import parse_token
from flash.run.processes.trainers import TrainersBeside, run_trainers

ENDPOINT = re.compile(r".+:[0-9]+")

ALONE = (*STANDALONE, "--nproc-per-node=1")
"""torchrun's options for a node loop: it meets nobody there."""
NAMED = 2
"""Exit code of a run that an error with a name has ended, as of every command."""


def place_in_job(config: Config, environment: Mapping[str, str]) -> int:
    """The number of this node among those of the job.

    Raises:
        ConfigError: the environment and cluster.nodes disagree, or a variable is not what it has to be.
    """
    nodes, node = _number(environment, "FLASH_NNODES", 1), _number(environment, "FLASH_NODE_RANK", 0)
    if (token := environment.get(TOKEN)) is not None:
        parse_token(token)
    if nodes != config.cluster.nodes:
        raise ConfigError(
            f"cluster.nodes = {config.cluster.nodes}, but this job has {nodes} node(s): change one of them, or start "
            "every node through launch.sh under sbatch"
        )
    if not 0 <= node < nodes:
        raise ConfigError(f"FLASH_NODE_RANK = {node}, expected one from 0 to {nodes - 1}, another on each node")
    if nodes > 1 and not ENDPOINT.fullmatch(environment.get(RENDEZVOUS, "")):
        raise ConfigError(f"{RENDEZVOUS} = {environment.get(RENDEZVOUS, '')!r}, expected HOST:PORT of the first node")
    return node


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}, expected a number")
    return int(text)


def resume_command(command: Sequence[str]) -> str:
    """What to type to continue the run of a command, which may have been one that continued it."""
    kept = [part for part in command if part != "--resume" and not part.startswith("run.resume=")]
    return shlex.join([*kept, "--resume"])


def launch(config: Config, paths: Sequence[str], overrides: Sequence[str]) -> int:
    """Run the job on this node to its end; the exit code: 0, 1, NAMED or INTERRUPTED, or that of `join`.

    Raises:
        ConfigError: the environment and the configuration disagree.
        RunDirectoryError: another launch writes the run directory.
        RequeueError: SLURM has requeued the job again and again without a step of progress.
        PeerLostError: the nodes of the job did not meet, or lost each other.
    """
    arguments = [*paths, *overrides]
    node = place_in_job(config, os.environ)
    if node >= config.cluster.trainer_nodes:
        return join(hub_place(config, os.environ), own=config)
    sys.stdout.write(f"[{describe_start(config)}]\n")
    sys.stdout.flush()
    if config.cluster.trainer_nodes == 1:
        stay_on_this_machine()
    from flash.trainer.objective import try_objective  # torch, which nothing before this needs

    try_objective(config.algorithm)
    os.environ.setdefault("FLASH_NODE_RANK", "0")
    share_import_path()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    marker = ErrorMarker(config.run_dir, begin_launch())
    with ExitStack() as stack:
        requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        if node == 0:
            stack.enter_context(run_held(config.run_dir, grace_s(config)))
            if requeued:
                refuse_idle_requeues(config)
        if requeued:
            arguments.append("run.resume=true")
        stack.enter_context(scratch_folder())
        if node > 0 and not config.engines_on(node):
            code = run_trainers(config, arguments, marker)
        else:
            code = _run_beside(config, arguments, marker)
        return NAMED if code == 1 and marker.stands() else code


def _run_beside(config: Config, arguments: Sequence[str], marker: ErrorMarker) -> int:
    """Run the node loop and the trainer ranks of this node to their end, or until a second Ctrl-C; the exit code."""
    try:
        with TrainersBeside(config, arguments, marker) as trainers:
            code = run_agent(config, "node", ALONE, arguments, Overseer(partial(tell, config, "node", marker)))
        return 1 if trainers.failed else code
    except KeyboardInterrupt:
        return INTERRUPTED


def describe_start(config: Config) -> str:
    """What this node is about to start, in words: seconds pass before its processes can speak."""
    node = int(os.environ.get("FLASH_NODE_RANK", "0"))
    trainers, engines = config.trainer_ranks_on(node), config.engines_on(node)
    where = f"node {node}: " if config.cluster.nodes > 1 else ""
    return f"{where}starting processes for {counted(trainers, 'trainer rank')} and {counted(engines, 'engine')}"


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
