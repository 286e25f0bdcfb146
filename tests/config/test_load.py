"""Reading, merging, decoding and cross-checking configurations."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from flash.config.load import dump, key_paths, load, load_checked, read_recorded, read_toml, split_arguments
from flash.config.removed import ALARM_LIMITS
from flash.config.tree import Config
from flash.errors import ConfigError

LONG = "x" * 5_000
MODULE = """
from algorithms.base import Objective

class Uncorrected(Objective):
    corrects_staleness = False

    def __call__(self, tokens): ...

class Refusing:
    def __init__(self, size: int = 1): ...
    def reset(self, seed): ...
    def step(self, action): ...
    def close(self): ...
    @classmethod
    def check(cls, size: int = 1):
        if size > 2:
            raise ValueError("too large")

class Judging(Refusing):
    def check(self, answer): ...

class Unchecked(Refusing):
    check = False

class Awaited(Refusing):
    @classmethod
    async def check(cls, **options): ...

class Speechless:
    def reset(self, seed): ...
"""


@pytest.fixture(autouse=True)
def project(tmp_path, imports, monkeypatch):
    """Return the current directory, which has a user's module, a model folder and run.toml with the required keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module_for_config.py").write_text(MODULE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, "vocab_size": 500}))
    (tmp_path / "run.toml").write_text(
        """
        run = { name = "a-run" }
        model = { path = "./model" }
        env = { path = "envs.arithmetic:Arithmetic", options = { digits = 3 } }
        cluster = { gpus_per_node = 0 }
        """
    )
    return tmp_path


def resolve(*overrides: str) -> Config:
    """Return the configuration of run.toml with these overrides."""
    return load([Path("run.toml")], overrides)


def complaint(*overrides: str) -> str:
    """Return the error message about run.toml with these overrides."""
    with pytest.raises(ConfigError) as error:
        resolve(*overrides)
    return str(error.value)


def test_a_minimal_file_gets_the_defaults():
    config = resolve()
    assert config.run.name == "a-run"
    assert config.rollout.group_size == 8
    assert config.env.options == {"digits": 3}
    assert config.tiny_model is None


def test_a_module_beside_a_config_is_found_from_anywhere(project):
    (project / "deep").mkdir()
    methods = "".join(f"\n    def {name}(self): ..." for name in ("reset", "step", "close"))
    (project / "deep" / "my_env_beside_a_config.py").write_text(f"class Mine:{methods}")
    (project / "deep" / "more.toml").write_text("env.path = 'my_env_beside_a_config:Mine'")
    bare = (project / "run.toml").read_text().replace(", options = { digits = 3 }", "")
    (project / "run.toml").write_text(bare)
    with pytest.raises(ConfigError, match=r"there is no module `my_env_beside_a_config`.*looked in"):
        load("run.toml", ["env.path=my_env_beside_a_config:Mine"])
    assert load(["run.toml", "deep/more.toml"]).env.path == "my_env_beside_a_config:Mine"


def test_later_files_and_then_overrides_win_and_tables_merge_deep(project):
    (project / "more.toml").write_text("[train]\nbatch_size = 64\nasync_ratio = 0\n[env.options]\noperators = '-'\n")
    config = load([Path("run.toml"), Path("more.toml")], ["train.batch_size=32"])
    assert config.train.batch_size == 32
    assert config.train.async_ratio == 0.0
    assert config.env.options == {"digits": 3, "operators": "-"}
    assert load("run.toml", ["env.options={}", "env.options.operators='-'"]).env.options == {"operators": "-"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.async_ratio=2", "async_ratio", 2.0),
        ("train.learning_rate = 1e-3", "learning_rate", 1e-3),
        ("train.betas=[0.5, 0.75]", "betas", (0.5, 0.75)),
        ("train.decay=cosine", "decay", "cosine"),
        ('train.decay="linear"', "decay", "linear"),
        ("train.allow_uncorrected=true", "allow_uncorrected", True),
    ],
)
def test_an_override_is_toml_or_else_text(override, key, value):
    found = getattr(resolve(override).train, key)
    assert found == value
    assert type(found) is type(value)


def test_a_quantized_model_is_refused_before_any_work(project):
    (project / "model" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert complaint().startswith(
        "`model.path` (run.toml): ./model is quantized, and Flash trains weights that are not: expected"
    )


def test_a_missing_model_folder_is_reported_with_the_folders_beside_it(project):
    assert complaint("model.path=./modle").endswith(f"to make one; {project} has model")
    (project / "models" / "mine").mkdir(parents=True)
    assert complaint("model.path=models/mien").endswith(f"to make one; {project / 'models'} has mine")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["run.toml", "train.async_ratio", "2"],
            "configuration file train.async_ratio; a setting is given as `train.",
        ),
        (
            ["run.toml", "async_ratio", "2"],
            "no configuration file async_ratio; a setting is given as `train.async_ratio=2`",
        ),
        (["run.toml", "train.async_ratio"], "a setting is given as `train.async_ratio=VALUE`"),
        (["run.toml", "run.steps", "train.batch_size=8"], "a setting is given as `run.steps=VALUE`"),
    ],
)
def test_the_error_about_a_setting_without_an_equals_sign_shows_the_right_form(words, told):
    with pytest.raises(ConfigError) as error:
        split_arguments(words)
    assert told in str(error.value)


def test_a_file_by_the_name_of_a_setting_is_a_file(project):
    (project / "train").touch()
    assert split_arguments(["train"]) == ([Path("train")], [])


def test_a_run_may_be_named_after_a_date(project):
    assert resolve("run.name=2026-11-30").run.name == "2026-11-30"
    (project / "dated.toml").write_text("run.name = 2026-11-30")
    with pytest.raises(ConfigError) as error:
        load(["run.toml", "dated.toml"])
    told = "got 2026-11-30, which is a date or a time in TOML: put text in quotes"
    assert str(error.value).endswith(told)


def test_a_path_may_contain_an_equals_sign(project):
    (project / "lr=0.1").mkdir()
    (project / "lr=0.1" / "run.toml").touch()
    absolute, missing = str(project / "lr=0.1" / "run.toml"), "sweep/lr=0.2/run.toml"
    words = [absolute, "lr=0.1/run.toml", missing, "run.name=a", "model.path=models/a=b"]
    assert split_arguments(words) == ([Path(absolute), Path("lr=0.1/run.toml"), Path(missing)], words[3:])


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("run", "there is no configuration file run; did you mean `run.toml`?"),
        (".", ". is a folder; expected a TOML file, such as run.toml"),
        ("model", "model is a folder; expected a TOML file"),
        (
            "a-run",
            "a-run is a folder; expected a TOML file. It looks like the folder of a run, whose configuration is ",
        ),
        ("my_module_for_config.py", "my_module_for_config.py is not a TOML file, which a configuration must be: "),
    ],
)
def test_the_error_about_a_path_that_is_no_configuration_file_says_what_is_there(project, named, told):
    (project / "a-run").mkdir()
    (project / "a-run" / "config.toml").touch()
    with pytest.raises(ConfigError) as error:
        load(named)
    assert str(error.value).startswith(told)


def test_responses_end_at_texts_and_at_token_ids():
    sampling = resolve('rollout.stop=["END", 3, "\\n"]').sampling
    assert (sampling.stop, sampling.stop_token_ids) == (("END", "\n"), (3,))


def test_moments_may_be_on_the_host_beside_the_weights_with_any_optimizer():
    config = resolve("train.optimizer=muon", "train.offload=['moments', 'weights']")
    assert config.train.offload == ["moments", "weights"]


def test_an_override_may_hold_an_equals_sign():
    assert resolve("run.output_dir=a=b").run.output_dir == "a=b"


def test_an_override_cannot_smuggle_in_a_second_key():
    assert resolve("run.output_dir=1\nx=2").run.output_dir == "1\nx=2"


def test_an_empty_table_turns_an_optional_section_on():
    config = resolve("tiny_model={}")
    assert config.tiny_model is not None
    assert config.tiny_model.layers == 3


@pytest.mark.parametrize("override", ["train.batch_size", "=3", "train..batch_size=3", ""])
def test_an_override_of_another_form_is_refused(override):
    assert complaint(override) == f"setting `{override}`: expected `section.key=value`"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=64", "`train.batchsize` (setting): no such key; did you mean `train.batch_size`?"),
        ("train.steps=9", "`train.steps` (setting): no such key; did you mean `run.steps`?"),
        ("run.samples=2", "`run.samples` (setting): no such key; did you mean `eval.samples`?"),
        ("train.every=2", "`train.every` (setting): no such key; did you mean `eval.every` or `checkpoint.every`?"),
        ("tiny_model.seed=2", "`tiny_model.seed` (setting): this key was removed. The seed of a tiny model is 1; run."),
        ("trian.batch_size=64", "`trian` (setting): no such key; did you mean `train`?"),
        ("async_ratio=0", "`async_ratio` (setting): no such key; did you mean `train.async_ratio`?"),
        ("engine.zzzzz=0", "`engine.zzzzz` (setting): no such key"),
        ("train.batch_size=many", '`train.batch_size` (setting): expected an integer above 0, got "many"'),
        ("train.batch_size=8.0", "`train.batch_size` (setting): expected an integer above 0, got 8.0"),
        ("train.batch_size=true", "`train.batch_size` (setting): expected an integer above 0, got true"),
        ("train.max_token_age=1001", "`train.max_token_age` (setting): expected an integer from 0 to 1000, got 1001"),
        ("train.async_ratio=-1", "`train.async_ratio` (setting): expected a number from 0 to 1000, got -1"),
        (
            "train.async_ratio=inf",
            "`train.async_ratio` (setting): expected a number from 0 to 1000, got Infinity, which is not",
        ),
        (
            "train.async_ratio=nan",
            "`train.async_ratio` (setting): expected a number from 0 to 1000, got NaN, which is not",
        ),
        (
            "train.betas=[0.9]",
            "`train.betas` (setting): expected a list of 2: [a number at least 0 and below 1, a number",
        ),
        (
            "train.betas=[0.9, 1.0]",
            "`train.betas` (setting): expected a list of 2: [a number at least 0 and below 1, a",
        ),
        (
            "model.dtype=fp16",
            '`model.dtype` (setting): expected "auto", "bfloat16", "float16" or "float32", got "fp16"',
        ),
        ("run.resume=yes", '`run.resume` (setting): expected true or false, got "yes"'),
        ("run.name=a b", "`run.name` (setting): expected text matching ^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\\Z, got"),
        ("run.name.x=1", "`run.name` (setting): expected text matching ^[A-Za-z0-9_]"),
        ("cluster.node_cpus=0", "`cluster.node_cpus` (setting): expected a list, each item an integer at least 0"),
        (
            "cluster.gpus_per_node=all",
            '`cluster.gpus_per_node` (setting): expected an integer from 0 to 1024 or "auto"',
        ),
        (
            "checkpoint.export=false",
            "`checkpoint.export` (setting): this key was removed. After its last step a run always writes the trained",
        ),
        ("tiny_model=true", "`tiny_model` (setting): expected a table, got true"),
        ("alarms.reactions.lags=off", "`alarms.reactions.lags` (setting): no such key; did you mean `lag`?"),
        (
            "alarms.reactions.lag=quiet",
            '`alarms.reactions.lag` (setting): expected "checkpoint", "off" or "stop", got "quiet"',
        ),
        ('alarms.off=["lag"]', "`alarms.off` (setting): this key was removed. alarms.reactions names the alarms, each"),
        (
            'rollout.stop=[""]',
            "`rollout.stop` (setting): expected a list, each item non-empty text of at most 1000 characters or an",
        ),
        ("env.options=3", "`env.options` (setting): expected a table, got 3"),
    ],
)
def test_the_error_about_a_key_or_value_names_its_path_the_expected_type_and_the_value(override, message):
    assert complaint(override).startswith(message)


@pytest.mark.parametrize("name", [".", "..", ".hidden", "-", "", "a/b", "/", "a\\b", "a\n", "a" * 129])
def test_a_name_that_is_no_single_visible_folder_is_refused(name):
    """The run directory of `.` would be the output folder itself, which a new run moves aside."""
    assert complaint(f"run.name={json.dumps(name)}").startswith("`run.name` (setting): expected text matching")


@pytest.mark.parametrize("name", ["a", "1", "_a", "2024-05.seed_3", "a.1", "a..b"])
def test_a_name_of_one_folder_is_taken(name):
    assert resolve(f"run.name={json.dumps(name)}").run.name == name


def test_all_problems_are_named_at_once_with_the_file_of_each(project):
    (project / "bad.toml").write_text("[train]\nbatch_size = 0\nfoo = 1\n[eval]\nproblems = 'x'\n")
    with pytest.raises(ConfigError) as error:
        load([Path("run.toml"), Path("bad.toml")], ["eval.problems=[]"])
    assert str(error.value).splitlines() == [
        "3 problems:",
        "  - `train.foo` (bad.toml): no such key",
        "  - `train.batch_size` (bad.toml): expected an integer above 0, got 0",
        "  - `eval.problems` (setting): expected an integer above 0 and at most 1000000, got []",
    ]


def test_missing_required_keys_are_named():
    with pytest.raises(ConfigError) as error:
        load([], ["run.name=x"])
    assert str(error.value).splitlines() == [
        "2 problems:",
        "  - `model.path`: is missing; expected text",
        "  - `env.path`: is missing; expected text",
    ]


def test_a_missing_file_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"^there is no configuration file rum\.toml; did you mean `run\.toml`\?$"):
        load([Path("rum.toml")])


def test_a_folder_in_place_of_a_file_is_refused():
    with pytest.raises(ConfigError, match=r"^model is a folder; expected a TOML file$"):
        load([Path("model")])


def test_broken_toml_names_the_line(project):
    (project / "broken.toml").write_text("[run]\nname = \n")
    with pytest.raises(ConfigError, match=r"^broken\.toml is not valid TOML: .*line 2"):
        load([Path("broken.toml")])


def test_a_file_that_is_not_text_is_refused(project):
    (project / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^binary\.toml is not UTF-8 text, .* at byte \d+\. .* save it as UTF-8"):
        load([Path("binary.toml")])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.max_token_age=1", "train.async_ratio=1.5"],
            "`train.max_token_age` (setting): expected a number of at least 2, ⌈train.async_ratio⌉, got 1",
        ),
        (
            ["train.max_token_age=2", "train.async_ratio=0"],
            "`train.max_token_age` (setting): expected none, got 2: with train.async_ratio = 0 every age is 0",
        ),
        (
            ["train.batch_size=12"],
            "`train.batch_size` (setting): expected a multiple of rollout.group_size = 8, got 12",
        ),
        (
            ["train.minibatches=3"],
            "`train.minibatches` (setting): expected a divisor of the 32 groups of a batch, got 3",
        ),
        (
            ["train.batch_size=16", "train.minibatches=2", "cluster.trainer_ranks=9"],
            "`train.batch_size` (setting): 16 samples in 2 minibatches leave some of the 9 shards of the trainer",
        ),
        (
            ["rollout.group_size=1"],
            "`rollout.group_size` (setting): expected at least 2: algorithm.advantage = 'group', which",
        ),
        (
            ["rollout.on_expire=wait", "rollout.extra_groups=1"],
            "`rollout.extra_groups` (setting): expected 0: redundant groups become too old, which on_expire",
        ),
        (["algorithm.objective=gpro"], "`algorithm.objective` (setting): expected `grpo`, "),
        (
            ["algorithm.objective=envs.arithmetic:Arithmetic"],
            "`algorithm.objective` (setting): `envs.arithmetic:Arithmetic` is not a subclass of",
        ),
        (["algorithm.options.cliplow=0.1"], "`algorithm.options.cliplow` (setting): Grpo has no such option;"),
        (
            ["algorithm.objective=grpo", "algorithm.options.clip_low=-1"],
            "`algorithm.options.clip_low` (setting): expected a number from 0 to 1, got -1",
        ),
        (
            ["algorithm.objective=my_module_for_config:Uncorrected"],
            "`train.async_ratio`: 1 trains on samples of older versions, which `my_module_for_config:Uncorrected` does",
        ),
        (
            ["env.path=envs.arithmetik:Arithmetic"],
            "`env.path` (setting): there is no module `envs.arithmetik`; did you",
        ),
        (
            ["env.options.digit=2"],
            "`env.options.digit` (setting): Arithmetic has no such option; did you mean `digits`?",
        ),
        (["env.options.digits=two"], '`env.options.digits` (setting): expected an integer, got "two"'),
        (["env.options.digits=99"], "`env.options` (setting): Arithmetic refuses them: digits must be"),
        (
            ["env.path=my_module_for_config:Refusing", "env.options={size=3}"],
            "`env.options.digits` (run.toml): Refusing has no such option",
        ),
        (
            ["env.path=my_module_for_config:Speechless"],
            "`env.path` (setting): `my_module_for_config:Speechless` is not",
        ),
        (
            ["env.path=my_module_for_config:Judging"],
            "`env.path` (setting): `my_module_for_config:Judging`: Flash calls the method check on the class, without",
        ),
        (
            ["env.path=my_module_for_config:Awaited"],
            "`env.path` (setting): `my_module_for_config:Awaited`: Flash does not await the method check: make it a",
        ),
        (["env.path=math:pi"], "`env.path` (setting): `math:pi` is not an environment: expected a class with reset,"),
        (
            ["model.path=./nothing"],
            "`model.path` (setting): the folder nothing does not exist: expected a Hugging Face",
        ),
        (["model.path=model/nothing"], "`model.path` (setting): the folder model/nothing does not exist: expected"),
        (["model.path=~/nothing"], "~/nothing does not exist (only shells read ~ as "),
        (
            ["model.tool_parser=hermez"],
            "`model.tool_parser` (setting): vLLM has no 'hermez'; it has apertus, ",
        ),
        (
            ["model.reasoning_parser=hermes"],
            "`model.reasoning_parser` (setting): vLLM has no 'hermes'; it has cohere_command3, ",
        ),
        (["model.path=run.toml"], "`model.path` (setting): expected a folder, got the file run.toml"),
        (
            ["model.max_length=9000"],
            "2 problems:\n  - `model.max_length` (setting): expected at most 8192, the positions",
        ),
        (
            ["rollout.max_new_tokens=4096"],
            "`rollout.max_new_tokens` (setting): expected at most 4095 (model.max_length = 4096), got 4096",
        ),
        (
            ["rollout.min_tokens=9", "rollout.max_new_tokens=8", "rollout.top_k=4"],
            "`rollout.min_tokens` (setting): expected at most rollout.max_new_tokens = 8, got 9",
        ),
        (
            ['rollout.stop=["END", 3, 500]'],
            "`rollout.stop` (setting): expected token ids below 500, the size of the vocabulary of ./model, got 500",
        ),
        (
            ["rollout.logit_bias=[[501, 1], [3, 1]]", "rollout.top_k=4"],
            (
                "`rollout.logit_bias` (setting): expected token ids below 500, the size of the vocabulary of "
                "./model, got 501"
            ),
        ),
        (
            ["rollout.max_episode_tokens=40000"],
            "`rollout.max_episode_tokens` (setting): this key was removed. rollout.max_turns responses of at most",
        ),
        (
            ["rollout.max_branches=32"],
            "`rollout.max_branches` (setting): this key was removed. Each branch of an episode has a response of its",
        ),
        (
            ["train.max_tokens_per_microbatch=4095"],
            "`train.max_tokens_per_microbatch` (setting): expected at least model.max_length = 4096, got 4095",
        ),
        (
            ["track.to=['tensorboard', 'wanbd']"],
            (
                '`track.to[1]` (setting): expected "trackio", "wandb", "tensorboard", "mlflow" or `module:function`, '
                'got "wanbd"; did you mean `wandb`?'
            ),
        ),
        (["track.to=['nowhere:make_sink']"], "`track.to[0]` (setting): "),
        (["eval.samples=4"], "`eval.samples` (setting): 4 greedy answers are all the same"),
        (["cluster.trainer_nodes=2"], "`cluster.trainer_nodes` (setting): expected at most cluster.nodes = 1, got 2"),
        (
            ["train.moments=bfloat16"],
            "`train.moments` (setting): this key was removed. Moments are in float32; train.offload",
        ),
        (
            ["cluster.gpus_per_node=8", "train.optimizer=muon", "train.offload=['moments']"],
            "`train.offload` (setting): moments on the host without the weights need train.optimizer",
        ),
        (
            ["cluster.gpus_per_node=8", "train.offload=['activations']"],
            "`train.offload` (setting): `activations` offloads the inputs of layers that are computed again",
        ),
        (
            ["parallel.tensor=2"],
            "`parallel.tensor` (setting): expected a divisor of cluster.trainer_ranks = 1, got 2",
        ),
        (
            ["cluster.trainer_ranks=2", "parallel.tensor=2", "algorithm.rhythm={credit='local'}"],
            "`parallel.tensor` (setting): expected 1, as algorithm.rhythm looks at all heads of a layer, got 2",
        ),
        (
            ["cluster.trainer_ranks=2", "parallel.tensor=2", "parallel.context=2"],
            "`parallel.context` (setting): expected a divisor of cluster.trainer_ranks / parallel.tensor = 1, got 2",
        ),
        (
            ["cluster.trainer_ranks=2", "parallel.context=2", "algorithm.rhythm={credit='local'}"],
            "`parallel.context` (setting): expected 1, as algorithm.rhythm looks at all heads of a layer, got 2",
        ),
        (
            ["cluster.trainer_ranks=6", "parallel.tensor=2", "parallel.expert=3"],
            "`parallel.expert` (setting): expected a divisor of cluster.trainer_ranks = 6 and a multiple of parallel",
        ),
        (
            ["cluster.gpus_per_node=2", "cluster.trainer_ranks=3"],
            "`cluster.trainer_ranks` (setting): expected at most the 2 GPUs of a node, got 3",
        ),
        (
            ["cluster.gpus_per_node=1"],
            "`cluster.trainer_ranks`: no node has 1 GPUs left for an engine: each has 1, and trainers take 1",
        ),
        (
            ["cluster.gpus_per_node=4", "engine.tensor_parallel=4"],
            "`cluster.trainer_ranks`: no node has 4 GPUs left for an engine",
        ),
        (
            ["cluster.gpus_per_node=1", "engine.share_gpus=true", "engine.count=2"],
            "`engine.count` (setting): 2 engines on 1 GPUs each need more than the 1 of a node",
        ),
        (["weights.backend=nccl"], "`weights.backend` (setting): nccl needs GPUs"),
        (["weights.backend=ipc"], "`weights.backend` (setting): ipc needs GPUs"),
        (
            ["weights.backend=ipc", "cluster.gpus_per_node=2"],
            "`weights.backend` (setting): ipc needs engine.share_gpus = true",
        ),
        (
            ["weights.backend=nccl", "cluster.gpus_per_node=1", "engine.share_gpus=true"],
            "`weights.backend` (setting): nccl cannot connect two processes on one GPU",
        ),
        (
            ["cluster.nodes=2", "cluster.gpus_per_node=1", "engine.share_gpus=true"],
            "`weights.backend`: ipc works only within one machine and cluster.nodes is 2: expected tcp",
        ),
        (["cluster.node_cpus=[]"], "`cluster.node_cpus` (setting): expected one or more of this machine's cores 0 to"),
        (["cluster.trainer_cpus=[9999]"], "`cluster.trainer_cpus` (setting): expected one or more of this machine's"),
        (
            ["env.path=my_module_for_config:Refusing", "tiny_model.layers=1"],
            "`my_module_for_config:Refusing` has no solved examples to teach a tiny model with: give it the methods",
        ),
        (
            ["env.path=my_module_for_config:Refusing", "tiny_model.layers=1"],
            'leave [tiny_model] out (in Python: settings={"tiny_model": None})',
        ),
        (
            ["run.resume=true"],
            "`run.resume` (setting): there is no run to continue: the folder outputs/a-run does not",
        ),
    ],
)
def test_an_impossible_combination_is_refused(overrides, message):
    assert message in complaint(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.minibatches=4"],
        ["algorithm.objective=grpo", "algorithm.options.clip_high=0.28"],
        ["algorithm.objective=my_module_for_config:Uncorrected", "train.async_ratio=0"],
        ["algorithm.objective=my_module_for_config:Uncorrected", "train.allow_uncorrected=true"],
        ["model.path=Qwen/Qwen3-0.6B"],
        ["model.path=outputs/models/made-here", "tiny_model.layers=1"],
        ["model.max_length=8192", "rollout.max_new_tokens=8191"],
        ["eval.samples=4", "eval.temperature=0.6"],
        ["cluster.gpus_per_node=1", "engine.share_gpus=true", "weights.backend=tcp"],
        ["cluster.gpus_per_node=1", "cluster.nodes=2"],
        ["cluster.gpus_per_node=8", "cluster.trainer_ranks=4", "engine.tensor_parallel=4", "engine.count=4"],
        ["cluster.node_cpus=[0]", "cluster.trainer_cpus=[0]"],
    ],
)
def test_a_possible_combination_is_accepted(overrides):
    resolve(*overrides)


def test_the_error_of_an_environment_about_its_options_is_repeated(project):
    (project / "own.toml").write_text(
        "run = {name = 'x'}\nmodel = {path = './model'}\ncluster = {gpus_per_node = 0}\n"
        "env = {path = 'my_module_for_config:Refusing', options = {size = 3}}\n"
    )
    with pytest.raises(ConfigError, match=r"`env.options` \(own.toml\): Refusing refuses them: ValueError: too large$"):
        load([Path("own.toml")])
    assert load([Path("own.toml")], ["env.options.size=2"]).env.options == {"size": 2}
    # An attribute of this name that cannot be called is no check.
    assert load([Path("own.toml")], ["env.path=my_module_for_config:Unchecked"]).env.options == {"size": 3}


def test_a_damaged_model_description_is_refused(project):
    (project / "model" / "config.json").write_text("{")
    assert complaint().startswith("`model.path` (run.toml): model/config.json cannot be read: ")


def test_a_run_directory_can_be_resumed(project):
    (project / "outputs" / "a-run").mkdir(parents=True)
    assert resolve("run.resume=true").run.resume


def test_auto_becomes_the_number_of_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert resolve("cluster.gpus_per_node=auto").gpus_per_node == 2


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["tiny_model={}", "cluster.node_cpus=[0]", "train.betas=[0, 0.5]"],
        [
            "algorithm.objective=ppo",
            "critic={clip='none'}",
            "algorithm.corrections=[{kind='token_tis'}]",
            "algorithm.staleness={kind='linear'}",
            "algorithm.kl={coefficient=0.5}",
        ],
    ],
)
def test_a_dumped_configuration_loads_as_itself(project, overrides):
    config = resolve(*overrides)
    (project / "resolved.toml").write_text(dump(config))
    assert load([Path("resolved.toml")]) == config
    assert load_checked(Path("resolved.toml")) == config


def test_a_process_of_a_run_does_not_repeat_the_checks_of_its_launcher(project):
    config = resolve("run.output_dir=outputs")
    (project / "resolved.toml").write_text(dump(config))
    (project / "outputs").write_text("a file now")
    with pytest.raises(ConfigError, match=r"`run\.output_dir` \(resolved\.toml\): expected a folder"):
        load([Path("resolved.toml")])
    assert load_checked(Path("resolved.toml")) == config


def test_key_paths_are_those_of_the_tree():
    paths = list(key_paths())
    assert {"run.name", "tiny_model.layers", "env.options", "deadlines.shutdown"} <= set(paths)
    assert len(paths) == len(set(paths))


def test_loading_imports_neither_torch_nor_vllm():
    script = (
        "import sys; from pathlib import Path; from flash.config.load import load; load([Path('run.toml')]);"
        "assert not {'torch', 'vllm', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_law_6_staleness_without_a_correction_is_refused_unless_the_config_insists():
    objective = "algorithm.objective=my_module_for_config:Uncorrected"
    assert "allow_uncorrected" in complaint(objective, "train.async_ratio=1")
    assert resolve(objective, "train.async_ratio=0").train.async_ratio == 0
    assert resolve(objective, "train.async_ratio=1", "train.allow_uncorrected=true").train.async_ratio == 1


@pytest.mark.parametrize(
    "override",
    [
        "env.options.x=" + "[" * 100 + "]" * 100,
        "env.options.x=" + "{a=" * 100 + "1" + "}" * 100,
        f"env.options.{'a.' * 5_000}b=1",
    ],
)
def test_a_source_that_is_nested_too_deeply_is_refused(project, override):
    file = project / "deep.toml"
    file.write_text(override)
    for paths, overrides, source in ([file], [], str(file)), ([], [override], "setting"):
        with pytest.raises(ConfigError, match=f"^{source}.*: expected tables and lists at most 64 deep in one another"):
            load(paths, overrides)


@pytest.mark.parametrize(
    "nested",
    [
        lambda depth: f"a = {'[' * depth}{']' * depth}",
        lambda depth: f"[{'.'.join('a' * depth)}]",
    ],
)
def test_exactly_the_depth_that_the_message_names_is_allowed(project, nested):
    file = project / "deep.toml"
    file.write_text(nested(64))
    assert read_toml(file)
    file.write_text(nested(65))
    with pytest.raises(ConfigError, match="expected tables and lists at most 64 deep in one another"):
        read_toml(file)


@pytest.mark.parametrize(
    "setting",
    [f"model.path={LONG}.gguf", f"model.fetch={LONG}.gguf", f"env.path={LONG}:A", f"algorithm.objective={LONG}:A"],
)
def test_a_path_that_is_too_long_for_a_file_is_refused_with_its_key(project, setting):
    said = complaint(f'env.folders=["{project}/{LONG}"]', "model.path=./none", setting)
    assert f"`{setting.partition('=')[0]}`" in said


def test_a_file_may_begin_with_a_byte_order_mark(project):
    text = (project / "run.toml").read_bytes()
    (project / "marked.toml").write_bytes(b"\xef\xbb\xbf" + text)
    assert load("marked.toml") == load("run.toml")
    (project / "wide.toml").write_text(text.decode(), encoding="utf-16")
    with pytest.raises(ConfigError, match=r"^wide\.toml is not UTF-8 text"):
        load("wide.toml")


def test_a_folder_of_modules_that_does_not_exist_is_refused_with_its_place(project):
    assert complaint(f'env.folders=["{project}", "/nope"]') == (
        '`env.folders[1]` (setting): expected a folder to import modules from, and "/nope" does not exist'
    )
    assert resolve(f'env.folders=["{project}"]').env.folders == [str(project)]


def test_a_recorded_folder_of_modules_may_be_gone(project):
    (project / "config.toml").write_text('env.folders = ["/nope"]')
    assert load([Path("run.toml"), Path("config.toml")]).env.folders == ["/nope"]


@pytest.mark.parametrize("given", [{"run": {"name": "a"}}, [{"run": 1}], 3, None])
def test_load_refuses_an_argument_that_is_no_path(given):
    with pytest.raises(ConfigError, match=r"flash\.load: expected the path of a TOML file.*got a value of type"):
        load(given)


REMOVED_AT_DEFAULT = """
[rollout]
session_s = 0
selection = "uniform"
selection_floor = 0.1
[algorithm]
branches = "same"
"""


def test_removed_keys_with_their_former_defaults_are_ignored_with_one_line(project, capsys):
    (project / "older.toml").write_text(REMOVED_AT_DEFAULT)
    assert load(["run.toml", "older.toml"]) == load(["run.toml", "older.toml"]) == resolve()
    assert capsys.readouterr().err == (
        "flash: `rollout.session_s`, `rollout.selection`, `rollout.selection_floor`, `algorithm.branches` in "
        "older.toml were removed, and they are ignored, because they have their former default\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'rollout.selection = "pass_rate"',
            (
                "`rollout.selection` (older.toml): this key was removed. Problems are issued in their order, and none "
                "is passed over; rollout.drop_equal_rewards replaces groups that teach nothing. Delete it there"
            ),
        ),
        ("rollout.session_s = 2.5", "`rollout.session_s` (older.toml): this key was removed. "),
        ("rollout.session_s = false", "`rollout.session_s` (older.toml): this key was removed. "),
        ("algorithm.entropy_target = { nats = 1 }", "`algorithm.entropy_target` (older.toml): this key was removed. "),
    ],
)
def test_a_removed_key_with_another_value_is_refused_with_its_file_and_advice(project, text, message):
    (project / "older.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load(["run.toml", "older.toml"])
    assert str(error.value).startswith(message)


def test_many_ignored_keys_are_reported_by_their_number(project, capsys):
    settings = {"alarms": {**ALARM_LIMITS, "window": 10}}
    (project / "older.toml").write_text(tomli_w.dumps(settings))
    assert load(["run.toml", "older.toml"]) == resolve()
    assert " and 9 more keys in older.toml were removed, and they are ignored" in capsys.readouterr().err


def test_a_recorded_configuration_with_another_value_of_a_removed_key_is_read_with_a_warning(project, capsys):
    config = resolve()
    older = tomllib.loads(dump(config))
    older["alarms"] |= {"ess": 0.3, "age": 2.0}
    older["observe"] = {"sink": "my_module:make_sink"}
    (project / "config.toml").write_text(tomli_w.dumps(older))
    assert load("config.toml") == load("config.toml") == config
    assert capsys.readouterr().err == (
        "flash: warning: `observe` was removed, so a table in config.toml has no effect. track.to takes the import "
        "path of your own tracker, beside the names of others\n"
        "flash: warning: `alarms.age` was removed, so 2.0 in config.toml has no effect. The age of trained tokens "
        "raises no alarm; train.max_token_age limits it, and metrics.jsonl has it\n"
        "flash: warning: `alarms.ess` was removed, so 0.3 in config.toml has no effect. The limit of this alarm is "
        '0.5; alarms.reactions.ess = "off" turns it off\n'
    )


def test_a_removed_key_in_an_override_is_refused_whatever_its_value():
    assert complaint("algorithm.branches=same").startswith("`algorithm.branches` (setting): this key was removed. ")


def test_settings_that_an_older_version_recorded_differ_only_in_the_keys_that_the_user_changed(project):
    config = resolve()
    recorded = project / "recorded.toml"
    recorded.write_text(dump(config))
    present = read_recorded(recorded)
    older = tomllib.loads(dump(config))
    older["rollout"] |= {"session_s": 0.0, "selection": "pass_rate"}
    del older["train"]["profile"]
    recorded.write_text(tomli_w.dumps(older))
    assert read_recorded(recorded) == present | {"rollout": present["rollout"] | {"selection": "pass_rate"}}


def test_a_recorded_configuration_may_begin_with_a_byte_order_mark_as_a_users_may(project):
    config = resolve()
    recorded = project / "recorded.toml"
    recorded.write_text(dump(config))
    present = read_recorded(recorded)
    recorded.write_text("\ufeff" + dump(config), encoding="utf-8")
    assert read_recorded(recorded) == present
