"""Environments that are named in the options of another one, by a table with a class path and options.

`envs.agent`, `envs.mixture` and `envs.tools` wrap other environments in this way. They check and prepare the inner
class with these functions, because the run itself calls only the outer one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flash.config.objects import check_options, load_environment
from flash.environment import Prepared
from flash.errors import ConfigError


class ClassTable(msgspec.Struct, frozen=True):
    """Table that names a class, such as an environment class, and its options."""

    path: str
    """Path of the class: `module:Class`."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the class."""


def load_tasks(table: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """Return the class that a table `tasks` names, and its keyword arguments.

    Raises:
        ConfigError: the table is invalid. The message names the fault.
    """
    tasks = ClassTable(**check_options(ClassTable, table, "tasks"))
    try:
        kind = load_environment(tasks.path)
    except ConfigError as error:
        raise ConfigError(f"`tasks.path`: {error}") from error
    return kind, check_options(kind, tasks.options, "tasks.options")


def check(kind: type[Any], kwargs: dict[str, Any]) -> None:
    """Call the class's own `check` of its options, if it has one.

    Raises:
        ConfigError: the options are invalid. The message names the fault.
    """
    own_check = getattr(kind, "check", None)
    if own_check is not None:
        own_check(**kwargs)


async def prepare(kind: type[Any], kwargs: dict[str, Any]) -> None:
    """Call the class's `prepare`, if it has one, to open the resources that the episodes of a node share."""
    if isinstance(kind, Prepared):
        await kind.prepare(**kwargs)
