"""Where the seconds go after a fault: what is born from then on, and what it has used of the processors by each stage.

Processes are looked at from outside, by role, as the faults pick their victims. A stage is a moment after a fault: a
process of a role is there, the trainer ranks have published, an engine has loaded a version, a step is trained. Its
cost is the processor time that processes born since the fault have used by then, on all hosts.
"""

from __future__ import annotations

import os
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from benchmarks.form import Row
from benchmarks.real.chaos_faults import Struck, role
from benchmarks.rig.hosts import Hosts
from flash.types import Activity

LOOK_S = 0.25
"""Between two looks at all processes."""
SERVERS = b"multiprocessing.forkserver"
"""Of which others are forked: in its command line."""
PUBLISHED, STEP, ALL = "trainer_published", "step_trained", "all_engines_in_step"
"""Stages that are no birth of a process: ranks that have begun since have a version ready; a step; a step in which
there are all engines again, after a core that has begun since."""


class Step(NamedTuple):
    """A step that was trained."""

    at: float
    """Unix seconds."""
    engines: int
    most: int
    """Engines that a step of this run ever had."""


class Life(msgspec.Struct):
    """A process, as it was seen."""

    host: int
    role: str
    born: float
    """Unix seconds."""
    looks: list[tuple[float, float]]
    """When, and how much processor time it had used by then, in seconds."""

    def used_by(self, moment: float) -> float:
        """Seconds of processor time."""
        seen = bisect_right(self.looks, (moment, float("inf")))
        return self.looks[seen - 1][1] if seen else 0.0


class Trace:
    """All processes of the hosts, from the first look to the last."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self._hosts = hosts
        self._number = number
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self.lives: dict[tuple[int, float], Life] = {}
        """By process id, and when it began."""

    async def run(self) -> None:
        """Waits for nothing but the clock. Produces looks, until it is cancelled."""
        while True:
            for host in range(self._number):
                for pid in self._hosts.processes(host):
                    self._look(host, pid)
            await anyio.sleep(LOOK_S)

    def _look(self, host: int, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has ended
            return
        born = self._boot + int(fields[19]) / self._ticks
        life = self.lives.setdefault((pid, born), Life(host, "", born, []))
        # A process may say only after a while what it is.
        life.role = role(command) or ("server" if SERVERS in command else life.role)
        life.looks.append((time.time(), (int(fields[11]) + int(fields[12])) / self._ticks))


def stages(
    fault: Struck, until: float, lives: Iterable[Life], spans: Iterable[Activity], steps: Iterable[Step]
) -> dict[str, tuple[float, float]]:
    """By stage, in order: seconds since a fault, and processor seconds of what was born since; up to a moment."""
    born = [life for life in lives if fault.at < life.born < until]
    begun: dict[str, float] = {}
    for life in born:
        begun[life.role] = min(life.born, begun.get(life.role, until))
    moments = {f"{who}_begins": [moment] for who, moment in begun.items() if who}
    trainer, core = begun.get("trainer", until), begun.get("core", until)
    moments[PUBLISHED] = [span.stop for span in spans if span.name == "publish" and span.start > trainer]
    moments[STEP] = [step.at for step in steps if step.at > fault.at]
    moments[ALL] = [step.at for step in steps if step.at > core and step.engines == step.most]
    found = {name: min(after) for name, after in moments.items() if after and min(after) < until}
    return {
        name: (moment - fault.at, sum(life.used_by(moment) for life in born))
        for name, moment in sorted(found.items(), key=lambda item: item[1])
    }


def rows(
    struck: Sequence[Struck], end: float, lives: Sequence[Life], spans: Sequence[Activity], steps: Sequence[Step]
) -> list[Row]:
    """By kind of fault and stage, how many reached it, and medians of these; each fault is followed up to the next."""
    seen: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for fault, after in zip(struck, [*(each.at for each in struck[1:]), end], strict=True):
        for stage, spent in stages(fault, after, lives, spans, steps).items():
            seen[fault.kind, stage].append(spent)
    figures: list[Row] = []
    for (kind, stage), spent in sorted(seen.items(), key=lambda item: (item[0][0], _median(item[1], 0))):
        figures += [
            Row(f"{kind}, {len(spent)} times", f"{stage}_after_s", "s", _median(spent, 0)),
            Row(f"{kind}, {len(spent)} times", f"{stage}_processor_s", "s", _median(spent, 1)),
        ]
    return figures


def _median(pairs: Iterable[tuple[float, float]], which: int) -> float:
    return statistics.median(pair[which] for pair in pairs)
