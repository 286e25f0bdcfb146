"""Marker of an error that no restart can fix.

A restarted process sees it, and ends at once instead of failing again.
"""

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
"""Name of the marker file in the run directory."""


class ErrorMarker:
    """File `error.json` with the error that ended this launch, so that a restart does not repeat the error.

    If the disk of the run directory is full, the file is written to the job's folder for temporary files.
    """

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / ERROR_FILE
        self._launch = launch

    def stands(self) -> bool:
        """Return True if an earlier incarnation of the same launch ended with an error that no restart can fix."""
        return self.message() is not None

    def message(self) -> str | None:
        """Return the message of the error that ended an earlier incarnation of the same launch, or None."""
        for path in self._places():
            try:
                row = json.loads(path.read_text())
                if row["launch"] == self._launch:
                    return str(row["message"])
            except (OSError, ValueError, KeyError):
                continue  # no marker in this place
        return None

    def _places(self) -> list[Path]:
        """Return the possible paths of the marker, the preferred one first."""
        scratch = os.environ.get(SCRATCH)
        return [self._path] if scratch is None else [self._path, Path(scratch) / ERROR_FILE]

    def write(self, error: FlashError) -> None:
        """Write the error to the first place that can be written. Log a warning if none can."""
        row = {"launch": self._launch, "error": type(error).__name__, "message": str(error), "time": time.time()}
        problems: list[str] = []
        for path in self._places():
            # No exception is raised here: a full disk must not hide the error itself.
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(row, indent=2).encode())
                return
            except (OSError, RunDirectoryError) as problem:
                problems.append(str(problem))
        log.warning("; ".join(problems))
