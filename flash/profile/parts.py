"""What the processes of a profile have written, and all of it as one trace on the time of the run.

torch numbers processes and flows in each file from where it likes, and counts times from the same moment in all: here
each process gets a number of its own, and times count from the begin of the run, as in `flash.observe.plots.trace`.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from flash.errors import ConfigError
from flash.profile.order import ENDING, RecordingFacts

WHOLE = f"trace{ENDING}"
"""The name of the file with all of it."""
ON_CPU = frozenset({"cpu_op", "user_annotation"})
"""Categories of what a thread does."""
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what a GPU does."""
OWN_NAMES = frozenset({"process_name", "process_labels", "process_sort_index"})
"""Metadata that is written anew."""
PER_PART = 100
"""Numbers of processes that a part may take: its own, and one for each GPU."""
FLOWS = 40
"""Bits of a flow's number that are its own in its part."""


class RecordedPart(msgspec.Struct):
    """One file, read."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    flash: RecordingFacts | None = None


class Measured(msgspec.Struct):
    """What a part comes down to."""

    facts: RecordingFacts
    cpu: dict[str, tuple[int, float]]
    """Of each operator, how often it was called, and its own seconds, without those that it called."""
    gpu: dict[str, tuple[int, float]]
    """The same of kernels."""
    grown: int
    """The most bytes of CPU memory that torch had beyond what it had when it began; 0: it was not asked."""


def parts_in(folder: Path) -> list[Path]:
    """The files that processes have written: trainer ranks, engines."""
    kinds = ("trainer", "engine")
    found = [file for file in folder.glob(f"*{ENDING}") if file.name.partition("-")[0] in kinds]
    return sorted(found, key=lambda file: (kinds.index(file.name.partition("-")[0]), len(file.name), file.name))


def read_part(file: Path) -> tuple[RecordedPart, RecordingFacts]:
    """One file. Raises ConfigError: it cannot be read, or is none of ours."""
    try:
        part = msgspec.json.decode(gzip.decompress(file.read_bytes()), type=RecordedPart)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if part.flash is None:
        raise ConfigError(f"{file} does not say what was recorded: expected a file of `flash profile`")
    return part, part.flash


@contextmanager
def whole_trace(file: Path, begin: float) -> Generator[WholeTrace]:
    """Write the trace of what is added within the block, as a whole or not at all; its times count from `begin`."""
    draft = file.with_name(f".{file.name}")
    try:
        with gzip.open(draft, "wb", compresslevel=6) as stream:
            trace = WholeTrace(stream.write, begin)
            stream.write(b'{"displayTimeUnit":"ms","traceEvents":[')
            yield trace
            stream.write(b"\n]}\n")
        os.replace(draft, file)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


class WholeTrace:
    """The events of a trace, one after the other.

    Args:
        write: takes their bytes.
        begin: Unix seconds from which their times count.
    """

    def __init__(self, write: Callable[[bytes], object], begin: float) -> None:
        self._write = write
        self._begin_ns = round(begin * 1e9)
        self._separator = b"\n"
        self._parts = 0

    def put(self, event: Mapping[str, Any]) -> None:
        """One event, whose time is that of the trace."""
        self._write(self._separator + msgspec.json.encode(event))
        self._separator = b",\n"

    def add(self, part: RecordedPart, facts: RecordingFacts) -> Measured:
        """Write what one part holds, and measure it."""
        self._parts += 1
        shift = (part.base_ns - self._begin_ns) / 1e3
        numbers = _Numbers(self._parts * PER_PART)
        meter = _Meter()
        for event in map(msgspec.json.decode, part.events):
            process = event.get("pid")
            if not isinstance(process, int):
                continue  # what torch says of the recording itself
            meter.see(event)
            if event.get("name") in OWN_NAMES:
                numbers.label(process, event)
                continue
            event["pid"] = numbers.of(process)
            if "id" in event:
                event["id"] += self._parts << FLOWS
            if event["ph"] == "M":
                event.pop("ts", None)
            else:
                event["ts"] += shift
            self.put(event)
        for event in numbers.names(facts.who):
            self.put(event)
        return meter.measured(facts)


class _Numbers:
    """The processes of one part, numbered anew."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._numbers: dict[int, int] = {}
        self._labels: dict[int, str] = {}

    def of(self, process: int) -> int:
        return self._numbers.setdefault(process, self._first + len(self._numbers))

    def label(self, process: int, event: Mapping[str, Any]) -> None:
        label = str(event.get("args", {}).get("labels", "CPU"))
        if label != "CPU":
            self._labels[process] = label

    def names(self, who: str) -> Iterator[dict[str, Any]]:
        for process, number in self._numbers.items():
            name = f"{who}, {label}" if (label := self._labels.get(process)) else who
            yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}


class _Meter:
    """Adds up a part's events."""

    def __init__(self) -> None:
        self._threads: defaultdict[tuple[int, Any], list[tuple[float, float, str]]] = defaultdict(list)
        self._gpu: defaultdict[str, list[float]] = defaultdict(list)
        self._grown = 0

    def see(self, event: Mapping[str, Any]) -> None:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind in ON_CPU and event["ph"] == "X":
            self._threads[event["pid"], event["tid"]].append((event["ts"], event["dur"], name))
        elif kind in ON_GPU and event["ph"] == "X":
            self._gpu[name].append(event["dur"] / 1e6)
        elif name == "[memory]" and event["args"].get("Device Type") == 0:
            self._grown = max(self._grown, event["args"].get("Total Allocated", 0))

    def measured(self, facts: RecordingFacts) -> Measured:
        cpu: defaultdict[str, list[float]] = defaultdict(list)
        for events in self._threads.values():
            for name, seconds in own_times(events):
                cpu[name].append(seconds)
        return Measured(facts, _sums(cpu), _sums(self._gpu), self._grown)


def _sums(times: Mapping[str, list[float]]) -> dict[str, tuple[int, float]]:
    return {name: (len(seconds), sum(seconds)) for name, seconds in times.items()}


def own_times(events: Iterable[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """Of nested events of one thread, given as begin, duration (microseconds) and name: the seconds that are their own.

    Conservation: those of all events add up to the time in which there was any.
    """
    opened: list[tuple[float, str, list[float]]] = []
    for start, duration, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while opened and opened[-1][0] <= start:
            yield _closed(opened)
        stop = start + duration
        if opened:
            # torch rounds begins and ends, by which one may seem to outlast the one that called it.
            stop = min(stop, opened[-1][0])
            opened[-1][2][0] -= stop - start
        opened.append((stop, name, [stop - start]))
    while opened:
        yield _closed(opened)


def _closed(opened: list[tuple[float, str, list[float]]]) -> tuple[str, float]:
    _, name, (own,) = opened.pop()
    return name, own / 1e6
