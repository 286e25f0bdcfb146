"""An environment within another's options: a table with its path and its options."""

from __future__ import annotations

from typing import Any

import msgspec

from flash.config.objects import check_options, load_environment
from flash.environment import Prepared
from flash.errors import ConfigError


class ClassTable(msgspec.Struct, frozen=True):
    """A class, such as that of the environment that gives tasks and judges answers, and its options."""

    path: str
    """`module:Class`."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)


def load_tasks(table: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """The class that a table `tasks` names, and its keyword arguments.

    Raises:
        ConfigError: naming what is wrong in the table.
    """
    tasks = ClassTable(**check_options(ClassTable, table, "tasks"))
    try:
        kind = load_environment(tasks.path)
    except ConfigError as error:
        raise ConfigError(f"`tasks.path`: {error}") from error
    return kind, check_options(kind, tasks.options, "tasks.options")


def check(kind: type[Any], kwargs: dict[str, Any]) -> None:
    """Have a class check its own options, where it does.

    Raises:
        ConfigError: naming what is wrong.
    """
    own_check = getattr(kind, "check", None)
    if own_check is not None:
        own_check(**kwargs)


async def prepare(kind: type[Any], kwargs: dict[str, Any]) -> None:
    """Open what the episodes of a node share, where the class has something of the kind."""
    if isinstance(kind, Prepared):
        await kind.prepare(**kwargs)
