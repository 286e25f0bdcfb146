"""Entry point of a supervised process, which `flash.run.processes.forked.JobProcess` calls in the new process.

The process is a node loop with the hub, a joined node loop, or a trainer rank of a run or of `flash sft`. The exit code
is an `End`, with which the supervisor decides about a restart. A process of the first node that fails with an error
that no restart can fix writes the error to `error.json` in the run directory.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

from flash.config.load import load_checked
from flash.config.objects import take_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import ConfigError, FlashError, PeerLostError
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.launch_state import LAUNCHER, ErrorMarker, end_with_launcher, join_scratch_folder
from flash.run.processes.locks import run_lock, share
from flash.run.processes.supervisor import End
from flash.text import OneLine, harmless

log = logging.getLogger("flash")

Role = Literal["hub", "node", "trainer", "sft"]
"""Kind of a supervised process: node loop with the hub, joined node loop, trainer rank of a run or of `flash sft`."""


def main(role: str, file: Path, order: ProcessOrder) -> int:
    """Run a supervised process, and return its exit code, an `End`.

    Args:
        role: a `Role`.
        file: file with the configuration.
        order: further arguments from the launcher, such as the number of the machine and of the restarts.
    """
    start_logging()
    raise_descriptor_limit()
    take_import_path()
    join_scratch_folder()
    try:
        config = load_checked(file)
    except FlashError as error:
        print_error(error)
        return End.FINAL
    # A joined node writes nothing to the run directory, and must not keep the next launch of the run waiting.
    if role != "node":
        share(run_lock(config.run_dir))
    end_with_launcher(grace_s(config) if order.node == 0 else 0, speaks=role in ("hub", "node"))
    marker = ErrorMarker(config.run_dir, os.environ[LAUNCHER])
    # Another process of this launch has failed for good, so this restart would be of no use.
    if marker.exists():
        return End.FINAL
    try:
        return _run_role(cast(Role, role), order, config)
    except FlashError as error:
        # On the first node, every error after the last restart ends the run. A PeerLostError does not, because it only
        # follows from the error of another process.
        last = order.restarts >= config.cluster.max_restarts and not isinstance(error, PeerLostError)
        final = error.fatal or (last and order.node == 0)
        if final and order.node == 0:
            marker.write(error)
        print_error(error)
        return End.FINAL if final else End.FAILED
    except KeyboardInterrupt:
        return End.INTERRUPTED
    except Exception:  # outermost boundary of the process: show the bug, and end with a code that the supervisor knows
        with suppress(OSError):  # as in `print_error`
            sys.stderr.write(harmless(traceback.format_exc()))
        return End.FAILED


def raise_descriptor_limit() -> None:
    """Let this process, and the processes that it starts, open as many files as the system grants.

    The usual soft limit of 1,024 is less than the connections of a large run.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # some systems grant less than the limit that they report
        log.debug("the limit of open files stays as it is: %s", error)


def start_logging() -> None:
    """Send the log messages of a process of the job to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    # Log messages may quote errors of user code and of other services, which may contain any text.
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)


def print_error(error: FlashError) -> None:
    """Print an error that ends the process to standard error, in the format of the commands.

    The reader of the output may be gone. That must not change the exit code, so it is ignored.
    """
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    with suppress(OSError):
        sys.stderr.write(f"flash: error: {kind}{harmless(str(error))}\n")
        sys.stderr.flush()


def _run_role(role: Role, order: ProcessOrder, config: Config) -> End:
    """Run the loop of a role on the CPU cores that are configured for it, and return how it ended.

    Each loop is imported only here, so that a process imports nothing that it does not need.
    """
    cpus = config.cluster.trainer_cpus if role in ("trainer", "sft") else config.cluster.node_cpus
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    match role:
        case "hub":
            from flash.run.node_loop import run_node_loop

            return run_node_loop(order, config)
        case "node":
            from flash.run.joined import run_joined_loop

            return run_joined_loop(order, config)
        case "trainer":
            from flash.run.trainer_rank import run_trainer_rank

            return run_trainer_rank(order, config)
        case "sft":
            from flash.run.sft_rank import run_sft_rank

            return run_sft_rank(order, config)
