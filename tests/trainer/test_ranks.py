"""Two gloo ranks against one. The ranks run once, in two_ranks.py, and each test checks one part of their results."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flash.trainer import checkpoint, checkpoint_files
from flash.trainer.model.canary import canary_logprobs
from tests.trainer import two_ranks
from tests.trainer.critic_cases import critic_gradient
from tests.trainer.packed_cases import tiny
from tests.trainer.trainer_cases import (
    Trainer,
    gradient_of,
    random_shard,
    relative_error,
    run_ranks,
    state_of,
    weights_of,
)
from tests.trainer.two_ranks import CANARY, CASES, EXPERTS, case_batch, case_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]  # the two ranks run all cases in one process each

TIED = ("uneven, token_mean", "adapters", "on the host", "decoupled critics")
"""Cases that are also run with a tied output layer, whose gradient has two parts: those whose weights are trained,
kept or read in another way."""
Alone = Callable[[Path, str], tuple[Trainer, dict[str, float]]]
"""Function from a model's folder and a case to a trainer of one rank after the case's step, and the metrics."""
# Mark of tests for which one kind of model is enough.
UNTIED = pytest.mark.parametrize("ranks", ["untied"], indirect=True)


@pytest.fixture(scope="module")
def run_of(
    tied_model: Path, untied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """Return a function for the results of two ranks with a kind of model. The ranks run once for each kind."""

    @cache
    def found(kind: str) -> dict[str, Any]:
        # Run both ranks, and return the model, the folder of their checkpoint, and the results of each rank.
        model = tied_model if kind == "tied" else untied_model
        folder = tmp_path_factory.mktemp("ranks")
        experts = tiny("qwen3_moe", num_experts=1, num_local_experts=1, num_experts_per_tok=1)
        experts.save_pretrained(model.with_name(EXPERTS))
        run_ranks(two_ranks.main, 2, model, folder, [*CASES] if kind == "untied" else TIED)
        results = [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in (0, 1)]
        return {"model": model, "folder": folder, "results": results}

    return found


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Return a function for the trainer of one rank after a case, and the metrics of the step."""

    @cache
    def found(model: Path, name: str) -> tuple[Trainer, dict[str, float]]:
        trainer = Trainer(case_config(model, CASES[name]))
        return trainer, trainer.train_step(case_batch(trainer, CASES[name]))

    return found


@pytest.fixture(params=["tied", "untied"])
def ranks(request: pytest.FixtureRequest, run_of: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the model, the folder and the results of the two ranks, for each kind of model in turn."""
    return run_of(request.param)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [*(("untied", name) for name in CASES), *(("tied", name) for name in TIED)],
    indirect=["ranks"],
)
def test_two_ranks_give_the_gradient_of_one(ranks: dict[str, Any], name: str, alone: Alone) -> None:
    trainer, metrics = alone(ranks["model"], name)
    first, second = (results[name] for results in ranks["results"])
    assert relative_error(first["gradient"], gradient_of(trainer)) < 1e-5
    for mine, alone in zip(first["critics"], trainer.critics, strict=True):
        assert relative_error(mine, critic_gradient(alone)) < 1e-5
    assert first["metrics"] == second["metrics"]
    # The number of shared tokens depends on the sequences that are in one micro-batch.
    expected = metrics | {"shared_token_share": first["metrics"]["shared_token_share"]}
    assert first["metrics"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])


@UNTIED
@pytest.mark.parametrize("name", ["minibatches", "staleness and correction", "rhythm, all on one"])
def test_the_first_rank_gets_the_shown_tokens_of_all_ranks(ranks: dict[str, Any], name: str, alone: Alone) -> None:
    trainer, _ = alone(ranks["model"], name)
    first, second = (results[name]["seen"] for results in ranks["results"])
    assert second == []
    assert [(one.index, one.uses) for one in first] == [(one.index, one.uses) for one in trainer.shown]
    for mine, alone in zip(first, trainer.shown, strict=True):
        for column in ("logprobs", "entropies", "advantages"):
            found, expected = (np.frombuffer(getattr(one, column), "<f4") for one in (mine, alone))
            assert found == pytest.approx(expected, abs=1e-4, nan_ok=True)


def test_both_ranks_compute_the_canary_of_one(ranks: dict[str, Any], alone: Alone) -> None:
    trainer, _ = alone(ranks["model"], list(CASES)[-1])
    first, second = (results["canary"] for results in ranks["results"])
    assert first == second == pytest.approx(canary_logprobs(trainer.model, CANARY), abs=1e-4)


@UNTIED
def test_a_batch_that_one_rank_refuses_stops_both(ranks: dict[str, Any]) -> None:
    first, second = (results["refused"] for results in ranks["results"])
    assert "trainer ranks [1] refused" in first
    assert "0 log-probs" in second


@UNTIED
def test_a_value_that_is_not_finite_on_one_rank_stops_both(ranks: dict[str, Any]) -> None:
    first, second = (results["spoilt values"] for results in ranks["results"])
    assert "trainer ranks [1] refused" in first
    assert re.search(r"sample \d: the critic's value of its action token", second)


def test_both_ranks_load_what_they_saved(ranks: dict[str, Any]) -> None:
    for results in ranks["results"]:
        assert all(torch.equal(value, results["saved"][name]) for name, value in results["restored"].items())


def test_one_rank_loads_a_checkpoint_of_two(ranks: dict[str, Any]) -> None:
    trainer = Trainer(case_config(ranks["model"], {}))
    path = checkpoint_files.newest_complete(ranks["folder"])
    assert path is not None
    checkpoint.load(path, trainer)
    assert state_of(path) == b"hub"
    saved = ranks["results"][0]["saved"]
    assert all(torch.equal(value, saved[name]) for name, value in weights_of(trainer).items())


@UNTIED
def test_a_save_that_fails_on_one_rank_fails_on_both_and_leaves_nothing(ranks: dict[str, Any]) -> None:
    for results in ranks["results"]:
        assert "rank 1" in results["failed save"]
        assert "bytes" in results["failed save"]
    assert [path.name for path in (ranks["folder"] / "checkpoints").iterdir()] == ["step-000001"]


def test_two_ranks_make_the_same_update_of_muon_as_one(ranks: dict[str, Any]) -> None:
    trainer = Trainer(case_config(ranks["model"], {"train": {"optimizer": "muon"}}))
    before = weights_of(trainer)
    trainer.train_step(random_shard())
    first, second = (results["muon"] for results in ranks["results"])
    assert all(torch.equal(first[name], second[name]) for name in first)
    moved = {name: value - before[name] for name, value in weights_of(trainer).items()}
    assert relative_error({name: value - before[name] for name, value in first.items()}, moved) < 1e-3
