"""What a sample costs: all samples come through, and processor time is counted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import anyio.lowlevel

from benchmarks.real.engine_cost import cost, endless_model, loop_costs


def test_a_process_is_counted_by_what_it_computes() -> None:
    async def compute() -> None:
        begun = time.process_time()
        while time.process_time() < begun + 0.05:
            await anyio.lowlevel.checkpoint()

    found = anyio.run(cost, 10, compute, os.getpid())
    assert found["node"] >= 5000
    assert found["core"] >= 2500, "the same process, as the system has it"
    assert found["worker"] == 0


def test_the_loop_is_measured_and_the_bare_one(tmp_path: Path) -> None:
    found = anyio.run(loop_costs, endless_model(tmp_path / "model"), 32, 1)
    assert found.keys() == {"loop", "bare"}
    assert min(found.values()) > 0
