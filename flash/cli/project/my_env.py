"""The environment: a word is shown, and is to be answered backwards."""

from __future__ import annotations

import random
import zlib

from flash import Info, SolvedExample, StepResult, is_held_out

from my_reward import places, reward

LETTERS = "abcdefgh"
HELD_OUT_ONE_IN = 10
"""One word in so many is never trained on: evaluations ask for these."""


class Backwards:
    """One episode: one word, one answer."""

    def __init__(self, length: int = 6) -> None:
        """`env.options` in run.toml sets the arguments; they are checked before a run starts."""
        self._length = length
        self._word = ""

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Show the word of this seed: the same seed, the same word."""
        self._word = draw(random.Random(seed), self._length, is_held_out(seed))
        return f"{self._word}=", {}

    async def step(self, action: str) -> StepResult:
        """Reward what the model answered; one answer ends the episode. Metrics are logged as `env/NAME`."""
        answer, right = action.strip(), self._word[::-1]
        return "", reward(answer, right), True, False, {"metrics": {"places": places(answer, right)}}

    async def close(self) -> None:
        """Nothing is held open."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """What the tiny model of run.toml learns from before the run; another model needs none."""
        rng = random.Random(seed)
        words = [draw(rng, self._length, held_out=False) for _ in range(count)]
        return [SolvedExample(f"{word}=", word[::-1]) for word in words]

    def alphabet(self) -> str:
        """The tiny model's characters."""
        return LETTERS + "="


def draw(rng: random.Random, length: int, held_out: bool) -> str:
    """A word for training, or one of those that are held out."""
    while True:
        word = "".join(rng.choices(LETTERS, k=length))
        if (zlib.crc32(word.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            return word
