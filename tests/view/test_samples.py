"""Readable samples are found by what they are, and shown with what the recorded batch knows of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flash.observe.rundir import RunDirectory, readable
from flash.types import Outcome, Span, Task, Trajectory, Turn, VersionRun
from flash.view import samples
from flash.view.samples import Query, find, show_group
from tests.view.recorded import GROUP, PROMPT, append_step


def steps_of(directory: RunDirectory, **asked: object) -> list[int]:
    return [one.step for one in find(directory, Query(**asked)).samples]


def test_the_newest_come_first_and_older_ones_when_asked_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MOST_FOUND", 6)
    found = find(run, Query())
    assert [one.step for one in found.samples] == [29, 29, 28, 28, 27, 27]
    assert (found.newest, found.searched_to) == (29, 27)
    seen = list(found.samples)
    while found.searched_to is not None:
        found = find(run, Query(before=found.searched_to))
        seen += found.samples
    assert [one.step for one in seen] == [step for step in reversed(range(30)) for _ in range(2)]


def test_a_search_stops_where_much_was_read_and_goes_on_from_there(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MOST_BYTES", 1)
    found = find(run, Query(text="nowhere"))
    assert (found.samples, found.searched_to) == ([], 29)


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
    assert turn.logprobs is not None
    assert turn.logprobs[0] == -0.01
    assert turn.logprobs[-1] == -6.0


def test_without_the_batch_or_behind_its_damage_the_rest_is_shown(run: RunDirectory) -> None:
    file = run.batches / "step-000007.bin"
    file.write_bytes(file.read_bytes()[:-20])
    assert len(show_group(run, 7, 7).rewards or []) == GROUP - 1
    file.unlink()
    group = show_group(run, 7, 7)
    assert group.rewards is None
    assert [sample.turns[0].logprobs for sample in group.samples] == [None, None]
    assert group.samples[0].turns[0].versions == [6, 7, 7, 7]


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
    directory.write_trajectories(5, [readable(trajectory, 5, list("axazay"))])
    (sample,) = show_group(directory, 5, 0).samples
    assert [(turn.tokens, turn.versions) for turn in sample.turns] == [(["x"], [3]), (["y"], [5]), (["z"], [4])]


def test_a_sample_whose_parts_do_not_fit_is_left_out_of_its_group(run: RunDirectory) -> None:
    first, second = run.read_trajectories(3)
    damaged = msgspec.structs.replace(first, action_spans=[])
    too_many = msgspec.structs.replace(first, versions=[VersionRun(0, 1 << 60)])
    run.write_trajectories(3, [damaged, too_many, second])
    assert [one.sample_index for one in show_group(run, 3, 3).samples] == [second.sample_index]
