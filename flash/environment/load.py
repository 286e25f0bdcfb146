"""The configured environment: a class found by its import path, loaded once, and called with the run's options.

Each process that needs the environment makes one `LoadedEnvironment`: the node loop makes environments with it, and the
hub asks it for the kinds of problems. The optional methods of a class are described in `flash.environment.interface`.
If a class wraps another one, `class_with` finds the outermost class that has a method, with the arguments of that
class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from flash.config.objects import check_options, class_with, load_environment
from flash.environment.interface import Domain, Domains, Environment, Prepared
from flash.environment.threaded import wrap


class LoadedEnvironment:
    """An environment class with the keyword arguments that `env.options` gives.

    Args:
        path: `module:Class`.
        options: options of the class, as the configuration has them.

    Raises:
        ConfigError: the class does not exist, or does not accept the options.
    """

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self._class: Any = load_environment(path)
        self._kwargs = check_options(self._class, options, "env.options")

    def make(self, kind: str = "") -> Environment:
        """Return an environment for one episode. If its methods are blocking, they run in threads (`wrap`).

        The player of episodes calls this for each episode. It passes the kind of the problem, which is not used here:
        the environment finds the kind by the seed of `reset`.
        """
        return wrap(self._class(**self._kwargs))

    async def prepare(self) -> None:
        """Open the resources that the episodes of a node share, if the class has any. The node calls this once, before
        it starts its engines."""
        if isinstance(self._class, Prepared):
            await self._class.prepare(**self._kwargs)

    def kind_of(self, seed: int) -> str:
        """Return the kind of the problem of a seed; an empty name if the class has one kind only.

        The hub calls this for each problem that it issues.
        """
        if self._kinds is None:
            return ""
        cls, kwargs = self._kinds
        return cls.kind_of(seed, **kwargs)

    def domains(self) -> dict[str, Domain]:
        """Return the domains of the problems, by kind; empty if the class has none. The hub and each node call this at
        their start."""
        # Only the class that names the kinds can have their domains: another class would use other names.
        if self._kinds is None or not isinstance(self._kinds[0], Domains):
            return {}
        cls, kwargs = self._kinds
        return cls.domains(**kwargs)

    @property
    def is_collected(self) -> bool:
        """True if the class has the method `held_out_problems`, even if this returns no limit.

        Held-out problems are the problems of evaluations, which are never trained. Callers of `held_out_problems` ask
        this first, since it reads no data set.
        """
        return class_with("held_out_problems", self._class, self._kwargs) is not None

    def held_out_problems(self) -> int | None:
        """Return the number of held-out problems; None if there is no limit. May read a data set.

        Runs and commands limit `eval.problems` to it at their start.
        """
        if (found := class_with("held_out_problems", self._class, self._kwargs)) is None:
            return None
        cls, kwargs = found
        return cls.held_out_problems(**kwargs)

    def solution_of(self, seed: int) -> str | None:
        """Return the known answer to the problem of a seed; None if the class has none. The dry run tries it."""
        if (found := class_with("solution_of", self._class, self._kwargs)) is None:
            return None
        cls, kwargs = found
        return cls.solution_of(seed, **kwargs)

    @cached_property
    def _kinds(self) -> tuple[Any, dict[str, Any]] | None:
        """Class that has `kind_of`, with its keyword arguments; None if no class has it."""
        return class_with("kind_of", self._class, self._kwargs)
