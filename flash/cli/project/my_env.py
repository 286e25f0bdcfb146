"""Backwards: an environment that shows a word and rewards the word written backwards."""

from __future__ import annotations

import random
import zlib

from flash import Info, SolvedExample, StepResult, is_held_out

from my_reward import places, reward

LETTERS = "abcdefgh"
HELD_OUT_ONE_IN = 10
"""Share of held-out words: one in this many is used only for evaluation, and never for training."""


class Backwards:
    """Environment whose episodes have one word and one answer."""

    @classmethod
    def check(cls, length: int = 6) -> None:
        """Refuse words that are too short. Flash calls this before a run starts, with the options of `env.options`."""
        if length < 2:
            raise ValueError(f"length must be at least 2, since no word of one letter is held out, but is {length}")

    def __init__(self, length: int = 6) -> None:
        """Store the option `length`, the number of letters of a word. `env.options` in run.toml sets it."""
        self._length = length
        self._word = ""

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Show the word of a seed. The same seed always shows the same word."""
        self._word = draw(random.Random(seed), self._length, is_held_out(seed))
        return f"{self._word}=", {}

    async def step(self, action: str) -> StepResult:
        """Return the reward of the model's answer and end the episode. The metrics are logged as `env/NAME`."""
        answer, right = action.strip(), self._word[::-1]
        return "", reward(answer, right), True, False, {"metrics": {"places": places(answer, right)}}

    async def close(self) -> None:
        """Do nothing: no resources are held."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return solved examples, on which the tiny model of run.toml is trained before the run. Other models do not
        need them."""
        rng = random.Random(seed)
        words = [draw(rng, self._length, held_out=False) for _ in range(count)]
        return [SolvedExample(f"{word}=", word[::-1]) for word in words]

    def alphabet(self) -> str:
        """Return the characters that the tiny model must know."""
        return LETTERS + "="


def draw(rng: random.Random, length: int, held_out: bool) -> str:
    """Return a random word of `length` letters, at least 2: a held-out one or one for training."""
    while True:
        word = "".join(rng.choices(LETTERS, k=length))
        if (zlib.crc32(word.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            return word
