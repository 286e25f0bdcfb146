"""Completions of a text that grows: each request repeats the earlier text and answer, and adds to them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.completions import CompletionFormat, read
from flash.service.fields import ApiError
from flash.service.history import TEXT, EarlierAnswers
from flash.types import Message
from tests.service.told import told_in


def wanted(kept: EarlierAnswers | None = None, **fields: Any) -> AgentRequest:
    """Return the request of a body with the text `one`, after the answers in `kept`. `fields` replace its fields."""
    return read(msgspec.json.encode({"model": "policy", "prompt": "one", **fields}), kept or EarlierAnswers())[0]


def text(content: str) -> Message:
    """Return a message of a text without speakers."""
    return Message(TEXT, content)


def test_a_text_goes_on_from_the_longest_that_it_begins_with() -> None:
    kept, two, four = EarlierAnswers(), Message("assistant", " two"), Message("assistant", " four")
    assert wanted(kept).messages == [text("one")]
    kept.add_text("one", [text("one")], two, "")
    second = wanted(kept, prompt="one two three")
    assert second.messages == [text("one"), two, text(" three")]
    kept.add_text("one two three", second.messages, four, "")
    parts = [text("one"), two, text(" three"), four]
    assert wanted(kept, prompt=["one two three four five"]).messages == [*parts, text(" five")]
    assert wanted(kept).messages == [text("one")], "the same again is the same"
    assert wanted(kept, prompt="one too").messages == [text("one too")]


def test_the_text_that_ended_an_answer_is_not_shown_again() -> None:
    kept, look = EarlierAnswers(), Message("assistant", " look")
    kept.add_text("one", [text("one")], look, "\nResult:")
    assert wanted(kept, prompt="one look\nResult: 4").messages == [text("one"), look, text(" 4")]
    assert wanted(kept, prompt="one look, two").messages == [text("one"), look, text(", two")]


ANSWER = PolicyAnswer(
    Message("assistant", "ñ!"), cut=True, prompt_tokens=7, tokens=2, logprobs=[("ñ", -0.5), ("!", 0.0)]
)


def test_an_answer_says_its_text_and_its_log_probs() -> None:
    assert wanted(logprobs=0).logprobs
    (choice,) = msgspec.json.decode(CompletionFormat("1").body([ANSWER]))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ñ!", "length")
    assert choice["logprobs"] == {
        "tokens": ["ñ", "!"],
        "token_logprobs": [-0.5, 0.0],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }


def test_a_stream_says_the_same() -> None:
    asked = wanted(stream=True, stream_options={"include_usage": True})
    *events, last = told_in(CompletionFormat("1", with_usage=asked.with_usage), ANSWER).split(b"\n\n")[:-1]
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    assert last == b"data: [DONE]"
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "ñ!"
    assert [choice["finish_reason"] for choice in chunks[-2]["choices"]] == ["length"]
    assert chunks[-1]["usage"]["total_tokens"] == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", ["a", "b"]),
        ("prompt", [1, 2]),
        ("prompt", ""),
        ("n", 129),
        ("best_of", 2),
        ("suffix", "x"),
        ("echo", True),
        ("stop", ""),
        ("logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("max_tokens", 0),
        ("model", "davinci"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        wanted(**{name: value})
    assert msgspec.json.decode(refused.value.body)["error"]["param"] == name


def test_a_format_of_free_text_asks_for_nothing() -> None:
    assert wanted(response_format={"type": "text"}).response_form is None
