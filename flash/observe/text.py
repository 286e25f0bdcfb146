"""Formats of numbers and texts for the terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

BLANK = "-"
"""Text in place of a number that the row does not have."""


def width(text: str) -> int:
    """Return the terminal columns of a text: wide characters take two, combining characters none."""
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text
    )


def plain(value: float | None, form: str) -> str:
    return BLANK if value is None else format(value, form)


def fixed(row: Mapping[str, Any], key: str, digits: int) -> str:
    """Return the number under `key` with fixed digits. `nan` and `inf` are shown, because a person must see them."""
    value = row.get(key)
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else BLANK


def short(value: float | None) -> str:
    """Return a number with three digits and a suffix, such as 9.81k."""
    if value is None:
        return BLANK
    for unit, scale in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if abs(value) < 999.5 * scale or unit == "G":
            scaled = value / scale
            digits = 0 if abs(scaled) >= 99.95 or not unit else 1 if abs(scaled) >= 9.995 else 2
            return f"{scaled:.{digits}f}{unit}"
    raise AssertionError("the last unit takes all")


def clock(seconds: float) -> str:
    """Return seconds as `m:ss`; from an hour on as `h:mm:ss`."""
    if not math.isfinite(seconds):
        return BLANK
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
