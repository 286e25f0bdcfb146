"""Worker processes: what their owner must not suffer from."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from envs.workers import TimeLimitError, in_worker, time_limit


def badness() -> str:
    """How soon the kernel ends the process that asks, for memory."""
    return Path("/proc/self/oom_score_adj").read_text()


@pytest.mark.integration
@pytest.mark.anyio
async def test_where_memory_runs_out_the_kernel_ends_a_worker_first() -> None:
    before = badness()
    assert await in_worker(60, badness) == "1000\n"
    assert badness() == before


def guard_left_after_time_limits() -> list[float]:
    """Seconds left of the worker's guard: after a block, and in code that has swallowed the end of its time."""
    left: list[float] = []
    with time_limit(30):
        pass
    left.append(signal.getitimer(signal.ITIMER_REAL)[0])
    with time_limit(0.01):
        try:
            signal.pause()
        except TimeLimitError:
            left.append(signal.getitimer(signal.ITIMER_REAL)[0])
    left.append(signal.getitimer(signal.ITIMER_REAL)[0])
    return left


@pytest.mark.integration
@pytest.mark.anyio
async def test_a_time_limit_leaves_a_worker_its_guard() -> None:
    assert all(100 < left <= 120 for left in await in_worker(60, guard_left_after_time_limits))
