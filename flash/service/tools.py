"""Functions that an agent lets the policy call: their descriptions in requests, and the calls in messages.

A *tool* in the format of chat templates (`flash.types.Tool`) is `{"type": "function", "function": {...}}`. `chat`,
`responses` and `messages` use these functions for requests, `flash sft` for its rows, and `envs.tools` for its own
tools. A *call* is a call of such a function by the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flash.service.fields import ApiError, unsupported
from flash.types import Tool, ToolCall


class Function(msgspec.Struct):
    """Description of a function that a request offers."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the function's arguments."""
    strict: bool | None = None
    """True if the client wants calls whose arguments follow the schema in `parameters`. Only forced calls do."""


class GivenTool(msgspec.Struct):
    """Tool of a request, as it was decoded. `offered` checks it."""

    type: str
    """Type of the tool; only `function` is accepted."""
    function: Function | None = None


class GivenFunction(msgspec.Struct):
    """Name and arguments of the function in a call."""

    name: str
    arguments: str | dict[str, Any] | None = ""
    """Arguments as JSON text. Some clients send the JSON object itself."""


class GivenCall(msgspec.Struct):
    """Call in a message of a request, as it was decoded. `calls_of` checks it."""

    function: GivenFunction
    id: str | None = ""
    """Id that the result of the call names."""
    type: str | None = "function"
    """Type of the call. Clients that assemble a call from the chunks of a stream may send null."""


def offered(requested: Sequence[GivenTool]) -> tuple[Tool, ...]:
    """Return the tools that a request offers to the policy, in the format of chat templates.

    Raises:
        ApiError: one of the tools is not a function, or has no name.
    """
    functions: list[Tool] = []
    for tool in requested:
        if tool.type != "function":
            raise unsupported("tools", f"a tool must be a function, but the type of one is {tool.type[:100]!r}")
        if tool.function is None:
            message = 'A tool has no `function`: expected {"type": "function", "function": {"name": …}}.'
            raise ApiError(400, message, None, "tools")
        if not tool.function.name:
            raise ApiError(400, "A function in `tools` has no `name`.", None, "tools")
        functions.append(as_tool(tool.function))
    return tuple(functions)


def as_tool(function: Function) -> Tool:
    """Return a function in the format of chat templates. A missing description or schema is left out.

    `strict` is left out too, because it changes nothing: forced calls follow the schema, other calls need not.
    """
    description: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        description["description"] = function.description
    if function.parameters is not None:
        description["parameters"] = function.parameters
    return {"type": "function", "function": description}


def calls_of(requested: Sequence[GivenCall]) -> tuple[ToolCall, ...]:
    """Return the calls of a message. Raises ApiError for a call that is not of a function."""
    for call in requested:
        if call.type not in (None, "function"):
            raise unsupported(
                "messages", f"only functions can be called, but the type of a call is {call.type[:100]!r}"
            )
    return tuple(ToolCall(call.id or "", call.function.name, as_json(call.function.arguments)) for call in requested)


def as_json(arguments: str | dict[str, Any] | None) -> str:
    """Return the arguments of a call in a request as JSON text; missing arguments are an empty text."""
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""


def encoded_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return the calls of an answer of the policy in the form that chat completions have for them."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def is_well_formed(call: ToolCall, tools: Sequence[Tool]) -> bool:
    """Return True if a call names one of the functions in `tools`, and its arguments are a JSON object.

    `envs.agent` counts the calls that are not well formed. The function's schema is not checked.
    """
    return any(tool["function"]["name"] == call.name for tool in tools) and _has_object(call)


def with_object(call: ToolCall) -> ToolCall:
    """Return a call whose arguments are a JSON object, as Anthropic's API needs them.

    `envs.agent` calls this before it gives the answer to the session, so that the history has the call as the agent
    sends it back. Arguments that are no object become the only value of one, under the name that Anthropic suggests.
    """
    if _has_object(call):
        return call
    given: dict[str, Any] = {} if call.arguments.strip() in ("", "null") else {"INVALID_JSON": call.arguments}
    return msgspec.structs.replace(call, arguments=as_json(given))


def _has_object(call: ToolCall) -> bool:
    """Return True if the arguments of a call are a JSON object."""
    try:
        return isinstance(msgspec.json.decode(call.arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
