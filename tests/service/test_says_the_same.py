"""Forms of an answer that count as the answer when a client repeats it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.service.history import says_the_same
from flash.types import Message, ToolCall

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def calls(*arguments: str, name: str = "f", content: str = "", reasoning: str = "") -> Message:
    """Return an assistant's message that calls the function `name` once with each of these arguments."""
    made = tuple(ToolCall(str(index), name, text) for index, text in enumerate(arguments))
    return Message("assistant", content, reasoning, made)


@settings(max_examples=25)
@given(st.dictionaries(st.text(), VALUES), st.booleans(), st.sampled_from([None, 2]))
def test_arguments_that_a_client_wrote_again_are_the_same(value: dict[str, Any], ascii_only: bool, indent: Any) -> None:
    said = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    turned = json.loads(said, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    again = json.dumps(turned, ensure_ascii=ascii_only, indent=indent)
    assert says_the_same(calls(said), calls(again))
    assert not says_the_same(calls(said), calls(json.dumps({**value, "one more\0": 1})))


def test_arguments_of_great_length_are_no_answer_of_ours_written_again() -> None:
    for letters, same in ((1 << 10, True), (1 << 20, False)):
        assert says_the_same(calls('{"a":1}'), calls('{"a":1' + " " * letters + "}")) == same
    long = '{"a":' + "1" * (1 << 20) + "}"
    assert says_the_same(calls(long), calls(long))


def test_arguments_that_nest_deeply_are_compared_as_they_are_written() -> None:
    for depth, same in ((50, True), (700, False)):
        nested = '{"a":' * depth + "1" + "}" * depth
        assert says_the_same(calls(nested), calls(nested))
        assert says_the_same(calls(nested), calls(nested.replace(":", ": "))) == same


SAID = calls('{"a": 1, "b": true}', content=" two\n", reasoning="\nhm\n")


@pytest.mark.parametrize(
    "back",
    [
        SAID,
        calls('{"b":true,"a":1.0}', content="two", reasoning="hm"),
        calls('{"a": 1, "b": true}', content="two"),
        Message("assistant", "two", "", (ToolCall("an id of its own", "f", '{"a": 1, "b": true}'),)),
    ],
)
def test_an_answer_comes_back_as_clients_keep_it(back: Message) -> None:
    assert says_the_same(SAID, back)


@pytest.mark.parametrize(
    "back",
    [
        calls('{"a": true, "b": true}', content="two"),
        calls('{"a": 1, "b": 1}', content="two"),
        calls('{"a": "1", "b": true}', content="two"),
        calls('{"a": 1}', content="two"),
        calls("{", content="two"),
        calls('{"a": 1, "b": true}', name="g", content="two"),
        calls('{"a": 1, "b": true}', '{"a": 1, "b": true}', content="two"),
        calls(content="two"),
        calls('{"a": 1, "b": true}', content="too"),
        calls('{"a": 1, "b": true}', content="two", reasoning="another thought"),
        Message("user", SAID.content, SAID.reasoning, SAID.tool_calls),
    ],
)
def test_what_says_something_else_is_no_answer_of_ours(back: Message) -> None:
    assert not says_the_same(SAID, back)


@pytest.mark.parametrize(
    ("said", "back", "same"), [("{no json", "{no json", True), ("", "{}", True), ("{a", "{b", False)]
)
def test_arguments_need_be_no_json(said: str, back: str, same: bool) -> None:
    assert says_the_same(calls(said), calls(back)) == same
