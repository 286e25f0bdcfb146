"""Fixtures for tests on several hosts. Tests are skipped if hosts cannot be made, unless FLASH_REQUIRE_HOSTS is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rig.hosts import why_no_hosts
from tests.cluster.hosts import FaultyHosts

NAMES = ("node9", "node10")
"""Names of the hosts. As text they sort the other way round, as names of a real cluster may."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model, which the first run makes."""
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[FaultyHosts]:
    """Return two hosts, or the hosts whose names are the parameter of the test."""
    why = why_no_hosts()
    if why and not os.environ.get("FLASH_REQUIRE_HOSTS"):
        pytest.skip(f"no hosts: {why}")
    with FaultyHosts(*getattr(request, "param", NAMES)) as started:
        yield started
