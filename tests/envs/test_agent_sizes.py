"""Agents that send far more than fits: it costs the node nothing but the reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from flash.simulate.clock import run_virtual
from flash.types import Observation, Tool, Trajectory
from tests.envs.agents import NODE, ByteTokenizer, ask, choice_of, make, play, says

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

    def check_calls(self) -> None:
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


@pytest.mark.parametrize("most", [100, 4000])
def test_what_is_far_too_long_is_refused_without_being_tokenized(most: int) -> None:
    tokenizer = Weighing()

    async def main() -> None:
        played = await play(make(f"{__name__}:sends_too_much"), says("fine"), tokenizer=tokenizer, max_length=most)
        assert isinstance(played, Trajectory), played
        assert played.turns[-1].note == "fine"

    run_virtual(main)
    assert 0 < tokenizer.longest < len(HUGE) // 2
