"""Environment of `async_vs_sync.toml`: sums whose prompts have a chosen length."""

from __future__ import annotations

import random

from envs.arithmetic import Arithmetic, ArithmeticOptions
from flash.environment import SolvedExample


class PaddedOptions(ArithmeticOptions, frozen=True, kw_only=True):
    """Options of `PaddedArithmetic`."""

    zeros: int = 0
    """Number of zeros in front of the first number of each problem, one token each."""


class PaddedArithmetic(Arithmetic):
    """Sums with zeros in front, such as `0000012+34=`.

    A longer prompt makes training heavier faster than generation: an engine reads the tokens of a prompt at once, in
    one forward pass, while the trainer also needs their backward pass. Groups are small in this workload, because the
    trainer computes the prompt of a group once for all its samples.
    """

    def __init__(self, options: PaddedOptions) -> None:
        super().__init__(options)
        self._zeros = "0" * options.zeros

    def _draw(self, rng: random.Random, held_out: bool) -> SolvedExample:
        """Draw a problem, and put the zeros in front of it."""
        problem = super()._draw(rng, held_out)
        return SolvedExample(self._zeros + problem.prompt, problem.answer)
