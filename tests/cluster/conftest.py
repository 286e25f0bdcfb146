"""Hosts for the tests; where they cannot be made, the tests are left out, unless FLASH_REQUIRE_HOSTS is set."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts, missing

NAMES = ("node9", "node10")
"""They sort the other way round as text, as those of a real cluster may."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    why = missing()
    if why and not os.environ.get("FLASH_REQUIRE_HOSTS"):
        pytest.skip(f"no hosts: {why}")
    with Hosts(*NAMES) as started:
        yield started
