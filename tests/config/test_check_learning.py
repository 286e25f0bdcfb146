"""Combinations of `[algorithm]` and `[critic]` that are refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.check_learning import WHOLE_BATCH, check_train, supervised, why_not_streamed
from flash.config.learning import TrainConfig
from flash.config.load import load
from flash.config.tree import Config
from flash.errors import ConfigError

MODULE = """
from algorithms.base import Objective

class LogLinear(Objective):
    @property
    def proximal_policy(self):
        return "loglinear"

    def __call__(self, tokens): ...

class Choosy(Objective):
    size: int = 1
    def __post_init__(self):
        if self.size > 2:
            raise ValueError("size is too large")
        if self.size == 0:
            raise SystemExit("no size")

    def without_effect(self):
        return {"size": "a reason"}[self.size] if self.size < 0 else {}

    def __call__(self, tokens): ...
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the current directory, with a user's module, a model folder and run.toml with the required keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_objectives_for_check.py").write_text(MODULE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    (tmp_path / "run.toml").write_text(
        """
        run = { name = "a-run" }
        model = { path = "./model" }
        env = { path = "envs.arithmetic:Arithmetic" }
        algorithm = { objective = "decoupled_ppo" }
        cluster = { gpus_per_node = 0 }
        """
    )


def resolve(*overrides: str) -> Config:
    """Return the configuration of run.toml with these overrides."""
    return load([Path("run.toml")], overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.group_size=1"],
            "expected at least 2: algorithm.advantage = 'group', which `decoupled_ppo` uses",
        ),
        (
            ["rollout.group_size=1", "algorithm.advantage=turn"],
            "`rollout.group_size` (setting): expected at least 2: algorithm.advantage = 'turn' compares the samples",
        ),
        (
            ["rollout.group_size=1", "algorithm.advantage=leave_one_out"],
            "`rollout.group_size` (setting): expected at least 2: algorithm.advantage = 'leave_one_out'",
        ),
        (
            ["rollout.group_size=1", "algorithm.objective=reinforce_pp", "algorithm.shaping=[{kind='length'}]"],
            "`algorithm.shaping[0]` (setting): compares the samples of a prompt, and rollout.group_size is 1",
        ),
        (["algorithm.gamma=0.9"], "`algorithm.gamma` (setting): 0.9 has no effect: algorithm.advantage = 'group'"),
        (
            ["algorithm.kl={estimator='k1', coefficient=0.1}"],
            "`algorithm.kl.estimator` (setting): k1 in the loss has no effect, because its",
        ),
        (
            ["lora.rank=8", "parallel.tensor=2", "cluster.trainer_ranks=2"],
            (
                "`parallel.tensor` (setting): expected 1, as layers, rows and experts with adapters ([lora]) "
                "cannot be divided among ranks, got"
            ),
        ),
        (
            ["lora.rank=8", "cluster.gpus_per_node=2", "model.dtype=float32"],
            "`model.dtype` (setting): expected bfloat16 or float16: vLLM's kernels for adapters ([lora])",
        ),
        (
            ["lora.rank=8", "cluster.gpus_per_node=2", "weights.backend=nccl"],
            "`weights.backend` (setting): expected tcp or auto, which alone can transfer adapters ([lora]), got nccl",
        ),
        (
            ["lora.rank=8", "weights.backend=tcp_deltas"],
            "`weights.backend` (setting): expected tcp or auto, which alone can transfer adapters ([lora]), got tcp_d",
        ),
        (["algorithm.advantage=gae"], "`critic`: is missing: advantage 'gae' takes its values from a critic"),
        (["critic={}"], "`critic` (setting): has no effect: algorithm.advantage is 'group'"),
        (
            ["algorithm.advantage=gae", "critic.warmup_steps=100"],
            "`critic.warmup_steps` (setting): expected fewer than run.steps = 100, or the policy never learns",
        ),
        (
            ["algorithm.objective=my_objectives_for_check:LogLinear", "train.async_ratio=0"],
            "`algorithm.options`: the log-linear proximal policy depends on the age of tokens",
        ),
        (
            ["algorithm.options.proximal=loglinear", "train.async_ratio=0"],
            "`algorithm.options` (setting): the log-linear proximal policy",
        ),
        (
            ["algorithm.staleness={kind='linear'}", "train.async_ratio=0"],
            "`algorithm.staleness` (setting): has no effect: with train.async_ratio = 0 every age is 0",
        ),
        (
            ["algorithm.lag.budget=0"],
            "`algorithm.lag.budget` (setting): expected a number above 0 and at most 100, got 0",
        ),
        (
            ["algorithm.shaping=[{kind='overlong', limit=70000, buffer=100}]"],
            "`algorithm.shaping[0].limit` (setting): expected at most 65536, the longest that the responses",
        ),
        (
            ["rollout.max_turns=1", "algorithm.shaping=[{kind='overlong', limit=1025, buffer=100}]"],
            "`algorithm.shaping[0].limit` (setting): expected at most 1024, the longest that the responses",
        ),
        (
            ["algorithm.objective=my_objectives_for_check:Choosy", "algorithm.options.size=3"],
            "`algorithm.options` (setting): size is too large",
        ),
        (
            ["algorithm.objective=my_objectives_for_check:Choosy", "algorithm.options.size=0"],
            "`algorithm.options` (setting): Choosy refuses them: SystemExit: no size",
        ),
        (
            ["algorithm.objective=my_objectives_for_check:Choosy", "algorithm.options.size=-1"],
            "`algorithm.options` (setting): Choosy refuses them: KeyError: -1",
        ),
        (
            ["algorithm.teacher={path='./model'}", "algorithm.objective=ppo", "critic={}"],
            "`critic` (setting): has no effect: rewards do not count (algorithm.teacher.reward = false)",
        ),
        (
            ["algorithm={teacher={path='./model'}, objective='ppo', advantage='turn', gamma=0.9}"],
            "`algorithm.gamma` (setting): has no effect: rewards do not count (algorithm.teacher.reward = false)",
        ),
        (
            ["algorithm.teacher.path=./model", "algorithm.advantage=turn"],
            "`algorithm.advantage` (setting): has no effect: rewards do not count (algorithm.teacher.reward = false)",
        ),
        (["algorithm.teacher={}"], "`algorithm.teacher` (setting): expected either path, a model that the"),
        (
            ["algorithm.teacher={path='./model', url='http://host:8000'}"],
            "`algorithm.teacher` (setting): expected either",
        ),
        (["algorithm.teacher={url='host:8000'}"], "`algorithm.teacher.url` (setting): expected http://HOST:PORT of a"),
        (
            ["algorithm.teacher={url='http://h:1'}", "rollout.temperature=0.7"],
            "`rollout.temperature` (setting): is not supported by the server",
        ),
        (
            ["algorithm.teacher={url='http://h:1'}", "rollout.top_k=5"],
            "`rollout.top_k` (setting): is not supported by",
        ),
        (["algorithm.teacher={path='./nothing'}"], "`algorithm.teacher.path` (setting): the folder nothing does not"),
        (
            ["algorithm.kl={coefficient=0.1, reference='./nothing'}"],
            "`algorithm.kl.reference` (setting): the folder nothing does not exist: expected a Hugging Face model, or",
        ),
        (
            ["algorithm.advantage=gae", "critic.path=model/nothing"],
            "`critic.path` (setting): the folder model/nothing does not exist",
        ),
        (
            ["algorithm.options.ewma_decay=0.5"],
            "`algorithm.options.ewma_decay` (setting): has no effect: proximal is 'recompute'; expected 'ewma'",
        ),
        *(
            (
                [f"algorithm.rhythm={{credit='{credit}', {name}={value}}}"],
                f"`algorithm.rhythm.{name}` (setting): {said}",
            )
            for credit, name, value, said in (
                ("local", "nearest", 5, "5 has no effect: algorithm.rhythm.credit is 'local'; expected another"),
                ("local", "farthest", 50, "50 has no effect"),
                ("global", "window", 10, "this key was removed. It is fixed at 10, as algorithms/rhythm.py says"),
                ("coupled", "gain", 1, "expected a number above 1"),
                ("coupled", "top", 0, "expected a number above 0"),
                ("coupled", "signs", "'positive'", "this key was removed. Advantages of both signs are multiplied"),
                (
                    "coupled",
                    "layers",
                    "[0, 3]",
                    "this key was removed. The attention of 5 layers from",
                ),
                ("coupled", "heads", "'first'", "this key was removed. Heads are classified in each batch"),
                ("coupled", "depth", 1, "this table has no such option"),
            )
        ),
        (["algorithm.rhythm={nearest=101}"], "`algorithm.rhythm` (setting): expected nearest ≤ farthest = 100"),
        (
            ["algorithm.rhythm={}", "rollout.max_new_tokens=10", "rollout.max_turns=1"],
            "`algorithm.rhythm.nearest`: expected fewer than 10, the longest that responses get",
        ),
        (
            ["algorithm.objective=asyppo"],
            "`critic`: is missing: advantage 'gae' takes its values from a critic",
        ),
        (
            ["algorithm.objective=asyppo", "algorithm.advantage=group"],
            "`algorithm.advantage` (setting): `asyppo` compares the values of critics, and advantage 'group' uses no",
        ),
        (
            ["algorithm.objective=asyppo", "critic={}", "rollout.group_size=1"],
            "`rollout.group_size` (setting): expected at least 2, as responses to a prompt are split among 2 critics",
        ),
        (
            ["algorithm.objective=ppo", "critic.count=2"],
            "`critic.count` (setting): this key was removed. The objective says how many critics it has: two for",
        ),
        (
            ["algorithm.objective=ppo", "critic.target=mc"],
            '`critic.target` (setting): expected "lambda" or "monte_carlo", got "mc"',
        ),
        (
            ["algorithm.objective=asyppo", "critic={}", "algorithm.options.mask_lowest=1.0"],
            "`algorithm.options.mask_lowest` (setting): expected a number at least 0 and below 1, got 1",
        ),
        (
            ["algorithm.objective=asyppo", "critic={}", "algorithm.options.filter_highest=0.3"],
            "`algorithm.options.filter_highest` (setting): has no effect: algorithm.entropy_bonus is 0",
        ),
        (
            ["algorithm.objective=asyppo", "critic={}", "algorithm.options.proximal=loglinear"],
            "`algorithm.options.proximal` (setting): has no effect: decoupled is false; expected true beside it",
        ),
        (
            ["algorithm.objective=asyppo", "critic={}", "algorithm.options={decoupled=true, ewma_decay=0.5}"],
            "`algorithm.options.ewma_decay` (setting): has no effect: proximal is 'recompute'; expected 'ewma'",
        ),
        (
            ["algorithm.objective=ppo", "critic={tiny_layers=1, path='./critic'}", "tiny_model={}"],
            "`critic.tiny_layers` (setting): this key was removed. With [tiny_model], a missing critic.path gets",
        ),
        (
            ["algorithm.objective=rloo", "train.async_ratio=0", "train.updates_per_batch=2"],
            "`train.updates_per_batch` (setting): 2 trains again on samples that are old after the first update",
        ),
        (["train.updates_per_batch=0"], "`train.updates_per_batch` (setting): expected an integer above 0"),
        (["rollout.top_p=0.9"], "`rollout.top_p` (setting): needs top_k, from 1 to 1024: the trainer can compute"),
        (["rollout.min_p=0.1"], "`rollout.min_p` (setting): needs top_k, from 1 to 1024"),
        (["rollout.min_tokens=5"], "`rollout.min_tokens` (setting): needs top_k, from 1 to 1024"),
        (["rollout.logit_bias=[[5, 1.0]]"], "`rollout.logit_bias` (setting): needs top_k, from 1 to 1024"),
        (
            [f"rollout.logit_bias={[[token, 1.0] for token in range(1025)]}", "rollout.top_k=5"],
            "`rollout.logit_bias` (setting): an engine on a GPU crashes with more than 1024 token ids: got 1025",
        ),
        (
            [f"rollout.stop={list(range(101))}"],
            "`rollout.stop` (setting): an engine on a GPU crashes with more than 100 token ids: got 101",
        ),
        (
            ["rollout.stop_token_ids=[5]"],
            "`rollout.stop_token_ids` (setting): this key was removed. rollout.stop takes token ids beside texts",
        ),
        (["rollout.repetition_penalty=1.1"], "`rollout.repetition_penalty` (setting): needs top_k, from 1 to 1024"),
        (["rollout.routing_replay=true"], "`rollout.routing_replay` (setting): expected false without GPUs"),
        (["rollout.top_k=2000"], "`rollout.top_k` (setting): expected an integer from 0 to 1024, got 2000"),
        (["rollout.top_p=0", "rollout.top_k=5"], "`rollout.top_p` (setting): expected a number above 0"),
        (["rollout.presence_penalty=0.5"], "`rollout.presence_penalty` (setting): no such key: an engine counts"),
        (["algorithm.branches=split"], "`algorithm.branches` (setting): this key was removed. Each branch gets"),
        (["rollout.session_s=2"], "`rollout.session_s` (setting): this key was removed. The KV caches of"),
        (
            ["algorithm.entropy_target.nats=1"],
            "`algorithm.entropy_target` (setting): this key was removed. The coefficient of",
        ),
        (
            ["rollout.top_k=20", "model.dtype=bfloat16", "model.head_dtype=model"],
            "`rollout.top_k` (setting): the trainer does not know which tokens it keeps with logits in bfloat16",
        ),
    ],
)
def test_a_setting_that_cannot_work_or_has_no_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(*overrides)
    assert message in str(error.value)
    assert "problems" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=1", "algorithm.objective=reinforce_pp"],
        ["rollout.group_size=1", "algorithm.objective=ppo", "critic={}"],
        ["algorithm.objective=asyppo", "critic={target='lambda'}", "train.updates_per_batch=4"],
        ["algorithm.objective=asyppo", "critic={}", "algorithm.options={decoupled=true, cap='clamp'}"],
        [
            "algorithm.objective=asyppo",
            "critic={}",
            "algorithm.options.filter_highest=0.3",
            "algorithm.entropy_bonus=0.01",
        ],
        ["algorithm.objective=ppo", "critic.path=./critic", "tiny_model={}"],
        [
            "algorithm.objective=rloo",
            "train.async_ratio=0",
            "train.updates_per_batch=2",
            "train.allow_uncorrected=true",
        ],
        ["algorithm.objective=dr_grpo"],
        ["algorithm.advantage=turn", "algorithm.gamma=0.9"],
        ["algorithm.options.proximal=loglinear"],
        ["algorithm.kl={estimator='k1', coefficient=0.1, place='reward', reference='Qwen/Qwen3-0.6B'}"],
        ["algorithm.kl={coefficient=0.1, reference='./model'}", "algorithm.entropy_bonus=0.01"],
        ["algorithm.teacher={path='Qwen/Qwen3-4B'}", "rollout.group_size=1"],
        ["algorithm.teacher={url='https://host/teacher/'}"],
        ["algorithm.teacher={path='./model'}", "algorithm.objective=ppo", "algorithm.advantage=group"],
        ["algorithm={teacher={path='./model'}, advantage='batch', kl={coefficient=1, place='reward'}}"],
        ["algorithm.teacher={path='./model', reward=true}", "algorithm.shaping=[{kind='length'}]"],
        ["algorithm.staleness={kind='exponential', decay=0.9}"],
        ["algorithm.shaping=[{kind='overlong', limit=1024, buffer=256}, {kind='length'}]"],
        ["algorithm.rhythm={}"],
        ["algorithm.rhythm={credit='local'}", "rollout.max_new_tokens=5"],
        ["algorithm.rhythm={credit='global', nearest=2}", "algorithm.objective=reinforce_pp"],
    ],
)
def test_settings_that_work_together_are_accepted(overrides: list[str]) -> None:
    resolve(*overrides)


def test_a_correction_by_weight_suffices_for_an_objective_without_a_correction_of_its_own() -> None:
    rloo = ["algorithm.objective=rloo", "train.async_ratio=2"]
    for insufficient in ([], ["algorithm.corrections=[{kind='geometric'}]"]):
        with pytest.raises(ConfigError, match="does not correct for"):
            resolve(*rloo, *insufficient)
    resolve(*rloo, "algorithm.corrections=[{kind='token_tis'}]")


def test_the_settings_that_need_the_whole_batch_are_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "asynchrony.md").read_text()
    for one in WHOLE_BATCH:
        assert one.reason in page
        assert one.setting.replace("`", "") in page.replace("`", "")


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({}, None),
        ({"train": {"stream": False}}, "train.stream is false"),
        ({"train": {"stream": None, "async_ratio": 0}}, "train.async_ratio is 0, and train.stream is not set"),
        ({"train": {"stream": None, "minibatches": 2}}, "train.minibatches is above 1, and train.stream is not set"),
        ({"algorithm": {"objective": "m2po"}}, "a limit from all tokens of a minibatch"),
        ({"algorithm": {"objective": "reinforce_pp"}}, "advantages are compared over the whole batch"),
        ({"algorithm": {"staleness": {"kind": "linear"}}}, "mean 1 over the whole batch"),
        ({"train": {"minibatches": 2}}, "under the weights before the first update"),
        ({"rollout": {"on_expire": "wait"}}, "wait for a slow group"),
    ],
)
def test_a_step_is_streamed_unless_a_setting_needs_the_whole_batch(tables: dict[str, Any], reason: str | None) -> None:
    base: dict[str, Any] = {"run": {"name": "test"}, "model": {"path": "fake"}, "env": {"path": "fake:Fake"}}
    config = msgspec.convert(base | {"train": {"stream": True}} | tables, Config)
    if "train" in tables:
        config = msgspec.convert(base | {"train": {"stream": True} | tables["train"]}, Config)
    found = why_not_streamed(config)
    assert found == reason or (found is not None and reason is not None and reason in found)


@pytest.mark.parametrize(
    ("train", "streamed"),
    [
        ({}, True),
        ({"async_ratio": 0.5}, True),
        ({"async_ratio": 0}, False),
        ({"minibatches": 2}, False),
        ({"stream": False}, False),
        ({"async_ratio": 0, "stream": True}, True),
        ({"minibatches": 2, "stream": True}, True),
    ],
)
def test_steps_are_streamed_by_default_with_old_samples_and_one_minibatch(
    train: dict[str, Any], streamed: bool
) -> None:
    assert msgspec.convert(train, TrainConfig).streamed is streamed


def test_the_reason_why_a_step_is_not_streamed_stands_before_its_setting() -> None:
    base: dict[str, Any] = {"run": {"name": "test"}, "model": {"path": "fake"}, "env": {"path": "fake:Fake"}}
    config = msgspec.convert(base | {"train": {"stream": True}, "algorithm": {"advantage": "batch"}}, Config)
    assert why_not_streamed(config) == 'advantages are compared over the whole batch (algorithm.advantage = "batch")'


def test_supervised_steps_are_not_streamed() -> None:
    base: dict[str, Any] = {"run": {"name": "test"}, "model": {"path": "fake"}, "env": {"path": "fake:Fake"}}
    config = msgspec.convert(base | {"train": {"stream": True}, "sft": {"data": "rows.jsonl"}}, Config)
    assert not supervised(config).train.stream


@pytest.mark.parametrize("sft", [None, {"data": "rows.jsonl"}])
def test_the_learning_rate_never_decays_to_more_than_its_peak(sft: dict[str, Any] | None) -> None:
    base: dict[str, Any] = {"run": {"name": "test"}, "model": {"path": "fake"}, "env": {"path": "fake:Fake"}}
    config = msgspec.convert(base | {"train": {"final_learning_rate": 0.1}, "sft": sft}, Config)
    assert [problem.key for problem in check_train(supervised(config))] == ["train.final_learning_rate"]


@pytest.mark.parametrize("checkpoint", [{}, {"batches": "none"}, {"journal": "off"}])
def test_updates_within_a_streamed_step_need_batches_to_train_again(checkpoint: dict[str, Any]) -> None:
    base: dict[str, Any] = {"run": {"name": "test"}, "model": {"path": "fake"}, "env": {"path": "fake:Fake"}}
    average = {"objective": "decoupled_ppo", "options": {"proximal": "ewma"}}
    tables = base | {"algorithm": average, "checkpoint": checkpoint}
    one, two = (
        why_not_streamed(msgspec.convert(tables | {"train": {"stream": True, "minibatches": count}}, Config))
        for count in (1, 2)
    )
    assert one is None
    assert ("an interrupt between two updates" in (two or "")) == bool(checkpoint)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.routing_replay=true", "cluster.gpus_per_node=0"],
        ["rollout.top_k=20", "model.dtype=bfloat16", "model.head_dtype=model"],
    ],
)
def test_a_simulation_ignores_limits_of_its_model_and_devices(overrides: list[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "simulate.toml"
    assert load(example, overrides, simulated=True).simulate is not None
