"""Completions of the OpenAI API: requests and answers of agents that write the whole text of a conversation themselves.

A text that begins exactly with an earlier text and its answer continues the conversation there. White space counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from flash.service.chat import AgentRequest, ChoiceEvents, PolicyAnswer, usage
from flash.service.fields import (
    MODEL,
    TOP,
    ApiError,
    AskedSampling,
    StreamOptions,
    check_limit,
    check_model,
    choices,
    decoded,
    drawn,
    refuse_given,
    refuse_unserved,
    stops,
    unsupported,
)
from flash.service.history import EarlierAnswers
from flash.types import Piece


class CompletionRequest(msgspec.Struct, frozen=True):
    """A request for the continuation of a text."""

    asked: AgentRequest
    """The request, whose messages are the parts of `text`."""
    text: str
    """Whole text of the request, with the earlier answers in it."""


class _Body(AskedSampling, kw_only=True):
    """Fields of a request's body that the service reads. All other fields are ignored."""

    model: str
    prompt: str | list[Any]
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    suffix: str | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None


_decoder = msgspec.json.Decoder(_Body)


def read(body: bytes, kept: EarlierAnswers) -> CompletionRequest:
    """Decode the body of a request. `kept` holds the earlier texts and answers of the episode.

    Raises:
        ApiError: the body is not JSON or not such a request, names another model, or asks for something unsupported.
    """
    given = decoded(_decoder, body)
    check_model(given.model)
    check_limit(given.max_tokens, "max_tokens")
    best = given.best_of not in (None, given.n or 1)
    refuse_unserved(given)
    refuse_given({"best_of": best, "suffix": given.suffix, "echo": given.echo, "logit_bias": given.logit_bias})
    refuse_given({"chat_template_kwargs": given.chat_template_kwargs})
    if given.logprobs:
        raise unsupported("logprobs", TOP)
    prompt = given.prompt[0] if isinstance(given.prompt, list) and len(given.prompt) == 1 else given.prompt
    if not isinstance(prompt, str):
        raise unsupported("prompt", "it must be one text")
    if not prompt:
        raise ApiError(400, "There is no text.", None, "prompt")
    asked = AgentRequest(
        messages=kept.parts(prompt),
        max_tokens=given.max_tokens,
        stream=bool(given.stream),
        with_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        logprobs=given.logprobs is not None,
        stop=stops(given.stop),
        choices=choices(given.n),
        drawn=drawn(given),
    )
    return CompletionRequest(asked, prompt)


def completion(answers: Sequence[PolicyAnswer], name: str) -> bytes:
    """Return the body of an HTTP response with all answers. `name` is the name of the first call."""
    choices = [_choice(answer, index) for index, answer in enumerate(answers)]
    return msgspec.json.encode({**_head(name), "choices": choices, "usage": usage(answers)})


class CompletionEvents(ChoiceEvents):
    """Encodes completions as server-sent events. Log-probs are in the last event of each answer."""

    def __init__(self, name: str, *, with_usage: bool) -> None:
        super().__init__(_head(name), with_usage=with_usage)

    def begin(self, index: int) -> bytes:
        """Return no event, since the API has none for the beginning of a text."""
        return b""

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of an answer."""
        return self._event([{"index": index, "text": piece.content, "logprobs": None, "finish_reason": None}])

    def said(self, answer: PolicyAnswer, index: int) -> bytes:
        """Encode the end of an answer: its finish reason and its log-probs."""
        return self._event([{**_choice(answer, index), "text": ""}])


def _head(name: str) -> dict[str, Any]:
    return {"id": f"cmpl-{name}", "object": "text_completion", "created": int(time.time()), "model": MODEL}


def _choice(answer: PolicyAnswer, index: int) -> dict[str, Any]:
    finish = "length" if answer.cut else "stop"
    return {"index": index, "text": answer.message.content, "logprobs": _logprobs(answer), "finish_reason": finish}


def _logprobs(answer: PolicyAnswer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    texts = [text for text, _ in answer.logprobs]
    starts = list(accumulate(map(len, texts), initial=0))[:-1]
    values = [value for _, value in answer.logprobs]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}
