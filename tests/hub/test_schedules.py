"""A sample of the random schedules; `python -m tests.hub.schedules 100000` runs many."""

from __future__ import annotations

import pytest

from tests.hub.schedules import run_one


@pytest.mark.parametrize("first", [0, 30, 60])
def test_the_laws_hold_on_every_schedule(first: int) -> None:
    for seed in range(first, first + 30):
        run_one(seed)
