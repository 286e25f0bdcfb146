"""The first node's part of a profile."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from flash.profile.order import ProfileOrder
from flash.run.profiled import POLL_S, WRITE_S, profile_node
from tests.hub.test_hub import Driver, make_config

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

ORDER = (1, 3)
LONG_S = 10 * POLL_S


def reach(driver: Driver, version: int) -> None:
    """The run has come so far."""
    driver.hub.progress.version = version


async def test_the_run_ends_when_all_is_written(tmp_path: Path) -> None:
    driver, order = Driver(make_config()), ProfileOrder(str(tmp_path), *ORDER)
    async with anyio.create_task_group() as group:
        group.start_soon(profile_node, order, driver.hub, make_config())
        reach(driver, 2)
        await anyio.sleep(LONG_S)
        assert driver.hub.progress.stopping != "interrupted", "a step is still to come"
        reach(driver, 3)
        await anyio.sleep(LONG_S)
        assert driver.hub.progress.stopping != "interrupted", "others still write"
        order.file("trainer-0").touch()
        order.file("engine-0").touch()
        await anyio.sleep(LONG_S)
        assert driver.hub.progress.stopping == "interrupted"


async def test_a_run_does_not_wait_for_ever_for_a_file(tmp_path: Path) -> None:
    driver, order = Driver(make_config()), ProfileOrder(str(tmp_path), *ORDER)
    async with anyio.create_task_group() as group:
        group.start_soon(profile_node, order, driver.hub, make_config())
        reach(driver, 3)
        await anyio.sleep(WRITE_S + LONG_S)
        assert driver.hub.progress.stopping == "interrupted"


async def test_a_run_whose_last_step_was_recorded_ends_by_itself(tmp_path: Path) -> None:
    config = make_config()
    driver, order = Driver(config), ProfileOrder(str(tmp_path), config.run.steps - 1, config.run.steps)
    async with anyio.create_task_group() as group:
        group.start_soon(profile_node, order, driver.hub, config)
        reach(driver, config.run.steps - 1)
        await anyio.sleep(LONG_S)
        reach(driver, config.run.steps)
        await anyio.sleep(WRITE_S + LONG_S)
    assert driver.hub.progress.stopping != "interrupted"
