"""The Responses API: items as agents write them in requests, and as they receive them in answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from flash.service.chat import PolicyAnswer
from flash.service.fields import ApiError
from flash.service.responses import ResponseFormat, ResponsesRequest, read
from flash.types import ANY_CALL, Message, Piece, ResponseForm, ToolCall
from tests.service.told import told_in

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
HIDDEN = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
CALLS = (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", "{}"))
SAID = Message("assistant", "two", "hm", CALLS)
ANSWER = PolicyAnswer(SAID, cut=False, prompt_tokens=7, tokens=3)


def wanted(earlier: dict[str, list[Message]] | None = None, **fields: Any) -> ResponsesRequest:
    """Return the request of a body that says hello, with further fields. `earlier`: conversations by response."""
    return read(msgspec.json.encode({"model": "policy", "input": "hello", **fields}), earlier or {})


def told(answer: PolicyAnswer = ANSWER, **fields: Any) -> dict[str, Any]:
    """Return the decoded body of an answer to a request with these fields."""
    return msgspec.json.decode(ResponseFormat("1", wanted(**fields)).body([answer]))


def test_a_text_is_what_a_user_says_after_the_instructions() -> None:
    asked = wanted(instructions="be brief", max_output_tokens=5, tools=[ADD], parallel_tool_calls=False).request
    assert asked.messages == [Message("system", "be brief"), Message("user", "hello")]
    function = {key: ADD[key] for key in ("name", "description", "parameters")}
    assert asked.tools == ({"type": "function", "function": function},)
    assert (asked.max_tokens, asked.calling, asked.parallel, asked.stream) == (5, True, False, False)


def test_what_was_answered_comes_back_as_one_message_though_it_is_several_items() -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "o"}, {"type": "input_text", "text": "ne"}]},
        *told()["output"],
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"role": "assistant", "content": "five"},
        {"role": "assistant", "content": "six"},
        {"role": "user", "content": "go on"},
    ]
    assert wanted(input=given).request.messages == [
        Message("user", "one"),
        SAID,
        Message("tool", "3", tool_call_id="c1", name="add"),
        Message("tool", "4", tool_call_id="c2", name="add"),
        Message("assistant", "five", "so"),
        Message("assistant", "six"),
        Message("user", "go on"),
    ]


def test_a_summary_is_the_reasoning_if_the_content_has_no_text() -> None:
    summary = [{"type": "summary_text", "text": "so"}]
    for content in (None, [], [{"type": "reasoning_text", "text": ""}]):
        given = [
            {"type": "reasoning", "summary": summary, "content": content},
            {"role": "assistant", "content": "five"},
        ]
        assert wanted(input=given).request.messages == [Message("assistant", "five", "so")]


def test_items_that_other_programs_have_written_down_are_read() -> None:
    given = [
        {"type": None, "role": "user", "content": "one"},
        {"type": "reasoning", "id": "r", "summary": None, "content": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": {"a": 1}},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert wanted(input=given).request.messages == [
        Message("user", "one"),
        Message("assistant", "", tool_calls=(ToolCall("c", "add", '{"a":1}'),)),
        Message("tool", "3", tool_call_id="c", name="add"),
        Message("assistant", "No."),
    ]


def test_reasoning_without_a_text_makes_no_message() -> None:
    said = {"role": "assistant", "content": "five"}
    items = [{"role": "user", "content": "one"}, HIDDEN, said, HIDDEN, {"role": "user", "content": "go on"}]
    assert wanted(input=items).request.messages == [
        Message("user", "one"),
        Message("assistant", "five"),
        Message("user", "go on"),
    ]


def test_a_response_and_its_events_have_every_field_that_the_official_client_promises() -> None:
    Response.model_validate(told(tools=[ADD]), strict=True)
    events = ResponseFormat("1", wanted(tools=[ADD]))
    told_of = [
        events.begin(0, 1),
        events.piece(Piece("", "hm"), 0),
        events.piece(Piece("two", ""), 0),
        events.end([ANSWER]),
    ]
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for line in b"".join(told_of).split(b"\n"):
        if line.startswith(b"data: "):
            adapter.validate_json(line.removeprefix(b"data: "))


def test_a_response_of_the_episode_may_be_named_instead_of_said_again() -> None:
    before = [Message("user", "one"), SAID]
    result = {"type": "function_call_output", "call_id": "c2", "output": "4"}
    named = wanted({"resp_1": before}, previous_response_id="resp_1", instructions="be brief", input=[result])
    assert named.messages == [*before, Message("tool", "4", tool_call_id="c2", name="add")]
    assert named.request.messages == [Message("system", "be brief"), *named.messages]
    with pytest.raises(ApiError, match="no response 'resp_2'"):
        wanted({"resp_1": before}, previous_response_id="resp_2")


def test_an_answer_gets_the_form_that_its_request_wants() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert wanted(text=text).request.response_form == ResponseForm(schema, calling=False)
    assert wanted(text=text, tools=[ADD]).request.response_form == ResponseForm(schema, calling=True)
    assert wanted(text={"format": {"type": "json_object"}}).request.response_form == ResponseForm(
        {"type": "object"}, calling=False
    )
    assert wanted(tools=[ADD], tool_choice="required").request.response_form == ResponseForm(call=ANY_CALL)
    named = {"type": "function", "name": "add"}
    assert wanted(tools=[ADD], tool_choice=named).request.response_form == ResponseForm(call="add")
    assert wanted(text={"format": {"type": "text"}}, tools=[ADD]).request.response_form is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "description": "Adds."}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0]"),
        ({"input": [{"type": ["message"], "role": "user", "content": "x"}]}, "input[0]"),
        ({"tool_choice": ["auto"]}, "tool_choice"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": [HIDDEN]}, "input"),
        ({"input": [HIDDEN], "instructions": "be brief"}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 16_385}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 16_384}]}, "input"),
        (
            {"tools": [{"type": "function", "name": "add"}] * 16_384, "input": [{"role": "user", "content": "x"}]},
            "input",
        ),
        ({"input": 5}, "input"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"model": "gpt-4o"}, "model"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        wanted(**fields)
    assert msgspec.json.decode(refused.value.body)["error"]["param"] == param


def test_an_answer_that_was_cut_is_incomplete() -> None:
    cut = told(msgspec.structs.replace(ANSWER, cut=True))
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert told()["usage"]["total_tokens"] == 10


@pytest.mark.parametrize(
    ("message", "statuses"),
    [
        (Message("assistant", "", "hm"), ["incomplete", "incomplete"]),
        (Message("assistant", "two", "hm"), ["completed", "incomplete"]),
        (SAID, ["completed", "completed", "completed", "incomplete"]),
    ],
)
def test_only_the_end_of_a_cut_answer_is_incomplete(message: Message, statuses: list[str]) -> None:
    items = told(PolicyAnswer(message, cut=True, prompt_tokens=7, tokens=3))["output"]
    assert [item["status"] for item in items] == statuses


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER,
        msgspec.structs.replace(ANSWER, cut=True),
        PolicyAnswer(Message("assistant", "two", "hm"), cut=True, prompt_tokens=1, tokens=1),
        PolicyAnswer(Message("assistant", ""), cut=True, prompt_tokens=1, tokens=1),
    ],
)
def test_a_stream_says_the_same_in_events(answer: PolicyAnswer) -> None:
    events = [event.split(b"\ndata: ") for event in told_in(ResponseFormat("1", wanted()), answer).split(b"\n\n")[:-1]]
    said = [msgspec.json.decode(data) for _, data in events]
    assert [kind.removeprefix(b"event: ").decode() for kind, _ in events] == [one["type"] for one in said]
    assert [one["sequence_number"] for one in said] == list(range(len(said)))
    whole = said[-1]["response"]
    assert said[-1]["type"] == f"response.{whole['status']}"
    assert [one["item"] for one in said if one["type"] == "response.output_item.done"] == whole["output"]
    pieces = "".join(one["delta"] for one in said if one["type"].endswith(".delta"))
    message = answer.message
    assert pieces == message.reasoning + message.content + "".join(call.arguments for call in message.tool_calls)
