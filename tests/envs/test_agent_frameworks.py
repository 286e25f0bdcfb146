"""Frameworks for agents, unmodified, over a real port: their tools are called, and their histories come back."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flash.config.tree import ModelConfig
from flash.rollout.engine import ResponseRequest
from flash.types import Outcome, ToolCall, Trajectory
from tests.envs.agents import Policy, make, play
from tests.envs.forms import ADD, FORMS, HarmonyTokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai_models")]

FORM = FORMS["gpt_oss"]
FUNCTION: Any = ADD["function"]
QUESTION = "What is 1 + 2, and then plus 3?"


def sums(request: ResponseRequest, tokenizer: HarmonyTokenizer) -> list[int]:
    """Two calls, one after the other, and then what the last one returned."""
    shown = tokenizer.inner.decode(request.prompt)
    results = shown.split("<|start|>functions.add to=assistant<|channel|>commentary<|message|>")[1:]
    called = (
        () if len(results) == 2 else (ToolCall("", "add", json.dumps({"a": 1, "b": "é"} if results else {"a": 2})),)
    )
    text = FORM.write("hm", f"it is {json.loads(results[-1].partition('<|end|>')[0])}" if results else "", called)
    end = FORM.call_end if called else FORM.end
    return tokenizer.inner.encode(text + end, add_special_tokens=False)


@pytest.fixture
def tokenizer(tmp_path: Path) -> HarmonyTokenizer:
    """A synchronous fixture, because loading the tokenizer and importing the clients would block the event loop."""
    # Not at the top of this file: every worker of the test session imports it, and one of them runs its tests.
    import_module("langchain_openai")
    return HarmonyTokenizer(ModelConfig(path=FORM.save(tmp_path)))


async def trained(name: str, tokenizer: HarmonyTokenizer) -> None:
    """One episode of an agent of this module: tokens trained are tokens sampled, in three turns."""
    ends = tokenizer.inner.convert_tokens_to_ids([FORM.end, FORM.call_end])
    policy = Policy(lambda request: sums(request, tokenizer), seconds=0.0, ends=ends)
    with anyio.fail_after(60):
        agent = make(f"{__name__}:{name}")
        played = await play(agent, policy, in_process=False, tokenizer=tokenizer, max_new_tokens=1000)
    assert isinstance(played, Trajectory), played
    assert played.outcome == Outcome.OK
    assert played.tokens()[played.action_mask()].tolist() == [token for said in policy.said for token in said.token_ids]
    assert len(played.turns) == 3
    assert played.turns[-1].note == "it is 2 of é"
    assert played.env_metrics() == {"tool_calls": 2, "malformed_calls": 0}


def add(a: int, b: str = "") -> str:
    """Adds numbers."""
    return f"{a + 1} of {b}"


async def chats(base_url: str, api_key: str, task: str) -> str:
    """The official client's chat completions, the second answer streamed."""
    import openai

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            if len(messages) == 3:
                async with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
                message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def responds(base_url: str, api_key: str, task: str) -> str:
    """Its responses: the first goes on with items, the second, a stream, with the name of the first."""
    import openai

    tools: Any = [{"type": "function", **FUNCTION, "strict": True}]
    more: Any = {"model": "policy", "tools": tools, "instructions": "be brief"}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        first = await client.responses.create(input=items, **more)
        items += [*first.output, *returned(first.output)]
        async with client.responses.stream(input=items, **more) as events:
            kinds = [event.type async for event in events]
            second = await events.get_final_response()
        assert kinds[0] == "response.created"
        assert "response.function_call_arguments.done" in kinds
        third = await client.responses.create(input=returned(second.output), previous_response_id=second.id, **more)
    assert third.usage is not None
    return third.output_text


def returned(output: list[Any]) -> list[Any]:
    """What the calls among these items return."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": add(**json.loads(item.arguments))}
        for item in output
        if item.type == "function_call"
    ]


async def chains(base_url: str, api_key: str, task: str) -> str:
    """LangChain's chat model, with a tool bound to it."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    adding, key = tool(add), SecretStr(api_key)
    messages: list[Any] = [HumanMessage(QUESTION)]
    async with httpx.AsyncClient() as connections:
        model = ChatOpenAI(model="policy", base_url=base_url, api_key=key, http_async_client=connections)
        while True:
            message = await model.bind_tools([adding]).ainvoke(messages)
            messages.append(message)
            if not message.tool_calls:
                return str(message.content)
            messages += [await adding.ainvoke(call) for call in message.tool_calls]


@pytest.mark.parametrize("name", ["chats", "responds", "chains"])
async def test_a_client_calls_functions_unmodified(name: str, tokenizer: HarmonyTokenizer) -> None:
    await trained(name, tokenizer)
