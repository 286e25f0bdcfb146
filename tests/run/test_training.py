"""Functions `flash.train` and `flash.evaluate`: the configuration of their arguments, and their errors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from flash.config.load import load
from flash.errors import ConfigError, FlashError, WeightsError
from flash.run.training import arguments_named, error_left, evaluate, sft, train, written

CONFIG = """
run.name = "test"
model.path = "Qwen/Qwen3-0.6B"
env.path = "envs.arithmetic:Arithmetic"
cluster.gpus_per_node = 0
train.learning_rate = 0.5
"""
"""Configuration file with which calls begin."""


class Env:
    """Environment class of the calling program."""

    def reset(self, seed: int) -> None: ...

    def step(self, action: str) -> None: ...

    def close(self) -> None: ...


class Refusing(Env):
    """Environment class that refuses all options, also when it has none."""

    def __init__(self, length: int = 4) -> None: ...

    @classmethod
    def check(cls, **options: Any) -> None:
        """Refuse the options."""
        raise ConfigError("too short")


def reward(answer: str, row: dict[str, Any]) -> float:
    """Return 1 for the right answer."""
    return float(answer == row["answer"])


def solve(base_url: str, api_key: str, task: str) -> str:
    """Return the task as its answer. An agent."""
    return task


GIVEN: dict[str, Any] = {"model": "a/b", "data": "rows.jsonl", "reward": reward}
"""Arguments of a call that trains on rows with a reward."""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"steps": "30"}, '`run.steps` (argument `steps`): expected an integer above 0, got "30"'),
        ({"steps": 0}, "`run.steps` (argument `steps`): expected an integer above 0, got 0"),
        ({"model": None}, "`model.path`: is missing"),
        ({"model": 5}, "`model`: expected a folder, a hub id or a GGUF file, got a value of type int: write a model"),
        ({"model": lambda tokens: tokens}, "`model`: expected a folder, a hub id or a GGUF file, got <lambda>(tokens)"),
        ({"model": ["a/b"]}, "`model`: expected a folder, a hub id or a GGUF file, got a value of type list"),
        ({"data": [{"prompt": "1+1"}]}, "`data`: expected the path of a file or folder with rows, got a value of type"),
        ({"name": "a/b"}, "`run.name` (argument `name`): expected text matching"),
        ({"settings": {"train.async_ration": 2}}, "no such key; did you mean `train.async_ratio`?"),
        ({"settings": {"train": {"async_ration": None}}}, "no such key; did you mean `train.async_ratio`?"),
        ({"settings": {"run": {"steps": 4}}, "steps": 3}, "`run.steps` is given twice"),
        ({"settings": {"train": 3, "train.batch_size": 4}}, "`train.batch_size` lies in a key that has a value"),
        ({"settings": {"train.batch_size": 4, "train": 3}}, "`train` is given twice"),
        ({"settings": {"lora": None, "lora.rank": 3}}, "`lora.rank` lies in a key that has a value"),
        ({"settings": {"train": {"batch_size": 4}, "train.batch_size": 4}}, "`train.batch_size` is given twice"),
        ({"settings": {"train.batch_size": 4, "train": {"batch_size": 4}}}, "`train.batch_size` is given twice"),
        ({"settings": ["a"]}, "`settings`: expected a dict of keys and values, got a value of type list"),
        ({"settings": {"": 1}}, "`settings`: expected names with dots between them as each key, got ''"),
        ({"settings": {"train..betas": 1}}, "names with dots between them as each key, got 'train..betas'"),
        ({"settings": {3: 4}}, "`settings`: expected text as each key, got 3"),
        ({"settings": {"env.options.rows": {1, 2}}}, "`env.options.rows`: expected text, a number,"),
        ({"config": {"run": 3}}, "`config`: expected a TOML file, a list of TOML files or a flash.Config"),
        ({"config": "nope.toml"}, "there is no configuration file nope.toml"),
        ({"env": Env}, "`env` and `data` are both given"),
        ({"env": Env, "data": None}, "`env` and `reward` are both given"),
        ({"data": None}, "`reward` is given without `data`"),
        ({"data": None, "reward": None}, "there are no problems to answer"),
        ({"reward": lambda answer: 1.0}, "`reward`: expected a function (answer, row), got <lambda>(answer)"),
        ({"reward": 3}, "`reward`: expected a function (answer, row), got a value of type int"),
        ({"agent": reward}, "`agent`: expected a function (base_url, api_key, task), got reward(answer: "),
        ({"env": reward, "data": None, "reward": None}, "a class with reset, step and close, got reward("),
        ({"env": Env(), "data": None, "reward": None}, "with reset, step and close, got a value of type Env"),
        ({"env": Path, "data": None, "reward": None}, "with reset, step and close, got the class Path"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_error_before_anything_starts(
    changed: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        train(**GIVEN | changed)
    assert told in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_argument_of_the_other_functions_is_refused_alike() -> None:
    with pytest.raises(ConfigError, match="expected a number above 0"):
        sft(model="a/b", data="rows.jsonl", epochs=0)
    with pytest.raises(ConfigError, match="there are no rows to learn"):
        sft(model="a/b")
    with pytest.raises(ConfigError, match="`data`: expected the path of a file or folder with rows"):
        sft(model="a/b", data=cast("Any", [{"prompt": "1+1", "completion": "2"}]))
    with pytest.raises(ConfigError, match="`samples`: expected a number of answers of at least 1, got 0"):
        evaluate(**GIVEN, samples=0)
    with pytest.raises(ConfigError, match="`reward` is given without `data`"):
        evaluate(model="a/b", reward=reward)


def put_rows(folder: Path, text: str = '{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+2=", "answer": 3}\n') -> Path:
    """Write a file with rows, and return its path."""
    file = folder / "rows.jsonl"
    file.write_text(text)
    return file


CALLS: list[Callable[[Path], object]] = [
    lambda file: train(model="a/b", data=file),
    lambda file: train(model="a/b", data=file, agent=solve),
    lambda file: evaluate(model="a/b", data=file),
]
"""Calls with a file of rows that need a prompt and an answer."""
PROMPT = '{"prompt": "1+1=", "answer": 2}'
"""Row for those calls."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (None, "there is no data set at FILE"),
        ("", "FILE has no rows"),
        (f'{PROMPT}\n{{"answer": 3}}\n', "FILE, row 2 has no 'prompt', only 'answer'"),
        (f'{PROMPT}\n\n{{"prompt": 5, "answer": 3}}\n', "FILE, row 2 (line 3): 'prompt' must be text or a list"),
        (f'{PROMPT}\n{PROMPT}\n{{"prompt": \n', "FILE, row 3 is not a JSON object on one line"),
        ('{"prompt": "", "answer": 3}\n{"prompt":\n', "FILE, row 1: 'prompt' is empty; expected a prompt"),
        ('{"prompt": "1+1="}\n', "FILE has none of the columns answer, "),
        (f'{PROMPT}\n{{"prompt": "1+2=", "answer": null}}\n', "FILE, row 2: 'answer' is null"),
    ],
)  # fmt: skip
def test_wrong_rows_are_one_error_that_names_the_argument_before_anything_starts(
    rows: str | None, told: str, call: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    if rows is not None:
        put_rows(tmp_path, rows)
    with pytest.raises(ConfigError) as refused:
        call(file)
    message = str(refused.value)
    assert message.startswith(f"`data`: {told.partition('FILE')[0]}")
    assert told.replace("FILE", str(file)) in message
    assert "`env" not in message
    assert capfd.readouterr() == ("", "")
    assert [path for path in tmp_path.iterdir() if path != file] == []


def test_all_wrong_rows_are_in_the_error_also_if_one_is_no_json(tmp_path: Path) -> None:
    file = put_rows(tmp_path, f'{PROMPT}\n{{"answer": 3}}\n{{"answer": 4}}\n{{"prompt":\n')
    with pytest.raises(ConfigError) as refused:
        train(model="a/b", data=file)
    assert [line.partition(" row ")[2][:5] for line in str(refused.value).splitlines()] == ["2 has", "3 has", "4 is "]


def test_the_columns_that_settings_name_are_looked_for_and_a_reward_needs_no_answer(tmp_path: Path) -> None:
    file = put_rows(tmp_path, '{"asked": "1+1="}\n')
    with pytest.raises(ConfigError, match=r"`data`: .* set env\.options\.prompt_column in `settings`"):
        train(model="a/b", data=file, reward=reward)
    with pytest.raises(ConfigError, match=r"`data`: .* set env\.options\.tasks\.options\.prompt_column in `settings`"):
        train(model="a/b", data=file, reward=reward, agent=solve)
    with pytest.raises(
        ConfigError, match=r"no column 'askd' \(env\.options\.prompt_column in `settings`\), only 'asked'"
    ):
        train(model="a/b", data=file, reward=reward, settings={"env.options.prompt_column": "askd"})
    with pytest.raises(ConfigError, match=r"set env\.options\.answer_column in `settings`, or give a `reward`"):
        train(model="a/b", data=file, settings={"env.options.prompt_column": "asked"})
    # These rows are good, so the call goes on to the next check.
    columns: dict[str, Any] = {"env.options.prompt_column": "asked", "run.output_dir": str(file)}
    with pytest.raises(FlashError, match=r"run\.output_dir"):
        train(model="a/b", data=file, reward=reward, settings=columns)


@pytest.mark.parametrize(
    "call", [*CALLS, lambda file: sft(model="a/b", data=file), lambda file: train(model="a/b", env=Env)]
)
def test_a_process_of_a_run_is_refused_before_it_reads_rows(
    call: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FLASH_LAUNCHER": "1.1.1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match='put the call below `if __name__ == "__main__":`'):
        call(tmp_path / "nope.jsonl")


def test_rows_that_cannot_be_learned_are_one_error_that_names_the_argument(tmp_path: Path) -> None:
    file = put_rows(tmp_path, '{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2="}\n')
    with pytest.raises(ConfigError) as refused:
        sft(model="a/b", data=file)
    assert str(refused.value).startswith(f"`data`: {file}, row 2 has a prompt and nothing to learn behind it")
    with pytest.raises(ConfigError, match="`data`: there is no data set at"):
        sft(model="a/b", data=tmp_path / "nope.jsonl")


@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"reward": "nope:f"}, "`reward`: there is no verifier 'nope:f': there is no module `nope`"),
        ({"reward": "nope:f", "agent": solve}, "`reward`: there is no verifier 'nope:f'"),
        ({"agent": "nope:f"}, "`agent`: there is no module `nope`"),
        ({"agent": "json:JSONDecoder"}, "`agent`: json:JSONDecoder must take (base_url, api_key, task)"),
        ({"env": "nope:Env"}, "`env`: there is no module `nope`"),
        ({"env": "json:JSONDecoder"}, "`env`: `json:JSONDecoder` is not an environment"),
        ({"env": "nope:Env", "agent": solve}, "`env`: there is no module `nope`"),
        ({"env": Refusing}, "`env`: Refusing refuses its options: too short"),
        ({"env": Refusing, "agent": solve}, "`env`: too short"),
        ({"env": Refusing, "settings": {"env.options.length": 3}}, "`env.options`: Refusing refuses them: too short"),
        (
            {"env": Refusing, "agent": solve, "settings": {"env.options.tasks.options.lenght": 3}},
            "`env.options.tasks.options.lenght`: Refusing has no such option; did you mean `length`?",
        ),
        ({"model": "/nope", "name": "x"}, "`model`: "),
    ],
)
def test_a_problem_that_the_command_finds_names_the_arguments_of_the_call(
    changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    given = GIVEN | {"data": put_rows(tmp_path), "model": tmp_path / "model"} | changed
    given |= {"data": None, "reward": None} if "env" in changed else {}
    settings = {"cluster.gpus_per_node": 0, **changed.get("settings", {})}
    call = written(**given | {"settings": settings})
    file = call.put(tmp_path)
    with pytest.raises(ConfigError) as refused, arguments_named(call, file):
        load(file)
    assert told in str(refused.value)
    if "settings" not in changed:
        assert "env." not in str(refused.value)
        assert "refuses them" not in str(refused.value)


def test_each_of_several_problems_names_an_argument_and_other_keys_stay() -> None:
    problems = ["`run.steps` (run.toml): 5 were made", "`env.path` (run.toml): no such module", "`run.seed`: no"]
    call = written(model="a/b", env=Env, steps=3)
    with pytest.raises(FlashError) as refused, arguments_named(call, Path("run.toml")):
        raise ConfigError("\n  - ".join(["3 problems:", *problems]))
    assert str(refused.value).splitlines()[1:] == [
        "  - `steps`: 5 were made",
        "  - `env`: no such module",
        "  - `run.seed`: no",
    ]


@pytest.mark.parametrize(
    ("given", "beginning"),
    [
        (GIVEN, ""),
        ({"model": "a/b", "env": Env}, "`env`: "),
        ({"model": "a/b", "env": Env, "agent": solve}, ""),
        ({"model": "a/b", "config": "run.toml"}, "env.path: "),
    ],
)
def test_an_environment_that_cannot_be_played_is_named_as_the_caller_knows_it(
    given: dict[str, Any], beginning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    with pytest.raises(FlashError) as refused, arguments_named(written(**given), tmp_path / "x.toml"):
        raise ConfigError("env.path: the environment cannot be played; 3 problems were tried")
    assert str(refused.value) == f"{beginning}the environment cannot be played; 3 problems were tried"


@pytest.mark.usefixtures("imports")
def test_a_configuration_file_is_told_of_its_own_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    table = 'path = "nope.jsonl"\nreward = "nope:f"\n'
    file.write_text(CONFIG.replace("envs.arithmetic:Arithmetic", "envs.dataset:DatasetEnv") + f"[env.options]\n{table}")
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert f"`env.options` ({file}): DatasetEnv refuses them: there is no data set at nope.jsonl" in str(refused.value)
    with pytest.raises(ConfigError, match="DatasetEnv refuses them: `reward`: there is no verifier 'nope:f'"):
        load(file, [f"env.options.path={put_rows(tmp_path)}"])


@pytest.mark.slow
def test_a_problem_that_the_command_finds_is_reported_once_and_without_a_file_that_the_caller_does_not_know(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "outputs"
    settings = {"run.output_dir": str(output_dir), "cluster.gpus_per_node": 0, "train.batch_size": 7}
    with pytest.raises(ConfigError) as refused:
        train(**GIVEN | {"data": put_rows(tmp_path), "settings": settings})
    assert "`train.batch_size`: expected a multiple of rollout.group_size = 8, got 7" in str(refused.value)
    assert "run.toml" not in str(refused.value)
    assert capfd.readouterr() == ("", "")
    assert list(output_dir.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_not_there_to_resume_is_reported_with_the_name_of_the_argument(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"run.output_dir": str(tmp_path), "cluster.gpus_per_node": 0}
    given = GIVEN | {"data": put_rows(tmp_path), "settings": settings}
    with pytest.raises(ConfigError) as refused:
        train(**given, resume=True)
    assert "`resume`: there is no run to continue" in str(refused.value)
    assert "run.resume" not in str(refused.value)


def options_of(**arguments: Any) -> dict[str, Any]:
    """Return the table `env` of the configuration that a call amounts to."""
    return tomllib.loads(written(**arguments).text)["env"]


def test_data_and_a_reward_become_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = options_of(**GIVEN, settings={"env.options.template": "plain"})
    assert env["path"] == "envs.dataset:DatasetEnv"
    assert env["options"] == {
        "path": str(tmp_path / "rows.jsonl"),
        "reward": f"{__name__}:reward",
        "template": "plain",
    }


def test_an_agent_gets_its_tasks_from_the_data_or_from_an_environment() -> None:
    env = options_of(**GIVEN, agent=solve)
    assert env["path"] == "envs.agent:Agent"
    assert env["options"]["function"] == f"{__name__}:solve"
    assert env["options"]["tasks"]["path"] == "envs.dataset:DatasetEnv"
    env = options_of(model="a/b", env=Env, agent=solve)
    assert env["options"]["tasks"] == {"path": f"{__name__}:Env", "options": {}}
    assert options_of(model="a/b", agent="m:f")["options"] == {"function": "m:f"}


def test_arguments_take_precedence_over_the_configuration_and_replace_its_environment(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG + "[env.options]\ndigits = 3\n")
    file = tmp_path / "run.toml"
    kept = written(config=file, settings={"train.learning_rate": None}).config
    assert (kept.run.name, kept.env.options, kept.train.learning_rate) == ("test", {"digits": 3}, 1e-6)
    changed = written(config=[str(file)], env=Env, name="other", model=tmp_path, steps=3).config
    assert (changed.run.name, changed.run.steps, changed.model.path) == ("other", 3, str(tmp_path))
    assert changed.env.options == {}
    assert str(tmp_path) in changed.env.folders or str(tmp_path) in options_of(config=file)["folders"]


def test_a_folder_of_modules_that_a_run_has_recorded_may_be_gone(tmp_path: Path) -> None:
    text = CONFIG + f'env.folders = ["/nope", "{tmp_path}"]\n'
    for name in ("config.toml", "run.toml"):
        (tmp_path / name).write_text(text)
    assert "/nope" not in options_of(config=tmp_path / "config.toml")["folders"]
    assert options_of(config=tmp_path / "run.toml")["folders"][:2] == ["/nope", str(tmp_path)]


def test_settings_are_nested_or_dotted_and_none_unsets_a_key(tmp_path: Path) -> None:
    settings = {
        "train.batch_size": np.int64(64),
        "train": {"async_ratio": 2, "betas": (0.9, 0.99)},
        "rollout": {"stop": ["x"], "accuracy_bounds": None},
        "algorithm.lag": None,
        "model.tool_parser": None,
        "lora": None,
        "env.options.held_out_path": None,
    }
    config = written(**GIVEN, settings=settings).config
    assert (config.train.batch_size, config.train.async_ratio, config.train.betas) == (64, 2.0, (0.9, 0.99))
    assert (config.rollout.stop, config.algorithm.lag, config.lora) == (("x",), None, None)
    assert "held_out_path" not in config.env.options


def test_the_settings_of_a_caller_are_not_changed() -> None:
    def base() -> dict[str, Any]:
        """Return new settings."""
        return {"train": {"batch_size": 64}, "env": {"options": {"template": "plain"}}}

    settings: dict[str, Any] = {
        **base(),
        "train.async_ratio": 3.0,
        "env.options.held_out_path": None,
        "run": {"seed": 1},
        "run.steps": 2,
    }
    config = written(**GIVEN, settings=settings).config
    assert (config.train.batch_size, config.train.async_ratio, config.run.steps) == (64, 3.0, 2)
    assert {key: settings[key] for key in base()} == base()
    assert settings["run"] == {"seed": 1}


def test_the_toml_of_a_call_is_read_back_to_the_same_configuration(tmp_path: Path) -> None:
    call = written(
        **GIVEN, steps=3, settings={"algorithm.lag": None, "cluster.gpus_per_node": 0, "model.dtype": "float32"}
    )
    file = call.put(tmp_path)
    again = written(config=file)
    assert (again.config.algorithm.lag, again.config.run.steps) == (None, 3)
    assert again.config.env.options == call.config.env.options


def test_a_model_that_can_be_fetched_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = written(**GIVEN | {"model": "smollm2-135m"}).config.model
    assert (model.path, model.fetch) == ("outputs/models/smollm2-135m", "smollm2-135m")
    (tmp_path / "smollm2-135m").mkdir()
    model = written(**GIVEN | {"model": "smollm2-135m"}).config.model
    assert (model.path, model.fetch) == ("smollm2-135m", None)


def test_a_configuration_of_flash_load_is_a_configuration_to_begin_with(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    for name, text in {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "model.safetensors": "\2" + 7 * "\0" + "{}",
    }.items():
        (tmp_path / name).write_text(text)
    config = load(tmp_path / "run.toml", [f"model.path={tmp_path}"])
    again = written(config=config).config
    assert (again.run, again.model, again.train) == (config.run, config.model, config.train)


def test_functions_of_a_module_are_named_and_those_of_a_script_are_sent(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(answer, row): return 1.0", names)
    call = written(**GIVEN | {"reward": names["reward"]})
    (module,) = call.modules
    assert call.config.env.options["reward"] == f"{module.removesuffix('.py')}:reward"
    file = call.put(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {module, file.name}
    assert written(**GIVEN).modules == {}


def test_warnings_about_unwise_settings_come_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_NNODES", "2")
    (tmp_path / "run.toml").write_text(CONFIG)
    for name, text in {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "model.safetensors": "\2" + 7 * "\0" + "{}",
    }.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="this job has 2 node"):
        train(load(tmp_path / "run.toml", [f"run.output_dir={tmp_path}", f"model.path={tmp_path}"]))
    out, err = capfd.readouterr()
    assert "flash: warning: `train.learning_rate`: 0.5 is far above" in err
    assert out == ""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "started 2 times (SLURM_STEP_NUM_TASKS = 2)"),
        ({"RANK": "7", "WORLD_SIZE": "8"}, "started 8 times (WORLD_SIZE = 8)"),
        (
            {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "8", "RANK": "7", "WORLD_SIZE": "8"},
            "torchrun starts one `flash` per node, which starts the trainer ranks: --nproc-per-node=1",
        ),
    ],
)
def test_a_program_that_was_started_several_times_starts_no_run(
    variables: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file, output_dir = put_rows(tmp_path), tmp_path / "outputs"
    with pytest.raises(ConfigError) as refused:
        train(model="a/b", data=file, settings={"run.output_dir": str(output_dir)})
    assert told in str(refused.value)
    assert "--nproc-per-node=1" in str(refused.value)
    assert not output_dir.exists()


LOCKED = """
import os, sys
from pathlib import Path
lock = Path(sys.argv[2]).with_name("lock")
print(any(Path(f"/proc/self/fd/{number}").resolve() == lock.resolve() for number in os.listdir("/proc/self/fd")))
sys.exit(1)
"""
"""Program in place of `flash`, which prints True if it has the lock file beside its configuration open."""


def test_the_command_of_a_run_keeps_the_folder_of_the_call_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flash").mkdir()
    (tmp_path / "flash" / "__init__.py").touch()
    (tmp_path / "flash" / "__main__.py").write_text(LOCKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output_dir = tmp_path / "outputs"
    with pytest.raises(FlashError, match="its output above"):
        train(model="a/b", env=Env, settings={"run.output_dir": str(output_dir)})
    assert capfd.readouterr() == ("True\n", "")
    assert list(output_dir.iterdir()) == []


def leave(folder: Path, time: float) -> None:
    """Write the marker of an error at a Unix time."""
    row = {"launch": "x/1", "error": "WeightsError", "message": "engine 0 differs", "time": time}
    (folder / "error.json").write_text(json.dumps(row))


def test_the_error_that_a_run_has_left_is_of_its_own_class(tmp_path: Path) -> None:
    leave(tmp_path, time=20.0)
    error = error_left(tmp_path, since=10.0)
    assert type(error) is WeightsError
    assert str(error) == "engine 0 differs"


def test_the_error_of_an_earlier_launch_is_not_reported_again(tmp_path: Path) -> None:
    leave(tmp_path, time=5.0)
    error = error_left(tmp_path, since=10.0)
    assert type(error) is FlashError
    assert "its output above" in str(error)


def test_without_an_error_or_with_half_of_one_the_output_is_pointed_to(tmp_path: Path) -> None:
    assert "its output above" in str(error_left(tmp_path, since=0.0))
    (tmp_path / "error.json").write_text('{"launch"')
    assert "its output above" in str(error_left(tmp_path, since=0.0))
