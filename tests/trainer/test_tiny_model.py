"""Tiny models: the folder that is made, when it is made again, interrupts, and environments with wrong examples."""

import json
import random
import re

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.arithmetic import Arithmetic, ArithmeticOptions
from flash.config.tree import Config, TinyModelConfig
from flash.environment.interface import SolvedExample
from flash.errors import ConfigError
from flash.run.models import make_missing_models
from flash.trainer.model import tiny_model
from flash.trainer.model.tiny_model import FINGERPRINT, changed_parts, is_current, make_tiny_model

# A model that is made in a few seconds: three steps of warm start, which teach it nothing.
SMALL = TinyModelConfig(layers=1, width=32, warm_start_steps=3, batch_size=4)
ENV = "envs.arithmetic:Arithmetic"
OPTIONS = {"digits": 2}
"""Options of the environment `ENV`."""

# The classes below are environments that give solved examples (`flash.environment.WarmStart`): `solved_examples`
# returns `count` examples, drawn with `seed`, and `alphabet` returns all characters that occur in examples.


class Fibs:
    """Environment whose examples use characters that its alphabet lacks."""

    def solved_examples(self, count, seed):
        return [SolvedExample("1+1=", "two")] * count

    def alphabet(self):
        return "1+="


# Values of `Odd.what` for which the examples themselves are invalid.
WRONG_EXAMPLES = ("none", "too few", "pairs", "numbers", "later numbers", "lists", "half a pair")


class Odd:
    """Environment that gives invalid examples or an invalid alphabet."""

    def __init__(self, what="no text"):
        """Take the name of the fault, one of the keys in the methods below or a method that raises."""
        self.what = what
        if what == "exits":
            raise SystemExit("no data")

    def solved_examples(self, count, seed):
        if self.what == "raises":
            raise KeyError("primer")
        if self.what == "raises later" and seed:
            raise KeyError(seed)
        right = [SolvedExample("a", "b")] * count
        return {
            "none": None,
            "too few": right[1:],
            "pairs": [("a", "b")] * count,
            "numbers": [SolvedExample("a", 3)] * count,
            "later numbers": [SolvedExample("a", "b", (SolvedExample("a", None),))] * count,
            "lists": [SolvedExample("a", "b", [SolvedExample("a", "b")])] * count,
            "half a pair": [SolvedExample("\ud800", "b")] * count,
        }.get(self.what, right)

    def alphabet(self):
        return {"no text": ["a", "b"], "no letters": "", "half a letter": "ab\ud800"}.get(self.what, "ab")


class OneProblem:
    """Environment with a single example, which any model learns at once."""

    def solved_examples(self, count, seed):
        return [SolvedExample("a", "b")] * count

    def alphabet(self):
        return "ab"


class Dice:
    """Environment of six throws of a die in a row, which cannot be predicted. No example depends on `failure_rate`."""

    def __init__(self, sides=6, failure_rate=0.0):
        self.sides = sides

    def solved_examples(self, count, seed):
        rng = random.Random(seed)
        throws = [[SolvedExample("t", rng.choice(self.alphabet()[1:])) for _ in range(6)] for _ in range(count)]
        return [msgspec.structs.replace(first, later=tuple(later)) for first, *later in throws]

    def alphabet(self):
        return "t" + "123456"[: self.sides]


def make(path, config=SMALL, env=ENV, options=OPTIONS):
    """Make a model, and return the reports of its progress: (step, steps, loss) for each step."""
    told = []
    make_tiny_model(path, config, env, options, lambda *step: told.append(step))
    return told


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a model of `SMALL`. Tests do not change it."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make(path)
    return path


def test_the_folder_loads_as_an_ordinary_model(made):
    model = AutoModelForCausalLM.from_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.float32
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer) == len(Arithmetic(ArithmeticOptions()).alphabet()) + 2
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_the_tokenizer_has_one_token_per_character_and_adds_none(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    ids = tokenizer("12+34=", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    assert tokenizer("12+34=")["input_ids"] == ids
    assert tokenizer.decode(ids) == "12+34="
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34="


def test_the_embedding_and_the_output_layer_are_one_matrix(made):
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_of_an_earlier_version_with_these_values_of_removed_options_is_current(made):
    assert json.loads((made / FINGERPRINT).read_text())["tiny_model"].items() >= {"seed": 1, "tied": True}.items()


def test_a_model_is_current_for_exactly_its_options(made):
    assert is_current(made, SMALL, ENV, OPTIONS)
    assert not is_current(made, msgspec.structs.replace(SMALL, layers=2), ENV, OPTIONS)
    assert not is_current(made, SMALL, ENV, {"digits": 3})
    assert not is_current(made, SMALL, f"{__name__}:OneProblem", {})
    assert not is_current(made.parent / "nowhere", SMALL, ENV, OPTIONS)


def test_the_same_options_make_the_same_weights(made, tmp_path):
    make(tmp_path / "again")
    weights = "model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (made / weights).read_bytes()


def test_making_a_model_leaves_the_global_random_state_alone(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    make(tmp_path / "tiny", msgspec.structs.replace(SMALL, warm_start_steps=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_older_model_of_ours_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    make(tmp_path / "tiny")
    newer = msgspec.structs.replace(SMALL, layers=2)
    make(tmp_path / "tiny", newer)
    assert is_current(tmp_path / "tiny", newer, ENV, OPTIONS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_path_that_holds_something_else_is_refused_and_kept(tmp_path, kind):
    path = tmp_path / "model"
    if kind == "folder":
        path.mkdir()
        (path / "config.json").write_text("{}")
    else:
        path.write_text("{}")
    with pytest.raises(ConfigError, match=f"no tiny model of ours .*{FINGERPRINT}"):
        make(path)
    kept = path / "config.json" if kind == "folder" else path
    assert kept.read_text() == "{}"
    assert not is_current(path, SMALL, ENV, OPTIONS)


def test_a_failure_leaves_the_older_model_as_it_was(tmp_path):
    make(tmp_path / "tiny")
    before = json.loads((tmp_path / "tiny" / FINGERPRINT).read_text())

    def fail(*step):
        # Fails in place of the report of the first step.
        raise RuntimeError("out of memory")

    newer = msgspec.structs.replace(SMALL, layers=2)
    with pytest.raises(RuntimeError):
        make_tiny_model(tmp_path / "tiny", newer, ENV, OPTIONS, fail)
    assert json.loads((tmp_path / "tiny" / FINGERPRINT).read_text()) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_a_warm_start_uses_one_thread_and_restores_the_number_of_threads(tmp_path):
    threads = []
    torch.set_num_threads(2)
    try:
        make_tiny_model(tmp_path / "tiny", SMALL, ENV, OPTIONS, lambda *told: threads.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert threads == [1, 1, 1]


def interrupted(path, config=SMALL):
    """Make a model, and interrupt that in its second step."""

    def interrupt(step, steps, loss):
        # Raise as Ctrl-C does, when the second step is reported.
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(path, config, ENV, OPTIONS, interrupt)


def wanting(path, config=SMALL):
    """Return the configuration of a run that uses the model."""
    run = {"run": {"name": "run"}, "model": {"path": str(path)}, "env": {"path": ENV, "options": OPTIONS}}
    return msgspec.convert(run | {"tiny_model": config}, Config)


def test_an_interrupted_warm_start_leaves_a_model_that_is_used_with_a_notice(tmp_path, made, capsys):
    path = tmp_path / "tiny"
    interrupted(path)
    assert f"interrupted after 2 steps; {path} has the model" in capsys.readouterr().out
    assert len(AutoTokenizer.from_pretrained(path)) == len(AutoTokenizer.from_pretrained(made))
    ours, whole = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (path, made))
    assert any(not torch.equal(ours[name], whole[name]) for name in whole)
    make_missing_models(wanting(path))
    assert (
        "is used as it is, though its warm start was interrupted after 2 steps; remove the folder"
        in capsys.readouterr().out
    )
    make(path)
    make_missing_models(wanting(path))
    assert "has left it" not in capsys.readouterr().out


def test_an_interrupted_model_replaces_a_finished_one_only_if_options_differ(tmp_path, capsys):
    path = tmp_path / "tiny"
    make(path)
    before = (path / "model.safetensors").read_bytes()
    interrupted(path)
    assert (path / "model.safetensors").read_bytes() == before
    other = msgspec.structs.replace(SMALL, layers=2)
    interrupted(path, other)
    assert is_current(path, other, ENV, OPTIONS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_a_warm_start_that_uses_all_steps_reports_the_accuracy(tmp_path, capsys):
    make(tmp_path / "tiny")
    assert re.search(
        r"warm_start_steps = 3 are made; .* [0-9.]+% of the examples right and not 22%", capsys.readouterr().out
    )


def test_progress_is_reported_after_every_step(tmp_path):
    told = make(tmp_path / "tiny")
    assert [(step, steps) for step, steps, _ in told] == [(1, 3), (2, 3), (3, 3)]
    assert all(loss > 0 for _, _, loss in told)


def test_the_warm_start_ends_as_soon_as_the_model_is_good_enough(tmp_path):
    config = msgspec.structs.replace(SMALL, warm_start_steps=500)
    told = make(tmp_path / "tiny", config, f"{__name__}:OneProblem", {})
    step, steps, _ = told[-1]
    assert step == steps < 500


@pytest.mark.slow
def test_the_warm_start_on_random_examples_ends_when_the_loss_stops_falling(tmp_path):
    config = msgspec.structs.replace(SMALL, warm_start_steps=5000)
    told = make(tmp_path / "tiny", config, f"{__name__}:Dice", {})
    step, steps, loss = told[-1]
    assert step == steps < 2000
    assert loss < 2.0


def test_an_option_that_changes_no_example_does_not_change_the_model(tmp_path):
    env = f"{__name__}:Dice"
    make(tmp_path / "tiny", SMALL, env, {})
    assert changed_parts(tmp_path / "tiny", SMALL, env, {"failure_rate": 0.5}) == []
    assert changed_parts(tmp_path / "tiny", SMALL, env, {"sides": 4}) == ["alphabet", "examples"]
    larger = msgspec.structs.replace(SMALL, layers=2)
    assert changed_parts(tmp_path / "tiny", larger, env, {}) == ["tiny_model"]


@pytest.mark.parametrize(
    ("config", "env", "options", "message"),
    [
        (msgspec.structs.replace(SMALL, width=48), ENV, {}, "width must be a multiple of 32"),
        (SMALL, "flash.types:Message", {"role": "a", "content": "b"}, "offers no solved examples"),
        (SMALL, f"{__name__}:Fibs", {}, r"alphabet\(\) lacks: 'otw'"),
        (SMALL, ENV, {"digit": 2}, "digit"),
    ],
)
def test_invalid_options_or_environments_are_a_config_error(tmp_path, config, env, options, message):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "tiny", config, env, options)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raises", r"environment solved_examples raised KeyError: 'primer' \(.*test_tiny_model.py:"),
        ("exits", "environment start raised SystemExit: no data"),
        ("raises later", "environment solved_examples raised KeyError: 1"),
        ("no text", r"alphabet\(\) must return a text of all characters, but returned \['a', 'b'\]"),
        ("no letters", r"alphabet\(\) must return a text of all characters, but returned ''"),
        ("half a letter", r"alphabet\(\) must return a text of all characters, but returned 'ab"),
        *((kind, r"solved_examples\(3, seed\) must return a list of 3") for kind in WRONG_EXAMPLES),
    ],
)
def test_invalid_examples_or_alphabets_are_a_config_error(tmp_path, what, told):
    with pytest.raises(ConfigError, match=f"^env.path: .*test_tiny_model:Odd: .*{told}"):
        make(tmp_path / "model", SMALL, f"{__name__}:Odd", {"what": what})
    assert not (tmp_path / "model").exists()


def test_the_check_whether_a_model_is_current_needs_no_torch():
    names = vars(tiny_model)
    assert "torch" not in names
    assert "transformers" not in names


def test_later_turns_follow_the_end_of_the_answer_and_only_answers_are_learned():
    tokenizer = tiny_model._make_tokenizer("0123456789=+")
    example = SolvedExample("1+1=", "2", (SolvedExample("2+9=", "11"),))
    shorter = SolvedExample("1+1=", "2")
    ids, targets = tiny_model._encode(tokenizer, [example, shorter])
    assert tokenizer.decode(ids[0]) == "1+1=2<eos>2+9=11<eos>"
    learned = [token for token in targets[0].tolist() if token != tiny_model.IGNORED]
    assert tokenizer.decode(learned) == "2<eos>11<eos>"
    places = [place for place, token in enumerate(targets[0].tolist()) if token != tiny_model.IGNORED]
    assert places == [3, 4, 9, 10, 11]
    assert all(targets[0, place] == ids[0, place + 1] for place in places)
    assert targets[1].tolist()[:5] == targets[0].tolist()[:5]
    assert set(targets[1].tolist()[5:]) == {tiny_model.IGNORED}
