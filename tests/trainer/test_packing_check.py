"""Check for models that can be trained on packed rows: tiny models of many kinds, made from their configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PhiForCausalLM, PreTrainedModel

from flash.errors import ConfigError
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.model import shard_model
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.model.packing_check import check_packing
from flash.trainer.step import Trainer
from tests.trainer.packed_cases import tiny
from tests.trainer.test_step import naive_loss
from tests.trainer.trainer_cases import (
    gradient_of,
    make_config,
    random_shard,
    reference_model,
    relative_error,
    weights_of,
    write_model,
)


def check(model: PreTrainedModel, dtype: Any = "float32", max_length: int = 64) -> bool:
    """Return True if sequences can share a row of the model, by `check_packing` with these options of `[model]`."""
    config = make_config(Path("unused"), train={"max_tokens_per_microbatch": 128})
    config = replace(config, model=replace(config.model, dtype=dtype, max_length=max_length))
    check_packing(shard_model(model, trainer_mesh("cpu"), config.model), config)
    return takes_packed_rows(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
        ("gemma2", {"sliding_window": 8}),
        ("gpt_oss", {"sliding_window": 8}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere2", {"sliding_window": 8}),
    ],
    ids=str,
)
def test_a_model_that_only_attention_mixes_is_packed(kind: str, options: dict[str, Any], dtype: str) -> None:
    assert check(tiny(kind, **options), dtype)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_model_that_only_attention_mixes_is_packed_in_float16(kind: str) -> None:
    assert check(tiny(kind), "float16")


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
def test_what_else_mixes_tokens_is_found_and_named(
    kind: str, options: dict[str, Any], layer: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not check(tiny(kind, **options))
    assert re.search(
        rf"model\.path: .* by .* nats; the first layer to differ .*{layer}.* one sequence at a time", caplog.text
    )


def test_recurrent_layers_are_found_by_name_if_weights_are_too_small_to_show_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny("lfm2_moe", layer_types=["full_attention", "conv"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-2)
    assert not check(model)
    assert "layers whose state runs on from one token to the next (conv). It therefore gets one" in caplog.text


class Slanted(torch.autograd.Function):
    """Identity with a wrong gradient: it is multiplied by the length of the row, so packing changes it."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return states.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * grad.shape[1]


class SlantedLinear(torch.nn.Linear):
    """Linear layer with the wrong gradient of `Slanted`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Slanted.apply(super().forward(input))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gradient_that_differs_for_packed_rows_is_found_and_named(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny("qwen3")
    for layer in model.model.layers:
        layer.self_attn.k_proj.__class__ = SlantedLinear
    assert not check(model, dtype)
    assert re.search(r"model\.path: Qwen3ForCausalLM .*another gradient .*self_attn", caplog.text)


def test_the_check_leaves_no_gradient(untied_model: Path) -> None:
    trainer = Trainer(make_config(untied_model))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.optimizer.state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_fails_in_half_precision_is_refused_with_advice(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf'model\.dtype: MiniMax\w+ mixes {dtype} .*Set model\.dtype = "float32"'):
        check(tiny("minimax"), dtype)


def test_a_leak_is_larger_than_the_rounding_of_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    assert not check(tiny("lfm2_moe", layer_types=["conv", "full_attention"]), "bfloat16")
    assert "Lfm2MoeShortConv" in caplog.text


@pytest.mark.parametrize(("kind", "window"), [("llama4_text", "attention_chunk_size"), ("phimoe", "sliding_window")])
def test_a_window_longer_than_any_sequence_does_not_matter(kind: str, window: str) -> None:
    assert check(tiny(kind, **{window: 64}), max_length=64)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nemotron", "NemotronAttention does not pass the layout"),
        ("moshi", "MoshiAttention does not pass the layout"),
        ("doge", "DogeAttention makes a mask of its own"),
        ("deepseek_v32", "fails on packed sequences: Type"),
        ("falcon_mamba", "does not use transformers' attention interface"),
    ],
)
def test_a_model_that_cannot_be_packed_gets_one_sequence_at_a_time(
    kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not check(tiny(kind))
    assert reason in caplog.text


class OtherLogits(PhiForCausalLM):
    """Model that cuts its logits after the output layer, in a way that the trainer does not know."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clamp(max=30.0)
        return output


class SeesAhead(PhiForCausalLM):
    """Model that reads its tokens backwards, so that log-probs depend on later tokens."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input_ids.flip(-1), **kwargs)


@pytest.mark.parametrize(
    ("made_of", "message"),
    [(OtherLogits, "OtherLogits caps, scales or otherwise changes"), (SeesAhead, "SeesAhead .* depends on later ones")],
)
def test_a_model_whose_log_probs_are_not_those_of_a_policy_is_refused(made_of: Any, message: str) -> None:
    model = tiny("phi")
    model.__class__ = made_of
    with pytest.raises(ConfigError, match=rf"model\.path: .*{message}"):
        check(model)


@pytest.mark.slow
def test_micro_batches_have_one_sequence_if_one_of_the_models_needs_that(tmp_path: Path) -> None:
    folder = tmp_path / "lfm2"
    tiny("lfm2", layer_types=["conv", "full_attention"], intermediate_size=48).save_pretrained(folder)
    shard = random_shard()
    trainer = Trainer(make_config(folder, algorithm={"objective": "grpo", "aggregation": "token_mean"}))
    metrics = trainer.train_step(shard)
    reference = reference_model(folder)
    naive_loss(reference, shard, "grpo", "token_mean").backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["shared_token_share"] == 0.0

    packed = write_model(tmp_path / "packed", tied=False)
    judged = Trainer(make_config(packed, algorithm={"kl": {"coefficient": 0.1, "reference": str(folder)}}))
    assert judged.train_step(shard)["shared_token_share"] == 0.0


def test_the_check_changes_neither_the_model_nor_the_random_state(untied_model: Path) -> None:
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
