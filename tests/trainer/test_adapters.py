"""Adapters are trained and nothing else. Each test compares with the same weights without adapters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, PreTrainedModel

from flash.config.learning import LoraConfig
from flash.config.tree import ModelConfig
from flash.errors import CheckpointError, ConfigError
from flash.run.models import export_model
from flash.trainer import checkpoint, checkpoint_files
from flash.trainer.model.adapters import add_adapters, engine_tensors, merge_adapters
from flash.trainer.model.canary import canary_logprobs
from flash.trainer.model.model import empty_model, load_model, named_full_tensors, published_parameters
from tests.trainer.packed_cases import tiny
from tests.trainer.test_checkpoint import HUB, TOKENIZER, same_weights, train
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    gradient_of,
    kept,
    local,
    make_config,
    random_shard,
    relative_error,
    weights_of,
    write_model,
)

LORA = LoraConfig(rank=4, alpha=6.0)
"""Options of the adapters. Alpha differs from the rank, so that a forgotten scale shows."""
TABLE: dict[str, Any] = {"lora": {"rank": LORA.rank, "alpha": LORA.alpha}}
TOKENS = [3, 17, 5, 29, 8, 11, 2, 33]
"""Token ids of a text whose log-probs are compared."""


def adapted(model: Path, **tables: Any) -> Trainer:
    """Return a new trainer of adapters on a model."""
    return Trainer(make_config(model, **TABLE | tables))


def stirred(model: Path, **tables: Any) -> Trainer:
    """Return a new trainer whose matrices B are not 0, so that the adapters have an effect."""
    trainer = adapted(model, **tables)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in published_parameters(trainer.model):
            if ".lora_B." in name:
                local(parameter).copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return trainer


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return full copies of the adapters, by name."""
    return {name: tensor.clone() for name, tensor in named_full_tensors(trainer.model)}


def merged(trainer: Trainer, model: Path) -> PreTrainedModel:
    """Return the model with the trainer's adapters added to its weights."""
    whole = load_model(ModelConfig(path=str(model)))
    merge_adapters(whole, tensors_of(trainer), LORA)
    return whole


def logprobs(model: Any) -> list[float]:
    """Return the log-probs of `TOKENS` after the first under a model of transformers."""
    with torch.no_grad():
        rows = model(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    return [float(rows[place, token]) for place, token in enumerate(TOKENS[1:])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_version_0_is_the_base_to_the_bit_in_the_dtype_of_the_run(
    tied_model: Path, untied_model: Path, dtype: str
) -> None:
    model = tied_model if dtype == "bfloat16" else untied_model
    table = {"path": str(model), "dtype": dtype, "max_length": 64}
    ours, plain = (Trainer(make_config(model, model=table, **tables)) for tables in (TABLE, {}))
    assert canary_logprobs(ours.model, TOKENS) == canary_logprobs(plain.model, TOKENS)
    own, others = {}, {}
    for name, parameter in ours.model.named_parameters():
        (own if parameter.requires_grad else others)[name] = parameter.dtype
    assert {*own.values()} == {torch.float32}
    assert {*others.values()} == {getattr(torch, dtype)}
    assert len(own) == 2 * 7 * 2, "A and B of seven layers of each of two"
    assert all(".layers." in name for name in own), "not of the output layer"


@pytest.mark.slow
def test_only_adapters_are_trained_with_the_gradient_of_the_merged_weights(model: Path, tmp_path: Path) -> None:
    """Check dL/dB = s dL/dW Aᵀ and dL/dA = s Bᵀ dL/dW, where W is the merged weight of a fully trained model.

    The scale s is alpha / rank. The model has 28 adapter matrices: A and B for seven layers of two decoder layers.
    """
    trainer, shard = stirred(model), random_shard()
    before, base = tensors_of(trainer), weights_of(trainer)
    whole = shutil.copytree(model, tmp_path / "whole")
    merged(trainer, model).save_pretrained(whole)
    reference = Trainer(make_config(whole))
    metrics, expected = trainer.train_step(shard), reference.train_step(shard)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    gradient, found, scale = gradient_of(reference), gradient_of(trainer), LORA.alpha / LORA.rank
    wanted: dict[str, Tensor] = {}
    for name in found:
        layer, _, rest = name.partition(".lora_")
        slope, end = gradient[f"{layer}.weight"], rest.partition(".")[2]
        down, up = (before[f"{layer}.lora_{side}.{end}"] for side in "AB")
        wanted[name] = scale * (up.T @ slope if rest.startswith("A") else slope @ down.T)
    assert len(found) == 28
    assert relative_error(found, wanted) < 1e-5
    assert metrics["grad_norm"] == pytest.approx(sum(float(g.square().sum()) for g in wanted.values()) ** 0.5, rel=1e-5)
    after = weights_of(trainer)
    assert {name for name in base if not torch.equal(base[name], after[name])} == {*found}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_reference_of_a_kl_is_the_base_and_no_second_model(tied_model: Path, tmp_path: Path, place: str) -> None:
    copy = shutil.copytree(tied_model, tmp_path / "copy")
    kl = {"coefficient": 0.3, "estimator": "k2", "place": place}
    train = {"async_ratio": 2.0}
    ours = stirred(tied_model, algorithm={"kl": kl}, train=train)
    others = stirred(tied_model, algorithm={"kl": kl | {"reference": str(copy)}}, train=train)
    assert ours.reference is ours.model
    shard = aged_shard()
    for trainer in (ours, others):
        trainer.version = shard.step
    assert ours.train_step(shard) == others.train_step(shard)
    assert same_weights(ours, others)


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone_and_continues_identically(tied_model: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "algorithm": {"advantage": "gae", "options": {"proximal": "ewma"}},
        "critic": {"learning_rate": 1e-3},
    }
    original = adapted(tied_model, **tables)
    train(original, 2)
    path = checkpoint.save(tmp_path, original, kept(HUB), keep=2)
    manifest = checkpoint_files.read_manifest(path)
    assert manifest.extras == ("lora", "critic", "ewma")
    assert manifest.base == original.base_fingerprint != (0, 0)
    restored = adapted(tied_model, **tables)
    train(restored, 1)
    checkpoint.load(path, restored)
    assert same_weights(original, restored)
    found = checkpoint.read_weights(path, restored)
    assert found.keys() == tensors_of(restored).keys()
    train(original, 1)
    train(restored, 1)
    assert same_weights(original, restored)
    written = [*FileSystemReader(path / "state").read_metadata().state_dict_metadata]
    policy = [name for name in written if name.startswith(("model.", "optimizer.state."))]
    assert len(policy) == 28 + 28 * 3, "each A and B, with its two moments and their count"
    assert all(".lora_" in name for name in policy)


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_refused_on_other_weights(tied_model: Path, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, adapted(tied_model), kept(HUB), keep=1)
    plain = Trainer(make_config(tied_model))
    with pytest.raises(CheckpointError, match=r"holds adapters in place of weights \(the \[lora\] table\), which this"):
        checkpoint.load(path, plain)
    other = write_model(tmp_path / "other", tied=True, initializer_range=0.2)
    with pytest.raises(CheckpointError, match=r"adapters of another model than model\.path names now"):
        checkpoint.load(path, adapted(other))


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_refused_with_another_alpha(tied_model: Path, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, adapted(tied_model), kept(HUB), keep=1)
    assert checkpoint_files.read_manifest(path).alpha == LORA.alpha
    doubled = {"lora": {"rank": LORA.rank, "alpha": 2 * LORA.alpha}}
    told = r"trained with lora\.alpha = 6: expected that, got 12"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.load(path, adapted(tied_model, **doubled))
    for merged_too in (False, True):
        with pytest.raises(CheckpointError, match=told):
            export_model(str(path), make_config(tied_model, **doubled), tmp_path / "exported", merged=merged_too)


@pytest.mark.slow
def test_an_export_loads_in_peft_and_a_merged_one_in_transformers(model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model, tmp_path / "base")
    trainer = stirred(model)
    TOKENIZER.save_pretrained(model)
    checkpoint.export_hf(trainer.model, TOKENIZER, tmp_path / "of the run")
    path = checkpoint.save(tmp_path, trainer, kept(HUB), keep=1)
    config = make_config(model, **TABLE)
    for merged_too in (False, True):
        export_model(str(path), config, tmp_path / f"exported {merged_too}", merged=merged_too)
    expected = canary_logprobs(trainer.model, TOKENS)
    assert expected != pytest.approx(logprobs(load_model(config.model)), abs=1e-2)
    assert logprobs(merged(trainer, model)) == pytest.approx(expected, abs=1e-5)
    for name in ("of the run", "exported False"):
        assert not (tmp_path / name / "config.json").exists()
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert logprobs(PeftModel.from_pretrained(base, str(tmp_path / name))) == pytest.approx(expected, abs=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "exported True", dtype=torch.float32)
    assert logprobs(whole) == pytest.approx(expected, abs=1e-5)


def test_engines_get_adapters_with_the_names_of_peft_and_the_scale(tied_model: Path) -> None:
    trainer = stirred(tied_model)
    own, given = tensors_of(trainer), dict(engine_tensors(trainer.model, LORA))
    assert dict(engine_tensors(trainer.model, None)).keys() == own.keys()
    name = "model.layers.1.mlp.up_proj.lora_{}.weight"
    for side, scale in (("A", 1.0), ("B", LORA.alpha / LORA.rank)):
        mine = own[name.format(f"{side}.default")]
        assert torch.equal(given["base_model.model." + name.format(side)], mine * scale)


def test_adapters_of_a_model_of_usual_size_are_a_few_percent_of_its_weights(tmp_path: Path) -> None:
    """The shape is that of SmolLM2-135M; larger models have smaller shares. No memory is allocated."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    folder = tmp_path / "model"
    write_model(folder, tied=True, num_hidden_layers=1)
    shape = {**sizes, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152}
    described = AutoModelForCausalLM.from_pretrained(folder).config
    described.update(shape)
    described.layer_types = ["full_attention"] * sizes["num_hidden_layers"]
    described.save_pretrained(folder)
    named = ModelConfig(path=str(folder), dtype="bfloat16")
    model = add_adapters(empty_model(named), named, LoraConfig())
    share = sum(tensor.numel() for _, tensor in published_parameters(model)) / sum(
        tensor.numel() for tensor in model.parameters()
    )
    assert 0.03 < share < 0.05


def test_a_target_that_peft_refuses_is_named_with_the_possible_ones() -> None:
    model = tiny("mamba2", hidden_size=32, num_heads=4, head_dim=16)
    with pytest.raises(ConfigError, match=r"lora.targets: .* of Mamba2ForCausalLM \(.*out_proj.*\); expected so"):
        add_adapters(model, ModelConfig(path="unused", dtype="bfloat16"), LoraConfig())
    assert add_adapters(model, ModelConfig(path="unused", dtype="bfloat16"), LoraConfig(targets=("in_proj",))) is model


def test_a_target_that_the_model_lacks_is_named_with_the_possible_ones(tied_model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"lora.targets: there is no 'qkv_proj'; .* Qwen3ForCausalLM are down_proj, gat"
    ):
        adapted(tied_model, lora={"targets": ["q_proj", "qkv_proj"]})
    few = adapted(tied_model, lora={"targets": ["q_proj"]})
    assert {name.split(".")[4] for name, _ in published_parameters(few.model)} == {"q_proj"}
