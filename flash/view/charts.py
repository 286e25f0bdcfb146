"""Charts of the overview, in the form that the page gets: the curves of each chart and its explanation.

The page gets `DRAWN` once, at its start, and `values` of new rows every few seconds. All texts and units come from the
table of columns, `flash.observe.columns.table`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from flash.observe.columns.column import Column, capital, without_marks
from flash.observe.columns.table import CHARTS, Chart, Kind
from flash.observe.rundir.summary import number

Row = Mapping[str, Any]
Dash = Literal["solid", "dot", "dash"]
DASHES: Sequence[Dash] = ("solid", "dot", "dash")
"""Dash styles of the first, second and third curve of a chart. They repeat if there are more curves."""

ALWAYS = ("step", "wall_s", "time")
"""Columns that every row needs, for the position of its values on an axis."""
INTERVAL = ("low", "high")
"""Columns with the confidence interval of an evaluation's mean."""


class Line(msgspec.Struct, frozen=True):
    """Curve of a chart."""

    key: str
    """Name of its column. With a star, each column that has any text in place of the star is a curve."""
    name: str
    """Label of the curve if the chart has several. For a column with a star, the label precedes the rest of the
    column's name."""
    dash: Dash
    """Dash style, which distinguishes the curves of a chart."""


class DrawnChart(msgspec.Struct, frozen=True, kw_only=True):
    """Chart with an explanation for people who see it for the first time."""

    id: str
    """Name of the chart, as in `Column.chart`."""
    title: str
    lines: Sequence[Line]
    means: str
    """Meaning of its columns, as whole sentences."""
    worry: str
    """Sentences about what to worry about, and advice."""
    of: Literal["steps", "evals"]
    """Kind of rows from which the chart is drawn."""
    unit: str
    """Unit of the values; empty for shares and numbers without a unit."""
    percent: bool
    """True if the values are shares of 1, which are shown in percent."""
    log: bool
    """True if the axis is logarithmic."""
    from_zero: bool
    """True if a linear axis includes 0."""
    limit: float | None
    """Value beyond which the user should worry, drawn as a line. None: no line."""


def _drawn(chart: Chart) -> DrawnChart:
    """Return a chart in the form that the page gets."""
    drawn_columns = chart.columns
    alone, unit = len(drawn_columns) == 1, drawn_columns[0].unit
    return DrawnChart(
        id=chart.id,
        title=chart.title,
        lines=[
            Line(column.key, "" if alone else column.label, DASHES[place % len(DASHES)])
            for place, column in enumerate(drawn_columns)
        ],
        means=_joined((column, column.means) for column in drawn_columns),
        worry=_joined(
            (column, ". ".join(filter(None, (column.worry, capital(column.helps))))) for column in drawn_columns
        ),
        of="steps" if chart.of == "step" else "evals",
        unit="" if unit == "share" else unit,
        percent=unit == "share",
        log=chart.log,
        from_zero=chart.from_zero,
        # A chart has one line. If several columns have limits, these are upper limits, and the lowest one is drawn.
        limit=min((column.limit for column in drawn_columns if column.limit is not None), default=None),
    )


def _joined(texts: Iterable[tuple[Column, str]]) -> str:
    """Join the texts about the columns of a chart to sentences.

    Equal texts of several columns become one sentence. If several sentences are left, each begins with the labels of
    its columns. Empty texts are left out.
    """
    by_text: dict[str, list[str]] = {}
    for column, text in texts:
        if text:
            by_text.setdefault(text, []).append(column.label)
    sentences: list[str] = []
    for text, labels in by_text.items():
        about = ", ".join(filter(None, labels)) if len(by_text) > 1 else ""
        sentences.append(f"{capital(without_marks(f'{about}: {text}' if about else text))}.")
    return " ".join(sentences)


DRAWN = [_drawn(chart) for chart in CHARTS]
"""Charts, in the order in which they are shown."""


def _column_pattern(of: Kind, more: Sequence[str]) -> re.Pattern[str]:
    """Return an expression that matches the names of the columns that charts of this kind of rows need, and `more`."""
    keys = [line.key for chart in DRAWN if (chart.of == "steps") == (of == "step") for line in chart.lines]
    # Names that an environment gives to its metrics and domains may contain line breaks.
    return re.compile("|".join(re.escape(key).replace(r"\*", "(?s:.+)") for key in (*ALWAYS, *more, *keys)))


_COLUMN_PATTERNS = {"step": _column_pattern("step", ()), "evaluation": _column_pattern("evaluation", INTERVAL)}
"""Expression for the columns that the page needs, by kind of row."""


def values(rows: Iterable[Row], of: Kind) -> list[dict[str, float]]:
    """Return, for each row, the finite numbers that the charts draw. Other columns are not sent to the browser."""
    wanted = _COLUMN_PATTERNS[of]
    return [
        {key: value for key in row if wanted.fullmatch(key) and (value := number(row, key)) is not None} for row in rows
    ]
