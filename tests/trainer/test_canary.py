"""The canary's text, and the tolerance that follows from the precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from flash.config.tree import Config
from flash.errors import ConfigError, WeightsError
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.canary import (
    MIN_TOLERANCE,
    ROUNDING_FACTOR,
    SHORT,
    CanaryMaker,
    CanaryText,
    canary_logprobs,
    draw_canary,
)
from flash.trainer.model.model import load_model, shard_model
from flash.weights.versions import check_canary
from tests.trainer.packed_cases import one_by_one
from tests.trainer.trainer_cases import VOCABULARY, make_config, reference_model, write_model


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with widely spread log-probs, like those of a trained model."""
    return write_model(tmp_path_factory.mktemp("sure") / "model", tied=False, initializer_range=0.3)


def configured(folder: Path, dtype: str = "float32", **weights: Any) -> Config:
    """Return a configuration of the model in a folder. `weights` are options of `[weights]`."""
    model = {"path": str(folder), "dtype": dtype, "max_length": 64}
    return make_config(folder, model=model, weights=weights)


def drawn(folder: Path, dtype: str = "float32", **weights: Any) -> tuple[PreTrainedModel, CanaryText, Config]:
    """Draw the text and shard the model, in the order in which a trainer starts."""
    config = configured(folder, dtype, **weights)
    whole = load_model(config.model)
    text = draw_canary(whole, config)
    return shard_model(whole, trainer_mesh("cpu"), config.model), text, config


def test_the_text_is_sampled_from_the_model_and_the_same_each_time(sure: Path) -> None:
    _, text, _ = drawn(sure)
    _, again, _ = drawn(sure)
    assert text == again
    assert len(text.token_ids) == 32
    with torch.no_grad():
        expected, _ = one_by_one(reference_model(sure), [torch.tensor(text.token_ids)], 1.0)
    assert text.exact == pytest.approx(expected.tolist(), abs=1e-5)
    chosen_at_random = torch.randint(0, VOCABULARY, (32,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        at_random, _ = one_by_one(reference_model(sure), [chosen_at_random], 1.0)
    assert sum(text.exact) / 31 > float(at_random.mean()) + 1


def test_each_pass_samples_a_token_of_every_short_text(sure: Path) -> None:
    whole = load_model(configured(sure).model)
    passes: list[int] = []
    whole.register_forward_pre_hook(lambda _, __, given: passes.append(given["input_ids"].numel()), with_kwargs=True)
    text = draw_canary(whole, configured(sure))
    assert passes == [32 // SHORT] * (SHORT - 1) + [32]
    assert len({tuple(text.token_ids[start : start + SHORT]) for start in range(0, 32, SHORT)}) == 32 // SHORT


def test_the_text_leaves_the_engine_room_for_a_token(sure: Path) -> None:
    config = make_config(sure, model={"path": str(sure), "dtype": "float32", "max_length": 20})
    assert len(draw_canary(load_model(config.model), config).token_ids) == 19


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_tolerance_follows_from_the_rounding_error_on_the_text(sure: Path, dtype: str) -> None:
    model, text, config = drawn(sure, dtype)
    maker = CanaryMaker(text, model, config)
    gaps = [abs(one - exact) for one, exact in zip(maker.canary(model).logprobs, text.exact, strict=True)]
    assert maker.rounding == pytest.approx(sum(gaps) / len(gaps))
    assert maker.tolerance == max(ROUNDING_FACTOR * maker.rounding, MIN_TOLERANCE[dtype])
    smallest, largest = {"float32": (0, 1e-5), "bfloat16": (1e-3, 0.2), "float16": (1e-4, 0.02)}[dtype]
    assert smallest <= maker.rounding <= largest


def test_a_configured_tolerance_is_used(sure: Path) -> None:
    model, text, config = drawn(sure, "bfloat16", canary_tolerance=0.123)
    assert CanaryMaker(text, model, config).canary(model).tolerance == 0.123


def test_the_tolerance_grows_with_the_size_of_the_log_probs(sure: Path) -> None:
    model, text, config = drawn(sure)
    maker = CanaryMaker(text, model, config)
    before = maker.canary(model)
    assert before.tolerance == maker.tolerance
    with torch.no_grad():
        # Rounding in float32 is relative to a logit: logits that are ten times as large differ by ten times as much.
        model.lm_head.weight.mul_(-10)
    after = maker.canary(model)
    sizes = [max(sum(map(abs, canary.logprobs)) / len(canary.logprobs), 1.0) for canary in (before, after)]
    assert after.tolerance == pytest.approx(before.tolerance * sizes[1] / sizes[0])
    assert after.tolerance > 10 * before.tolerance


@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16", "float16"])
def test_a_healthy_engine_passes_and_one_with_another_layer_does_not(sure: Path, engine_dtype: str) -> None:
    model, text, config = drawn(sure, engine_dtype)
    canary = CanaryMaker(text, model, config).canary(model)
    engine = load_model(config.model).to(getattr(torch, engine_dtype))
    check_canary(canary, plain_logprobs(engine, canary.token_ids), engine=0, version=0)
    with torch.no_grad():
        engine.model.layers[1].mlp.down_proj.weight.normal_(0, 0.3)
    with pytest.raises(WeightsError, match="in the mean"):
        check_canary(canary, plain_logprobs(engine, canary.token_ids), engine=0, version=0)


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, token_ids: list[int]) -> list[float]:
    """Return log-probs as an independent engine computes them: in its dtype, with transformers' attention."""
    rows = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    return [float(rows[at, token]) for at, token in enumerate(token_ids[1:])]


def test_a_model_whose_activations_overflow_float16_is_refused_with_advice(sure: Path, tmp_path: Path) -> None:
    model = load_model(configured(sure).model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
    model.save_pretrained(tmp_path / "large")
    sharded, text, config = drawn(tmp_path / "large", "float16")
    with pytest.raises(ConfigError, match=r'model.dtype = "float16".*set model.dtype = "bfloat16"'):
        CanaryMaker(text, sharded, config)
    sharded, text, config = drawn(tmp_path / "large", "bfloat16")
    CanaryMaker(text, sharded, config)


def test_a_model_with_damaged_weights_is_refused(sure: Path) -> None:
    config = configured(sure)
    whole = load_model(config.model)
    with torch.no_grad():
        whole.model.norm.weight.fill_(torch.nan)
    text = draw_canary(whole, config)
    with pytest.raises(ConfigError, match="damaged"):
        CanaryMaker(text, shard_model(whole, trainer_mesh("cpu"), config.model), config)


class Stopping(nn.Module):
    """Layer that raises `error` in its forward pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise self.error


def test_a_model_that_fails_on_tokens_is_refused_by_name(sure: Path) -> None:
    config = configured(sure)
    whole = load_model(config.model)
    whole.model.norm = Stopping(TypeError("expected a picture"))
    with pytest.raises(ConfigError, match=r"model\.path: Qwen3ForCausalLM cannot be trained.*expected a picture"):
        draw_canary(whole, config)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
     torch.OutOfMemoryError("CUDA out of memory")],
    ids=["a lost rank", "memory"],
)  # fmt: skip
def test_errors_that_the_model_did_not_cause_are_passed_on(sure: Path, error: Exception) -> None:
    config = configured(sure)
    whole = load_model(config.model)
    whole.model.norm = Stopping(error)
    with pytest.raises(type(error)) as raised:
        draw_canary(whole, config)
    assert raised.value is error


def test_the_log_probs_of_the_canary_change_with_the_weights(sure: Path) -> None:
    model, text, config = drawn(sure)
    maker = CanaryMaker(text, model, config)
    before = maker.canary(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    after = maker.canary(model)
    assert before.token_ids == after.token_ids
    assert before.tolerance == after.tolerance
    assert after.logprobs == canary_logprobs(model, text.token_ids) != before.logprobs
