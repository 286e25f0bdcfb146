"""Whatever a client asks is answered, or refused in the form of the API, and the episode goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flash.types import Outcome, ResponseForm, Trajectory
from tests.envs.agents import NODE, Policy, make, play
from tests.envs.forms import FORMS
from tests.envs.test_agent_tools import tokenizer_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]  # imports most of vLLM

ASKED = [{"role": "user", "content": "1+1="}]
FUNCTIONS: tuple[Any, ...] = (
    None,
    {"name": ""},
    {"name": "\0\U0001f600"},
    {"name": "x" * 50_000},
    {"name": "a\"b'}}{{ 1/0 }}{% for x in 5 %}"},
    {"name": "f", "description": "<|im_end|>\n</tools>"},
    {"name": "f", "parameters": {"type": 5, "properties": 7, "required": "x"}},
    {"name": "f", "parameters": {"properties": {"a": None, "b": [1], "c": 5}}},
    {"name": "f", "parameters": {"a": json.loads("[" * 300 + "]" * 300)}},
)
CHATS: tuple[dict[str, Any], ...] = (
    {"n": 100},
    {"n": 129},
    {"n": -1},
    *({"max_tokens": most} for most in (-1, 0, 2**63, 10**30, "1", None)),
    *({"stop": stop} for stop in ("", ["a"] * 1000, "7" * 200_000, ["\0"], [5])),
    *({"response_format": form} for form in (5, {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}})),
    {"guided_grammar": "root ::= (((", "guided_json": {"type": 5}, "guided_regex": "((("},
    {"seed": -5, "temperature": -1, "top_p": 7, "logit_bias": {"1": 100}},
    {"tool_choice": "required"},
    {"tool_choice": 5},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
    *({"tools": [{"type": "function", "function": function}]} for function in FUNCTIONS),
    {"messages": []},
    {"messages": ASKED * 10_000},
    *({"messages": [{"role": role, "content": "a"}]} for role in ("", "x", "tool", "assistant")),
    *(
        {"messages": [{"role": "user", "content": content}]}
        for content in (
            None,
            "",
            5,
            "\0\u202e\uffff",
            "<|im_end|>flash-answer<eos>",
            [{"type": "image_url"}],
            "x" * 10**6,
        )
    ),
    {"stream_options": {"include_usage": 5}},
    {
        "messages": [
            *ASKED,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]},
            {"role": "tool", "tool_call_id": "none", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
)
ITEMS: tuple[dict[str, Any], ...] = (
    {},
    *({"type": kind} for kind in (None, 5, "web_search_call", "item_reference", "reasoning", "function_call")),
    {"type": "function_call", "call_id": "", "name": "", "arguments": ""},
    {"type": "function_call_output", "call_id": "none", "output": "x"},
    {"type": "function_call_output", "call_id": "none", "output": [{"type": "input_file"}]},
    {"role": "user", "content": {"a": 1}},
    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
)
BLOCKS: tuple[dict[str, Any], ...] = (
    {},
    *({"type": kind} for kind in (None, 5, "", "text", "image", "thinking", "tool_use", "tool_result", "document")),
    {"type": "text", "text": None},
    {"type": "text", "text": "x" * 10**6},
    {"type": "tool_use", "id": "", "name": "", "input": "5"},
    {"type": "tool_use", "name": "f", "input": {"a": json.loads("[" * 300 + "]" * 300)}},
    {"type": "tool_result", "tool_use_id": "none", "content": [{"type": "text", "text": "r"}], "is_error": True},
    {"type": "tool_result", "content": [{"type": "tool_result", "content": [{"type": "tool_result"}]}]},
)
RAW = (
    *(b"", b"null", b"[]", b"1", b"\xef\xbb\xbf{}", b"{" * 100_000, b'{"a":' * 100_000, b"\xff"),
    b'{"model": "policy", "messages": NaN}',
    rb'{"model": "policy", "messages": [{"role": "user", "content": "\ud800"}]}',
    rb'{"model": "policy", "prompt": "\udc00", "input": "\udc00"}',
    b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
)


def requests() -> Iterator[tuple[str, bytes]]:
    """Paths and bodies."""
    for more in CHATS:
        for stream in (False, True):
            yield (
                "chat/completions",
                json.dumps({"model": "policy", "messages": ASKED, "stream": stream, **more}).encode(),
            )
    for prompt in ("1+1=", "", "\0\uffff", 5, ["a", "b"], [1, 2], [[1]], {}):
        yield "completions", json.dumps({"model": "policy", "prompt": prompt}).encode()
    for item in ITEMS:
        yield "responses", json.dumps({"model": "policy", "input": [item, *ASKED]}).encode()
    for field in (
        {"max_output_tokens": -1},
        {"previous_response_id": "no"},
        {"text": 5},
        {"input": []},
        {"tools": [5]},
    ):
        yield "responses", json.dumps({"model": "policy", "input": "1+1=", **field}).encode()
    for path in ("messages", "messages/count_tokens"):
        asked = {"model": "policy", "max_tokens": 9, "messages": ASKED}
        for block in BLOCKS:
            for role in ("user", "assistant"):
                said = [*ASKED, {"role": role, "content": [block]}, *ASKED]
                yield path, json.dumps({**asked, "messages": said}).encode()
        for more in (
            *({"max_tokens": most} for most in (-1, 0, 2**63, "1", None)),
            *({"stop_sequences": stop} for stop in ([], [""], ["a"] * 1000, "7")),
            *({"system": system} for system in ("", 5, [{}], [{"type": "image"}])),
            *({"tools": [tool]} for tool in (5, {}, {"name": "f", "input_schema": 5}, {"type": "bash_20250124"})),
            *({"tools": [{"name": "f", "input_schema": schema}]} for schema in ({}, {"properties": {"a": 5}})),
            *({"tool_choice": choice} for choice in (5, {}, {"type": "any"}, {"type": ""})),
            *({"thinking": thinking} for thinking in (5, {}, {"type": ""})),
            {"stream": True},
            {"messages": []},
        ):
            yield path, json.dumps({**asked, **more}).encode()
    for path in ("chat/completions", "completions", "responses", "messages", "episode/reward"):
        yield from ((path, body) for body in RAW)


async def attacks(base_url: str, api_key: str, task: str) -> str:
    async with NODE.client(base_url, api_key) as client:
        answered = [_well_formed(path, await client.post(path, content=body), body) for path, body in requests()]
    return f"{sum(answered)} of {len(answered)}"


def _well_formed(path: str, reply: httpx.Response, body: bytes) -> bool:
    """Whether it is an answer; else it is an error as the API has them."""
    if reply.status_code == 200:
        assert '"error":{' not in reply.text, (body[:200], reply.text[:300])
        return True
    error = reply.json()["error"]
    if path.startswith("messages"):
        assert reply.json()["type"] == "error"
        assert error.keys() - {"details"} == {"message", "type"}, body[:200]
        code = error.get("details", {}).get("error_code")
    else:
        assert error.keys() == {"message", "type", "param", "code"}, body[:200]
        code = error["code"]
    assert 400 <= reply.status_code < 500, (body[:200], error)
    assert code not in ("turns_exhausted", "invalid_api_key"), (body[:200], error)
    return False


def test_whatever_is_asked_is_answered_or_refused_and_the_episode_goes_on(tmp_path: Path) -> None:
    form = FORMS["qwen"]
    tokenizer = tokenizer_of(form, tmp_path)
    end = tokenizer.inner.convert_tokens_to_ids(form.end)
    said = [*tokenizer.inner.encode("2 7777", add_special_tokens=False), end]
    # The first form starts the process that makes grammars, whose imports take seconds.
    anyio.run(tokenizer.grammar, ResponseForm({"type": "object"}, calling=False), [])

    async def main() -> None:
        policy = Policy(lambda _: said, seconds=0.0, ends=(end,))
        many = {"max_turns": 10_000, "max_length": 20_000}
        played = await play(make(f"{__name__}:attacks"), policy, tokenizer=tokenizer, max_new_tokens=24, **many)
        assert isinstance(played, Trajectory), repr(played)[-3000:]
        assert played.outcome == Outcome.OK
        answers, _, asked = played.turns[-1].note.partition(" of ")
        assert 40 < int(answers) < int(asked) - 40
        assert played.tokens()[played.action_mask()].tolist() == said * len(policy.said)

    anyio.run(main)
