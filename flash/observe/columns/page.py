"""The tables of docs/metrics.md, made from the table of columns: `make docs` puts them between its marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from flash.observe.columns.column import LIMITS, Column, ColumnGroup
from flash.observe.columns.table import GROUPS, columns

MARKED = re.compile(r"(?s)(<!-- made: (\w+) -->\n).*?(<!-- end -->)")
"""What is made anew, between its marks."""


def page(text: str) -> str:
    """The page, with its tables as they are now."""
    return MARKED.sub(lambda found: "\n".join([found[1], *TABLES[found[2]](), found[3]]), text)


def _described(groups: Sequence[ColumnGroup]) -> Iterator[str]:
    """A table for each group."""
    for group in groups:
        if group.about:
            yield f"{group.about}\n"
        yield "| name | meaning |\n|---|---|"
        for meaning, columns_of in groupby(group.columns, lambda column: column.meaning):
            yield f"| {', '.join(f'`{column.name}`' for column in columns_of)} | {meaning} |"
        yield ""


def _worries() -> Iterator[str]:
    """Columns that say when to worry: those with the same words have a row together."""
    together: dict[tuple[str, str], list[str]] = {}
    for column in (*columns("step"), *columns("evaluation")):
        if column.worry:
            together.setdefault((column.worry, column.helps), []).append(f"`{column.name}`")
    yield "| watch | worry when | what helps |\n|---|---|---|"
    yield from (f"| {', '.join(names)} | {worry} | {helps} |" for (worry, helps), names in together.items())
    yield ""


def _alarms() -> Iterator[str]:
    """What helps stands once: with the column's worry, where it has one."""
    yield "| alarm | looks at | default | what helps, if not as above |\n|---|---|---|---|"
    for column in columns("step"):
        if (alarm := column.alarm) is not None:
            looks_at, helps = alarm.looks_at or f"`{column.name}`", "" if column.worry else column.helps
            yield f"| `{alarm.name}` | {looks_at} | {_default(column)} | {helps} |"
    yield ""


def _default(column: Column) -> str:
    assert column.alarm is not None
    limit: float | None = getattr(LIMITS, column.alarm.name)
    if limit is None:
        return "off"
    shown = f"{100 * limit:g} %" if column.alarm.is_share(column) else f"{limit:g} {column.unit}".rstrip()
    return f"{'below' if column.alarm.below else 'above'} {shown}"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "watch": _worries,
    "alarms": _alarms,
    "steps": lambda: _described(GROUPS["step"]),
    "evaluations": lambda: _described(GROUPS["evaluation"]),
    "engines": lambda: _described(GROUPS["engine"]),
}
"""By their marks."""
