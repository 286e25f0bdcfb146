"""What this machine's processors and memory do, from /proc: for the load of a host whose engine is here."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_KIB = 1024
_MIB = 1 << 20
IDLE = (3, 4)
"""Columns of /proc/stat in which a processor did nothing: idle, and waiting for a disk."""
COUNTED = 8
"""Columns of /proc/stat that add up to all time; time of guests is in the others already."""


ENOUGH = 50
"""Ticks, mostly of 10 ms, over all processors: a share of fewer says nothing."""


class MachineMeter:
    """Measures between one reading and the next."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._ticks()

    def read(self) -> MachineLoad:
        """CPUs that were busy since the last reading, and the memory in use now."""
        cpus = os.cpu_count() or 1
        memory = memory_bytes(self._proc)
        used = memory["MemTotal"] - memory["MemAvailable"]
        return MachineLoad(self._busy(cpus), cpus, used // _MIB, memory["MemTotal"] // _MIB)

    def _busy(self, cpus: int) -> float | None:
        busy, total = self._ticks()
        busy_before, total_before = self._last
        if total - total_before < ENOUGH:
            return None
        self._last = busy, total
        return round(cpus * (busy - busy_before) / (total - total_before), 2)

    def _ticks(self) -> tuple[int, int]:
        """Busy and all time of all processors since the machine's start."""
        columns = [int(value) for value in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1 : COUNTED + 1]]
        total = sum(columns)
        return total - sum(columns[column] for column in IDLE), total


def memory_bytes(proc: Path = Path("/proc")) -> dict[str, int]:
    """What /proc/meminfo says, by its names, in bytes."""
    rows = (row.split() for row in (proc / "meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if row[-1] == "kB"}


class MachineLoad(msgspec.Struct, frozen=True):
    """What a host's machine does, measured, with everything that runs on it."""

    cpus_busy: float | None
    """On average since the last look; None at the first."""
    cpus: int
    memory_used_mib: int
    """Without what the kernel gives back at once, like its cache of files."""
    memory_mib: int
