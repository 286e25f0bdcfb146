"""Decode: strict conversion of plain values, as TOML gives them, to annotated types.

An integer is accepted as a number; nothing else is converted implicitly. A value that does not fit becomes a
`ConfigProblem` with the path of its key, the expected type and the value. Problems are collected, so that one error can
name all of them.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin

import msgspec
from msgspec import inspect

from flash.config.section import MOST, Section
from flash.errors import ConfigError

NONE = "none"
"""Text that stands for None, because TOML has no null value."""

OVERRIDE = "setting"
"""Name of the source of a key that an override has set, in `origins` and in error messages. The source of any other key
is the path of its file."""
RECORDED = "config.toml"
"""Name of the file in which a run records its configuration."""

NO_KEY = "no such key"
"""Error message for a name that no section has."""

_PART = "with a part "
"""Beginning of the phrase of `_fault` for a list or table whose part is at fault."""

LONGEST_VALUE = 60
"""Largest number of characters of a wrong value that an error message repeats."""


class ConfigProblem(NamedTuple):
    """Fault of the input: the key and the error message."""

    key: str
    """Dotted path of the key."""
    message: str
    """Error message, which follows the key."""


def _mismatch(key: str, annotation: Any, value: Any) -> ConfigProblem:
    """Return the problem of a value of the key that does not fit its annotated type."""
    fault, expected = _fault(value), describe(annotation)
    # Descriptions of integers do not mention MOST, so the message would not say what is wrong.
    if fault is None and isinstance(value, int) and value > MOST and "integer" in expected:
        fault = f"which is above {MOST}"
    return ConfigProblem(key, f"expected {expected}, got {show(value)}" + (f", {fault}" if fault else ""))


def _convert(value: Any, annotation: Any) -> Any:
    """Convert a value to its annotated type. Raises msgspec.ValidationError if it does not fit or can never be used."""
    if (fault := _fault(value)) is not None:
        raise msgspec.ValidationError(fault)
    return msgspec.convert(value, annotation)


def examine(value: Any, annotation: Any, key: str) -> tuple[Any, list[ConfigProblem]]:
    """Convert a value to its annotated type. Returns the converted value and its problems. With problems the value is
    None or incomplete.

    `key` is the dotted path of the value. `flash.config.load` calls this for the whole configuration, with an empty
    `key`. Problems in nested tables and in lists of tables have the path of the inner key. The text `none` becomes None
    if the key may be None and may not be text. A value whose annotation msgspec cannot check is returned unchanged.
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
    if isinstance(value, dict) and (names := names_in(annotation)):
        places = dict.fromkeys(names, Place(get_args(annotation)[1], required=False))
        return examine_table(cast("dict[str, Any]", value), places, key, lambda name: NO_KEY + suggest(name, names))
    try:
        return _convert(value, annotation), []
    except msgspec.ValidationError:
        return None, [_mismatch(key, annotation, value)]
    except TypeError:  # an annotation that msgspec cannot check, such as a callable
        return value, []


def tables_in(annotation: Any) -> dict[str, type[msgspec.Struct]]:
    """Return the structs that a value of this type may be, by their tag: the name of the kind of table. A struct
    without a tag, of which there is only one kind, has the empty text as its key. Empty if the type has no struct."""
    union = get_origin(annotation) in (Union, UnionType)
    return {
        str(candidate.__struct_config__.tag or ""): candidate
        for candidate in (get_args(annotation) if union else (annotation,))
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct)
    }


def names_in(annotation: Any) -> tuple[str, ...]:
    """Return the names that the keys of a table of this type may have. Empty if it is no table, or takes all names."""
    named = get_origin(annotation) is dict and get_origin(get_args(annotation)[0]) is Literal
    return get_args(get_args(annotation)[0]) if named else ()


def tag_field(kinds: Mapping[str, type[msgspec.Struct]]) -> str | None:
    """Return the name of the key that distinguishes these kinds of tables, such as `kind`; None for a single struct
    without a tag. `kinds` is a result of `tables_in`, and not empty."""
    return next(iter(kinds.values())).__struct_config__.tag_field


class Place(NamedTuple):
    """Place for a value in a table."""

    annotation: Any
    """Annotated type of the value."""
    required: bool
    """True if the value must be given."""


def examine_table(
    table: Mapping[str, Any], places: Mapping[str, Place], key: str, unknown: Callable[[str], str]
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Convert the values of a table. Returns the values by name, without those that are not given, and all problems.

    Called for tables of the configuration, and for the options of environments and objectives. A value with a problem
    is None or incomplete, as `examine` returns it.

    Args:
        table: the given values, by name.
        places: the permitted values, by name.
        key: the path of the table.
        unknown: returns the error message for a name that has no place.
    """
    prefix = f"{key}." if key else ""
    problems = [ConfigProblem(prefix + name, unknown(name)) for name in table if name not in places]
    values: dict[str, Any] = {}
    for name, place in places.items():
        # If a required table is missing, the error names its missing keys: it is examined as an empty table.
        given = table.get(name, {} if place.required and section_in(place.annotation) else msgspec.UNSET)
        if given is not msgspec.UNSET:
            values[name], wrong = examine(given, place.annotation, prefix + name)
            problems += wrong
        elif place.required:
            problems.append(ConfigProblem(prefix + name, f"is missing; expected {describe(place.annotation)}"))
    return values, problems


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, optional or not; None if the field holds none."""
    found = tables_in(annotation).get("")
    return found if found is not None and issubclass(found, Section) else None


def _table(table: dict[str, Any], kinds: dict[str, type[msgspec.Struct]], key: str) -> tuple[Any, list[ConfigProblem]]:
    """Convert a table to the struct of its kind, with its values checked. Returns the struct and all problems.

    The struct is None if there are problems. `kinds`: the possible structs, from `tables_in`; `key`: path of the table.
    """
    tag = tag_field(kinds)
    kind = str(table.get(tag, "")) if tag is not None else ""
    if kind not in kinds:
        got = f"got {show(table[tag])}{suggest(kind, kinds)}" if tag in table else "which is missing"
        return None, [ConfigProblem(f"{key}.{tag}", f"expected {_either([show(name) for name in kinds])}, {got}")]
    struct = kinds[kind]
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    places = {name: Place(field.type, field.required) for name, field in fields.items()}

    def unknown(name: str) -> str:
        """Return the error message for a name that the table has no place for."""
        return NO_KEY if issubclass(struct, Section) else _no_option(name, kind, kinds, places)

    given = {name: value for name, value in table.items() if name != tag}
    values, problems = examine_table(given, places, key, unknown)
    if problems:
        return None, problems
    try:
        return struct(**{fields[name].name: value for name, value in values.items()}), []
    except ValueError as error:  # the struct's `__post_init__` refuses the combination of values
        return None, [ConfigProblem(key, str(error))]


def _no_option(name: str, kind: str, kinds: dict[str, type[msgspec.Struct]], fields: Iterable[str]) -> str:
    """Return the error message for the option `name`, which a table of this kind does not have. It may name the kinds
    that have it.

    Args:
        name: the unknown option.
        kind: tag of the table; empty if there is only one kind.
        kinds: structs of all kinds that could be at this place, by tag.
        fields: names of the options that the table has.
    """
    own = ", ".join(f"`{field}`" for field in fields) or "none"
    others = [show(other) for other, struct in kinds.items() if name in struct.__struct_fields__]
    hint = f"; it belongs to {_either(others)}" if others else suggest(name, fields)
    return f"{show(kind) if kind else 'this table'} has no such option{hint} (its options: {own})"


def _fault(value: Any) -> str | None:
    """Return why a value, or a part of it, cannot be used at all; None if it can.

    Such values fit a type, for example that of an option without an annotation. But they could not be written to JSON,
    passed on to another process, or used as a path. They would fail there, far from the key.
    """
    match value:
        case float() if not math.isfinite(value):
            return "which is not a finite number"
        case int() if abs(value) >= 2**63:
            return "which does not fit into 64 bits"
        case str() if "\0" in value or not _is_unicode(value):
            return "which contains characters that are not text"
        case list() | dict():
            inner = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
            fault = next((fault for item in inner if (fault := _fault(item)) is not None), None)
            return fault and _PART + fault.removeprefix(_PART)  # a deeper part has the phrase already: say it once
        case _:
            return None


def _is_unicode(text: str) -> bool:
    """Return False for a text with lone surrogates, which a command line may contain and no file can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is most similar to a misspelt `name`; None if none is similar."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return near[0] if near else None


def suggest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?` for the most similar valid name, as the end of an error message; empty if there is
    none. `prefix` stands before the shown name."""
    near = nearest(name, valid)
    return f"; did you mean `{prefix}{near}`?" if near else ""


def refuse(problems: Sequence[ConfigProblem], origins: Mapping[str, str] = MappingProxyType({})) -> ConfigError:
    """Return one error for all problems, which the caller raises.

    `origins` gives for each dotted key the source in which its value was written, for the message.
    """
    lines: list[str] = []
    for key, message in problems:
        # The key of an item of a list, such as `algorithm.shaping[0].limit`, has the source of the list.
        whole = key if key in origins else key.partition("[")[0]
        place = f" ({origins[whole]})" if whole in origins else ""
        lines.append(f"`{key}`{place}: {message}")
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} problems:" + "".join(f"\n  - {line}" for line in lines))


def show(value: Any) -> str:
    """Return a value as text for error messages, roughly in TOML notation. A long text is cut to LONGEST_VALUE
    characters, in each value of a struct apart."""
    if isinstance(value, msgspec.Struct):
        built = msgspec.to_builtins(value)
        return "{" + ", ".join(f"{name} = {show(one)}" for name, one in built.items()) + "}"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, int) and abs(value) >= 2**64:  # its digits would fill the message
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, date | time):
        return f"{value}, which is a date or a time in TOML: put text in quotes"
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # an integer with more digits than Python converts to text
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def describe(annotation: Any) -> str:
    """Describe a type in words: `an integer above 0`, `"a" or "b"`, `a list of …`."""
    try:
        return _words(inspect.type_info(annotation))
    except TypeError:  # msgspec cannot distinguish such values, for example those of `str | Path`
        return str(annotation)


def _words(info: inspect.Type, beside: Sequence[inspect.Type] = ()) -> str:
    """Describe a type in words.

    `beside` holds all types of the union that this type belongs to, so that its tagged tables are described as one.
    """
    match info:
        case inspect.IntType():
            return "an integer" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.StrType(pattern=str(pattern)):
            return f"text matching {pattern}"
        case inspect.StrType(min_length=least, max_length=most):
            return ("non-empty text" if least else "text") + (f" of at most {most} characters" if most else "")
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
    """Return the bounds of a number in words, with a leading space; empty if it has none."""
    highest = number.le if number.le != MOST else None  # MOST is mentioned only in the message for a larger value
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
    """Return a bound of a number as text."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _either(words: list[str]) -> str:
    """Return `A, B or C` for the words A, B and C; one word is returned alone. `words` is not empty."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


# -- nested tables ----------------------------------------------------------------------------------------------------


def take_out(settings: Mapping[str, Any], key: str) -> None:
    """Delete a dotted key from nested tables. The key must be there."""
    table, name = table_of(settings, key)
    del table[name]


def table_of(settings: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the table of a dotted key in nested tables, and the name of the key in it. The table must be there."""
    *tables, name = key.split(".")
    table: Any = settings
    for outer in tables:
        table = table[outer]
    return table, name
