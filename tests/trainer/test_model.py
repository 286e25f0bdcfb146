"""Loading of models: full tensors, experts in several files, damaged folders and unsupported output layers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flash.config.tree import ModelConfig
from flash.errors import ConfigError
from flash.foreign.transformers import stored_tensors
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import (
    described,
    empty_model,
    load_model,
    load_plain,
    load_sharded,
    named_full_tensors,
    shard_model,
)
from tests.trainer.packed_cases import one_by_one, packed_batch, random_sequences, sharded, tiny
from tests.trainer.trainer_cases import VOCABULARY, reference_model, write_model


def test_a_sliding_window_sees_only_its_window(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tied=False, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    sequences = random_sequences()
    result = token_logprobs(sharded(folder), **packed_batch(sequences))
    with torch.no_grad():
        logp_T, _ = one_by_one(reference_model(folder), sequences, 1.0)
    torch.testing.assert_close(result.logp_T.double(), logp_T, rtol=0, atol=5e-6)


def test_full_tensors_have_hugging_face_names_without_the_tied_copy(tied_model: Path, untied_model: Path) -> None:
    for folder, tied in ((tied_model, True), (untied_model, False)):
        expected = dict(load_model(ModelConfig(path=str(folder))).state_dict())
        if tied:
            del expected["lm_head.weight"]
        found = dict(named_full_tensors(sharded(folder)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("load", [load_plain, load_sharded])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_the_bias_for_the_choice_of_experts_is_read(tmp_path: Path, kind: str, load: Callable[..., Any]) -> None:
    model: Any = tiny(kind)
    model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    model.save_pretrained(tmp_path)
    found = load(ModelConfig(path=str(tmp_path), dtype="float32"), trainer_mesh("cpu"))
    gates = [one.model.layers[1].mlp.gate.e_score_correction_bias for one in (found, model)]
    assert torch.equal(*gates)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_experts_that_lie_apart_in_several_files_are_read_tensor_by_tensor(tmp_path: Path, kind: str) -> None:
    tiny(kind).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    config = ModelConfig(path=str(tmp_path), dtype="float32")
    expected = load_model(config).state_dict()
    empty = empty_model(config)
    read = stored_tensors(str(tmp_path), empty, {name: tensor.shape for name, tensor in empty.state_dict().items()})
    assert read is not None
    assert all(torch.equal(read(name), tensor) for name, tensor in expected.items())
    found = dict(named_full_tensors(load_sharded(config, trainer_mesh("cpu"))))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (r"experts\.3\.down_proj", r"layers\.1\.mlp\.experts\.down_proj as \[3, .* expected \[4, "),
        (r"experts\.\d+\.up_proj", r"layers\.1\.mlp\.experts\.gate_up_proj in parts that do not fit together: "),
    ],
)
def test_a_missing_expert_is_refused_and_named(tmp_path: Path, lost: str, said: str) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: one for name, one in load_file(file).items() if not re.search(rf"layers\.1\..*{lost}", name)}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=said):
        load_sharded(ModelConfig(path=str(tmp_path), dtype="float32"), trainer_mesh("cpu"))


FLOAT32 = ModelConfig(path="", dtype="float32")


def test_parameters_that_a_model_freezes_itself_are_published(untied_model: Path) -> None:
    model = sharded(untied_model)
    still, _ = next(model.named_parameters())
    model.get_parameter(still).requires_grad_(False)
    assert still in dict(named_full_tensors(model))


def test_a_folder_that_holds_no_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_model(ModelConfig(path=str(tmp_path)))


# Name of a file, and its damaged content.
DAMAGED = {
    "cut off": ("model.safetensors", b"\xff\0\0\0\0\0\0\0{"),
    "another archive": ("pytorch_model.bin", b"PK\3\4"),
    "an index of nothing": ("model.safetensors.index.json", b"{}"),
    "an index that is a list": ("model.safetensors.index.json", b"[]"),
    "an index without names": ("model.safetensors.index.json", b'{"weight_map": 3}'),
    "an index of numbers": ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}'),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_weights_are_a_config_error(damage: str, untied_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(untied_model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    file, content = DAMAGED[damage]
    (folder / file).write_bytes(content)
    config = ModelConfig(path=str(folder), dtype="float32")
    with pytest.raises(ConfigError, match=r"model\.path: cannot load a causal language model from"):
        load_sharded(config, trainer_mesh("cpu"))
    with pytest.raises(ConfigError, match=r"model\.path: cannot load a causal language model from"):
        load_model(config)


@pytest.mark.parametrize("config", ["[]", '{"model_type": 3}', '{"model_type": "qwen2", "num_hidden_layers": "two"}'])
def test_a_damaged_description_of_a_model_is_a_config_error(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    for load in (load_model, empty_model):
        with pytest.raises(ConfigError, match=r"model\.path: cannot load a causal language model from"):
            load(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("told", [True, False])
def test_quantized_weights_are_refused(tied_model: Path, tmp_path: Path, told: bool) -> None:
    """Check a folder whose config.json mentions the quantization (`told`), and a folder whose config.json does not."""
    folder, name = shutil.copytree(tied_model, tmp_path / "model"), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    if told:
        described = msgspec.json.decode((folder / "config.json").read_bytes())
        described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (folder / "config.json").write_bytes(msgspec.json.encode(described))
    why = "has a quantization_config" if told else f"has {name} as F8_E4M3, which is quantized: expected whole weights"
    with pytest.raises(ConfigError, match=rf"model\.path: cannot load .*{why}"):
        load_sharded(ModelConfig(path=str(folder)), trainer_mesh("cpu"))


def test_a_model_with_an_output_layer_of_another_kind_is_refused(untied_model: Path) -> None:
    class Scaled(nn.Linear):
        # A subclass may compute anything, so only a plain linear layer is taken.
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = load_model(ModelConfig(path=str(untied_model)))
    model.set_output_embeddings(Scaled(32, VOCABULARY, bias=False))
    with pytest.raises(ConfigError, match=r"model\.path: the output layer of Qwen3ForCausalLM is a Scaled"):
        shard_model(model, trainer_mesh("cpu"), FLOAT32)


@pytest.mark.parametrize(
    ("rows", "shown"), [(28, "0.000784M"), (11_619, "135M"), (31_617, "1B"), (85_096, "7.24B"), (1_020_000, "1,040B")]
)
def test_a_model_is_described_with_its_parameters_in_millions_or_billions(rows: int, shown: str) -> None:
    with torch.device("meta"):
        layer = nn.Linear(rows, rows, bias=False)
    assert described(layer) == f"a Linear of {shown} parameters"
