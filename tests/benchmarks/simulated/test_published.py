"""The rules of the peers of `benchmarks.simulated.published`, on workloads whose results can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulated.figures import change, ours, workload
from benchmarks.simulated.peers.asynchronous import (
    Areal,
    ArealRules,
    Discard,
    DiscardRules,
    Laminar,
    LaminarRules,
    VerlAsync,
    VerlRules,
)
from benchmarks.simulated.published import LENGTH, closed_form, simulated_age
from flash.config.tree import Config

FREE: dict[str, Any] = {
    "sequence_s": 0,
    "context_s": 0,
    "prefill_s": 0,
    "swap_s": 0,
    "train_token_s": 0,
    "step_s": 1,
    "gpus": 2,
    "rollout_gpus": 1,
    "response_tokens": 10,
    "prompt_tokens": 1,
}
"""One engine with one second per token, everything else for nothing."""


def make_config(steps: int, batch: int, **simulate: Any) -> Config:
    tables = {"run": {"steps": steps}, "rollout": {"group_size": 1}, "train": {"batch_size": batch}}
    return workload("published", **tables, simulate=FREE | simulate)


@pytest.mark.parametrize(
    ("places", "queue_factor", "rho"), [(50, 1, 0.5125), (20, 2, 0.3125), (100, 1, 2.0), (65, 2, 1.25)]
)
def test_the_mean_age_of_a_steady_state_follows_its_closed_form(places: int, queue_factor: float, rho: float) -> None:
    # Samples of constant length end one by one. Limited by the trainer, all samples of these cases have the same age.
    # Limited by the engines, the 40 ends of a step stand for all times of a step, so the mean is exact to 1 in 40.
    age = simulated_age(places, 40, queue_factor, rho, LENGTH, 1, 20, LENGTH // places)
    exact = closed_form(places, 40, queue_factor, rho, 1)
    assert age == pytest.approx(exact, abs=1 / 40 if rho < 1 else 1e-9)


@pytest.mark.slow
def test_our_own_runs_beside_those_of_others_train_no_token_that_others_would_drop() -> None:
    assert max(ours(workload("length_bias", run={"steps": 6})).ages) == 2


def test_verl_starts_no_group_ahead_at_a_threshold_of_zero() -> None:
    # Each update needs 2 batches of 4 groups. They are generated at once, and then trained in 3 seconds each.
    report = VerlAsync.simulate(make_config(6, 4, train_step_s=3), VerlRules(sync_every=2))
    assert report.ends == pytest.approx([13, 16, 29, 32, 45, 48])
    assert report.mean_age == 0


def test_verl_starts_the_share_of_its_threshold_ahead() -> None:
    report = VerlAsync.simulate(make_config(8, 4, train_step_s=20), VerlRules(sync_every=2, threshold=0.5))
    # 12 groups instead of 8 are ready after 10 seconds, so 4 of them are trained right after the update.
    assert report.ends == pytest.approx([30, 50, 70, 90, 110, 130, 150, 170])
    assert report.oldest_age == 1
    assert report.mean_age == pytest.approx(0.5)


def test_a_group_that_is_too_old_is_discarded() -> None:
    config = make_config(8, 2, response_tokens=[10, 200], train_step_s=15)
    strict = Discard.simulate(config, DiscardRules(workers=4, buffer=4, max_age=1))
    assert strict.stale_groups > 0
    assert strict.stale_tokens > strict.stale_groups
    assert strict.oldest_age == 1
    patient = Discard.simulate(config, DiscardRules(workers=4, buffer=4, max_age=20))
    assert patient.stale_groups == 0
    assert patient.oldest_age > 1


@pytest.mark.slow
def test_packing_long_answers_together_lets_the_other_engines_begin_again() -> None:
    config = make_config(12, 128, gpus=9, rollout_gpus=8, response_tokens=[*[10] * 15, 400])
    packed, waiting = Laminar.simulate(config, LaminarRules()), Laminar.simulate(config, LaminarRules(repack=False))
    assert packed.step_s < waiting.step_s


def test_weights_that_may_not_interrupt_wait_for_the_longest_answer() -> None:
    config = make_config(6, 2, response_tokens=[10, 100], train_step_s=1)
    config = change(config, engine={"max_sequences": 4})
    interrupted, waited = (
        Areal.simulate(config, ArealRules(eta=1, max_concurrent=4, interruptible=on)).ends[-1] for on in (True, False)
    )
    assert interrupted < waited
