from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.form import WORKLOADS, Args
from benchmarks.real import runs
from benchmarks.real.runs import (
    ASYNC,
    GAMES,
    LOCK_STEP,
    OWN,
    PINNED,
    REDUNDANT,
    TECHNIQUES,
    Measured,
    Round,
    balanced,
    one_round,
    rows_of,
)
from flash.config.check import check
from flash.config.load import load


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("workload", ["real_rlvr", "real_agentic"])
def test_the_modes_of_a_workload_differ_in_nothing_but_what_is_compared(workload: str) -> None:
    file = WORKLOADS / f"{workload}.toml"
    synchronous, ours = (load([file], [*PINNED, *overrides]) for overrides in TECHNIQUES.values())
    assert (synchronous.train.async_ratio, ours.train.async_ratio) == (0, 2)
    assert (synchronous.rollout.barriers, ours.rollout.barriers) == (["batch", "group", "turn"], [])
    for section in ("model", "tiny_model", "env", "engine", "algorithm", "eval", "cluster"):
        assert getattr(synchronous, section) == getattr(ours, section)
    assert synchronous.train.batch_size == ours.train.batch_size
    assert ours.cluster.node_cpus == [0]
    assert ours.cluster.trainer_cpus == [1]


def test_the_modes_of_the_games_differ_in_nothing_but_what_is_compared() -> None:
    file = WORKLOADS / "real_textworld.toml"
    modes = {mode: load([file], [*PINNED, *overrides]) for mode, overrides in GAMES.items()}
    compared = [(one.train.async_ratio, one.rollout.barriers, one.rollout.extra_groups) for one in modes.values()]
    assert compared == [(0, ["turn"], 0), (0, [], 0), (1, [], 0), (1, [], 1)]
    for config in modes.values():
        rollout = msgspec.structs.replace(config.rollout, barriers=[], extra_groups=0, extra_per_group=0)
        train = msgspec.structs.replace(config.train, async_ratio=0)
        assert msgspec.structs.replace(config, rollout=rollout, train=train) == modes[OWN]
    assert check(modes[REDUNDANT]) == []


def measured(seconds: float, won: float, half: float = 0.1, wait_s: float = 1.0) -> Measured:
    evals = [{"mean_reward": reward, "low": reward - half, "high": reward + half} for reward in (0.25, won)]
    metrics = [{"trainer_wait_s": wait_s, "trainer_step_s": 2.0 + step % 2 * 2, "age_mean": 0.5} for step in range(4)]
    return Measured(seconds, {}, evals, metrics)


def a_round(scale: float, *, won: float = 0.5) -> Round:
    seconds = {LOCK_STEP: 120.0, OWN: 60.0, ASYNC: 40.0, REDUNDANT: 30.0 * scale}
    return {mode: measured(each, won if mode == REDUNDANT else 0.5) for mode, each in seconds.items()}


def test_ratios_are_within_a_round_and_their_median_counts() -> None:
    rows = rows_of(GAMES, [a_round(1), a_round(2), a_round(0.5)], goals={REDUNDANT: 2.72}, papers={OWN: 1.58})
    found = {(row.case, row.metric): row for row in rows}
    of = f"{REDUNDANT} over {LOCK_STEP}"
    assert [found[of, name].ours for name in ("speedup", "speedup_least", "speedup_most")] == [4.0, 2.0, 8.0]
    assert found[of, "speedup"].met
    own = found[f"{OWN} over {LOCK_STEP}", "speedup"]
    assert (own.ours, own.reference, own.at_least) == (2.0, 1.58, None)
    assert found[ASYNC, "trainer_step_s_per_step"].ours == 3.0


def test_a_single_round_has_no_spread() -> None:
    rows = rows_of(GAMES, [a_round(1)], goals={})
    assert "speedup_least" not in {row.metric for row in rows}


@pytest.mark.parametrize(("won", "agree"), [(0.6, True), (0.65, False)])
def test_accuracies_of_all_rounds_together_are_compared_with_those_of_the_first_mode(won: float, agree: bool) -> None:
    rows = rows_of(GAMES, [a_round(1, won=won)] * 4, goals={})
    met = {row.case: row.met for row in rows if row.metric == "overlap"}
    assert met[f"{REDUNDANT}, final accuracy that of {LOCK_STEP}"] == agree
    last = {row.metric: row.ours for row in rows if row.case == REDUNDANT}
    assert last["final_accuracy"] == pytest.approx(won)
    # The interval of four evaluations is half as wide as that of each.
    assert last["final_accuracy_high"] - last["final_accuracy_low"] == pytest.approx(0.1)


def test_each_round_begins_with_another_mode() -> None:
    trained: list[list[str]] = []

    def train(_: Path, name: str, overrides: list[str]) -> Measured:
        trained.append(overrides)
        return measured(1.0, 0.5)

    assert set(one_round("real_textworld", GAMES, 1, 5, ["a=1"], train=train)) == set(GAMES)
    assert trained[0] == [*PINNED, "a=1", "run.steps=5", "run.seed=1", *GAMES[OWN]]
    assert trained[-1] == [*PINNED, "a=1", "run.steps=5", "run.seed=1", *GAMES[LOCK_STEP]]


def test_prompts_are_lengthened_until_both_halves_are_equally_heavy() -> None:
    tried: dict[int, float] = {}

    def train(_: Path, name: str, overrides: list[str]) -> Measured:
        padding = int(next(one for one in overrides if "padding=" in one).rpartition("=")[2])
        # A step trains for 3 s in the mean. Both halves grow with the prompts, so their ratio grows less.
        tried[padding] = ((padding + 10) / 100) ** 0.5
        return measured(1.0, 0.5, wait_s=3.0 / tried[padding])

    overrides = balanced(Args(quick=False), train)
    assert len(tried) > 1
    best = min(tried, key=lambda padding: abs(tried[padding] - 1))
    assert overrides[0] == f"env.options.padding={best}"
    assert abs(tried[best] - 1) <= runs.BALANCE
