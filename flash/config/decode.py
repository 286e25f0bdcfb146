"""Strict conversion of plain values, as TOML gives them, into annotated types.

An integer is accepted for a number; nothing else is coerced. What does not fit becomes a `ConfigProblem`: the key's
path, what was expected, what was found. Problems are collected, so that one error can name them all.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Any, NamedTuple, Union, cast, get_args, get_origin

import msgspec
from msgspec import inspect

from flash.config.section import MOST, Section
from flash.errors import ConfigError

NONE = "none"
"""Stands for None, which TOML has no word for."""

NO_KEY = "no such key"
"""What is wrong with a name that no section has."""

_PART = "with a part "

LONGEST_VALUE = 60
"""Characters of a wrong value that a message repeats."""


class ConfigProblem(NamedTuple):
    """One thing wrong with the input."""

    key: str
    """Dotted path of the key."""
    message: str


def _mismatch(key: str, annotation: Any, value: Any) -> ConfigProblem:
    fault = _fault(value)
    if fault is None and isinstance(value, int) and value > MOST:
        fault = f"which is above {MOST}"
    return ConfigProblem(key, f"expected {describe(annotation)}, got {show(value)}" + (f", {fault}" if fault else ""))


def _convert(value: Any, annotation: Any) -> Any:
    if (fault := _fault(value)) is not None:
        raise msgspec.ValidationError(fault)
    return msgspec.convert(value, annotation)


def examine(value: Any, annotation: Any, key: str) -> tuple[Any, list[ConfigProblem]]:
    """The value as its annotated type, and what is wrong with it, each by its key inside of tables and lists of them.

    The text `none` gives None to a key that may be None and may not be text.
    """
    if value == NONE and NoneType in get_args(annotation) and str not in get_args(annotation):
        return None, []
    if isinstance(value, list) and get_origin(annotation) is list:
        (item_type,) = get_args(annotation)
        if tables_in(item_type):
            items = cast("list[Any]", value)
            found = [examine(item, item_type, f"{key}[{place}]") for place, item in enumerate(items)]
            return [item for item, _ in found], [problem for _, problems in found for problem in problems]
    if isinstance(value, dict) and (kinds := tables_in(annotation)):
        return _table(cast("dict[str, Any]", value), kinds, key)
    try:
        return _convert(value, annotation), []
    except msgspec.ValidationError:
        return None, [_mismatch(key, annotation, value)]
    except TypeError:  # an annotation that says nothing about plain values, such as a callable
        return value, []


def tables_in(annotation: Any) -> dict[str, type[msgspec.Struct]]:
    """The structs that a value of this type may be, by their tag; one without a tag under the empty text."""
    union = get_origin(annotation) in (Union, UnionType)
    return {
        str(candidate.__struct_config__.tag or ""): candidate
        for candidate in (get_args(annotation) if union else (annotation,))
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct)
    }


def tag_field(kinds: Mapping[str, type[msgspec.Struct]]) -> str | None:
    """The key that tells these structs apart; None for a single one without a tag."""
    return next(iter(kinds.values())).__struct_config__.tag_field


class Place(NamedTuple):
    """Of a value in a table."""

    annotation: Any
    required: bool


def examine_table(
    table: Mapping[str, Any], places: Mapping[str, Place], key: str, unknown: Callable[[str], str]
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The values of a table, checked; `unknown` says of a name that has no place what is wrong with it."""
    prefix = f"{key}." if key else ""
    problems = [ConfigProblem(prefix + name, unknown(name)) for name in table if name not in places]
    values: dict[str, Any] = {}
    for name, place in places.items():
        # Of a table that has to be there its own missing keys are named.
        given = table.get(name, {} if place.required and section_in(place.annotation) else msgspec.UNSET)
        if given is not msgspec.UNSET:
            values[name], wrong = examine(given, place.annotation, prefix + name)
            problems += wrong
        elif place.required:
            problems.append(ConfigProblem(prefix + name, f"is missing; expected {describe(place.annotation)}"))
    return values, problems


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds, optional or not."""
    found = tables_in(annotation).get("")
    return found if found is not None and issubclass(found, Section) else None


def _table(table: dict[str, Any], kinds: dict[str, type[msgspec.Struct]], key: str) -> tuple[Any, list[ConfigProblem]]:
    """The struct of the table's kind, with its values checked."""
    tag = tag_field(kinds)
    kind = str(table.get(tag, "")) if tag is not None else ""
    if kind not in kinds:
        got = f"got {show(table[tag])}{suggest(kind, kinds)}" if tag in table else "which is missing"
        return None, [ConfigProblem(f"{key}.{tag}", f"expected {_either([show(name) for name in kinds])}, {got}")]
    struct = kinds[kind]
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    places = {name: Place(field.type, field.required) for name, field in fields.items()}

    def unknown(name: str) -> str:
        return NO_KEY if issubclass(struct, Section) else _no_option(name, kind, kinds, places)

    given = {name: value for name, value in table.items() if name != tag}
    values, problems = examine_table(given, places, key, unknown)
    if problems:
        return None, problems
    try:
        return struct(**{fields[name].name: value for name, value in values.items()}), []
    except ValueError as error:
        return None, [ConfigProblem(key, str(error))]


def _no_option(name: str, kind: str, kinds: dict[str, type[msgspec.Struct]], fields: Iterable[str]) -> str:
    """What is wrong with an option that a table of this kind does not have, and where it may belong."""
    own = ", ".join(f"`{field}`" for field in fields) or "none"
    others = [show(other) for other, struct in kinds.items() if name in struct.__struct_fields__]
    hint = f"; it belongs to {_either(others)}" if others else suggest(name, fields)
    return f"{show(kind) if kind else 'this table'} has no such option{hint} (its options: {own})"


def _fault(value: Any) -> str | None:
    """Why nothing can use a value, or a part of it."""
    match value:
        case float() if not math.isfinite(value):
            return "which is not a finite number"
        case int() if abs(value) >= 2**63:
            return "which does not fit into 64 bits"
        case str() if "\0" in value or not _is_unicode(value):
            return "which holds characters that no text has"
        case list() | dict():
            inner = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
            fault = next((fault for item in inner if (fault := _fault(item)) is not None), None)
            return fault and _PART + fault.removeprefix(_PART)
        case _:
            return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that a misspelt one most resembles, or None where none is near."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return near[0] if near else None


def suggest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?` for the nearest valid name, or nothing."""
    near = nearest(name, valid)
    return f"; did you mean `{prefix}{near}`?" if near else ""


def refuse(problems: Sequence[ConfigProblem], origins: Mapping[str, str] = MappingProxyType({})) -> ConfigError:
    """One error for all problems; `origins` says of a key where its value was written."""
    lines: list[str] = []
    for key, message in problems:
        whole = key if key in origins else key.partition("[")[0]
        place = f" ({origins[whole]})" if whole in origins else ""
        lines.append(f"`{key}`{place}: {message}")
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} problems:" + "".join(f"\n  - {line}" for line in lines))


def show(value: Any) -> str:
    """A value as TOML writes it, shortened."""
    if isinstance(value, msgspec.Struct):
        built = msgspec.to_builtins(value)
        return "{" + ", ".join(f"{name} = {show(one)}" for name, one in built.items()) + "}"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a number of {value.bit_length()} bits"
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # a number of more digits than Python writes
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def describe(annotation: Any) -> str:
    """A type in words: `an integer above 0`, `"a" or "b"`, `a list of …`."""
    try:
        return _words(inspect.type_info(annotation))
    except TypeError:  # msgspec cannot tell such values apart, for example those of `str | Path`
        return str(annotation)


def _words(info: inspect.Type, beside: Sequence[inspect.Type] = ()) -> str:
    """`beside`: all types of the union that this one stands in, so that its tagged tables are described as one."""
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
            return _either(list(dict.fromkeys(_words(one, types) for one in types if one != inspect.NoneType())))
        case inspect.CollectionType(item_type=item):
            return f"a list, each item {_words(item)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}: [{', '.join(map(_words, items))}]"
        case inspect.StructType(tag_field=str(tag)):
            kinds = [show(one.tag) for one in beside or (info,) if isinstance(one, inspect.StructType)]
            return f"a table with {tag} = {_either(kinds)}"
        case inspect.DictType() | inspect.StructType():
            return "a table"
        case inspect.CustomType(cls=cls):
            return f"a {cls.__name__}"
        case _:
            return "any value" if isinstance(info, inspect.AnyType) else type(info).__name__.removesuffix("Type")


def _bounds(number: inspect.IntType | inspect.FloatType) -> str:
    highest = number.le if number.le != MOST else None  # not said in advance, but of what is above it
    if number.ge is not None and highest is not None:
        return f" from {_limit(number.ge)} to {_limit(highest)}"
    limits = [
        f"{word} {_limit(limit)}"
        for word, limit in (
            ("above", number.gt),
            ("at least", number.ge),
            ("below", number.lt),
            ("at most", highest),
        )
        if limit is not None
    ]
    return " " + " and ".join(limits) if limits else ""


def _limit(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
