"""The process that tells a tracker, `python -m flash.observe.trackers.teller RUN_DIR NAME`, and the outlet to it.

It follows the run's files and is no part of the run: whatever the tracker does, also hang or crash, the run goes on.
Each event is a line of its input, the event's kind, at which it tells what is new in these files. It answers with a
line that says what is wrong, if anything. What the tracker prints goes to its log.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from flash.config.observe import TrackerName
from flash.errors import FlashError
from flash.observe.rundir.rundir import RunDirectory, writing
from flash.observe.trackers.feed import Fault, Outlet
from flash.observe.trackers.tracking import Tracking, folder_of, held
from flash.text import one_line

LOOK_S = 0.5
"""Between two looks whether the run still lives."""
AGAIN_S = 1.0
"""Until a tracker that fails at the end is tried again."""
LAST = ("summary", "error")
"""Kinds of a run's last event, one that is well and one that failed."""
KILLED = "killed"
LONGEST = 500
"""Characters of an error that are told."""


class TrackerOutlet(Outlet):
    """Starts the process, and tells it that there is something new."""

    catches_up = True

    def __init__(self, directory: RunDirectory, tracker: TrackerName) -> None:
        super().__init__(f"the tracker {tracker}")
        self._directory = directory
        self._tracker: TrackerName = tracker
        self._again = f"`flash track {directory.path} --to {tracker}` tells"
        self.after = f"; the run goes on without it, and {self._again} later what it misses"
        self._log = folder_of(directory) / f"{tracker}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        with writing(self._log.parent):
            self._log.parent.mkdir(exist_ok=True)
            log = self._log.open("ab")
        with log:
            command = [sys.executable, "-m", __name__, str(self._directory.path), self._tracker]
            pipe = subprocess.PIPE
            # In a session of its own: an interrupt is for the run, which then says that it is over.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, bufsize=0, start_new_session=True
            )

    def tell(self, kind: str, row: dict[str, Any]) -> None:
        process = self._process
        if process is None:
            raise Fault("was not started")
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(f"{kind}\n".encode())
        answer = process.stdout.readline().decode("utf-8", "replace")
        if not answer:
            raise Fault(f"ended with code {process.wait()}: see {self._log}")
        if fault := answer.strip():
            raise Fault(f"failed: {fault}; it is tried again")

    def close(self) -> None:
        if self._process is not None:
            with self._process as process:
                assert process.stdin is not None
                process.stdin.close()
                process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def missed(self, given: int, failed: int, dropped: int) -> str:
        try:
            left = Tracking(self._directory, self._tracker).left()
        except FlashError as error:
            return f"{self.name}: {error}"
        return f"{self.name} was not told {left} rows: {self._again} them" if left else ""


def main(run_dir: str, name: str) -> None:
    """Tell until the run is over, then what is left."""
    os.nice(5)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    parent, tracker = os.getppid(), cast("TrackerName", name)
    with held(RunDirectory(Path(run_dir)), tracker, wait=True):
        tracking = Tracking(RunDirectory(Path(run_dir)), tracker)
        kind = fault = ""
        while kind not in (*LAST, KILLED):
            kind = _next(parent)
            fault = _fault(tracking.send)
            if kind not in LAST:
                _answer(answers, fault)
        while fault and kind != KILLED:  # the run ends this process when its deadline is over
            time.sleep(AGAIN_S)
            fault = _fault(tracking.send)
        _answer(answers, _fault(lambda: tracking.close(failed=kind != LAST[0])))


def _next(parent: int) -> str:
    """The kind of the next event, or that there is no run any more."""
    while not select.select([0], [], [], LOOK_S)[0]:
        if os.getppid() != parent:  # another process of the run may hold our input open after its death
            return KILLED
    return os.read(0, 100).decode().strip() or KILLED


def _fault(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:  # the tracker's code: whatever it raises is its failure, not the run's
        return one_line(f"{type(error).__name__}: {error}")[:LONGEST]
    return ""


def _answer(answers: TextIO, fault: str) -> None:
    with suppress(OSError):  # nobody listens any more
        answers.write(f"{fault}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
