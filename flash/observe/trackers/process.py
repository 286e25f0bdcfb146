"""The process beside a run that tells a tracker: `python -m flash.observe.trackers.process RUN_DIR NAME`.

It follows the run's files and is no part of the run: whatever the tracker does, also hang or crash, the run goes on.
Its input says how the run ended, its output is lines of warning for people; what the tracker prints goes to its log.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TextIO, cast

from flash.config.track import TrackerName
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.text import clean
from flash.observe.trackers.tracking import Tracking, held

EVERY_S = 0.5
"""Between two looks at the run's files."""
AGAIN_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Until a tracker that has failed is tried again; the last one from then on."""
ORPHAN_S = 60.0
"""For what is left where the run was killed: nobody else bounds it then."""
FAILED, ENDED = b"failed", b"ended"
"""How the run ended, as the input says; nothing: it was killed."""
LONGEST = 500
"""Characters of an error that are told."""


class Told(Protocol):
    """What `Telling` uses of a `Tracking`."""

    def send(self) -> None: ...
    def left(self) -> int: ...
    def close(self, *, failed: bool) -> None: ...


class Telling:
    """Tells a tracker, and tries again where it fails. Its first failure is given to `warn`."""

    def __init__(self, tracking: Told, name: str, warn: Callable[[str], None]) -> None:
        self._tracking = tracking
        self._name = name
        self._warn = warn
        self._warned = False
        self._failures = 0
        self._again = 0.0

    def look(self, now: float) -> None:
        """Tell what is new, if it is time."""
        if now < self._again:
            return
        try:
            self._tracking.send()
        except Exception as error:  # the tracker's code: whatever it raises is its failure, not the run's
            self._failed(error)
            self._again = now + AGAIN_S[min(self._failures, len(AGAIN_S)) - 1]
        else:
            self._failures = 0

    def end(self, *, failed: bool, now: Callable[[], float], sleep: Callable[[float], None], limit: float) -> None:
        """Tell what is left, as long as it takes, though not beyond `limit`."""
        self._again = 0.0
        while True:
            self.look(now())
            if not self._failures or now() >= limit:
                break
            self._again = 0.0
            sleep(AGAIN_S[0])
        try:
            self._tracking.close(failed=failed)
        except Exception as error:  # as above
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if not self._warned:
            self._warned = True
            what = clean(f"{type(error).__name__}: {error}")[:LONGEST]
            self._warn(f"the tracker {self._name} failed: {what}; the run goes on, and it is tried again")


def main(run_dir: str, name: str) -> None:
    """Tell until the run is over, then what is left."""
    os.nice(5)
    said = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # Of people who interrupt the run: it says itself when it is over, and they are in no session with us.
    parent = os.getppid()
    directory = RunDirectory(Path(run_dir))
    known = cast("TrackerName", name)
    ended: bytes | None = None
    while ended is None:
        with held(directory, known) as alone:
            if alone:
                telling = Telling(Tracking(directory, known), name, lambda line: _say(said, line))
                while ended is None:
                    telling.look(time.monotonic())
                    ended = _end(parent)
                limit = float("inf") if ended in (FAILED, ENDED) else time.monotonic() + ORPHAN_S
                telling.end(failed=ended != ENDED, now=time.monotonic, sleep=time.sleep, limit=limit)
                return
        ended = _end(parent)


def _end(parent: int) -> bytes | None:
    """How the run ended; None after a while in which it did not."""
    if select.select([0], [], [], EVERY_S)[0]:
        return os.read(0, 100)
    # Another process of the run may hold our input open after its death.
    return b"" if os.getppid() != parent else None


def _say(said: TextIO, line: str) -> None:
    with suppress(OSError):  # nobody listens any more
        said.write(line + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
