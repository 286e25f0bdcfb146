"""Ranks that divide each layer against one process. They run once for each layout, in tensor_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flash.errors import ConfigError
from flash.trainer.model.model import DIVIDED, check_divisible
from flash.trainer.state import checkpoint, stored
from flash.trainer.step import Trainer
from tests.trainer import tensor_ranks
from tests.trainer.packed_cases import tiny
from tests.trainer.tensor_ranks import ALONE, TENSOR, kinds_of, state_of_all, tensor_config, trained
from tests.trainer.trainer_cases import kept, relative_error, run_ranks, write_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process makes of the step; its last trainer is saved."""
    folder = tmp_path_factory.mktemp("tensor")
    write_model(folder / "qwen3", tied=True)
    tiny("llama", num_key_value_heads=2).save_pretrained(folder / "llama")
    tiny("qwen2", tie_word_embeddings=False).save_pretrained(folder / "qwen2")
    steps = {kind: trained(folder, kind) for kind in DIVIDED}
    last = steps[DIVIDED[-1]][0]
    checkpoint.save(folder / ALONE, last, kept(b"hub"), keep=1)
    return {kind: seen for kind, (_, seen) in steps.items()} | {"folder": folder, "state": state_of_all(last)}


@pytest.mark.parametrize("ranks", [TENSOR, 2 * TENSOR])
def test_divided_layers_train_as_one_process_does(alone: dict[str, Any], ranks: int) -> None:
    folder: Path = alone["folder"]
    (folder / str(ranks)).mkdir()
    run_ranks(tensor_ranks.main, ranks, folder, ranks)
    of_ranks = [torch.load(folder / str(ranks) / f"results-{rank}.pt", weights_only=False) for rank in range(ranks)]
    for kind in kinds_of(ranks):
        assert_trained_alike([results[kind] for results in of_ranks], alone[kind])
    first = of_ranks[0]
    for results in of_ranks:
        assert_equal(results["loaded"], alone["state"])
        assert_equal(results["saved"], first["saved"])
    trainer = Trainer(tensor_config(folder, DIVIDED[-1]))
    path = stored.newest_complete(folder / str(ranks))
    assert path is not None
    shards = [f"rng-{shard:05d}.pt" for shard in range(ranks // TENSOR)]
    assert sorted(file.name for file in path.glob("rng-*")) == shards
    checkpoint.load(path, trainer)
    assert_equal(state_of_all(trainer), first["saved"])


def assert_trained_alike(of_ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """One by one, too: a norm's gradient that is counted twice, or lacks a rank's heads, is small among all."""
    first = of_ranks[0]
    assert relative_error(first["gradient"], expected["gradient"]) < 1e-5
    for name, gradient in expected["gradient"].items():
        assert relative_error({name: first["gradient"][name]}, {name: gradient}) < 1e-4, name
    for mine, theirs in zip(first["critics"], expected["critics"], strict=True):
        assert relative_error(mine, theirs) < 1e-5
    # What is computed once depends on who is together.
    metrics = expected["metrics"] | {"shared_token_share": first["metrics"]["shared_token_share"]}
    assert first["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for other in of_ranks[1:]:
        assert other["metrics"] == first["metrics"]
        assert other["canary"] == first["canary"]
        # What no rank has a part of is the same on all: whole, and to the bit.
        assert_equal(other["gradient"], first["gradient"])
        assert_equal(other["published"], first["published"])
    shapes = {name: tensor.shape for name, tensor in expected["published"].items()}
    assert {name: tensor.shape for name, tensor in first["published"].items()} == shapes


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("mistral", {}, "expected 1 for a mistral; it is known to be exact for llama, qwen2, qwen3 alone"),
        ("qwen3_moe", {}, "expected 1 for a qwen3_moe"),
        ("llama", {"num_key_value_heads": 1}, "expected a divisor of the model's num_key_value_heads = 1, got 2"),
        ("qwen3", {"intermediate_size": 49}, "expected a divisor of the model's intermediate_size = 49, got 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(kind: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(tiny(kind, **sizes).config, TENSOR)
