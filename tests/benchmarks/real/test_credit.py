from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.form import Args
from benchmarks.offpolicy.cells import Cell, Folder, Method, Point, Result, read_lines
from benchmarks.offpolicy.summary import summarise
from benchmarks.real.credit import (
    AGAINST,
    ALPHAS,
    METHODS,
    SEEDS,
    SETTING,
    Comparison,
    compared,
    difference_table,
    differences,
    grid,
    grid_rows,
    own_options,
)
from flash.config.check import check
from flash.environment import HELD_OUT

BY_KEY = {method.key: method for method in METHODS}


def a_result(key: str, final: float, *, seed: int = 0, alpha: int = 0) -> Result:
    cell = Cell(method=BY_KEY[key], alpha=alpha, seed=seed, setting=SETTING)
    curve = [Point(10 * at, 1000 * at, accuracy, 0.0, 0.0, 0.0, 0.0) for at, accuracy in enumerate([0.2, *[final] * 3])]
    return Result(cell=cell, curve=curve, skipped_updates=0, cpu_s=1.0)


def test_the_grid_is_every_method_at_every_age_seed_by_seed() -> None:
    cells = grid(SETTING, list(BY_KEY), ALPHAS, SEEDS)
    assert len(cells) == len({cell.name for cell in cells}) == 90
    assert {cell.seed for cell in cells[:18]} == {0}


def test_every_method_is_compared_with_one_that_there_is() -> None:
    assert set(AGAINST) == set(BY_KEY) - {"grpo"}
    assert {other for others in AGAINST.values() for other in others} <= set(BY_KEY)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.key)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_every_cell_is_a_configuration_that_a_run_would_take(method: Method, alpha: int) -> None:
    cell = Cell(method=method, alpha=alpha, seed=0, setting=SETTING)
    assert check(cell.config()) == []


def test_the_methods_differ_in_what_they_are_to_show() -> None:
    configs = {key: Cell(method=one, alpha=0, seed=0, setting=SETTING).config() for key, one in BY_KEY.items()}
    for key in ("random", "entropy", "local", "global", "coupled"):
        assert configs[key].algorithm.objective == "grpo"
        assert (configs[key].algorithm.rhythm is None) == (BY_KEY[key].marks is not None)
    for key in ("asyppo", "asyppo_unmasked"):
        assert configs[key].critic.tiny_layers == SETTING.layers // 2  # type: ignore[union-attr]
    assert configs["asyppo_unmasked"].algorithm.options == {"mask_lowest": 0.0}


def test_all_prompts_have_equally_many_tokens_and_the_known_solutions_fit() -> None:
    from benchmarks.offpolicy.harness import Problems
    from envs.countdown import Countdown, CountdownOptions

    problems = Problems(range(HELD_OUT, HELD_OUT + 50), SETTING.env)
    assert {len(prompt) for prompt in problems.prompts} == {len("1 2 3 45:")}
    examples = Countdown(CountdownOptions(**SETTING.countdown or {})).solved_examples(200, 0)
    assert max(len(one.answer) for one in examples) < SETTING.max_new_tokens


def test_differences_are_paired_by_seed_at_the_same_age() -> None:
    results = [
        a_result("grpo", 0.5, seed=0), a_result("grpo", 0.9, seed=1), a_result("grpo", 0.1, seed=0, alpha=2),
        a_result("local", 0.6, seed=0), a_result("local", 0.8, seed=1), a_result("local", 0.7, seed=2),
    ]  # fmt: skip
    assert differences(results, "local", "grpo", 0) == pytest.approx([0.1, -0.1])
    assert differences(results, "local", "grpo", 2) == []
    assert [one[:3] for one in compared(results)] == [("local", "grpo", 0)]


def test_a_table_and_rows_say_the_mean_difference_and_its_interval() -> None:
    results = [
        one
        for seed, gain in enumerate((0.1, 0.2, 0.3))
        for one in (a_result("grpo", 0.4, seed=seed), a_result("random", 0.4 + gain, seed=seed))
    ]
    assert "| random − grpo | 0 | +20.0 ± 24.8 | 3 |" in difference_table(results)
    found = {(row.case, row.metric): row.ours for row in grid_rows(summarise(results), results)}
    assert found["random less grpo, α = 0", "difference"] == pytest.approx(0.2)
    assert found["random less grpo, α = 0", "difference_low"] == pytest.approx(0.2 - 0.2484, abs=1e-4)
    assert found["grpo, α = 0", "start_accuracy"] == pytest.approx(0.2)
    assert found["grpo, α = 0", "seeds"] == 3


def test_a_grid_is_run_piece_by_piece_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    async def run_cell(cell: Cell, folder: Path, core: int | None) -> str:
        ran.append(f"{cell.method.key} {cell.alpha}")
        if cell.alpha:
            return "out of luck"
        Folder(folder).save(msgspec.structs.replace(a_result(cell.method.key, 0.5), cell=cell))
        return ""

    kept = tmp_path / "kept.jsonl"
    own, rest = own_options(
        ["--cells", str(tmp_path / "cells"), "--workers", "1", "--keep", str(kept), "--no-cost", "--json", "rows"]
    )
    assert rest == ["--json", "rows"]
    for expected in (["grpo 0", "random 0", "grpo 2", "random 2"], ["grpo 2", "random 2"]):
        ran.clear()
        rows = Comparison(own, run_cell, lambda cell: None).measure(Args(quick=True))
        assert ran == expected
    assert len(read_lines(kept)) == 2
    assert {row.case for row in rows} == {"grpo, α = 0", "random, α = 0", "random less grpo, α = 0"}
    assert "2 of 4 cells are missing" in capsys.readouterr().out


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        own_options(["--methods", "locale"])
    assert "locale" in capsys.readouterr().err


# -- marks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    from flash.foreign.torch import private_store

    if dist.is_initialized():  # by other tests of this process, which have one for all of them
        yield
        return
    dist.init_process_group("gloo", store=private_store(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("by", ["random", "entropy"])
def test_marks_multiply_two_fifths_of_each_answer(by: str, tmp_path: Path, process_group: None) -> None:
    from benchmarks.offpolicy.marks import Marks
    from benchmarks.real.objective_cost import make_tiny_model, random_shard, step_config
    from flash.trainer.model.logprobs import policy_logprobs
    from flash.trainer.packing import pack
    from flash.trainer.step import Trainer

    make_tiny_model(str(tmp_path), layers=1)
    trainer = Trainer(step_config("grpo", str(tmp_path), 2))
    marks = Marks(by, trainer.model, seed=0)  # type: ignore[arg-type]
    shard = random_shard(0, groups=1)
    (micro,) = pack(shard.samples, min_version=0, max_tokens=1000)
    watch = marks.watch(micro)
    entropy_T = policy_logprobs(trainer.model, micro, watch=watch).entropy_T.double().numpy()
    gamma_T = marks.multiply(np.ones(len(micro.target_T)), marks.collect(watch), micro)
    for sequence in range(micro.sequences):
        mine = micro.sequence_T == sequence
        gammas, entropies = gamma_T[mine], entropy_T[mine]
        assert sorted(set(gammas)) == [1.0, 1.5]
        assert (gammas > 1).sum() == -(-2 * len(gammas) // 5)
        if by == "entropy":
            assert entropies[gammas > 1].min() >= entropies[gammas == 1].max()

    trainer.rhythm = marks
    assert trainer.train_step(shard)["rhythm_share"] == pytest.approx(0.4, abs=0.03)
