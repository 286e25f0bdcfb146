"""What a run is, and whether it still goes on, from its directory."""

from __future__ import annotations

import tomllib
from typing import Any

from flash.errors import RunDirectoryError
from flash.observe.follow import opened
from flash.observe.rundir import RunDirectory

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
    """A resumed run still has the summary of its earlier life: it is older than the last step then."""
    try:
        return directory.summary.stat().st_mtime >= directory.metrics.stat().st_mtime
    except FileNotFoundError:
        return False


def _at(tree: dict[str, Any], place: tuple[str, ...]) -> Any:
    found: Any = tree
    for key in place:
        found = found.get(key) if isinstance(found, dict) else None
    return found
