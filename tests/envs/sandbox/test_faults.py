"""A short form of `benchmarks.sandbox.faults`: real containers, with everything killed at random under load."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.sandbox.faults import Plan, faults, rows

pytestmark = [pytest.mark.anyio, pytest.mark.integration, pytest.mark.timeout(500)]

PLAN = Plan(seconds=20, seed=1, processes=2, users=2, container_every_s=1.5, service_every_s=7, engine_every_s=7)


@pytest.fixture
def _own_engine(engine_url) -> None:
    """Images can be made here; the engine itself is the run's own, because it is killed."""
    if shutil.which("podman") is None or os.geteuid() != 0:
        reason = "an engine that may be killed needs root and podman"
        if os.environ.get("FLASH_REQUIRE_CONTAINERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.mark.usefixtures("_own_engine")
async def test_kills_of_everything_leak_nothing_lie_to_nobody_and_keep_nobody_waiting():
    outcome = await faults(PLAN)
    assert outcome.leaked == []
    assert outcome.leftovers == []
    assert outcome.tally.false == []
    assert outcome.tally.late == []
    assert outcome.tally.untyped == []
    assert outcome.tally.done > 0
    assert {"kills_of_service", "kills_of_engine"} <= set(outcome.faults)
    missed = [row.metric for row in rows(outcome) if row.met is False]
    assert missed == []
