"""Configuration keys that hold tables of several kinds, and lists of them."""

from pathlib import Path

import pytest

from algorithms.corrections import Geometric, IcePop, TokenTis
from algorithms.references import Kl
from algorithms.shaping import Overlong
from algorithms.staleness import ExponentialStaleness, LinearStaleness
from flash.config.load import load
from flash.config.tree import Config
from flash.errors import ConfigError


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Return the current directory, which has run.toml with the required keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        """
        run = { name = "a-run" }
        model = { path = "Qwen/Qwen3-0.6B" }
        env = { path = "envs.arithmetic:Arithmetic" }
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


KINDS = """
[algorithm]
corrections = [{ kind = "token_tis", cap = 3 }, { kind = "geometric" }]
shaping = [{ kind = "overlong", limit = 64, buffer = 16 }]

[algorithm.staleness]
kind = "exponential"
decay = 0.5

[algorithm.kl]
coefficient = 0.01
estimator = "k2"
"""


def test_tables_of_several_kinds_and_lists_of_them_are_read_from_files_and_overrides(project):
    (project / "kinds.toml").write_text(KINDS)
    algorithm = load([Path("run.toml"), Path("kinds.toml")]).algorithm
    assert algorithm.corrections == [TokenTis(cap=3.0), Geometric()]
    assert algorithm.shaping == [Overlong(limit=64, buffer=16)]
    assert algorithm.staleness == ExponentialStaleness(decay=0.5)
    assert algorithm.kl == Kl(coefficient=0.01, estimator="k2")
    overrides = [
        'algorithm.corrections=[{kind="icepop", high=2}]',
        "algorithm.staleness.decay=0.25",
        "algorithm.kl.place=reward",
    ]
    algorithm = load([Path("run.toml"), Path("kinds.toml")], overrides).algorithm
    assert algorithm.corrections == [IcePop(high=2.0)]
    assert algorithm.staleness == ExponentialStaleness(decay=0.25)
    assert algorithm.kl == Kl(coefficient=0.01, estimator="k2", place="reward")


@pytest.mark.parametrize("override", ["algorithm.staleness.kind=linear", 'algorithm.staleness={kind="linear"}'])
def test_a_table_of_another_kind_takes_the_place_of_the_earlier_one_with_its_options(project, override):
    (project / "kinds.toml").write_text(KINDS)
    assert load([Path("run.toml"), Path("kinds.toml")], [override]).algorithm.staleness == LinearStaleness()


def test_none_takes_a_value_or_an_optional_table_away(project):
    (project / "kinds.toml").write_text(KINDS + "[critic]\n")
    config = load([Path("run.toml"), Path("kinds.toml")], ["algorithm.kl=none", "critic=none"])
    assert config.algorithm.kl is None
    assert config.critic is None
    ppo = resolve("algorithm.objective=ppo", "critic.clip=none", "critic.path=none/none")
    assert ppo.critic is not None
    assert ppo.critic.clip is None
    assert ppo.critic.path == "none/none"
    assert resolve("train.batch_size=none") == resolve("simulate.env_s=none", "simulate=none") == resolve()


def test_none_unsets_a_text_key_and_a_required_key_is_then_missing():
    assert complaint("model.path=none") == "`model.path` (setting): is missing; expected text"
    assert complaint("run.name=none").startswith("`run.name` (setting): is missing; expected text")
    assert resolve('run.name="none"').run.name == "none"
    assert (
        resolve("track.project=none")
        == resolve("model.tool_parser=none")
        == resolve("alarms.command=none")
        == resolve()
    )
    simulated = resolve("simulate.env_s=3", "simulate.env_s=none").simulate
    assert simulated is not None
    assert simulated.env_s == 0
    assert resolve("checkpoint.batches=none").checkpoint.batches == "none"


CORRECTIONS = '"token_tis", "icepop", "sequence_mask" or "geometric"'


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.corrections=[{kind='tokentis'}]",
            (
                f"`algorithm.corrections[0].kind` (setting): expected {CORRECTIONS}, "
                'got "tokentis"; did you mean `token_tis`?'
            ),
        ),
        (
            "algorithm.corrections=[{kind='geometric'}, {cap=2}]",
            (f"`algorithm.corrections[1].kind` (setting): expected {CORRECTIONS}, which is missing"),
        ),
        (
            "algorithm.corrections=[{kind='icepop', cap=2}]",
            (
                '`algorithm.corrections[0].cap` (setting): "icepop" has no such option; it belongs to "token_tis" '
                "(its options: `low`, `high`)"
            ),
        ),
        (
            "algorithm.corrections=[{kind='icepop', hihg=2}]",
            (
                '`algorithm.corrections[0].hihg` (setting): "icepop" has no such option; did you mean `high`? '
                "(its options: `low`, `high`)"
            ),
        ),
        (
            "algorithm.corrections=[{kind='icepop', low=-1}]",
            "`algorithm.corrections[0].low` (setting): expected a number at least 0, got -1",
        ),
        (
            "algorithm.corrections=[{kind='icepop', low=7}]",
            "`algorithm.corrections[0]` (setting): expected low ≤ high, got 7 and 5",
        ),
        (
            "algorithm.corrections={kind='icepop'}",
            (
                f"`algorithm.corrections` (setting): expected a list, each item a table with kind = {CORRECTIONS}, "
                "got a table"
            ),
        ),
        (
            "algorithm.staleness=linear",
            (
                '`algorithm.staleness` (setting): expected a table with kind = "none", "exponential" or "linear", '
                'got "linear"'
            ),
        ),
        (
            "algorithm.staleness={kind='linear', decay=0.5}",
            (
                '`algorithm.staleness.decay` (setting): "linear" has no such option; it belongs to "exponential" '
                "(its options: none)"
            ),
        ),
        (
            "algorithm.staleness={kind='exponential'}",
            "`algorithm.staleness.decay`: is missing; expected a number above 0 and at most 1",
        ),
        (
            "algorithm.kl={coefficent=0.1}",
            (
                "2 problems:\n  - `algorithm.kl.coefficent` (setting): this table has no such option; "
                "did you mean `coefficient`? (its options: `estimator`, `coefficient`, `place`, `reference`, "
                "`refresh`)\n"
                "  - `algorithm.kl.coefficient`: is missing; expected a number above 0"
            ),
        ),
        (
            "algorithm.kl={coefficient=0.1, estimator='k4'}",
            '`algorithm.kl.estimator` (setting): expected "k1", "k2" or "k3", got "k4"',
        ),
        (
            "algorithm.advantage=grup",
            (
                '`algorithm.advantage` (setting): expected "batch", "gae", "group", "group_mean", "leave_one_out" or '
                '"turn", got "grup"'
            ),
        ),
    ],
)
def test_a_wrong_kind_or_an_option_of_another_is_one_clear_error(override, message):
    assert complaint(override) == message
