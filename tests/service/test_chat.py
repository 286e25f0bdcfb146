"""Requests as agents write them, and the responses to bodies that are no valid requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from flash.sampling import Sampling
from flash.service import completions, fields, responses
from flash.service.chat import AgentRequest, ChatFormat, PolicyAnswer, read
from flash.service.fields import ApiError, before_stop
from flash.service.history import EarlierAnswers
from flash.service.sessions import EpisodeSession
from flash.service.tools import is_well_formed
from flash.types import ANY_CALL, Message, ResponseForm, ToolCall
from tests.service.told import told_in

HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> bytes:
    """Return the body of a request that says hello, with further fields."""
    return msgspec.json.encode({"model": "policy", "messages": HELLO, **fields})


def refusal(given: bytes) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the error of a body that is refused. Checks the form of the error."""
    with pytest.raises(ApiError) as refused:
        read(given)
    answered = msgspec.json.decode(refused.value.body)
    assert set(answered) == {"error"}
    assert set(answered["error"]) == {"message", "type", "param", "code"}
    return refused.value.status, answered["error"]


def test_a_request_is_read_with_what_it_takes_for_how_answers_are_drawn() -> None:
    asked = read(body(temperature=0.2, top_p=0.5, seed=3, user="me", n=1, tools=[], stop=None, whatever={"a": [1]}))
    assert (asked.messages, asked.max_tokens, asked.stream) == ([Message("user", "hello")], None, False)
    assert asked.sampling == (("temperature", 0.2), ("top_p", 0.5))


def test_an_answer_that_a_client_has_written_down_in_its_own_way_is_read_as_it_was() -> None:
    call = {"index": 0, "id": "c", "type": None, "function": {"name": "add", "arguments": None}}
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}, {"type": "text", "text": None}]},
    ]
    assert read(body(messages=[*HELLO, *said])).messages[1:] == [
        Message("assistant", "", tool_calls=(ToolCall("c", "add", ""),)),
        Message("assistant", "I will not."),
        Message("assistant", "I will not."),
        Message("assistant", "No."),
    ]


def test_a_tool_in_the_form_of_responses_is_refused_with_the_form_that_it_must_have() -> None:
    _, error = refusal(body(tools=[{"type": "function", "name": "add", "parameters": {}}]))
    assert error["message"] == 'A tool has no `function`: expected {"type": "function", "function": {"name": …}}.'
    _, error = refusal(body(tools=[{"type": "function", "function": {"name": ""}}]))
    assert error["message"] == "A function in `tools` has no `name`."


@pytest.mark.parametrize(
    ("given", "otherwise"),
    [
        ({"temperature": 0.7, "top_p": 1, "top_k": 20, "min_p": 0, "presence_penalty": 0}, None),
        ({"temperature": None}, None),
        ({"temperature": 1}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
@pytest.mark.parametrize(
    "read",
    [
        lambda fields: read(body(**fields)),
        lambda fields: completions.read(body(prompt="hello", **fields), EarlierAnswers())[0],
        lambda fields: responses.read(body(input="hello", **fields), {}).request,
    ],
    ids=["chat", "completions", "responses"],
)
def test_answers_are_drawn_as_the_run_says_which_an_agent_that_asks_otherwise_is_told_of_once(
    given: dict[str, Any],
    otherwise: str | None,
    read: Callable[[dict[str, Any]], AgentRequest],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields._warn_once.cache_clear()
    for _ in range(2):
        EpisodeSession(sampling=Sampling(0.7, top_k=20)).call(read(given))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (otherwise is not None)
    assert all(f"asks for {otherwise} = " in one for one in told)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temperature": 0.7}, "sampled with 1 (rollout.temperature, in evaluations eval.temperature)"),
        ({"top_p": 0.9}, "sampled with 1 (rollout.top_p)"),
        ({"presence_penalty": 0.5}, "sampled with 0"),
    ],
)
def test_what_is_told_names_the_key_that_would_do_it_if_there_is_one(
    given: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields._warn_once.cache_clear()
    EpisodeSession().call(read(body(**given)))
    assert [record.getMessage().endswith(told) for record in caplog.records] == [True]


def test_who_asks_for_all_tokens_may_say_so_in_vllms_way() -> None:
    EpisodeSession().call(read(body(top_k=-1, temperature=1)))


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


def test_a_refusal_of_a_nested_value_is_short() -> None:
    value: Any = "x" * 100
    for _ in range(6):
        value = [value] * 6
    status, error = refusal(body(tool_choice=value))
    assert (status, len(error["message"]) < 1000) == (400, True)


def test_another_model_does_not_exist() -> None:
    assert refusal(body(model="gpt-4o"))[0] == 404
    assert refusal(body(model="gpt-4o"))[1]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_logprobs", 2),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "web_search"}]),
        ("functions", [{}]),
        ("response_format", {"type": "grammar"}),
        ("guided_json", {"type": "object"}),
        ("structured_outputs", {"regex": "x"}),
        ("stop_token_ids", [2]),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(name: str, value: Any) -> None:
    status, error = refusal(body(**{name: value}))
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", name)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"sum": {"type": "integer"}}}
OFFERED = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "tool_choice": "none"}, None),
        ({"tools": OFFERED, "tool_choice": "auto"}, None),
        ({"response_format": {"type": "json_object"}}, ResponseForm({"type": "object"}, calling=False)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            ResponseForm(SCHEMA, calling=False),
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": OFFERED},
            ResponseForm({"type": "object"}, calling=True),
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": OFFERED, "tool_choice": "none"},
            ResponseForm({"type": "object"}, calling=False),
        ),
        ({"tools": OFFERED, "tool_choice": "required"}, ResponseForm(call=ANY_CALL)),
        (
            {"tools": OFFERED, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            ResponseForm(call="sub"),
        ),
        (
            {"tools": OFFERED, "tool_choice": "required", "parallel_tool_calls": False},
            ResponseForm(call=ANY_CALL, single=True),
        ),
    ],
)
def test_an_answer_gets_the_form_that_its_request_wants(fields: dict[str, Any], form: ResponseForm | None) -> None:
    asked = read(body(**fields))
    assert asked.response_form == form
    assert (asked.digest() == read(body(**{**fields, "response_format": None, "tool_choice": None})).digest()) == (
        form is None and asked.calling
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": OFFERED, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tools": OFFERED, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": OFFERED, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    status, error = refusal(body(**fields))
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "function", "content": "4", "name": "add"}, "assistant, tool, but this is 'function'"),
        ({"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}, "send the call in `tool_calls`"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "a part is 'image_url'"),
    ],
)
def test_calls_of_the_old_form_and_pictures_are_refused(message: dict[str, Any], told: str) -> None:
    error = refusal(body(messages=[message]))[1]
    assert error["code"] == "unsupported_parameter"
    assert told in error["message"]


def test_a_setting_of_any_size_is_named_in_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    request = read(body(top_k=10**400))
    EpisodeSession().call(request)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("an agent asks for top_k = 1000000")
    assert len(told) < 200


ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_tools_are_read_and_what_they_returned_bears_their_name() -> None:
    spoken = [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
        {"role": "tool", "tool_call_id": "of nobody", "content": "5", "name": "other"},
    ]
    tools = [{"type": "function", "function": {**ADD, "strict": True}}]
    asked = read(body(messages=spoken, tools=tools, tool_choice="none", parallel_tool_calls=False))
    assert asked.tools == ({"type": "function", "function": ADD},)
    assert (asked.calling, asked.parallel) == (False, False)
    assert asked.messages == [
        Message("assistant", "", "hm", (ToolCall("c1", "add", '{"a": 1}'),)),
        Message("tool", "4", tool_call_id="c1", name="add"),
        Message("tool", "5", tool_call_id="of nobody", name="other"),
    ]


def test_requests_of_other_tools_are_other_requests() -> None:
    tools = [{"type": "function", "function": ADD}]
    asked = [body(), body(tools=tools), body(tools=tools, tool_choice="none"), body(tools=tools, max_tokens=1)]
    assert len({read(one).digest() for one in asked}) == len(asked)


@pytest.mark.parametrize(
    ("name", "arguments", "well"),
    [("add", "{}", True), ("add", "[1]", False), ("add", "{", False), ("add", "", False), ("sub", "{}", False)],
)
def test_a_call_is_of_a_function_that_there_is_and_has_an_object(name: str, arguments: str, well: bool) -> None:
    assert (
        is_well_formed(ToolCall("1", name, arguments), read(body(tools=[{"type": "function", "function": ADD}])).tools)
        == well
    )


@pytest.mark.parametrize(("given", "stop"), [(".", (".",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())])
def test_an_answer_may_end_at_up_to_four_texts(given: Any, stop: tuple[str, ...]) -> None:
    assert read(body(stop=given)).stop == stop
    for wrong in (["."] * 5, [""], "", "." * 1001):
        assert refusal(body(stop=wrong))[1]["param"] == "stop"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("abcabc", (), ("abcabc", "")),
        ("abcabc", ("x", "c", "bc"), ("a", "bc")),
        ("abc", ("x",), ("abc", "")),
    ],
)
def test_what_stands_before_the_first_stop_is_shown(text: str, stop: tuple[str, ...], shown: tuple[str, str]) -> None:
    assert before_stop(text, stop) == shown


@pytest.mark.parametrize(("n", "choices"), [(None, 1), (1, 1), (3, 3)])
def test_each_of_several_answers_is_a_request_of_its_own(n: int | None, choices: int) -> None:
    each = read(body(n=n)).each()
    assert len({one.digest() for one in each}) == len(each) == choices
    for wrong in (0, -1, 129):
        assert refusal(body(n=wrong))[1]["param"] == "n"


SPOKEN = {"role": "user", "content": ""}


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [SPOKEN] * 16_385},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 16_384}]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 9000}, SPOKEN] * 2},
        {"tools": [{"type": "function", "function": {"name": "add"}}] * 16_384},
    ],
)
def test_a_request_of_countless_pieces_is_refused(given: dict[str, Any]) -> None:
    status, error = refusal(body(**given))
    assert (status, error["param"]) == (400, "messages")
    assert "16384" in error["message"]


@pytest.mark.parametrize("limit", [0, -1])
def test_an_answer_without_tokens_is_refused(limit: int) -> None:
    assert refusal(body(max_tokens=limit))[1]["param"] == "max_tokens"


ANSWER = PolicyAnswer(Message("assistant", "four 🙂"), cut=True, prompt_tokens=7, tokens=3)


def test_an_answer_counts_its_tokens_and_says_that_it_was_cut() -> None:
    told = msgspec.json.decode(ChatFormat("1").body([ANSWER]))
    assert told["object"] == "chat.completion"
    assert told["choices"][0]["message"]["content"] == ANSWER.message.content
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


CALLS = (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", "{}"))
CALLING = PolicyAnswer(Message("assistant", "", "hm", CALLS), cut=False, prompt_tokens=7, tokens=3)


def test_calls_and_reasoning_are_told_in_one_piece_and_in_events_alike() -> None:
    choice = msgspec.json.decode(ChatFormat("1").body([CALLING]))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "hm")
    assert choice["message"]["tool_calls"][0] == CALL
    events = told_in(ChatFormat("1", with_usage=False), CALLING).split(b"\n\n")[:-2]
    deltas = [msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["delta"] for event in events]
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == ["h", "m"]
    told = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [{key: call[key] for key in CALL} for call in told] == choice["message"]["tool_calls"]
    assert [call["index"] for call in told] == [0, 1]


def test_log_probs_are_those_that_were_recorded() -> None:
    assert read(body(logprobs=True, top_logprobs=0)).logprobs
    answer = PolicyAnswer(
        Message("assistant", "ñ!"), cut=False, prompt_tokens=7, tokens=2, logprobs=[("ñ", -0.5), ("!", 0.0)]
    )
    told = msgspec.json.decode(ChatFormat("1").body([answer]))["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["logprob"], token["top_logprobs"]) for token in told] == [
        ("ñ", -0.5, []),
        ("!", 0.0, []),
    ]


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_says_the_same_in_events(with_usage: bool) -> None:
    *events, last = told_in(ChatFormat("1", with_usage=with_usage), ANSWER).removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER.message.content
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    assert choices[-1]["finish_reason"] == "length"
    assert [chunk["usage"]["total_tokens"] for chunk in chunks if "usage" in chunk] == [10] * with_usage


def test_arguments_of_the_chat_template_are_part_of_what_a_request_asks() -> None:
    plain, without = (read(body(**more)) for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}))
    assert (plain.template, without.template) == ({}, {"enable_thinking": False})
    assert plain.digest() != without.digest()
    assert plain.prompt_beginning == []
    assert without.prompt_beginning == [{"enable_thinking": False}], "a branch has the same arguments throughout"
