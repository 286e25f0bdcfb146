"""The mark of an error that no restart could mend: restarted processes end at once instead of failing the same way."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from flash.errors import FlashError, RunDirectoryError
from flash.observe.rundir.rundir import write_atomically
from flash.run.processes.scratch import VARIABLE as SCRATCH

log = logging.getLogger("flash")

ERROR_FILE = "error.json"
"""In the run directory."""


class ErrorMarker:
    """`error.json`: the error that ended this launch, so that a restart does not repeat it.

    Where the disk of the run directory is full it lies in the job's folder for temporary files.
    """

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / ERROR_FILE
        self._launch = launch

    def stands(self) -> bool:
        """Whether an earlier incarnation of the same launch ended for good."""
        return self.message() is not None

    def message(self) -> str | None:
        """The error that ended an earlier incarnation of the same launch for good."""
        for path in self._places():
            try:
                row = json.loads(path.read_text())
                if row["launch"] == self._launch:
                    return str(row["message"])
            except (OSError, ValueError, KeyError):
                continue  # none there
        return None

    def _places(self) -> list[Path]:
        """Best first."""
        scratch = os.environ.get(SCRATCH)
        return [self._path] if scratch is None else [self._path, Path(scratch) / ERROR_FILE]

    def write(self, error: FlashError) -> None:
        """Leave the error behind. A full disk must not hide the error itself."""
        row = {"launch": self._launch, "error": type(error).__name__, "message": str(error), "time": time.time()}
        problems: list[str] = []
        for path in self._places():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(row, indent=2).encode())
                return
            except (OSError, RunDirectoryError) as problem:
                problems.append(str(problem))
        log.warning("; ".join(problems))
