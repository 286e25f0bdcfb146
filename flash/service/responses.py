"""The Responses API of OpenAI: requests are decoded, and answers are encoded. Both consist of *items*.

An item is a message, the reasoning before it, a call of a function, or the result of a call. A message of the episode
(`flash.types.Message`) holds reasoning, content and calls together, so several items become one message, and one answer
becomes several items.

`app` decodes a body with `read` and encodes the answer with a `ResponseFormat`. The session keeps, for each response of
the episode, the conversation up to its end, so that a later request can name the response in `previous_response_id`.
Nothing else is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from flash.service import tools
from flash.service.chat import ROLES, AgentRequest, PolicyAnswer
from flash.service.fields import (
    MODEL,
    WHY_NO_GRAMMAR,
    ApiError,
    ContentPart,
    RequestedSampling,
    check_limit,
    check_model,
    check_pieces,
    decoded,
    invalid,
    refuse_given,
    refuse_unserved,
    requested_sampling,
    shortened,
    text_of,
    unsupported,
)
from flash.service.tools import as_json
from flash.types import ASSISTANT, TOOL, Message, Piece, Tool, ToolCall

REASONING, MESSAGE = "reasoning", "message"
"""Item types of reasoning and of a message's content."""

Event = tuple[str, dict[str, Any]]
"""Type of a server-sent event, and the other fields of its body."""


# -- items of requests -----------------------------------------------------------------------------------------------


class _MessageItem(msgspec.Struct):
    """Message of any role. A message of an assistant is the content of an answer."""

    role: str
    content: str | list[ContentPart] | None = None


class _CallItem(msgspec.Struct):
    """Call of a function by the assistant."""

    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = ""
    """Arguments as JSON text. Some clients send the JSON object itself."""


class _ResultItem(msgspec.Struct):
    """Result of a call of a function."""

    call_id: str
    output: str | list[ContentPart]


class _ReasoningItem(msgspec.Struct):
    """Reasoning before an answer of the assistant. `content` is preferred to `summary`."""

    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None


_Item = _MessageItem | _CallItem | _ResultItem | _ReasoningItem
_ITEMS: dict[str, type[_Item]] = {
    MESSAGE: _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _ResultItem,
    REASONING: _ReasoningItem,
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
        """Messages so far."""
        # A result names only the id of its call, but chat templates may need the name of the function.
        self._names = {call.id: call.name for message in before for call in message.tool_calls}

    def add(self, item: _Item, place: str) -> None:
        """Add the next item. `place` is the item's place in the request, for error messages."""
        match item:
            case _MessageItem(role):
                if role not in ROLES or role == TOOL:
                    raise ApiError(400, f"There is no role {role[:100]!r} here.", None, place)
                message = Message(ROLES[role], text_of(item.content, place))
                if message.role == ASSISTANT:
                    self._assistant(message)
                else:
                    self.made.append(message)
            case _ReasoningItem():
                self._assistant(Message(ASSISTANT, "", text_of(item.content or item.summary, place)))
            case _CallItem(call_id, name, arguments):
                self._names[call_id] = name
                self._assistant(Message(ASSISTANT, "", "", (ToolCall(call_id, name, as_json(arguments)),)))
            case _ResultItem(call_id, output):
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
    """Return True if `more` can continue the assistant's message `last`.

    `more` has only one of reasoning, content and calls. In one message, reasoning precedes content, and content
    precedes calls. Reasoning therefore always begins a new message.
    """
    if more.tool_calls:
        return True
    if more.reasoning:
        return False
    return not (last.content or last.tool_calls)


def _item(item: dict[str, Any], place: str) -> _Item:
    """Decode an item by its type; an item without a type is a message. Raises ApiError.

    `place` is the item's place in the request, for error messages.
    """
    kind = item.get("type") or MESSAGE
    if not isinstance(kind, str) or kind not in _ITEMS:
        known = ", ".join(_ITEMS)
        raise ApiError(400, f"Items are {known}, but this is {shortened(kind)}.", "unsupported_parameter", place)
    try:
        return msgspec.convert(item, _ITEMS[kind])
    except msgspec.ValidationError as error:
        raise invalid(error, place) from error


# -- items of answers ------------------------------------------------------------------------------------------------


def items_of(answer: PolicyAnswer, name: str) -> Iterator[dict[str, Any]]:
    """Yield an item for the reasoning, for the content and for each call of an answer. `name` is the `Call`'s name."""
    message, status = answer.message, "incomplete" if answer.cut else "completed"
    if message.reasoning:
        yield reasoning_item(name, message.reasoning, status)
    if message.content or not message.tool_calls:
        yield message_item(name, message.content, status)
    for index, call in enumerate(message.tool_calls):
        called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        yield {"type": "function_call", "id": f"fc_{name}_{index}", "status": status, **called}


def reasoning_item(name: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of an answer's reasoning."""
    part = {"type": "reasoning_text", "text": text}
    return {"type": REASONING, "id": f"rs_{name}", "summary": [], "content": [part], "status": status}


def message_item(name: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of an answer's content."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": MESSAGE, "id": f"msg_{name}", "role": ASSISTANT, "status": status, "content": [part]}


def text_in(item: dict[str, Any]) -> str:
    """Return the text of an item; the text of a function call is its arguments."""
    return item["arguments"] if "arguments" in item else item["content"][0]["text"]


def begin_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events at the beginning of an item, which is still empty. `index` is its place among the items."""
    empty = {key: [] for key in ("content", "summary") if key in item} | (
        {"arguments": ""} if "arguments" in item else {}
    )
    yield ("response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}})
    if "content" in item:
        part = {**item["content"][0], "text": ""}
        yield "response.content_part.added", {**_place(item, index), "part": part}


def delta_event(item: dict[str, Any], index: int, text: str) -> Event:
    """Return the event that adds `text` to an item."""
    kind = "function_call_arguments" if "arguments" in item else item["content"][0]["type"]
    return f"response.{kind}.delta", {**_place(item, index), "delta": text, **_scores(kind)}


def end_events(item: dict[str, Any], index: int) -> Iterator[Event]:
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
    """Return the fields by which an event names its item, and the item's only content part if it has one."""
    return {"output_index": index, "item_id": item["id"]} | ({"content_index": 0} if "content" in item else {})


def _scores(kind: str) -> dict[str, Any]:
    """Return the field for log-probs, which only events about output text have. The service gives none here."""
    return {"logprobs": []} if kind == "output_text" else {}


# -- requests ----------------------------------------------------------------------------------------------------------


class ResponsesRequest(msgspec.Struct, frozen=True):
    """A request of an agent through OpenAI's Responses API."""

    request: AgentRequest
    """The request in the form of all APIs."""
    messages: list[Message]
    """Messages of the conversation without instructions, because each request sends its own instructions."""
    previous: str | None
    """Id of the response that the request continues; None if it names none."""


class _ResponsesTool(msgspec.Struct):
    """Tool of a request. Other than in chat completions, the fields of the function are those of the tool."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _TextFormat(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _TextFormat | None = None


class _ResponsesBody(RequestedSampling, kw_only=True):
    """Fields of a request's body that the service reads. All other fields are ignored."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[_ResponsesTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    truncation: str | None = None
    include: list[str] | None = None


_decoder = msgspec.json.Decoder(_ResponsesBody)


def read(body: bytes, earlier: Mapping[str, Sequence[Message]]) -> ResponsesRequest:
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
        raise unsupported("text.format", WHY_NO_GRAMMAR)
    before: Sequence[Message] = ()
    if given.previous_response_id is not None:
        if given.previous_response_id not in earlier:
            message = f"This episode has no response {given.previous_response_id[:100]!r}."
            raise ApiError(400, message, "previous_response_not_found", "previous_response_id")
        before = earlier[given.previous_response_id]
    messages = [*before, *_messages(given.input, before)]
    instructions = [Message("system", given.instructions)] if given.instructions else []
    request = AgentRequest(
        messages=instructions + messages,
        max_tokens=given.max_output_tokens,
        stream=bool(given.stream),
        tools=_offered(given.tools or []),
        template=given.chat_template_kwargs or {},
        calling=tools.may_call(given.tool_choice),
        parallel=given.parallel_tool_calls is not False,
        sampling=requested_sampling(given),
    )
    return ResponsesRequest(request, messages, given.previous_response_id)


def _pieces(given: _ResponsesBody) -> Iterator[Sequence[Any]]:
    """Yield all lists of a request that may be long, for `check_pieces`."""
    yield given.tools or ()
    items = given.input if isinstance(given.input, list) else []
    yield items
    for item in items:
        yield from (value for value in item.values() if isinstance(value, list))


def _offered(given: Sequence[_ResponsesTool]) -> tuple[Tool, ...]:
    """Return the tools of a request in the format of chat templates. Raises ApiError if one is not a function."""
    functions = [tools.Function(tool.name, tool.description, tool.parameters) for tool in given]
    return tools.offered(
        [tools.GivenTool(tool.type, function) for tool, function in zip(given, functions, strict=True)]
    )


def _messages(given: str | list[dict[str, Any]], before: Sequence[Message]) -> list[Message]:
    """Return the input of a request as messages. A text is a message of the user. Raises ApiError."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not given:
        raise ApiError(400, "There is no input.", None, "input")
    return messages_of(given, before)


# -- the answer ------------------------------------------------------------------------------------------------------


_NO_ANSWER = PolicyAnswer(Message(ASSISTANT, ""), cut=False, prompt_tokens=0, tokens=0)


def response_id(name: str) -> str:
    """Return the id of the response to the call with this name."""
    return f"resp_{name}"


class ResponseFormat:
    """Format of a response: a body, or a stream of events about the items of its only answer.

    In a stream, the items of reasoning and content are sent while they are sampled, and calls at the end. An answer has
    at most one item of reasoning and one of content.

    Args:
        name: name of the call, which becomes part of the ids of the response and its items.
        given: the request.
    """

    def __init__(self, name: str, given: ResponsesRequest) -> None:
        self._name = name
        self._given = given
        self._number = 0
        """Number of the next event, counted from 0."""
        self._sent: dict[str, str] = {}
        """Text that was sent so far, by the types of the items that have begun and in their order."""
        self._done: set[str] = set()
        """Types of the items whose end was sent."""

    def body(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the response as one body."""
        (answer,) = answers
        return msgspec.json.encode(_response(answer, self._name, self._given))

    def begin(self, index: int) -> bytes:
        """Encode the beginning of the response."""
        begun = _response(_NO_ANSWER, self._name, self._given)
        begun |= {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        return self._encoded([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of the answer. Content ends the item of the reasoning; later reasoning has no event."""
        events: list[Event] = []
        if piece.reasoning and MESSAGE not in self._sent:
            events += self._delta_events(reasoning_item(self._name, piece.reasoning, "completed"), piece.reasoning)
        if piece.content:
            if sent := self._sent.get(REASONING):
                events += self._rest_events(reasoning_item(self._name, sent, "completed"))
            events += self._delta_events(message_item(self._name, piece.content, "completed"), piece.content)
        return self._encoded(events)

    def finish(self, answer: PolicyAnswer, index: int) -> bytes:
        """Return no event, because `end` encodes the rest of the only answer."""
        return b""

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the rest of the answer, the ends of its items, and the whole response."""
        (answer,) = answers
        whole = _response(answer, self._name, self._given)
        begun = list(self._sent)
        whole["output"].sort(key=lambda item: begun.index(item["type"]) if item["type"] in begun else len(begun))
        events = [event for index, item in enumerate(whole["output"]) for event in self._rest_events(item, index)]
        return self._encoded([*events, (f"response.{whole['status']}", {"response": whole})])

    def fail(self, error: ApiError) -> bytes:
        """Encode an error that ends the stream before the answer is complete."""
        return self._encoded([("error", {key: error.content["error"][key] for key in ("code", "message", "param")})])

    def _delta_events(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        """Yield the events that add `text` to an item, and before them the events of its beginning if it is new."""
        kind = item["type"]
        if kind not in self._sent:
            self._sent[kind] = ""
            yield from begin_events(item, len(self._sent) - 1)
        self._sent[kind] += text
        yield delta_event(item, list(self._sent).index(kind), text)

    def _rest_events(self, item: dict[str, Any], index: int = 0) -> Iterator[Event]:
        """Yield the events for the part of an item that was not sent yet, which may be all of it, and for its end."""
        kind, sent = item["type"], self._sent.get(item["type"])
        if kind in self._done:
            return
        if sent is None:
            yield from begin_events(item, index)
        if rest := text_in(item)[len(sent or "") :]:
            yield delta_event(item, index, rest)
        # Calls are not marked, because an answer may have several of them, all of one type.
        if sent is not None:
            self._done.add(kind)
        yield from end_events(item, index)

    def _encoded(self, events: Iterable[Event]) -> bytes:
        """Encode events, numbered in the order in which they are sent."""
        lines: list[bytes] = []
        for kind, more in events:
            content = msgspec.json.encode({"type": kind, "sequence_number": self._number, **more})
            lines.append(b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n")
            self._number += 1
        return b"".join(lines)


def _response(answer: PolicyAnswer, name: str, given: ResponsesRequest) -> dict[str, Any]:
    """Return a response as an object of the API. Fields that the service does not support have their neutral values."""
    request = given.request
    return {
        "id": response_id(name),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if answer.cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "model": MODEL,
        "output": list(items_of(answer, name)),
        "parallel_tool_calls": request.parallel,
        "previous_response_id": given.previous,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if request.calling else "none",
        "tools": [
            {"type": "function", "parameters": None, "strict": False, **tool["function"]} for tool in request.tools
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
