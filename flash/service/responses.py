"""The Responses API of OpenAI: requests are decoded, and answers are encoded. Both consist of *items*.

An item is a message, the reasoning before it, a call of a function, or the result of a call. A message of the episode
(`flash.types.Message`) holds reasoning, content and calls together, so several items become one message, and one answer
becomes several items.

The node that runs the agent serves this API, for agents that use it. `app` decodes a body with `read` and encodes the
answer with a `ResponseFormat`. The session keeps, for each response of the episode, the conversation up to its end, so
that a later request can name the response in `previous_response_id`. Nothing else is stored.

An *event* is a server-sent event of a stream. An item in an event is a dict, in the form that OpenAI's clients expect.
The *name* of the `sessions.Call` that a request makes becomes part of all ids.
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
    ApiError,
    ContentPart,
    RequestedSampling,
    check_elements,
    check_limit,
    check_model,
    decoded,
    invalid,
    refuse_set_fields,
    refuse_unserved,
    requested_sampling,
    shortened,
    text_of,
)
from flash.service.forms import may_call, response_form, schema_of
from flash.service.tools import as_json
from flash.types import ASSISTANT, TOOL, Message, Piece, Tool, ToolCall

REASONING, MESSAGE = "reasoning", "message"
"""Item types of reasoning and of a message's content."""

Event = tuple[str, dict[str, Any]]
"""Type of a server-sent event, and the other fields of its body. Clients of OpenAI expect these types and fields."""


# -- items of requests -----------------------------------------------------------------------------------------------


class _MessageItem(msgspec.Struct):
    """Message of any role. A message of an assistant is the content of an answer, without its reasoning and calls."""

    role: str
    content: str | list[ContentPart] | None = None


class _CallItem(msgspec.Struct):
    """Call of a function by the assistant."""

    call_id: str
    name: str
    """Name of the function."""
    arguments: str | dict[str, Any] | None = ""
    """Arguments as JSON text. Some clients send the JSON object itself."""


class _ResultItem(msgspec.Struct):
    """Result of the call of a function that has the id `call_id`."""

    call_id: str
    output: str | list[ContentPart]


class _ReasoningItem(msgspec.Struct):
    """Reasoning before an answer of the assistant. `summary` counts only if `content` has no text."""

    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None


_Item = _MessageItem | _CallItem | _ResultItem | _ReasoningItem
_ITEMS: dict[str, type[_Item]] = {
    MESSAGE: _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _ResultItem,
    REASONING: _ReasoningItem,
}
"""Item types of requests, and the form of each."""


class _MessageBuilder:
    """A builder of messages from the items of a request. `_input_messages` makes one for each request.

    Successive reasoning, content and calls of an assistant become one message.

    Args:
        before: messages of the conversation before the items.
    """

    def __init__(self, before: Sequence[Message]) -> None:
        self.made: list[Message] = []
        """Messages so far, without `before`."""
        # A result names only the id of its call, but chat templates may need the name of the function.
        self._names = {call.id: call.name for message in before for call in message.tool_calls}
        """Names of the called functions by the id of the call."""

    def add(self, item: _Item, place: str) -> None:
        """Add the next item. `place` is the item's place in the request, such as `input[2]`, for error messages.

        Raises:
            ApiError: the item has an unknown role, or the role `tool`, or content that is not text.
        """
        match item:
            case _MessageItem(role):
                # In this API the result of a call is no message, but an item of its own.
                if role not in ROLES or role == TOOL:
                    known = ", ".join(one for one in ROLES if one != TOOL)
                    raise ApiError(400, f"Roles are {known}, but this is {shortened(role)}.", None, place)
                message = Message(ROLES[role], text_of(item.content, place))
                if message.role == ASSISTANT:
                    self._add_to_assistant(message)
                else:
                    self.made.append(message)
            case _ReasoningItem():
                # Clients may send reasoning without a text, for example encrypted. It would make an empty message.
                if reasoning := text_of(item.content, place) or text_of(item.summary, place):
                    self._add_to_assistant(Message(ASSISTANT, "", reasoning))
            case _CallItem(call_id, name, arguments):
                self._names[call_id] = name
                self._add_to_assistant(Message(ASSISTANT, "", "", (ToolCall(call_id, name, as_json(arguments)),)))
            case _ResultItem(call_id, output):
                name = self._names.get(call_id, "")  # empty for an unknown call; most chat templates need no name
                self.made.append(Message(TOOL, text_of(output, place), tool_call_id=call_id, name=name))

    def _add_to_assistant(self, more: Message) -> None:
        """Append `more`, one part of an answer, to the last message if its order allows it, else make it a new message.

        A message of the episode has at most one reasoning and one content, so each of these is in only one of the two.
        """
        last = self.made[-1] if self.made else None
        if last is None or last.role != ASSISTANT or not _continues(last, more):
            self.made.append(more)
            return
        self.made[-1] = Message(
            ASSISTANT, last.content or more.content, last.reasoning or more.reasoning, last.tool_calls + more.tool_calls
        )


def _continues(last: Message, more: Message) -> bool:
    """Return True if `more` can continue the assistant's message `last`.

    `more` has only one of reasoning, content and calls. In one message, reasoning precedes content, and content
    precedes calls. Reasoning therefore always begins a new message.
    """
    if more.tool_calls:
        return True
    if more.reasoning:
        return False
    return not (last.content or last.tool_calls)


def _decode_item(item: dict[str, Any], place: str) -> _Item:
    """Return an item in the form of its type; an item without a type is a message.

    `place` is the item's place in the request, such as `input[2]`, for error messages.

    Raises:
        ApiError: the item has an unknown type or the wrong form.
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


def answer_items(answer: PolicyAnswer, name: str) -> Iterator[dict[str, Any]]:
    """Yield an item for the reasoning, for the content and for each call of a function of an answer.

    `name` is the name of the `Call` in the session, which becomes part of the items' ids.
    """
    message, calls = answer.message, answer.message.tool_calls
    # A cut takes the end of an answer, so everything before the last item is complete.
    last = "incomplete" if answer.cut else "completed"
    if message.reasoning:
        yield reasoning_item(name, message.reasoning, "completed" if message.content or calls else last)
    if message.content or not calls:
        yield message_item(name, message.content, "completed" if calls else last)
    for index, call in enumerate(calls):
        called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        status = "completed" if index + 1 < len(calls) else last
        yield {"type": "function_call", "id": f"fc_{name}_{index}", "status": status, **called}


def reasoning_item(name: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of an answer's reasoning, `text`. `name` is the name of the `Call`; `status` is the API's."""
    part = {"type": "reasoning_text", "text": text}
    return {"type": REASONING, "id": f"rs_{name}", "summary": [], "content": [part], "status": status}


def message_item(name: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of an answer's content, `text`. `name` is the name of the `Call`; `status` is the API's."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": MESSAGE, "id": f"msg_{name}", "role": ASSISTANT, "status": status, "content": [part]}


def item_text(item: dict[str, Any]) -> str:
    """Return the text of an item; the text of a function call is its arguments."""
    return item["arguments"] if "arguments" in item else item["content"][0]["text"]


def begin_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events at the beginning of an item. `index` is its place among the items of the answer.

    The events show the item without its text, which `delta_event` adds.
    """
    # Only calls of functions have arguments. All other items have a content, which is one part.
    empty = {key: [] for key in ("content", "summary") if key in item} | (
        {"arguments": ""} if "arguments" in item else {}
    )
    yield ("response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}})
    if "content" in item:
        part = {**item["content"][0], "text": ""}
        yield "response.content_part.added", {**_item_fields(item, index), "part": part}


def delta_event(item: dict[str, Any], index: int, text: str) -> Event:
    """Return the event that adds `text` to an item. `index` is the item's place among the items of the answer."""
    kind = "function_call_arguments" if "arguments" in item else item["content"][0]["type"]
    return f"response.{kind}.delta", {**_item_fields(item, index), "delta": text, **_logprobs_field(kind)}


def end_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events at the end of an item. `index` is the item's place among the items of the answer."""
    fields = _item_fields(item, index)
    if "arguments" in item:
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", {**fields, **done}
    else:
        (part,) = item["content"]
        yield f"response.{part['type']}.done", {**fields, "text": part["text"], **_logprobs_field(part["type"])}
        yield "response.content_part.done", {**fields, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _item_fields(item: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the fields of an event that name its item, and the item's only content part if it has one.

    `index` is the place of the item among the items of the answer.
    """
    return {"output_index": index, "item_id": item["id"]} | ({"content_index": 0} if "content" in item else {})


def _logprobs_field(kind: str) -> dict[str, Any]:
    """Return the field for log-probs, which only events about a part of type `kind` = `output_text` have.

    It is empty, because this API of the service gives no log-probs.
    """
    return {"logprobs": []} if kind == "output_text" else {}


# -- requests ----------------------------------------------------------------------------------------------------------


class ResponsesRequest(msgspec.Struct, frozen=True):
    """A request of an agent through OpenAI's Responses API. `read` makes it, for `app` and `ResponseFormat`."""

    request: AgentRequest
    """The request in the form that all APIs share."""
    messages: list[Message]
    """Messages of the conversation without instructions. `app` keeps them for later requests, each of which sends its
    own instructions."""
    previous: str | None
    """Id of the response that the request continues; None if it names none."""


class _ResponsesTool(msgspec.Struct):
    """Tool of a request. In chat completions a tool holds a function; here it has the fields of the function itself."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _TextFormat(msgspec.Struct):
    """Format of the answer's text."""

    type: str = "text"
    schema: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    """Settings of the answer's text."""

    format: _TextFormat | None = None


class _ResponsesBody(RequestedSampling, kw_only=True):
    """Fields of a request's body that the service reads. They have the meaning that OpenAI's API gives them.

    Some of them are read only to be refused. All other fields of a body are ignored.
    """

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
    """Return the request of the Responses API in a body. `app` calls this for each request, in a thread if it is long.

    Args:
        body: the body.
        earlier: messages of the conversation up to each response of the episode, by the id of the response.

    Raises:
        ApiError: the body is not JSON or not such a request, has no input, names another model or an unknown response,
            or asks for something unsupported.
    """
    parsed = decoded(_decoder, body)
    check_model(parsed.model)
    check_elements(_lists(parsed), "input")
    check_limit(parsed.max_output_tokens, "max_output_tokens")
    refuse_unserved(parsed)
    refuse_set_fields(
        {
            # Clients that keep the conversation themselves ask for encrypted reasoning. Here it comes in plain text.
            "include": [one for one in parsed.include or () if one != "reasoning.encrypted_content"],
            "background": parsed.background,
            "conversation": parsed.conversation,
            "prompt": parsed.prompt,
            "top_logprobs": parsed.top_logprobs,
            # True counts as set, so that any other value is refused.
            "truncation": parsed.truncation not in (None, "disabled"),
        }
    )
    format = (parsed.text and parsed.text.format) or _TextFormat()
    schema = schema_of(format.type, format.schema, "text.format")
    offered, parallel = _function_tools(parsed.tools or []), parsed.parallel_tool_calls is not False
    before: Sequence[Message] = ()
    if parsed.previous_response_id is not None:
        if parsed.previous_response_id not in earlier:
            message = f"This episode has no response {parsed.previous_response_id[:100]!r}."
            raise ApiError(400, message, "previous_response_not_found", "previous_response_id")
        before = earlier[parsed.previous_response_id]
    messages = [*before, *_input_messages(parsed.input, before)]
    instructions = [Message("system", parsed.instructions)] if parsed.instructions else []
    request = AgentRequest(
        messages=instructions + messages,
        max_tokens=parsed.max_output_tokens,
        stream=bool(parsed.stream),
        tools=offered,
        template=parsed.chat_template_kwargs or {},
        calling=may_call(parsed.tool_choice),
        response_form=response_form(schema, parsed.tool_choice, offered, parallel=parallel),
        parallel=parallel,
        sampling=requested_sampling(parsed),
    )
    return ResponsesRequest(request, messages, parsed.previous_response_id)


def _lists(parsed: _ResponsesBody) -> Iterator[Sequence[Any]]:
    """Yield all lists of a request that may be long, for `check_elements`."""
    yield parsed.tools or ()
    items = parsed.input if isinstance(parsed.input, list) else []
    yield items
    for item in items:
        yield from (value for value in item.values() if isinstance(value, list))


def _function_tools(requested: Sequence[_ResponsesTool]) -> tuple[Tool, ...]:
    """Return the tools of a request in the format of chat templates. Raises ApiError if one is not a function."""
    return tools.offered(
        [tools.GivenTool(tool.type, tools.Function(tool.name, tool.description, tool.parameters)) for tool in requested]
    )


def _input_messages(items: str | list[dict[str, Any]], before: Sequence[Message]) -> list[Message]:
    """Return the input of a request as messages, at least one. A text is a message of the user.

    `before` holds the messages of the conversation before the input.

    Raises:
        ApiError: no item makes a message, or an item has the wrong form, an unknown type or role, or content that is
            not text.
    """
    if isinstance(items, str):
        return [Message("user", items)]
    messages = _MessageBuilder(before)
    for index, item in enumerate(items):
        place = f"input[{index}]"
        messages.add(_decode_item(item, place), place)
    if not messages.made:  # no items, or only reasoning without a text
        raise ApiError(400, "There is no input.", None, "input")
    return messages.made


# -- the answer ------------------------------------------------------------------------------------------------------


_NO_ANSWER = PolicyAnswer(Message(ASSISTANT, ""), cut=False, prompt_tokens=0, tokens=0)
"""Empty answer. The events at the beginning of a stream have a whole response, made of it."""


def response_id(name: str) -> str:
    """Return the id of the response whose `Call` has this name. `app` keeps the conversation under it."""
    return f"resp_{name}"


class ResponseFormat:
    """Format of a response: a body, or a stream of events about the items of its only answer.

    `app` calls the methods in the order that `flash.service.app.AnswerFormat` describes. A request of this API has one
    answer, so `index` is always 0. In a stream, the items of reasoning and content are sent while they are sampled, and
    calls at the end. An answer has at most one item of reasoning and one of content.

    Args:
        name: name of the call, which becomes part of the ids of the response and its items.
        request: the request.
    """

    def __init__(self, name: str, request: ResponsesRequest) -> None:
        self._name = name
        self._request = request
        self._number = 0
        """Number of the next event of the stream, counted from 0."""
        self._sent_text: dict[str, str] = {}
        """Text that was sent so far, by the types of the items that have begun and in their order."""
        self._ended_types: set[str] = set()
        """Types of the items whose end was sent."""

    def body(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the response as one body."""
        (answer,) = answers
        return msgspec.json.encode(_response(answer, self._name, self._request))

    def begin(self, index: int, prompt_tokens: int) -> bytes:
        """Encode the beginning of the response."""
        begun = _response(_NO_ANSWER, self._name, self._request)
        begun |= {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        return self._encoded([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of the answer. Content ends the item of the reasoning; later reasoning has no event.

        The API has no way to continue an item that has ended. The response at the end has all reasoning.
        """
        events: list[Event] = []
        if piece.reasoning and MESSAGE not in self._sent_text:
            events += self._delta_events(reasoning_item(self._name, piece.reasoning, "completed"), piece.reasoning)
        if piece.content:
            if sent := self._sent_text.get(REASONING):
                events += self._end_events(reasoning_item(self._name, sent, "completed"))
            events += self._delta_events(message_item(self._name, piece.content, "completed"), piece.content)
        return self._encoded(events)

    def finish(self, answer: PolicyAnswer, index: int) -> bytes:
        """Return no event, because `end` encodes the rest of the only answer."""
        return b""

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the rest of the answer, the ends of its items, and the whole response."""
        (answer,) = answers
        whole = _response(answer, self._name, self._request)
        # Items that were sent keep their places: content may have begun before any reasoning. The rest follows them.
        begun = list(self._sent_text)
        whole["output"].sort(key=lambda item: begun.index(item["type"]) if item["type"] in begun else len(begun))
        events = [event for index, item in enumerate(whole["output"]) for event in self._end_events(item, index)]
        return self._encoded([*events, (f"response.{whole['status']}", {"response": whole})])

    def fail(self, error: ApiError) -> bytes:
        """Encode an error that ends the stream before the answer is complete."""
        return self._encoded([("error", {"code": error.code, "message": str(error), "param": error.param})])

    def _delta_events(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        """Yield the event that adds `text` to an item, and before it the events of its beginning if it is new.

        The item is the reasoning or the content, of which an answer has one each.
        """
        kind = item["type"]
        if kind not in self._sent_text:
            self._sent_text[kind] = ""
            yield from begin_events(item, len(self._sent_text) - 1)
        self._sent_text[kind] += text
        yield delta_event(item, list(self._sent_text).index(kind), text)

    def _end_events(self, item: dict[str, Any], index: int = 0) -> Iterator[Event]:
        """Yield the events for the part of an item that was not sent yet, which may be all of it, and for its end.

        Yields nothing if the end was sent already. `index` is the place of the item among the items of the answer; the
        reasoning that `piece` ends is always the first item.
        """
        kind, sent = item["type"], self._sent_text.get(item["type"])
        if kind in self._ended_types:
            return
        if sent is None:
            yield from begin_events(item, index)
        if unsent := item_text(item)[len(sent or "") :]:
            yield delta_event(item, index, unsent)
        # Calls are not marked, because an answer may have several of them, all of one type.
        if sent is not None:
            self._ended_types.add(kind)
        yield from end_events(item, index)

    def _encoded(self, events: Iterable[Event]) -> bytes:
        """Encode events as they are sent, numbered in the order of the stream."""
        lines: list[bytes] = []
        for kind, more in events:
            content = msgspec.json.encode({"type": kind, "sequence_number": self._number, **more})
            lines.append(b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n")
            self._number += 1
        return b"".join(lines)


def _response(answer: PolicyAnswer, name: str, responses_request: ResponsesRequest) -> dict[str, Any]:
    """Return the answer as a response of the API. Fields that the service does not support have neutral values.

    `name` is the name of the call.
    """
    request = responses_request.request
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
        "output": list(answer_items(answer, name)),
        "parallel_tool_calls": request.parallel,
        "previous_response_id": responses_request.previous,
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
