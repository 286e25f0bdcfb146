"""The Responses API of OpenAI: requests are decoded, and answers are encoded. Both consist of items.

The session keeps, for each response of the episode, the conversation up to its end, so that a later request can name
the response in `previous_response_id`. Nothing else is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from flash.service import tools
from flash.service.chat import ROLES, AgentRequest, PolicyAnswer
from flash.service.fields import (
    MASKED,
    MODEL,
    ApiError,
    AskedSampling,
    ContentPart,
    check_limit,
    check_model,
    check_pieces,
    decoded,
    drawn,
    in_short,
    invalid,
    refuse_given,
    refuse_unserved,
    text_of,
    unsupported,
)
from flash.service.tools import as_json
from flash.types import ASSISTANT, TOOL, Message, Piece, Tool, ToolCall

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


class ResponsesCall(msgspec.Struct, frozen=True):
    """A request of an agent through OpenAI's Responses API."""

    asked: AgentRequest
    said: list[Message]
    """Messages of the request without its instructions, since each request sends its own instructions."""
    previous: str | None
    """Id of the response that the request continues; None if it names none."""


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Body(AskedSampling, kw_only=True):
    """Fields of a request's body that the service reads. All other fields are ignored."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    truncation: str | None = None
    include: list[str] | None = None


_decoder = msgspec.json.Decoder(_Body)


def read(body: bytes, earlier: Mapping[str, Sequence[Message]]) -> ResponsesCall:
    """Decode the body of a request.

    Args:
        body: the body.
        earlier: messages of the conversation up to each response of the episode, by the id of the response.

    Raises:
        ApiError: the body is not JSON or not such a request, names another model, or asks for something unsupported.
    """
    given = decoded(_decoder, body)
    check_model(given.model)
    check_pieces(_pieces(given), "input")
    check_limit(given.max_output_tokens, "max_output_tokens")
    refuse_unserved(given)
    refuse_given(
        {
            "include": [one for one in given.include or () if one != "reasoning.encrypted_content"],
            "background": given.background,
            "conversation": given.conversation,
            "prompt": given.prompt,
            "top_logprobs": given.top_logprobs,
            "truncation": given.truncation not in (None, "disabled"),
        }
    )
    if given.text is not None and given.text.format is not None and given.text.format.type != "text":
        raise unsupported("text.format", MASKED)
    before: Sequence[Message] = ()
    if given.previous_response_id is not None:
        if given.previous_response_id not in earlier:
            message = f"This episode has no response {given.previous_response_id[:100]!r}."
            raise ApiError(400, message, "previous_response_not_found", "previous_response_id")
        before = earlier[given.previous_response_id]
    said = [*before, *_messages(given.input, before)]
    instructions = [Message("system", given.instructions)] if given.instructions else []
    asked = AgentRequest(
        messages=instructions + said,
        max_tokens=given.max_output_tokens,
        stream=bool(given.stream),
        tools=_offered(given.tools or []),
        template=given.chat_template_kwargs or {},
        calling=tools.may_call(given.tool_choice),
        parallel=given.parallel_tool_calls is not False,
        drawn=drawn(given),
    )
    return ResponsesCall(asked, said, given.previous_response_id)


def _pieces(given: _Body) -> Iterator[Sequence[Any]]:
    yield given.tools or ()
    items = given.input if isinstance(given.input, list) else []
    yield items
    for item in items:
        yield from (value for value in item.values() if isinstance(value, list))


def _offered(given: Sequence[_Tool]) -> tuple[Tool, ...]:
    functions = [tools.Function(tool.name, tool.description, tool.parameters) for tool in given]
    return tools.offered(
        [tools.GivenTool(tool.type, function) for tool, function in zip(given, functions, strict=True)]
    )


def _messages(given: str | list[dict[str, Any]], before: Sequence[Message]) -> list[Message]:
    if isinstance(given, str):
        return [Message("user", given)]
    if not given:
        raise ApiError(400, "There is no input.", None, "input")
    return messages_of(given, before)


# -- the answer ------------------------------------------------------------------------------------------------------


_NOTHING = PolicyAnswer(Message(ASSISTANT, ""), cut=False, prompt_tokens=0, tokens=0)


def name_of(name: str) -> str:
    """Return the id of the response to the call with this name."""
    return f"resp_{name}"


def response(answers: Sequence[PolicyAnswer], name: str, wanted: ResponsesCall) -> bytes:
    """Return the body of an HTTP response with the only answer."""
    (answer,) = answers
    return msgspec.json.encode(_response(answer, name, wanted))


class ResponseEvents:
    """Encodes a response as server-sent events. Calls are sent at its end."""

    def __init__(self, name: str, wanted: ResponsesCall) -> None:
        self._name = name
        self._wanted = wanted
        self._number = 0
        self._told: dict[str, str] = {}
        """Text that was sent so far, by the types of the items that have begun and in their order."""
        self._done: set[str] = set()
        """Types of the items whose end was sent."""

    def begin(self, index: int) -> bytes:
        """Encode the beginning of the response."""
        begun = _response(_NOTHING, self._name, self._wanted)
        begun |= {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        return self._events([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of the answer. Content ends the item of the reasoning; later reasoning has no event."""
        events: list[Event] = []
        if piece.reasoning and MESSAGE not in self._told:
            events += self._more(thought(self._name, piece.reasoning, "completed"), piece.reasoning)
        if piece.content:
            if told := self._told.get(THOUGHT):
                events += self._all(thought(self._name, told, "completed"))
            events += self._more(spoken(self._name, piece.content, "completed"), piece.content)
        return self._events(events)

    def said(self, answer: PolicyAnswer, index: int) -> bytes:
        """Return no event, since `end` encodes the rest of the only answer."""
        return b""

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the rest of the answer, the ends of its items, and the whole response."""
        (answer,) = answers
        whole = _response(answer, self._name, self._wanted)
        begun = list(self._told)
        whole["output"].sort(key=lambda item: begun.index(item["type"]) if item["type"] in begun else len(begun))
        events = [event for index, item in enumerate(whole["output"]) for event in self._all(item, index)]
        return self._events([*events, (f"response.{whole['status']}", {"response": whole})])

    def fail(self, error: ApiError) -> bytes:
        """Encode an error that ends the stream before the answer is complete."""
        return self._events([("error", {key: error.said["error"][key] for key in ("code", "message", "param")})])

    def _more(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        """Yield the events that add `text` to an item, and before them the events of its beginning if it is new."""
        kind = item["type"]
        if kind not in self._told:
            self._told[kind] = ""
            yield from begins(item, len(self._told) - 1)
        self._told[kind] += text
        yield goes_on(item, list(self._told).index(kind), text)

    def _all(self, item: dict[str, Any], index: int = 0) -> Iterator[Event]:
        """Yield the events for the part of an item that was not sent yet, which may be all of it, and for its end."""
        kind, told = item["type"], self._told.get(item["type"])
        if kind in self._done:
            return
        if told is None:
            yield from begins(item, index)
        if rest := text_in(item)[len(told or "") :]:
            yield goes_on(item, index, rest)
        if told is not None:
            self._done.add(kind)
        yield from ends(item, index)

    def _events(self, events: Iterable[Event]) -> bytes:
        lines: list[bytes] = []
        for kind, more in events:
            content = msgspec.json.encode({"type": kind, "sequence_number": self._number, **more})
            lines.append(b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n")
            self._number += 1
        return b"".join(lines)


def _response(answer: PolicyAnswer, name: str, wanted: ResponsesCall) -> dict[str, Any]:
    asked = wanted.asked
    return {
        "id": name_of(name),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if answer.cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
        "instructions": None,
        "max_output_tokens": asked.max_tokens,
        "model": MODEL,
        "output": list(items(answer, name)),
        "parallel_tool_calls": asked.parallel,
        "previous_response_id": wanted.previous,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if asked.calling else "none",
        "tools": [
            {"type": "function", "parameters": None, "strict": False, **tool["function"]} for tool in asked.tools
        ],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.tokens,
        },
        "metadata": {},
    }
