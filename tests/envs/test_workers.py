"""Worker processes: what their owner must not suffer from."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.workers import in_worker


def badness() -> str:
    """How soon the kernel ends the process that asks, for memory."""
    return Path("/proc/self/oom_score_adj").read_text()


@pytest.mark.integration
@pytest.mark.anyio
async def test_where_memory_runs_out_the_kernel_ends_a_worker_first() -> None:
    before = badness()
    assert await in_worker(60, badness) == "1000\n"
    assert badness() == before
