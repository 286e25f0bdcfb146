"""The Messages API of Anthropic: blocks as agents write them in requests, and as they receive them in answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ErrorResponse, ModelInfo, RawMessageStreamEvent
from anthropic.types import Message as ClientMessage
from pydantic import TypeAdapter

from flash.service import messages
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.fields import ApiError
from flash.service.messages import ATTRIBUTION, MessageFormat, read, read_count
from flash.service.sessions import AnswerDeltas
from flash.service.tools import with_object
from flash.types import ANY_CALL, Message, Piece, ResponseForm, ToolCall
from tests.service.told import told_in

ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
CALLS = (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", "{}"))
SAID = Message("assistant", "two", "hm", CALLS)
ANSWER = PolicyAnswer(SAID, cut=False, prompt_tokens=7, tokens=3)


def body(**fields: Any) -> bytes:
    """Return the body of a request that says hello, with further fields."""
    asked = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    return msgspec.json.encode({**asked, **fields})


def wanted(**fields: Any) -> AgentRequest:
    """Return the request of a body with these fields."""
    return read(body(**fields)).request


def told(answer: PolicyAnswer = ANSWER, *, thinking: bool = True) -> dict[str, Any]:
    """Return the decoded body of an answer."""
    return msgspec.json.decode(MessageFormat("1", with_thinking=thinking).body([answer]))


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Each has its type in both places, and the fields that the client promises."""
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events: list[dict[str, Any]] = []
    for text in stream.split(b"\n\n")[:-1]:
        kind, data = text.split(b"\ndata: ")
        events.append(msgspec.json.decode(data))
        assert kind.decode() == f"event: {events[-1]['type']}"
        adapter.validate_json(data)
    return events


def heard(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the official client makes of the events of a stream."""
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    whole, buffers = None, dict[int, bytes]()
    for event in events:
        whole = accumulate_event(event=adapter.validate_python(event), current_snapshot=whole, json_bufs=buffers)
    assert whole is not None
    message = whole.to_dict(exclude_unset=True)
    assert message.pop("stop_details") is None, "the client sets it"
    return message


def test_a_request_says_what_it_says_in_the_other_apis() -> None:
    asked = wanted(
        system="be brief",
        tools=[ADD],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["."],
        temperature=0.5,
        top_k=3,
        stream=True,
        metadata={"user_id": "7"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert asked.messages == [Message("system", "be brief"), Message("user", "hello")]
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert asked.tools == ({"type": "function", "function": function},)
    assert (asked.max_tokens, asked.stop, asked.stream) == (9, (".",), True)
    assert (asked.calling, asked.parallel, asked.object_arguments) == (True, False, True)
    assert asked.sampling == (("temperature", 0.5), ("top_k", 3))
    assert not wanted(tool_choice={"type": "none"}).calling


def test_an_answer_gets_the_form_that_its_request_wants() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    format = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": format}}, {"output_format": format}):
        assert wanted(**fields).response_form == ResponseForm(schema, calling=False)
    assert wanted(tools=[ADD], tool_choice={"type": "any"}).response_form == ResponseForm(call=ANY_CALL)
    one = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    assert wanted(tools=[ADD], tool_choice=one).response_form == ResponseForm(call="add", single=True)
    assert wanted(tools=[ADD], tool_choice={"type": "auto"}).response_form is None


def test_what_was_answered_comes_back_as_one_message_though_it_is_several_blocks() -> None:
    given = [
        {"role": "user", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]},
        {"role": "assistant", "content": told()["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "4"}]},
                {"type": "tool_result", "tool_use_id": "c1", "content": "no number", "is_error": True},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "5"}]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
        {"role": "system", "content": "be brief"},
    ]
    assert wanted(messages=given).messages == [
        Message("user", "one"),
        msgspec.structs.replace(SAID, tool_calls=(ToolCall("c1", "add", '{"a":1}'), CALLS[1])),
        Message("tool", "4", tool_call_id="c2", name="add"),
        Message("tool", "Error: no number", tool_call_id="c1", name="add"),
        Message("user", "go on"),
        Message("assistant", "5"),
        Message("assistant", ""),
        Message("tool", "", tool_call_id="c1", name="add"),
        Message("system", "be brief"),
    ]


def test_the_accounting_of_claude_code_is_no_part_of_the_prompt() -> None:
    texts = [f"{ATTRIBUTION}: cc_version=2; cch=0a1b2;", "You are ", "an agent."]
    system = [{"type": "text", "text": text} for text in texts]
    assert wanted(system=system).messages[0] == Message("system", "You are an agent.")
    assert wanted(system=system[:1]).messages == [Message("user", "hello")]


SEARCHED: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {"role": "system", "content": "The following deferred tools are now available via ToolSearch:\nadd\nsub"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "1"},
                {"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {"query": "select:add"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "tool_reference", "tool_name": "add"}],
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ],
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "ToolSearch", "input_schema": {"type": "object"}},
        ADD | {"defer_loading": True},
        {
            "name": "DeferredToolPlaceholder",
            "description": "never call this tool.",
            "input_schema": {"type": "object", "properties": {}},
            "defer_loading": True,
        },
    ],
    "metadata": {"user_id": '{"session_id":"7"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
"""Request of Claude Code (2.1.332) after it has searched a tool, with shorter texts and fewer tools."""


def test_a_deferred_tool_is_no_part_of_the_prompt_until_a_result_refers_to_it() -> None:
    first = wanted(**(SEARCHED | {"messages": SEARCHED["messages"][:2]}))
    asked = wanted(**SEARCHED)
    assert [tool["function"]["name"] for tool in asked.tools] == ["ToolSearch"]
    assert asked.prompt_beginning == first.prompt_beginning, "the branch goes on"
    assert (first.loaded_tools, asked.loaded_tools) == ((), wanted(tools=[ADD]).tools)
    definition = '{"name":"add","description":"Adds.","parameters":{"type":"object"}}'
    found = f"<functions>\n<function>{definition}</function>\n</functions>"
    assert asked.messages[-1] == Message("tool", found, tool_call_id="c1", name="ToolSearch")


def test_a_definition_stands_for_the_first_reference_to_a_tool_and_its_name_for_others() -> None:
    reference = {"type": "tool_reference", "tool_name": "add"}
    content = [{"type": "text", "text": "found: "}, reference, reference, {"type": "text", "text": " - call them"}]
    result = {"role": "user", "content": [{"type": "tool_result", "content": content}]}
    asked = wanted(messages=[*SEARCHED["messages"][:3], result, result], tools=[ADD])
    definition = '<function>{"name":"add","description":"Adds.","parameters":{"type":"object"}}</function>'
    name = '<function>{"name":"add"}</function>'
    assert [message.content for message in asked.messages[-2:]] == [
        f"found: <functions>\n{one}\n{name}\n</functions> - call them" for one in (definition, name)
    ]
    assert (asked.tools, asked.loaded_tools) == (wanted(tools=[ADD]).tools, ())


@pytest.mark.parametrize("reference", [{"tool_name": "sub"}, {}])
def test_a_reference_to_an_unknown_tool_is_refused(reference: dict[str, Any]) -> None:
    content = [{"type": "tool_result", "content": [{"type": "tool_reference", **reference}]}]
    with pytest.raises(ApiError) as refused:
        wanted(messages=[{"role": "user", "content": content}], tools=[ADD])
    error = messages.error_content(refused.value)
    assert error["error"]["message"].startswith("messages[0]: The tool reference ")
    assert error["error"]["details"] == {"error_code": "tool_reference_unresolved"}


def test_a_message_has_every_field_that_the_official_client_promises() -> None:
    ClientMessage.model_validate(told(), strict=True)
    assert told() == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "1"},
            {"type": "text", "text": "two"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "output_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }
    ModelInfo.model_validate_json(messages.model("policy"))
    assert msgspec.json.decode(messages.models())["data"] == [msgspec.json.decode(messages.model("policy"))]


@pytest.mark.parametrize(
    ("answer", "reason", "stop"),
    [
        (PolicyAnswer(Message("assistant", "a"), cut=False, prompt_tokens=1, tokens=1), "end_turn", None),
        (PolicyAnswer(Message("assistant", "a"), cut=True, prompt_tokens=1, tokens=1), "max_tokens", None),
        (PolicyAnswer(Message("assistant", "a"), cut=False, prompt_tokens=1, tokens=1, stop="."), "stop_sequence", "."),
        (msgspec.structs.replace(ANSWER, cut=True), "max_tokens", None),
        (msgspec.structs.replace(ANSWER, stop="."), "tool_use", None),
    ],
)
def test_an_answer_says_why_it_ended(answer: PolicyAnswer, reason: str, stop: str | None) -> None:
    assert (told(answer)["stop_reason"], told(answer)["stop_sequence"]) == (reason, stop)
    (delta,) = [
        one["delta"]
        for one in events_of(told_in(MessageFormat("1", with_thinking=True), answer))
        if one["type"] == "message_delta"
    ]
    assert delta == {"stop_reason": reason, "stop_sequence": stop}


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "message",
    [
        SAID,
        Message("assistant", "two"),
        Message("assistant", "two", "hm"),
        Message("assistant", "", "hm"),
        Message("assistant", ""),
        Message("assistant", "", tool_calls=CALLS),
    ],
)
def test_a_stream_says_the_same_in_events(message: Message, thinking: bool) -> None:
    answer = msgspec.structs.replace(ANSWER, message=message)
    events = events_of(told_in(MessageFormat("1", with_thinking=thinking), answer))
    assert heard(events) == told(answer, thinking=thinking)
    assert bool(message.reasoning and thinking) == any(
        block["type"] == "thinking" for block in told(answer, thinking=thinking)["content"]
    )


def test_the_events_of_a_stream_come_in_the_order_of_the_api() -> None:
    events = events_of(told_in(MessageFormat("1", with_thinking=True), ANSWER))
    told_of = [
        (one["type"].removeprefix("content_block_"), one.get("delta", {}).get("type", ""), one.get("index"))
        for one in events
    ]
    assert told_of == [
        ("message_start", "", None),
        ("start", "", 0),
        ("delta", "thinking_delta", 0),
        ("delta", "thinking_delta", 0),
        ("delta", "signature_delta", 0),
        ("stop", "", 0),
        ("start", "", 1),
        ("delta", "text_delta", 1),
        ("delta", "text_delta", 1),
        ("delta", "text_delta", 1),
        ("stop", "", 1),
        *(
            event
            for index in (2, 3)
            for event in (("start", "", index), ("delta", "input_json_delta", index), ("stop", "", index))
        ),
        ("message_delta", "", None),
        ("message_stop", "", None),
    ]


def test_reasoning_after_text_is_a_block_of_its_own_and_all_of_it_comes_back_as_one_message() -> None:
    stream = MessageFormat("1", with_thinking=True)
    deltas = AnswerDeltas(())
    for piece in (Piece("", "h"), Piece("t"), Piece("wo", "m")):
        deltas.add(piece)
    parts = [stream.begin(0, 7), *(stream.piece(piece, 0) for piece in deltas.pieces)]
    said = Message("assistant", "two", "hm")
    answer = msgspec.structs.replace(ANSWER, message=deltas.finish(said))
    content = heard(events_of(b"".join([*parts, stream.finish(answer, 0), stream.end([answer])])))["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "thinking", "text"]
    again = [{"role": "user", "content": "one"}, {"role": "assistant", "content": content}]
    assert wanted(messages=again).messages[1] == said


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a": [1.0, "\\u00e9"]}', '{"a": [1.0, "\\u00e9"]}'),
        ("", "{}"),
        (" null", "{}"),
        ("[1]", '{"INVALID_JSON":"[1]"}'),
        ('{"a": ', '{"INVALID_JSON":"{\\"a\\": "}'),
        ("[" * 5000, '{"INVALID_JSON":"' + "[" * 5000 + '"}'),
    ],
)
def test_arguments_that_are_no_object_become_one(arguments: str, sent: str) -> None:
    call = with_object(ToolCall("c", "add", arguments))
    assert call.arguments == sent
    answer = msgspec.structs.replace(ANSWER, message=Message("assistant", "", tool_calls=(call,)))
    ClientMessage.model_validate(told(answer), strict=True)
    assert heard(events_of(told_in(MessageFormat("1", with_thinking=True), answer))) == told(answer)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": "claude-3-5-haiku"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 16_385}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16_384}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image", "source": {}}]}]}
                ]
            },
            "messages[0]",
        ),
        ({"system": [{"type": "image", "source": {}}]}, "system"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "regex"}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"guided_json": {}}, None),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"max_tokens": "9"}, "max_tokens"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(fields: dict[str, Any], place: str | None) -> None:
    if place is None:
        assert wanted(**fields).messages
        return
    with pytest.raises(ApiError) as refused:
        wanted(**fields)
    error = messages.error_content(refused.value)
    assert error["error"]["message"].startswith(f"{place}: ")
    assert error["error"]["type"] == ("not_found_error" if place == "model" else "invalid_request_error")
    ErrorResponse.model_validate(error | {"request_id": None})


def test_only_an_answer_needs_a_limit_of_its_tokens() -> None:
    asked = msgspec.json.encode({"model": "policy", "messages": [{"role": "user", "content": "hello"}]})
    assert read_count(body(compaction={"type": "summarize"})) == read_count(asked)
    assert read_count(asked).messages == [Message("user", "hello")]
    with pytest.raises(ApiError) as refused:
        read(asked)
    assert messages.error_content(refused.value) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "max_tokens: Invalid request: Object missing required field `max_tokens`.",
        },
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ],
)
def test_an_error_has_the_name_of_its_status(status: int, kind: str) -> None:
    error = {"type": kind, "message": "No."}
    assert messages.error_content(ApiError(status, "No.")) == {"type": "error", "error": error}
    (event,) = MessageFormat("1", with_thinking=True).fail(ApiError(status, "No.")).split(b"\n\n")[:-1]
    assert event == b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": error})


def test_a_conversation_that_is_too_long_is_refused_in_the_words_that_agents_look_for() -> None:
    error = messages.error_content(ApiError(400, "9 tokens too many.", "context_length_exceeded", "messages"))
    assert error["error"]["message"] == "messages: prompt is too long: 9 tokens too many."
    assert error["error"]["details"] == {"error_code": "context_length_exceeded"}
