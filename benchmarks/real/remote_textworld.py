"""TextWorld as a remote simulator: each step answers late.

TextWorld itself answers within milliseconds, so the delay is drawn and waited for: it is not measured anywhere. A draw
follows from the problem's seed, from how many instances of that problem the process has had before, and from the turn:
the members of a group meet delays of their own, and runs over the same problems meet the same ones. Held-out problems
answer at once, so that evaluations take no longer than they have to.
"""

from __future__ import annotations

from collections import Counter

import anyio

from envs.textworld import TextWorld, TextWorldOptions
from flash.config.simulate import Distribution, sampler, uniform
from flash.environment import Info, StepResult, is_held_out
from flash.types import Observation

_instances: Counter[int] = Counter()
"""Of each seed, in this process."""


class RemoteOptions(TextWorldOptions, frozen=True, kw_only=True):
    """Which games, and how late they answer.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    latency: Distribution = 0.0
    """Seconds of a step."""


class Delays:
    """How late each answer of one episode is."""

    def __init__(self, latency: Distribution, instances: Counter[int] = _instances) -> None:
        self._latency, self._instances = sampler(latency), instances
        self._key = (0, 0)
        self._turn = 0
        self._late = False

    def begin(self, seed: int) -> None:
        """Another instance of this problem begins."""
        self._key, self._turn, self._late = (seed, self._instances[seed]), 0, not is_held_out(seed)
        self._instances[seed] += 1

    def next_s(self) -> float:
        """Of the next turn's answer, in seconds."""
        self._turn += 1
        return self._latency.draw(uniform(*self._key, self._turn - 1)) if self._late else 0.0


class RemoteTextWorld(TextWorld):
    """One game, far away."""

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._delays = Delays(options.latency)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the beginning, at once."""
        self._delays.begin(seed)
        return await super().reset(seed)

    async def step(self, action: str) -> StepResult:
        """Give a command, and wait for its answer."""
        await anyio.sleep(self._delays.next_s())
        return await super().step(action)
