"""Agents that send far more than fits: it costs the node nothing but the reading."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import anyio
import pytest

from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.transcript import LARGE_LETTERS
from flash.types import Completion, Observation, Tool, Trajectory
from tests.envs.agents import END, NODE, ByteTokenizer, Policy, ask, choice_of, make, play

HUGE = "1+" * 500_000
TOOL = {"type": "function", "function": {"name": "add", "description": HUGE}}


def calls(count: int = 1, **named: str) -> dict[str, Any]:
    """An assistant's message that calls a function so many times."""
    function = {"name": "add", "arguments": "{}"} | {key: text for key, text in named.items() if key != "id"}
    call = {"id": named.get("id", "1"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call] * count}


EMPTY = {"role": "user", "content": ""}
LONG = {
    "messages": [EMPTY] * 10_000,
    "calls": [calls(10_000), EMPTY],
    "arguments": [calls(arguments=HUGE), EMPTY],
    "a function's name": [calls(name=HUGE), EMPTY],
    "a call's name": [calls(id=HUGE), EMPTY],
    "what a result is of": [{"role": "tool", "content": "", "tool_call_id": HUGE}],
    "the function of a result": [{"role": "tool", "content": "", "name": HUGE}],
    "reasoning": [{"role": "assistant", "content": "", "reasoning": HUGE}, EMPTY],
}
"""Messages that say nothing, and are far too long all the same."""


class Weighing(ByteTokenizer):
    """Knows how long the longest text was that it was given."""

    longest = 0

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        self.longest = max(self.longest, len(repr(observation)) + len(repr(tools)))
        return super().render(observation)

    def check_reads_calls(self) -> None:
        """None is made."""


async def sends_too_much(base_url: str, api_key: str, task: str) -> str:
    """Something huge, several times at once and after an answer; then something small."""
    huge = [{"role": "user", "content": HUGE}]
    small = [{"role": "user", "content": task}]

    async def refused(messages: list[dict[str, Any]], **more: Any) -> None:
        reply = await ask(client, messages, **more)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")

    async with NODE.client(base_url, api_key) as client:
        async with anyio.create_task_group() as together:
            for number in range(3):
                together.start_soon(refused, [*huge, *small * number])
        await refused(small, tools=[TOOL])
        for messages in LONG.values():
            await refused(messages)
        await refused([{"role": "user", "content": HUGE * 12}], n=128)
        answered = choice_of(await ask(client, small))["message"]
        await refused([*small, answered, *huge])
        reply = await client.post("completions", json={"model": "policy", "prompt": HUGE})
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    return answered["content"]


@pytest.mark.anyio
@pytest.mark.parametrize("most", [100, 4000])
async def test_what_is_far_too_long_is_refused_without_being_tokenized(most: int) -> None:
    tokenizer, policy = Weighing(), Policy(lambda _: [*b"fine", END], seconds=0.0)
    played = await play(make(f"{__name__}:sends_too_much"), policy, tokenizer=tokenizer, max_length=most)
    assert isinstance(played, Trajectory), played
    assert played.turns[-1].note == "fine"
    assert 0 < tokenizer.longest < len(HUGE) // 2


LONG_TEXT = "1+" * LARGE_LETTERS


class Slow(ByteTokenizer):
    """Knows which texts were rendered on the event loop."""

    slow = True
    looped: ClassVar[list[int]] = []
    threaded: ClassVar[list[int]] = []

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        tokens = super().render(observation)
        loop = threading.current_thread() is threading.main_thread()
        (self.looped if loop else self.threaded).append(len(tokens))
        return tokens


class AtOnce(Policy):
    """Answers once three responses are asked for."""

    def __init__(self) -> None:
        super().__init__(lambda _: [*b"fine", END], seconds=0.0)
        self._waiting = 0
        self._enough = anyio.Event()

    async def generate(self, request: ResponseRequest) -> Completion:
        self._waiting += 1
        if self._waiting == 3:
            self._enough.set()
        with anyio.fail_after(20):
            await self._enough.wait()
        return await super().generate(request)


async def asks_long_things(base_url: str, api_key: str, task: str) -> str:
    """Asks three long things at once, then goes on from two of the answers at once."""
    async with NODE.client(base_url, api_key) as client:

        async def one(*messages: dict[str, Any]) -> list[dict[str, Any]]:
            said = choice_of(await ask(client, list(messages)))["message"]
            return [*messages, said]

        histories: list[list[dict[str, Any]]] = []

        async def keep(*messages: dict[str, Any]) -> None:
            histories.append(await one(*messages))

        async with anyio.create_task_group() as calls:
            for number in range(3):
                calls.start_soon(keep, {"role": "user", "content": f"{number}{LONG_TEXT}"})
        async with anyio.create_task_group() as calls:
            for history in histories[:2]:
                calls.start_soon(keep, *history, {"role": "user", "content": LONG_TEXT})
    return "done"


@pytest.mark.anyio
async def test_what_is_long_is_rendered_in_a_thread_and_sampled_at_once() -> None:
    Slow.looped, Slow.threaded = [], []
    policy = AtOnce()
    env = make(f"{__name__}:asks_long_things")
    limits: dict[str, Any] = {"max_length": 200_000, "max_new_tokens": 100}
    played = await play(env, policy, tokenizer=Slow(), **limits)
    assert isinstance(played, Trajectory), played
    assert [turn.branch for turn in played.turns[:3]] == [0, 1, 2]
    assert sorted(turn.branch for turn in played.turns[3:]) == [0, 1]
    tokens = played.tokens().tolist()
    for branch, start in enumerate(played.branches):
        prompt = policy.asked[branch].prompt
        assert tokens[start : start + len(prompt)] == prompt
    assert not Slow.looped
    assert len(Slow.threaded) >= 5
