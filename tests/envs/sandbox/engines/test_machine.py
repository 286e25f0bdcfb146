"""The load of this machine."""

from __future__ import annotations

import os

from envs.sandbox.engines.machine import MachineLoad, MachineMeter


def test_the_load_of_a_machine_is_measured_between_two_readings(tmp_path):
    cpus = os.cpu_count() or 1
    (tmp_path / "meminfo").write_text(
        "MemTotal: 4096000 kB\nMemFree: 1 kB\nMemAvailable: 1024000 kB\nHugePages_Total: 0\n"
    )
    # User, nice, system, idle, iowait, irq, softirq, steal; the guest's time is part of the user's.
    (tmp_path / "stat").write_text("cpu  100 0 50 800 50 0 0 0 100 0\ncpu0 1 2 3\n")
    meter = MachineMeter(tmp_path)
    assert meter.read() == MachineLoad(None, cpus, 3000, 4000)
    (tmp_path / "stat").write_text("cpu  150 0 60 1100 80 5 5 5 150 0\ncpu0 1 2 3\n")
    assert meter.read() == MachineLoad(round(cpus * 75 / 405, 2), cpus, 3000, 4000)
