"""Request fields that all APIs have in common, the checks of their values, and `ApiError`, the response of a refusal.

The `read` functions of `chat`, `completions`, `responses` and `messages` decode the body of each request with these
functions, and `app` sends an `ApiError` that they raise as the response. The run's configuration alone decides how
answers are sampled, because training needs the probabilities of the tokens under these settings. So a request's own
sampling settings are ignored with a warning. A form that the answer must have is not a sampling setting: see `forms`.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from flash.errors import DECODE_ERRORS
from flash.sampling import Sampling

_SHORT = reprlib.Repr()
"""Makes short representations of values that are not texts."""
_SHORT.maxlevel = 2  # each further level could make a representation six times as long


class ApiError(Exception):
    """An error response. `content` and `body` have the format of the OpenAI API.

    Args:
        status: HTTP status. The clients of OpenAI and Anthropic do not retry after 400, 401, 404 and 413.
        message: error message for people.
        code: name of the error for programs; None if it has no name.
        param: name of the wrong request field; None if no single field is wrong.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def content(self) -> dict[str, Any]:
        """Body of the response, before it is encoded as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """Body of the response, as JSON."""
        return msgspec.json.encode(self.content)


def shortened(value: object) -> str:
    """Return a representation of a value from a client that is short whatever the size of the value."""
    return repr(value[:100]) if isinstance(value, str) else _SHORT.repr(value)


def unsupported(name: str, reason: str = "leave it out") -> ApiError:
    """Return the error for a request field that the service does not support. Callers raise it.

    `reason` is the reason or the remedy. It is the part of the error message after a colon, without a full stop.
    """
    return ApiError(400, f"`{name}` is not supported here: {reason}.", "unsupported_parameter", name)


WHY_NO_TOP_LOGPROBS = "the run keeps only the log-probs of sampled tokens"
"""Reason why an answer has no log-probs of tokens that were not sampled, as part of an error message."""


log = logging.getLogger("flash")

_T = TypeVar("_T")

MODEL = "policy"
"""Name of the only model of the service."""


class ContentPart(msgspec.Struct):
    """Part of the content of a message. Its text is in `text` or `refusal`."""

    type: str
    """Type of the part. `text_of` refuses all but `TEXT_PARTS`."""
    text: str | None = None
    refusal: str | None = None
    """Text of a part of type `refusal`."""


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None
    """True if the stream ends with the token counts."""


TEXT_PARTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"})
"""Types of content parts that are text."""


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode the body of a request.

    Raises:
        ApiError: the body is not JSON, or does not have the type that `decoder` expects.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    except DECODE_ERRORS as error:
        raise ApiError(400, f"The body of the request is not JSON: {error}.") from error


def invalid(error: msgspec.ValidationError, place: str = "") -> ApiError:
    """Return the error response to a body that has the wrong type.

    `place` is the place of the wrong value in the request. If it is empty, the place is taken from msgspec's message.
    """
    # msgspec's message is, for example, "Expected `int`, got `str` - at `$.max_tokens`".
    message, _, within = str(error).partition(" - at ")
    return ApiError(400, f"Invalid request: {error}.", None, place or within.strip("`$.") or _missing(message))


def _missing(message: str) -> str | None:
    """Return the name of the missing field if msgspec's error message is about one, else None.

    Such a message is, for example, "Object missing required field `model`".
    """
    parts = message.split("`")
    return parts[1] if "missing required field" in message else None


def check_model(name: str) -> None:
    """Raise ApiError unless `name` is the service's model."""
    if name != MODEL:
        raise ApiError(404, f"The model {name[:100]!r} does not exist: there is {MODEL!r}.", "model_not_found", "model")


def check_limit(limit: int | None, name: str) -> None:
    """Raise ApiError if the limit of an answer's tokens is less than 1. None, no limit, is accepted.

    `name` is the request field that gives the limit.
    """
    if limit is not None and limit < 1:
        raise ApiError(400, "An answer has at least 1 token.", None, name)


MOST_ELEMENTS = 16_384
"""Largest number of elements of one request: its messages, parts, calls of functions and tools together. Each takes
about 4 microseconds to decode and 40 to render. Requests with many of them are decoded and rendered in threads, one at
a time."""


def check_elements(lists: Iterable[Sequence[Any]], name: str) -> None:
    """Raise ApiError if the lists of a request have more than `MOST_ELEMENTS` elements together.

    Counting stops at that number. `name` is the field that the error names.
    """
    count = 0
    for elements in lists:
        count += len(elements)
        if count > MOST_ELEMENTS:
            message = f"A request has at most {MOST_ELEMENTS} messages, parts, calls and tools."
            raise ApiError(400, message, None, name)


MOST_CHOICES = 128
"""Largest number of answers to one request, as in the API."""


def answers_wanted(n: int | None) -> int:
    """Return the number of answers that a request wants: `n`, or 1 without it. Raises ApiError if `n` is invalid."""
    if n is not None and not 1 <= n <= MOST_CHOICES:
        raise ApiError(400, f"`n` is from 1 to {MOST_CHOICES}.", None, "n")
    return n or 1


MOST_STOPS = 4
"""Largest number of stop texts of a request, as in the API. An answer ends before the first stop text in it."""
STOP_CHARACTERS = 1000
"""Largest number of characters of one stop text. It bounds the time of engines, which look for the texts after every
token."""


def stop_texts(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return the stop texts of a request. Raises ApiError if there are too many, or one is empty or too long.

    `name` is the request field that has them.
    """
    texts = tuple([stop] if isinstance(stop, str) else stop or ())
    if len(texts) > MOST_STOPS or not all(0 < len(text) <= STOP_CHARACTERS for text in texts):
        message = f"`{name}` has up to {MOST_STOPS} texts, of 1 to {STOP_CHARACTERS} characters each."
        raise ApiError(400, message, None, name)
    return texts


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the part of `text` before the first stop text in it, and that stop text.

    `sessions` uses it for answers that are streamed, and `envs.agent` for complete ones. A text without a stop text is
    returned whole, with an empty stop text.
    """
    at, first = min(((at, one) for one in stop if (at := text.find(one)) >= 0), default=(len(text), ""))
    return text[:at], first


class Unserved(msgspec.Struct, kw_only=True):
    """Fields that would change how an answer is sampled, shown or cut, and that the service does not support.

    Fields that only vLLM or SGLang know are among them. A request that sets one is refused.
    """

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


class RequestedSampling(Unserved, kw_only=True):
    """Base of the bodies of all APIs: unsupported fields, arguments of the chat template, and sampling settings.

    The run's configuration decides how answers are sampled, whatever sampling settings a request gives.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, which are used."""
    frequency_penalty: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Sampling settings that a run's configuration does not have, with the values that have no effect."""


def requested_sampling(body: RequestedSampling) -> tuple[tuple[str, float], ...]:
    """Return names and values of the sampling settings that a request gives, for `warn_of_ignored_sampling`."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", *NEUTRAL)
    return tuple((name, value) for name in names if (value := getattr(body, name)) is not None)


def warn_of_ignored_sampling(requested: Iterable[tuple[str, float]], sampling: Sampling) -> None:
    """Log a warning for each sampling setting of a request that differs from the one in use, since it has no effect.

    `requested` comes from `requested_sampling`; `sampling` has the settings of the episode.
    """
    # This is a warning and not an error: agents are other people's code, and they may set these fields anyway.
    for name, value in requested:
        used = NEUTRAL[name] if name in NEUTRAL else getattr(sampling, name)
        # In a request, a negative `top_k` means that all tokens may be sampled; in settings of Flash, 0 means that.
        if value != used and not (name == "top_k" and value < 0 and used == 0):
            _warn_once(name, value, used)


@lru_cache(1024)
def _warn_once(name: str, value: float, used: float) -> None:
    """Log a warning that an agent's value of a sampling setting has no effect, because `used` is used.

    The cache is here only for its effect that an equal call does nothing. So each value is reported once per process,
    unless 1024 others come between.
    """
    in_evaluations = ", in evaluations eval.temperature" if name == "temperature" else ""
    key = "" if name in NEUTRAL else f" (rollout.{name}{in_evaluations})"
    # The agent's value may be an integer that is too large for `%g`.
    log.warning("an agent asks for %s = %s; its answers are sampled with %g%s", name, shortened(value), used, key)


def refuse_unserved(body: Unserved) -> None:
    """Raise ApiError if a request sets an unsupported field."""
    refuse_set_fields({name: getattr(body, name) for name in Unserved.__struct_fields__})


def refuse_set_fields(fields: dict[str, Any]) -> None:
    """Raise ApiError for the first field that a request has set. `fields` are unsupported fields, with their values.

    A field counts as set if its value is not empty, zero, False or None: clients send such values to ask for nothing.
    """
    for name, value in fields.items():
        if value:
            raise unsupported(name)


def text_of(content: str | list[ContentPart] | None, place: str) -> str:
    """Return the text of a content, the joined texts of its parts if it has any; empty for None.

    Raises ApiError if a part is no text. `place` is the place of the message or item in the request, such as
    `messages[2]`, for the error message.
    """
    if isinstance(content, list):
        if other := next((part.type for part in content if part.type not in TEXT_PARTS), ""):
            message = f"Only text is supported here, but the type of a part is {shortened(other)}."
            raise ApiError(400, message, "unsupported_parameter", place)
        return "".join(part.text or part.refusal or "" for part in content)
    return content or ""
