"""Completions of the OpenAI API: requests and answers of agents that write the whole text of a conversation themselves.

A text that begins exactly with an earlier text and its answer continues the conversation there. White space counts.
`app` decodes a body with `read` and encodes the answers with a `CompletionFormat`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from flash.service.chat import AgentRequest, ChoiceFormat, PolicyAnswer, usage
from flash.service.fields import (
    MODEL,
    WHY_NO_TOP_LOGPROBS,
    ApiError,
    RequestedSampling,
    StreamOptions,
    check_limit,
    check_model,
    choices,
    decoded,
    refuse_given,
    refuse_unserved,
    requested_sampling,
    stops,
    unsupported,
)
from flash.service.history import EarlierAnswers
from flash.types import Piece


class _CompletionBody(RequestedSampling, kw_only=True):
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


_decoder = msgspec.json.Decoder(_CompletionBody)


def read(body: bytes, earlier: EarlierAnswers) -> tuple[AgentRequest, str]:
    """Decode the body of a request. Returns the request, whose messages are the parts of its text, and the whole text.

    `earlier` has the earlier texts and answers of the episode, by which the text is divided.

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
        raise unsupported("logprobs", WHY_NO_TOP_LOGPROBS)
    prompt = given.prompt[0] if isinstance(given.prompt, list) and len(given.prompt) == 1 else given.prompt
    if not isinstance(prompt, str):
        raise unsupported("prompt", "it must be one text")
    if not prompt:
        raise ApiError(400, "There is no text.", None, "prompt")
    request = AgentRequest(
        messages=earlier.parts(prompt),
        max_tokens=given.max_tokens,
        stream=bool(given.stream),
        with_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        logprobs=given.logprobs is not None,
        stop=stops(given.stop),
        choices=choices(given.n),
        sampling=requested_sampling(given),
    )
    return request, prompt


class CompletionFormat(ChoiceFormat):
    """Format of completions. In a stream, log-probs are in the last event of each answer.

    Args:
        name: name of the first call, which becomes part of the completion's id.
        with_usage: True if a stream ends with the token counts.
    """

    def __init__(self, name: str, *, with_usage: bool = False) -> None:
        super().__init__(_head(name), with_usage=with_usage)
        self._name = name

    def body(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode all answers as one body."""
        choices = [_choice(answer, index) for index, answer in enumerate(answers)]
        return msgspec.json.encode({**_head(self._name), "choices": choices, "usage": usage(answers)})

    def begin(self, index: int) -> bytes:
        """Return no event, since the API has none for the beginning of a text."""
        return b""

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of an answer."""
        return self._event([{"index": index, "text": piece.content, "logprobs": None, "finish_reason": None}])

    def finish(self, answer: PolicyAnswer, index: int) -> bytes:
        """Encode the end of an answer: its finish reason and its log-probs."""
        return self._event([{**_choice(answer, index), "text": ""}])


def _head(name: str) -> dict[str, Any]:
    return {"id": f"cmpl-{name}", "object": "text_completion", "created": int(time.time()), "model": MODEL}


def _choice(answer: PolicyAnswer, index: int) -> dict[str, Any]:
    """Return a complete answer as an element of `choices`."""
    finish = "length" if answer.cut else "stop"
    return {"index": index, "text": answer.message.content, "logprobs": _logprobs(answer), "finish_reason": finish}


def _logprobs(answer: PolicyAnswer) -> dict[str, Any] | None:
    """Return the log-probs of an answer's tokens in the format of the API; None if the agent did not ask for them.

    `text_offset` has the place of each token's first character in the answer.
    """
    if answer.logprobs is None:
        return None
    texts = [text for text, _ in answer.logprobs]
    starts = list(accumulate(map(len, texts), initial=0))[:-1]
    values = [value for _, value in answer.logprobs]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}
