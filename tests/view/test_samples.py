"""Readable samples are found by what they are, and shown with what the trainer found at their tokens."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import TokenValues, read_samples, readable, samples_of, write_samples
from flash.types import Outcome, Span, Task, Trajectory, Turn, VersionRun
from flash.view.samples import Query, find, show_group
from tests.observe.sample_rows import STARTED
from tests.view.recorded import GROUP, PROMPT, append_step


def steps_of(directory: RunDirectory, **asked: object) -> list[int]:
    """Return the steps of the samples that a search finds."""
    return [one.step for one in find(directory, Query(**asked)).samples]


def test_the_newest_come_first_and_older_ones_when_asked_again(run: RunDirectory) -> None:
    found = find(run, Query(), most_found=6)
    assert [one.step for one in found.samples] == [29, 29, 28, 28, 27, 27]
    assert (found.newest, found.searched_to) == (29, 27)
    seen = list(found.samples)
    while found.searched_to is not None:
        found = find(run, Query(before=found.searched_to), most_found=6)
        seen += found.samples
    assert [one.step for one in seen] == [step for step in reversed(range(30)) for _ in range(2)]


def test_a_search_stops_where_much_was_read_and_goes_on_from_there(run: RunDirectory) -> None:
    found = find(run, Query(text="nowhere"), most_bytes=1)
    assert (found.samples, found.searched_to) == ([], 29)


def test_a_search_stops_after_many_small_steps_too(run: RunDirectory) -> None:
    found = find(run, Query(text="nowhere"), most_steps=4)
    assert (found.samples, found.searched_to) == ([], 26)


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"step": 4}, 2),
        ({"step": 4, "outcome": "ok"}, 1),
        ({"reward_min": 0.5}, 30),
        ({"reward_max": 0.5}, 30),
        ({"reward_min": 1.0, "reward_max": 1.0, "step": 2}, 1),
        ({"tokens_min": 4, "tokens_max": 4}, 60),
        ({"tokens_min": 5}, 0),
        ({"age_max": 0}, 2),
        ({"age_min": 1, "step": 0}, 0),
        ({"text": "THE SUM"}, 60),
        ({"text": "what is 12"}, 60),
        ({"text": "a note"}, 60),
        ({"text": "product"}, 0),
        ({"time_min": STARTED + 20.1, "time_max": STARTED + 20.2}, 2),
        ({"time_min": STARTED + 20.7, "time_max": STARTED + 21.9}, 0),
        ({"time_max": STARTED + 20.0}, 22),
    ],
)
def test_bounds_are_meant_with_their_ends(asked: dict[str, object], count: int, run: RunDirectory) -> None:
    assert len(steps_of(run, **asked)) == count


def test_tokens_have_the_version_and_the_log_prob_that_sampled_them(run: RunDirectory) -> None:
    group = show_group(run, 7, 7)
    assert group.rewards == [0.0, 1.0] * (GROUP // 2)
    (turn,) = group.samples[1].turns
    assert turn.observation == PROMPT
    assert turn.tokens == ["the ", "sum ", "is ", "46 "]
    assert turn.versions == [6, 7, 7, 7]
    assert turn.ages == [1, 0, 0, 0]
    assert (turn.logprobs[0], turn.logprobs[-1]) == (-0.01, -6.0)
    assert turn.log_ratios == [pytest.approx(math.log(1.5), abs=1e-4), 0.0, 0.0, 0.0]
    assert turn.advantages == [1.0, None, 1.0, 1.0]
    assert (turn.entropies[0], turn.entropies[-1]) == (0.05, 4.0)
    assert turn.uses == ["TRAINED", "TOO_OLD", "TRAINED", "CLIPPED"]


def test_a_group_is_shown_without_what_no_trainer_has_told(run: RunDirectory) -> None:
    sample = read_samples(run, 7)[0]
    write_samples(run, 7, [msgspec.structs.replace(sample, values=TokenValues(sample.values.sampled_logprobs))])
    (turn,) = show_group(run, 7, 7).samples[0].turns
    assert len(turn.logprobs) == len(turn.versions) == 4
    assert turn.log_ratios == turn.advantages == turn.entropies == turn.uses == []


def test_numbers_that_are_none_are_left_out(run: RunDirectory) -> None:
    sample = read_samples(run, 7)[0]
    odd = msgspec.structs.replace(sample.values, sampled_logprobs=[-math.inf] * 4, logprobs=[-math.inf, math.nan, 1, 2])
    write_samples(run, 7, [msgspec.structs.replace(sample, values=odd)])
    (turn,) = show_group(run, 7, 7).samples[0].turns
    assert turn.log_ratios == turn.logprobs == [None] * 4


def test_a_damaged_file_hides_no_other(run: RunDirectory) -> None:
    file = samples_of(run, 7)
    file.write_bytes(file.read_bytes()[:-20])
    assert show_group(run, 7, 7).samples == []
    assert len({one.step for one in find(run, Query()).samples}) == 29


def test_samples_of_one_environment_of_a_mixture_are_found(run: RunDirectory) -> None:
    sample = read_samples(run, 7)[0]
    write_samples(run, 7, [msgspec.structs.replace(sample, environment=name) for name in ("Math", "code", "")])
    found = find(run, Query(environment="mat"))
    assert [(one.step, one.environment) for one in found.samples] == [(7, "Math")]


def test_turns_of_branches_have_their_own_tokens(tmp_path: Path) -> None:
    """Turns are in the order of time, tokens branch by branch."""
    turns = [Turn("a", word, 0.0, 0.0, 0.0, 0.0, branch=branch) for word, branch in [("x", 0), ("y", 1), ("z", 0)]]
    trajectory = Trajectory(
        task=Task(0, 0, 0, 0),
        outcome=Outcome.OK,
        reward=0.0,
        token_ids=bytes(4 * 6),
        action_spans=[Span(1, 2), Span(3, 4), Span(5, 6)],
        logprobs=bytes(4 * 3),
        versions=[VersionRun(3, 1), VersionRun(4, 1), VersionRun(5, 1)],
        turns=turns,
        branches=(0, 4),
    )
    directory = RunDirectory.open(tmp_path / "branched", "")
    append_step(directory, 5)
    write_samples(directory, 5, [readable(trajectory, 5, list("axazay"))])
    (sample,) = show_group(directory, 5, 0).samples
    assert [(turn.tokens, turn.versions) for turn in sample.turns] == [(["x"], [3]), (["y"], [5]), (["z"], [4])]


def test_a_sample_whose_parts_do_not_fit_is_left_out_of_its_group(run: RunDirectory) -> None:
    first, second = read_samples(run, 3)
    damaged = msgspec.structs.replace(first, action_spans=[])
    too_many = msgspec.structs.replace(first, versions=[VersionRun(0, 1 << 60)])
    write_samples(run, 3, [damaged, too_many, second])
    assert [one.sample_index for one in show_group(run, 3, 3).samples] == [second.sample_index]
