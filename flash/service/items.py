"""Items of the Responses API: how items become messages, and how an answer becomes items and events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from flash.service.chat import ROLES, PolicyAnswer
from flash.service.errors import ApiError, in_short
from flash.service.fields import ContentPart, invalid, text_of
from flash.service.tools import as_json
from flash.types import ASSISTANT, TOOL, Message, ToolCall

THOUGHT, MESSAGE = "reasoning", "message"
"""Item types of reasoning and of a message's content."""

Event = tuple[str, dict[str, Any]]
"""Type of a server-sent event, and the other fields of its body."""


# -- read ------------------------------------------------------------------------------------------------------------


class _Spoken(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None


class _Called(msgspec.Struct):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = ""
    """Arguments as JSON text. Some clients send the JSON object itself."""


class _Returned(msgspec.Struct):
    call_id: str
    output: str | list[ContentPart]


class _Thought(msgspec.Struct):
    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None


_Item = _Spoken | _Called | _Returned | _Thought
_ITEMS: dict[str, type[_Item]] = {
    MESSAGE: _Spoken,
    "function_call": _Called,
    "function_call_output": _Returned,
    THOUGHT: _Thought,
}


def messages_of(given: Sequence[dict[str, Any]], before: Sequence[Message]) -> list[Message]:
    """Return the items of a request as messages. `before` holds the messages of the conversation before them.

    Raises:
        ApiError: an item has the wrong form or an unknown type.
    """
    messages = _Messages(before)
    for index, item in enumerate(given):
        place = f"input[{index}]"
        messages.add(_item(item, place), place)
    return messages.made


class _Messages:
    """A builder of messages from items. Successive reasoning, content and calls of an assistant are one message."""

    def __init__(self, before: Sequence[Message]) -> None:
        self.made: list[Message] = []
        self._names = {call.id: call.name for message in before for call in message.tool_calls}

    def add(self, item: _Item, place: str) -> None:
        """Add the next item. `place` is the item's place in the request, for error messages."""
        match item:
            case _Spoken(role):
                if role not in ROLES or role == TOOL:
                    raise ApiError(400, f"There is no role {role[:100]!r} here.", None, place)
                message = Message(ROLES[role], text_of(item.content, place))
                if message.role == ASSISTANT:
                    self._assistant(message)
                else:
                    self.made.append(message)
            case _Thought():
                self._assistant(Message(ASSISTANT, "", text_of(item.content or item.summary, place)))
            case _Called(call_id, name, arguments):
                self._names[call_id] = name
                self._assistant(Message(ASSISTANT, "", "", (ToolCall(call_id, name, as_json(arguments)),)))
            case _Returned(call_id, output):
                name = self._names.get(call_id, "")
                self.made.append(Message(TOOL, text_of(output, place), tool_call_id=call_id, name=name))

    def _assistant(self, more: Message) -> None:
        """Append to the assistant's last message if the order of its parts allows it, else begin a new message."""
        last = self.made[-1] if self.made else None
        if last is None or last.role != ASSISTANT or not _follows(last, more):
            self.made.append(more)
            return
        self.made[-1] = Message(
            ASSISTANT, last.content or more.content, last.reasoning or more.reasoning, last.tool_calls + more.tool_calls
        )


def _follows(last: Message, more: Message) -> bool:
    """Return True if `more` can continue the message `last`: reasoning precedes content, and content precedes calls."""
    if more.tool_calls:
        return True
    if more.reasoning:
        return False
    return not (last.content or last.tool_calls)


def _item(item: dict[str, Any], place: str) -> _Item:
    kind = item.get("type") or MESSAGE
    if not isinstance(kind, str) or kind not in _ITEMS:
        known = ", ".join(_ITEMS)
        raise ApiError(400, f"Items are {known}, but this is {in_short(kind)}.", "unsupported_parameter", place)
    try:
        return msgspec.convert(item, _ITEMS[kind])
    except msgspec.ValidationError as error:
        raise invalid(error, place) from error


# -- written ---------------------------------------------------------------------------------------------------------


def items(answer: PolicyAnswer, name: str) -> Iterator[dict[str, Any]]:
    """Yield an item for the reasoning, for the content and for each call of an answer. `name` is the `Call`'s name."""
    message, status = answer.message, "incomplete" if answer.cut else "completed"
    if message.reasoning:
        yield thought(name, message.reasoning, status)
    if message.content or not message.tool_calls:
        yield spoken(name, message.content, status)
    for index, call in enumerate(message.tool_calls):
        called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        yield {"type": "function_call", "id": f"fc_{name}_{index}", "status": status, **called}


def thought(name: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of an answer's reasoning."""
    part = {"type": "reasoning_text", "text": text}
    return {"type": THOUGHT, "id": f"rs_{name}", "summary": [], "content": [part], "status": status}


def spoken(name: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of an answer's content."""
    said = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": MESSAGE, "id": f"msg_{name}", "role": ASSISTANT, "status": status, "content": [said]}


def text_in(item: dict[str, Any]) -> str:
    """Return the text of an item; the text of a function call is its arguments."""
    return item["arguments"] if "arguments" in item else item["content"][0]["text"]


def begins(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events at the beginning of an item, which is still empty. `index` is its place among the items."""
    empty = {key: [] for key in ("content", "summary") if key in item} | (
        {"arguments": ""} if "arguments" in item else {}
    )
    yield ("response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}})
    if "content" in item:
        part = {**item["content"][0], "text": ""}
        yield "response.content_part.added", {**_place(item, index), "part": part}


def goes_on(item: dict[str, Any], index: int, text: str) -> Event:
    """Return the event that adds `text` to an item."""
    kind = "function_call_arguments" if "arguments" in item else item["content"][0]["type"]
    return f"response.{kind}.delta", {**_place(item, index), "delta": text, **_scores(kind)}


def ends(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events at the end of an item."""
    place = _place(item, index)
    if "arguments" in item:
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", {**place, **done}
    else:
        (part,) = item["content"]
        yield f"response.{part['type']}.done", {**place, "text": part["text"], **_scores(part["type"])}
        yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _place(item: dict[str, Any], index: int) -> dict[str, Any]:
    return {"output_index": index, "item_id": item["id"]} | ({"content_index": 0} if "content" in item else {})


def _scores(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "output_text" else {}
