"""What torchrun starts: the node loop of a node, or one of its trainer ranks.

An error ends the process with code 1; one that a restart cannot mend is left as `error.json` in the run directory.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence

from flash.config.load import load, split_arguments
from flash.config.objects import take_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import ConfigError, FlashError, PeerLostError
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.locks import run_lock, share
from flash.run.processes.rendezvous import Rank
from flash.run.processes.scratch import join_scratch_folder
from flash.run.processes.starter_watch import LAUNCHER, end_with_starter
from flash.run.trainer_rank import run_trainer_rank
from flash.transport.accept import raise_descriptor_limit

log = logging.getLogger("flash")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flash.run.processes.worker ROLE CONFIG… [key=value…]`, under torchrun; ROLE is "node" or "trainer"."""
    role, *arguments = list(sys.argv[1:] if argv is None else argv)
    begin_logging()
    raise_descriptor_limit()
    try:
        rank = Rank.from_environment()
        take_import_path()
        paths, overrides = split_arguments(arguments)
        config = load(paths, overrides)
    except FlashError as error:
        return complain(error)
    _attach(role, rank, config)
    marker = ErrorMarker(config.run_dir, os.environ[LAUNCHER])
    if marker.stands():
        return 1
    try:
        return _become(role, rank, config)
    except FlashError as error:
        # In its last life every error ends the run; that of a lost peer is the echo of another's.
        last = rank.restarts >= config.cluster.max_restarts and not isinstance(error, PeerLostError)
        if rank.node == 0 and (error.fatal or last):
            marker.write(error)
        return complain(error)
    except KeyboardInterrupt:
        return 130
    except Exception:  # the process's outermost boundary: show the bug, end with a code torchrun understands
        traceback.print_exc()
        return 1


def _attach(role: str, rank: Rank, config: Config) -> None:
    """Bind this process to its launch: it counts as a user of what the launch holds, and does not outlive it."""
    share(run_lock(config.run_dir))
    join_scratch_folder()
    end_with_starter(grace_s(config) if role == "node" and rank.node == 0 else 0, speaks=role == "node")


def begin_logging() -> None:
    """What a process of a job logs, and where."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)


def complain(error: FlashError) -> int:
    """Show an error where people look; the exit code."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    sys.stderr.write(f"flash: error: {kind}{error}\n")
    sys.stderr.flush()
    return 1


def _become(role: str, rank: Rank, config: Config) -> int:
    cpus = config.cluster.node_cpus if role == "node" else config.cluster.trainer_cpus
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    if role == "node":
        from flash.run.node_loop import run_node_loop

        return run_node_loop(rank, config)
    return run_trainer_rank(rank, config)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries that wait on a dead peer must not keep the process: engines watch it and end with it.
    os._exit(code)
