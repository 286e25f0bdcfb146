"""Forms that a request wants its answer to have: a JSON schema for the text, or a call of a function.

The `read` functions of `chat`, `responses` and `messages` make a `flash.types.ResponseForm` with these functions. The
answer is sampled under it, as `docs/agents.md` describes. Whether engines can enforce a schema, and whether the run's
tool parser can read a forced call, is checked when the episode prepares the request (`EpisodeView.form`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from flash.service.fields import ApiError, shortened, unsupported
from flash.types import ANY_CALL, ResponseForm, Tool


def schema_of(kind: str, schema: object, field: str) -> dict[str, Any] | None:
    """Return the JSON schema that the text of an answer must follow; None if any text is allowed.

    Args:
        kind: type of the format in the request.
        schema: the schema in the request, if it has one.
        field: name of the request field, for error messages.

    Raises:
        ApiError: the format has an unknown type, or no schema.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise unsupported(field, f"expected the type text, json_object or json_schema, but got {shortened(kind)}")
    if not isinstance(schema, dict):
        raise ApiError(400, f"`{field}` has no JSON schema.", None, field)
    return cast("dict[str, Any]", schema)


def may_call(choice: Any) -> bool:
    """Return True if `tool_choice` lets the policy call functions, so that the answer is searched for calls."""
    return choice != "none"


def response_form(
    schema: dict[str, Any] | None, choice: Any, tools: Sequence[Tool], *, parallel: bool
) -> ResponseForm | None:
    """Return the form that an answer must have; None if it has none.

    Args:
        schema: JSON schema of the text; None: free text.
        choice: `tool_choice` of the request.
        tools: functions that the request offers.
        parallel: True if the answer may have several calls.

    Raises:
        ApiError: `choice` is invalid, or forces a call of a function that is not offered.
    """
    call = _forced_call(choice)
    names = [tool["function"]["name"] for tool in tools]
    if call and not names:
        raise ApiError(400, "`tool_choice` forces a call, but there are no `tools`.", None, "tool_choice")
    if call not in ("", ANY_CALL, *names):
        raise ApiError(400, f"`tool_choice` names no function of `tools`: {shortened(call)}.", None, "tool_choice")
    if schema is None and not call:
        return None
    return ResponseForm(schema, call, calling=may_call(choice) and bool(names), single=not parallel)


def _forced_call(choice: Any) -> str:
    """Return the name of the function that `tool_choice` forces, or `ANY_CALL`; empty if it forces none.

    Raises:
        ApiError: `choice` is no valid choice.
    """
    if choice in (None, "auto", "none"):
        return ""
    if choice == "required":
        return ANY_CALL
    if isinstance(choice, Mapping):
        named = cast("Mapping[str, Any]", choice)
        # Chat completions have {"type": "function", "function": {"name": …}}, responses {"type": …, "name": …}.
        function = named.get("function", named)
        if named.get("type") == "function" and isinstance(function, Mapping):
            name = cast("Mapping[str, Any]", function).get("name")
            if isinstance(name, str) and name:
                return name
    expected = "`auto`, `none`, `required` or one function"
    raise ApiError(400, f"`tool_choice` must be {expected}, but is {shortened(choice)}.", None, "tool_choice")
