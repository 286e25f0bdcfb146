"""Environments of the workloads in this folder.

`PaddedArithmetic` (`async_vs_sync.toml`) has sums whose prompts have a chosen length. `RemoteTextWorld`
(`real_textworld.toml`) is TextWorld as a remote simulator, whose steps answer late. TextWorld itself answers within
milliseconds, so each step waits for a delay, which is drawn at random. A draw depends on the seed of the problem, on
the number of instances of that problem that the process had before, and on the turn. So members of a group have
different delays, and runs over the same problems have the same ones. Held-out problems answer at once, so that
evaluations take little time.
"""

from __future__ import annotations

import random
from collections import Counter

import anyio

from envs.arithmetic import Arithmetic, ArithmeticOptions
from envs.textworld import TextWorld, TextWorldOptions
from flash.config.simulate import Distribution, sampler, uniform
from flash.environment import Info, SolvedExample, StepResult, is_held_out
from flash.types import Observation


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
        """Draw a training or a held-out problem, and put digits in front of it. The problem alone decides its side."""
        problem = super()._draw(rng, held_out)
        digits = "".join(rng.choices("0123456789", k=self._padding))
        return SolvedExample(f"{digits}={problem.prompt}", problem.answer)


_instances: Counter[int] = Counter()
"""Number of instances of each seed in this process."""


class RemoteOptions(TextWorldOptions, frozen=True, kw_only=True):
    """Options of the games, and the delay of their answers.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    latency: Distribution = 0.0
    """Seconds that a step of a training game takes in addition: a number, or a table of a distribution."""


class RemoteTextWorld(TextWorld):
    """A game that answers late, as if it ran elsewhere."""

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._latency = sampler(options.latency)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the beginning of another instance of this problem, without a delay. Raises the errors of TextWorld."""
        self._seed, self._instance, self._turn = seed, _instances[seed], 0
        _instances[seed] += 1
        return await super().reset(seed)

    async def step(self, action: str) -> StepResult:
        """Give the last line of `action` to the game as a command; wait for the delay, then for the game's answer."""
        if not is_held_out(self._seed):
            await anyio.sleep(self._latency.draw(uniform(self._seed, self._instance, self._turn)))
        self._turn += 1
        return await super().step(action)
