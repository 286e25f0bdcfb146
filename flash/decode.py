"""Strict conversion of plain values, as TOML gives them, into annotated types.

An integer is accepted for a number; nothing else is coerced. What does not fit becomes a `Problem`: the key's path,
what was expected, what was found. Problems are collected, so that one error can name them all.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from flash.errors import ConfigError

LONGEST_VALUE = 60
"""Characters of a wrong value that a message repeats."""


class Problem(NamedTuple):
    """One thing wrong with the input."""

    key: str
    """Dotted path of the key."""
    message: str


def mismatch(key: str, annotation: Any, value: Any) -> Problem:
    """The problem of a value that is not of its type."""
    return Problem(key, f"expected {describe(annotation)}, got {show(value)}")


def convert(value: Any, annotation: Any) -> Any:
    """The value as its annotated type.

    Raises:
        msgspec.ValidationError: the value does not fit, or is a number that is not finite.
        TypeError: no plain value can be checked against this annotation.
    """
    if not _finite(value):
        raise msgspec.ValidationError("not a finite number")
    return msgspec.convert(value, annotation)


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, list) or all(_finite(item) for item in value)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that a misspelt one most resembles, or None where none is near."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return near[0] if near else None


def suggest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?` for the nearest valid name, or nothing."""
    near = nearest(name, valid)
    return f"; did you mean `{prefix}{near}`?" if near else ""


def refuse(problems: Sequence[Problem], origins: Mapping[str, str] = MappingProxyType({})) -> ConfigError:
    """One error for all problems; `origins` says of a key where its value was written."""
    lines: list[str] = []
    for key, message in problems:
        place = f" ({origins[key]})" if key in origins else ""
        lines.append(f"`{key}`{place}: {message}")
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} problems:" + "".join(f"\n  - {line}" for line in lines))


def show(value: Any) -> str:
    """A value as TOML writes it, shortened."""
    if isinstance(value, dict):
        return "a table"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def describe(annotation: Any) -> str:
    """A type in words: `an integer above 0`, `"a" or "b"`, `a list of …`."""
    try:
        return _words(inspect.type_info(annotation))
    except TypeError:  # msgspec cannot tell such values apart, for example those of `str | Path`
        return str(annotation)


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.IntType():
            return "an integer" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.StrType(pattern=pattern):
            return f"text matching {pattern}" if pattern else "text"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return _either([show(value) for value in values])
        case inspect.EnumType(cls=cls):
            return _either([show(member.value) for member in cls])
        case inspect.UnionType(types=types):
            return _either([_words(one) for one in types if not isinstance(one, inspect.NoneType)])
        case inspect.CollectionType(item_type=item):
            return f"a list, each item {_words(item)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}: [{', '.join(map(_words, items))}]"
        case inspect.DictType() | inspect.StructType():
            return "a table"
        case inspect.CustomType(cls=cls):
            return f"a {cls.__name__}"
        case _:
            return "any value" if isinstance(info, inspect.AnyType) else type(info).__name__.removesuffix("Type")


def _bounds(number: inspect.IntType | inspect.FloatType) -> str:
    if number.ge is not None and number.le is not None:
        return f" from {number.ge:g} to {number.le:g}"
    limits = [
        f"{word} {limit:g}"
        for word, limit in (
            ("above", number.gt),
            ("at least", number.ge),
            ("below", number.lt),
            ("at most", number.le),
        )
        if limit is not None
    ]
    return " " + " and ".join(limits) if limits else ""


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
