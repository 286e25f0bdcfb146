"""Agents at work on the virtual clock: what they do, and what becomes of it."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest

from envs.agent import Agent, AgentOptions
from envs.mixture import Mixture, MixtureOptions
from flash.branches import branch_tokens, spans_by_turn, split_branches
from flash.environment import Environment, EpisodeView, Informed, WarmStart
from flash.errors import ConfigError
from flash.service.app import RETRIES
from flash.simulate.clock import run_virtual
from flash.types import Failure, Message, Outcome, Trajectory
from tests.envs.agents import (
    BYTES,
    NODE,
    TASKS,
    ByteTokenizer,
    Numbers,
    Policy,
    ask,
    babble,
    choice_of,
    make,
    play,
    says,
)

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
    """What one agent was told, call by call, and whether it did more than to append."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.branched = False


log = Log()


async def wanders(base_url: str, api_key: str, task: str) -> str:
    """Conversations with anything in them: retries, changes of what was said, several at once, and going back."""
    rng = random.Random(int(task))
    histories: list[Messages] = [[]]
    async with NODE.client(base_url, api_key) as client:
        for _ in range(rng.randrange(1, 5)):
            at_once = rng.choice([1, 1, 1, 2])
            log.branched = log.branched or at_once > 1
            asked = [list(histories[-1]) for _ in range(at_once)]
            for messages in asked:
                if rng.random() < 0.15 and messages:
                    log.branched = True
                    change(rng, messages)
                new = [Message(rng.choice(["user", "system"]), words(rng)) for _ in range(rng.randrange(1, 4))]
                new.append(user_message(f"question {rng.random()}"))
                messages += [{"role": one.role, "content": shape(rng, one.content)} for one in new]
            async with anyio.create_task_group() as calls:
                for messages in asked:
                    calls.start_soon(insists, rng, client, messages)
            histories += asked
    return "done"


def user_message(content: str) -> Message:
    return Message("user", content)


def words(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randrange(0, 12)))


def shape(rng: random.Random, content: str) -> Any:
    """Text as it is, or in parts."""
    at = rng.randrange(len(content) + 1)
    return rng.choice([content, [{"type": "text", "text": part} for part in (content[:at], content[at:])]])


def change(rng: random.Random, messages: Messages) -> None:
    """Rewrite one message, put one before it, or drop all from there on."""
    place = rng.randrange(len(messages))
    match rng.randrange(3):
        case 0:
            messages[place] = messages[place] | {"content": "something else"}
        case 1:
            messages.insert(place, user("something new"))
        case _:
            del messages[place:]


async def insists(rng: random.Random, client: httpx.AsyncClient, messages: Messages) -> None:
    """Ask, sometimes impatiently, sometimes again; every answer must be the same, and becomes a part of the history."""
    more: dict[str, Any] = {}
    if rng.random() < 0.3:
        more["max_tokens"] = rng.randrange(1, 20)
    keyed = rng.random() < 0.5
    if keyed:
        more["headers"] = {"idempotency-key": f"key {rng.random()}"}
    got: list[str] = []

    async def once() -> None:
        reply = await ask(client, messages, stream=rng.random() < 0.5, **more)
        assert reply.status_code == 200, reply.text
        got.append(choice_of(reply)["message"]["content"])

    if rng.random() < 0.2:
        with anyio.move_on_after(0.5):
            await once()
    async with anyio.create_task_group() as calls:
        for _ in range(rng.randrange(1, 3) if keyed else 1):
            calls.start_soon(once)
    if keyed and rng.random() < 0.2:
        await once()
    assert len(set(got)) == 1
    log.told.append(got[0])
    messages.append({"role": "assistant", "content": rng.choice([got[0], got[0].strip()])})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_hundreds_of_agents_tokens_trained_are_tokens_sampled() -> None:
    tokenizer = ByteTokenizer()
    branched = 0

    async def main(seed: int) -> None:
        global log
        nonlocal branched
        log, policy = Log(), Policy(babble)
        played = await play(agent("wanders"), policy, seed)
        assert isinstance(played, Trajectory), played
        branched += len(played.branches) > 1
        assert log.branched or len(played.branches) == 1
        assert len(policy.said) == len(log.told) == len(played.turns), "a retry is no call of its own"
        assert sorted(log.told) == sorted(tokenizer.decode(said.token_ids) for said in policy.said)
        tokens = played.tokens().tolist()
        sampled = [(asked.prompt, said.token_ids) for asked, said in zip(policy.asked, policy.said, strict=True)]
        for span, turn in zip(spans_by_turn(played), played.turns, strict=True):
            prompt = tokens[played.branches[turn.branch] : span.start]
            sampled.remove((prompt, tokens[span.start : span.stop]))
        assert played.action_count == sum(len(said.token_ids) for said in policy.said)

    async def all_of_them() -> None:
        for seed in range(100):
            await main(seed)

    run_virtual(all_of_them)
    assert 20 < branched < 80


# -- other ways to ask -----------------------------------------------------------------------------------------------


async def writes_a_text(base_url: str, api_key: str, task: str) -> str:
    """Goes on with one text; asks once more as the network may, and wants the log-probs."""
    text = f"task {task}:"
    async with NODE.client(base_url, api_key) as client:
        for turn in range(3):
            for retries in range(1 + turn % 2):
                body, headers = {"model": "policy", "prompt": text, "logprobs": 0}, {RETRIES: str(retries)}
                reply = await client.post("completions", json=body, headers=headers)
                assert reply.status_code == 200, reply.text
            (choice,) = reply.json()["choices"]
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert set(choice["logprobs"]["token_logprobs"]) == {-0.5}
            text += choice["text"] + f"\n{turn}:"
    return text


def test_a_text_that_grows_is_one_sequence_of_tokens() -> None:
    played = trajectory("writes_a_text", Policy(lambda _: [*b" fine", 256]))
    assert played.tokens().tolist() == [*b"task 5: fine", 256, *b"\n0: fine", 256, *b"\n1: fine", 256]
    assert [turn.observation for turn in played.turns] == ["task 5:", "\n0:", "\n1:"]
    assert played.action_count == 18


async def stops(base_url: str, api_key: str, task: str) -> str:
    """As agents do that write the results of their tools into one text."""
    messages: Messages = [user("begin")]
    async with NODE.client(base_url, api_key) as client:
        for stop in ("\nResult:", ["never", "\nResult:"], None):
            reply = choice_of(await ask(client, messages, stop=stop, stream=isinstance(stop, list)))
            assert reply["finish_reason"] == "stop"
            messages += [reply["message"], user("Result: 4")]
    return "|".join(message["content"] for message in messages if message["role"] == "assistant")


def test_an_answer_ends_at_a_text_that_the_agent_names_and_is_ended_by_what_follows() -> None:
    played = trajectory("stops", Policy(lambda _: [*b"look\nResult: 5", 256]), max_turns=4)
    assert (played.outcome, played.turns[-1].note) == (Outcome.OK, "look|look|look\nResult: 5")
    asked, stopped = BYTES.render([Message("user", "begin")]), [*b"look\nResult:"]
    result = BYTES.render([Message("user", "Result: 4")])
    ended = [*stopped, 256, *result]
    assert played.tokens().tolist() == [*asked, *ended, *ended, *b"look\nResult: 5", 256]
    assert played.tokens()[played.action_mask()].tolist() == [*stopped, *stopped, *b"look\nResult: 5", 256]


async def mixes(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    async with NODE.client(base_url, api_key) as client:
        for text in ("a text", "a text fine, and more"):
            (await client.post("completions", json={"model": "policy", "prompt": text})).raise_for_status()
    await asks_once(base_url, api_key, task + "6")
    return "both"


def test_a_text_after_a_chat_is_a_branch() -> None:
    played = trajectory("mixes", Policy(lambda _: [*b" fine", 256]))
    assert [(turn.observation, turn.branch) for turn in played.turns] == [
        ("user: what of 5?", 0),
        ("a text", 1),
        (", and more", 1),
        ("user: what of 56?", 2),
    ]
    assert split_branches(played)[1].tokens().tolist() == [*b"a text fine", 256, *b", and more fine", 256]


async def rewards_itself(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    async with NODE.client(base_url, api_key) as client:
        for body in (b'{"reward": "1"}', b"{}", b'{"reward": 1e999}'):
            assert (await client.post("episode/reward", content=body)).status_code == 400
        given.append((await client.post("episode/reward", json={"reward": -0.25})).json())
        with anyio.CancelScope(shield=True):  # its end comes meanwhile
            given.append((await ask(client, [user("and now?")])).status_code)
        await anyio.sleep_forever()
    return "never"


given: list[Any] = []


def test_an_agent_may_end_its_episode_with_a_reward_of_its_own_where_the_run_allows_it() -> None:
    env = make(f"{__name__}:rewards_itself", own_reward=True)
    played = run_virtual(lambda: play(env, says("fine")))
    assert isinstance(played, Trajectory), played
    assert (played.outcome, played.reward, played.turns[-1].note) == (Outcome.OK, -0.25, "")
    assert given == [{"object": "episode.reward", "reward": -0.25}, 401]


async def rewards_before_it_asks(base_url: str, api_key: str, task: str) -> str:
    async with NODE.client(base_url, api_key) as client:
        await client.post("episode/reward", json={"reward": 1.0})
    await anyio.sleep_forever()
    return ""


def test_an_agent_that_rewards_itself_before_it_asks_is_told_so() -> None:
    env = make(f"{__name__}:rewards_before_it_asks", own_reward=True)
    played = run_virtual(lambda: play(env, says("fine")))
    assert not isinstance(played, Trajectory)
    assert "ended its episode with a reward before it had asked anything" in str(played)


async def may_not(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    async with NODE.client(base_url, api_key) as client:
        refused = await client.post("episode/reward", json={"reward": 1e9})
    return refused.json()["error"]["message"]


def test_an_agent_may_not_reward_itself_unless_the_run_says_so() -> None:
    assert "own_reward" in trajectory("may_not").turns[-1].note


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


class HalfMade:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise AttributeError("half made")


async def returns_what_cannot_be_shown(base_url: str, api_key: str, task: str) -> Any:
    await asks_once(base_url, api_key, task)
    return HalfMade()


async def closes_itself(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    raise GeneratorExit


async def complains_at_length(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    raise ValueError("x" * 1_000_000)


async def swallows_cancellations(base_url: str, api_key: str, task: str) -> str:
    await asks_once(base_url, api_key, task)
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1)


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
        ("returns_a_number", Outcome.ENV_ERROR, "must return its answer as text, but returned a value of int", 5),
        ("returns_what_cannot_be_shown", Outcome.ENV_ERROR, "but returned a value of HalfMade", 5),
        ("closes_itself", Outcome.ENV_ERROR, "it raised GeneratorExit", 5),
        ("complains_at_length", Outcome.ENV_ERROR, "it raised ValueError: xxx", 5),
        ("swallows_cancellations", Outcome.ENV_TIMEOUT, "environment step 1 (seed 5) took longer than 20 s", 5),
    ],
)
def test_an_agent_that_fails_is_a_typed_failure_and_never_a_reward_of_0(
    name: str, outcome: Outcome, message: str, tokens: int
) -> None:
    closed = Numbers.closed
    failed = failure(name)
    assert (failed.outcome, failed.tokens) == (outcome, tokens)
    assert message in failed.message
    assert len(failed.message) < 4000
    assert Numbers.closed == closed + 1


def test_two_conversations_at_once_are_branches() -> None:
    played = trajectory("forks")
    assert [(turn.observation, turn.branch) for turn in played.turns] == [("user: this", 0), ("user: and that", 1)]
    assert (played.outcome, played.reward) == (Outcome.OK, len("both"))


async def compacts(base_url: str, api_key: str, task: str) -> str:
    """Converses, has all of it summed up, goes on from that, and asks another in between, who has its own orders."""
    messages: Messages = [user("one")]
    async with NODE.client(base_url, api_key) as client:
        for content in ("two", "sum up"):
            messages += [(await ask(client, messages)).json()["choices"][0]["message"], user(content)]
        summary = (await ask(client, messages)).json()["choices"][0]["message"]["content"]
        messages = [user(f"so far: {summary}")]
        messages.append((await ask(client, messages)).json()["choices"][0]["message"])
        await ask(client, [{"role": "system", "content": "you only help"}, user("help")])
        await ask(client, [*messages, user("three")])
    return "done"


def test_an_agent_that_compacts_its_history_and_asks_for_help_is_trained_in_all_it_said() -> None:
    played = trajectory("compacts")
    assert [turn.branch for turn in played.turns] == [0, 0, 0, 1, 2, 1]
    assert [turn.observation for turn in played.turns[3:]] == [
        "user: so far: fine",
        "system: you only help\nuser: help",
        "user: three",
    ]
    assert played.action_count == 6 * 5
    assert branch_tokens(played) == [15, 10, 5]


async def asks_for_the_best(base_url: str, api_key: str, task: str) -> str:
    """As OpenAI's clients ask: they say that it is no retry."""
    async with NODE.client(base_url, api_key) as client:
        start = [user("a poem"), (await ask(client, [user("a poem")])).json()["choices"][0]["message"]]
        for _ in range(3):
            await ask(client, [*start, user("a better one")], headers={RETRIES: "0"})
        again = await ask(client, [*start, user("a better one")], headers={RETRIES: "1"})
        assert again.status_code == 200
    return "done"


def test_several_answers_to_the_same_question_share_what_was_said_before_it_as_their_prompt() -> None:
    played = trajectory("asks_for_the_best")
    assert [turn.branch for turn in played.turns] == [0, 0, 1, 2]
    one, two, three = (each.tokens().tolist() for each in split_branches(played))
    assert one == two == three
    assert branch_tokens(played) == [10, 5, 5], "what they share is trained once"


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


def test_what_a_user_says_alone_is_a_task() -> None:
    tasks = {"path": "envs.arithmetic:Arithmetic", "options": {"template": "chat"}}
    env = Agent(AgentOptions(function=f"{__name__}:asks_once", tasks=tasks))
    played = run_virtual(lambda: play(env, says("0")))
    assert isinstance(played, Trajectory), played
    assert re.fullmatch(
        r"user: what of What is \d\d \+ \d\d\? Reply with only the number\.\?", played.turns[0].observation
    )


class Remaining(Numbers):
    """Tasks that are worth the number of answers that are left."""

    def inform(self, episode: EpisodeView) -> None:
        self.episode = episode

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(self.episode.turns_left), True, False, {}


REMAINING = {"path": f"{__name__}:Remaining"}


@pytest.mark.parametrize(
    "tasks", [REMAINING, {"path": "envs.mixture:Mixture", "options": {"kinds": {"one": REMAINING}}}]
)
def test_tasks_that_read_the_episode_are_given_it(tasks: dict[str, Any]) -> None:
    options = AgentOptions(function=f"{__name__}:asks_once", tasks=tasks)
    Agent.check(options)
    played = run_virtual(lambda: play(Agent(options), says("fine"), max_turns=3))
    assert isinstance(played, Trajectory), played
    assert played.reward == 2


async def needs_whole_answers(base_url: str, api_key: str, task: str) -> str:
    """As the agents of openai-agents do over the responses."""
    async with NODE.client(base_url, api_key) as client:
        reply = (await ask(client, [user("count to a hundred")])).json()
        if reply["choices"][0]["finish_reason"] == "length":
            raise ValueError("incomplete response")
        raise KeyError("a fault of its own")


def test_an_agent_that_fails_for_an_answer_that_was_cut_off_is_truncated_and_not_tried_again() -> None:
    cut = trajectory("needs_whole_answers", max_new_tokens=2)
    assert (cut.outcome, cut.reward) == (Outcome.TRUNCATED, 0.0)
    failure("needs_whole_answers")


async def begins_anew(base_url: str, api_key: str, task: str) -> str:
    async with NODE.client(base_url, api_key) as client:
        for number in range(100):
            (await ask(client, [user(f"question {number}")])).raise_for_status()
    return "never"


def test_the_limit_of_responses_is_one_of_branches_too() -> None:
    played = trajectory("begins_anew", max_turns=3)
    assert (played.outcome, played.reward, len(played.branches)) == (Outcome.TRUNCATED, 0.0, 3)


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
        for wrong in ({"n": 0}, {"stop": [""]}, {"model": "gpt-4o"}, {"max_tokens": 0}):
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


@pytest.mark.parametrize(
    "inner",
    [
        {"path": "envs.agent:Agent", "options": {"command": ["a"], "tasks": TASKS}},
        {
            "path": "envs.tools:ToolEnv",
            "options": {"tools": {"x": {"path": "envs.tools.sandboxed:Bash"}}, "tasks": TASKS},
        },
    ],
)
def test_tasks_that_steer_the_policy_are_refused_also_in_a_mixture(inner: dict[str, Any]) -> None:
    mixture = {"path": "envs.mixture:Mixture", "options": {"kinds": {"one": {"path": TASKS["path"]}, "two": inner}}}
    for tasks in (inner, mixture):
        with pytest.raises(ConfigError, match=r"`tasks`: .*name the environment of .* own `tasks` instead"):
            Agent.check(AgentOptions(command=["a"], tasks=tasks))


def test_an_agent_may_be_one_environment_of_a_mixture() -> None:
    inner = {"path": "envs.agent:Agent", "options": {"function": f"{__name__}:asks_once", "tasks": TASKS}}
    mixture = Mixture(MixtureOptions(kinds={"agent": inner}))
    played = run_virtual(lambda: play(mixture, says("fine")))
    assert isinstance(played, Trajectory), played
    assert played.reward == len("fine")
