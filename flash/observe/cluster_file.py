"""`cluster.json`: the newest picture of the cluster, and what has failed in all incarnations of the run.

A thread of its owner's writes it, never more than one picture at a time: one that comes while another is still to be
written is left out, as the next one says more. That it cannot be written ends no run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from flash.errors import RunDirectoryError
from flash.observe.cluster import Cluster, FailureTally, HubNow
from flash.observe.rundir.follow import NO_ROW, opened
from flash.observe.rundir.rundir import RunDirectory, write_atomically

WITHOUT_A_WORD = "the hub before this one ended without a word: its process was killed, or its machine is gone"
MOST_BYTES = 64 << 20
"""Of a picture that is read: ours are a thousandth of it."""


class ClusterFile:
    """See the module's docstring.

    Args:
        directory: the run's; a picture that is there is that of an earlier incarnation.
        writer: writes.
        now: Unix seconds, for any thread.
    """

    def __init__(self, directory: RunDirectory, writer: Executor, now: Callable[[], float] = time.time) -> None:
        self._path = directory.cluster
        self._writer = writer
        self._now = now
        self._host, self._process, self._since = socket.gethostname(), os.getpid(), now()
        self._hub: HubNow | None = None
        self._writing: Future[None] | None = None
        self._warned = False
        earlier: Cluster | None = None
        with suppress(RunDirectoryError):  # that no picture can be kept is told when one is written
            earlier = read_cluster(directory)
        self._incarnations = 1 if earlier is None else earlier.lives + 1
        self._tally = FailureTally() if earlier is None else FailureTally(earlier.failures, earlier.events)
        if earlier is not None and not earlier.ended:
            self._tally.failed("hub_lost", WITHOUT_A_WORD, self._since)

    def failed(self, kind: str, message: str) -> None:
        """Something has failed."""
        self._tally.failed(kind, message, self._now())

    def told(self, text: str) -> None:
        """People were told this."""
        self._tally.told(text, self._now())

    def show(self, hub: HubNow) -> str:
        """Have a picture written, unless one still is; a warning, where that has failed for the first time."""
        self._hub = hub
        if self._writing is not None and not self._writing.done():
            return ""
        failed = None if self._writing is None else self._writing.exception()
        self._writing = self._writer.submit(_write, self._path, self._picture())
        if failed is None or self._warned:
            return ""
        self._warned = True
        return f"the page of the cluster is not kept: {failed}"

    def end(self, ended: Literal["finished", "interrupted", "failed"], error: str = "") -> None:
        """Write the last picture, here and now."""
        if error:
            self.failed("run_failed", error)
        if self._writing is not None:
            self._writing.exception()  # waits: it must not come after the last one
        with suppress(RunDirectoryError):  # what the run itself leaves behind meets the same disk, and says so
            _write(self._path, self._picture(ended, error))

    def _picture(self, ended: Literal["", "finished", "interrupted", "failed"] = "", error: str = "") -> Cluster:
        return Cluster(
            at=self._now(),
            hub=self._hub,
            host=self._host,
            process=self._process,
            since=self._since,
            lives=self._incarnations,
            failures=self._tally.failures,
            events=self._tally.events,
            ended=ended,
            error=error,
        )


def read_cluster(directory: RunDirectory) -> Cluster | None:
    """The newest picture; None where there is none, or none that can be read.

    Raises:
        RunDirectoryError: what is in its place is no file.
    """
    try:
        with opened(directory.cluster) as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=Cluster)
    except (OSError, *NO_ROW):
        return None


def _write(path: Path, picture: Cluster) -> None:
    """Not forced to the disk: after a crash of the machine it is old in any case."""
    write_atomically(path, msgspec.json.encode(picture), durably=False)
