"""Functions that an agent lets the policy call: as requests give them, as messages call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flash.service.errors import MASKED, ApiError, in_short, unsupported
from flash.types import Tool, ToolCall


class Function(msgspec.Struct):
    """A function as a request describes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """That calls follow the schema: nobody enforces it here, and what does not is counted."""


class GivenTool(msgspec.Struct):
    """One of a request's tools."""

    type: str
    function: Function | None = None


class GivenFunction(msgspec.Struct):
    """The function that a call names, and its arguments."""

    name: str
    arguments: str | dict[str, Any] | None = ""
    """JSON; some clients give the object itself."""


class GivenCall(msgspec.Struct):
    """One call of a message."""

    function: GivenFunction
    id: str | None = ""
    type: str | None = "function"
    """Null in what some clients put together from the chunks of a stream."""


def offered(given: Sequence[GivenTool]) -> tuple[Tool, ...]:
    """Tools as chat templates take them.

    Raises:
        ApiError: one of them is no function.
    """
    for tool in given:
        if tool.type == "function" and tool.function is None:
            raise unsupported(
                "tools", 'one is {"type": "function", "function": {"name": …}}, and this has no `function`'
            )
        if tool.type != "function":
            raise unsupported("tools", f"there are only functions, but one is {tool.type[:100]!r}")
    return tuple(described(tool.function) for tool in given if tool.function is not None)


def described(function: Function) -> Tool:
    """A function as chat templates take it."""
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = function.parameters
    return {"type": "function", "function": shown}


def may_call(choice: Any) -> bool:
    """What `tool_choice` says: whether calls are looked for.

    Raises:
        ApiError: it would force a call, or is no choice.
    """
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    if choice == "required" or isinstance(choice, Mapping):
        raise unsupported("tool_choice", f"to force a call {MASKED}; there are `auto` and `none`")
    raise ApiError(400, f"`tool_choice` must be `auto` or `none`, but is {in_short(choice)}.", None, "tool_choice")


def calls_of(given: Sequence[GivenCall]) -> tuple[ToolCall, ...]:
    """Return the calls of a message. Raises ApiError for a call that is not of a function."""
    for call in given:
        if call.type not in (None, "function"):
            raise unsupported("messages", f"calls are of functions, but one is {call.type[:100]!r}")
    return tuple(ToolCall(call.id or "", call.function.name, as_json(call.function.arguments)) for call in given)


def as_json(arguments: str | dict[str, Any] | None) -> str:
    """Return the arguments of a call as the text that they are in a conversation."""
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""


def shown(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls as an answer has them."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def is_well_formed(call: ToolCall, tools: Sequence[Tool]) -> bool:
    """Whether a call is of one of these functions, and its arguments are a JSON object."""
    if all(tool["function"]["name"] != call.name for tool in tools):
        return False
    try:
        return isinstance(msgspec.json.decode(call.arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
