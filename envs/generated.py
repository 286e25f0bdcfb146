"""Problems that are made, not collected: drawn from a seed, and divided into training and held-out ones.

The problems themselves, not only the seeds, are divided: a stable hash of the prompt puts about one in ten on the
held-out side, in every process and every run.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod

from flash.environment import Info, SolvedExample, StepResult, is_held_out
from flash.errors import EnvError
from flash.types import Observation

HELD_OUT_ONE_IN = 10
"""One problem in so many is held out: about 800 of the two-digit sums, enough for an evaluation."""


def in_held_out_part(prompt: str) -> bool:
    """Which side of the division a problem is on: the same in every process, for every seed."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


class OneTurn(ABC):
    """An environment of made problems that one answer ends."""

    _solution: str | None = None

    @abstractmethod
    def _draw(self, rng: random.Random, held_out: bool) -> SolvedExample:
        """A problem of one side of the division."""

    @abstractmethod
    def _reward(self, answer: str, solution: str) -> float:
        """From 0 to 1."""

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the problem of this seed."""
        problem = self._draw(random.Random(seed), is_held_out(seed))
        self._solution = problem.answer
        return self._shown(problem.prompt), {}

    def _shown(self, prompt: str) -> Observation:
        """How a problem is put to the model."""
        return prompt

    async def step(self, action: str) -> StepResult:
        """Compare the answer with the right one; the episode ends."""
        if self._solution is None:
            raise EnvError("step() was called before reset()")
        return "", self._reward(action, self._solution), True, False, {}

    async def close(self) -> None:  # noqa: B027
        """Nothing to release: a problem is all that an episode has."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training problems with their answers, drawn with replacement."""
        rng = random.Random(seed)
        return [self._draw(rng, held_out=False) for _ in range(count)]
