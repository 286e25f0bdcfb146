"""An entry of the table of columns: the name of a number in a run's rows, its meaning, and how it is shown.

A *row* is a line of `metrics.jsonl` (one for each step) or of `evals.jsonl` (one for each evaluation on held-out
problems), or the numbers of an engine. The entries are in `training`, `speed` and `table` beside this file. This file
also has the functions that format numbers for people.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from flash.config.tree import AlarmName
from flash.observe.rundir.summary import number

Row = Mapping[str, Any]
"""Numbers by the names of their columns."""

BLANK = "-"
"""Text in place of a number that the row does not have."""
PLACEHOLDERS = {
    "NAME": "((?s:.+))",
    "STAT": "(ratio|weight|deviation|learned|bonus)",
    "WHY": "([a-z_]+)",
    "P": r"(\d+)",
    "N": r"(\d+)",
}
"""Placeholders: words in capitals that stand for several names in a column's name, such as NAME for the name of a
domain. Each has the regular expression, with one group, that matches these names."""
FORMS = {"share": ".1%", "tokens": "short", "tokens/s": "short", "versions": ".1f", "s": ".1f", "GiB": ".2f"}
"""Number format of each unit: a format specification, or `short` for three digits with a suffix such as k."""
OTHER_FORM = ".3f"
"""Number format of a unit that `FORMS` does not have."""
UNIT_WORDS = {"s": "seconds"}
"""Word that names a unit in a sentence, if it differs from the unit as `Column.unit` writes it."""


def by_tokens(row: Row) -> float:
    """Return the number of tokens that a step trained, the weight of the step in the mean of most alarms."""
    return number(row, "trained_tokens") or 0.0


def equally(row: Row) -> float:
    """Return 1, the weight of a step in the mean of an alarm that gives each step equal weight."""
    return 1.0


class Alarm(NamedTuple):
    """Warning about a column: raised if the weighted mean over the last steps is beyond the limit.

    `flash.observe.alarms` computes the mean and raises the alarm.
    """

    name: AlarmName
    """Name in the setting `alarms.reactions`."""
    limit: float
    """Largest healthy value; the smallest one if `below` is true. A share, or a number in the column's unit."""
    message: str
    """Words after the number. `{}` is replaced by the environment that the number is about, if there are several. The
    column's advice follows."""
    weight: Callable[[Row], float] = by_tokens
    """Weight of a row in the mean. It is called only with rows that have the column."""
    number: Callable[[Row], float] | None = None
    """Function that computes from a row the share to compare with the limit. None: the column's own value is compared.
    """
    looks_at: str = ""
    """Words for the compared number in docs/metrics.md. Empty: the column's name."""
    below: bool = False
    """True if the alarm is raised below the limit; False if it is raised above it."""
    min_steps: int = 3
    """Number of steps that this process must have seen before the alarm may be raised. The first steps of a new or
    resumed run differ from the later ones."""

    def is_share(self, column: Column) -> bool:
        """Return True if the compared number is a share of 1. `column` is the alarm's own column."""
        return self.number is not None or column.unit == "share"


class Column(msgspec.Struct, frozen=True, dict=True):  # `dict=True` because `cached_property` needs a `__dict__`
    """Column of a row, or a family of columns: a word of `PLACEHOLDERS` in its name stands for several names."""

    name: str
    """Key of the number in a row, with placeholders in capitals, such as `domain/NAME/reward`."""
    means: str
    """Meaning: a noun phrase that begins with a small letter, and more sentences if needed. No period at the end."""
    unit: str = ""
    """Unit: `share` (of 1), `tokens`, `versions`, `s` (seconds), …; empty if the number has none."""
    form: str = ""
    """Number format: a format specification of Python, or `short`. Empty: the format of the unit in `FORMS`."""
    label: str = ""
    """Short name in legends, tables and on axes."""
    title: str = ""
    """Short name in the line that the terminal prints for each step; empty if the line does not have the column."""
    chart: str = ""
    """Id of the chart of `flash view` that draws the column; empty if none does."""
    worry: str = ""
    """Bad sign in this number: words that complete "worry when"; empty if there is no such sign."""
    helps: str = ""
    """Advice against that bad sign, and words of the alarm about the number; empty if there is none."""
    alarm: Alarm | None = None
    """Alarm about the number; None if there is none."""
    tracker_name: str = ""
    """Name in trackers, as other trainers write it. Empty: the column's own name, under `train/` or `eval/`."""

    @property
    def has_placeholder(self) -> bool:
        """True if the name stands for several columns."""
        return self._pattern.groups > 0

    @property
    def key(self) -> str:
        """Name for the web page: placeholders are replaced by stars, which match any text."""
        return re.sub("[A-Z]+", "*", self.name)

    def placeholder_text(self, key: str) -> str | None:
        """Return the text that a row's `key` has in place of the placeholders; None if the key is not of this column.

        The texts of several placeholders are joined with `_`. A name without placeholders gives an empty text.
        """
        found = self._pattern.fullmatch(key)
        return None if found is None else "_".join(found.groups())

    def value_in(self, row: Row) -> float | None:
        """Return the column's value in a row; None if the row has no number there.

        NaN stands for a value that was not finite. JSON has null for it, and a person must see that it was not finite.
        """
        value = row.get(self.name, "")  # a missing key gives "", because None is the value of a number not finite
        if value is None or isinstance(value, (int, float)):
            return math.nan if (known := number(row, self.name)) is None else known
        return None

    @property
    def meaning(self) -> str:
        """The meaning, with the unit in parentheses if its words do not name the unit."""
        words = re.split(r"[ ,.:;()]+", self.means)
        named = self.unit in ("", *words) or UNIT_WORDS.get(self.unit) in words
        return self.means if named else f"{self.means} ({self.unit})"

    def text(self, value: float | None, percent: str = " %") -> str:
        """Return a value of the column as people read it; `-` for None. `percent` is written after a percentage."""
        if value is None:
            return BLANK
        form = self.form or FORMS.get(self.unit, OTHER_FORM)
        if form == "short":
            return short(value)
        # Python's `%` would write the sign at once after the number. Here the caller chooses what follows.
        return f"{100 * value:{form.replace('%', 'f')}}{percent}" if form.endswith("%") else format(value, form)

    @property
    def limit(self) -> float | None:
        """Limit of the alarm, which charts draw as a line.

        None if there is no alarm, or if it compares another number than the column's.
        """
        alarm = self.alarm
        return None if alarm is None or alarm.number is not None else alarm.limit

    @property
    def axis(self) -> str:
        """Label of a plot's axis: the column's label, and its unit if it has one."""
        # Plots show shares in percent.
        unit = "%" if self.unit == "share" else self.unit
        return f"{self.label}, {unit}" if unit else self.label

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Expression that matches the column's keys. It has a group for each placeholder."""
        return re.compile(re.sub("[A-Z]+", lambda word: PLACEHOLDERS[word[0]], re.escape(self.name)))


class ColumnGroup(NamedTuple):
    """Columns that have a table together in docs/metrics.md."""

    about: str
    """Sentence above the table; empty if the section says enough."""
    columns: tuple[Column, ...]


def without_marks(text: str) -> str:
    """Return a text of the documents without its Markdown marks, for the terminal or a web page."""
    return text.replace("`", "").replace("\\|", "|")


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


# -- numbers as people read them ---------------------------------------------------------------------------------------


def formatted(value: float | None, form: str) -> str:
    """Return a number in a format specification of Python; `-` for None."""
    return BLANK if value is None else format(value, form)


def fixed(row: Mapping[str, Any], key: str, digits: int) -> str:
    """Return the number under `key` with this many decimals; `-` if the row has none.

    `nan` and `inf` are shown, because a person must see them.
    """
    # An integer may be too large to be formatted.
    value = row[key] if isinstance(row.get(key), float) else number(row, key)
    return formatted(value, f".{digits}f")


def short(value: float | None) -> str:
    """Return a number with three digits and a suffix, such as 9.81k; `-` for None.

    A number below 1000 is rounded to a whole number.
    """
    if value is None:
        return BLANK
    for suffix, scale in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        # 999.5, 99.95 and 9.995 are the numbers from which rounding would add a fourth digit.
        if abs(value) < 999.5 * scale:
            scaled = value / scale
            decimals = 0 if abs(scaled) >= 99.95 or not suffix else 1 if abs(scaled) >= 9.995 else 2
            return f"{scaled:.{decimals}f}{suffix}"
    return f"{value:.2e}"  # a number that is larger than any unit, or not finite


def clock(seconds: float) -> str:
    """Return seconds as `m:ss`, from an hour on as `h:mm:ss`; `-` if they are not finite."""
    if not math.isfinite(seconds):
        return BLANK
    # A time from another machine, whose clock is ahead, may be in the future: a negative duration is 0.
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
