"""What is to be profiled: an order that `flash profile` leaves to the processes of its run, and what each answers.

Each process writes one file of Chrome trace events, whose times count from its `baseTimeNanoseconds`, with its
`RecordingFacts`.
"""

from __future__ import annotations

import gzip
import logging
import os
import resource
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("flash")

VARIABLE = "FLASH_PROFILE"
"""The environment variable that holds the order; without it nothing is profiled."""
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables of torch's profiler: it would tell of each start, and of memory that was there before."""
ENDING = ".json.gz"
"""Of the files that processes write."""


class ProfileOrder(msgspec.Struct, frozen=True):
    """The steps to profile, and where what is recorded goes."""

    folder: str
    """An absolute path."""
    first: int
    """The version with which the first profiled step begins."""
    stop: int
    """The version that the last one makes."""

    def covers(self, version: int) -> bool:
        """Whether a step that begins with this version is to be profiled."""
        return self.first <= version < self.stop

    def file(self, name: str) -> Path:
        """Where the process of this name writes."""
        return Path(self.folder) / f"{name}{ENDING}"

    def give(self) -> None:
        """Leave it to the processes that this one starts, whose profilers are to say nothing of themselves."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()
        for name, level in QUIET.items():
            os.environ.setdefault(name, level)


class RecordingFacts(msgspec.Struct, frozen=True):
    """What a process says of its recording."""

    who: str
    """Its name, for people."""
    begin: float
    """Unix seconds. Of an engine that had no version of the steps that were ordered, as its end."""
    end: float
    steps: int
    """Training steps that it made meanwhile, of an engine its own steps."""
    resident: int
    """The most memory that the process has had so far, in bytes."""
    device: int | None = None
    """The most that torch has had on the GPU while it recorded, in bytes; None: there is no GPU."""
    snapshot: str | None = None
    """The file of the GPU's memory."""


def ordered() -> ProfileOrder | None:
    """The order of whoever has started this process; None: nothing is to be profiled."""
    text = os.environ.get(VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=ProfileOrder)


def resident_peak() -> int:
    """The most memory that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_part(file: Path, facts: RecordingFacts, events: Iterable[Mapping[str, Any]]) -> None:
    """Write what was recorded, as a whole; without a place for the file it is lost, and the run is not."""
    made = {"baseTimeNanoseconds": round(facts.begin * 1e9), "flash": facts, "traceEvents": list(events)}
    part = file.with_name(f".{file.name}")
    try:
        part.write_bytes(gzip.compress(msgspec.json.encode(made)))
        os.replace(part, file)
    except OSError as error:
        log.warning("the profile of %s was not written to %s: %s", facts.who, file, error)
        with suppress(OSError):
            part.unlink()
