"""Starts torchrun for this node: one process for the node loop, one per trainer rank.

On one machine the rendezvous is private to the job. In a job of several nodes every node runs the same command with
`FLASH_NNODES`, `FLASH_NODE_RANK` and `FLASH_RDZV_ENDPOINT` set (launch.sh does it under SLURM).
"""

from __future__ import annotations

import logging
import math
import os
import shlex
from collections.abc import Sequence

from flash.config.tree import Config
from flash.errors import ConfigError
from flash.foreign.torch import Interrupted, torchrun

QUIET = ("torch.distributed", "torch.distributed.elastic")
"""Loggers that repeat at length what our own error has said."""

INTERRUPTED = 130
"""Exit code of a run that a signal ended: 128 + SIGINT, as shells have it."""

TORCHRUN_MARGIN_S = 30
"""Seconds beyond deadlines.shutdown after which torchrun kills what has not ended: a checkpoint must not be cut off."""


def torchrun_arguments(config: Config, environment: dict[str, str]) -> list[str]:
    """The options of torchrun on this node.

    Raises:
        ConfigError: the environment and cluster.nodes disagree.
    """
    nodes = int(environment.get("FLASH_NNODES", "1"))
    node = int(environment.get("FLASH_NODE_RANK", "0"))
    if nodes != config.cluster.nodes:
        raise ConfigError(
            f"cluster.nodes = {config.cluster.nodes}, but this job has {nodes} node(s): change one of them, or start "
            "every node through launch.sh under sbatch"
        )
    processes = 1 + config.trainer_ranks_on(node)
    shared = [f"--nproc-per-node={processes}", f"--max-restarts={config.cluster.max_restarts}"]
    if nodes == 1:
        return ["--standalone", *shared]
    endpoint = environment.get("FLASH_RDZV_ENDPOINT", "")
    if ":" not in endpoint:
        raise ConfigError(f"FLASH_RDZV_ENDPOINT = {endpoint!r}, expected HOST:PORT of the first node")
    identity = environment.get("SLURM_JOB_ID", config.run.name)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={identity}"]
    return [f"--nnodes={nodes}", f"--node-rank={node}", *rendezvous, *shared]


def resume_command(paths: Sequence[str], overrides: Sequence[str]) -> str:
    """What to type to continue the same run, whose name may be an override."""
    kept = [override for override in overrides if not override.startswith("run.resume=")]
    return shlex.join(["flash", "train", *paths, *kept, "--resume"])


def launch(config: Config, paths: Sequence[str], overrides: Sequence[str]) -> int:
    """Run the job on this node to its end; the exit code: 0, 1 or INTERRUPTED."""
    extra = list(overrides)
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
        extra.append("run.resume=true")
    options = torchrun_arguments(config, dict(os.environ))

    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # As a variable, since not every torch that we work with has the option.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(TORCHRUN_MARGIN_S + math.ceil(config.deadlines.shutdown))
    try:
        return 0 if torchrun([*options, "-m", "flash.run.worker", *paths, *extra]) else 1
    except Interrupted:
        return INTERRUPTED
