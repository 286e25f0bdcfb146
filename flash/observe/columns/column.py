"""An entry of the table of columns: what a column of a run's rows is called, means, and looks like."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from flash.config.observe import AlarmName, AlarmsConfig
from flash.observe.rundir.summary import number
from flash.observe.text import BLANK, short

Row = Mapping[str, Any]

LIMITS = AlarmsConfig()
"""From where on a run warns, unless its configuration says otherwise."""
PLACEHOLDERS = {
    "NAME": "((?s:.+))",
    "STAT": "(ratio|weight|deviation|learned|bonus)",
    "WHY": "([a-z_]+)",
    "P": r"(\d+)",
    "N": r"(\d+)",
}
"""What stands for more than one name, in capitals as nothing else, and the expression that matches these."""
FORMS = {"share": ".1%", "tokens": "short", "tokens/s": "short", "versions": ".1f", "s": ".1f", "GiB": ".2f"}
"""How numbers of a unit look."""
OTHER_FORM = ".3f"


def tokens(row: Row) -> float:
    """Those that were trained."""
    return number(row, "trained_tokens") or 0.0


def steps(row: Row) -> float:
    """Each row is one."""
    return 1.0


class Alarm(NamedTuple):
    """A warning about a column, when its mean over some steps is beyond the limit of this name in `[alarms]`."""

    name: AlarmName
    says: str
    """After the number, with braces for which of several kinds; what helps comes behind it."""
    weight: Callable[[Row], float] = tokens
    """Of a row that has the column."""
    number: Callable[[Row], float] | None = None
    """A share of something; None: the column itself."""
    looks_at: str = ""
    """Where it is not the column itself."""
    below: bool = False
    """Whether it is given below its limit, and not above."""
    fewest: int = 3
    """Steps before it may be given: those at the start of a run, or of one that goes on, are not like the others."""

    def is_share(self, column: Column) -> bool:
        """Whether the number of this alarm, which is that column's, is one."""
        return self.number is not None or column.unit == "share"


class Column(msgspec.Struct, frozen=True, dict=True):
    """One column, or several of a kind each, whose name has a word in capitals in the place of the kind."""

    name: str
    means: str
    unit: str = ""
    """`share` of 1, `tokens`, `versions`, `s` of seconds, …"""
    form: str = ""
    """How it looks where that of its unit is not the right one: a format, or `short`."""
    label: str = ""
    """What people read beside it: in legends, tables and on axes."""
    title: str = ""
    """Above it in the terminal's line of a step."""
    chart: str = ""
    """The one of `flash view` that draws it."""
    worry: str = ""
    """When to."""
    helps: str = ""
    """What to do then."""
    alarm: Alarm | None = None
    tracked: str = ""
    """Its name in trackers, as trainers of this field write it; otherwise its own, under `train/` or `eval/`."""

    @property
    def of_kinds(self) -> bool:
        return self._shape.groups > 0

    @property
    def key(self) -> str:
        """Its name; of one whose kinds come last, with a star in their place."""
        return re.sub(r"[A-Z]+$", "*", self.name)

    def kind(self, key: str) -> str | None:
        """Which of its kinds a column of a row is, empty where it has none; None: it is another column."""
        found = self._shape.fullmatch(key)
        return None if found is None else "_".join(found.groups())

    def of(self, row: Row) -> float | None:
        """Its value in a row, NaN for what is not finite: JSON has null for it, and a person must see that."""
        value = row.get(self.name, "")
        if value is None or isinstance(value, (int, float)):
            return math.nan if (known := number(row, self.name)) is None else known
        return None

    @property
    def meaning(self) -> str:
        """What it means, with its unit where the words do not have it."""
        return self.means if self.unit in ("", *re.split(r"[ ,]+", self.means)) else f"{self.means} ({self.unit})"

    def text(self, value: float | None, percent: str = " %") -> str:
        """A value as people read it, with what stands behind a percentage."""
        if value is None:
            return BLANK
        form = self.form or FORMS.get(self.unit, OTHER_FORM)
        if form == "short":
            return short(value) if math.isfinite(value) else str(value)
        return f"{100 * value:{form.replace('%', 'f')}}{percent}" if form.endswith("%") else format(value, form)

    @property
    def limit(self) -> float | None:
        """From where on a run warns of the column itself."""
        alarm = self.alarm
        return None if alarm is None or alarm.number is not None else getattr(LIMITS, alarm.name)

    @property
    def axis(self) -> str:
        """Its label, and its unit if that says something."""
        unit = "%" if self.unit == "share" else self.unit
        return f"{self.label}, {unit}" if unit else self.label

    @cached_property
    def _shape(self) -> re.Pattern[str]:
        return re.compile(re.sub("[A-Z]+", lambda word: PLACEHOLDERS[word[0]], re.escape(self.name)))


class ColumnGroup(NamedTuple):
    """Columns that are described together."""

    about: str
    columns: tuple[Column, ...]


def without_marks(text: str) -> str:
    """Of a text for documents what a terminal or a page shows."""
    return text.replace("`", "").replace("\\|", "|")


def capital(text: str) -> str:
    """A text as a sentence begins."""
    return f"{text[:1].upper()}{text[1:]}"
