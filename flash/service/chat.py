"""Chat completions as the OpenAI API has them: a request that is read, an answer that is written, an error.

What of a request would change how tokens are sampled is refused when we do not do it; `temperature` and its like may
say what the run does, which alone says how its policy is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from flash.service import tools
from flash.service.errors import MASKED, TOP, ApiError, unsupported
from flash.service.fields import (
    MODEL,
    AskedSampling,
    ContentPart,
    StreamOptions,
    check_limit,
    check_model,
    check_pieces,
    choices,
    decoded,
    drawn,
    refuse_given,
    refuse_unserved,
    stops,
    text_of,
)
from flash.types import ASSISTANT, TOOL, Message, Piece, Tool

ROLES = {"system": "system", "developer": "system", "user": "user", ASSISTANT: ASSISTANT, TOOL: TOOL}
"""Who may speak, and what chat templates call it."""


class AgentRequest(msgspec.Struct, frozen=True):
    """One request for an answer."""

    messages: list[Message]
    max_tokens: int | None
    """Most tokens of the answer, where the agent says so."""
    stream: bool = False
    with_usage: bool = False
    """Whether a stream ends with the count of tokens."""
    tools: tuple[Tool, ...] = ()
    """Functions that the policy is shown."""
    template: dict[str, Any] = {}
    """Arguments of the chat template."""
    calling: bool = True
    """Whether its calls are looked for."""
    parallel: bool = True
    """Whether it may make several at once."""
    logprobs: bool = False
    """Whether the log-probs of the answer's tokens are wanted."""
    stop: tuple[str, ...] = ()
    """Texts that the answer ends at, and does not show."""
    choices: int = 1
    """Answers that are wanted."""
    drawn: tuple[tuple[str, float], ...] = ()
    """What it takes for how answers are drawn, by the names of `flash.sampling.Sampling` and more."""
    choice: int = 0
    """Which of them this one asks for."""
    common: bytes = b""
    """What `digest` is made of beside the choice, where that is known: to read megabytes takes milliseconds."""
    size: int = 0
    """Bytes that it takes, where they are known; the choices share them."""

    @property
    def form(self) -> list[dict[str, Any]]:
        """The tools and the arguments of the chat template, which stand before all that is said in a branch."""
        return [*self.tools, self.template] if self.template else list(self.tools)

    def each(self) -> list[AgentRequest]:
        """A request for each answer that is wanted."""
        shown = self._shown()
        common, size = _digest(shown), len(shown)
        return [
            msgspec.structs.replace(self, choice=choice, common=common, size=0 if choice else size)
            for choice in range(self.choices)
        ]

    def digest(self) -> bytes:
        """Equal for requests that ask the same."""
        return (self.common or _digest(self._shown())) + bytes([self.choice])

    def _shown(self) -> bytes:
        shown = self.messages, self.tools, self.template, self.calling, self.parallel
        return msgspec.json.encode((*shown, self.max_tokens, self.logprobs, self.stop))


def _digest(shown: bytes) -> bytes:
    return blake2b(shown, digest_size=16).digest()


class PolicyAnswer(msgspec.Struct, frozen=True):
    """What the policy said."""

    message: Message
    cut: bool
    """The token limit ended it."""
    prompt_tokens: int
    tokens: int
    logprobs: list[tuple[str, float]] | None = None
    """Each token's text and log-prob, where they were wanted."""
    stop: str = ""
    """The text at which it ended, and which the message does not show."""


class ChatMessage(msgspec.Struct):
    """A message, as requests and data sets give it."""

    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The reasoning, by its newer name."""
    thinking: str | None = None
    """The reasoning, by the name that GPT-OSS's chat template has for it."""
    tool_calls: list[tools.GivenCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Any = None
    refusal: str | None = None
    """The text of an answer that refuses, in the place of a content."""
    weight: float | None = None
    """In a row of `flash sft`: 0 for an answer that is not to be learned."""


class _Format(msgspec.Struct):
    type: str = "text"


class _Body(AskedSampling, kw_only=True):
    """The fields that are read; all others are none of our business."""

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
    response_format: _Format | None = None


_decoder = msgspec.json.Decoder(_Body)


def read(body: bytes) -> AgentRequest:
    """A request.

    Raises:
        ApiError: it is no JSON, not a request, of another model, or asks for what is not done here.
    """
    asked = decoded(_decoder, body)
    check_model(asked.model)
    check_pieces(_pieces(asked), "messages")
    _refuse_the_rest(asked)
    if not asked.messages:
        raise ApiError(400, "There are no messages.", None, "messages")
    check_limit(asked.max_tokens, "max_tokens")
    check_limit(asked.max_completion_tokens, "max_completion_tokens")
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
    return AgentRequest(
        messages=messages_of(asked.messages),
        max_tokens=min(limits, default=None),
        stream=bool(asked.stream),
        with_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
        tools=tools.offered(asked.tools or []),
        template=asked.chat_template_kwargs or {},
        calling=tools.may_call(asked.tool_choice),
        parallel=asked.parallel_tool_calls is not False,
        logprobs=bool(asked.logprobs),
        stop=stops(asked.stop),
        choices=choices(asked.n),
        drawn=drawn(asked),
    )


def _pieces(asked: _Body) -> Iterator[Sequence[Any]]:
    yield asked.messages
    yield asked.tools or ()
    for message in asked.messages:
        yield message.tool_calls or ()
        yield message.content if isinstance(message.content, list) else ()


def _refuse_the_rest(asked: _Body) -> None:
    refuse_unserved(asked)
    refuse_given({"logit_bias": asked.logit_bias, "functions": asked.functions})
    if asked.top_logprobs:
        raise unsupported("top_logprobs", TOP)
    if asked.response_format is not None and asked.response_format.type != "text":
        raise unsupported("response_format", MASKED)


def messages_of(given: list[ChatMessage]) -> list[Message]:
    """Return messages in the form of the episode. A result of a function gets the function's name from its call.

    Raises:
        ApiError: a message has an unknown role, calls of functions from another role, or content that is not text.
    """
    called: dict[str, str] = {}
    messages: list[Message] = []
    for index, one in enumerate(given):
        message = _message(one, f"messages[{index}]")
        called |= {call.id: call.name for call in message.tool_calls}
        if message.role == TOOL:
            name = called.get(message.tool_call_id) or one.name or ""
            message = msgspec.structs.replace(message, name=name)
        messages.append(message)
    return messages


def _message(given: ChatMessage, place: str) -> Message:
    if given.role not in ROLES or given.function_call:
        known = ", ".join(ROLES)
        raise ApiError(400, f"Roles are {known}, and calls are `tool_calls`.", "unsupported_parameter", place)
    if given.tool_calls and given.role != ASSISTANT:
        raise ApiError(400, "Only an assistant calls functions.", None, place)
    return Message(
        role=ROLES[given.role],
        content=text_of(given.content, place) or given.refusal or "",
        reasoning=given.reasoning or given.reasoning_content or given.thinking or "",
        tool_calls=tools.calls_of(given.tool_calls or []),
        tool_call_id=given.tool_call_id or "",
    )


def completion(answers: Sequence[PolicyAnswer], name: str) -> bytes:
    """Answers in one piece. `name` is the first call's own."""
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        message = {"role": ASSISTANT, "content": None, "refusal": None, **_said(answer.message)}
        scored = {"logprobs": _logprobs(answer), "finish_reason": _finish(answer)}
        choices.append({"index": index, "message": message, **scored})
    return msgspec.json.encode({**_head(name, "chat.completion"), "choices": choices, "usage": usage(answers)})


class ChoiceEvents:
    """Answers as server-sent events with choices, each with what all of them begin with, and counts at their end."""

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._head = head
        self._with_usage = with_usage

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """All answers were."""
        counts = self._event([], usage=usage(answers)) if self._with_usage else b""
        return counts + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        """It ends in the middle."""
        return _event(error.said)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _event({**self._head, "choices": choices, **more})


class ChatEvents(ChoiceEvents):
    """Calls and log-probs come with the end of each answer."""

    def __init__(self, name: str, *, with_usage: bool) -> None:
        super().__init__(_head(name, "chat.completion.chunk"), with_usage=with_usage)

    def begin(self, index: int) -> bytes:
        """Before anything was said."""
        return self._event(_choice(index, {"role": ASSISTANT, "content": ""}))

    def piece(self, piece: Piece, index: int) -> bytes:
        """More was said."""
        delta = {"content": piece.content} if piece.content else {}
        return self._event(_choice(index, delta | _thought(piece.reasoning)))

    def said(self, answer: PolicyAnswer, index: int) -> bytes:
        """All was said."""
        calls = enumerate(tools.shown(answer.message.tool_calls))
        events = [self._event(_choice(index, {"tool_calls": [{"index": place, **call}]})) for place, call in calls]
        if answer.logprobs is not None:
            events.append(self._event(_choice(index, {}, logprobs=_logprobs(answer))))
        events.append(self._event(_choice(index, {}, finish_reason=_finish(answer))))
        return b"".join(events)


def _event(content: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _choice(index: int, delta: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]


def _said(message: Message) -> dict[str, Any]:
    """What a message says, without what it does not."""
    said: dict[str, Any] = {}
    if message.content or not message.tool_calls:
        said["content"] = message.content
    said |= _thought(message.reasoning)
    if message.tool_calls:
        said["tool_calls"] = tools.shown(message.tool_calls)
    return said


def _thought(reasoning: str) -> dict[str, Any]:
    """By both of the names that clients look for."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def models() -> bytes:
    """The list of the one model."""
    return msgspec.json.encode({"object": "list", "data": [_model()]})


def model(name: str) -> bytes:
    """A model.

    Raises:
        ApiError: there is no such model.
    """
    check_model(name)
    return msgspec.json.encode(_model())


def _model() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "flash"}


def _head(name: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": MODEL}


def _logprobs(answer: PolicyAnswer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    told = [
        {"token": text, "logprob": value, "bytes": None, "top_logprobs": list[Any]()} for text, value in answer.logprobs
    ]
    return {"content": told, "refusal": None}


def _finish(answer: PolicyAnswer) -> str:
    if answer.cut:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def usage(answers: Sequence[PolicyAnswer]) -> dict[str, int]:
    """The count of tokens of the answers to one request."""
    prompt, said = answers[0].prompt_tokens, sum(answer.tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
