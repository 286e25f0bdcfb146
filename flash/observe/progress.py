"""What a run is, and whether it still goes on, from its directory."""

from __future__ import annotations

import tomllib
from typing import Any

from flash.errors import RunDirectoryError
from flash.observe.rundir.follow import opened
from flash.observe.rundir.rundir import RunDirectory

FACTS = (
    ("model", ("model", "path")),
    ("environment", ("env", "path")),
    ("objective", ("algorithm", "objective")),
    ("α", ("train", "async_ratio")),
    ("steps", ("run", "steps")),
    ("batch", ("train", "batch_size")),
    ("seed", ("run", "seed")),
)
"""What is told of a run, and where it stands in its configuration."""


def facts(directory: RunDirectory) -> dict[str, str]:
    """What it is a run of, from its configuration; empty where there is none to read."""
    try:
        with opened(directory.config) as file:
            tree = tomllib.load(file)
    except (OSError, ValueError):
        return {}
    except RunDirectoryError as error:
        return {"no configuration": str(error)}
    return {name: str(value) for name, place in FACTS if (value := _at(tree, place)) is not None}


def has_ended(directory: RunDirectory) -> bool:
    """Whether it has left its summary: one that is resumed puts that of its earlier incarnation aside."""
    return directory.summary.is_file()


def _at(tree: dict[str, Any], place: tuple[str, ...]) -> Any:
    found: Any = tree
    for key in place:
        found = found.get(key) if isinstance(found, dict) else None
    return found
