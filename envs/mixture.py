"""Mixture: one run over several environments, each problem from one of them.

Which environment a problem comes from, its kind, follows from its seed and the weights. Seeds that follow each other
take the kinds in turn, so that every stretch of them holds each kind by its weight; so do the held-out ones. The hub
asks `kind_of` for the kind, so that one environment that keeps failing can be left out while the others go on, and
`domains` for the weights: what is trained has the shares that they say, however long each kind takes and however much
of it is filtered out.
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
"""2⁶⁴ divided by the golden ratio: its multiples modulo 2⁶⁴ fill the range more evenly than those of other numbers."""


class Kind(Domain, frozen=True, kw_only=True):
    """One environment of a mixture, and what the run does with its problems."""

    path: str
    """`module:Class`."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the class, checked against its signature."""
    reward_scale: PositiveFloat = 1.0
    """Multiplies the rewards of training problems; those of held-out ones stay as they are."""

    def faults(self) -> Iterator[tuple[str, str]]:
        """What cannot work: the option and what is wrong with it."""
        for name in ("weight", "reward_scale"):
            if math.isinf(value := getattr(self, name)):
                yield name, f"expected a number above 0, got {value!r}"
        if self.accuracy_bounds is not None and not self.accuracy_bounds[0] <= self.accuracy_bounds[1]:
            yield "accuracy_bounds", f"expected [low, high], got {list(self.accuracy_bounds)}"
        if self.group_size == 1 and self.drop_equal_rewards:
            yield "drop_equal_rewards", "groups of one sample have equal rewards: all would be dropped"


class _Maker(msgspec.Struct, frozen=True, dict=True):
    """Makes instances of one kind."""

    env: type[Environment | SyncEnvironment]
    kwargs: dict[str, Any]

    def __call__(self) -> Environment | SyncEnvironment:
        return self.env(**self.kwargs)


class MixtureOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The environments of a mixture. Their tables are read once, however many episodes there are.

    Raises:
        ConfigError: naming the table, what was expected and what was given.
    """

    kinds: dict[str, dict[str, Any]]
    """For each name a table with the `path` of the environment's class, its `options`, and its `weight`."""

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ConfigError("`kinds` is empty: a mixture needs at least one environment")
        for name, kind in self.parsed.items():
            for option, fault in kind.faults():
                raise ConfigError(f"`kinds.{name}.{option}`: {fault}")

    @cached_property
    def parsed(self) -> dict[str, Kind]:
        """The tables as kinds, without a look at the classes they name."""
        return {name: Kind(**check_options(Kind, table, f"kinds.{name}")) for name, table in self.kinds.items()}

    @cached_property
    def domains(self) -> dict[str, Domain]:
        """What a run does with the problems of each."""
        names = Domain.__struct_fields__
        return {name: Domain(**{each: getattr(kind, each) for each in names}) for name, kind in self.parsed.items()}

    @cached_property
    def makers(self) -> dict[str, _Maker]:
        """The classes and their keyword arguments."""
        return {name: _maker(name, kind) for name, kind in self.parsed.items()}


class Mixture:
    """One problem of one of several environments."""

    def __init__(self, options: MixtureOptions) -> None:
        self._options = options
        self._env: Environment | None = None
        self._episode: EpisodeView | None = None
        self._scale = 1.0

    @classmethod
    def check(cls, options: MixtureOptions) -> None:
        """Refuse a mixture with an environment that cannot work; each class checks its own options.

        Raises:
            ConfigError: naming the kind, what was expected and what was given.
        """
        for name, maker in options.makers.items():
            try:
                nested.check(maker.env, maker.kwargs)
            except ConfigError as error:
                raise ConfigError(f"`kinds.{name}.options`: {error}") from error

    @classmethod
    async def prepare(cls, options: MixtureOptions) -> None:
        """Prepare each environment that wants it."""
        for maker in options.makers.values():
            await nested.prepare(maker.env, maker.kwargs)

    @classmethod
    def kind_of(cls, seed: int, options: MixtureOptions) -> str:
        """The name of the kind that the problem of this seed comes from."""
        weights = {name: kind.weight for name, kind in options.parsed.items()}
        at = seed * GOLDEN % 2**64 / 2**64 * sum(weights.values())
        for name, end in zip(weights, accumulate(weights.values()), strict=True):
            if at < end:
                return name
        return next(reversed(weights))  # reached only when rounding puts the last border below the sum

    @classmethod
    def domains(cls, options: MixtureOptions) -> dict[str, Domain]:
        """Every kind is a domain."""
        return options.domains

    def inform(self, episode: EpisodeView) -> None:
        """Let the environment know of tokens, if it wants to."""
        self._episode = episode

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start the problem of this seed, in its environment."""
        kind = self.kind_of(seed, self._options)
        self._scale = 1.0 if is_held_out(seed) else self._options.parsed[kind].reward_scale
        self._env = wrap(self._options.makers[kind]())
        if isinstance(self._env, Informed) and self._episode is not None:
            self._env.inform(self._episode)
        return await self._env.reset(seed)

    async def step(self, action: str) -> StepResult:
        """Hand the answer to the environment."""
        if self._env is None:
            raise EnvError("step() was called before reset()")
        observation, reward, terminated, truncated, info = await self._env.step(action)
        return observation, self._scale * reward, terminated, truncated, info

    async def close(self) -> None:
        """Close the environment, if one was started."""
        if self._env is not None:
            await self._env.close()

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` examples, each kind by its weight.

        Raises:
            ConfigError: a kind has none to offer.
        """
        names = [self.kind_of(seed * count + index, self._options) for index in range(count)]
        examples = {name: iter(env.solved_examples(names.count(name), seed)) for name, env in self._solved.items()}
        return [next(examples[name]) for name in names]

    def alphabet(self) -> str:
        """Every character of every kind, each once."""
        return "".join(dict.fromkeys("".join(env.alphabet() for env in self._solved.values())))

    @cached_property
    def _solved(self) -> dict[str, WarmStart]:
        envs = {name: maker() for name, maker in self._options.makers.items()}
        silent = [name for name, env in envs.items() if not isinstance(env, WarmStart)]
        if silent:
            raise ConfigError(
                f"of the mixture's kinds, {', '.join(silent)} cannot show solved examples (see "
                "flash.environment.WarmStart), which a tiny model is taught with: set model.path to an existing model"
            )
        return cast("dict[str, WarmStart]", envs)


def _maker(name: str, kind: Kind) -> _Maker:
    try:
        env = cast("type[Environment | SyncEnvironment]", load_environment(kind.path))
    except ConfigError as error:
        raise ConfigError(f"`kinds.{name}.path`: {error}") from error
    # A mixture is refused before its options, which are of no use then.
    is_mixture = callable(getattr(env, "domains", None))
    kwargs = {} if is_mixture else check_options(env, kind.options, f"kinds.{name}.options")
    if is_mixture or class_with("domains", env, kwargs) is not None:
        # Its domains would be lost without a word: a problem has one kind, that of the outer mixture.
        raise ConfigError(f"`kinds.{name}.path`: a mixture cannot hold a mixture: name its environments here")
    return _Maker(env, kwargs)
