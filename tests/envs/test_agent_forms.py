"""Agents that ask for forms, with unmodified clients over a real port: JSON, forced calls, and what is refused."""

from __future__ import annotations

import json
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import pytest

from flash.config.tree import ModelConfig
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.grammars import Grammars
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.types import Outcome, ResponseForm, Trajectory
from tests.envs.agents import Policy, make, play
from tests.envs.forms import ADD, FORMS

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai_models")]

QWEN = FORMS["qwen"]
SCHEMA: Any = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
ASKED: Any = {"model": "policy", "messages": [{"role": "user", "content": "1 + 2?"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = '{"sum": 3}'
ADD_OF_CLAUDE: Any = {"name": "add", "input_schema": {"type": "object"}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> HfTokenizer:
    """A synchronous fixture, because loading the tokenizer and importing the clients would block the event loop."""
    # Not at the top of this file: every worker of the test session imports it, and one of them runs its tests.
    import_module("openai")
    import_module("anthropic")
    tokenizer = HfTokenizer(ModelConfig(path=QWEN.save(tmp_path), tool_parser=QWEN.tool_parser)).ready()
    # The first form starts the process that makes grammars, whose imports take seconds.
    anyio.run(tokenizer.grammar, ResponseForm({"type": "object"}), [])
    return tokenizer


async def played(
    name: str, tokenizer: HfTokenizer, *, forms: bool = True, seconds: float = 0.0
) -> tuple[Trajectory, Policy]:
    """Return an episode of an agent of this module. The policy answers as a model under the grammar would, in a number
    of seconds."""

    def say(request: ResponseRequest) -> list[int]:
        calls = request.grammar is not None and "tool_call" in request.grammar.tag
        return tokenizer.inner.encode((CALL if calls else TEXT) + QWEN.end, add_special_tokens=False)

    policy = Policy(say, seconds=seconds, ends=tokenizer.ends)
    with anyio.fail_after(60):
        episode = await play(
            make(f"{__name__}:{name}"), policy, in_process=False, tokenizer=tokenizer, max_new_tokens=1000, forms=forms
        )
    assert isinstance(episode, Trajectory), episode
    assert episode.outcome == Outcome.OK
    return episode, policy


async def chats(base_url: str, api_key: str, task: str) -> str:
    """Ask for JSON and for calls, in one piece and in a stream."""
    import openai
    from pydantic import BaseModel

    class Sum(BaseModel):
        sum: int

    client: Any
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        create = client.chat.completions.create
        format: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
        for response_format in (format, {"type": "json_object"}):
            reply = await create(**ASKED, response_format=response_format)
            assert json.loads(reply.choices[0].message.content or "") == {"sum": 3}
        parsed = await client.chat.completions.parse(**ASKED, response_format=Sum)
        assert parsed.choices[0].message.parsed == Sum(sum=3)
        stream: Any = await create(**ASKED, response_format=format, stream=True)
        assert "".join([piece.choices[0].delta.content or "" async for piece in stream]) == TEXT
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            reply = await create(**ASKED, tools=[ADD], tool_choice=choice)
            (call,) = reply.choices[0].message.tool_calls
            assert (call.function.name, reply.choices[0].finish_reason) == ("add", "tool_calls")
        async with client.chat.completions.stream(**ASKED, tools=[ADD], tool_choice="required") as events:
            (call,) = (await events.get_final_completion()).choices[0].message.tool_calls
        return call.function.arguments


async def responds(base_url: str, api_key: str, task: str) -> str:
    """Ask for the same through the Responses API."""
    import openai

    asked: Any = {"model": "policy", "input": "1 + 2?"}
    client: Any
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        format: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}}
        reply = await client.responses.create(**asked, text=format)
        assert json.loads(reply.output_text) == {"sum": 3}
        async with client.responses.stream(**asked, text=format) as events:
            assert (await events.get_final_response()).output_text == TEXT
        add: Any = {"type": "function", **ADD["function"]}  # pyright: ignore[reportGeneralTypeIssues]
        for choice in ("required", {"type": "function", "name": "add"}):
            reply = await client.responses.create(**asked, tools=[add], tool_choice=choice)
            (call,) = reply.output
        return call.arguments


async def messages(base_url: str, api_key: str, task: str) -> str:
    """Ask for the same through the API of Anthropic."""
    import anthropic

    asked: Any = {**ASKED, "max_tokens": 100}
    client: Any
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        format: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        reply: Any = await client.messages.create(**asked, output_config=format)
        assert json.loads(reply.content[0].text) == {"sum": 3}
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            reply = await client.messages.create(**asked, tools=[ADD_OF_CLAUDE], tool_choice=choice)
            (call,) = reply.content
        return json.dumps(call.input)


@pytest.mark.parametrize(("name", "texts", "calls"), [("chats", 4, 3), ("responds", 2, 2), ("messages", 1, 2)])
async def test_an_unmodified_client_gets_the_form_that_it_asks_for(
    name: str, texts: int, calls: int, tokenizer: HfTokenizer
) -> None:
    episode, policy = await played(name, tokenizer)
    assert json.loads(episode.turns[-1].note) == {"a": 1}
    tags = [json.loads(request.grammar.tag)["format"] for request in policy.asked if request.grammar is not None]
    assert [tag["type"] == "json_schema" for tag in tags] == [True] * texts + [False] * calls
    assert episode.env_metrics() == {"tool_calls": calls, "malformed_calls": 0}


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 2}}},
        "response_format",
        "in the JSON schema, $.properties.n has the keyword `multipleOf`, which engines cannot enforce.",
    ),
    ({"$ref": "#/$defs/none"}, "response_format", "cannot have this form"),
]


async def is_refused(base_url: str, api_key: str, task: str) -> str:
    """Ask for forms that cannot be enforced, and then for one that can."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        create = client.chat.completions.create
        for schema, param, told in FAULTS:
            format: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            with pytest.raises(openai.BadRequestError) as refused:
                await create(**ASKED, response_format=format)
            assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
            assert told in str(refused.value)
        # A refused form does not stay for the next request.
        reply = await create(**ASKED)
    return reply.choices[0].message.content or ""


async def test_a_form_that_cannot_be_enforced_is_refused_before_anything_is_sampled(tokenizer: HfTokenizer) -> None:
    episode, policy = await played("is_refused", tokenizer)
    assert episode.turns[-1].note == TEXT
    assert [request.grammar for request in policy.asked] == [None]


class Hurried(HfTokenizer):
    """A tokenizer whose grammars may take half a second."""

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._config, most_s=0.5)


async def asks_for_a_slow_form(base_url: str, api_key: str, task: str) -> str:
    """Ask for a form whose grammar takes minutes, and then for another one."""
    import openai

    texts = {f"p{each}": {"type": "string", "maxLength": 4000 + each} for each in range(100)}
    slow = {"type": "object", "properties": texts, "required": [*texts]}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        create = client.chat.completions.create
        format: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": slow}}
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"its grammar takes more than 0\.5 s") as refused:
                await create(**ASKED, response_format=format)
            assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "response_format")
        reply = await create(**ASKED, response_format={"type": "json_object"})
    return reply.choices[0].message.content or ""


async def test_a_form_whose_grammar_takes_too_long_is_refused_with_the_reason(tokenizer: HfTokenizer) -> None:
    hurried = Hurried(ModelConfig(path=tokenizer.inner.name_or_path, tool_parser=QWEN.tool_parser))
    episode, policy = await played("asks_for_a_slow_form", hurried)
    assert episode.turns[-1].note == TEXT
    assert len(policy.asked) == 1


async def is_refused_with_a_teacher(base_url: str, api_key: str, task: str) -> str:
    """Ask for a form in a run whose teacher scores all tokens."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match=r"algorithm\.teacher\.url"):
            await client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
        reply = await client.chat.completions.create(**ASKED)
    return reply.choices[0].message.content or ""


async def test_there_are_no_forms_with_the_server_of_a_teacher(tokenizer: HfTokenizer) -> None:
    episode, _ = await played("is_refused_with_a_teacher", tokenizer, forms=False)
    assert episode.turns[-1].note == TEXT


async def is_refused_beside_a_plain_request(base_url: str, api_key: str, task: str) -> str:
    """Ask for a form while a plain request is answered, and end when both could have been answered."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def refused() -> None:
            with pytest.raises(openai.BadRequestError, match=r"algorithm\.teacher\.url"):
                await client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
            await anyio.sleep(1.0)

        async with anyio.create_task_group() as group:
            group.start_soon(refused)
            reply = await client.chat.completions.create(**ASKED)
    return reply.choices[0].message.content or ""


async def test_a_form_that_the_run_refuses_is_not_sampled_ahead(tokenizer: HfTokenizer) -> None:
    episode, policy = await played("is_refused_beside_a_plain_request", tokenizer, forms=False, seconds=0.5)
    assert episode.turns[-1].note == TEXT
    assert [request.grammar for request in policy.asked] == [None]


async def asks_at_once(base_url: str, api_key: str, task: str) -> str:
    """Ask for several answers in a form at once, which are sampled ahead."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply = await client.chat.completions.create(**ASKED, n=3, response_format={"type": "json_object"})
        return "|".join(choice.message.content or "" for choice in reply.choices)


async def test_answers_that_are_sampled_ahead_have_the_form_too(tokenizer: HfTokenizer) -> None:
    episode, policy = await played("asks_at_once", tokenizer)
    assert episode.turns[-1].note == "|".join([TEXT] * 3)
    assert all(request.grammar is not None for request in policy.asked)
    assert len(policy.asked) == 3
