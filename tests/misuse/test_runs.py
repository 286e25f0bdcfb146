"""Whole runs on the virtual clock around environments that misbehave now and then: they train all the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.misuse import misbehaving as m
from tests.rollout.test_node import World, make_config, run

SHARE = 0.15
"""Share of episodes that misbehave."""


STEPS = 12


class Sometimes(m.Misbehaving):
    """Misbehaves in some episodes, in a place and a way that a table has."""

    dice = random.Random(0)
    acts: tuple[Any, ...] = ()

    def __init__(self) -> None:
        bad = self.dice.random() < SHARE
        place = self.dice.choice(("start", "reset", "step", "close") if self.acts != HANGS else ("reset", "step"))
        super().__init__(place if bad else "", self.dice.choice(self.acts))


RAISES = tuple(m.raising(make) for make in m.EXCEPTIONS.values())
HANGS = tuple(make for make, virtual in m.HANGS.values() if virtual)
RETURNS = tuple(lambda value=value: value for value in m.RESULTS.values())


@pytest.mark.parametrize(("acts", "abandoned"), [(RAISES, False), (HANGS, True), (RETURNS, False)])
def test_a_run_trains_all_its_steps_though_its_environments_misbehave(acts: tuple[Any, ...], abandoned: bool) -> None:
    Sometimes.dice, Sometimes.acts = random.Random(3), acts
    config = make_config(
        run={"steps": STEPS},
        rollout={"retries": 20, "breaker": 64},
        deadlines={"env_step": 5.0, "close": 5.0, "generate": 50.0, "step": 1000.0},
    )
    world = World(config, env=Sometimes)
    end = run(world)
    assert (end.reason, end.version) == ("finished", STEPS)
    ledger = end.ledger
    assert ledger["issued"] == ledger["trained"] + ledger["given_up"]
    late = ledger.get("given_up_stale", 0) + ledger.get("given_up_cancelled", 0)
    assert ledger["given_up"] == late, "each was tried again until it went well, or was too old"
    assert sum(count for name, count in ledger.items() if name.startswith("retried_")) > 3
    assert len(world.observer.evaluations) == STEPS // 2 + 1
    rows = world.observer.steps
    assert (sum(row["abandoned_calls"] for row in rows) > 0) == abandoned
