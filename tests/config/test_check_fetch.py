"""Sources of a model: `model.fetch`, and a GGUF file in `model.path`, which is replaced by its folder. Mistakes in them
are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.config.load import dump, load
from flash.config.tree import Config
from flash.errors import ConfigError

PPO = ("algorithm.objective=ppo", "algorithm.advantage=gae", "critic.path=tiny.gguf")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the current directory, with two GGUF files and a configuration that fetches a model."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny.gguf", "other.gguf"):
        (tmp_path / name).write_text("GGUF")
    (tmp_path / "run.toml").write_text(
        """
        run = { name = "a-run" }
        model = { path = "outputs/models/pretrained", fetch = "smollm2-135m" }
        env = { path = "envs.arithmetic:Arithmetic" }
        cluster = { gpus_per_node = 0 }
        """
    )


def resolve(*overrides: str) -> Config:
    """Return the configuration of run.toml with these overrides."""
    return load([Path("run.toml")], overrides)


def test_the_model_folder_may_be_missing_if_it_can_be_fetched() -> None:
    assert resolve().model.fetch == "smollm2-135m"


def test_a_gguf_file_is_replaced_by_its_folder_which_stays_when_the_dumped_configuration_is_read() -> None:
    config = resolve("model.path=tiny.gguf", "model.fetch=none")
    assert (config.model.path, config.model.fetch) == ("./tiny.hf", "tiny.gguf")
    Path("again.toml").write_text(dump(config))
    assert load("again.toml") == config


def test_critics_and_a_reference_that_name_the_policys_gguf_file_get_its_folder_too() -> None:
    reference = ("algorithm.kl.coefficient=0.1", "algorithm.kl.reference=tiny.gguf")
    config = resolve("model.path=tiny.gguf", "model.fetch=none", *PPO, *reference)
    assert config.critic is not None
    assert config.algorithm.kl is not None
    assert (config.critic.path, config.algorithm.kl.reference) == ("./tiny.hf", "./tiny.hf")


REFUSED = {
    "model.fetch=smollm2-135": (
        '`model.fetch` (setting): expected "smollm2-135m", or a .gguf file, got "smollm2-135"; did you mean '
        "`smollm2-135m`?"
    ),
    "tiny_model.layers=1": (
        "`model.fetch` (run.toml): [tiny_model] is there too, and both say how the model is made: leave one out"
    ),
    "model.max_length=8193 train.max_tokens_per_microbatch=9000": (
        "`model.max_length` (setting): expected at most 8192, the positions of smollm2-135m, got 8193"
    ),
    "model.path=owner/name": (
        "`model.path` (setting): owner/name may be a hub id: expected ./owner/name, or no model.fetch (`none`)"
    ),
    "model.path=gone.gguf model.fetch=none": (
        "`model.path` (setting): there is no file gone.gguf: expected a GGUF file"
    ),
    "model.fetch=gone.gguf": "`model.fetch` (setting): there is no file gone.gguf: expected a GGUF file",
    "model.path=./gone.hf model.fetch=gone.gguf": (
        "`model.fetch` (setting): there is no file gone.gguf: expected a GGUF file"
    ),
    "model.path=./tiny.gguf": (
        "`model.path` (setting): expected the folder into which model.fetch is converted, or no model.fetch "
        "(`none`), got the file ./tiny.gguf"
    ),
    "algorithm.objective=ppo algorithm.advantage=gae critic.path=other.gguf": (
        "`critic.path` (setting): other.gguf is a GGUF file (`flash fetch other.gguf` makes the folder ./other.hf of "
        "it): expected a Hugging Face model, or a hub id"
    ),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_a_source_or_length_that_cannot_work_is_refused_with_its_key(overrides: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(*overrides.split())
    assert str(error.value) == REFUSED[overrides]
