"""Agents that use Anthropic's official client, unmodified, over a real port."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flash.config.tree import ModelConfig
from flash.environment import sharing
from flash.rollout.engine import ResponseRequest
from flash.types import Outcome, ToolCall, Trajectory
from tests.envs.agents import Policy, live, make, play
from tests.envs.forms import ADD, FORMS, HarmonyTokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("client_models")]

FORM = FORMS["gpt_oss"]
QUESTION = "What is 1 + 2, and then plus 3?"
TEXT = "ñ🙂 and so on"
FUNCTION: Any = ADD["function"]
TOOLS: Any = [{"name": "add", "description": "Adds numbers.", "input_schema": FUNCTION["parameters"]}]
PROGRAM = """
import sys, anthropic
message = anthropic.Anthropic().messages.create(
    model="policy", max_tokens=20, messages=[{"role": "user", "content": sys.stdin.read()}]
)
sys.stdout.write(message.content[0].text)
"""


@pytest.fixture(scope="session")
def client_models() -> None:
    """Let the client read a message and a stream, which no server sends: the first ones of a process take long."""
    import httpx2
    from anthropic import Anthropic

    message = {"id": "1", "type": "message", "role": "assistant", "model": "policy", "content": [], "stop_reason": None}
    message |= {"stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
    block = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    events = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ]
    text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)

    def answer(request: httpx2.Request) -> httpx2.Response:
        if b'"stream":true' in request.content.replace(b" ", b""):
            return httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=text)
        return httpx2.Response(200, json=message)

    asked: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "5?"}]}
    with (
        httpx2.Client(transport=httpx2.MockTransport(answer)) as http,
        Anthropic(base_url="http://localhost", api_key="none", http_client=http) as client,
    ):
        client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            stream.get_final_message()


def client_of(base_url: str, api_key: str, **more: Any) -> Any:
    return import_module("anthropic").AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, **more)


def fast(text: str) -> Policy:
    return Policy(lambda _: [*text.encode(), 256], seconds=0.0)


async def trained(name: str, policy: Policy, **changes: Any) -> Trajectory:
    """Return the trajectory of an agent of this module. The tokens trained are the tokens sampled."""
    with anyio.fail_after(60):
        played = await play(make(f"{__name__}:{name}"), policy, in_process=False, **changes)
    assert isinstance(played, Trajectory), played
    assert played.tokens()[played.action_mask()].tolist() == [token for said in policy.said for token in said.token_ids]
    return played


async def converses(base_url: str, api_key: str, task: str) -> str:
    """Four turns, two of them streamed, with the client's own messages as history."""
    said: list[str] = []
    messages: list[Any] = []
    async with client_of(base_url, api_key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).display_name == "policy"
        for turn in range(4):
            messages.append({"role": "user", "content": f"{task}, {turn}?"})
            asked: Any = {"model": "policy", "messages": messages, "system": "be brief", "max_tokens": 20}
            count = await client.messages.count_tokens(model="policy", messages=messages, system="be brief")
            if turn % 2:
                async with client.messages.stream(**asked) as stream:
                    said.append("".join([text async for text in stream.text_stream]))
                    message = await stream.get_final_message()
                assert message.content[0].text == said[-1]
                messages.append({"role": "assistant", "content": said[-1]})
            else:
                message = await client.messages.create(**asked)
                said.append(message.content[0].text)
                messages.append(message.to_param())
            assert (message.stop_reason, message.usage.input_tokens) == ("end_turn", count.input_tokens)
    return "|".join(said)


async def test_the_official_client_converses_unmodified() -> None:
    policy = fast("ñ🙂")
    played = await trained("converses", policy)
    assert (played.outcome, len(played.branches)) == (Outcome.OK, 1)
    assert played.turns[-1].note == "|".join(["ñ🙂"] * 4)
    assert [turn.observation for turn in played.turns[1:]] == [f"user: 5, {turn}?" for turn in range(1, 4)]


async def test_the_agent_of_the_documents_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    found = re.search(r"```python\n# my_agent.py\n(from anthropic .*?)```", page, re.DOTALL)
    assert found is not None
    scope: dict[str, Any] = {}
    exec(found.group(1), scope)
    globals()["of_the_documents"] = scope["solve"]
    async with scope["CLIENT"]:
        assert (await trained("of_the_documents", fast("fine"))).turns[-1].note == "fine"


@pytest.mark.slow
async def test_a_program_is_an_agent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    with anyio.fail_after(60):
        played = await play(make(command=[sys.executable, "-c", PROGRAM]), fast("fine"), in_process=False)
    assert isinstance(played, Trajectory), played
    assert played.turns[-1].note == "fine"


# -- tools and thinking ------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> HarmonyTokenizer:
    """Return a tokenizer of channels. This is a synchronous fixture, because loading would block the event loop."""
    return HarmonyTokenizer(ModelConfig(path=FORM.save(tmp_path)))


def sums(request: ResponseRequest, tokenizer: HarmonyTokenizer) -> list[int]:
    """Return two calls, one after the other, and then the last result."""
    shown = tokenizer.inner.decode(request.prompt)
    results = shown.split("<|start|>functions.add to=assistant<|channel|>commentary<|message|>")[1:]
    arguments = json.dumps({"a": 1, "b": "é"}) if results else '{"a": '
    called = () if len(results) == 2 else (ToolCall("", "add", arguments),)
    text = FORM.write("hm", f"it is {json.loads(results[-1].partition('<|end|>')[0])}" if results else "", called)
    return tokenizer.inner.encode(text + (FORM.call_end if called else FORM.end), add_special_tokens=False)


async def calls_functions(base_url: str, api_key: str, task: str) -> str:
    """Answers calls until there is none; the second answer is streamed."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 1000}
    thinking: Any = {"type": "disabled"} if task == "6" else {"type": "adaptive"}
    async with client_of(base_url, api_key) as client:
        while True:
            count = await client.messages.count_tokens(model="policy", messages=messages, tools=TOOLS)
            if len(messages) == 3:
                async with client.messages.stream(**asked, thinking=thinking) as events:
                    begun, *kinds = [
                        event.message.usage.input_tokens if event.type == "message_start" else event.type
                        async for event in events
                    ]
                    message = await events.get_final_message()
                assert begun == count.input_tokens
                assert "input_json" in kinds
                assert ("thinking" in kinds) is (task != "6")
            else:
                message = await client.messages.create(**asked, thinking=thinking)
            assert message.usage.input_tokens == count.input_tokens
            thoughts = [block for block in message.content if block.type == "thinking"]
            assert [block.thinking for block in thoughts] == ([] if task == "6" else ["hm"])
            assert all(block.signature for block in thoughts)
            if message.stop_reason != "tool_use":
                return message.content[-1].text
            messages.append({"role": "assistant", "content": message.content})
            (call,) = [block for block in message.content if block.type == "tool_use"]
            failed = "INVALID_JSON" in call.input
            content = [{"type": "text", "text": "no JSON"}] if failed else f"{call.input['a'] + 1} of {call.input['b']}"
            result = {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": failed}
            messages.append({"role": "user", "content": [result]})


@pytest.mark.parametrize("seed", [5, 6])
async def test_a_client_calls_functions_and_sends_thinking_back(seed: int, tokenizer: HarmonyTokenizer) -> None:
    ends = tokenizer.inner.convert_tokens_to_ids([FORM.end, FORM.call_end])
    policy = Policy(lambda request: sums(request, tokenizer), seconds=0.0, ends=ends)
    played = await trained("calls_functions", policy, seed=seed, tokenizer=tokenizer, max_new_tokens=1000)
    assert (played.outcome, len(played.turns), len(played.branches)) == (Outcome.OK, 3, 1)
    assert played.turns[-1].note == "it is 2 of é"
    assert played.turns[1].observation == "tool: Error: no JSON"
    assert played.env_metrics() == {"tool_calls": 2, "malformed_calls": 1}


async def runs_tools(base_url: str, api_key: str, task: str) -> str:
    """Lets the client's own runner answer the calls. By itself the runner asks the server to keep the conversation."""
    from anthropic import beta_async_tool

    @beta_async_tool
    async def add(a: int, b: str) -> str:
        """Adds numbers."""
        return f"{a + 1} of {b}"

    async with client_of(base_url, api_key) as client:
        asked: Any = {"model": "policy", "messages": said(QUESTION), "max_tokens": 1000}
        message = await client.beta.messages.tool_runner(**asked, tools=[add]).until_done()
    return message.content[-1].text


async def test_the_runner_of_the_client_sends_the_whole_conversation(tokenizer: HarmonyTokenizer) -> None:
    ends = tokenizer.inner.convert_tokens_to_ids([FORM.end, FORM.call_end])
    policy = Policy(lambda request: sums(request, tokenizer), seconds=0.0, ends=ends)
    played = await trained("runs_tools", policy, tokenizer=tokenizer, max_new_tokens=1000)
    assert (played.outcome, len(played.turns), len(played.branches)) == (Outcome.OK, 3, 1)
    assert played.turns[-1].note == "it is 2 of é"


async def searches_tools(base_url: str, api_key: str, task: str) -> str:
    """Calls a tool that the prompt does not show, after a result has referred to it."""
    tools: list[Any] = [{"name": "search", "input_schema": {"type": "object"}}, TOOLS[0] | {"defer_loading": True}]
    messages = said(QUESTION)
    async with client_of(base_url, api_key) as client:
        asked: Any = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 1000}
        results: list[Any] = [[{"type": "tool_reference", "tool_name": "add"}], "3"]
        for content in results:
            message = await client.messages.create(**asked)
            (call,) = [block for block in message.content if block.type == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        return (await client.messages.create(**asked)).content[-1].text


async def test_a_tool_that_a_result_refers_to_is_called_in_the_same_branch(tokenizer: HarmonyTokenizer) -> None:
    def answer(_: ResponseRequest) -> list[int]:
        name = ("search", "add", "")[len(policy.said)]
        text = FORM.write("hm", "3", (ToolCall("", name, "{}"),) if name else ())
        return tokenizer.inner.encode(text + (FORM.call_end if name else FORM.end), add_special_tokens=False)

    ends = tokenizer.inner.convert_tokens_to_ids([FORM.end, FORM.call_end])
    policy = Policy(answer, seconds=0.0, ends=ends)
    played = await trained("searches_tools", policy, tokenizer=tokenizer, max_new_tokens=1000)
    assert (played.outcome, len(played.turns), len(played.branches)) == (Outcome.OK, 3, 1)
    assert played.turns[1].observation.startswith('tool: <functions>\n<function>{"name":"add",')
    assert played.env_metrics() == {"tool_calls": 2, "malformed_calls": 0}


# -- ends of answers and errors ----------------------------------------------------------------------------------------


def said(content: Any) -> list[Any]:
    """Return the messages of a conversation that begins with a text or a block of the user."""
    return [{"role": "user", "content": content if isinstance(content, str) else [content]}]


async def is_refused(base_url: str, api_key: str, task: str) -> str:
    """Everything that is refused, and then what is not."""
    import anthropic

    asked: Any = {"model": "policy", "max_tokens": 20, "messages": said(task)}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    async with client_of(base_url, api_key, max_retries=0) as client:
        refusals: list[tuple[dict[str, Any], str | None, str]] = [
            ({"tool_choice": {"type": "any"}}, None, "tool_choice: "),
            ({"messages": said(image)}, "unsupported_parameter", "messages[0]: A content block of type 'image'"),
            ({"messages": said("x" * 9000)}, "context_length_exceeded", "messages: prompt is too long: "),
            ({"messages": [*said("5"), {"role": "assistant", "content": "I"}]}, None, "messages: The last message"),
        ]
        for more, code, beginning in refusals:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**(asked | more))
            assert (refused.value.type, refused.value.error_code) == ("invalid_request_error", code)
            assert (refused.value.api_message or "").startswith(beginning)
        for content in (image, "x"):
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.count_tokens(
                    model="policy", messages=[*said(content), {"role": "assistant", "content": "I"}]
                )
        counted = await client.messages.count_tokens(model="policy", messages=said("x" * 9000))
        assert counted.input_tokens > 9000
        for unknown in (client.messages.batches.list(), client.models.retrieve("claude-3-5-haiku")):
            with pytest.raises(anthropic.NotFoundError):
                await unknown
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="another").messages.create(**asked)
        stopped = await client.messages.create(**asked, stop_sequences=["el", "z"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "el", "h")
        cut = await client.messages.create(**(asked | {"max_tokens": 2}))
        assert (cut.stop_reason, cut.usage.output_tokens, cut.content[0].text) == ("max_tokens", 2, "he")
    headers = {"x-api-key": api_key, "anthropic-version": "2023-06-01", "anthropic-beta": "any", "authorization": "old"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers) as plain:
        reply = await plain.post("messages", params={"beta": "true"}, json=asked)
        assert (reply.status_code, reply.json()["content"]) == (200, [{"type": "text", "text": "hello"}])
        for path, status, kind in (("messages", 405, "invalid_request_error"), ("files", 404, "not_found_error")):
            reply = await plain.get(path)
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    return "done"


async def test_refusals_have_the_form_of_the_api_and_the_agent_goes_on() -> None:
    policy = Policy(lambda _: [*b"hello", 256], seconds=0.0)
    played = await trained("is_refused", policy)
    assert (played.outcome, played.turns[-1].note, len(policy.said)) == (Outcome.OK, "done", 3)


# -- clients that leave, and many at once ------------------------------------------------------------------------------


class Paced(Policy):
    """A policy that says its first letters, and the others once somebody lets it go on."""

    def __init__(self) -> None:
        super().__init__(lambda _: [*TEXT.encode(), 256], seconds=0.0)
        self.goes_on = anyio.Event()
        self._tokens = 0

    async def pause(self) -> None:
        self._tokens += 1
        if self._tokens == 7:  # of which six are the first two letters
            await self.goes_on.wait()


paced = Paced()


async def leaves(base_url: str, api_key: str, task: str) -> str:
    """Leaves in the middle of a stream, asks again, and goes on from the whole answer."""
    asked: Any = {"model": "policy", "max_tokens": 30, "messages": [{"role": "user", "content": task}]}
    heard = ""
    async with client_of(base_url, api_key) as client:
        async with client.messages.stream(**asked) as stream:
            async for text in stream.text_stream:
                heard += text
                if heard == TEXT[:3]:
                    break
        paced.goes_on.set()
        again = {"extra_headers": {"x-stainless-retry-count": "1"}}
        whole = await client.messages.create(**asked, **again)
        assert whole.content[0].text == TEXT
        history = [*asked["messages"], whole.to_param(), *asked["messages"]]
        await client.messages.create(**(asked | {"messages": history}))
    return heard


async def test_a_client_that_leaves_in_the_middle_has_its_answer_when_it_asks_again() -> None:
    global paced
    paced = Paced()
    played = await trained("leaves", paced)
    assert (played.outcome, played.turns[-1].note) == (Outcome.OK, TEXT[:3])
    assert [turn.branch for turn in played.turns] == [0, 0], "it was sampled once, and gone on with"


async def asks_at_once(base_url: str, api_key: str, task: str) -> str:
    """Fifty questions at once, half of them streamed."""
    said: dict[int, str] = {}

    async def one(number: int) -> None:
        asked: Any = {"model": "policy", "max_tokens": 20, "messages": [{"role": "user", "content": f"{number}?"}]}
        if number % 2:
            async with client.messages.stream(**asked) as stream:
                begun, *_ = [
                    event.message.usage.input_tokens if event.type == "message_start" else 0 async for event in stream
                ]
                message = await stream.get_final_message()
                assert begun == message.usage.input_tokens > 0
                said[number] = message.content[0].text
        else:
            said[number] = (await client.messages.create(**asked)).content[0].text

    async with client_of(base_url, api_key) as client, anyio.create_task_group() as calls:
        for number in range(50):
            calls.start_soon(one, number)
    assert said == {number: f"{number}!" for number in range(50)}
    return "done"


def echo(request: ResponseRequest) -> list[int]:
    """Return the number that was asked for."""
    shown = bytes(token for token in request.prompt if token < 256).decode()
    return [*f"{shown.removesuffix('?')}!".encode(), 256]


async def test_fifty_requests_at_once_get_their_own_answers() -> None:
    played = await trained_in_any_order("asks_at_once", Policy(echo, seconds=0.1), max_turns=100)
    assert (played.outcome, len(played.turns), len(played.branches)) == (Outcome.OK, 50, 50)


async def trained_in_any_order(name: str, policy: Policy, **changes: Any) -> Trajectory:
    """Return the trajectory of an agent whose answers are sampled in parallel. Each token sampled is trained once."""
    with anyio.fail_after(60):
        played = await play(make(f"{__name__}:{name}"), policy, in_process=False, **changes)
    assert isinstance(played, Trajectory), played
    sampled = sorted(token for said in policy.said for token in said.token_ids)
    assert sorted(played.tokens()[played.action_mask()].tolist()) == sampled
    return played


@pytest.mark.slow
async def test_many_agents_at_once_get_their_own_answers() -> None:
    def repeat(request: ResponseRequest) -> list[int]:
        shown = bytes(token for token in request.prompt if token < 256).decode()
        return [*shown.rpartition("be brief")[2].partition(",")[0].encode(), 256]

    notes: dict[int, str] = {}

    async def one(seed: int) -> None:
        played = await live(make(f"{__name__}:converses"), Policy(repeat, seconds=0.01), seed)
        assert isinstance(played, Trajectory), played
        notes[seed] = played.turns[-1].note

    async with sharing("test"), anyio.create_task_group() as episodes:
        for seed in range(16):
            episodes.start_soon(one, seed)
    assert notes == {seed: "|".join([str(seed)] * 4) for seed in range(16)}
