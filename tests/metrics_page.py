"""What docs/metrics.md lists, for tests that compare it with the rows of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PLACEHOLDERS = {
    "NAME": ".+",
    "STAT": "(ratio|weight|deviation|learned|bonus)",
    "WHY": "[a-z_]+",
    "_pP_": r"_p\d+_",
    "_N": r"_\d+",
}
"""What stands for more than one name, and the expression that matches these."""


def listed(file: str) -> list[str]:
    """The names in the first column of the tables of a file's section, as they are written."""
    section = PAGE.read_text(encoding="utf-8").split(f"## `{file}`\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def unlisted(names: Iterable[str], file: str = "metrics.jsonl") -> list[str]:
    """Those of the names that the page does not list."""
    known = [expression(name) for name in listed(file)]
    return sorted(name for name in names if not any(re.fullmatch(one, name) for one in known))


def expression(name: str) -> str:
    """The regular expression of a listed name."""
    for placeholder, matching in PLACEHOLDERS.items():
        name = name.replace(placeholder, matching)
    return name
