"""What the table of columns lists, for tests that compare it with the rows of runs."""

from __future__ import annotations

from collections.abc import Iterable

from flash.observe.columns.table import Kind, column_of


def unlisted(names: Iterable[str], of: Kind = "step") -> list[str]:
    """Those of the names that it does not have."""
    return sorted(name for name in names if column_of(name, of) is None)
