"""The processes beside a run that tell its trackers: it starts them, and waits for them at its end.

The run never waits for a tracker before its end, and fails with none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from flash.config.track import TrackerName
from flash.errors import FlashError
from flash.observe.rundir.rundir import RunDirectory, writing
from flash.observe.trackers.process import ENDED, FAILED
from flash.observe.trackers.tracking import Tracking, folder_of, place_of

MOST = 1 << 16
"""Bytes of a process's warnings that are read at once."""
SILENT_S = 60.0
"""Until a tracker that has not taken a step's row is told of: its import and its first connection take some of it."""


class TrackFeed:
    """Start it with a run, read what went wrong, close it with the run. `now` gives seconds."""

    def __init__(
        self, directory: RunDirectory, names: Sequence[TrackerName], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._now = now
        self._awaited: dict[TrackerName, tuple[int, float]] = {}
        """A step whose row each is to take, and since when."""
        self._silent: set[TrackerName] = set()
        """Those that were told of for their silence, or for another failure."""
        self._processes: dict[TrackerName, subprocess.Popen[bytes]] = {}
        for name in dict.fromkeys(names):
            self._processes[name] = self._start(name)
        self._over: set[TrackerName] = set()

    def warnings(self) -> list[str]:
        """What has gone wrong since the last time."""
        return [line for name, process in self._processes.items() for line in self._heard(name, process)]

    def awaited(self, step: int) -> list[str]:
        """The row of a step is there to be told; who has not taken that of an earlier one for long, once each."""
        return [line for name in self._processes for line in self._late(name, step)]

    def _late(self, name: TrackerName, step: int) -> Iterator[str]:
        first, since = self._awaited.setdefault(name, (step, self._now()))
        with suppress(FlashError):  # what is wrong with its files is told at the end
            if place_of(self._directory, name).step >= first:
                self._awaited[name] = step, self._now()
                return
        seconds = self._now() - since
        if seconds > SILENT_S and name not in self._silent | self._over:
            self._silent.add(name)
            again = f"`flash track {self._directory.path} --to {name}`"
            yield (
                f"the tracker {name} has not answered for {seconds:.0f} s: it hangs, or cannot be reached; the run "
                f"goes on without it, and {again} tells later what it misses"
            )

    def end(self, *, failed: bool) -> None:
        """Have all of them tell what is left, and how the run ended. Call `close` then."""
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(FAILED if failed else ENDED)
            process.stdin.close()

    def close(self, seconds: float) -> list[str]:
        """Wait for them, so long at most. What went wrong, and what was not told."""
        processes, self._processes = self._processes, {}
        limit = time.monotonic() + seconds
        found: list[str] = []
        for name, process in processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._over.add(name)
                found.append(f"the tracker {name} did not end in time: see deadlines.sink")
            found += [*self._heard(name, process), *self._missed(name)]
            assert process.stdout is not None
            process.stdout.close()
        return found

    def _start(self, name: TrackerName) -> subprocess.Popen[bytes]:
        folder = folder_of(self._directory)
        with writing(folder):
            folder.mkdir(exist_ok=True)
            log = (folder / f"{name}.log").open("ab")
        with log:
            command = [sys.executable, "-m", "flash.observe.trackers.process", str(self._directory.path), name]
            pipe = subprocess.PIPE
            # In a session of its own: an interrupt is for the run, which then says that it is over.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, bufsize=0, start_new_session=True)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _heard(self, name: TrackerName, process: subprocess.Popen[bytes]) -> Iterator[str]:
        assert process.stdout is not None
        code = process.poll()
        for line in (process.stdout.read(MOST) or b"").decode("utf-8", "replace").splitlines():
            self._silent.add(name)
            yield line
        if code and name not in self._over:
            self._over.add(name)
            log = folder_of(self._directory) / f"{name}.log"
            yield f"the tracker {name} ended with code {code}: see {log}; the run goes on"

    def _missed(self, name: TrackerName) -> Iterator[str]:
        try:
            left = Tracking(self._directory, name).left()
        except FlashError as error:
            yield f"the tracker {name}: {error}"
            return
        if left:
            again = f"`flash track {self._directory.path} --to {name}`"
            yield f"the tracker {name} was not told {left} rows: {again} tells them"
