"""Environment of `async_vs_sync.toml`: sums whose prompts have a chosen length."""

from __future__ import annotations

import random

from envs.arithmetic import Arithmetic, ArithmeticOptions
from flash.environment import SolvedExample


class PaddedOptions(ArithmeticOptions, frozen=True, kw_only=True):
    """Options of `PaddedArithmetic`."""

    padding: int = 0
    """Number of digits in front of each problem, one token each."""


class PaddedArithmetic(Arithmetic):
    """Sums with random digits in front, such as `80417=12+34=`. The digits mean nothing.

    A longer prompt makes training heavier faster than generation: an engine reads the tokens of a prompt at once, in
    one forward pass, while the trainer also needs their backward pass. Groups are small in this workload, because the
    trainer computes the prompt of a group once for all its samples. So the digits differ from problem to problem, too.
    """

    def __init__(self, options: PaddedOptions) -> None:
        super().__init__(options)
        self._padding = options.padding

    def _draw(self, rng: random.Random, held_out: bool) -> SolvedExample:
        """Draw a problem, and put digits in front of it."""
        problem = super()._draw(rng, held_out)
        digits = "".join(rng.choices("0123456789", k=self._padding))
        return SolvedExample(f"{digits}={problem.prompt}", problem.answer)
