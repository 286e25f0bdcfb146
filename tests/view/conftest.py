"""What the tests of the page share: a recorded run, and a browser where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.observe.rundir.rundir import RunDirectory
from tests.browser import find_browser
from tests.view.recorded import record


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a browser."""
    return find_browser()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of thirty steps."""
    return record(tmp_path / "recorded")
