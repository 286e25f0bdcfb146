"""Ranks that divide layers, rows and experts give the results of one process. parallel_ranks.py runs the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flash.config.tree import ParallelConfig
from flash.errors import ConfigError
from flash.trainer import checkpoint, checkpoint_files
from flash.trainer.model.model import check_divisible
from tests.trainer import parallel_ranks
from tests.trainer.packed_cases import tiny
from tests.trainer.parallel_ranks import (
    ALONE,
    DRAWN,
    KINDS,
    LAYOUTS,
    PLANNED,
    SAVED,
    UNDIVIDED,
    configured,
    has_others,
    state_of_all,
    trained,
)
from tests.trainer.trainer_cases import Trainer, kept, relative_error, run_ranks, write_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

Seen = dict[str, Any]
"""Results of a step on one rank, by name (`parallel_ranks.trained`)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("parallel")
    for kind in KINDS:
        if kind == "qwen3":
            write_model(folder / kind, tied=True)
        else:
            heads = 4 if kind == "deepseek_v3" else 2
            made = tiny("llama" if kind == DRAWN else kind, num_key_value_heads=heads, tie_word_embeddings=False)
            made.save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str, bool], Seen]:
    """Return a function for the result of a step in one process, of a kind, with a reference and critics or without.

    Kinds that other tests load are saved.
    """

    @cache
    def of(kind: str, others: bool) -> Seen:
        # Train one step; the cache keeps its results for other tests.
        trainer, seen = trained(folder, kind, UNDIVIDED._replace(others=others))
        if others and kind in SAVED.values():
            checkpoint.save(folder / f"{ALONE} {kind}", trainer, kept(b"hub"), keep=1)
        return seen | {"state": state_of_all(trainer)}

    return of


@pytest.fixture(scope="module")
def on_ranks(folder: Path, alone: Callable[[str, bool], Seen]) -> Callable[[str, str], list[Seen]]:
    """Return a function for the results of all ranks of a layout and a kind."""

    @cache
    def of_all(ranks: int) -> list[dict[tuple[str, str], Seen]]:
        # Run all layouts of this many ranks once. The ranks load checkpoints that one process has saved.
        for kind in SAVED.values():
            alone(kind, True)
        run_ranks(parallel_ranks.main, ranks, folder, ranks)
        return [torch.load(folder / f"results-{ranks}-{rank}.pt", weights_only=False) for rank in range(ranks)]

    return lambda name, kind: [results[name, kind] for results in of_all(LAYOUTS[name].ranks)]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, one in LAYOUTS.items() for kind in one.kinds])
def test_ranks_train_as_one_process_does(
    name: str, kind: str, alone: Callable[[str, bool], Seen], on_ranks: Callable[[str, str], list[Seen]]
) -> None:
    """Gradients are also compared one by one: an error in a small one, such as a norm's, is invisible in the sum."""
    of_ranks, expected = on_ranks(name, kind), alone(kind, has_others(kind, LAYOUTS[name]))
    first = of_ranks[0]
    assert relative_error(first["gradient"], expected["gradient"]) < 1e-5
    for one, gradient in expected["gradient"].items():
        assert relative_error({one: first["gradient"][one]}, {one: gradient}) < 1e-4, one
    for mine, theirs in zip(first["critics"], expected["critics"], strict=True):
        assert relative_error(mine, theirs) < 1e-5
    # The number of shared tokens depends on the sequences that are in one micro-batch.
    metrics = expected["metrics"] | {"shared_token_share": first["metrics"]["shared_token_share"]}
    assert first["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for other in of_ranks[1:]:
        assert other["metrics"] == first["metrics"]
        assert other["canary"] == first["canary"]
        # Full tensors must be equal on all ranks, to the bit.
        assert_equal(other["gradient"], first["gradient"])
        assert_equal(other["published"], first["published"])
    shapes = {one: tensor.shape for one, tensor in expected["published"].items()}
    assert {one: tensor.shape for one, tensor in first["published"].items()} == shapes


@pytest.mark.parametrize(("name", "kind"), SAVED.items())
def test_checkpoints_load_in_another_layout(
    name: str, kind: str, folder: Path, alone: Callable[[str, bool], Seen], on_ranks: Callable[[str, str], list[Seen]]
) -> None:
    of_ranks, layout = on_ranks(name, kind), LAYOUTS[name]
    for seen in of_ranks:
        assert_equal(seen["loaded"], alone(kind, True)["state"])
        assert_equal(seen["saved"], of_ranks[0]["saved"])
    trainer, path = Trainer(configured(folder, kind)), checkpoint_files.newest_complete(folder / name)
    assert path is not None
    shards = layout.ranks // ParallelConfig(**layout.parallel).ranks_per_shard
    assert sorted(file.name for file in path.glob("rng-*")) == [f"rng-{shard:05d}.pt" for shard in range(shards)]
    checkpoint.load(path, trainer)
    assert_equal(state_of_all(trainer), of_ranks[0]["saved"])


@pytest.fixture(scope="module")
def plans(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the planned bytes of weights and gradients by layout."""
    run_ranks(parallel_ranks.plan, 1, folder)
    return torch.load(folder / "plans.pt")


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_equals_the_bytes_that_ranks_hold(
    name: str, plans: dict[str, tuple[int, int]], on_ranks: Callable[[str, str], list[Seen]]
) -> None:
    """If weights cannot be divided evenly, the plan is that of the first rank, which has the largest part."""
    held = [seen["bytes"] for seen in on_ranks(name, LAYOUTS[name].kinds[0])]
    assert plans[name] == held[0] == max(held)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail with the names of the tensors that differ in any bit."""
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize(
    ("kind", "sizes", "parallel", "message"),
    [
        ("mistral", {}, {"tensor": 2}, "parallel.tensor: expected 1 for a mistral; it is known to be exact for llama"),
        ("qwen3_moe", {}, {"tensor": 2}, "parallel.expert: expected a multiple of parallel.tensor = 2 for a qwen3_moe"),
        ("llama", {"num_key_value_heads": 1}, {"tensor": 2}, "a divisor of the model's num_key_value_heads = 1, got 2"),
        ("qwen3", {"intermediate_size": 49}, {"tensor": 2}, "a divisor of the model's intermediate_size = 49, got 2"),
        ("qwen3", {}, {"context": 3}, "parallel.context: expected a divisor of the model's num_attention_heads = 4"),
        ("qwen3", {}, {"tensor": 2, "context": 4}, "= 4, got 4 · parallel.tensor = 8"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {"context": 2},
            "parallel.context: expected 1 for a llama whose positions .dynamic. depend on how long the longest",
        ),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"]},
            {"context": 2},
            "parallel.context: expected 1 for a lfm2, which has layers whose state runs on .* .conv., got 2",
        ),
        (
            "qwen3",
            {},
            {"expert": 2},
            "parallel.expert: expected 1 for a qwen3; it is known to be exact for deep",
        ),
        (
            "mixtral",
            {},
            {"expert": 3},
            "parallel.expert: expected a divisor of the model's num_local_experts = 4",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(
    kind: str, sizes: dict[str, Any], parallel: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(tiny(kind, **sizes).config, ParallelConfig(**parallel))
