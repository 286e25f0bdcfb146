"""What the bodies of all requests have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from flash.sampling import Sampling
from flash.service.errors import ApiError, unsupported

log = logging.getLogger("flash")

_T = TypeVar("_T")

MODEL = "policy"
"""The name of the one model there is."""


class ContentPart(msgspec.Struct):
    """A part of a content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """The text of a part that refuses."""


class StreamOptions(msgspec.Struct):
    """What a stream is to have."""

    include_usage: bool | None = None


TEXT_PARTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"})
"""Parts that are text."""


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """A body.

    Raises:
        ApiError: it is no JSON, or not what is asked for here.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body of the request is no JSON: {error}.") from error


def invalid(error: msgspec.ValidationError, place: str = "") -> ApiError:
    """What is answered to a body, or to what stands at a place in it, that is not what it should be."""
    message, _, within = str(error).partition(" - at ")
    return ApiError(400, f"Invalid request: {error}.", None, place or within.strip("`$.") or _missing(message))


def _missing(message: str) -> str | None:
    """The field that an error says is missing."""
    parts = message.split("`")
    return parts[1] if "missing required field" in message else None


def check_model(name: str) -> None:
    """Raise ApiError for another model than the one."""
    if name != MODEL:
        raise ApiError(404, f"The model {name[:100]!r} does not exist: there is {MODEL!r}.", "model_not_found", "model")


def check_limit(limit: int | None, name: str) -> None:
    """Raise ApiError for an answer without tokens."""
    if limit is not None and limit < 1:
        raise ApiError(400, "An answer has at least 1 token.", None, name)


MOST_PIECES = 16_384
"""Most messages, parts, calls and tools of a request, together. Each takes some 4 microseconds to read and 40 to
render: requests of so many are read and rendered in threads, one at a time."""


def check_pieces(pieces: Iterable[Sequence[Any]], name: str) -> None:
    """Raise ApiError for a request that has too many of them in all; they are counted until they are."""
    count = 0
    for some in pieces:
        count += len(some)
        if count > MOST_PIECES:
            message = f"A request has at most {MOST_PIECES} messages, parts, calls and tools."
            raise ApiError(400, message, None, name)


MOST_CHOICES = 128
"""Answers to one request, as in the API."""


def choices(n: int | None) -> int:
    """How many answers are wanted. Raises ApiError."""
    if n is not None and not 1 <= n <= MOST_CHOICES:
        raise ApiError(400, f"`n` is from 1 to {MOST_CHOICES}.", None, "n")
    return n or 1


MOST_STOPS = 4
"""Texts that an answer may end at, as in the API."""
STOP_LETTERS = 1000
"""Of each: engines look for them after every token."""


def stops(given: str | list[str] | None) -> tuple[str, ...]:
    """Texts that an answer ends at. Raises ApiError."""
    texts = tuple([given] if isinstance(given, str) else given or ())
    if len(texts) > MOST_STOPS or not all(0 < len(text) <= STOP_LETTERS for text in texts):
        message = f"`stop` has up to {MOST_STOPS} texts, of 1 to {STOP_LETTERS} characters each."
        raise ApiError(400, message, None, "stop")
    return texts


def before(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """What stands before the first of these texts, and which that is."""
    at, first = min(((at, one) for one in stop if (at := text.find(one)) >= 0), default=(len(text), ""))
    return text[:at], first


class Unserved(msgspec.Struct, kw_only=True):
    """What would change how an answer is sampled, shown or cut, and is not done here; of vLLM's and SGLang's too."""

    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    ebnf: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    json_schema: Any = None
    logits_processors: Any = None
    max_tool_calls: Any = None
    min_tokens: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_logprobs: Any = None
    regex: Any = None
    stop_token_ids: Any = None
    structured_outputs: Any = None
    web_search_options: Any = None


class AskedSampling(Unserved, kw_only=True):
    """And what says how an answer is drawn: the run says it, whatever a request asks for."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template."""
    frequency_penalty: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Of what no run does."""


def drawn(body: AskedSampling) -> tuple[tuple[str, float], ...]:
    """What a request says of the distribution that its answer is to be drawn from."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", *NEUTRAL)
    return tuple((name, value) for name in names if (value := getattr(body, name)) is not None)


def heed_drawn(asked: Iterable[tuple[str, float]], sampling: Sampling) -> None:
    """Say what of a request holds no sway: answers are drawn as the run says, and agents are other people's code."""
    for name, value in asked:
        own = NEUTRAL[name] if name in NEUTRAL else getattr(sampling, name)
        if value != own and not (name == "top_k" and value < own == 0):
            _tell(name, value, own)


@lru_cache(1024)
def _tell(name: str, value: float, own: float) -> None:
    """Once for each value."""
    where = (
        "" if name in NEUTRAL else f" (rollout.{name}{', in evaluations eval.temperature' * (name == 'temperature')})"
    )
    log.warning("an agent asks for %s = %g; its answers are drawn with %g%s", name, value, own, where)


def refuse_unserved(body: Unserved) -> None:
    """Raise ApiError for the first of these that a request has."""
    refuse_given({name: getattr(body, name) for name in Unserved.__struct_fields__})


def refuse_given(fields: dict[str, Any]) -> None:
    """Raise ApiError for the first of these fields that a request has."""
    for name, value in fields.items():
        if value:
            raise unsupported(name)


def text_of(content: str | list[ContentPart] | None, place: str) -> str:
    """A content, or its parts as one text. Raises ApiError where one is no text."""
    if isinstance(content, list):
        if any(part.type not in TEXT_PARTS for part in content):
            raise ApiError(400, "Only text is supported here.", "unsupported_parameter", place)
        return "".join(part.text or part.refusal or "" for part in content)
    return content or ""
