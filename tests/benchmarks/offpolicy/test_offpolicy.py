from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.episodes import held_out_seeds, make_shard, make_trajectory, prompts, rewards
from benchmarks.form import Args
from benchmarks.offpolicy import run as offpolicy
from benchmarks.offpolicy.harness import (
    Cell,
    Method,
    Point,
    Result,
    Rollouts,
    Sampler,
    Setting,
    append_result,
    read_results,
)
from benchmarks.offpolicy.run import (
    METHODS,
    SETTING,
    accuracy_table,
    add_options,
    grid,
    in_processes,
    measure,
    rows,
)
from benchmarks.plots import lines
from flash.config.tree import TinyModelConfig
from flash.trainer.model.tiny_model import make_tiny_model
from flash.types import Task

ROOT = Path(__file__).parents[3]

GRPO, DECOUPLED = (next(method for method in METHODS if method.key == key) for key in ("grpo", "decoupled_ppo"))


def a_result(*accuracies: float, method: Method = GRPO, alpha: int = 0, seed: int = 0) -> Result:
    curve = [Point(10 * at, 1000 * at, accuracy) for at, accuracy in enumerate(accuracies)]
    cell = Cell(method=method, alpha=alpha, seed=seed)
    return Result(cell=cell, curve=curve)


# -- the age of the data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "span", "long"),
    [(1, 4, [4, 3, 2, 1, 0, 0]), (2, 8, [8, 6, 4, 2, 0, 0]), (4, 16, [16, 12, 8, 4, 0, 0]), (1, 2, [2, 2, 1, 1, 0, 0])],
)
def test_a_third_of_a_batch_are_long_answers_whose_tokens_span_so_many_versions(
    alpha: int, span: int, long: list[int]
) -> None:
    ages = Cell(method=GRPO, alpha=alpha, mixed=True, span=span, seed=0).ages
    assert [one for one in ages if one == tuple(long)] == [tuple(long)] * (alpha + 1)
    assert sorted(one for one in ages if one != tuple(long)) == [(age,) * 6 for age in range(alpha + 1) for _ in "ab"]


@pytest.mark.parametrize(("alpha", "age", "limit"), [(2, 0, 2), (2, 8, 8), (0, 0, 0)])
def test_tokens_older_than_the_data_are_trained_only_if_the_method_says_so(alpha: int, age: int, limit: int) -> None:
    cell = Cell(method=GRPO.within(0, age), alpha=alpha, mixed=True, span=8, seed=0)
    assert cell.config().train.max_age == limit


def test_a_shard_holds_the_whole_batch_with_its_version_and_the_age_limit() -> None:
    batch = [
        make_trajectory(
            Task(index, index // 2, index % 2, 0), [1, 2, 3], [4, 5], [-0.5, -1.5], reward=float(index), versions=[5, 5]
        )
        for index in range(4)
    ]
    shard = make_shard(batch, step=9, oldest=4)
    assert (shard.step, shard.min_version) == (9, 5)
    assert (shard.total_tokens, shard.total_sequences) == (8, 4)
    assert [(entry.group_id, entry.reward, entry.oldest_version) for entry in shard.batch] == [
        (0, 0.0, 5),
        (0, 1.0, 5),
        (1, 2.0, 5),
        (1, 3.0, 5),
    ]
    trajectory = shard.samples[0].trajectory
    assert trajectory.tokens().tolist() == [1, 2, 3, 4, 5]
    assert trajectory.action_mask().tolist() == [False, False, False, True, True]
    assert trajectory.behaviour().tolist() == [-0.5, -1.5]
    assert trajectory.action_versions().tolist() == [5, 5]


def test_the_first_steps_admit_no_version_below_zero() -> None:
    trajectory = make_trajectory(Task(0, 0, 0, 0), [1], [2], [-1.0], reward=0.0, versions=[0])
    assert make_shard([trajectory], step=2, oldest=8).min_version == 0


# -- sampling --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, and a tokenizer of the arithmetic's characters."""
    path = tmp_path_factory.mktemp("models") / "model"
    config = TinyModelConfig(layers=2, width=64, warm_start_steps=0)
    make_tiny_model(path, config, "envs.arithmetic:Arithmetic", {}, lambda done, total, loss: None)
    return str(path)


def test_the_recorded_log_probs_are_those_of_a_plain_forward_pass(model: str) -> None:
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(3)
    answers = Sampler(model).sample(["12+34=", "98+76="], copies=3, ages=[0] * 6, generator=generator)
    assert len(answers) == 6
    assert [answers[index].prompt for index in (0, 3)] == [answers[index].prompt for index in (2, 5)]
    assert answers[0].prompt != answers[3].prompt
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    for answer in answers:
        logits = plain(torch.tensor([[*answer.prompt, *answer.tokens]])).logits[0].double().log_softmax(-1)
        places = range(len(answer.prompt) - 1, len(answer.prompt) + len(answer.tokens) - 1)
        expected = [logits[place, token].item() for place, token in zip(places, answer.tokens, strict=True)]
        assert answer.logp == pytest.approx(expected, abs=1e-5)


def test_an_answer_ends_with_its_first_end_of_text_or_at_the_limit(model: str) -> None:
    sampler = Sampler(model)
    generator = torch.Generator().manual_seed(0)
    answers = sampler.sample(["12+34="], copies=200, ages=[0] * 4, generator=generator)
    end = sampler.tokenizer.eos_token_id
    assert isinstance(end, int)
    ended = [answer for answer in answers if not answer.truncated]
    assert 0 < len(ended) < len(answers)
    assert all(answer.tokens.index(end) == len(answer.tokens) - 1 for answer in ended)
    assert all(end not in answer.tokens and len(answer.tokens) == 4 for answer in answers if answer.truncated)
    assert all("<eos>" not in answer.text for answer in answers)


def test_each_token_is_sampled_by_the_version_of_its_age(model: str) -> None:
    from transformers import AutoModelForCausalLM

    sampler = Sampler(model, oldest=2)
    plain = [AutoModelForCausalLM.from_pretrained(model).eval() for _ in range(3)]
    for version, policy in enumerate(plain[1:], 1):
        for parameter in policy.parameters():
            parameter.data += 0.01 * version * torch.randn_like(parameter)
        sampler.add_version(policy.named_parameters())
    for answer in sampler.sample(["12+34="], copies=5, ages=[5, 2, 1, 1, 0], generator=torch.Generator()):
        ids = torch.tensor([[*answer.prompt, *answer.tokens]])
        expected = [
            plain[version](ids).logits[0].double().log_softmax(-1)[len(answer.prompt) - 1 + place, token].item()
            for place, (version, token) in enumerate(zip([0, 0, 1, 1, 2], answer.tokens, strict=False))
        ]
        assert answer.logp == pytest.approx(expected, abs=1e-5)


def test_a_missing_weight_of_a_new_version_is_noticed(model: str) -> None:
    sampler = Sampler(model)
    with pytest.raises(AssertionError, match="no new weights"):
        sampler.add_version(list(sampler.model.named_parameters())[1:])


@pytest.mark.parametrize(
    ("kind", "ages"),
    [
        ({}, [[2, 2, 2, 2]] * 9),
        ({"mixed": True}, [[age] * 4 for age in (0, 1, 2)] * 3),
        ({"mixed": True, "span": 4}, [[age] * 4 for age in (0, 1, 2)] * 2 + [[4, 3, 2, 1]] * 3),
    ],
)
def test_a_batch_has_its_problems_in_order_and_its_ages_as_soon_as_there_are_versions_so_old(
    model: str, kind: dict[str, Any], ages: list[list[int]]
) -> None:
    setting = Setting(batch_size=36, group_size=4, problems=2)
    cell = Cell(method=GRPO, alpha=2, seed=0, setting=setting, **kind)
    sampler = Sampler(model, max(map(max, cell.ages)))
    rollouts = Rollouts(cell, sampler)
    for step in range(6):
        batch = rollouts.batch(step)
        assert [(one.task.task_id, one.task.seed) for one in batch] == [(n, 9 * step + n // 4) for n in range(36)]
        for number, one in enumerate(batch):
            found = [step - version for version in one.action_versions()[:4]]
            assert found == [min(step, age) for age in ages[number // 4]][: len(found)]
        sampler.add_version(sampler.model.named_parameters())


def test_each_answer_is_judged_by_its_own_problem() -> None:
    config = Cell(method=GRPO, alpha=0, seed=0).config()
    seeds = held_out_seeds(config)[:2]
    sums = [sum(int(part) for part in str(prompt).rstrip("=").split("+")) for prompt in prompts(config, seeds)]
    assert sums[0] != sums[1]
    answers = [str(text) for text in (sums[0], sums[1], sums[1], sums[0])]
    assert rewards(config, [seeds[0], seeds[0], seeds[1], seeds[1]], answers) == [1.0, 0.0, 1.0, 0.0]


# -- what is kept ----------------------------------------------------------------------------------------------------


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(argv)


class FakeCells:
    """Ends all cells at once, but those of one age fail."""

    def __init__(self, fails: int | None = None) -> None:
        self.ran: list[Cell] = []
        self.fails = fails

    def __call__(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Result | str]]:
        for cell in cells:
            self.ran.append(cell)
            result = msgspec.structs.replace(a_result(0.2, 0.6), cell=cell)
            yield cell, "out of luck" if cell.alpha == self.fails else result


def test_a_grid_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "cells.jsonl"
    args = Args(quick=True, own=parsed(["--cells", str(file), "--seeds", "2"]))
    first, second, third = FakeCells(fails=8), FakeCells(), FakeCells()
    measured = measure(args, first)
    assert {row.case for row in measured} == {"grpo, α = 0", "decoupled_ppo, α = 0"}
    out = capsys.readouterr().out
    assert "grpo, α = 8, seed 0 failed: out of luck" in out
    assert "4 of 8 cells have no result" in out
    measure(args, second)
    assert (len(first.ran), [cell.alpha for cell in second.ran]) == (8, [8] * 4)
    measure(args, third)
    assert third.ran == []
    assert sorted(result.cell.alpha for result in read_results(file)) == [0] * 4 + [8] * 4


@pytest.mark.parametrize(
    "other",
    [
        Cell(method=GRPO, alpha=1, seed=0),
        Cell(method=GRPO, alpha=0, seed=1),
        Cell(method=DECOUPLED, alpha=0, seed=0),
        Cell(method=GRPO, alpha=0, seed=0, setting=Setting(learning_rate=1e-5)),
        Cell(method=msgspec.structs.replace(GRPO, options={"clip_high": 0.28}), alpha=0, seed=0),
    ],
)
def test_a_cell_that_differs_in_anything_has_no_result_yet(tmp_path: Path, other: Cell) -> None:
    append_result(tmp_path / "cells.jsonl", a_result(0.2, 0.6))
    assert all(result.cell != other for result in read_results(tmp_path / "cells.jsonl"))


def test_results_survive_as_lines(tmp_path: Path) -> None:
    results = [a_result(0.2, 0.6), a_result(0.2, 0.5, alpha=8)]
    for result in results:
        append_result(tmp_path / "cells.jsonl", result)
    assert read_results(tmp_path / "cells.jsonl") == results


# -- processes -------------------------------------------------------------------------------------------------------


def test_cells_that_run_end_with_the_grid() -> None:
    running = in_processes(time.sleep, [0.0, 300.0, 300.0], 2, 60.0)
    next(running)
    assert multiprocessing.active_children()
    running.close()
    assert multiprocessing.active_children() == []


def test_cells_that_take_too_long_are_killed() -> None:
    with pytest.raises(multiprocessing.TimeoutError):
        next(in_processes(time.sleep, [300.0], 1, 0.5))
    assert multiprocessing.active_children() == []


def test_the_grid_is_all_methods_ages_and_seeds_one_seed_after_the_other() -> None:
    cells = grid(SETTING, [method.key for method in METHODS], offpolicy.ALPHAS, offpolicy.SEEDS)
    assert len(cells) == 162
    assert all(cells.count(cell) == 1 for cell in cells)
    assert {cell.seed for cell in cells[:54]} == {0}


def test_each_method_is_also_held_to_the_budgets() -> None:
    cells = grid(SETTING, ["grpo"], [0, 8], 1, [0, 0.04, 0.1], mixed=True)
    assert [(cell.method.key, cell.alpha) for cell in cells[:4]] == [
        ("grpo", 0), ("grpo_lag_0.04", 0), ("grpo_lag_0.1", 0), ("grpo", 8)
    ]  # fmt: skip
    assert cells[0].config().algorithm.lag is None
    held = cells[1].config().algorithm.lag
    assert held is not None
    assert held.budget == 0.04
    together = [*cells, *grid(SETTING, ["grpo"], [0, 8], 1)]
    assert all(together.count(cell) == 1 for cell in together)


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["--methods", "topr", "grop"])
    assert "grop" in capsys.readouterr().err


# -- judging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "collapsed"),
    [
        ([0.2, 0.5, 0.6, 0.6, 0.6], False),
        ([0.2, 0.9, 0.5, 0.5, 0.5], False),
        ([0.2, 0.9, 0.44, 0.44, 0.44], True),
        ([0.3, 0.4, 0.29, 0.29, 0.29], True),
        ([0.3, 0.3, 0.3, 0.3, 0.3], False),
    ],
)
def test_a_run_below_its_start_or_half_of_its_best_has_collapsed(accuracies: list[float], collapsed: bool) -> None:
    assert a_result(*accuracies).collapsed is collapsed


def test_the_final_accuracy_is_the_mean_of_the_last_three_evaluations() -> None:
    assert a_result(0.1, 0.2, 0.6, 0.7, 0.8).final == pytest.approx(0.7)


def figures(results: list[Result]) -> list[float]:
    """Mean, lower and upper end of its interval, and number of seeds."""
    return [row.ours for row in rows(results)[:4]]


def test_seeds_give_a_mean_with_students_interval() -> None:
    finals = [0.80, 0.82, 0.87]
    mean, low, high, seeds = figures([a_result(0.2, *[final] * 3, seed=seed) for seed, final in enumerate(finals)])
    assert (seeds, mean) == (3, pytest.approx(0.83))
    # s = 0.036056, t(0.975; 2) = 4.303, √3 = 1.73205
    assert high - mean == pytest.approx(4.303 * 0.036056 / 1.73205, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    assert figures([a_result(0.2, 0.5, 0.5, 0.5)]) == [0.5, 0.5, 0.5, 1]


def test_an_interval_ends_where_accuracies_do() -> None:
    found = figures([a_result(0.2, final, final, final, seed=round(final)) for final in (0.02, 0.98)])
    assert found[1:3] == [0.0, 1.0]


def finals(method: Method, alpha: int, *values: float) -> list[Result]:
    return [a_result(0.2, *[value] * 3, method=method, alpha=alpha, seed=seed) for seed, value in enumerate(values)]


def test_methods_are_counted_that_are_as_good_as_synchronous_grpo() -> None:
    results = [
        *finals(GRPO, 0, 0.80, 0.81, 0.82),
        *finals(DECOUPLED, 0, 0.90, 0.90, 0.90),
        *finals(GRPO, 8, 0.40, 0.41, 0.42),
        *finals(DECOUPLED, 8, 0.80, 0.80, 0.80),
    ]
    found = {(row.case, row.metric): row for row in rows(results)}
    count = found["as good as synchronous grpo, α = 8", "methods"]
    assert (count.ours, count.at_least, count.unit, count.met) == (1, 1, "of 2", True)


def test_the_tables_have_a_line_per_method_and_a_column_per_alpha() -> None:
    results = [*finals(GRPO, 0, 0.8, 0.8), *finals(GRPO, 8, 0.1, 0.1), *finals(DECOUPLED, 8, 0.7, 0.7)]
    lines = accuracy_table(rows(results)).splitlines()
    assert lines[0] == "| final held-out accuracy | α = 0 | α = 8 |"
    assert lines[2] == "| grpo | 0.800 ± 0.000 | 0.100 ± 0.000, 2 of 2 collapsed |"
    assert lines[3] == "| decoupled_ppo |  | 0.700 ± 0.000 |"


def test_the_table_of_the_documentation_is_that_of_the_kept_results() -> None:
    text = (ROOT / "docs" / "figures.md").read_text()
    assert accuracy_table(rows(read_results(ROOT / "benchmarks" / "results" / "offpolicy_cells.jsonl"))) in text


def test_the_plot_has_a_line_per_method_over_the_ages(tmp_path: Path) -> None:
    results = [*finals(GRPO, 0, 0.8, 0.7), *finals(GRPO, 8, 0.5), *finals(DECOUPLED, 8, 0.7)]
    lines("Accuracy", "α", "accuracy", "final_accuracy", r", α = (\d+)")(rows(results), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "<!-- grpo -->" in drawn
    assert "<!-- decoupled_ppo -->" in drawn
