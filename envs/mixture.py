"""Mixture: one run over several environments; each problem comes from one of them.

The kind of a problem is the name of the environment that it comes from. The kind follows from the seed and the weights.
The kinds are spread evenly over consecutive seeds: every long range of seeds, training or held-out, contains each kind
in proportion to its weight. The hub, which hands out the problems, calls `kind_of`, so that one environment that keeps
failing can be put in quarantine while the others continue. The hub also reads the weights from `domains`: the trained
groups have the shares that the weights give, no matter how long the problems of a kind take and how many groups are
filtered out. A group is the set of samples of one problem; held-out problems are for evaluation only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import msgspec

from envs import nested
from flash.config.objects import check_options, class_with, load_environment
from flash.config.section import PositiveFloat
from flash.environment import (
    Domain,
    Environment,
    EpisodeView,
    Info,
    Informed,
    SolvedExample,
    StepResult,
    SyncEnvironment,
    WarmStart,
    is_held_out,
    wrap,
)
from flash.errors import ConfigError, EnvError
from flash.types import Observation

GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio. Its multiples modulo 2⁶⁴ fill the range evenly at any count of them."""


class MixturePart(Domain, frozen=True, kw_only=True):
    """Table of one environment of a mixture, and the run's settings for its problems."""

    path: str
    """Class of the environment: `module:Class`."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the class, checked against its signature."""
    reward_scale: PositiveFloat = 1.0
    """Factor for the rewards of training problems. Rewards of held-out problems are not scaled."""

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each invalid option and the reason why it is invalid."""
        for name in ("weight", "reward_scale"):
            if math.isinf(value := getattr(self, name)):
                yield name, f"expected a number above 0, got {value!r}"
        if self.accuracy_bounds is not None and not self.accuracy_bounds[0] <= self.accuracy_bounds[1]:
            yield "accuracy_bounds", f"expected [low, high], got {list(self.accuracy_bounds)}"
        if self.group_size == 1 and self.drop_equal_rewards:
            yield "drop_equal_rewards", "groups of one sample have equal rewards: all would be dropped"


class _Maker(msgspec.Struct, frozen=True, dict=True):
    """Factory of one kind's environments: the class with its checked arguments."""

    env: type[Environment | SyncEnvironment]
    """Class of the environment."""
    kwargs: dict[str, Any]
    """Keyword arguments of the class."""

    def __call__(self) -> Environment | SyncEnvironment:
        """Make an environment of the kind."""
        return self.env(**self.kwargs)


class MixtureOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Environments of a mixture. Their tables are parsed once for all episodes.

    Raises:
        ConfigError: a table is invalid. The message names it, what was expected and what was given.
    """

    kinds: dict[str, dict[str, Any]]
    """For each name, a table with the `path` of the environment's class, its `options`, and its `weight`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not self.kinds:
            raise ConfigError("`kinds` is empty: a mixture needs at least one environment")
        for name, kind in self.parsed.items():
            for option, fault in kind.faults():
                raise ConfigError(f"`kinds.{name}.{option}`: {fault}")

    @cached_property
    def parsed(self) -> dict[str, MixturePart]:
        """The tables as kinds. Their classes are not loaded."""
        return {
            name: MixturePart(**check_options(MixturePart, table, f"kinds.{name}"))
            for name, table in self.kinds.items()
        }

    @cached_property
    def domains(self) -> dict[str, Domain]:
        """The run's settings for the problems of each kind."""
        names = Domain.__struct_fields__
        return {name: Domain(**{each: getattr(kind, each) for each in names}) for name, kind in self.parsed.items()}

    @cached_property
    def makers(self) -> dict[str, _Maker]:
        """Factory of each kind's environments, by name. The first access loads the classes and checks their options."""
        return {name: _load_maker(name, kind) for name, kind in self.parsed.items()}


class Mixture:
    """Environment of one problem, which comes from one of several environments.

    The rollout node makes one object for each episode.
    """

    def __init__(self, options: MixtureOptions) -> None:
        self._options = options
        self._env: Environment | None = None
        """Environment of the episode's problem; None before `reset`."""
        self._episode: EpisodeView | None = None
        """View of the episode's tokens, from `inform`."""
        self._scale = 1.0
        """Factor for the rewards of this episode."""

    @classmethod
    def check(cls, options: MixtureOptions) -> None:
        """Check each environment of the mixture; each class checks its own options.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: a kind is invalid. The message names it, what was expected and what was given.
        """
        for name, maker in options.makers.items():
            try:
                nested.check(maker.env, maker.kwargs)
            except ConfigError as error:
                raise ConfigError(f"`kinds.{name}.options`: {error}") from error

    @classmethod
    async def prepare(cls, options: MixtureOptions) -> None:
        """Prepare each environment that has a method `prepare`. Each node calls this once, before its engines start.

        Raises the errors of these methods.
        """
        for maker in options.makers.values():
            await nested.prepare(maker.env, maker.kwargs)

    @classmethod
    def kind_of(cls, seed: int, options: MixtureOptions) -> str:
        """Return the name of the kind that a seed's problem comes from.

        The hub and each node call this and must agree. The result depends only on the seed, and on the names and
        weights of the kinds in their order.
        """
        weights = {name: kind.weight for name, kind in options.parsed.items()}
        # Position of the seed on a line where each kind has a piece as long as its weight.
        at = seed * GOLDEN % 2**64 / 2**64 * sum(weights.values())
        for name, end in zip(weights, accumulate(weights.values()), strict=True):
            if at < end:
                return name
        return next(reversed(weights))  # reached only if rounding puts the last border below the sum

    @classmethod
    def domains(cls, options: MixtureOptions) -> dict[str, Domain]:
        """Return the domain of each kind: its weight and the hub's other settings for its problems."""
        return options.domains

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode, until `reset` has made an environment that may use it."""
        self._episode = episode

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Create the environment of this seed's kind, and return the result of its `reset`. Raises its errors."""
        name = self.kind_of(seed, self._options)
        self._scale = 1.0 if is_held_out(seed) else self._options.parsed[name].reward_scale
        self._env = wrap(self._options.makers[name]())
        if isinstance(self._env, Informed) and self._episode is not None:
            self._env.inform(self._episode)
        return await self._env.reset(seed)

    async def step(self, action: str) -> StepResult:
        """Pass the answer to the environment, and scale its reward if the problem is a training problem.

        Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: `reset` was not called before.
            Exception: any error that the environment raises.
        """
        if self._env is None:
            raise EnvError("step() was called before reset()")
        observation, reward, terminated, truncated, info = await self._env.step(action)
        return observation, self._scale * reward, terminated, truncated, info

    async def close(self) -> None:
        """Close the environment if one was created."""
        if self._env is not None:
            await self._env.close()

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` solved examples; each kind's share follows from its weight.

        The run teaches a tiny model with them before the training.

        Raises:
            ConfigError: a kind has no solved examples.
            EnvError: the environment of a kind returned fewer examples than requested.
        """
        # Each `seed` has a range of seeds of its own.
        names = [self.kind_of(seed * count + index, self._options) for index in range(count)]
        examples: dict[str, Iterator[SolvedExample]] = {}
        for name, env in self._solved.items():
            wanted = names.count(name)
            shown = env.solved_examples(wanted, seed)
            if len(shown) < wanted:
                raise EnvError(
                    f"`kinds.{name}`: solved_examples({wanted}, seed) must return {wanted} examples, but returned "
                    f"{len(shown)}"
                )
            examples[name] = iter(shown)
        return [next(examples[name]) for name in names]

    def alphabet(self) -> str:
        """Return every character of every kind, each once. They become a tiny model's vocabulary."""
        return "".join(dict.fromkeys("".join(env.alphabet() for env in self._solved.values())))

    @cached_property
    def _solved(self) -> dict[str, WarmStart]:
        """An environment of each kind, for its solved examples. Raises ConfigError if a kind has none."""
        envs = {name: maker() for name, maker in self._options.makers.items()}
        without_examples = [name for name, env in envs.items() if not isinstance(env, WarmStart)]
        if without_examples:
            raise ConfigError(
                f"of the mixture's kinds, {', '.join(without_examples)} cannot show solved examples (see "
                "flash.environment.WarmStart), which a tiny model is taught with: set model.path to an existing model"
            )
        return cast("dict[str, WarmStart]", envs)


def _load_maker(name: str, kind: MixturePart) -> _Maker:
    """Load the class of a kind and check its options. Raises ConfigError if it is invalid or a mixture itself."""
    try:
        env = cast("type[Environment | SyncEnvironment]", load_environment(kind.path))
    except ConfigError as error:
        raise ConfigError(f"`kinds.{name}.path`: {error}") from error
    # A mixture inside a mixture is refused below, so its options are not checked here.
    is_mixture = callable(getattr(env, "domains", None))
    kwargs = {} if is_mixture else check_options(env, kind.options, f"kinds.{name}.options")
    if is_mixture or class_with("domains", env, kwargs) is not None:
        # The domains of the inner mixture would be lost silently: each problem has only the kind of the outer mixture.
        raise ConfigError(f"`kinds.{name}.path`: a mixture cannot hold a mixture: name its environments here")
    return _Maker(env, kwargs)
