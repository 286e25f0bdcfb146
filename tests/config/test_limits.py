"""Values of the right type that cannot work are refused, and values that are only unwise give a warning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flash.cli.main import main
from flash.config.check import unwise
from flash.config.load import load
from flash.errors import ConfigError

TEXT = """
run.name = "test"
model.path = "Qwen/Qwen3-0.6B"
env.path = "envs.arithmetic:Arithmetic"
cluster.gpus_per_node = 0
"""
CORES = os.cpu_count() or 1
EAGER = "engine.enforce_eager=true"
"""Override without which a warning would depend on the compiler of this machine."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a configuration file with the required keys."""
    path = tmp_path / "run.toml"
    path.write_text(f'{TEXT}run.output_dir = "{tmp_path}"\n')
    return path


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        *(
            (f"cluster.hub={hub}", f'`cluster.hub` (setting): expected HOST:PORT or :PORT, got "{hub}"')
            for hub in (":70000", "node1", "node1:", "node1:-1", "node1:x")
        ),
        ("cluster.hub_port=29500", "`cluster.hub_port` (setting): this key was removed. cluster.hub = "),
        ("engine.max_restarts=9", "`engine.max_restarts` (setting): this key was removed. cluster.max_restarts also"),
        ("cluster.hub_host=node1", "`cluster.hub_host` (setting): this key was removed. cluster.hub = "),
        (
            "rollout.selection=pass_rate",
            "`rollout.selection` (setting): this key was removed. Problems are issued",
        ),
        (
            "rollout.selection_floor=0.1",
            "`rollout.selection_floor` (setting): this key was removed. Problems are issued",
        ),
        ("engine.kv_cache_gib=1e18", "`engine.kv_cache_gib` (setting): expected a number from 0.001 to 1e+06"),
        ("engine.kv_cache_gib=1e-300", "expected a number from 0.001 to 1e+06, got 1e-300"),
        ("engine.max_sequences=2147483647", "expected an integer above 0 and at most 65536"),
        ("cluster.gpus_per_node=2147483647", "`cluster.gpus_per_node` (setting): expected an integer from 0 to 1024"),
        (
            "deadlines.batch=7200",
            "`deadlines.batch` (setting): this key was removed. deadlines.step also limits the wait",
        ),
        ("deadlines.env_reset=600", "`deadlines.env_reset` (setting): this key was removed. deadlines.env_step also"),
        ("train.eps=1e-6", "`train.eps` (setting): this key was removed. AdamW's ε is 1e-08. Delete it there"),
        ("eval.temperature=1e300", "`eval.temperature` (setting): expected a number from 0 to 2"),
        ("engine.kv_cache_gib=1e5", "GiB of this machine's memory for 1 engine(s) together, got 100000 for each"),
        (
            "run.seed=99999999999999999999",
            "expected an integer at least 0, got a number of 67 bits, which does not fit",
        ),
        ("run.seed=3000000000", "expected an integer at least 0, got 3000000000, which is above 2147483647"),
        (
            "deadlines.collective=1e-9",
            "`deadlines.collective` (setting): expected a number from 0.1 to 1e+08, got 1e-09",
        ),
        ("deadlines.request=1e300", "expected a number from 0.1 to 1e+08, got 1e+300"),
        ("train.learning_rate=1e9", "`train.learning_rate` (setting): expected a number above 0 and at most 1"),
        ("rollout.temperature=1e-9", "`rollout.temperature` (setting): expected a number from 0.01 to 2, got 1e-09"),
        ("rollout.temperature=2.5", "`rollout.temperature` (setting): expected a number from 0.01 to 2, got 2.5"),
        ("train.final_learning_rate=0.1", "is a rate, not a share: expected at most train.learning_rate = 1e-06"),
        (
            "train.profile='3'",
            "`train.profile` (setting): expected FIRST:LAST, two numbers of steps such as `3:5`, or an",
        ),
        ("train.profile=5:3", 'expected FIRST:LAST with FIRST at most LAST, got "5:3"'),
        ("train.profile=3:x", 'or an empty text, got "3:x"'),
        ("train.profile=3:100", "expected a LAST step of at most 99 (run.steps = 100), got 100"),
        ("eval.temperature=1e-9", "`eval.temperature` (setting): expected 0, which is greedy, or at least 0.01"),
        ("algorithm.entropy_bonus=1e308", "expected a number from 0 to 100, got 1e+308"),
        ("cluster.node_cpus=[0,0]", "cores 0 to"),
        ("cluster.trainer_ranks=10000", "processes, 4 to a core, got 10000"),
        ("engine.tensor_parallel=1000000000", "`engine.tensor_parallel` (setting): expected at most"),
        ("engine.count=100000", "`engine.count` (setting): expected at most"),
        (
            "eval.problems=1e40",
            "`eval.problems` (setting): expected an integer above 0 and at most 1000000, got 1e+40",
        ),
        ("eval.problems=1000000 eval.samples=10 eval.temperature=1.0", "expected at most 1000000 answers"),
        ("weights.canary_tolerance=1e9", "expected a number above 0 and at most 10, got 1000000000.0"),
        ("model.path=", "`model.path` (setting): is empty"),
        ("run.output_dir=/dev/null", "`run.output_dir` (setting): expected a folder, and /dev/null is not a folder"),
        (f"run.output_dir={'x' * 300}", "cannot be used: File name too long"),
        (f"model.path={'x' * 300}", '`model.path` (setting): "xxx'),
        ("model.path=a\0b", '`model.path` (setting): expected text, got "a\\u0000b", which contains characters'),
        ("model.path=a\udc80b", "which contains characters that are not text"),
        ("rollout.fifo_window=1e308", "expected a number from 1 to 1e+06"),
        ("env.options.x={y = 18446744073709551616}", "with a part which does not fit into 64 bits"),
        ("simulate.turns=constant(" + "(" * 5000, "; a distribution is no text any more, but a number"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_key(file: Path, override: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, override.split(" ") if override.startswith("eval.problems=1000000") else [override])
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_largest_count_is_named_only_where_an_integer_is_expected(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected text, got 3000000000$"):
        load(file, ["env.path=3000000000"])


@pytest.mark.parametrize(
    "content", [b"x = " + b"9" * 5000, b"x = " + b"[" * 5000, b"x = 0x" + b"f" * 9000, b"\xff", b"x = '\0'"]
)
def test_a_file_that_tomls_parser_fails_at_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"odd\.toml|`x`"):
        load(path)


def test_a_path_with_a_nul_byte_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "a\0b.toml"]) == 2
    assert "cannot be read: embedded null byte" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.learning_rate=0.5", "train.learning_rate"),
        ("train.warmup_steps=100", "train.warmup_steps"),
        ("algorithm.entropy_bonus=5", "algorithm.entropy_bonus"),
        ("rollout.temperature=0.05", "rollout.temperature"),
        ("rollout.temperature=1.9", "rollout.temperature"),
        ("weights.canary_tolerance=2", "weights.canary_tolerance"),
        (f"cluster.trainer_ranks={CORES + 1}", "cluster.trainer_ranks"),
        ("train.offload=['moments']", "train.offload"),
    ],
)
def test_an_unwise_setting_is_accepted_with_a_warning(file: Path, override: str, key: str) -> None:
    assert [problem.key for problem in unwise(load(file, [override, EAGER]))] == [key]


def test_flash_train_prints_warnings_before_anything_starts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [f"model.path={file.parent / 'tiny'}", "tiny_model={}"]
    assert main(["train", str(file), *made, "train.learning_rate=0.5", "--dry-run"]) == 0
    assert "flash: warning: `train.learning_rate`: 0.5 is far above" in capsys.readouterr().err


def test_the_examples_give_no_warning() -> None:
    examples = Path(__file__).parents[2] / "examples"
    told = {
        path.name: unwise(load(path, [EAGER]))
        for path in [examples / "quickstart.toml", examples / "minimal.toml"]
        if path.exists()
    }
    assert told
    assert not any(told.values())
