"""What a supervisor starts: the first node's loop, which has the hub, a loop that joins, or a trainer rank, of
a run or of `flash sft`.

Its exit code is an `End`. An error that a restart cannot mend is left as `error.json` in the run directory where the
process belongs to the first node.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Literal, cast

from flash.config.load import load_checked
from flash.config.objects import take_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import ConfigError, FlashError, PeerLostError
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.locks import run_lock, share
from flash.run.processes.scratch import join_scratch_folder
from flash.run.processes.starter_watch import LAUNCHER, end_with_launcher
from flash.run.processes.supervisor import End
from flash.text import OneLine, harmless
from flash.transport.server import raise_descriptor_limit

log = logging.getLogger("flash")

Role = Literal["hub", "node", "trainer", "sft"]


def main(role: str, file: Path, order: ProcessOrder) -> int:
    """Do the work of a supervised process, and return its exit code, an `End`. `role`: as of `Role`."""
    begin_logging()
    raise_descriptor_limit()
    take_import_path()
    join_scratch_folder()
    try:
        config = load_checked(file)
    except FlashError as error:
        complain(error)
        return End.FINAL
    if role != "node":
        share(run_lock(config.run_dir))
    end_with_launcher(grace_s(config) if order.node == 0 else 0, speaks=role in ("hub", "node"))
    marker = ErrorMarker(config.run_dir, os.environ[LAUNCHER])
    if marker.stands():
        return End.FINAL
    try:
        return _become(cast(Role, role), order, config)
    except FlashError as error:
        # In its last incarnation every error ends the run; that of a lost peer is the echo of another's.
        last = order.restarts >= config.cluster.max_restarts and not isinstance(error, PeerLostError)
        final = error.fatal or (last and order.node == 0)
        if final and order.node == 0:
            marker.write(error)
        complain(error)
        return End.FINAL if final else End.FAILED
    except KeyboardInterrupt:
        return End.INTERRUPTED
    except Exception:  # the process's outermost boundary: show the bug, end with a code that the supervisor knows
        sys.stderr.write(harmless(traceback.format_exc()))
        return End.FAILED


def begin_logging() -> None:
    """Send what a process of a job logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    # Errors of user code and of other services are logged, with whatever text they have.
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)


def complain(error: FlashError) -> None:
    """Show an error on stderr, where people look."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    sys.stderr.write(f"flash: error: {kind}{harmless(str(error))}\n")
    sys.stderr.flush()


def _become(role: Role, order: ProcessOrder, config: Config) -> End:
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
            from flash.run.sft.rank import run_sft_rank

            return run_sft_rank(order, config)
