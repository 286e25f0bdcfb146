"""A profile in figures that a person reads: where time went, how much memory it took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flash.profile.parts import Measured
from flash.types import Activity

MOST_ROWS = 8
"""Operators that are listed of each process."""
NAME_WIDTH = 64
"""Names are cut to this: those of kernels have hundreds of characters."""


def report(measured: Sequence[Measured], spans: Sequence[Activity]) -> list[str]:
    """The lines of the report."""
    lines: list[str] = []
    for part in measured:
        if part.facts.end > part.facts.begin:
            lines += [*_process(part, spans), ""]
        else:
            lines += [f"{part.facts.who}: it had started after these steps, whose samples were there before", ""]
    return [*lines, *_memory(measured)]


def _process(part: Measured, spans: Sequence[Activity]) -> Iterator[str]:
    """Where the time of a trainer rank or an engine went."""
    facts = part.facts
    seconds = facts.end - facts.begin
    what = "training steps" if facts.who.startswith("trainer") else "engine steps"
    lane = " ".join(facts.who.split()[:2])
    shares = ", ".join(f"{name} {share:.0%}" for name, share in _shares(spans, lane, facts.begin, facts.end))
    yield f"{facts.who}: {facts.steps} {what} in {seconds:.2f} s{f': {shares}' if shares else ''}"
    yield from _operators("operators, their own time", part.cpu, seconds)
    if part.gpu:
        yield from _operators("on the GPU", part.gpu, seconds)


def _shares(spans: Iterable[Activity], lane: str, begin: float, end: float) -> list[tuple[str, float]]:
    """The parts of a time that a lane of the run's timeline gives to each activity, the largest first."""
    found: defaultdict[str, float] = defaultdict(float)
    reached: defaultdict[str, float] = defaultdict(lambda: begin)
    for span in sorted(spans, key=lambda span: span.start):
        if span.lane == lane:
            # Bars of one name may overlap: no moment counts twice.
            found[span.name] += max(0.0, min(end, span.stop) - max(reached[span.name], span.start))
            reached[span.name] = max(reached[span.name], span.stop)
    shares = [(name, seconds / (end - begin)) for name, seconds in found.items() if seconds > 0]
    return sorted(shares, key=lambda share: -share[1])


def _operators(title: str, times: Mapping[str, tuple[int, float]], seconds: float) -> Iterator[str]:
    yield f"  {title:<{NAME_WIDTH}} {'seconds':>8} {'of time':>8} {'calls':>8}"
    for name, (calls, own) in sorted(times.items(), key=lambda item: -item[1][1])[:MOST_ROWS]:
        yield f"    {_cut(name):<{NAME_WIDTH - 2}} {own:8.3f} {own / seconds:8.1%} {calls:8}"


def _memory(measured: Iterable[Measured]) -> Iterator[str]:
    yield "memory"
    for part in measured:
        facts = part.facts
        if not facts.resident:
            continue  # it has made none of the steps
        words = [f"process at most {_size(facts.resident)} so far"]
        if facts.device is not None:
            words.append(f"torch on the GPU at most {_size(facts.device)}")
        elif part.grown:
            words.append(f"torch at most {_size(part.grown)} beyond what it began with")
        if facts.snapshot is not None:
            words.append(f"{facts.snapshot}: open it at pytorch.org/memory_viz")
        yield f"  {facts.who}: {'; '.join(words)}"
    if not any(part.facts.snapshot for part in measured):
        yield "  torch keeps snapshots of GPUs only; on the CPU each change is an event [memory] of the trace"


def _cut(name: str) -> str:
    longest = NAME_WIDTH - 2
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
