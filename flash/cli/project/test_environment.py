"""Tests that hold for every environment. They use the one that run.toml names and need no change if you replace it."""

from __future__ import annotations

import flash

CONFIG = flash.load("run.toml")
ANSWERS = ["an answer"] * CONFIG.rollout.max_turns
"""Answers of a model, one for each turn of an episode. Their text does not matter."""


def test_an_episode_can_be_played_whatever_is_answered() -> None:
    # `flash.play` raises an error if the environment breaks its interface.
    for answers in (ANSWERS, [""] * len(ANSWERS), ["ä\n?" * 9] * len(ANSWERS)):
        for seed in range(20):
            assert flash.play(CONFIG, answers, seed).shown[0]


def test_a_seed_shows_the_same_problem_and_gives_the_same_rewards_each_time() -> None:
    for seed in (1, flash.HELD_OUT + 1):
        assert flash.play(CONFIG, ANSWERS, seed) == flash.play(CONFIG, ANSWERS, seed)


def test_no_held_out_problem_is_trained_on() -> None:
    trained, held_out = (
        {flash.play(CONFIG, ANSWERS, first + number).shown[0] for number in range(100)} for first in (0, flash.HELD_OUT)
    )
    assert trained.isdisjoint(held_out)
