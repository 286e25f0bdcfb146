"""Answers that are told while they are sampled, over a real port to the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import openai
import pytest

from flash.errors import EngineError
from flash.types import Failure, Outcome, Trajectory
from tests.envs.agents import Policy, make, play

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai_models")]

TEXT = "ñ🙂 and so on"
QUESTION: Any = [{"role": "user", "content": "5?"}]


class Paced(Policy):
    """Says its first token, and the others once somebody lets it go on."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(lambda _: [*TEXT.encode(), 256], seconds=0.0)
        self.goes_on = anyio.Event()
        self._error = error
        self._tokens = 0

    async def pause(self) -> None:
        self._tokens += 1
        if self._tokens == 7:  # of which six are the first two letters
            await self.goes_on.wait()
            if self._error is not None:
                raise self._error


policy = Paced()
seen: list[str] = []


async def episode(name: str, paced: Paced) -> Trajectory | Failure:
    """One of an agent of this module."""
    global policy
    policy = paced
    seen.clear()
    with anyio.fail_after(60):
        return await play(make(f"{__name__}:{name}"), policy, in_process=False)


async def chats(client: openai.AsyncOpenAI, **more: Any) -> AsyncIterator[str]:
    async with await client.chat.completions.create(model="policy", messages=QUESTION, stream=True, **more) as chunks:
        async for chunk in chunks:
            yield "".join(choice.delta.content or "" for choice in chunk.choices)


async def completes(client: openai.AsyncOpenAI, **more: Any) -> AsyncIterator[str]:
    async with await client.completions.create(model="policy", prompt="5?", stream=True, **more) as chunks:
        async for chunk in chunks:
            yield "".join(choice.text for choice in chunk.choices)


async def responds(client: openai.AsyncOpenAI, **more: Any) -> AsyncIterator[str]:
    async with client.responses.stream(model="policy", input="5?", **more) as events:
        async for event in events:
            if event.type == "error":
                raise openai.OpenAIError(event.message)
            yield event.delta if event.type == "response.output_text.delta" else ""
        assert (await events.get_final_response()).output_text == TEXT


WAYS = {"chats": chats, "completes": completes, "responds": responds}
way = "chats"


async def listens(base_url: str, api_key: str, task: str) -> str:
    """Lets the policy go on once it has heard its beginning."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async for text in WAYS[way](client):
            seen.append(text)
            if "".join(seen) == TEXT[:3]:
                policy.goes_on.set()
    return "".join(seen)


@pytest.mark.parametrize("name", WAYS)
async def test_an_answer_is_told_while_it_is_sampled(name: str) -> None:
    global way
    way = name
    played = await episode("listens", Paced())
    assert isinstance(played, Trajectory), played
    assert played.turns[-1].note == TEXT
    assert played.tokens()[played.action_mask()].tolist() == [*TEXT.encode(), 256]
    assert len([text for text in seen if text]) > 5


async def leaves(base_url: str, api_key: str, task: str) -> str:
    """Leaves in the middle, asks again while the answer is still sampled, and once more when it is there."""
    heard: list[str] = []
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        more = {"extra_headers": {"idempotency-key": "the same"}}
        async for _ in chats(client, **more):
            break
        async for text in chats(client, **more):
            seen.append(text)
            if "".join(seen) == TEXT[:3]:
                policy.goes_on.set()
        heard += [text async for text in chats(client, **more)]
        reply = await client.chat.completions.create(model="policy", messages=QUESTION, **more)
        assert reply.choices[0].message.content == "".join(heard) == "".join(seen)
        history: Any = [*QUESTION, {"role": "assistant", "content": "".join(heard)}, *QUESTION]
        await client.chat.completions.create(model="policy", messages=history)
    return "".join(heard)


async def test_a_client_that_leaves_in_the_middle_has_its_answer_when_it_asks_again() -> None:
    played = await episode("leaves", Paced())
    assert isinstance(played, Trajectory), played
    assert (played.outcome, played.turns[-1].note) == (Outcome.OK, TEXT)
    assert [turn.branch for turn in played.turns] == [0, 0], "it was sampled once, and gone on with"
    assert played.action_count == 2 * len([*TEXT.encode(), 256])


async def gives_up(base_url: str, api_key: str, task: str) -> str:
    """Is content with the beginning of the answer."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async for text in chats(client):
            seen.append(text)
            if "".join(seen) == TEXT[:3]:
                break
    policy.goes_on.set()
    return "enough"


async def test_what_a_client_did_not_wait_for_is_booked_all_the_same() -> None:
    played = await episode("gives_up", Paced())
    assert isinstance(played, Trajectory), played
    assert (played.outcome, played.turns[-1].note) == (Outcome.OK, "enough")
    assert played.action_count == len([*TEXT.encode(), 256])


@pytest.mark.parametrize("name", WAYS)
async def test_a_stream_that_fails_says_so_and_the_episode_fails(name: str) -> None:
    global way, address
    way, address = name, asyncio.get_running_loop().create_future()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hears_the_end)
        played = await episode("gives_its_address", Paced(EngineError("the engine is gone")))
    assert isinstance(played, Failure)
    assert (played.outcome, played.tokens) == (Outcome.ENGINE_ERROR, 7)
    assert seen[-1] == "The episode of this key is over."


address: asyncio.Future[tuple[str, str]]
"""Of the endpoint, with its key."""


async def gives_its_address(base_url: str, api_key: str, task: str) -> str:
    """Leaves the talking to another program: its own tasks are cancelled when its episode fails."""
    address.set_result((base_url, api_key))
    await asyncio.sleep(1000)
    return ""


async def hears_the_end() -> None:
    base_url, api_key = await address
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        try:
            async for text in WAYS[way](client):
                seen.append(text)
                if "".join(seen) == TEXT[:3]:
                    policy.goes_on.set()
        except openai.OpenAIError as error:
            seen.append(str(error))
