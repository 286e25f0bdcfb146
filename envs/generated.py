"""Generated problems: drawn from a seed, and divided into training and held-out problems.

`OneTurn` is the base class of environments such as `envs.arithmetic`; others use only `in_held_out_part`.

Held-out problems are for evaluation only. The problems themselves are divided, not only the seeds: two seeds may draw
the same problem. A stable hash of the prompt makes about one problem in ten a held-out one, the same in every process
and every run. An environment draws until it gets a problem of the side that it needs.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod

from flash.environment import Info, SolvedExample, StepResult, is_held_out
from flash.errors import EnvError
from flash.types import Observation

HELD_OUT_ONE_IN = 10
"""Number of problems among which about one is held out: about 800 of all two-digit sums, enough for an evaluation."""


def in_held_out_part(prompt: str) -> bool:
    """Return True if a problem is held out. The result depends on the prompt alone: no process or seed changes it."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


class OneTurn(ABC):
    """Base class of environments with generated problems and one turn."""

    _solution: str | None = None
    """Right answer to the problem; None before `reset`."""

    @abstractmethod
    def _draw(self, rng: random.Random, held_out: bool) -> SolvedExample:
        """Draw a training or a held-out problem with its right answer. The result depends on `rng` alone."""

    @abstractmethod
    def _reward(self, answer: str, solution: str) -> float:
        """Return the reward of an answer, from 0 to 1."""

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the prompt of this seed's problem."""
        problem = self._draw(random.Random(seed), is_held_out(seed))
        self._solution = problem.answer
        return self._shown(problem.prompt), {}

    def _shown(self, prompt: str) -> Observation:
        """Return a prompt in the form in which the model sees it. A subclass may make it a chat message."""
        return prompt

    async def step(self, action: str) -> StepResult:
        """Compare the answer with the right one; the episode ends.

        Returns (observation, reward, terminated, truncated, info). Raises EnvError if `reset` was not called before.
        """
        if self._solution is None:
            raise EnvError("step() was called before reset()")
        return "", self._reward(action, self._solution), True, False, {}

    async def close(self) -> None:  # noqa: B027
        """Do nothing: an episode holds only its problem."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` training problems with their answers, drawn with replacement.

        The run teaches a tiny model with them before the training.
        """
        rng = random.Random(seed)
        return [self._draw(rng, held_out=False) for _ in range(count)]
