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
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.errors import MASKED, ApiError, unsupported
from flash.service.fields import (
    MODEL,
    AskedSampling,
    check_limit,
    check_model,
    check_pieces,
    decoded,
    drawn,
    refuse_given,
    refuse_unserved,
)
from flash.service.items import (
    MESSAGE,
    THOUGHT,
    Event,
    begins,
    ends,
    goes_on,
    items,
    messages_of,
    spoken,
    text_in,
    thought,
)
from flash.types import ASSISTANT, Message, Piece, Tool


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
