"""What torchrun starts: local rank 0 becomes the node loop, the others trainer ranks.

An error ends the process with code 1; one that a restart cannot mend is left as `error.json` in the run directory, so
that restarted processes end at once instead of failing the same way again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from flash.config.load import load, split_arguments
from flash.config.tree import Config
from flash.errors import ConfigError, FlashError
from flash.run.rendezvous import Rank
from flash.run.trainer_rank import run_trainer_rank

log = logging.getLogger("flash")

ERROR_FILE = "error.json"
"""In the run directory: the error that no restart could mend."""


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flash.run.worker CONFIG… [key=value…]`, under torchrun."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
    try:
        rank = Rank.from_environment()
        paths, overrides = split_arguments(arguments)
        config = load(paths, overrides)
    except FlashError as error:
        return _complain(error)
    marker = ErrorMarker(config.run_dir)
    if rank.restarts > 0 and marker.stands():
        return 1
    try:
        return _become(rank, config)
    except FlashError as error:
        if error.fatal and rank.node == 0:
            marker.write(error)
        return _complain(error)
    except KeyboardInterrupt:
        return 130
    except Exception:  # the process's outermost boundary: show the bug, end with a code torchrun understands
        traceback.print_exc()
        return 1


def _complain(error: FlashError) -> int:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    sys.stderr.write(f"flash: error: {kind}{error}\n")
    sys.stderr.flush()
    return 1


class ErrorMarker:
    """`error.json`: the error that ended this launch, so that a restart does not repeat it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ERROR_FILE
        self._launch = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.getppid()}"

    def stands(self) -> bool:
        """Whether an earlier life of the same launch ended for good."""
        try:
            return bool(json.loads(self._path.read_text())["launch"] == self._launch)
        except (OSError, ValueError, KeyError):
            return False

    def write(self, error: FlashError) -> None:
        """Leave the error behind. A full disk must not hide the error itself."""
        row = {
            "launch": self._launch,
            "error": type(error).__name__,
            "message": str(error),
            "time": time.time(),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(row, indent=2))
        except OSError as problem:
            log.warning("cannot write %s: %s", self._path, problem)


def _become(rank: Rank, config: Config) -> int:
    cpus = config.cluster.node_cpus if rank.local == 0 else config.cluster.trainer_cpus
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    if rank.local == 0:
        from flash.run.node_loop import run_node_loop

        return run_node_loop(rank, config)
    return run_trainer_rank(rank, config)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries that wait on a dead peer must not keep the process: engines watch it and end with it.
    os._exit(code)
