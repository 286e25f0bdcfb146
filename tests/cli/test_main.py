"""The command line: its arguments, the errors about them, and the dry run."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flash.cli.main import main
from flash.trainer.model.tiny_model import save_tokenizer
from tests.trainer.trainer_cases import write_model

CONFIG = """
run = { name = "a-run" }
model = { path = "{model}", max_length = 128 }
rollout = { max_new_tokens = 8 }
env = { path = "envs.arithmetic:Arithmetic" }
cluster = { gpus_per_node = 0 }
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model with a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("main") / "model", tied=True)
    save_tokenizer(folder, "envs.arithmetic:Arithmetic", {})
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> str:
    """Return the path of a configuration file that names the small model."""
    (tmp_path / "run.toml").write_text(CONFIG.replace("{model}", str(model)))
    return str(tmp_path / "run.toml")


@pytest.mark.parametrize("order", [["--dry-run", "{}", "{}"], ["{}", "--dry-run", "{}"], ["{}", "{}", "--dry-run"]])
def test_files_and_overrides_stand_before_or_behind_options(
    config: str, order: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = iter([config, "run.steps=7"])
    arguments = [next(words) if word == "{}" else word for word in order]
    assert main(["train", *arguments]) == 0
    said = capsys.readouterr()
    assert "steps = 7" in said.out
    assert f"model: {model}, a Qwen3ForCausalLM of" in said.err


MODULE = """
class Wrong:
    def __init__(self, path, template):
        pass
    def reset(self, seed):
        return "1+1=", {}
    def step(self, action):
        return "", "no number", True, False, {}
    def close(self):
        pass

def three(completion, answer, more):
    return 1.0

def text(completion, answer):
    return "right"
"""
OBJECTIVE = """
from algorithms.base import Objective, ObjectiveOutput

class Nan(Objective, frozen=True):
    def __call__(self, tokens):
        return ObjectiveOutput(tokens.logp_T.exp().neg().log() * tokens.advantage_T, {})
"""
DATA = '{{ path = "envs.dataset:DatasetEnv", options = {{ path = "{folder}/whole.jsonl", template = "plain" }} }}'


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "env.path=wrong_for_dry_run:Wrong",
            "the reward must be a finite number, but is 'no number'",
        ),
        ("env.options.verifier=wrong_for_dry_run:three", "must take two arguments, completion and answer: missing"),
        ("env.options.verifier=wrong_for_dry_run:text", "the reward must be a finite number, but is 'right'"),
        ("env.options.path={folder}/holes.jsonl", "row 2: 'answer' is null; expected a value, or leave the row out"),
        ("algorithm.objective=wrong_objective_for_dry_run:Nan", "Nan gives a loss of nan on ordinary tokens"),
        ("model.path={folder}/strange", "model.path"),
        ("algorithm.teacher.path={folder}/other", "algorithm.teacher.path: the tokenizer of"),
    ],
)
def test_a_dry_run_finds_faults_that_would_otherwise_appear_later(
    override: str, error: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong_for_dry_run.py").write_text(MODULE)
    (tmp_path / "wrong_objective_for_dry_run.py").write_text(OBJECTIVE)
    rows = [f'{{"prompt": "1+{n}=", "answer": {n + 1}}}\n' for n in range(20)]
    (tmp_path / "whole.jsonl").write_text("".join(rows))
    (tmp_path / "holes.jsonl").write_text("".join([*rows[:1], '{"prompt": "2+2=", "answer": null}\n', *rows[1:]]))
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "no_such_model"}')
    tokenizer = Path(shutil.copytree(model, tmp_path / "other")) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"1":', '"one":'))
    file = tmp_path / "run.toml"
    text = CONFIG.replace("{model}", str(model))
    file.write_text(text.replace('{ path = "envs.arithmetic:Arithmetic" }', DATA.format(folder=tmp_path)))
    assert main(["train", str(file), "--dry-run"]) == 0
    assert "gets reward 0" in capsys.readouterr().err
    assert main(["train", str(file), "--dry-run", override.format(folder=tmp_path)]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert "Traceback" not in told


def test_a_dry_run_of_sft_checks_the_model_too(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    (tmp_path / "sft.toml").write_text(
        f'run = {{ name = "taught", output_dir = "{tmp_path}" }}\nmodel = {{ path = "{model}", max_length = 32 }}\n'
        f'sft.data = "{tmp_path}/rows.jsonl"\ntrain.batch_size = 1\ncluster.gpus_per_node = 0\n'
    )
    command = ["sft", str(tmp_path / "sft.toml"), "--dry-run"]
    assert main(command) == 0
    assert "a Qwen3ForCausalLM of" in capsys.readouterr().err
    assert main([*command, 'lora.targets=["nothing"]']) == 2
    assert "lora.targets: there is no 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_command_that_srun_has_started_several_times_is_refused_before_it_reads_a_file(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main([command, "no-such-file.toml"]) == 2
    assert "this program was started 4 times (SLURM_STEP_NUM_TASKS = 4)" in capsys.readouterr().err


def test_control_characters_in_log_records_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch"]) == 0
    # Not through a logger: those of a test session have other handlers.
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.LogRecord("x", logging.WARNING, "f", 1, "%s fails", ("\x1b[2J\n",), None))
    assert capsys.readouterr().err == "\\x1b[2J\\n fails\n"


def test_the_removed_profile_command_names_the_key_that_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "my.toml", "--steps", "3"])
    assert 'Set `train.profile = "3:5"` in the configuration' in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["train", "{}", "--dryrun"], ["plot", "folder", "train.steps=1"]])
def test_an_unknown_argument_is_refused_by_name(
    config: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word.format(config) for word in wrong])
    assert f"unrecognized arguments: {wrong[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--async-ratio", "2"], "--async-ratio; a setting is given as `train.async_ratio=2`"),
        (["--train.async_ratio=2"], "a setting is given as `train.async_ratio=2`"),
        (["--every"], "a setting is given as `eval.every=VALUE` or `checkpoint.every=VALUE`"),
        (["--dry-rn"], "unrecognized arguments: --dry-rn; did you mean `--dry-run`?"),
        (["--hepl"], "unrecognized arguments: --hepl; did you mean `--help`?"),
    ],
)
def test_the_error_about_an_option_that_is_a_setting_or_misspelt_shows_the_right_form(
    config: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", config, *words])
    said = capsys.readouterr().err
    assert told in said
    assert said.startswith("usage: flash train")


def test_the_error_about_an_unknown_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for name, told in (("trian", "did you mean `flash train`?"), ("zzz", "`flash --help` lists them")):
        with pytest.raises(SystemExit, match="2"):
            main([name, "run.toml"])
        assert f"there is no command {name}; {told}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "watch", "rollout", "init"])
def test_a_name_that_is_too_long_for_a_file_is_reported(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "x" * 5_000]) == 2
    assert "File name too long" in capsys.readouterr().err


WITHOUT_EXTRAS = """
import re, sys, tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
names = lambda lines: {re.match(r"[\\w.-]+", line)[0].lower().replace("-", "_") for line in lines}
brought = names(sum(project["optional-dependencies"].values(), [])) - names(project["dependencies"])
sys.modules.update(dict.fromkeys(brought))
from flash.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Program that runs a command as if no package were installed that only an optional group of dependencies (an extra)
installs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Train a model with reinforcement learning: rollouts"),
        (["--version"], 0, r"flash-rl 0\."),
        (["simulate", "examples/simulate.toml", "run.steps=1"], 0, "asynchronous"),
        (
            ["plan", "examples/tiny.toml"],
            2,
            # Any package of the extra may be imported first.
            r"needs the package \w+, which is not installed: `flash install` installs all packages\n$",
        ),
    ],
)
def test_a_plain_installation_says_which_extra_a_command_needs(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *arguments],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert re.search(said, done.stdout + done.stderr)
