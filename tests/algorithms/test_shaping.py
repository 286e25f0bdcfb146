"""Reward shapings: the overlong penalty of DAPO and the length reward of Kimi k1.5."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from algorithms.shaping import LengthPenalty, Overlong, Shaping


def shaped(
    shaping: Shaping, rewards: list[float], tokens: list[int], groups: list[int], truncated: list[bool] | None = None
) -> list[float]:
    """Return the shaped rewards of samples. `tokens` has their lengths; None for `truncated`: no sample is."""
    cut = np.array(truncated or [False] * len(rewards), dtype=np.bool_)
    return shaping.shaped(np.array(rewards), np.array(tokens, dtype=np.int64), cut, groups).tolist()


def test_the_overlong_penalty_equals_the_formula_of_dapo() -> None:
    """Check equation 13 of the paper with L_max = 20480 and L_cache = 4096."""
    lengths = [1, 16384, 16385, 18432, 20479, 20480, 30000]

    def formula(length: int) -> float:
        if length <= 20480 - 4096:
            return 0.0
        return ((20480 - 4096) - length) / 4096 if length <= 20480 else -1.0

    found = shaped(Overlong(limit=20480, buffer=4096), [1.0] * 7, lengths, [0] * 7)
    assert found == [1.0 + formula(length) for length in lengths]
    doubled = shaped(Overlong(limit=20480, buffer=4096, penalty=2.0), [0.0] * 7, lengths, [0] * 7)
    assert doubled == [2 * formula(length) for length in lengths]


def test_the_length_reward_equals_the_formula_of_kimi() -> None:
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0]
    found = shaped(LengthPenalty(), rewards, [10, 10, 30, 50, 40], [7] * 5)
    # λ = 0.5, 0.5, 0, -0.5, -0.25; a wrong answer gets min(0, λ).
    assert found == [1.5, 0.0, 1.0, -0.5, 0.75]
    assert shaped(LengthPenalty(coefficient=0.1), rewards, [10, 10, 30, 50, 40], [7] * 5) == pytest.approx(
        [1.05, 0.0, 1.0, -0.05, 0.975]
    )


def test_lengths_are_compared_within_ragged_groups_in_any_order() -> None:
    groups, tokens = [3, 1, 3, 9, 1, 3], [10, 5, 20, 7, 9, 30]
    together = shaped(LengthPenalty(), [1.0] * 6, tokens, groups)
    for group in set(groups):
        own = [place for place, one in enumerate(groups) if one == group]
        alone = shaped(LengthPenalty(), [1.0] * len(own), [tokens[place] for place in own], [0] * len(own))
        assert alone == [together[place] for place in own]


def test_equal_lengths_and_single_members_change_nothing() -> None:
    assert shaped(LengthPenalty(), [1.0, 0.0, 1.0], [5, 5, 8], [0, 0, 1]) == [1.0, 0.0, 1.0]


def test_truncated_samples_do_not_count_as_correct() -> None:
    found = shaped(LengthPenalty(), [1.0, 1.0], [10, 20], [0, 0], [True, True])
    assert found == [1.0, 0.5]


def test_samples_above_the_configured_reward_count_as_correct() -> None:
    assert shaped(LengthPenalty(correct_above=0.5), [0.4, 0.6], [10, 20], [0, 0]) == pytest.approx([0.4, 0.1])
    assert shaped(LengthPenalty(correct_above=0.3), [0.4, 0.6], [10, 20], [0, 0]) == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("shaping", [Overlong(limit=4, buffer=2), LengthPenalty()], ids=repr)
def test_no_samples_have_no_rewards(shaping: Shaping) -> None:
    assert shaped(shaping, [], [], []) == []


@pytest.mark.parametrize("shaping", [Overlong(limit=4, buffer=2), LengthPenalty()], ids=repr)
def test_the_given_rewards_are_not_changed_in_place(shaping: Shaping) -> None:
    rewards = np.array([1.0, 1.0])
    shaping.shaped(rewards, np.array([1, 9]), np.array([False, False]), [0, 0])
    assert rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "plain",
    [
        {"kind": "overlong", "limit": 10},
        {"kind": "overlong", "limit": 10, "buffer": 0},
        {"kind": "overlong", "limit": 10, "buffer": 11},
        {"kind": "overlong", "limit": 10, "buffer": 5, "penalty": 0.0},
        {"kind": "length", "coefficient": 0.0},
        {"kind": "length", "limit": 10},
        {"kind": "other"},
    ],
)
def test_options_out_of_range_or_unknown_are_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, Shaping)


def test_the_kind_chooses_the_shaping() -> None:
    assert msgspec.convert({"kind": "length"}, Shaping) == LengthPenalty()
    plain = {"kind": "overlong", "limit": 10, "buffer": 5}
    assert msgspec.convert(plain, Shaping) == Overlong(limit=10, buffer=5)
