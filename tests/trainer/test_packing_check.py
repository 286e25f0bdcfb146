"""Which models may be trained on packed rows: tiny ones of many kinds, from their configurations alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel

from flash.errors import ConfigError
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.model import shard_model
from flash.trainer.model.packing_check import check_packing
from flash.trainer.step import Trainer
from tests.trainer.packed_cases import tiny
from tests.trainer.trainer_cases import make_config, weights_of, write_model


def check(model: PreTrainedModel, dtype: Any = "float32", max_length: int = 64) -> None:
    config = make_config(Path("unused"), train={"max_tokens_per_microbatch": 128})
    config = replace(config, model=replace(config.model, dtype=dtype, max_length=max_length))
    check_packing(shard_model(model, trainer_mesh("cpu"), config.model), config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3_moe", {}),
        ("mistral", {"sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        ("deepseek_v3", {}),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
        ("lfm2_moe", {"layer_types": ["full_attention", "full_attention"]}),
    ],
    ids=str,
)
def test_a_model_that_only_attention_mixes_is_accepted(kind: str, options: dict[str, Any], dtype: str) -> None:
    check(tiny(kind, **options), dtype)


@pytest.mark.parametrize(
    ("kind", "options", "layer"),
    [
        ("lfm2_moe", {"layer_types": ["full_attention", "conv"]}, r"layers\.1\.conv, a Lfm2MoeShortConv in a Lfm2Moe"),
        ("minimax", {}, r"self_attn, a MiniMaxLightningAttention in a MiniMaxDecoderLayer"),
        ("llama4_text", {"attention_chunk_size": 8}, r"layers\.0\.self_attn, a Llama4TextAttention"),
        ("phimoe", {"sliding_window": 8}, r"layers\.0\.self_attn, a PhimoeAttention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_else_mixes_tokens_is_found_and_named(kind: str, options: dict[str, Any], layer: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path: .* differ by .* nats\. The first layer to differ .*{layer}"):
        check(tiny(kind, **options))


class Slanted(torch.autograd.Function):
    """Says the same of packed rows, and gives them another gradient."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return states.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * grad.shape[1]


class SlantedLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Slanted.apply(super().forward(input))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gradient_that_is_another_one_of_packed_rows_is_found_and_named(dtype: str) -> None:
    model: Any = tiny("qwen3")
    for layer in model.model.layers:
        layer.self_attn.k_proj.__class__ = SlantedLinear
    with pytest.raises(ConfigError, match=r"model\.path: Qwen3ForCausalLM .*another gradient .*self_attn"):
        check(model, dtype)


def test_the_check_leaves_no_gradient(untied_model: Path) -> None:
    trainer = Trainer(make_config(untied_model))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.optimizer.state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_does_not_compute_in_half_precision_is_told_so(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf'model\.dtype: MiniMax\w+ mixes {dtype} .*Set model\.dtype = "float32"'):
        check(tiny("minimax"), dtype)


def test_what_leaks_stands_out_of_the_rounding_of_bfloat16() -> None:
    with pytest.raises(ConfigError, match="Lfm2MoeShortConv"):
        check(tiny("lfm2_moe", layer_types=["conv", "full_attention"]), "bfloat16")


@pytest.mark.parametrize(("kind", "window"), [("llama4_text", "attention_chunk_size"), ("phimoe", "sliding_window")])
def test_a_window_that_no_sequence_outgrows_does_not_matter(kind: str, window: str) -> None:
    check(tiny(kind, **{window: 64}), max_length=64)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt_oss", "GptOssAttention uses capped or sink attention"),
        ("mimo_v2_flash", "MiMoV2FlashAttention uses capped or sink attention"),
        ("gemma2", "Gemma2Attention uses capped or sink attention"),
        ("granite", "GraniteForCausalLM caps, scales or otherwise changes the logits"),
        ("nemotron", "NemotronAttention does not pass on"),
        ("moshi", "MoshiAttention does not pass on"),
        ("doge", "DogeAttention makes a mask of its own"),
        (
            "deepseek_v32",
            "DeepseekV32ForCausalLM cannot be trained on packed sequences, it stops at them with Type",
        ),
    ],
)
def test_a_model_that_cannot_be_packed_is_one_typed_error_before_the_first_step(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path: {message}"):
        check(tiny(kind))


def test_a_trainer_refuses_such_a_model_and_names_a_reference_of_that_kind(tmp_path: Path) -> None:
    good = write_model(tmp_path / "good", tied=False)
    bad = tmp_path / "bad"
    tiny("minimax").save_pretrained(bad)
    with pytest.raises(ConfigError, match=r"model\.path: MiniMaxForCausalLM gives packed"):
        Trainer(make_config(bad))
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.reference: MiniMaxForCausalLM gives packed"):
        Trainer(make_config(good, algorithm={"kl": {"coefficient": 0.1, "reference": str(bad)}}))


def test_the_check_leaves_the_model_and_the_random_numbers_as_they_were(untied_model: Path) -> None:
    state = torch.get_rng_state()
    trainer = Trainer(make_config(untied_model))
    model = AutoModelForCausalLM.from_pretrained(untied_model)
    found = weights_of(trainer)
    assert all(torch.equal(value, found[name]) for name, value in model.named_parameters())
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    check_packing(trainer.model, make_config(untied_model))
    assert torch.equal(torch.rand(1), expected)
    torch.set_rng_state(state)
