"""Chat completions as the OpenAI API has them: a request that is read, an answer that is written, an error.

What of a request would change how tokens are sampled is refused when we do not do it; `temperature` and its like are
left unread, because the run says how its policy is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from flash.types import Message

MODEL = "policy"
"""The name of the one model there is."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Who may speak, and what chat templates call it."""


class ApiError(Exception):
    """An answer that says what was wrong, in the form of the API.

    Args:
        status: of HTTP. 400, 401, 404 and 413 are not tried again by the API's own clients.
        message: for people.
        code: for programs.
        param: the field that is wrong, where it is one.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode(
            {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}
        )


class Asked(msgspec.Struct, frozen=True):
    """One request for an answer."""

    messages: list[Message]
    max_tokens: int | None
    """Most tokens of the answer, where the agent says so."""
    stream: bool = False
    with_usage: bool = False
    """Whether a stream ends with the count of tokens."""

    def digest(self) -> bytes:
        """Equal for requests that ask the same."""
        return blake2b(msgspec.json.encode((self.messages, self.max_tokens)), digest_size=16).digest()


class Answer(msgspec.Struct, frozen=True):
    """What the policy said."""

    content: str
    cut: bool
    """The token limit ended it."""
    prompt_tokens: int
    tokens: int


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Spoken(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Body(msgspec.Struct):
    """The fields that are read; all others are none of our business."""

    model: str
    messages: list[_Spoken]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: _Format | None = None


_decoder = msgspec.json.Decoder(_Body)


def read(body: bytes) -> Asked:
    """A request.

    Raises:
        ApiError: it is no JSON, not a request, of another model, or asks for what is not done here.
    """
    try:
        asked = _decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        raise ApiError(400, f"Invalid request: {error}.", None, place.strip("`$.") or _missing(message)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body of the request is no JSON: {error}.") from error
    if asked.model != MODEL:
        raise ApiError(
            404, f"The model {asked.model[:100]!r} does not exist: there is {MODEL!r}.", "model_not_found", "model"
        )
    _refuse_the_rest(asked)
    if not asked.messages:
        raise ApiError(400, "There are no messages.", None, "messages")
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
    if any(limit < 1 for limit in limits):
        raise ApiError(400, "An answer has at least 1 token.", None, "max_tokens")
    return Asked(
        messages=[_message(spoken, f"messages[{index}]") for index, spoken in enumerate(asked.messages)],
        max_tokens=min(limits, default=None),
        stream=bool(asked.stream),
        with_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
    )


def _missing(message: str) -> str | None:
    """The field that an error says is missing."""
    parts = message.split("`")
    return parts[1] if "missing required field" in message else None


def _refuse_the_rest(asked: _Body) -> None:
    unwanted = {
        "n": asked.n not in (None, 1),
        "stop": bool(asked.stop),
        "logprobs": bool(asked.logprobs),
        "top_logprobs": bool(asked.top_logprobs),
        "logit_bias": bool(asked.logit_bias),
        "tools": bool(asked.tools),
        "functions": bool(asked.functions),
        "response_format": asked.response_format is not None and asked.response_format.type != "text",
    }
    for name, given in unwanted.items():
        if given:
            raise ApiError(400, f"`{name}` is not supported here: leave it out.", "unsupported_parameter", name)


def _message(spoken: _Spoken, place: str) -> Message:
    if spoken.role not in ROLES or spoken.tool_calls or spoken.function_call:
        known = ", ".join(ROLES)
        raise ApiError(400, f"Tools are not supported here, and roles are {known}.", "unsupported_parameter", place)
    content = spoken.content
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise ApiError(400, "Only text is supported here.", "unsupported_parameter", place)
        content = "".join(part.text for part in content)
    return Message(ROLES[spoken.role], content or "")


def completion(answer: Answer, name: str) -> bytes:
    """An answer in one piece. `name` is the call's own."""
    message = {"role": "assistant", "content": answer.content, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answer)}
    return msgspec.json.encode({**_head(name, "chat.completion"), "choices": [choice], "usage": _usage(answer)})


def stream(answer: Answer, name: str, *, with_usage: bool) -> Iterator[bytes]:
    """An answer as server-sent events."""

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**_head(name, "chat.completion.chunk"), "choices": choices, **more}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def choice(delta: dict[str, str], finish: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]

    yield event(choice({"role": "assistant", "content": answer.content}, None))
    yield event(choice({}, _finish(answer)))
    if with_usage:
        yield event([], usage=_usage(answer))
    yield b"data: [DONE]\n\n"


def models() -> bytes:
    """The list of the one model."""
    return msgspec.json.encode({"object": "list", "data": [_model()]})


def model(name: str) -> bytes:
    """A model.

    Raises:
        ApiError: there is no such model.
    """
    if name != MODEL:
        raise ApiError(404, f"The model {name[:100]!r} does not exist: there is {MODEL!r}.", "model_not_found", "model")
    return msgspec.json.encode(_model())


def _model() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "flash"}


def _head(name: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": MODEL}


def _finish(answer: Answer) -> str:
    return "length" if answer.cut else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }
