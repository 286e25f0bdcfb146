"""A GGUF file becomes an ordinary model folder, or causes one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flash.config.tree import ModelConfig
from flash.errors import ConfigError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.trainer.model.from_gguf import Header, convert, describe, examine, save_tokenizer
from flash.trainer.model.model import load_model
from flash.types import Message
from tests.gguf_files import POSITIONS, tensors, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small GGUF file of a llama, whose layers are quantised."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    """Return the folder to which the file is converted."""
    made = file.parent / "made"
    made.mkdir()
    convert(file, made)
    return made


def test_the_folder_is_an_ordinary_model_in_bfloat16_without_quantisation(folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    assert told["dtype"] == "bfloat16"
    assert "quantization_config" not in told
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert len({part.stat().st_mode for part in folder.iterdir()}) == 1
    model = load_model(ModelConfig(path=str(folder)))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_weights_equal_the_dequantised_weights_in_bfloat16(folder: Path, name: str, there: str) -> None:
    written = tensors()[name]
    if "blk" in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        written = gguf.dequantize(gguf.quantize(written, kind), kind)
    assert torch.equal(load_file(folder / "model.safetensors")[there], torch.from_numpy(written).bfloat16())


def test_the_tokenizer_comes_with_its_chat_template_and_the_length_of_the_model(folder: Path) -> None:
    tokenizer = HfTokenizer(ModelConfig(path=str(folder)))
    tokens = tokenizer.render([Message("user", "hi 1")])
    assert tokenizer.token_texts(tokens)[:1] == ["<|im_start|>"]
    assert tokenizer.inner.decode(tokens) == "<|im_start|>user\nhi 1<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.inner.model_max_length == POSITIONS
    assert tokenizer.inner.eos_token == "<|im_end|>"


def test_the_tokenizer_alone_equals_the_tokenizer_of_the_folder(file: Path, folder: Path, tmp_path: Path) -> None:
    save_tokenizer(file, tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


def test_a_file_is_described_before_it_is_converted(file: Path) -> None:
    assert describe(file) == "a LlamaForCausalLM of 0.0784M parameters"
    assert examine(file) == Header(POSITIONS, 2 * sum(values.size for values in tensors().values()))


def refused(file: Path) -> str:
    """Return the error message for a file, from its header or from the conversion."""
    folder = file.parent / "made"
    folder.mkdir()
    try:
        examine(file)
        convert(file, folder)
    except ConfigError as error:
        return str(error)
    pytest.fail("it was converted")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99])
def test_a_file_that_was_cut_off_is_refused(file: Path, tmp_path: Path, share: float) -> None:
    whole = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    assert f"{tmp_path / 'cut.gguf'} is no whole GGUF file" in refused(tmp_path / "cut.gguf")


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("weights, as it were\n" * 100)
    assert "text.gguf is no whole GGUF file" in refused(tmp_path / "text.gguf")


def test_an_architecture_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    told = refused(write_gguf(tmp_path / "new.gguf", architecture="mamba-of-tomorrow"))
    assert "new.gguf cannot be converted" in told
    assert "mamba-of-tomorrow" in told
    assert "\n" not in told


def test_tensors_of_a_type_that_cannot_be_dequantised_are_refused_by_its_name(tmp_path: Path) -> None:
    integers = np.zeros((64, 64), np.int8)
    told = refused(write_gguf(tmp_path / "int.gguf", changed={"blk.0.attn_q.weight": integers}))
    assert told == f"{tmp_path / 'int.gguf'} holds tensors of the type I8, which cannot be dequantised"


@pytest.mark.parametrize(
    ("value", "why"),
    [(None, "lacks tensors of its model, such as "), (np.nan, "holds numbers that are not finite in its tensor ")],
)
def test_a_missing_tensor_or_one_that_is_not_finite_is_refused(tmp_path: Path, value: float | None, why: str) -> None:
    changed: Any = None if value is None else np.full(64, value, np.float32)
    told = refused(write_gguf(tmp_path / "odd.gguf", changed={"blk.1.ffn_norm.weight": changed}))
    assert f"{why}model.layers.1.post_attention_layernorm.weight" in told
