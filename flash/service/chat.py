"""Chat completions of the OpenAI API: requests are decoded, and answers are encoded as one body or as a stream.

`app` decodes a body with `read` and encodes the answers with a `ChatFormat`. `models` and `model` return the bodies
of the routes below /v1/models. `AgentRequest` and `PolicyAnswer` are the requests and answers of all APIs.
`messages` and `flash sft` also turn their messages into those of the episode with `messages_of`.

A *call* is either a `sessions.Call`, which is one wanted answer with its request, or a call of a function (a *tool*) in
a message. The *name* of a `Call` becomes part of ids.

The run's configuration alone decides how tokens are sampled. Sampling settings that a request may name, such as
`temperature`, do not change it; a difference is logged. A request may want a form of the answer (`forms`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from flash.service import tools
from flash.service.fields import (
    MODEL,
    WHY_NO_TOP_LOGPROBS,
    ApiError,
    ContentPart,
    RequestedSampling,
    StreamOptions,
    answers_wanted,
    check_elements,
    check_limit,
    check_model,
    decoded,
    refuse_set_fields,
    refuse_unserved,
    requested_sampling,
    shortened,
    stop_texts,
    text_of,
    unsupported,
)
from flash.service.forms import may_call, response_form, schema_of
from flash.types import ASSISTANT, TOOL, Message, Piece, ResponseForm, Tool

ROLES = {"system": "system", "developer": "system", "user": "user", ASSISTANT: ASSISTANT, TOOL: TOOL}
"""Roles that a message of a request may have, and the role in chat templates for each."""


class AgentRequest(msgspec.Struct, frozen=True):
    """A request for one or more answers of the policy, from any of the APIs.

    The `read` functions of the APIs make it, and `app` makes one call in the episode's session for each answer.
    """

    messages: list[Message]
    """Whole conversation, including earlier answers."""
    max_tokens: int | None
    """Largest number of tokens of the answer; None: the agent gives no limit."""
    stream: bool = False
    """True if the answer is streamed to the agent while it is sampled."""
    with_usage: bool = False
    """True if a stream ends with the token counts."""
    tools: tuple[Tool, ...] = ()
    """Functions that the prompt offers to the policy."""
    loaded_tools: tuple[Tool, ...] = ()
    """Functions that the prompt does not offer, but the result of a call in `messages` does."""
    template: dict[str, Any] = {}
    """Arguments of the chat template."""
    calling: bool = True
    """True if the answer is searched for calls of functions."""
    parallel: bool = True
    """True if the answer may have more than one call of a function."""
    object_arguments: bool = False
    """True if the arguments of each call in the answer must be a JSON object (`tools.with_object`)."""
    logprobs: bool = False
    """True if the agent wants the log-probs of the answer's tokens."""
    stop: tuple[str, ...] = ()
    """Stop texts: the answer ends before the first of them."""
    response_form: ResponseForm | None = None
    """Form that the answer must have; None: no form."""
    choices: int = 1
    """Number of answers that the agent wants."""
    sampling: tuple[tuple[str, float], ...] = ()
    """Sampling settings that the agent names, and their values. They do not change how the answer is sampled."""
    choice: int = 0
    """Number of this answer among the `choices`, counted from 0."""
    common: bytes = b""
    """Digest of the content that all choices share; empty if it is not computed yet. `each` computes it once for all
    choices, because hashing megabytes takes milliseconds."""
    size: int = 0
    """Bytes of the encoded request for the first choice, else 0, because all choices share the content. Set by
    `each`."""

    @property
    def prompt_beginning(self) -> list[dict[str, Any]]:
        """Everything that decides how the prompt begins: the tools, then the template's arguments if there are any.

        All requests of one branch of the conversation begin equally, because a branch keeps its tokens
        (`flash.service.history`).
        """
        return [*self.tools, self.template] if self.template else list(self.tools)

    def each(self) -> list[AgentRequest]:
        """Return one request for each answer that the agent wants, with `choice`, `common` and `size` set."""
        content = self._content()
        common, size = _digest(content), len(content)
        return [
            msgspec.structs.replace(self, choice=choice, common=common, size=0 if choice else size)
            for choice in range(self.choices)
        ]

    def digest(self) -> bytes:
        """Return a digest that is equal for requests with the same content and the same `choice`.

        Sessions find by it the earlier call that a request repeats. The last byte is `choice`: the answers to one
        request must be different calls.
        """
        return (self.common or _digest(self._content())) + bytes([self.choice])

    def _content(self) -> bytes:
        """Return the fields that determine the answer, encoded.

        `stream` and `with_usage` are not among them, because they only change how the answer is sent, nor is
        `sampling`, because it is ignored.
        """
        fields = self.messages, self.tools, self.template, self.calling, self.parallel, self.object_arguments
        return msgspec.json.encode((*fields, self.max_tokens, self.logprobs, self.stop, self.response_form))


def _digest(content: bytes) -> bytes:
    """Return the digest of the encoded content of a request."""
    return blake2b(content, digest_size=16).digest()


class PolicyAnswer(msgspec.Struct, frozen=True):
    """An answer of the policy. `envs.agent` makes it from a sampled response, and the formats of the APIs encode it."""

    message: Message
    """Content, reasoning and calls of functions of the answer."""
    cut: bool
    """True if the answer was cut off at a limit of tokens."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    tokens: int
    """Number of tokens of the answer."""
    logprobs: list[tuple[str, float]] | None = None
    """Text and log-prob of each token of the answer; None if the agent did not ask for them."""
    stop: str = ""
    """Stop text before which the content was cut; empty if the content had none."""


class ChatMessage(msgspec.Struct):
    """A chat message, in the format of requests and data sets. `messages_of` checks it."""

    role: str
    """A key of `ROLES`."""
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    """Reasoning of an assistant."""
    reasoning: str | None = None
    """Reasoning, under the newer name of the field."""
    thinking: str | None = None
    """Reasoning, under the name in the chat template of GPT-OSS."""
    tool_calls: list[tools.GivenCall] | None = None
    """Calls of functions by an assistant."""
    tool_call_id: str | None = None
    """Id of the call whose result the message has."""
    name: str | None = None
    """Name of the function whose result the message has."""
    function_call: Any = None
    """Call in the API's older form, which is refused."""
    refusal: str | None = None
    """Text of an assistant's message that refuses, instead of a content."""
    weight: float | None = None
    """Weight of an answer in a row for `flash sft`; 0: the answer is not trained. Requests have no such field."""


class _JsonSchema(msgspec.Struct):
    """Description of a JSON text. Its name and description are ignored."""

    schema: dict[str, Any] | None = None


class _ResponseFormat(msgspec.Struct):
    """Format of the answer's text."""

    type: str = "text"
    json_schema: _JsonSchema | None = None


class _ChatBody(RequestedSampling, kw_only=True):
    """Fields of a request's body that the service reads. They have the meaning that OpenAI's API gives them.

    Some of them are read only to be refused (`_refuse_unsupported`). All other fields of a body are ignored.
    """

    model: str
    messages: list[ChatMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[tools.GivenTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    response_format: _ResponseFormat | None = None


_decoder = msgspec.json.Decoder(_ChatBody)


def read(body: bytes) -> AgentRequest:
    """Return the request for chat completions in a body. `app` calls this for each request, in a thread if it is long.

    Raises:
        ApiError: the body is not JSON or not such a request, names another model, or asks for something unsupported.
    """
    parsed = decoded(_decoder, body)
    check_model(parsed.model)
    check_elements(_lists(parsed), "messages")
    _refuse_unsupported(parsed)
    if not parsed.messages:
        raise ApiError(400, "There are no messages.", None, "messages")
    check_limit(parsed.max_tokens, "max_tokens")
    check_limit(parsed.max_completion_tokens, "max_completion_tokens")
    limits = [limit for limit in (parsed.max_tokens, parsed.max_completion_tokens) if limit is not None]
    format = parsed.response_format or _ResponseFormat()
    schema = schema_of(format.type, format.json_schema and format.json_schema.schema, "response_format")
    offered, parallel = tools.offered(parsed.tools or []), parsed.parallel_tool_calls is not False
    return AgentRequest(
        messages=messages_of(parsed.messages),
        max_tokens=min(limits, default=None),
        stream=bool(parsed.stream),
        with_usage=parsed.stream_options is not None and bool(parsed.stream_options.include_usage),
        tools=offered,
        template=parsed.chat_template_kwargs or {},
        calling=may_call(parsed.tool_choice),
        response_form=response_form(schema, parsed.tool_choice, offered, parallel=parallel),
        parallel=parallel,
        logprobs=bool(parsed.logprobs),
        stop=stop_texts(parsed.stop),
        choices=answers_wanted(parsed.n),
        sampling=requested_sampling(parsed),
    )


def _lists(parsed: _ChatBody) -> Iterator[Sequence[Any]]:
    """Yield all lists of a request that may be long, for `check_elements`."""
    yield parsed.messages
    yield parsed.tools or ()
    for message in parsed.messages:
        yield message.tool_calls or ()
        yield message.content if isinstance(message.content, list) else ()


def _refuse_unsupported(parsed: _ChatBody) -> None:
    """Raise ApiError for a field that would change how the answer is sampled or shown, and that is not supported."""
    refuse_unserved(parsed)
    refuse_set_fields({"logit_bias": parsed.logit_bias, "functions": parsed.functions})
    if parsed.top_logprobs:
        raise unsupported("top_logprobs", WHY_NO_TOP_LOGPROBS)


def messages_of(chat_messages: list[ChatMessage]) -> list[Message]:
    """Return messages in the form of the episode. A result of a function gets the function's name from its call.

    Raises:
        ApiError: a message has an unknown role, calls of functions from a role other than the assistant's, a call that
            is not of a function or is in the older field `function_call`, or content that is not text.
    """
    called: dict[str, str] = {}  # names of the called functions, by the id of the call
    messages: list[Message] = []
    for index, one in enumerate(chat_messages):
        message = _message(one, f"messages[{index}]")
        called |= {call.id: call.name for call in message.tool_calls}
        if message.role == TOOL:
            name = called.get(message.tool_call_id) or one.name or ""
            message = msgspec.structs.replace(message, name=name)
        messages.append(message)
    return messages


def _message(chat_message: ChatMessage, place: str) -> Message:
    """Return one message in the form of the episode. `place` is its place in the request, for error messages.

    Raises the errors of `messages_of`.
    """
    if chat_message.role not in ROLES:
        message = f"Roles are {', '.join(ROLES)}, but this is {shortened(chat_message.role)}."
        raise ApiError(400, message, "unsupported_parameter", place)
    if chat_message.function_call:
        message = "The older field `function_call` is not supported here: send the call in `tool_calls`."
        raise ApiError(400, message, "unsupported_parameter", place)
    if chat_message.tool_calls and chat_message.role != ASSISTANT:
        raise ApiError(400, "Only an assistant calls functions.", None, place)
    return Message(
        role=ROLES[chat_message.role],
        content=text_of(chat_message.content, place) or chat_message.refusal or "",
        # A client sends the reasoning under one of these names, or the same text under several.
        reasoning=chat_message.reasoning or chat_message.reasoning_content or chat_message.thinking or "",
        tool_calls=tools.calls_of(chat_message.tool_calls or []),
        tool_call_id=chat_message.tool_call_id or "",
    )


class ChoiceFormat:
    """Base of the formats of chat completions and of completions, whose bodies and server-sent events have `choices`,
    one for each answer.

    `app` calls the methods in the order that `flash.service.app.AnswerFormat` describes. The parameter `index` of the
    methods is the number of an answer among the answers to the request, counted from 0.

    Args:
        head: fields that every event has.
        with_usage: True if the token counts are the last event before the end of the stream.
    """

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._head = head
        self._with_usage = with_usage

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the token counts, if the client wants them, and the end of the stream."""
        counts = self._event([], usage=usage(answers)) if self._with_usage else b""
        return counts + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        """Encode an error that ends the stream before the answers are complete."""
        return _event(error.content)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Encode a server-sent event with the head, these `choices`, and `more` fields."""
        return _event({**self._head, "choices": choices, **more})


class ChatFormat(ChoiceFormat):
    """Format of chat completions. In a stream, calls of functions and log-probs are sent at the end of each answer.

    `ChoiceFormat` describes when the methods are called.

    Args:
        name: name of the first call, which becomes part of the completion's id.
        with_usage: True if a stream ends with the token counts.
    """

    def __init__(self, name: str, *, with_usage: bool = False) -> None:
        super().__init__(_head(name, "chat.completion.chunk"), with_usage=with_usage)
        self._name = name

    def body(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode all answers as one body."""
        choices: list[dict[str, Any]] = []
        for index, answer in enumerate(answers):
            message = {"role": ASSISTANT, "content": None, "refusal": None, **_message_fields(answer.message)}
            end = {"logprobs": _logprobs(answer), "finish_reason": _finish_reason(answer)}
            choices.append({"index": index, "message": message, **end})
        head = _head(self._name, "chat.completion")
        return msgspec.json.encode({**head, "choices": choices, "usage": usage(answers)})

    def begin(self, index: int, prompt_tokens: int) -> bytes:
        """Encode the beginning of an answer, which this API sends without the size of the prompt."""
        return self._event(_choice(index, {"role": ASSISTANT, "content": ""}))

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of an answer."""
        delta = {"content": piece.content} if piece.content else {}
        return self._event(_choice(index, delta | _reasoning_fields(piece.reasoning)))

    def finish(self, answer: PolicyAnswer, index: int) -> bytes:
        """Encode the end of an answer: its calls, its log-probs and its finish reason."""
        calls = enumerate(tools.encoded_calls(answer.message.tool_calls))
        events = [self._event(_choice(index, {"tool_calls": [{"index": place, **call}]})) for place, call in calls]
        if answer.logprobs is not None:
            events.append(self._event(_choice(index, {}, logprobs=_logprobs(answer))))
        events.append(self._event(_choice(index, {}, finish_reason=_finish_reason(answer))))
        return b"".join(events)


def _event(content: dict[str, Any]) -> bytes:
    """Encode a server-sent event. It has no `event:` line, as in the API."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _choice(index: int, delta: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Return the `choices` of an event: `delta` is the new part of the message of answer `index`.

    `more` replaces other fields.
    """
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]


def _message_fields(message: Message) -> dict[str, Any]:
    """Return the non-empty parts of an answer's message for a body: content, reasoning and calls of functions.

    A message without calls always has a content, which may be empty.
    """
    fields: dict[str, Any] = {}
    if message.content or not message.tool_calls:
        fields["content"] = message.content
    fields |= _reasoning_fields(message.reasoning)
    if message.tool_calls:
        fields["tool_calls"] = tools.encoded_calls(message.tool_calls)
    return fields


def _reasoning_fields(reasoning: str) -> dict[str, Any]:
    """Return the reasoning, if there is any, under both names that clients read."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def models() -> bytes:
    """Return the body of the list of models, which has one entry."""
    return msgspec.json.encode({"object": "list", "data": [_model()]})


def model(name: str) -> bytes:
    """Return the body that describes the model `name`.

    Raises:
        ApiError: `name` is not `MODEL`, the only model.
    """
    check_model(name)
    return msgspec.json.encode(_model())


def _model() -> dict[str, Any]:
    """Return the description of the only model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "flash"}


def _head(name: str, kind: str) -> dict[str, Any]:
    """Return the fields at the beginning of a body or event. `kind` is its type in the API, the field `object`."""
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": MODEL}


def _logprobs(answer: PolicyAnswer) -> dict[str, Any] | None:
    """Return the log-probs of an answer's tokens in the format of the API; None if the agent did not ask for them."""
    if answer.logprobs is None:
        return None
    tokens = [
        {"token": text, "logprob": value, "bytes": None, "top_logprobs": list[Any]()} for text, value in answer.logprobs
    ]
    return {"content": tokens, "refusal": None}


def _finish_reason(answer: PolicyAnswer) -> str:
    """Return why an answer ended, in the words of the API."""
    if answer.cut:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def usage(answers: Sequence[PolicyAnswer]) -> dict[str, int]:
    """Return the token counts of the answers to one request. The prompt that they share counts once."""
    prompt, sampled = answers[0].prompt_tokens, sum(answer.tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
