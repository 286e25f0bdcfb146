"""Tests of the words and their rewards. Replace them with tests of your own environment."""

from __future__ import annotations

import flash

from my_env import Backwards
from my_reward import places, reward

CONFIG = flash.load("run.toml")


def test_only_the_right_word_is_rewarded_and_right_places_are_counted() -> None:
    assert (reward("dcba", "dcba"), places("dcba", "dcba")) == (1.0, 1.0)
    assert (reward("dcbb", "dcba"), places("dcbb", "dcba")) == (0.0, 0.75)
    assert (reward("dcbaaaaa", "dcba"), places("dcbaaaaa", "dcba")) == (0.0, 0.5)
    assert (reward("", "dcba"), places("", "dcba")) == (0.0, 0.0)


def test_the_word_that_is_shown_is_to_be_answered_backwards() -> None:
    word = flash.play(CONFIG, [""], seed=5).shown[0].removesuffix("=")
    played = flash.play(CONFIG, [word[::-1]], seed=5)
    assert played.reward == 1.0
    assert played.metrics == {"places": 1.0}


def test_the_solved_examples_are_right() -> None:
    for example in Backwards().solved_examples(20, seed=0):
        assert reward(example.answer, example.prompt.removesuffix("=")[::-1]) == 1.0
