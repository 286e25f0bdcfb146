"""Checks of tool calls. The error messages are written for the policy, which can learn from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from envs.tools.runner import Runner
from flash.types import ToolCall

UNREADABLE = (
    "A call of a function begins in your answer, but could not be read. Write it in the form that you were shown, with "
    "its arguments as one JSON object."
)

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class MalformedCallError(Exception):
    """The call cannot be carried out. The message is shown to the policy."""


def read_call(call: ToolCall, runners: Mapping[str, Runner]) -> tuple[Runner, dict[str, Any]]:
    """Return the tool that is called and its arguments, checked against the first level of the tool's schema.

    Raises:
        MalformedCallError: there is no such tool, or the arguments are not a JSON object that fits the schema.
    """
    runner = runners.get(call.name)
    if runner is None:
        raise MalformedCallError(f"there is no function {call.name!r}; there are {', '.join(runners)}")
    try:
        value: object = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedCallError(f"the arguments of {call.name} are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedCallError(f"the arguments of {call.name} must be one JSON object, not {call.arguments[:100]}")
    arguments = cast("dict[str, Any]", value)
    _check(call.name, arguments, runner.parameters)
    return runner, arguments


def _check(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Check arguments against the first level of a schema. Raises MalformedCallError."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    known = ", ".join(properties) or "none"
    for key in schema.get("required", ()):
        if key not in arguments:
            raise MalformedCallError(f"{name} needs the argument {key!r}; its arguments are {known}")
    for key, value in arguments.items():
        if key not in properties:
            if schema.get("additionalProperties") is True or not properties:
                continue
            raise MalformedCallError(f"{name} has no argument {key!r}; its arguments are {known}")
        wanted = properties[key].get("type") if isinstance(properties[key], dict) else None
        if isinstance(wanted, str) and wanted in _KINDS and not _is(value, wanted):
            raise MalformedCallError(f"the argument {key!r} of {name} must be of type {wanted}, but is {value!r:.100}")


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())
