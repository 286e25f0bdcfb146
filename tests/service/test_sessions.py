"""Calls of one episode on the virtual clock: each request gets its own answer, once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import pytest

from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.fields import ApiError
from flash.service.sessions import KEY_BYTES, MOST_OPEN, OPEN_BYTES, EpisodeSession, EpisodeSessions
from flash.simulate.clock import run_virtual
from flash.types import Message, Tool


def user(*contents: str) -> list[Message]:
    """Return messages of the user."""
    return [Message("user", content) for content in contents]


def assistant(content: str) -> Message:
    """Return a message of the assistant."""
    return Message("assistant", content)


def asked(*messages: Message, most: int | None = None) -> AgentRequest:
    """Return a request with these messages and at most `most` tokens."""
    return AgentRequest(list(messages), most)


def answer(content: str) -> PolicyAnswer:
    """Return an answer of one token with this content."""
    return PolicyAnswer(assistant(content), cut=False, prompt_tokens=1, tokens=1)


def code_of(error: ApiError) -> str | None:
    """Return the error's name for programs."""
    return msgspec.json.decode(error.body)["error"]["code"]


class Agent:
    """Agent that makes calls and keeps their results: the content of an answer, or the status and code of an error."""

    def __init__(self, session: EpisodeSession) -> None:
        self._session = session
        self.got: list[str] = []
        """Results, in the order of arrival."""

    async def ask(self, request: AgentRequest, key: str | None = None, again: bool | None = None) -> None:
        """Make the call of a request, wait for its answer, and keep the result. `again`: argument `retry` of the
        call."""
        try:
            call = self._session.call(request, key, retry=again)
            with call.waited_for():
                got = await call.answer()
                call.delivered = True
        except ApiError as error:
            self.got.append(f"{error.status} {code_of(error)}")
        else:
            self.got.append(got.message.content)


Play = Callable[[EpisodeSession, Agent, Any], Awaitable[None]]
"""Scenario, given a session, an agent of it, and a task group in which the agent makes calls."""


def play(part: Play) -> list[str]:
    """Run `part` with a new session, an agent and a task group. Return the agent's results in the order of arrival."""

    async def main() -> list[str]:
        session = EpisodeSession()
        agent = Agent(session)
        async with anyio.create_task_group() as calls:
            await part(session, agent, calls)
        return agent.got

    return run_virtual(main)


async def hear(session: EpisodeSession) -> list[str]:
    """Return the contents of the messages that the next call adds to the conversation."""
    with anyio.fail_after(1):
        pending = await session.next_call()
    assert pending is not None
    return [message.content for message in pending.place.added]


async def first_turn(session: EpisodeSession, agent: Agent, calls: Any) -> None:
    """Let the agent ask `one`, and answer `two` with white space around it. At the end the agent has the answer."""
    calls.start_soon(agent.ask, asked(*user("one")))
    assert await hear(session) == ["one"]
    session.answer(answer(" two\n"))
    await anyio.wait_all_tasks_blocked()


def test_a_call_shows_only_what_it_adds() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        await first_turn(session, agent, calls)
        calls.start_soon(agent.ask, asked(*user("one"), assistant(" two\n"), *user("three", "four")))
        assert await hear(session) == ["three", "four"]
        session.answer(answer("five"))

    assert play(part) == [" two\n", "five"]


def test_an_answer_that_comes_back_stripped_is_the_same() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        await first_turn(session, agent, calls)
        calls.start_soon(agent.ask, asked(*user("one"), assistant("two"), *user("three")))
        assert await hear(session) == ["three"]
        session.answer(answer("x"))

    assert play(part) == [" two\n", "x"]


@pytest.mark.parametrize("again", [None, False])
def test_equal_requests_at_once_without_a_key_are_different_requests(again: bool | None) -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        for _ in range(4):
            calls.start_soon(agent.ask, asked(*user("one")), None, again)
        await anyio.wait_all_tasks_blocked()
        for number in range(4):
            assert await hear(session) == ["one"]
            session.answer(answer(f"answer {number}"))
        await anyio.wait_all_tasks_blocked()
        calls.start_soon(agent.ask, asked(*user("one")), None, again)
        assert await hear(session) == ["one"], "nor is one that comes when all have their answers"
        session.answer(answer("another"))

    assert sorted(play(part)) == ["another", *(f"answer {number}" for number in range(4))]


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("again", [None, True])
def test_a_request_gets_the_answer_that_its_client_has_left_without(again: bool | None, answered: bool) -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        with anyio.move_on_after(1):
            await agent.ask(asked(*user("one")))
        calls.start_soon(agent.ask, asked(*user("other")))
        await anyio.wait_all_tasks_blocked()
        if not answered:
            calls.start_soon(agent.ask, asked(*user("one")), None, again)
            await anyio.wait_all_tasks_blocked()
        for content in ("one", "other"):
            assert await hear(session) == [content]
            session.answer(answer(f"to {content}"))
            await anyio.wait_all_tasks_blocked()
        if answered:
            await agent.ask(asked(*user("one")), None, again)
        with anyio.move_on_after(1) as nothing:
            await session.next_call()
        assert nothing.cancelled_caught

    assert sorted(play(part)) == ["to one", "to other"]


def test_a_client_that_tries_a_refused_request_again_takes_no_answer_of_another() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        for _ in range(2):
            calls.start_soon(agent.ask, asked(*user("one")), None, False)
            await anyio.wait_all_tasks_blocked()
        assert await hear(session) == ["one"]
        session.refuse(ApiError(429, "no"))
        calls.start_soon(agent.ask, asked(*user("one")), None, True)
        await anyio.wait_all_tasks_blocked()
        for number in range(2):
            assert await hear(session) == ["one"]
            session.answer(answer(f"answer {number}"))
            await anyio.wait_all_tasks_blocked()

    assert play(part) == ["429 None", "answer 0", "answer 1"]


def test_a_client_that_says_which_calls_are_new_has_each_answered() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        for _ in range(3):
            calls.start_soon(agent.ask, asked(*user("one")), None, False)
        await anyio.wait_all_tasks_blocked()
        for number in range(3):
            assert await hear(session) == ["one"]
            session.answer(answer(f"answer {number}"))
        await anyio.wait_all_tasks_blocked()
        await agent.ask(asked(*user("one")), None, True)

    assert play(part) == ["answer 0", "answer 1", "answer 2", "answer 2"]


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize("answered", [False, True])
def test_a_client_that_asks_again_gets_what_it_had_left_without(left: int, answered: bool) -> None:
    """The client of one of three equal calls leaves, before or after the answer is there."""

    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        scopes = [anyio.CancelScope() for _ in range(3)]

        async def ask(number: int) -> None:
            with scopes[number]:
                await agent.ask(asked(*user("one")), None, False)

        for number in range(3):
            calls.start_soon(ask, number)
            await anyio.wait_all_tasks_blocked()
        scopes[left].cancel()
        await anyio.wait_all_tasks_blocked()
        if not answered:
            calls.start_soon(agent.ask, asked(*user("one")), None, True)
            await anyio.wait_all_tasks_blocked()
        for number in range(3):
            await session.next_call()
            session.answer(answer(f"answer {number}"))
            await anyio.wait_all_tasks_blocked()
        if answered:
            await agent.ask(asked(*user("one")), None, True)
        session.agent_ended()
        assert await session.next_call() is None

    assert sorted(play(part)) == ["answer 0", "answer 1", "answer 2"]


def test_a_key_makes_calls_the_same_and_may_not_be_used_for_another() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        calls.start_soon(agent.ask, asked(*user("one")), "k")
        assert await hear(session) == ["one"]
        session.answer(answer("two"))
        await anyio.wait_all_tasks_blocked()
        await agent.ask(asked(*user("one")), "k")
        await agent.ask(asked(*user("other")), "k")

    assert play(part) == ["two", "two", "400 None"]


TWO = assistant("two")


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(user("won", "three"), id="another first message"),
        pytest.param([*user("one"), assistant("too"), *user("three")], id="another answer"),
        pytest.param([*user("one"), Message("user", "two"), *user("three")], id="another speaker"),
        pytest.param(user("three"), id="all dropped"),
        pytest.param([TWO, *user("three")], id="the first message dropped"),
        pytest.param([*user("one"), *user("three")], id="the answer dropped"),
        pytest.param([*user("zero"), *user("one"), TWO, *user("three")], id="one put before it"),
    ],
)
def test_history_that_is_not_as_it_was_begins_a_branch(messages: list[Message]) -> None:
    """A place has the number of the branch, its answers before the place, True for a new branch, and new messages."""

    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        await first_turn(session, agent, calls)
        calls.start_soon(agent.ask, asked(*messages))
        pending = await session.next_call()
        assert pending is not None
        assert pending.place == (0, 0, True, messages)
        session.answer(answer("four"))
        await anyio.wait_all_tasks_blocked()
        calls.start_soon(agent.ask, asked(*messages, assistant("four"), *user("five")))
        pending = await session.next_call()
        assert pending is not None
        assert pending.place == (1, 1, False, user("five"))
        session.answer(answer("six"))

    assert play(part) == [" two\n", "four", "six"]


def test_other_tools_are_another_conversation() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        await first_turn(session, agent, calls)
        tools: Tool = {"type": "function", "function": {"name": "add"}}
        messages = [*user("one"), TWO, *user("three")]
        calls.start_soon(agent.ask, AgentRequest(messages, None, tools=(tools,)))
        pending = await session.next_call()
        assert pending is not None
        assert pending.place == (0, 0, True, messages)
        session.answer(answer("four"))
        await anyio.wait_all_tasks_blocked()
        calls.start_soon(agent.ask, AgentRequest([*messages, assistant("four"), *user("five")], None, tools=(tools,)))
        assert await hear(session) == ["five"]
        session.answer(answer("six"))

    assert play(part) == [" two\n", "four", "six"]


def test_calls_at_once_are_answered_in_the_order_in_which_they_came() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        for content in ("one", "another", "a third"):
            calls.start_soon(agent.ask, asked(*user(content)))
            await anyio.wait_all_tasks_blocked()
        for content in ("one", "another", "a third"):
            assert await hear(session) == [content]
            session.answer(answer(f"to {content}"))
            await anyio.wait_all_tasks_blocked()
        session.agent_ended()
        assert await session.next_call() is None

    assert play(part) == ["to one", "to another", "to a third"]


def test_of_calls_at_once_one_may_be_refused_and_the_others_go_on() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        for content in ("one", "another"):
            calls.start_soon(agent.ask, asked(*user(content)))
            await anyio.wait_all_tasks_blocked()
        assert await hear(session) == ["one"]
        session.refuse(ApiError(400, "too long", "context_length_exceeded"))
        assert await hear(session) == ["another"]
        session.answer(answer("two"))

    assert play(part) == ["400 context_length_exceeded", "two"]


def test_the_same_question_with_another_limit_is_another_call() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        await first_turn(session, agent, calls)
        calls.start_soon(agent.ask, asked(*user("one"), most=3))
        assert await hear(session) == ["one"]
        session.answer(answer("three"))

    assert play(part) == [" two\n", "three"]


@pytest.mark.parametrize("more", [[], [*user("three"), assistant("no")]])
def test_a_request_must_end_with_something_to_answer(more: list[Message]) -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        await first_turn(session, agent, calls)
        await agent.ask(asked(*user("one"), TWO, *more))
        session.agent_ended()
        assert await session.next_call() is None

    assert play(part) == [" two\n", "400 None"]


def test_a_refused_call_was_not_shown_and_may_be_made_again() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        for reply in ("no", "yes"):
            calls.start_soon(agent.ask, asked(*user("one")))
            assert await hear(session) == ["one"]
            if reply == "no":
                session.refuse(ApiError(400, "too long", "context_length_exceeded"))
            else:
                session.answer(answer(reply))
            await anyio.wait_all_tasks_blocked()

    assert play(part) == ["400 context_length_exceeded", "yes"]


def test_the_end_refuses_what_is_open_and_what_comes() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        calls.start_soon(agent.ask, asked(*user("one")))
        calls.start_soon(agent.ask, asked(*user("another")))
        assert await hear(session) == ["one"]
        session.end()
        await anyio.wait_all_tasks_blocked()
        await agent.ask(asked(*user("one")))

    assert play(part) == ["401 invalid_api_key"] * 3


@pytest.mark.parametrize("keyed", [True, False])
def test_an_episode_has_so_many_open_calls_and_forgets_each_that_is_refused(keyed: bool) -> None:
    session = EpisodeSession()
    calls = [session.call(asked(*user("x")), f"key {n}" if keyed else None, retry=False) for n in range(MOST_OPEN)]
    assert len({id(call) for call in calls}) == MOST_OPEN
    with pytest.raises(ApiError) as caught:
        session.call(asked(*user("x")), "another key" if keyed else None, retry=False)
    assert caught.value.status == 429
    session.refuse(ApiError(400, "no"))
    again = session.call(asked(*user("x")), "another key" if keyed else None, retry=False)
    assert again not in calls
    session.end()
    with pytest.raises(ApiError, match="over"):
        session.call(asked(*user("x")))


def test_open_calls_of_an_episode_have_so_many_bytes_together_and_answered_ones_have_none() -> None:
    # Three calls of this size are allowed, and four are too large.
    session, size = EpisodeSession(), OPEN_BYTES // 4 + 1
    calls = [session.call(msgspec.structs.replace(asked(*user(f"{n}")), size=size)) for n in range(3)]
    with pytest.raises(ApiError, match="3 requests of this episode wait") as caught:
        session.call(msgspec.structs.replace(asked(*user("x")), size=size))
    assert caught.value.status == 429
    session.refuse(ApiError(400, "no"))
    assert calls[0].request.messages == []
    session.call(msgspec.structs.replace(asked(*user("x")), size=size))
    session.end()


def test_a_client_that_leaves_takes_no_answer_with_it() -> None:
    async def part(session: EpisodeSession, agent: Agent, calls: Any) -> None:
        with anyio.move_on_after(1):
            await session.call(asked(*user("one"))).answer()
        assert await hear(session) == ["one"]
        session.answer(answer("two"))
        await agent.ask(asked(*user("one")))

    assert play(part) == ["two"]


def test_a_key_is_of_128_bits_and_of_one_episode() -> None:
    async def main() -> None:
        sessions = EpisodeSessions()
        (one, key), (other, other_key) = sessions.open(), sessions.open()
        assert len(bytes.fromhex(key)) == KEY_BYTES == 16
        assert sessions.of_key(key) is one
        assert sessions.of_key(other_key) is other
        sessions.close(key)
        for wrong in (key, "", key[:-1], "ключ"):
            with pytest.raises(ApiError) as refused:
                sessions.of_key(wrong)
            assert refused.value.status == 401
        assert sessions.of_key(other_key) is other
        assert len(sessions) == 1

    run_virtual(main)
