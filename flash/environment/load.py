"""The configured environment, found by its import path and loaded once: episodes, what they share, and kinds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from flash.config.objects import check_options, class_with, load_environment
from flash.environment.interface import Domain, Domains, Environment, Prepared
from flash.environment.threaded import wrap


class LoadedEnvironment:
    """An environment class with the keyword arguments that its options give.

    Args:
        path: `module:Class`.
        options: of the class, as the configuration has them.

    Raises:
        ConfigError: there is no such class, or it does not take the options.
    """

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self._class: Any = load_environment(path)
        self._kwargs = check_options(self._class, options, "env.options")

    def make(self, kind: str = "") -> Environment:
        """An environment for one episode. It finds the kind of its problem by the seed, so that `kind` is not used."""
        return wrap(self._class(**self._kwargs))

    async def prepare(self) -> None:
        """Open what the episodes of a node share, where the class has something of the kind."""
        if isinstance(self._class, Prepared):
            await self._class.prepare(**self._kwargs)

    def kind_of(self, seed: int) -> str:
        """Return the kind of the problem of a seed; one unnamed kind for classes that do not tell several apart."""
        if self._kinds is None:
            return ""
        cls, kwargs = self._kinds
        return cls.kind_of(seed, **kwargs)

    def domains(self) -> dict[str, Domain]:
        """Return the domains of the problems; none for classes that do not tell."""
        # The class that names the kinds also gives their shares: those of another class would have other names.
        if self._kinds is None or not isinstance(self._kinds[0], Domains):
            return {}
        cls, kwargs = self._kinds
        return cls.domains(**kwargs)

    @property
    def is_collected(self) -> bool:
        """True if the class knows how many held-out problems it has."""
        return class_with("held_out_problems", self._class, self._kwargs) is not None

    def held_out_problems(self) -> int | None:
        """Return the number of held-out problems, which may read a data set; None if there is no limit."""
        if (found := class_with("held_out_problems", self._class, self._kwargs)) is None:
            return None
        cls, kwargs = found
        return cls.held_out_problems(**kwargs)

    def solution_of(self, seed: int) -> str | None:
        """Return the collected answer to the problem of a seed; None if the class has none."""
        if (found := class_with("solution_of", self._class, self._kwargs)) is None:
            return None
        cls, kwargs = found
        return cls.solution_of(seed, **kwargs)

    @cached_property
    def _kinds(self) -> tuple[Any, dict[str, Any]] | None:
        return class_with("kind_of", self._class, self._kwargs)
