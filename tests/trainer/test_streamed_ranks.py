"""Steps in rounds on four gloo ranks, against whole batches on the same ranks. streamed_ranks.py runs the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer import streamed_ranks
from tests.trainer.packed_cases import tiny
from tests.trainer.streamed_ranks import CASES, DENSE, EXPERTS, OTHER, RANKS, updates
from tests.trainer.trainer_cases import relative_error, run_ranks, write_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

Results = dict[tuple[str, str], dict[str, Any]]
"""Results of a rank, by case and by "whole" or "rounds"."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Return the results of each rank, by the case, and by "whole" or "rounds"."""
    folder = tmp_path_factory.mktemp("streamed")
    write_model(folder / DENSE, tied=False)
    write_model(folder / OTHER, tied=True, initializer_range=0.2)
    tiny("qwen3_moe").save_pretrained(folder / EXPERTS)
    run_ranks(streamed_ranks.main, RANKS, folder)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_rounds_on_four_ranks_give_the_gradient_and_weights_of_the_whole_batch(ranks: list[Results], name: str) -> None:
    whole, rounds = ranks[0][name, "whole"], ranks[0][name, "rounds"]
    # Adam divides by the size of the gradient, so later updates have larger differences.
    limit = 1e-6 if updates(CASES[name]) == 1 else 1e-5
    assert relative_error(rounds["gradient"], whole["gradient"]) < limit
    assert relative_error(rounds["weights"], whole["weights"]) < 1e-6
    # A round shares only its own beginnings.
    expected = whole["metrics"] | {"shared_token_share": rounds["metrics"]["shared_token_share"]}
    assert rounds["metrics"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for other in (results[name, "rounds"] for results in ranks[1:]):
        assert other["metrics"] == rounds["metrics"]
        assert all(torch.equal(tensor, rounds["weights"][key]) for key, tensor in other["weights"].items())


@pytest.mark.parametrize("name", ["corrections", "minibatches", "branches"])
def test_some_ranks_have_no_sample_in_a_round(ranks: list[Results], name: str) -> None:
    samples = [results[name, "rounds"]["samples"] for results in ranks]
    assert [sum(of_round) for of_round in zip(*samples, strict=True)] == CASES[name].rounds
    assert any(0 in of_rank for of_rank in samples)
