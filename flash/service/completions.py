"""Completions of the OpenAI API: requests and answers of agents that write the whole text of a conversation themselves.

A text that begins exactly with an earlier text and its answer continues the conversation there. White space counts.
`app` decodes a body with `read` and encodes the answers with a `CompletionFormat`. The *name* of the `sessions.Call`
for the first answer becomes part of the completion's id.
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
    answers_wanted,
    check_limit,
    check_model,
    decoded,
    refuse_set_fields,
    refuse_unserved,
    requested_sampling,
    stop_texts,
    unsupported,
)
from flash.service.history import EarlierAnswers
from flash.types import Piece


class _CompletionBody(RequestedSampling, kw_only=True):
    """Fields of a request's body that the service reads. They have the meaning that OpenAI's API gives them.

    All other fields of a body are ignored.
    """

    model: str
    prompt: str | list[Any]
    """The text, or a list of only the text. Other lists, such as several texts or tokens, are refused."""
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    """True to repeat the prompt in the answer; refused."""
    suffix: str | None = None
    """Text after the answer; refused."""
    n: int | None = None
    """Number of answers; null: one."""
    best_of: int | None = None
    """Number of answers of which the best `n` are returned; refused unless it equals `n`."""
    stop: str | list[str] | None = None
    logprobs: int | None = None
    """0: log-probs of the sampled tokens are wanted. Larger numbers ask for other tokens too, and are refused."""
    logit_bias: dict[str, float] | None = None
    """Bias of each token, by its id; refused."""
    response_format: Any = None
    """Form of the answer, in the APIs of vLLM and SGLang; refused unless it asks for free text."""


_decoder = msgspec.json.Decoder(_CompletionBody)


def read(body: bytes, earlier: EarlierAnswers) -> tuple[AgentRequest, str]:
    """Return the request in a body, whose messages are the parts of its text, and the whole text.

    `app` calls this for each request, in a thread if it is long. `earlier` has the earlier texts and answers of the
    episode, by which the text is divided.

    Raises:
        ApiError: the body is not JSON or not such a request, names another model, or asks for something unsupported.
    """
    parsed = decoded(_decoder, body)
    check_model(parsed.model)
    check_limit(parsed.max_tokens, "max_tokens")
    refuse_unserved(parsed)
    refuse_set_fields(
        {
            # `best_of` is harmless only if it equals `n`, because no answer is left out then.
            "best_of": parsed.best_of not in (None, parsed.n or 1),
            "suffix": parsed.suffix,
            "echo": parsed.echo,
            "logit_bias": parsed.logit_bias,
            "response_format": parsed.response_format not in (None, {"type": "text"}),
            "chat_template_kwargs": parsed.chat_template_kwargs,
        }
    )
    if parsed.logprobs:
        raise unsupported("logprobs", WHY_NO_TOP_LOGPROBS)
    prompt = parsed.prompt[0] if isinstance(parsed.prompt, list) and len(parsed.prompt) == 1 else parsed.prompt
    if not isinstance(prompt, str):
        raise unsupported("prompt", "it must be one text")
    if not prompt:
        raise ApiError(400, "There is no text.", None, "prompt")
    request = AgentRequest(
        messages=earlier.parts(prompt),
        max_tokens=parsed.max_tokens,
        stream=bool(parsed.stream),
        with_usage=parsed.stream_options is not None and bool(parsed.stream_options.include_usage),
        logprobs=parsed.logprobs is not None,
        stop=stop_texts(parsed.stop),
        choices=answers_wanted(parsed.n),
        sampling=requested_sampling(parsed),
    )
    return request, prompt


class CompletionFormat(ChoiceFormat):
    """Format of completions. In a stream, log-probs are in the last event of each answer.

    `app` calls `body` for one body, or for a stream `begin`, `piece` and `finish` for each answer. The parameter
    `index` is the number of the answer among the answers to the request, counted from 0.

    Args:
        name: name of the first `Call`.
        with_usage: True if a stream ends with the token counts.
    """

    def __init__(self, name: str, *, with_usage: bool = False) -> None:
        super().__init__(_head(name), with_usage=with_usage)
        self._name = name

    def body(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode all answers as one body."""
        choices = [_choice(answer, index) for index, answer in enumerate(answers)]
        return msgspec.json.encode({**_head(self._name), "choices": choices, "usage": usage(answers)})

    def begin(self, index: int, prompt_tokens: int) -> bytes:
        """Return no event, since the API has none for the beginning of a text."""
        return b""

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of an answer."""
        return self._event([{"index": index, "text": piece.content, "logprobs": None, "finish_reason": None}])

    def finish(self, answer: PolicyAnswer, index: int) -> bytes:
        """Encode the end of an answer: its finish reason and its log-probs."""
        return self._event([{**_choice(answer, index), "text": ""}])


def _head(name: str) -> dict[str, Any]:
    """Return the fields of a body and of each event that do not depend on the answers. `name` is that of the `Call`."""
    return {"id": f"cmpl-{name}", "object": "text_completion", "created": int(time.time()), "model": MODEL}


def _choice(answer: PolicyAnswer, index: int) -> dict[str, Any]:
    """Return a complete answer as an element of `choices`. `index` is its number among the answers, from 0."""
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
