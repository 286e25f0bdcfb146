"""What the comparison of selections makes of curves, and the problems that it trains."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.form import Args
from benchmarks.real.selection import (
    CASES,
    QUICKSTART,
    WORKLOAD,
    Comparison,
    FewSums,
    FewSumsOptions,
    Pair,
    Point,
    Run,
    by_command,
)
from benchmarks.training import Measured
from flash.config.load import load
from flash.environment import HELD_OUT


def line(per_thousand: float, samples: int = 6000) -> Run:
    """A run that gains so much of accuracy in a thousand samples, of which each has two tokens."""
    points = range(0, samples + 1, 500)
    return Run([Point(at, 2 * at, 0.3 + per_thousand * at / 1000) for at in points], 0.5, 0.0, 10)


def test_twice_the_gain_needs_half_of_the_samples() -> None:
    pair = Pair.of(line(0.04), line(0.08, 3000))
    assert pair.target == pytest.approx(0.3 + 0.9 * 0.2)
    assert pair.samples == pytest.approx(2.0, rel=0.1)
    assert pair.tokens == pair.samples
    assert pair.accuracy == pytest.approx(100 * 0.1, rel=0.1)
    assert Pair.of(line(0.04), line(0.04))[1:] == (1.0, 1.0, 0.0)


def test_finished_seeds_are_not_run_again_and_rows_have_an_interval(tmp_path: Path) -> None:
    orders: list[tuple[int, int, list[str]]] = []

    def run(order: tuple[int, int, list[str]]) -> list[Run]:
        orders.append(order)
        return [line(0.04), line(0.08 if order[0] else 0.06)]

    options = argparse.Namespace(seeds=2, runs=tmp_path, quickstart=False)
    first = Comparison(options, in_process=run).measure(Args(quick=False))
    assert Comparison(options, in_process=run).measure(Args(quick=False)) == first
    assert [seed for seed, *_ in orders] == [0, 1] * len(CASES)
    row = {one.metric: one.ours for one in first if one.case == "sums"}
    assert row["samples_speedup_low"] < row["samples_speedup"] < row["samples_speedup_high"]
    assert row["samples_speedup"] == pytest.approx((1.5 * 2) ** 0.5, rel=0.1)


def test_the_quickstart_counts_what_was_dropped_too() -> None:
    asked: list[list[str]] = []

    def train(workload: Path, name: str, overrides: list[str]) -> Measured:
        assert workload == QUICKSTART
        asked.append(overrides)
        rows = [
            {"version": step + 1, "samples": 64, "filtered": 40 * (step + 1), "generated_tokens": 1000 * (step + 1)}
            | {"passed_over_share": 0.25}
            for step in range(4)
        ]
        evals = [{"step": step, "mean_reward": 0.1 * step} for step in (0, 2, 4)]
        return Measured(1.0, {}, evals, rows)

    run = by_command("pass_rate", 1, train)
    assert run.curve == [Point(0, 0, 0.0), Point(208, 2000, 0.2), Point(416, 4000, 0.4)]
    assert (run.equal, run.passed_over, run.steps) == (160 / 416, 0.25, 4)
    assert {"run.seed=1", "rollout.selection=pass_rate"} < {*asked[0]}


@pytest.mark.anyio
async def test_the_problems_of_an_epoch_are_all_different_and_none_is_held_out() -> None:
    options = FewSumsOptions(operators="+-*", problems=64)
    env = FewSums(options)
    shown = [(await env.reset(seed))[0] for seed in range(192)]
    names = [FewSums.problem_of(seed, options=options) for seed in range(192)]
    assert len({*shown[:64]}) == 64
    assert len({*zip(names, shown, strict=True)}) == 64
    assert not {*shown} & {(await env.reset(HELD_OUT + seed))[0] for seed in range(100)}
    assert shown[:64] != shown[64:128]


def test_the_workload_is_one_that_a_run_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(WORKLOAD, ["rollout.selection=pass_rate"]).rollout.drop_equal_rewards
