"""Memory, arithmetic and profile of a trainer rank's steps."""

from __future__ import annotations

import gzip
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from flash.config.learning import LoraConfig, TrainConfig
from flash.foreign.transformers import AttentionLayer
from flash.trainer.model.adapters import add_adapters
from flash.trainer.packing import DUMMY, MicroBatch
from flash.trainer.performance import (
    GIB,
    PEAKS,
    ModelArithmetic,
    StepMeter,
    StepProfiler,
    peak_flops,
    performance_metrics,
    resident_bytes,
)
from tests.trainer.trainer_cases import make_config, random_shard, trainer_at

pytestmark = pytest.mark.filterwarnings("ignore")

LAYER = 2 * 32 * 8 * (4 + 2) + 3 * 32 * 48
"""Number of weights in the matrices of one layer of `dense`: queries, keys, values, output, and three of the MLP."""
HEAD = 40 * 32
"""Number of weights of the output layer of `dense`."""


def dense(**options: Any) -> PreTrainedModel:
    """Return a Qwen3 without memory: two layers, four heads, two heads of keys and values, each 8 wide.

    `options` replace values of its configuration.
    """
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**sizes | options))


def row(length: int, actions: int) -> MicroBatch:
    """Return one sequence of `length` tokens, of which the last `actions` are action tokens."""
    return replace(
        DUMMY,
        input_P=np.arange(length),
        position_P=np.arange(length),
        offset_S=np.array([0, length]),
        before_T=np.arange(length - actions, length) - 1,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_costs_six_operations_for_each_weight_and_its_attention(tied: bool) -> None:
    found = ModelArithmetic.of(dense(tie_word_embeddings=tied))
    assert (found.trained, found.frozen, found.output, found.output_trained) == (2 * LAYER, 0, HEAD, True)
    tokens, actions = 10, 7
    # Attention is causal: the first token sees itself, the last one all ten. Each pair multiplies a query and a value.
    seen = sum(range(1, tokens + 1))
    attention = 2 * (4 * 2 * 8 * 2) * seen
    weights = 2 * 2 * LAYER * tokens + 2 * HEAD * actions
    assert found.flops([row(tokens, actions)]) == 3 * (weights + attention)
    assert found.flops([row(tokens, actions)], backward=False) == weights + attention
    assert found.flops([DUMMY]) == 0


def test_frozen_weights_below_adapters_cost_four(tied_model: Path) -> None:
    plain = ModelArithmetic.of(dense())
    model = add_adapters(dense(), make_config(tied_model).model, LoraConfig(rank=2, targets=("q_proj",)))
    found, adapters = ModelArithmetic.of(model), 2 * 2 * (32 + 4 * 8)
    assert (found.trained, found.frozen, found.output_trained) == (adapters, plain.trained, False)
    tokens, actions = 10, 7
    less = 2 * plain.trained * tokens + 2 * HEAD * actions
    assert found.flops([row(tokens, actions)]) == plain.flops([row(tokens, actions)]) + 6 * adapters * tokens - less


def test_in_a_mixture_only_the_experts_of_a_token_count() -> None:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    layer = 2 * 32 * 8 * (4 + 2) + 8 * 32 + 2 * 3 * 32 * 16
    assert ModelArithmetic.of(model).trained == 2 * layer


def test_layers_of_different_sizes_are_counted_one_by_one() -> None:
    """Gemma 4's windowed layers have smaller heads, and its configuration has no common size for all layers."""
    described: Any = CONFIG_MAPPING["gemma4_text"]
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    sizes |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described(**sizes))
    assert ModelArithmetic.of(model).attention == [AttentionLayer(4, 4 * 2 * 8), AttentionLayer(math.inf, 4 * 2 * 16)]


def test_a_window_bounds_the_tokens_that_are_seen() -> None:
    kinds = ["sliding_attention", "full_attention"]
    found = ModelArithmetic.of(dense(layer_types=kinds, use_sliding_window=True, sliding_window=4))
    assert sorted(layer.window for layer in found.attention) == [4, math.inf]
    seen = sum(range(1, 11)) + (1 + 2 + 3 + 7 * 4)
    without = ModelArithmetic.of(dense())
    difference = without.flops([row(10, 7)]) - found.flops([row(10, 7)])
    assert difference == 3 * 2 * (4 * 2 * 8) * (2 * sum(range(1, 11)) - seen)


def test_tokens_that_two_sequences_begin_with_are_counted_once() -> None:
    one = row(10, 7)
    two = replace(
        one,
        input_P=np.tile(one.input_P, 2),
        position_P=np.tile(one.position_P, 2),
        offset_S=np.array([0, 10, 20]),
        before_T=np.concatenate([one.before_T, one.before_T + 10]),
    )
    found = ModelArithmetic.of(dense())
    assert len(two.computed.place_U) == 10, "both are the same"
    assert found.flops([two]) == found.flops([one]) + 6 * HEAD * 7


def test_each_pass_over_a_batch_counts(tied_model: Path) -> None:
    trainer = trainer_at(0, tied_model)
    trainer.train_step(random_shard())
    assert trainer.flops > 6 * 2 * LAYER * len({one.trajectory.task.group_id for one in random_shard().samples})
    twice = trainer_at(0, tied_model, train={"updates_per_batch": 2}, algorithm={"lag": None})
    twice.train_step(random_shard())
    assert twice.flops == 2 * trainer.flops


def test_the_memory_of_a_rank_on_the_cpu_is_its_resident_memory(tied_model: Path) -> None:
    meter = StepMeter(trainer_at(0, tied_model).mesh)
    meter.begin()
    block = np.ones(1 << 24)
    found = meter.finish(1e9)
    assert found.keys() == {"memory_gib"}, "the peak of a processor is not known, so there is no mfu"
    assert block.nbytes / GIB < found["memory_gib"] <= 1.5 * resident_bytes() / GIB


def test_the_utilisation_is_of_all_ranks_over_the_slowest_one() -> None:
    rows = torch.tensor([[2.0 * GIB, 0.5, 3e12, 4e12], [3.0 * GIB, 1.5, 3e12, 4e12]], dtype=torch.float64)
    assert performance_metrics(rows) == {"memory_gib": 3.0, "mfu": 6e12 / (1.5 * 8e12)}
    rows[1, 3] = 0
    assert performance_metrics(rows) == {"memory_gib": 3.0}, "the peak of one card is unknown"


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GB200", PEAKS["GB200"]),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A1000", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_card_is_found_by_its_name(card: str, peak: float | None) -> None:
    assert peak_flops(card) == peak


def events_of(file: Path) -> list[dict[str, Any]]:
    """Return the events of a written trace."""
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_the_profile_of_a_step_names_its_operators(
    tmp_path: Path, tied_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = make_config(tied_model, train={"profile": "0:0"}).train.profiled_steps
    profiler, trainer = StepProfiler(steps, tmp_path, 0, cuda=False), trainer_at(0, tied_model)
    profiler.begin_step(0)
    trainer.train_step(random_shard())
    with caplog.at_level(logging.INFO, "flash"):
        profiler.begin_step(1)
    file = tmp_path / "profile" / "rank-0.json.gz"
    assert f"the profile is written to {file}: open it at https://ui.perfetto.dev" in caplog.text
    names = {event["name"] for event in events_of(file)}
    assert {"step 0", "aten::mm", "aten::embedding"} <= names
    assert any(name.startswith("Optimizer.step") for name in names)
    assert [one.name for one in file.parent.iterdir()] == [file.name]


def test_the_named_steps_are_recorded_and_no_others(tmp_path: Path) -> None:
    profiler = StepProfiler(TrainConfig(profile="2:3").profiled_steps, tmp_path, 1, cuda=False)
    file = tmp_path / "profile" / "rank-1.json.gz"
    for step in range(4):
        profiler.begin_step(step)
        assert not file.exists()
    for step in range(4, 6):
        profiler.begin_step(step)
    profiler.close()
    assert {event["name"] for event in events_of(file)} >= {"step 2", "step 3"}
    assert not {"step 1", "step 4"} & {event["name"] for event in events_of(file)}


def test_an_early_end_leaves_the_steps_until_then(tmp_path: Path) -> None:
    profiler = StepProfiler(range(1, 9), tmp_path, 0, cuda=False)
    profiler.begin_step(5)
    profiler.close()
    profiler.close()
    assert "step 5" in {event["name"] for event in events_of(tmp_path / "profile" / "rank-0.json.gz")}


def test_a_trace_that_cannot_be_written_only_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file in the place of the folder")
    profiler = StepProfiler(range(1), tmp_path, 0, cuda=False)
    profiler.begin_step(0)
    profiler.begin_step(1)
    assert "the profile of trainer rank 0 was not written to" in caplog.text


def test_without_the_key_nothing_is_recorded(tmp_path: Path) -> None:
    profiler = StepProfiler(TrainConfig().profiled_steps, tmp_path, 0, cuda=False)
    profiler.begin_step(0)
    profiler.begin_step(1)
    profiler.close()
    assert not [*tmp_path.iterdir()]
