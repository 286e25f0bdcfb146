"""The command that `alarms.command` names, called at each alarm, one after the other."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import Any

from flash.observe.trackers.feed import Fault, Outlet

COMMAND_S = 5.0
"""Time that a call may take: less than the end of an interrupted run may."""
SAID = 1000
"""Bytes of its error output that are told."""


class AlarmCommand(Outlet):
    """Told events with an alarm's `name` and `text`.

    Args:
        command: a program and its arguments, as a shell would split them.
        seconds: that a call may take.
    """

    after = ""

    def __init__(self, command: str, seconds: float = COMMAND_S) -> None:
        super().__init__("alarms.command")
        self._words = shlex.split(command)
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, kind: str, row: dict[str, Any]) -> None:
        # A file rather than a pipe: what it has started may go on and hold it open, and it is never full.
        with tempfile.TemporaryFile() as said:
            try:
                process = self._process = subprocess.Popen(
                    self._words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    env=os.environ | {"FLASH_ALARM": row["name"]},
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise Fault(f"cannot be called: {error}") from error
            try:
                process.communicate(f"{row['text']}\n".encode(), self._seconds)
            except subprocess.TimeoutExpired:
                self.stop()
                process.wait()
                raise Fault(f"took longer than {self._seconds:g} s and was ended") from None
            if process.returncode:
                said.seek(0)
                words = said.read(SAID).decode("utf-8", "replace").strip()
                raise Fault(f"ended with code {process.returncode}: {words}")

    def stop(self) -> None:
        """End it with its kin."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
