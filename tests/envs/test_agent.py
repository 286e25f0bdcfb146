"""Agents at work on the virtual clock: what they do, and what becomes of it."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import anyio
import httpx
import pytest

from envs.agent import Agent, AgentOptions
from envs.mixture import Mixture, MixtureOptions
from flash.environment import Environment, Informed, WarmStart
from flash.errors import ConfigError
from flash.simulate.clock import run_virtual
from flash.types import Failure, Message, Outcome, Trajectory
from tests.envs.agents import NODE, TASKS, ByteTokenizer, Numbers, Policy, ask, babble, make, play, says

Messages = list[dict[str, Any]]


def agent(name: str) -> Agent:
    return make(f"{__name__}:{name}")


def failure(name: str, policy: Policy | None = None, **changes: Any) -> Failure:
    played = run_virtual(lambda: play(agent(name), policy or says("fine"), **changes))
    assert isinstance(played, Failure)
    return played


def trajectory(name: str, policy: Policy | None = None, **changes: Any) -> Trajectory:
    played = run_virtual(lambda: play(agent(name), policy or says("fine"), **changes))
    assert isinstance(played, Trajectory), played
    return played


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def asks_once(base_url: str, api_key: str, task: str) -> str:
    async with NODE.client(base_url, api_key) as client:
        reply = (await ask(client, [user(f"what of {task}?")])).json()
    usage.append(reply["usage"])
    return reply["choices"][0]["message"]["content"]


usage: list[dict[str, int]] = []


def test_an_agent_is_shown_what_was_sampled_and_judged_on_what_it_returns() -> None:
    played = trajectory("asks_once")
    assert (played.outcome, played.reward) == (Outcome.OK, len("fine"))
    (turn,) = played.turns
    assert (turn.observation, turn.action, turn.note) == ("user: what of 5?", "fine", "fine")
    tokenizer = ByteTokenizer()
    prompt = tokenizer.render([Message("user", "what of 5?")])
    assert played.tokens().tolist() == [*prompt, *b"fine", 256]
    assert usage.pop() == {"prompt_tokens": len(prompt), "completion_tokens": 5, "total_tokens": len(prompt) + 5}


def test_the_environment_is_one_and_teaches_what_its_tasks_teach() -> None:
    env = agent("asks_once")
    assert isinstance(env, Environment)
    assert isinstance(env, Informed)
    assert isinstance(env, WarmStart)
    arithmetic = {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 1}}
    taught = Agent(AgentOptions(tasks=arithmetic, command=["any"]))
    assert taught.alphabet() == "0123456789=+"
    assert len(taught.solved_examples(3, 1)) == 3
    with pytest.raises(ConfigError, match="cannot show solved examples"):
        env.alphabet()


# -- conversations -------------------------------------------------------------------------------------------------

LETTERS = 'ab \n\t"\\{}<|im_end|>é🙂漢\u200b\u0000\ufffd'


class Log:
    """What one agent said and was told."""

    def __init__(self) -> None:
        self.turns: list[tuple[list[Message], str]] = []
        self.branched = False


log = Log()


async def wanders(base_url: str, api_key: str, task: str) -> str:
    """A conversation of a few turns with anything in it, retries, and sometimes a change of what was said."""
    rng = random.Random(int(task))
    messages: Messages = []
    async with NODE.client(base_url, api_key) as client:
        for turn in range(rng.randrange(1, 6)):
            if turn and rng.random() < 0.1:
                log.branched = True
                change(rng, messages)
                messages.append(user("and now?"))
                refused = await ask(client, messages)
                assert refused.json()["error"]["code"] == "conversation_branched"
                return "gave up"
            new = [Message(rng.choice(["user", "system"]), words(rng)) for _ in range(rng.randrange(1, 4))]
            messages += [{"role": one.role, "content": shape(rng, one.content)} for one in new]
            content = await insists(rng, client, messages)
            log.turns.append((new, content))
            messages.append({"role": "assistant", "content": rng.choice([content, content.strip()])})
    return "done"


def words(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randrange(0, 12)))


def shape(rng: random.Random, content: str) -> Any:
    """Text as it is, or in parts."""
    at = rng.randrange(len(content) + 1)
    return rng.choice([content, [{"type": "text", "text": part} for part in (content[:at], content[at:])]])


def change(rng: random.Random, messages: Messages) -> None:
    """Rewrite one message, or put one before it."""
    place = rng.randrange(len(messages))
    if rng.random() < 0.5:
        messages[place] = messages[place] | {"content": "something else"}
    else:
        messages.insert(place, user("something new"))


async def insists(rng: random.Random, client: httpx.AsyncClient, messages: Messages) -> str:
    """Ask, sometimes impatiently, sometimes again; every answer must be the same."""
    more: dict[str, Any] = {}
    if rng.random() < 0.3:
        more["max_tokens"] = rng.randrange(1, 20)
    if rng.random() < 0.3:
        more["headers"] = {"idempotency-key": f"key {len(messages)}"}
    got: list[str] = []

    async def once() -> None:
        reply = await ask(client, messages, **more)
        assert reply.status_code == 200, reply.text
        got.append(reply.json()["choices"][0]["message"]["content"])

    if rng.random() < 0.2:
        with anyio.move_on_after(0.5):
            await once()
    async with anyio.create_task_group() as calls:
        for _ in range(rng.randrange(1, 3)):
            calls.start_soon(once)
    if rng.random() < 0.2:
        await once()
    assert len(set(got)) == 1
    return got[0]


@pytest.mark.timeout(600)
def test_of_a_thousand_conversations_tokens_trained_are_tokens_sampled() -> None:
    tokenizer = ByteTokenizer()
    branched = 0

    async def main(seed: int) -> None:
        global log
        nonlocal branched
        log, policy = Log(), Policy(babble)
        played = await play(agent("wanders"), policy, seed)
        sampled = [token for said in policy.said for token in said.token_ids]
        assert len(policy.said) == len(log.turns), "a retry is no call of its own"
        if log.branched:
            branched += 1
            assert isinstance(played, Failure)
            assert (played.outcome, played.tokens) == (Outcome.BRANCHED, len(sampled))
            return
        assert isinstance(played, Trajectory), played
        tokens = played.tokens()
        assert tokens[played.action_mask()].tolist() == sampled
        assert played.action_count == len(sampled)
        expected: list[int] = []
        for (new, told), said, request in zip(log.turns, policy.said, policy.asked, strict=True):
            first = not expected
            stopped = first or expected[-1] == 256
            expected += tokenizer.render(new) if first else tokenizer.follow(new, stopped)
            assert request.prompt == expected
            expected += said.token_ids
            assert told == tokenizer.decode(said.token_ids)
        assert tokens.tolist() == expected

    async def all_of_them() -> None:
        for seed in range(1000):
            await main(seed)

    run_virtual(all_of_them)
    assert 50 < branched < 500


# -- agents that do what they should not -----------------------------------------------------------------------------


async def is_silent(base_url: str, api_key: str, task: str) -> str:
    return "nothing to ask"


async def hangs(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    await anyio.sleep_forever()
    return ""


async def fails(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    raise KeyError("no such tool")


async def exits(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    sys.exit(3)


async def is_cancelled_inside(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    raise asyncio.CancelledError


async def returns_a_number(base_url: str, api_key: str, task: str) -> Any:
    await asks_once(base_url, api_key, task)
    return 4


async def forks(base_url: str, api_key: str, task: str) -> str:
    async with NODE.client(base_url, api_key) as client, anyio.create_task_group() as calls:
        calls.start_soon(ask, client, [user("this")])
        calls.start_soon(ask, client, [user("and that")])
    return "both"


@pytest.mark.parametrize(
    ("name", "outcome", "message", "tokens"),
    [
        ("is_silent", Outcome.ENV_ERROR, "ended before it had asked anything", 0),
        ("hangs", Outcome.ENV_TIMEOUT, "environment step 1 (seed 5) took longer than 20 s", 5),
        ("fails", Outcome.ENV_ERROR, "the agent failed: it raised KeyError: 'no such tool' (", 5),
        ("exits", Outcome.ENV_ERROR, "the agent failed: it raised SystemExit: 3 (", 5),
        ("is_cancelled_inside", Outcome.ENV_ERROR, "cancelled from within", 5),
        ("returns_a_number", Outcome.ENV_ERROR, "must return its answer as text, but returned 4", 5),
    ],
)
def test_an_agent_that_fails_is_a_typed_failure_and_never_a_reward_of_0(
    name: str, outcome: Outcome, message: str, tokens: int
) -> None:
    closed = Numbers.closed
    failed = failure(name)
    assert (failed.outcome, failed.tokens) == (outcome, tokens)
    assert message in failed.message
    assert Numbers.closed == closed + 1


def test_two_conversations_at_once_are_an_outcome_of_their_own() -> None:
    failed = failure("forks")
    assert failed.outcome == Outcome.BRANCHED
    assert "before the answer to the one before it" in failed.message


async def goes_on(base_url: str, api_key: str, task: str) -> str:
    messages: Messages = []
    async with NODE.client(base_url, api_key) as client:
        while True:
            messages.append(user("more, more, more!"))
            reply = await ask(client, messages)
            reply.raise_for_status()
            messages.append(reply.json()["choices"][0]["message"])


async def knows_when_to_stop(base_url: str, api_key: str, task: str) -> str:
    try:
        return await goes_on(base_url, api_key, task)
    except httpx.HTTPStatusError as error:
        return error.response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("changes", "code"), [({"max_turns": 3}, "turns_exhausted"), ({"max_length": 90}, "context_length_exceeded")]
)
def test_an_agent_is_told_of_a_limit_and_its_episode_is_truncated_where_that_fails_it(
    changes: dict[str, int], code: str
) -> None:
    stopped = trajectory("goes_on", **changes)
    assert (stopped.outcome, stopped.reward) == (Outcome.TRUNCATED, 0.0)
    assert len(stopped.turns) == 3
    told = trajectory("knows_when_to_stop", **changes)
    assert (told.outcome, told.reward, told.turns[-1].note) == (Outcome.OK, len(code), code)


async def outlives_its_episode(base_url: str, api_key: str, task: str) -> str:
    try:
        return await hangs(base_url, api_key, task)
    finally:
        with anyio.CancelScope(shield=True):
            async with NODE.client(base_url, api_key) as client:
                later.append((await ask(client, [user("still there?")])).status_code)


later: list[int] = []


def test_a_call_after_the_end_is_refused_with_the_key() -> None:
    failure("outlives_its_episode")
    assert later == [401]


async def leaves_its_call(base_url: str, api_key: str, task: str) -> str:
    async with NODE.client(base_url, api_key) as client:
        with anyio.move_on_after(0.1):
            await ask(client, [user("are you there?")])
    return "nobody"


def test_an_answer_that_the_agent_did_not_wait_for_is_trained_like_any_other() -> None:
    played = trajectory("leaves_its_call")
    assert (played.outcome, played.reward, played.action_count) == (Outcome.OK, 6.0, 5)


async def asks_wrongly(base_url: str, api_key: str, task: str) -> str:
    async with NODE.client(base_url, api_key) as client:
        for wrong in ({"n": 3}, {"stop": ["x"]}, {"model": "gpt-4o"}, {"max_tokens": 0}):
            assert (await ask(client, [user("hello")], **wrong)).is_client_error
        return (await ask(client, [user("hello")])).json()["choices"][0]["message"]["content"]


def test_a_refused_request_is_no_part_of_the_conversation() -> None:
    played = trajectory("asks_wrongly")
    assert [turn.observation for turn in played.turns] == ["user: hello"]
    assert played.reward == len("fine")


# -- options ---------------------------------------------------------------------------------------------------------


def not_an_agent(base_url: str) -> str:
    return base_url


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of `function` and `command`"),
        ({"function": "a:b", "command": ["c"]}, "one of `function` and `command`"),
        ({"command": []}, "`command` is empty"),
        ({"function": f"{__name__}:nobody"}, "has no `nobody`"),
        ({"function": f"{__name__}:not_an_agent"}, "must take (base_url, api_key, task)"),
        ({"command": ["a"], "tasks": {"path": "envs.arithmetic:Nothing"}}, "tasks.path"),
        ({"command": ["a"], "tasks": {"pat": "x"}}, "tasks.pat"),
        (
            {"command": ["a"], "tasks": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 99}}},
            "digits must be",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Agent.check(AgentOptions(**({"tasks": TASKS} | given)))
    assert message in str(refused.value)


def test_an_agent_may_be_one_environment_of_a_mixture() -> None:
    inner = {"path": "envs.agent:Agent", "options": {"function": f"{__name__}:asks_once", "tasks": TASKS}}
    mixture = Mixture(MixtureOptions(kinds={"agent": inner}))
    played = run_virtual(lambda: play(mixture, says("fine")))
    assert isinstance(played, Trajectory), played
    assert played.reward == len("fine")
