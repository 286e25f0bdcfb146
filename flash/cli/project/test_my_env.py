"""What should hold before anything is trained: `python -m pytest`."""

from __future__ import annotations

import asyncio

from flash import HELD_OUT

from my_env import Backwards
from my_reward import places, reward


async def play(seed: int, answer: str) -> tuple[str, float]:
    """One episode: what was shown, and the reward."""
    env = Backwards()
    shown, _ = await env.reset(seed)
    _, earned, ended, _, _ = await env.step(answer)
    await env.close()
    assert ended
    return shown, earned


def shown_to(seeds: range) -> set[str]:
    return {asyncio.run(play(seed, ""))[0] for seed in seeds}


def test_only_the_right_word_is_rewarded_and_right_places_are_counted() -> None:
    assert (reward("dcba", "dcba"), places("dcba", "dcba")) == (1.0, 1.0)
    assert (reward("dcbb", "dcba"), places("dcbb", "dcba")) == (0.0, 0.75)
    assert (reward("dcbaaaaa", "dcba"), places("dcbaaaaa", "dcba")) == (0.0, 0.5)
    assert (reward("", "dcba"), places("", "dcba")) == (0.0, 0.0)


def test_a_seed_shows_the_same_word_each_time() -> None:
    assert asyncio.run(play(1, "a")) == asyncio.run(play(1, "a"))


def test_no_held_out_word_is_trained_on() -> None:
    assert shown_to(range(200)).isdisjoint(shown_to(range(HELD_OUT, HELD_OUT + 200)))


def test_the_solved_examples_are_right() -> None:
    for example in Backwards().solved_examples(20, seed=0):
        assert reward(example.answer, example.prompt.removesuffix("=")[::-1]) == 1.0
