"""An agent of the official `openai` client that asks for one answer in pieces and for two whole ones at once, and goes
on from the one that came in pieces."""

from typing import Any

import anyio
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="each episode has its own")


async def solve(base_url: str, api_key: str, task: str) -> str:
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    question: Any = {"role": "user", "content": task}
    told: list[str] = []

    async def ask_in_pieces(*messages: Any) -> None:
        stream = await client.chat.completions.create(
            model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        pieces, counted = "", 0
        async for chunk in stream:
            pieces += "".join(choice.delta.content or "" for choice in chunk.choices)
            counted += chunk.usage.completion_tokens if chunk.usage else 0
        assert counted, "the stream ends with the count of tokens"
        told.append(pieces)

    async def ask_for_two() -> None:
        reply = await client.chat.completions.create(model="policy", messages=[question], n=2)
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert reply.usage is not None
        assert reply.usage.completion_tokens >= 2

    async with anyio.create_task_group() as calls:
        calls.start_soon(ask_in_pieces, question)
        calls.start_soon(ask_for_two)
    await ask_in_pieces(question, {"role": "assistant", "content": told[0]}, question)
    return told[1]
