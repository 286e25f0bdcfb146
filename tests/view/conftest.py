"""Fixtures of the tests of the page: a recorded run, and a browser if there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.observe.rundir.rundir import RunDirectory
from tests.browser import find_browser
from tests.view.recorded import record


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of a browser."""
    return find_browser()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run of thirty steps."""
    return record(tmp_path / "recorded")
