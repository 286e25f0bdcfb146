"""The Messages API of Anthropic: requests are decoded, and answers and refusals are encoded.

A message of the API consists of *content blocks*: text, thinking (the API's name for reasoning), the use of a tool (a
call of a function), and the result of one. A message of the episode (`flash.types.Message`) holds reasoning, content
and calls together, so the blocks of an assistant become one message, and each result becomes a message of its own.

`app` decodes a body with `read`, or with `read_count` if only the tokens of the prompt are wanted. It encodes the
answer with a `MessageFormat`, and a refusal with `error_content`. `models` and `model` return the bodies of the routes
below /v1/models for clients of this API. The *name* of the `sessions.Call` that a request makes becomes part of ids.

An *event* is a server-sent event of a stream. Anthropic's clients expect its type twice: in a line of its own and in
the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from flash.service import tools
from flash.service.chat import AgentRequest, ChatMessage, PolicyAnswer, messages_of
from flash.service.fields import (
    MODEL,
    ApiError,
    ContentPart,
    RequestedSampling,
    check_elements,
    check_limit,
    check_model,
    decoded,
    refuse_set_fields,
    refuse_unserved,
    requested_sampling,
    stop_texts,
)
from flash.service.forms import may_call, response_form, schema_of
from flash.types import ASSISTANT, TOOL, Piece, Tool, ToolCall

TEXT, THINKING, TOOL_USE, TOOL_RESULT = "text", "thinking", "tool_use", "tool_result"
"""Types of content blocks."""

TOOL_REFERENCE = "tool_reference"
"""Type of a part of a result that offers a deferred tool to the policy."""

ROLES = ("user", ASSISTANT, "system")
"""Roles that a message of a request may have."""

ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a text that Claude Code puts before its system prompt. The text is for accounting. In some versions it
has a hash that differs in each request. If the policy saw it, each request would begin a new branch."""

FAILED_RESULT = "Error: "
"""Text before the result of a failed call (`is_error`). Chat templates have no other way to show that a call failed."""

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
"""Name of an error in this API, by HTTP status. Other statuses below 500 are `invalid_request_error`."""


# -- requests ----------------------------------------------------------------------------------------------------------


class _ResultPart(ContentPart):
    """Part of the content of a result: a text, or a reference to a tool of the request."""

    tool_name: str = ""
    """Name of the tool that a reference offers."""


class _Block(msgspec.Struct):
    """Content block of a request. `type` decides which of the other fields it has. Other fields are ignored."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    """Id of a call."""
    name: str = ""
    """Name of the called function."""
    input: dict[str, Any] = {}
    """Arguments of a call."""
    tool_use_id: str = ""
    """Id of the call that a result belongs to."""
    content: str | list[_ResultPart] | None = None
    """Content of a result."""
    is_error: bool | None = None
    """True if a result is the error message of a failed call."""


class _GivenMessage(msgspec.Struct):
    """Message of a request, as it was decoded. `_chat_messages` checks it."""

    role: str
    content: str | list[_Block]


class _GivenTool(msgspec.Struct):
    """Tool of a request. Tools with another type than `custom` are built into Claude, and are refused."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    """True for a deferred tool: the prompt does not show it until a result refers to it."""


class _ToolChoice(msgspec.Struct):
    """Choice of the tools that the policy may or must use."""

    type: str
    name: str = ""
    """Name of the function that must be called."""
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    """Settings of the reasoning."""

    type: str


class _OutputFormat(msgspec.Struct):
    """Format of the answer's text."""

    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct):
    """Settings of the answer."""

    format: _OutputFormat | None = None


class _CountBody(RequestedSampling, kw_only=True):
    """Fields of a request's body that the service reads. They have the meaning that Anthropic's API gives them.

    Some of them are read only to be refused. All other fields of a body are ignored, such as `metadata`.
    """

    model: str
    messages: list[_GivenMessage]
    system: str | list[ContentPart] | None = None
    tools: list[_GivenTool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None
    """Older place of `output_config.format`."""
    container: Any = None
    mcp_servers: Any = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class _MessagesBody(_CountBody, kw_only=True):
    """Fields of the body of a request for an answer, which must limit the answer's tokens."""

    max_tokens: int
    compaction: Any = None
    """Request for a summary in a block of its own; refused."""
    thread: Any = None
    """Request to keep the conversation, so that later requests send new messages only; refused."""


class MessagesRequest(msgspec.Struct, frozen=True):
    """A request of an agent through Anthropic's Messages API. `read` makes it for `app`."""

    request: AgentRequest
    """The request in the form that all APIs share."""
    with_thinking: bool
    """True if the answer shows the reasoning."""


_count_decoder = msgspec.json.Decoder(_CountBody)
_decoder = msgspec.json.Decoder(_MessagesBody)


def read(body: bytes) -> MessagesRequest:
    """Return the request for an answer in a body. `app` calls this for each request, in a thread if it is long.

    Raises:
        ApiError: the body is not JSON or not such a request, names another model, or asks for something unsupported.
    """
    parsed = decoded(_decoder, body)
    check_limit(parsed.max_tokens, "max_tokens")
    refuse_set_fields({"compaction": parsed.compaction})
    if parsed.thread:
        # The official client sends such a field by itself. After this code it sends the whole conversation instead.
        message = "`thread` is not supported here: leave it out, and send the whole conversation in each request."
        raise ApiError(400, message, "thread_unsupported_request", "thread")
    return MessagesRequest(
        request=_request(parsed, parsed.max_tokens),
        with_thinking=parsed.thinking is None or parsed.thinking.type != "disabled",
    )


def read_count(body: bytes) -> AgentRequest:
    """Return the request in a body whose tokens are to be counted. Raises ApiError, as `read` does."""
    return _request(decoded(_count_decoder, body), None)


def _request(parsed: _CountBody, max_tokens: int | None) -> AgentRequest:
    """Return a request in the form that all APIs share. Raises ApiError if it asks for something unsupported."""
    check_model(parsed.model)
    check_elements(_lists(parsed), "messages")
    refuse_unserved(parsed)
    refuse_set_fields({"container": parsed.container, "mcp_servers": parsed.mcp_servers})
    format = (parsed.output_config and parsed.output_config.format) or parsed.output_format
    schema = None if format is None else schema_of(format.type, format.schema, "output_config.format")
    if not parsed.messages:
        raise ApiError(400, "There are no messages.", None, "messages")
    functions = {tool["function"]["name"]: tool for tool in _function_tools(parsed.tools or [])}
    given, loaded = list(_system(parsed.system)), set[str]()
    for index, message in enumerate(parsed.messages):
        given += _chat_messages(message, functions, loaded, f"messages[{index}]")
    given_choice = parsed.tool_choice or _ToolChoice("auto")
    named = {"type": "function", "name": given_choice.name}
    choice = {"any": "required", "tool": named}.get(given_choice.type, given_choice.type)
    parallel = not given_choice.disable_parallel_tool_use
    deferred = {tool.name for tool in parsed.tools or () if tool.defer_loading}
    offered = tuple(tool for name, tool in functions.items() if name not in deferred)
    return AgentRequest(
        messages=messages_of(given),
        max_tokens=max_tokens,
        stream=bool(parsed.stream),
        tools=offered,
        loaded_tools=tuple(tool for name, tool in functions.items() if name in deferred and name in loaded),
        template=parsed.chat_template_kwargs or {},
        calling=may_call(choice),
        response_form=response_form(schema, choice, offered, parallel=parallel),
        parallel=parallel,
        object_arguments=True,
        stop=stop_texts(parsed.stop_sequences, "stop_sequences"),
        sampling=requested_sampling(parsed),
    )


def _lists(parsed: _CountBody) -> Iterator[Sequence[Any]]:
    """Yield all lists of a request that may be long, for `check_elements`."""
    yield parsed.messages
    yield parsed.tools or ()
    yield parsed.system if isinstance(parsed.system, list) else ()
    for message in parsed.messages:
        if isinstance(message.content, list):
            yield message.content
            yield from (block.content for block in message.content if isinstance(block.content, list))


def _system(system: str | list[ContentPart] | None) -> Iterator[ChatMessage]:
    """Yield the system message of a request, if it has one. Raises ApiError for a block that is not text."""
    if isinstance(system, list):
        system = _text([block for block in system if not (block.text or "").startswith(ATTRIBUTION)], "system")
    if system:
        yield ChatMessage("system", system)


def _chat_messages(
    message: _GivenMessage, functions: Mapping[str, Tool], loaded: set[str], place: str
) -> Iterator[ChatMessage]:
    """Yield one message of a request as messages for `chat.messages_of`: results of calls become messages of their own.

    Args:
        message: the message.
        functions: all tools of the request, by name, for the references to them.
        loaded: names of the tools that earlier results refer to. The names in this message are added.
        place: place of the message in the request, for error messages.

    Raises:
        ApiError: the message has an unknown role, a block that is not supported, or a reference to an unknown tool.
    """
    if message.role not in ROLES:
        raise ApiError(400, f"Roles are {', '.join(ROLES)}.", "unsupported_parameter", place)
    blocks = [_Block(TEXT, message.content)] if isinstance(message.content, str) else message.content
    if message.role == ASSISTANT:
        # Thinking without a text, which clients keep from Anthropic's own models, says nothing to the policy.
        blocks = [block for block in blocks if block.type != "redacted_thinking"]
        calls = [
            tools.GivenCall(tools.GivenFunction(block.name, block.input), block.id)
            for block in blocks
            if block.type == TOOL_USE
        ]
        reasoning = "".join(block.thinking for block in blocks if block.type == THINKING)
        content = _text([block for block in blocks if block.type not in (THINKING, TOOL_USE)], place)
        yield ChatMessage(ASSISTANT, content, reasoning_content=reasoning, tool_calls=calls)
        return
    # Results usually come first, and then what the user says. The order of the request is kept.
    start = 0
    for index, block in enumerate(blocks):
        if block.type == TOOL_RESULT and message.role == "user":
            if index > start:
                yield ChatMessage(message.role, _text(blocks[start:index], place))
            start = index + 1
            result = _result(block.content or "", functions, loaded, place)
            shown = FAILED_RESULT + result if block.is_error else result
            yield ChatMessage(TOOL, shown, tool_call_id=block.tool_use_id)
    if start < len(blocks) or not blocks:
        yield ChatMessage(message.role, _text(blocks[start:], place))


def _result(content: str | Sequence[_ResultPart], functions: Mapping[str, Tool], loaded: set[str], place: str) -> str:
    """Return the text of a result, in which the definition of a tool stands for the first reference to it.

    The other arguments are described at `_chat_messages`. Raises ApiError for other parts than texts and references,
    and for a reference to an unknown tool.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for is_reference, parts in groupby(content, lambda part: part.type == TOOL_REFERENCE):
        if not is_reference:
            texts.append(_text(list(parts), place))
            continue
        # The tools in the prompt cannot change within a branch, so the policy reads the definition in the result.
        # Claude Code promises this format to the policy in the description of its tool for searching tools.
        lines = ["<functions>"]
        for part in parts:
            name = part.tool_name
            if name not in functions:
                message = f"The tool reference {name[:100]!r} names none of `tools`."
                raise ApiError(400, message, "tool_reference_unresolved", place)
            # Thousands of references to one long definition would make a text of gigabytes.
            shown = {"name": name} if name in loaded else functions[name]["function"]
            loaded.add(name)
            lines.append(f"<function>{msgspec.json.encode(shown).decode()}</function>")
        texts.append("\n".join([*lines, "</functions>"]))
    return "".join(texts)


def _text(blocks: Sequence[_Block | ContentPart], place: str) -> str:
    """Return the joined texts of blocks. Raises ApiError if one of them is not text, which names `place`."""
    for block in blocks:
        if block.type != TEXT:
            known = "text, thinking, tool_use and tool_result"
            message = f"A content block of type {block.type[:100]!r} is not supported here: only {known} are."
            raise ApiError(400, message, "unsupported_parameter", place)
    return "".join(block.text or "" for block in blocks)


def _function_tools(requested: Sequence[_GivenTool]) -> tuple[Tool, ...]:
    """Return all tools of a request, deferred ones too, in the format of chat templates. Raises ApiError if one is not
    a function."""
    return tools.offered(
        [
            tools.GivenTool(
                "function" if tool.type in (None, "custom") else tool.type,
                tools.Function(tool.name, tool.description, tool.input_schema),
            )
            for tool in requested
        ]
    )


# -- answers and refusals ----------------------------------------------------------------------------------------------


class MessageFormat:
    """Format of an answer: a message as one body, or as a stream of events about its content blocks.

    `app` calls the methods in the order that `flash.service.app.AnswerFormat` describes. A request of this API has one
    answer, so `index` is always 0. In a stream, reasoning and text are sent while they are sampled, and calls at the
    end. A block that has ended cannot continue, so reasoning after text begins a new block. Clients expect a signature
    in each block of reasoning and send it back; nothing checks it here, so it is the name of the call.

    Args:
        name: name of the call, which becomes part of the message's id.
        with_thinking: True if the answer shows the reasoning.
    """

    def __init__(self, name: str, *, with_thinking: bool) -> None:
        self._name = name
        self._with_thinking = with_thinking
        self._blocks = 0
        """Number of blocks of the stream that have begun."""
        self._open = ""
        """Type of the block that has begun and not ended; empty if there is none."""

    def body(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the message as one body."""
        (answer,) = answers
        message = answer.message
        content: list[dict[str, Any]] = []
        if message.reasoning and self._with_thinking:
            content.append({"type": THINKING, "thinking": message.reasoning, "signature": self._name})
        # Agents expect at least one block, also in an empty answer.
        if message.content or not (content or message.tool_calls):
            content.append({"type": TEXT, "text": message.content})
        content += [_call_block(call, msgspec.Raw(call.arguments.encode())) for call in message.tool_calls]
        return msgspec.json.encode(
            {**self._head(), "content": content, **_stop(answer), "usage": _usage(answer.prompt_tokens, answer.tokens)}
        )

    def begin(self, index: int, prompt_tokens: int) -> bytes:
        """Encode the beginning of the message. The number of its own tokens is known at the end."""
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(prompt_tokens, 0)}
        return _event("message_start", message={**self._head(), **empty})

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of the answer."""
        events = b""
        if piece.reasoning and self._with_thinking:
            events += self._begin_block(THINKING, {"thinking": "", "signature": ""})
            events += self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.content:
            events += self._begin_block(TEXT, {"text": ""})
            events += self._delta({"type": "text_delta", "text": piece.content})
        return events

    def finish(self, answer: PolicyAnswer, index: int) -> bytes:
        """Encode the end of the last block, the calls, the reason why the answer ended, and the numbers of tokens."""
        events = b""
        if not (self._blocks or answer.message.tool_calls):
            events += self._begin_block(TEXT, {"text": ""})
        events += self._end_block()
        for call in answer.message.tool_calls:
            events += self._begin_block(TOOL_USE, _call_block(call, {}))
            events += self._delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._end_block()
        usage = _usage(answer.prompt_tokens, answer.tokens)
        return events + _event("message_delta", delta=_stop(answer), usage=usage)

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the end of the stream."""
        return _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """Encode an error that ends the stream before the answer is complete."""
        return _event("error", **error_content(error))

    def _head(self) -> dict[str, Any]:
        """Return the fields at the beginning of the message."""
        return {"id": f"msg_{self._name}", "type": "message", "role": ASSISTANT, "model": MODEL}

    def _begin_block(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Encode the beginning of a block of type `kind` and the end of the block before.

        Returns nothing if a block of this type is open: it continues. `empty` has the fields of the block before
        anything is added to it.
        """
        if self._open == kind:
            return b""
        ended = self._end_block()
        self._open = kind
        self._blocks += 1
        return ended + _event("content_block_start", index=self._blocks - 1, content_block={"type": kind, **empty})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        """Encode the event that adds `delta`, in the form of the block's type, to the open block."""
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _end_block(self) -> bytes:
        """Encode the end of the open block. Returns nothing if no block is open."""
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": self._name}) if self._open == THINKING else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._blocks - 1)


def _call_block(call: ToolCall, arguments: Any) -> dict[str, Any]:
    """Return the block of a call with these `arguments`."""
    return {"type": TOOL_USE, "id": call.id, "name": call.name, "input": arguments}


def _stop(answer: PolicyAnswer) -> dict[str, Any]:
    """Return the fields that say why an answer ended."""
    if answer.cut:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.message.tool_calls:
        return {"stop_reason": TOOL_USE, "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if answer.stop else "end_turn", "stop_sequence": answer.stop or None}


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    """Return the token counts of an answer: `prompt` tokens before it, and `sampled` tokens of its own.

    The API's prompt cache does not exist here, so its counts are 0.
    """
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": sampled}


def _event(kind: str, **fields: Any) -> bytes:
    """Encode a server-sent event of the type `kind`."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


def error_content(error: ApiError) -> dict[str, Any]:
    """Return the body of a refusal, before it is encoded as JSON.

    This API has no field for the wrong request field, so the error message begins with its name.
    """
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if error.code == "context_length_exceeded":
        # Some agents shorten their history if they find these words of Anthropic, which has no code for this error.
        message = f"prompt is too long: {message}"
    if error.param:
        message = f"{error.param}: {message}"
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def models() -> bytes:
    """Return the body of the list of models, which has one entry."""
    page = {"data": [_model()], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    return msgspec.json.encode(page)


def model(name: str) -> bytes:
    """Return the body that describes the model `name`.

    Raises:
        ApiError: `name` is not `MODEL`, the only model.
    """
    check_model(name)
    return msgspec.json.encode(_model())


def _model() -> dict[str, Any]:
    """Return the description of the only model."""
    created = "1970-01-01T00:00:00Z"
    return {"type": "model", "id": MODEL, "display_name": MODEL, "created_at": created, "lifecycle": "active"}
