"""Failures in the simulator: what is drawn, and what a death costs in each of the two ways to go on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import pytest

from benchmarks.simulated.configure import TWO_ENGINES, configure
from benchmarks.simulated.failures import (
    Costs,
    FailingWorld,
    Failure,
    Kind,
    RestartedWorld,
    draw_failures,
    spans_alive,
)
from flash.config.tree import Config
from flash.simulate.clock import run_virtual

HOUR_S = 3600.0
COSTS = Costs(every=2, save_s=0.0, noticed_s=2.0, engine_start_s=5.0, trainer_start_s=3.0, away_s=20.0)


def small(**tables: Any) -> Config:
    """Synchronous: 2 s of sampling, 1 s of training and 0.1 s of loading a step."""
    simulate = TWO_ENGINES | {"nodes": 2, "train_step_s": 1.0, "response_tokens": 100}
    return configure(
        run={"steps": tables.pop("steps", 6)},
        rollout={"group_size": 4},
        train={"batch_size": 16, "async_ratio": tables.pop("async_ratio", 0)},
        engine={"max_sequences": 8},
        simulate=simulate | tables.pop("simulate", {}),
        **tables,
    )


# -- what is drawn ---------------------------------------------------------------------------------------------------


def test_failures_are_drawn_from_the_seed_in_order_and_as_often_as_asked() -> None:
    drawn = draw_failures(3, 12, 4, 3 * HOUR_S, None, 300, 3000 * HOUR_S)
    assert drawn == draw_failures(3, 12, 4, 3 * HOUR_S, None, 300, 3000 * HOUR_S) == sorted(drawn)
    assert drawn != draw_failures(4, 12, 4, 3 * HOUR_S, None, 300, 3000 * HOUR_S)
    assert len(drawn) == pytest.approx(16_000, rel=0.03)
    assert sum(failure.kind == "trainer" for failure in drawn) == pytest.approx(4_000, rel=0.06)
    assert sum(failure.kind == "engine" for failure in drawn) == pytest.approx(6_000, rel=0.06)
    assert all((failure.kind == "trainer") == (failure.place >= 12) for failure in drawn)


def test_a_preempted_node_cannot_fail_while_it_is_away() -> None:
    drawn = [each for each in draw_failures(0, 1, 0, HOUR_S, 60, 300, 100 * HOUR_S) if each.kind == "preempted"]
    assert len(drawn) == pytest.approx(100 * HOUR_S / 360, rel=0.15)
    assert min(later.time - sooner.time for sooner, later in pairwise(drawn)) >= 300


def test_where_all_restart_nothing_lives_until_everything_has_started_and_no_machine_is_away() -> None:
    failures = [Failure(100, 0, "node"), Failure(103, 1, "trainer"), Failure(150, 2, "preempted")]
    # Two seconds until it is noticed, five for the engines: the failure at 103 begins that anew.
    assert COSTS.restart_s == 7
    assert list(spans_alive(failures, COSTS, 200)) == [(0, 100), (110, 150), (177, 200)]
    assert list(spans_alive(failures, COSTS, 170)) == [(0, 100), (110, 150)]


# -- each death costs its own work -----------------------------------------------------------------------------------


def failing(config: Config, *failures: tuple[float, int, Kind]) -> FailingWorld:
    async def run() -> FailingWorld:
        world = FailingWorld(config, COSTS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.strike, [Failure(*each) for each in failures])
            await world.run()
            tasks.cancel_scope.cancel()
        return world

    return run_virtual(run)


def test_without_failures_it_is_the_run_that_the_simulator_knows() -> None:
    world = failing(small())
    assert [round(time, 6) for time in world.trainer.commits[:2]] == pytest.approx([3.1, 6.2], abs=0.1)


def test_a_trainers_death_costs_its_start_and_the_steps_since_the_checkpoint_again() -> None:
    calm, hit = failing(small()), failing(small(), (8.0, 2, "trainer"))
    assert hit.trainer.commits[:2] == calm.trainer.commits[:2]
    assert calm.trainer.commits[1] < 8.0 < calm.trainer.commits[2]
    # Its checkpoint holds both steps. The batch of the third is there when the trainers are back.
    assert hit.trainer.commits[2] == pytest.approx(8.0 + 2 + 3 + 1)
    later = failing(small(), (11.0, 2, "trainer"))
    assert calm.trainer.commits[2] < 11.0 < calm.trainer.commits[3]
    assert later.trainer.commits[3] == pytest.approx(11.0 + 2 + 3 + 1 + 1), "one step is trained again"


def test_a_step_in_which_a_trainer_dies_is_trained_from_its_beginning() -> None:
    calm = failing(small())
    middle = calm.trainer.commits[2] - 0.5
    hit = failing(small(), (middle, 2, "trainer"))
    assert hit.trainer.commits[2] == pytest.approx(middle + 2 + 3 + 1)


def test_a_node_that_dies_gives_its_leases_back_and_comes_again() -> None:
    world = failing(small(async_ratio=1), (3.5, 1, "node"))
    totals = world.hub.samples.totals()
    assert totals["retried_cancelled"] > 0
    assert totals["issued"] == totals["trained"] == 6 * 16
    assert len(world.trainer.commits) == 6
    assert world.nodes[1].engines[0].version == world.nodes[0].engines[0].version, "it serves again"


def test_a_preempted_node_is_away_for_longer_than_one_that_starts_again() -> None:
    crashed = failing(small(async_ratio=1, steps=12), (3.5, 1, "node"))
    preempted = failing(small(async_ratio=1, steps=12), (3.5, 1, "preempted"))
    assert preempted.trainer.commits[-1] > crashed.trainer.commits[-1]


def test_an_engine_that_dies_is_started_again_and_no_sample_is_lost() -> None:
    world = failing(small(), (3.5, 0, "engine"))
    totals = world.hub.samples.ledger.totals(0)
    assert totals["trained"] == totals["issued"] == 6 * 16
    assert totals.get("retried_cancelled", 0) == 0
    assert world.trainer.commits[-1] > failing(small()).trainer.commits[-1]


# -- all restart -----------------------------------------------------------------------------------------------------


def test_a_life_goes_on_from_the_checkpoint_of_the_one_before() -> None:
    async def run() -> None:
        # The third step is committed at 9.3 s and in no checkpoint.
        world = RestartedWorld(small(), COSTS, None)
        with anyio.move_on_after(10.0):
            await world.run()
        assert (len(world.trainer.trained), world.saving.saved) == (3, 2)
        short = RestartedWorld(small(), COSTS, world.kept)
        with anyio.move_on_after(4.0):
            await short.run()
        assert short.kept == world.kept, "a life without a checkpoint changes nothing for the next"
        again = RestartedWorld(small(), COSTS, short.kept)
        assert again.hub.progress.version == 2
        end = await again.run()
        assert end.version == 6
        assert end.ledger["trained"] == end.ledger["issued"] == 6 * 16

    run_virtual(run)
