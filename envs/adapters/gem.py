"""Adapter for the package GEM. Its environments seed the random numbers of their process, so they run in workers.

A worker keeps no state of an episode. Each step replays the episode from its seed, with all answers so far. That is
exact for environments that depend only on the seed and the answers, as GEM's games do. An episode of n turns costs n²/2
fast steps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import anyio
import msgspec

from envs.workers import in_worker
from flash.environment import Info, StepResult
from flash.errors import ConfigError, EnvError

IMPORT_S = 120.0
"""Seconds that the import of the package may take."""


class GemOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Name and arguments of the environment."""

    id: str
    """Name in GEM's registry, such as `game:GuessTheNumber-v0-easy`."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of GEM's environment."""
    timeout: float = 30.0
    """Seconds that a step may take, including the replay."""


class Gem:
    """Environment of one episode. The rollout node makes one for each episode, and calls `reset` and `step`."""

    def __init__(self, options: GemOptions) -> None:
        self._options = options
        self._seed = 0
        """Seed of the episode."""
        self._answers: list[str] = []
        """Answers of the episode so far."""

    @classmethod
    def check(cls, options: GemOptions) -> None:
        """Check that the package is installed. The process that reads the configuration calls this.

        Raises:
            ConfigError: the package is not installed.
        """
        if importlib.util.find_spec("gem") is None:
            raise ConfigError("GEM is not installed: it is the package gem-llm")

    @classmethod
    async def prepare(cls, options: GemOptions) -> None:
        """Reset one environment, because GEM imports the environment's own packages only when it makes one.

        Each node calls this once, before its engines start.

        Raises:
            ConfigError: GEM does not know the environment, or cannot make it.
            EnvError, TimeoutError, anyio.BrokenWorkerProcess: no worker can import GEM.
        """
        known = await in_worker(IMPORT_S, _known)
        if options.id not in known:
            raise ConfigError(f"GEM has no {options.id!r}, only {', '.join(known)}")
        try:
            await cls(options).reset(0)
        except EnvError as error:
            raise ConfigError(f"{options.id} cannot be played: {error}") from error

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Start an episode with this seed, and return its first observation.

        Raises:
            EnvError: GEM's environment raised an error or took too long, or the worker died.
        """
        self._seed, self._answers = seed, []
        return (await self._replay())[0], {}

    async def step(self, action: str) -> StepResult:
        """Replay the episode with the new answer at its end, and return the result of that answer.

        Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: GEM's environment raised an error or took too long, or the worker died.
        """
        self._answers.append(action)
        return *(await self._replay()), {}

    async def close(self) -> None:
        """Do nothing: workers keep no state of an episode."""

    async def _replay(self) -> tuple[str, float, bool, bool]:
        """Replay the episode in a worker process. Returns (observation, reward, terminated, truncated).

        Raises EnvError if the environment raises an error, or if the worker dies or takes too long.
        """
        options = self._options
        try:
            return await in_worker(options.timeout, _play, options.id, options.kwargs, self._seed, self._answers)
        except TimeoutError:
            raise EnvError(f"{options.id} took longer than {options.timeout:g} s") from None
        except anyio.BrokenWorkerProcess:
            raise EnvError(f"the process of {options.id} died") from None


def _known() -> list[str]:
    """Return the names of GEM's environments. Runs in a worker process."""
    _library()
    return list(importlib.import_module("gem.envs.registration").ENV_REGISTRY)


def _play(name: str, kwargs: dict[str, Any], seed: int, answers: list[str]) -> tuple[str, float, bool, bool]:
    """Replay an episode with these answers in a worker.

    Returns (observation, reward, terminated, truncated) after the last answer; reward 0 and no end without an answer.
    """
    env = _library().make(name, **kwargs)
    # GEM's environments seed NumPy, which takes no seed of more than 32 bits.
    (shown, info), reward, terminated, truncated = env.reset(seed=seed % 2**32), 0.0, False, False
    for answer in answers:
        shown, reward, terminated, truncated, info = env.step(answer)
    # GEM's own text after an observation, which asks for the next answer. The end of an episode needs none.
    suffix = "" if terminated or truncated else info.get("suffix", "")
    return f"{shown}\n{suffix}".strip() + "\n", float(reward), bool(terminated), bool(truncated)


@functools.cache
def _library() -> Any:
    """Import GEM in a worker process, and return its module."""
    importlib.import_module("gem.envs")  # registers the environments that ship with GEM
    return importlib.import_module("gem")
