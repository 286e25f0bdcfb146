"""Arguments of `flash eval` and `flash rollout`: configurations, run directories and models."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from flash.cli.main import parse
from flash.cli.sampling import evaluation_json, load_named, rewards_by_problem
from flash.errors import ConfigError
from flash.observe.rundir.samples import Sample, TokenValues
from flash.observe.stats import best_of_each
from flash.trainer.checkpoint_files import MANIFEST
from flash.types import Outcome

CONFIG = """
run = { name = "a-run", resume = true }
model = { path = "outputs/models/gone" }
env = { path = "envs.arithmetic:Arithmetic", options = { digits = 3 } }
cluster = { gpus_per_node = 0 }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a run, a model, a GGUF file and checkpoints."""
    monkeypatch.chdir(tmp_path)
    for model in ("a run/model", "a model"):
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text("{}")
    (tmp_path / "a run" / "config.toml").write_text(CONFIG)
    for checkpoint in ("a run/checkpoints/step", "copied"):
        (tmp_path / checkpoint).mkdir(parents=True)
        (tmp_path / checkpoint / MANIFEST).write_text("{}")
    (tmp_path / "a.gguf").write_text("GGUF")
    return tmp_path


def asked(*words: str) -> argparse.Namespace:
    """Return the parsed arguments of `flash eval` with these words."""
    return parse(["eval", *words])


def test_a_run_directory_means_its_environment_and_its_last_weights() -> None:
    config, named = load_named(asked("a run", "eval.problems=7"))
    assert named == "a run"
    assert config.model.path == "a run/model"
    assert config.env.options == {"digits": 3}
    assert (config.eval.problems, config.run.resume) == (7, False)


def test_a_named_model_replaces_that_of_the_run() -> None:
    config, named = load_named(asked("a run", "--model", "a model"))
    assert (config.model.path, named) == ("a model", "a model")


def test_a_gguf_file_is_replaced_by_its_folder() -> None:
    config, named = load_named(asked("a.gguf", "--env", "envs.arithmetic:Arithmetic", "cluster.gpus_per_node=0"))
    assert (config.model.path, named) == ("./a.hf", "a.gguf")


@pytest.mark.parametrize("model", ["a model", "owner/name"])
def test_a_model_is_played_on_the_environment_that_is_named(model: str) -> None:
    words = ("--env", "envs.arithmetic:Arithmetic", "env.options.digits=1", "cluster.gpus_per_node=0")
    config, named = load_named(asked(model, *words))
    assert (config.model.path, named) == (model, model)
    assert (config.env.path, config.env.options) == ("envs.arithmetic:Arithmetic", {"digits": 1})


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("a model",), "a model is a model: name its environment with --env"),
        (("a.gguf",), "a.gguf is a model: name its environment with --env"),
        (("a run", "--env", "x:Y", "--model", "a model"), "--env goes with one model: a folder, hub id or GGUF file"),
        (("a run/config.toml", "--env", "x:Y"), "--env goes with one model: a folder, hub id or GGUF file"),
        (("gone.toml",), "there is no configuration file gone.toml"),
        (("a gone",), "there is no configuration, run directory or model a gone; "),
        ((), "expected a config, a run directory, or a model with --env"),
        (("--model", "a run"), "--model goes with a config; a run is named alone: a run"),
        (("--model", "a model"), "--model goes with a config: CONFIG --model a model; without one"),
        (("a run/checkpoints/step",), "step is a checkpoint: name its run as well: a run --model a run/che"),
        (("--model", "a run/checkpoints/step"), "is a checkpoint: name its run as well: a run --model a run/check"),
        (("copied",), "copied is a checkpoint: name its run as well: RUN_DIR --model copied"),
        (("mine.toml", "a run"), "a run is a run, which has its own configuration: name it alone, or with --model a"),
    ],
)
def test_an_unclear_command_line_is_refused(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_named(asked(*words))


def test_a_result_has_pass_at_k_over_problems() -> None:
    def sample(problem: int, reward: float) -> Sample:
        """Return a readable sample of a problem with this reward."""
        return Sample(0, 0, problem, 0, 0, "", Outcome.OK, reward, [], [], [], [], [], {}, TokenValues([]), [])

    played = [sample(0, 1.0), sample(0, 0.0), sample(1, 0.0), sample(1, 0.0)]
    assert rewards_by_problem(played) == [[1.0, 0.0], [0.0, 0.0]]
    found = json.loads(evaluation_json({"mean_reward": 0.25}, best_of_each(rewards_by_problem(played))))
    assert found["mean_reward"] == 0.25
    assert [(one["k"], one["mean"]) for one in found["best_of"]] == [(1, 0.25), (2, 0.5)]


def test_a_folder_that_is_neither_a_run_nor_a_model_is_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^\. is no run directory and no model: .*; it has the runs a run$"):
        load_named(asked("."))
    with pytest.raises(ConfigError, match=r"empty is no run directory and no model: expected config\.toml or"):
        load_named(asked("empty"))


def test_a_configuration_of_flash_sft_has_no_environment_to_play(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    (tmp_path / "sft.toml").write_text(
        f'run.name = "a-run"\nmodel.path = "{tmp_path}"\nsft.data = "{tmp_path}/rows.jsonl"\n'
    )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"`sft` .* has no environment: name a model alone, with --env"):
        load_named(parse(["eval", str(tmp_path / "sft.toml")]))
