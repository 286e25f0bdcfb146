"""`flash rhythm`, on a tiny model and on a run that recorded its batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist

from flash.cli.main import main
from flash.errors import ConfigError
from flash.observe.rundir.rundir import RunDirectory
from flash.rollout.episode.tokenizer import Tokenizer
from flash.run.rhythm import text_responses
from flash.trainer.model.tiny_model import save_tokenizer
from flash.types import Batch, VersionRun
from tests.branching import joined
from tests.trainer.trainer_cases import at, make_trajectory, write_model

TEXT = "12+34=46" * 9
CONFIG = """
run = {{ name = "run" }}
model = {{ path = "{model}", dtype = "float32", max_length = 64 }}
env = {{ path = "envs.arithmetic:Arithmetic" }}
cluster = {{ gpus_per_node = 0 }}
rollout = {{ max_new_tokens = 32 }}
algorithm = {{ rhythm = {{ nearest = 2, farthest = 9 }} }}
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model with a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("rhythm") / "model", tied=True)
    save_tokenizer(folder, "envs.arithmetic:Arithmetic", {})
    return folder


@pytest.fixture
def run_dir(tmp_path: Path, model: Path) -> Path:
    """Return the directory of a run that has recorded steps 3 and 4, of ten samples each. In each step the eighth
    sample is too old to be trained, and the ninth has only one token."""
    run = RunDirectory.open(tmp_path / "run", CONFIG.format(model=model))
    rng = np.random.default_rng(0)
    for step in (3, 4):
        versions = [[VersionRun(step, 16)] for _ in range(10)]
        versions[7], versions[8] = [VersionRun(0, 9)], [VersionRun(step, 1)]
        batch = [at(0.8, make_trajectory(0, member, one, rng, reward=0.5)) for member, one in enumerate(versions)]
        run.write_batch(Batch(step, step - 1, batch, []), keep_all=True)
    return run.path


@pytest.fixture
def flash(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Yield a function that runs `flash rhythm` in this process. Afterwards no process group may be left."""

    def command(*arguments: object) -> tuple[int, str, str]:
        """Run the command. Returns its exit code, its output and its errors."""
        code = main(["rhythm", *map(str, arguments)])
        return code, *capsys.readouterr()

    yield command
    assert not dist.is_initialized()


def written(folder: Path, **texts: str) -> list[Path]:
    """Write a file for each text, named after its keyword, and return the paths."""
    paths = [folder / name for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    return paths


@pytest.mark.slow
def test_a_text_is_looked_at_under_a_model(flash: Command, model: Path, tmp_path: Path) -> None:
    text, prompt = written(tmp_path, text=TEXT + "\n", prompt="99+1=")
    picture, found = tmp_path / "seen.png", tmp_path / "seen.json"
    options = ("nearest=2", "credit=local", "--plot", picture, "--at", 10, "--json", found)
    code, out, err = flash(model, "--text", text, "--prompt", prompt, *options)
    assert (code, err) == (0, "")
    assert f"weights     {model}" in out
    assert f"1 response of {len(TEXT)} tokens, entropies at temperature 1" in out
    assert "entropy at plans" in out
    seen = json.loads(found.read_text())
    assert seen["options"]["nearest"] == 2
    assert {(one["layer"], one["head"]) for one in seen["heads"]} == {(layer, n) for layer in (0, 1) for n in range(4)}
    (response,) = seen["responses"]
    assert "".join(response["tokens"]) == "99+1=" + TEXT
    assert response["places"] == list(range(5, 5 + len(TEXT)))
    assert set(response["multiplier"]) == {1.0, 1.5}
    assert sum(response["plan"]) == sum(one > 1 for one in response["multiplier"]) == round(0.4 * len(TEXT) + 0.5)
    assert out.count("^") == sum(response["plan"]) + 1
    assert seen["couplings"][0]["tokens"] == sum(response["plan"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_text_after_a_prompt_has_no_second_start_token(tmp_path: Path) -> None:
    class BeginsTexts:
        """Tokenizer that puts the start token 0 before a text, but not before one that follows another."""

        def render(self, text: str) -> list[int]:
            return [0, *map(ord, text)]

        def follow(self, text: str, end: int | None) -> list[int]:
            return [*map(ord, text)]

    text, prompt = written(tmp_path, text="abc", prompt="xy")
    (after,) = text_responses(text, prompt, cast("Tokenizer", BeginsTexts())).trajectories
    (alone,) = text_responses(text, None, cast("Tokenizer", BeginsTexts())).trajectories
    assert after.tokens().tolist() == [0, *map(ord, "xyabc")]
    assert alone.tokens().tolist() == [0, *map(ord, "abc")]
    (blank,) = written(tmp_path, blank="\n")
    with pytest.raises(ConfigError, match="is empty"):
        text_responses(blank, None, cast("Tokenizer", BeginsTexts()))


def test_recorded_samples_are_looked_at_under_the_weights_of_the_run(
    flash: Command, model: Path, run_dir: Path, tmp_path: Path
) -> None:
    found = tmp_path / "seen.json"
    code, out, err = flash(run_dir, "--model", model, "--samples", 4, "--show", 3, "--json", found)
    assert (code, err) == (0, "")
    assert f"weights     {model}" in out
    assert "4 responses of 64 tokens, entropies at temperature 0.8" in out
    assert "response 3: step 4, sample 6 (group 0, reward 0.5)" in out
    seen: dict[str, Any] = json.loads(found.read_text())
    assert [one["name"].split()[3] for one in seen["responses"]] == ["0", "2", "4", "6"]
    assert (seen["options"]["farthest"], seen["options"]["nearest"]) == (9, 2)
    code, out, _ = flash(run_dir, "--model", model, "--step", 3, "--samples", 99, "farthest=7")
    assert code == 0
    assert "looked at   8 responses" in out
    assert "response 0: step 3, sample 0" in out


@pytest.mark.slow
def test_each_trained_branch_of_an_episode_is_a_response(
    flash: Command, model: Path, run_dir: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    branches = [make_trajectory(0, 0, [VersionRun(5, count)], rng, reward=0.25) for count in (90, 1, 30)]
    old = make_trajectory(0, 0, [VersionRun(0, 20)], rng, reward=0.25)
    batch = [at(1.0, one) for one in (branches[2], joined([*branches[:2], old, branches[2]]))]
    RunDirectory(run_dir).write_batch(Batch(5, 4, batch, []), keep_all=True)
    found, picture = tmp_path / "seen.json", tmp_path / "seen.png"
    options = ("--show", 2, "--at", 29, "--json", found, "--plot", picture)
    code, out, err = flash(run_dir, "--model", model, *options)
    assert (code, err) == (0, "")
    assert "3 responses of 150 tokens" in out
    seen: dict[str, Any] = json.loads(found.read_text())
    alone, first, last = seen["responses"]
    assert [one["name"] for one in (alone, first, last)] == [
        "step 5, sample 0 (group 0, reward 0.25)",
        "step 5, sample 1, branch 0 (group 0, reward 1)",
        "step 5, sample 1, branch 3 (group 0, reward 1)",
    ]
    assert [len(one["places"]) for one in (first, last)] == [90, 30]
    assert len(first["tokens"]) == branches[0].length
    # The same tokens are measured in the same way, also as a branch of a longer episode.
    assert (last["tokens"], last["places"]) == (alone["tokens"], alone["places"])
    assert last["waad"] == pytest.approx(alone["waad"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{gone} --text {text}", "there is no model, checkpoint or run {gone}"),
        ("{empty} --text {text}", "{empty} is neither a model"),
        ("{model}", "{model} is no run directory, since it holds no config.toml"),
        ("{model} --text {gone}", "{gone} cannot be read"),
        (
            "{model} --text {one}",
            "{one} has 0 tokens to look at after its first, which stands for the prompt",
        ),
        ("{model} --text {one} --prompt {text}", "{one} has 1 token to look at; expected at least 2"),
        ("{model} --text {strange}", "{strange}: the model's tokenizer has no tokens for this text"),
        ("{model} --text {long}", "{model} has 128 positions, and there are 200 tokens"),
        ("{model} --text {text} --step 3", "--step chooses samples of a run"),
        ("{model} --text {text} --model {model}", "--model: the weights are those of {model} already"),
        ("{model} --text {text} --show 1", "--show: expected 0 to 0"),
        ("{model} --text {text} --at 71 --plot {gone}.png", "--at: expected 0 to 70"),
        ("{model} --text {text} --at 0", "--at: expected --plot beside it"),
        ("{model} --text {text} nearst=3", "`algorithm.rhythm.nearst`: this table has no such option; did you mean"),
        ("{model} --text {text} nearest=0", "`algorithm.rhythm.nearest`: expected an integer from 1"),
        ("{model} --text {text} nearest", "'nearest': expected KEY=VALUE"),
        ("{model} --text {text} layers=[7]", "this table has no such option"),
        ("{model} --text {text} --plot {empty}", "cannot write {empty}: it is a folder"),
        ("{model} --text {blank}", "{blank} is empty: expected a text of several tokens"),
        ("{run} --prompt {text}", "--prompt: expected --text beside it"),
        ("{run}", "the run {run} has left no whole checkpoint and no model yet"),
        ("{run} --model {model} --step 9", "--step: expected one that is recorded (3 to 4), got 9"),
        ("{run} --model {model} --samples 0", "--samples: expected at least 1, got 0"),
        ("{fresh} --model {model}", "{fresh} holds no recorded batches"),
    ],
)
def test_wrong_input_gets_one_clear_error(
    arguments: str, why: str, flash: Command, model: Path, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    fresh = RunDirectory.open(tmp_path / "fresh", CONFIG.format(model=model)).path
    text, one, strange, long = written(tmp_path, text=TEXT, one="1", strange="\u263a\u263a", long="1" * 200)
    (blank := tmp_path / "blank").write_text("\n")
    paths = {"model": model, "run": run_dir, "fresh": fresh, "text": text, "one": one, "strange": strange, "long": long}
    paths["blank"] = blank
    paths |= {name: tmp_path / name for name in ("gone", "empty")}
    code, out, err = flash(*(word.format(**paths) for word in arguments.split()))
    assert (code, out) == (2, "")
    assert err.startswith("flash: error: ")
    assert why.format(**paths) in err
    assert err.count("\n") == 1
