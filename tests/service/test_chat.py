"""Requests as agents write them, and what is answered to those that are no requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flash.service.chat import Answer, ApiError, completion, read, stream
from flash.types import Message

HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "policy", "messages": HELLO, **fields})


def refusal(given: bytes) -> tuple[int, dict[str, Any]]:
    with pytest.raises(ApiError) as refused:
        read(given)
    answered = msgspec.json.decode(refused.value.body)
    assert set(answered) == {"error"}
    assert set(answered["error"]) == {"message", "type", "param", "code"}
    return refused.value.status, answered["error"]


def test_a_request_is_read_and_its_sampling_is_left_unread() -> None:
    asked = read(body(temperature=0.2, top_p=0.5, seed=3, user="me", n=1, tools=[], stop=None, whatever={"a": [1]}))
    assert (asked.messages, asked.max_tokens, asked.stream) == ([Message("user", "hello")], None, False)


def test_developers_are_the_system_and_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "ñ"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "eve"}]
    messages.append({"role": "assistant", "content": None})
    assert read(body(messages=messages)).messages == [
        Message("system", "be brief"),
        Message("user", "añ"),
        Message("assistant", ""),
    ]


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 5, "max_completion_tokens": 3}, 3)],
)
def test_the_smaller_limit_of_tokens_counts(limits: dict[str, int], most: int) -> None:
    assert read(body(**limits)).max_tokens == most


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "policy"}',
        b'{"model": 3, "messages": []}',
        b'{"model": "policy", "messages": {}}',
        b'{"model": "policy", "messages": [1]}',
        b'{"model": "policy", "messages": [{"content": "who"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": 5}]}',
        b'{"model": "policy", "messages": []}',
        b'{"model": "policy", "messages": [], "max_tokens": 99999999999999999999999}',
        b"[" * 100_000,
        b'{"x":' * 100_000,
        b'{"model": "policy", "messages": [], "y": ' + b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_refused_in_the_form_of_the_api(given: bytes) -> None:
    status, error = refusal(given)
    assert status == 400
    assert error["type"] == "invalid_request_error"


def test_another_model_does_not_exist() -> None:
    assert refusal(body(model="gpt-4o"))[0] == 404
    assert refusal(body(model="gpt-4o"))[1]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("stop", "."),
        ("stop", ["."]),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(name: str, value: Any) -> None:
    status, error = refusal(body(**{name: value}))
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", name)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    ],
)
def test_tools_and_pictures_are_refused(message: dict[str, Any]) -> None:
    assert refusal(body(messages=[message]))[1]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("limit", [0, -1])
def test_an_answer_without_tokens_is_refused(limit: int) -> None:
    assert refusal(body(max_tokens=limit))[1]["param"] == "max_tokens"


ANSWER = Answer("four 🙂", cut=True, prompt_tokens=7, tokens=3)


def test_an_answer_counts_its_tokens_and_says_that_it_was_cut() -> None:
    told = msgspec.json.decode(completion(ANSWER, "1"))
    assert told["object"] == "chat.completion"
    assert told["choices"][0]["message"]["content"] == ANSWER.content
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_says_the_same_in_events(with_usage: bool) -> None:
    *events, last = b"".join(stream(ANSWER, "1", with_usage=with_usage)).removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER.content
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks if "usage" in chunk] == [10] * with_usage
