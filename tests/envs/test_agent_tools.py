"""Agents that give tools: calls and reasoning are told apart, and what comes back is never tokenized again."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flash.config.tree import ModelConfig
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.simulate.clock import run_virtual
from flash.types import Message, Outcome, ToolCall, Trajectory
from tests.envs.agents import NODE, Policy, ask, choice_of, make, play
from tests.envs.forms import ADD, FORMS, Form, HarmonyTokenizer, is_object
from tests.service.test_messages import events_of, heard

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]  # imports most of vLLM

ROOM = 2000
CLEAN = "ab the in \n'é🙂漢\u200b,."
HOSTILE = [
    *CLEAN,
    "<tool_call>",
    "</tool_call>",
    "</think>",
    '{"name":',
    "{",
    "}",
    "[",
    '"',
    "<|im_start|>",
    "\ufffd",
    "\0",
]


class Speaker:
    """Says random things in a form, and knows what it meant."""

    def __init__(self, form: Form, tokenizer: HfTokenizer, rng: random.Random) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._rng = rng
        self.ends = tokenizer.inner.convert_tokens_to_ids([form.end, form.call_end])
        self.meant: list[Message | None] = []
        """What an answer says; None for one that may say anything."""

    def __call__(self, request: ResponseRequest) -> list[int]:
        rng = self._rng
        clean = rng.random() < 0.7
        letters = CLEAN if clean else HOSTILE
        calls = rng.randrange(self._form.most_calls + 1) if rng.random() < 0.6 else 0
        called = tuple(ToolCall("", rng.choice(["add", "subtract"]), self._arguments(clean)) for _ in range(calls))
        message = Message("assistant", words(rng, letters), words(rng, letters), called)
        self.meant.append(message if clean else None)
        text = self._form.write(message.reasoning, message.content, called)
        end = self._form.call_end if called else self._form.end
        return [*self._tokens(text), self._tokenizer.inner.convert_tokens_to_ids(end)]

    def _arguments(self, clean: bool) -> str:
        rng = self._rng
        if not clean and rng.random() < 0.5:
            return rng.choice(["{", '{"a": ', '{"a": 1}}', "null", '"{}"'])
        value = {"a": rng.choice([1, 1.5, -1e30, True, None]), "b": words(rng, CLEAN), "c": [{"é": {}}, []]}
        kept = {key: value[key] for key in rng.sample(sorted(value), rng.randrange(4))}
        return json.dumps(kept, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))

    def _tokens(self, text: str) -> list[int]:
        """One of the many sequences of tokens that have this text."""
        encode = self._tokenizer.inner.encode
        tokens: list[int] = []
        for piece in re.split(r"(<[^<>]*>|\[/?[A-Z_]+\])", text):
            mark = piece if piece in self._tokenizer.inner.get_vocab() else None
            for part in [piece] if mark or self._rng.random() < 0.5 else piece:
                tokens += encode(part, add_special_tokens=False)
        return tokens


def words(rng: random.Random, letters: Sequence[str]) -> str:
    return "".join(rng.choices(letters, k=rng.randrange(0, 12)))


class Told:
    """What one agent was told, and what it asked with."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []


told = Told()


async def uses_tools(base_url: str, api_key: str, task: str) -> str:
    """Calls what it is told to call, and writes its history down anew each time."""
    rng = random.Random(int(task))
    tools = [ADD, {"type": "function", "function": {"name": "subtract"}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": words(rng, HOSTILE) or "begin"}]
    async with NODE.client(base_url, api_key) as client:
        for _ in range(rng.randrange(1, 6)):
            more = {"max_tokens": rng.randrange(1, 60)} if rng.random() < 0.2 else {}
            choice = rng.choice([{}, {}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
            reply = await ask(client, messages, tools=tools, stream=rng.random() < 0.5, **more, **choice)
            assert reply.status_code == 200, reply.text
            answered = choice_of(reply)
            message = answered["message"]
            told.messages.append(
                message | {"cut": answered["finish_reason"] == "length", "none": "none" in choice.values()}
            )
            messages = [again(rng, one) for one in [*messages, message]] + results(rng, message)
    return "done"


async def uses_tools_in_blocks(base_url: str, api_key: str, task: str) -> str:
    """Does so through Anthropic's API."""
    rng = random.Random(int(task))
    function: Any = ADD["function"]
    tools = [{"name": "add", "input_schema": function["parameters"]}, {"name": "subtract", "input_schema": {}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": words(rng, HOSTILE) or "begin"}]
    async with NODE.client(base_url, api_key) as client:
        for _ in range(rng.randrange(1, 6)):
            asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": tools}
            asked |= {"max_tokens": rng.randrange(1, 60) if rng.random() < 0.2 else ROOM, "stream": rng.random() < 0.5}
            asked |= {"thinking": {"type": rng.choice(["disabled", "adaptive"])}}
            asked |= rng.choice([{}, {}, *({"tool_choice": {"type": kind}} for kind in ("auto", "none"))])
            reply = await client.post("messages", json=asked)
            assert reply.status_code == 200, reply.text
            message = heard(events_of(reply.content)) if asked["stream"] else reply.json()
            calls = [block for block in message["content"] if block["type"] == "tool_use"]
            functions = [{"name": call["name"], "arguments": json.dumps(call["input"])} for call in calls]
            cut = message["stop_reason"] == "max_tokens"
            none = asked.get("tool_choice") == {"type": "none"}
            told.messages.append({"tool_calls": [{"function": one} for one in functions], "cut": cut, "none": none})
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": words(rng, HOSTILE)} for call in calls
            ]
            if not calls or rng.random() < 0.2:
                results.append({"type": "text", "text": words(rng, HOSTILE)})
            messages = [*messages, *kept_blocks(rng, message["content"]), {"role": "user", "content": results}]
    return "done"


def kept_blocks(rng: random.Random, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer as some client keeps it."""
    if rng.random() < 0.5:
        blocks = [block for block in blocks if block["type"] != "thinking"]
    blocks = [
        block | {"input": dict(reversed(block["input"].items()))} if block["type"] == "tool_use" else block
        for block in blocks
        if block.get("text") != ""
    ]
    if len(blocks) > 1 and rng.random() < 0.3:
        return [{"role": "assistant", "content": [block]} for block in blocks]
    if [block["type"] for block in blocks] == ["text"] and rng.random() < 0.5:
        return [{"role": "assistant", "content": blocks[0]["text"]}]
    return [{"role": "assistant", "content": blocks}]


def results(rng: random.Random, message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls", [])
    shown = [{"role": "tool", "tool_call_id": call["id"], "content": words(rng, HOSTILE)} for call in calls]
    if not calls or rng.random() < 0.2:
        shown.append({"role": "user", "content": words(rng, HOSTILE)})
    return shown


def again(rng: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """A message as some client keeps it."""
    if message["role"] != "assistant":
        return message
    kept = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
    kept["content"] = rng.choice([kept["content"], (kept["content"] or "").strip()])
    if rng.random() < 0.5 and "reasoning" in message:
        kept[rng.choice(["reasoning", "reasoning_content"])] = message["reasoning"]
    if "tool_calls" in kept:
        kept["tool_calls"] = [call | {"function": rewritten(rng, call["function"])} for call in kept["tool_calls"]]
    return kept


def rewritten(rng: random.Random, function: dict[str, str]) -> dict[str, str]:
    """Arguments that were read and written again."""
    if not is_object(function["arguments"]) or rng.random() < 0.3:
        return function
    turned = json.loads(function["arguments"], object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    return function | {"arguments": json.dumps(turned, ensure_ascii=rng.random() < 0.5, separators=(",", ":"))}


def tokenizer_of(form: Form, folder: Path) -> HfTokenizer:
    own = form.name == "gpt_oss"
    parsers = {} if own else {"tool_parser": form.tool_parser, "reasoning_parser": form.reasoning_parser}
    config = ModelConfig(path=form.save(folder), **parsers)
    return HarmonyTokenizer(config) if own else HfTokenizer(config).ready()


def check(played: Any, policy: Policy, speaker: Speaker) -> int:
    """Tokens trained are tokens sampled, and what was meant was told. Returns how many calls were."""
    assert isinstance(played, Trajectory), played
    assert played.outcome in (Outcome.OK, Outcome.TRUNCATED)
    tokens = played.tokens().tolist()
    assert played.tokens()[played.action_mask()].tolist() == [token for said in policy.said for token in said.token_ids]
    for request, said in zip(policy.asked, policy.said, strict=True):
        assert tokens[: len(request.prompt) + len(said.token_ids)] == request.prompt + said.token_ids
    assert len(told.messages) == len(policy.said)
    calls = 0
    for message, meant in zip(told.messages, speaker.meant, strict=True):
        found = message.get("tool_calls", [])
        assert not (found and message["none"])
        if meant is None or message["cut"] or message["none"]:
            continue
        named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]
        assert named == [(call.name, json.loads(call.arguments)) for call in meant.tool_calls]
        calls += len(named)
    return calls


@pytest.mark.parametrize("agent", ["uses_tools", "uses_tools_in_blocks"])
@pytest.mark.parametrize("name", FORMS)
def test_of_a_thousand_conversations_with_tools_tokens_trained_are_tokens_sampled(
    name: str, agent: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(FORMS[name], tmp_path)
    calls = malformed = 0

    async def main(seed: int) -> None:
        global told
        nonlocal calls, malformed
        told, speaker = Told(), Speaker(FORMS[name], tokenizer, random.Random(f"{name} {seed}"))
        policy = Policy(speaker, ends=speaker.ends)
        env = make(f"{__name__}:{agent}")
        played = await play(env, policy, seed, tokenizer=tokenizer, max_new_tokens=ROOM, max_length=100_000)
        calls += check(played, policy, speaker)
        malformed += played.env_metrics().get("malformed_calls", 0) > 0

    async def all_of_them() -> None:
        for seed in range(250):
            await main(seed)

    run_virtual(all_of_them)
    assert calls > 50
    assert malformed > 5
