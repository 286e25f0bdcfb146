"""Measurement of this machine's CPU and memory use, from /proc. It is the load of a host whose engine is here."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_KIB = 1024
_MIB = 1 << 20
IDLE = (3, 4)
"""Columns of /proc/stat in which a processor did nothing: idle, and waiting for a disk."""
COUNTED = 8
"""Number of leading columns of /proc/stat that add up to all time. The time of guests is already part of them."""


ENOUGH = 50
"""Fewest ticks, mostly of 10 ms, over all processors that give a meaningful share."""


class MachineMeter:
    """Meter of the load between one reading and the next."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._ticks()

    def read(self) -> MachineLoad:
        """Return the CPUs that were busy since the last reading, and the memory in use now."""
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
        """Return the busy time and all time of all processors since the machine's start, in ticks."""
        columns = [int(value) for value in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1 : COUNTED + 1]]
        total = sum(columns)
        return total - sum(columns[column] for column in IDLE), total


def memory_bytes(proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the entries of /proc/meminfo by their names, in bytes."""
    rows = (row.split() for row in (proc / "meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if row[-1] == "kB"}


class MachineLoad(msgspec.Struct, frozen=True):
    """Measured load of a host's machine, with all programs that run on it."""

    cpus_busy: float | None
    """Average number of busy CPUs since the last reading; None if that was too short ago to measure."""
    cpus: int
    memory_used_mib: int
    """Memory in use, in MiB. Memory that the kernel can free at once, like the file cache, does not count."""
    memory_mib: int
