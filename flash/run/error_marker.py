"""The mark of an error that no restart could mend: restarted processes end at once instead of failing the same way."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from flash.errors import FlashError

log = logging.getLogger("flash")

ERROR_FILE = "error.json"
"""In the run directory."""


class ErrorMarker:
    """`error.json`: the error that ended this launch, so that a restart does not repeat it."""

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / ERROR_FILE
        self._launch = launch

    def stands(self) -> bool:
        """Whether an earlier life of the same launch ended for good."""
        return self.message() is not None

    def message(self) -> str | None:
        """The error that ended an earlier life of the same launch for good."""
        try:
            row = json.loads(self._path.read_text())
            return str(row["message"]) if row["launch"] == self._launch else None
        except (OSError, ValueError, KeyError):
            return None

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
