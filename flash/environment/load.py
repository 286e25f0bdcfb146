"""The configured environment: a class found by its import path, loaded once, and called with the run's options.

Each process that needs the environment makes one `LoadedEnvironment`: the node loop makes environments with it, and the
hub asks it for the kinds of problems. The optional methods of a class are described in `flash.environment.interface`.
If a class wraps another one, `class_with` finds the outermost class that has a method, with the arguments of that
class.

Invariant: whatever these methods of a user's class raise or return, the caller gets the declared type or an error of
Flash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from flash.config.objects import check_options, class_with, load_environment
from flash.environment.calls import typed_errors
from flash.environment.interface import Domain, Domains, Environment, Informed, Prepared
from flash.environment.results import shown
from flash.environment.threaded import wrap
from flash.errors import EnvError


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
        self._found: dict[str, tuple[type[Any], dict[str, Any]] | None] = {}
        """Results of `_class_with` so far, by method, because a wrapping class may take long to name the inner one."""

    def make(self, kind: str = "") -> Environment:
        """Return an environment for one episode. If its methods are blocking, they run in threads (`wrap`).

        The player of episodes calls this for each episode. `kind`: kind of the problem. It is not used here, because
        the environment finds the kind by the seed of `reset`; a simulation has another function in place of this one,
        which uses it. Raises whatever the constructor of the user's class raises.
        """
        return wrap(self._class(**self._kwargs))

    @property
    def is_informed(self) -> bool:
        """True if the environment gets a view of its episode (`EpisodeView`), with which it reads and steers the tokens
        of the episode."""
        return isinstance(self._class, Informed)

    async def prepare(self) -> None:
        """Open the resources that the episodes of a node share, if the class has any. The node calls this once, before
        it starts its engines.

        Raises:
            FlashError: the class has raised it, or an EnvError in place of another exception.
        """
        if isinstance(self._class, Prepared):
            with typed_errors("prepare"):
                await self._class.prepare(**self._kwargs)

    def kind_of(self, seed: int) -> str:
        """Return the kind of the problem of a seed; an empty name if the class has one kind only.

        The hub calls this for each problem that it issues. Raises the errors of `_ask`.
        """
        return self._ask("kind_of", (str,), seed) or ""

    def domains(self) -> dict[str, Domain]:
        """Return the domains of the problems, by kind; empty if the class has none. The hub and each node call this at
        their start. Raises the errors of `_ask`."""
        # Only the class that names the kinds can have their domains: another class would use other names.
        found = self._class_with("kind_of")
        if found is None or not isinstance(found[0], Domains):
            return {}
        domains = cast("dict[object, object]", self._ask("domains", (dict,), of="kind_of"))
        for name, domain in domains.items():
            if not isinstance(name, str) or not isinstance(domain, Domain):
                raise EnvError(
                    "environment domains must map the names of kinds to flash.environment.Domain, but holds "
                    f"{shown(name)}: {shown(domain)}"
                )
        return cast("dict[str, Domain]", domains)

    @property
    def is_collected(self) -> bool:
        """True if the class has the method `held_out_problems`, even if this returns no limit.

        Held-out problems are the problems of evaluations, which are never trained. Callers of `held_out_problems` ask
        this first, since it reads no data set.
        """
        return self._class_with("held_out_problems") is not None

    @property
    def is_solved(self) -> bool:
        """True if the class has the method `solution_of`, even if this knows no answer. Reads no data set."""
        return self._class_with("solution_of") is not None

    def held_out_problems(self) -> int | None:
        """Return the number of held-out problems; None if there is no limit. May read a data set.

        Runs and commands limit `eval.problems` to it at their start. Raises the errors of `_ask`.
        """
        return self._ask("held_out_problems", (int, type(None)))

    def solution_of(self, seed: int) -> str | None:
        """Return the known answer to the problem of a seed; None if the class has none. The dry run tries it. May read
        a data set. Raises the errors of `_ask`."""
        return self._ask("solution_of", (str, type(None)), seed)

    def _ask(self, method: str, types: tuple[type, ...], *seed: int, of: str | None = None) -> Any:
        """Call a classmethod about the problems, and return its result; None if no class has the method.

        Args:
            method: name of the method.
            types: the types that its result may have.
            seed: seed of the problem, if the method is about one problem.
            of: name of another method; the class that has it is asked. None: the class that has `method`.

        Raises:
            FlashError: the method has raised it.
            EnvError: the method has raised another exception, or its result has another type.
        """
        if (found := self._class_with(of or method)) is None:
            return None
        cls, kwargs = found
        call = f"{method} (seed {seed[0]})" if seed else method
        with typed_errors(call):
            value = getattr(cls, method)(*seed, **kwargs)
        if not isinstance(value, types):
            names = " or ".join("None" if one is type(None) else one.__name__ for one in types)
            raise EnvError(f"environment {call} must return {names}, but returned {shown(value)}")
        return value

    def _class_with(self, method: str) -> tuple[type[Any], dict[str, Any]] | None:
        """Return the class that has a method, with its keyword arguments; None if no class has it.

        Raises:
            FlashError: the method `wrapped` of a class has raised it, or an EnvError in place of another exception.
        """
        if method not in self._found:
            with typed_errors("wrapped"):
                self._found[method] = class_with(method, self._class, self._kwargs)
        return self._found[method]
