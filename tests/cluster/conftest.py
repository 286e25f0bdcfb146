"""Hosts for the tests; where they cannot be made, the tests are left out, unless FLASH_REQUIRE_HOSTS is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rig.hosts import Hosts, missing

NAMES = ("node9", "node10")
"""They sort the other way round as text, as those of a real cluster may."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; the first run makes it, the others find it."""
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two, or those whose names the test is parametrized with."""
    why = missing()
    if why and not os.environ.get("FLASH_REQUIRE_HOSTS"):
        pytest.skip(f"no hosts: {why}")
    with Hosts(*getattr(request, "param", NAMES)) as started:
        yield started
