"""Planned memory of a rank. benchmarks/gpu/steps.py compares it with a card's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flash.config.tree import Config
from flash.trainer.memory import RankMemory, engine_memory, rank_memory
from tests.trainer.packed_cases import tiny
from tests.trainer.trainer_cases import make_config, run_ranks

EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 32}
"""Widths that can be divided by 32 ranks."""
LAYERS = 6
"""Decoder layers of a model, of which a plan runs fewer."""
INPUT = 128 * 32 * 2
"""Bytes of a layer's input for one micro-batch, in bfloat16."""
ALL_ASIDE = ("activations", "moments", "weights")
"""Setting of `train.offload` that keeps everything on the host."""
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankMemory]:
    """Make the plans in a process of their own, because each plan makes a process group."""
    folder = tmp_path_factory.mktemp("memory")
    tiny("qwen3", num_hidden_layers=LAYERS, tie_word_embeddings=False).save_pretrained(folder)
    tiny("qwen3_moe", num_hidden_layers=LAYERS, **EXPERTS).save_pretrained(folder / "experts")
    tiny("qwen3_moe", num_hidden_layers=2 * LAYERS, **EXPERTS).save_pretrained(folder / "deep")
    run_ranks(plan, 1, folder)
    return torch.load(folder / "plans.pt", weights_only=False)


def plan(folder: Path, _: int) -> None:
    """Save memory plans by the setting that each of them shows."""
    torch.save(planned(folder), folder / "plans.pt")


def planned(folder: Path) -> dict[str, RankMemory]:
    """Return memory plans by the setting that each of them shows.

    Plans run fewer layers than by default, which saves half of the time, where the result is the same to the byte: one
    if no layer is recomputed, and two otherwise. Weights on the host of many ranks, and experts, need the default.
    """
    plain, critics = configured(folder), {"objective": "asyppo", "kl": {"coefficient": 0.1}}
    recomputed: dict[str, Any] = {"activation_checkpointing": True}
    return {
        "alone": rank_memory(plain, 1, few=1),
        "of two": rank_memory(plain, 2),
        "of two, all layers": rank_memory(plain, 2, few=LAYERS),
        "of longer rows": rank_memory(configured(folder, train={"max_tokens_per_microbatch": 4096}), 1, few=1),
        "of rows twice as long": rank_memory(configured(folder, train={"max_tokens_per_microbatch": 8192}), 1, few=1),
        "of many": rank_memory(plain, 64, few=1),
        "recomputed": rank_memory(configured(folder, train=recomputed), 1, few=2),
        "offloaded": rank_memory(
            configured(folder, train=recomputed | {"offload": ["activations", "moments"]}), 1, few=2
        ),
        "weights aside": rank_memory(configured(folder, train=recomputed | {"offload": [*ALL_ASIDE]}), 1, few=2),
        "aside, of many": rank_memory(configured(folder, train=recomputed | {"offload": [*ALL_ASIDE]}), 64),
        "aside, beside others": rank_memory(
            configured(folder, train={"offload": ["weights"]}, algorithm=critics, critic={}), 1, few=1
        ),
        "kept sets": rank_memory(configured(folder, rollout={"top_k": 20}), 1, few=1),
        "adapters": rank_memory(configured(folder, lora={"rank": 4}), 1, few=1),
        "muon": rank_memory(configured(folder, train={"optimizer": "muon"}), 1, few=1),
        "experts, recomputed": rank_memory(configured(folder / "experts", train=recomputed), 32),
        "experts twice as deep": rank_memory(configured(folder / "deep", train=recomputed), 32),
        "of halves of longer rows": rank_memory(
            configured(folder, train={"max_tokens_per_microbatch": 4096}, parallel={"context": 2}), 2, few=1
        ),
        "beside others": rank_memory(configured(folder, algorithm=critics, critic={}), 1, few=1),
    }


def configured(folder: Path, **tables: Any) -> Config:
    """Return a configuration with sequences of 64 tokens, two to a micro-batch."""
    train = {"max_tokens_per_microbatch": 128} | tables.pop("train", {})
    model = {"path": str(folder), "dtype": "bfloat16", "max_length": 64} | tables.pop("model", {})
    return make_config(folder, model=model, train=train, **tables)


@pytest.mark.slow
def test_layers_that_are_not_run_count_like_the_last_one_that_was_run(plans: dict[str, RankMemory]) -> None:
    assert plans["of two"] == plans["of two, all layers"]


def test_ranks_divide_weights_and_moments_but_not_the_memory_of_a_pass(plans: dict[str, RankMemory]) -> None:
    alone, shared = plans["alone"], plans["of many"]
    assert alone.weights == 4 * alone.parameters, "float32"
    assert alone.gradients == alone.weights
    assert alone.moments == 2 * alone.weights
    # The plan of 64 ranks is of the first one, which has the largest part of each weight.
    assert 1 / 64 <= shared.weights / alone.weights < 1 / 32
    assert shared.at_work > 0.2 * alone.at_work


def test_activations_grow_with_the_tokens_of_a_micro_batch(plans: dict[str, RankMemory]) -> None:
    assert 1.7 < plans["of rows twice as long"].at_work / plans["of longer rows"].at_work < 2.1


def test_recomputed_activations_are_not_kept(plans: dict[str, RankMemory]) -> None:
    assert plans["recomputed"].at_work < plans["alone"].at_work
    assert plans["recomputed"].weights == plans["alone"].weights


def test_ranks_that_divide_rows_have_their_part_of_the_activations(plans: dict[str, RankMemory]) -> None:
    assert 0.45 < plans["of halves of longer rows"].at_work / plans["of longer rows"].at_work < 0.65
    assert plans["of halves of longer rows"].weights == plans["of two"].weights


def test_a_reference_and_critics_are_counted(plans: dict[str, RankMemory]) -> None:
    assert plans["alone"].others == 0
    assert plans["beside others"].others > (1 + 2 * 4) * 0.8 * plans["alone"].weights


def test_inputs_that_wait_on_the_host_are_not_on_the_device(plans: dict[str, RankMemory]) -> None:
    recomputed, aside = plans["recomputed"], plans["offloaded"]
    assert (recomputed.host, aside.moments) == (0, 0)
    assert 1 <= aside.host / (LAYERS * INPUT + recomputed.moments) < 2, "in blocks of powers of two"
    # The inputs of all layers are on the host, except those of the current layer and of the next one to be fetched.
    assert (LAYERS - 2) * INPUT <= recomputed.at_work - aside.at_work <= (LAYERS - 1) * INPUT


def test_with_weights_on_the_host_the_device_holds_a_layer_at_a_time(plans: dict[str, RankMemory]) -> None:
    recomputed, inputs_aside, aside = plans["recomputed"], plans["offloaded"], plans["weights aside"]
    for found in (aside, plans["aside, of many"], plans["aside, beside others"]):
        assert (found.weights, found.gradients, found.moments, found.others, found.loading) == (0, 0, 0, 0, 0)
        assert found.total == found.at_work
    kept = recomputed.weights + recomputed.gradients + recomputed.moments
    assert 1 <= aside.host / (kept + LAYERS * INPUT) < 2, "in blocks of powers of two"
    # A single rank with its weights on the device keeps all layers there in bfloat16 until their gradients are made.
    layer = (aside.parameters - 2 * 40 * 32) // LAYERS * 2
    assert 3 * layer < inputs_aside.at_work - aside.at_work < 6 * layer
    assert plans["aside, of many"].host - LAYERS * INPUT < aside.host / 32
    beside = plans["beside others"]
    kept = beside.weights + beside.gradients + beside.moments + beside.others
    assert 1 <= plans["aside, beside others"].host / kept < 2


def test_kept_sets_are_counted(plans: dict[str, RankMemory]) -> None:
    alone, found = plans["alone"], plans["kept sets"]
    assert (found.moments, found.host) == (alone.moments, 0)
    # Each token has the ids, biases and penalties of twenty tokens, in eight bytes each.
    assert found.at_work - alone.at_work > 126 * 20 * 3 * 8


def test_only_adapters_have_gradients_and_their_base_is_held_twice_at_the_start(
    plans: dict[str, RankMemory],
) -> None:
    alone, found = plans["alone"], plans["adapters"]
    adapters = found.parameters - alone.parameters
    assert (found.gradients, found.moments) == (4 * adapters, 8 * adapters)
    assert found.weights == 2 * alone.parameters + 4 * adapters
    assert found.loading == found.weights + alone.weights
    assert 0.8 < found.at_work / alone.at_work < 1.2


def test_muon_keeps_one_moment_of_hidden_matrices(plans: dict[str, RankMemory]) -> None:
    alone, found = plans["alone"], plans["muon"]
    assert alone.weights < found.moments < 1.7 * alone.weights


def test_recomputed_layers_of_a_mixture_keep_only_their_inputs(plans: dict[str, RankMemory]) -> None:
    shallow, deep = plans["experts, recomputed"], plans["experts twice as deep"]
    # The optimizer also keeps the number of updates of each parameter, which the tolerance allows for.
    assert 0 <= deep.at_work - shallow.at_work - LAYERS * 128 * EXPERTS["hidden_size"] * 2 < LAYERS * 64


def test_with_fewer_experts_than_ranks_each_rank_has_a_part_of_every_expert(plans: dict[str, RankMemory]) -> None:
    many = plans["experts, recomputed"]
    assert 1 / 32 <= many.weights / (4 * many.parameters) < 1 / 24


@pytest.mark.slow
def test_the_cache_of_an_engine_counts_layers_of_different_sizes(tmp_path: Path) -> None:
    sizes = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "global_head_dim": 16}
    tiny("gemma4_text", **sizes, num_hidden_layers=2, num_key_value_heads=2).save_pretrained(tmp_path)
    assert engine_memory(make_config(tmp_path), 100).token == 2 * 2 * (8 + 16) * 4, "keys and values in float32"
