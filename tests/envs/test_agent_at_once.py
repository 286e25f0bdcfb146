"""What an agent asks at once is sampled at once, and booked in the order in which it was asked."""

from __future__ import annotations

from typing import Any

import anyio

from envs.agent import ENDPOINT
from flash.branches import spans_by_turn
from flash.environment import shared, sharing
from flash.errors import EngineError
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.episode import KEYS_PER_TASK, EpisodePlayer, EpisodeProgress
from flash.rollout.episode.phases import LockStep, Phases
from flash.simulate.clock import run_virtual
from flash.types import Failure, Lease, Outcome, Task, Trajectory
from tests.envs.agents import BYTES, END, NODE, SETTINGS, Policy, ask, choice_of, make, play

QUESTION = [{"role": "user", "content": "5?"}]
told: list[str] = []


def echo(request: ResponseRequest) -> list[int]:
    """The last thing that was asked, and which response this is."""
    asked = BYTES.decode(request.prompt).rpartition("?")[0][-1]
    return [*f"{asked}, {request.key // 2 % KEYS_PER_TASK}".encode(), END]


async def asks_at_once(base_url: str, api_key: str, task: str) -> str:
    """One thing, three at once, and one more that goes on from the last of them."""
    told.clear()
    async with NODE.client(base_url, api_key) as client:

        async def one(*messages: Any, stream: bool = False) -> dict[str, Any]:
            choice = choice_of(await ask(client, list(messages), stream=stream))
            told.append(choice["message"]["content"])
            return choice["message"]

        said = await one(*QUESTION)
        async with anyio.create_task_group() as calls:
            for letter in "abc":
                calls.start_soon(one, *QUESTION, said, {"role": "user", "content": f"{letter}?"})
        await one(
            *QUESTION, said, {"role": "user", "content": "c?"}, {"role": "assistant", "content": told[-1]}, *QUESTION
        )
    return "|".join(told)


def played_by(name: str, policy: Policy, **changes: Any) -> Trajectory:
    played = run_virtual(lambda: play(make(f"{__name__}:{name}"), policy, **changes))
    assert isinstance(played, Trajectory), played
    return played


def test_calls_at_once_are_sampled_at_once_and_booked_one_after_the_other() -> None:
    policy = Policy(echo)
    played = played_by("asks_at_once", policy)
    first, *three, last = played.turns
    assert {turn.start for turn in three} == {first.start + 1}, "each takes a second"
    assert last.start == first.start + 2
    assert [turn.branch for turn in played.turns] == [0, 0, 1, 2, 2]
    assert [turn.action[0] for turn in three] == ["a", "b", "c"], "in the order in which they were asked"
    assert len(policy.said) == 5
    assert played.lost_tokens == 0
    tokens, asked = played.tokens().tolist(), {tuple(one.prompt) for one in policy.asked}
    for span, turn in zip(spans_by_turn(played), played.turns, strict=True):
        assert tuple(tokens[played.branches[turn.branch] : span.start]) in asked


async def wants_choices(base_url: str, api_key: str, task: str) -> str:
    """Three answers to one question, asked for twice with one key, and one to what it goes on with."""
    told.clear()
    async with NODE.client(base_url, api_key) as client:
        headers = {"idempotency-key": "one"}
        reply = (await ask(client, QUESTION, n=3, headers=headers)).raise_for_status().json()
        assert reply["usage"]["completion_tokens"] == 3 * len("5, 0.")
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        told.extend(choice["message"]["content"] for choice in reply["choices"])
        again = (await ask(client, QUESTION, n=3, stream=True, headers=headers)).text
        assert all(f'"content":"{text}"' in again for text in told), "the same three"
        (await ask(client, [*QUESTION, {"role": "assistant", "content": told[1]}, *QUESTION])).raise_for_status()
    return "|".join(told)


def test_several_answers_to_one_request_are_sampled_at_once_each_in_a_branch() -> None:
    played = played_by("wants_choices", Policy(echo))
    assert len({turn.start for turn in played.turns[:3]}) == 1
    assert [turn.branch for turn in played.turns] == [0, 1, 2, 1]
    assert len(set(told)) == 3


async def asks_the_same(base_url: str, api_key: str, task: str) -> str:
    """Self-consistency: one question four times at once, then once more."""
    told.clear()
    async with NODE.client(base_url, api_key) as client:

        async def one() -> None:
            told.append(choice_of(await ask(client, QUESTION))["message"]["content"])

        async with anyio.create_task_group() as calls:
            for _ in range(4):
                calls.start_soon(one)
        await one()
    return "|".join(told)


def test_equal_requests_without_a_key_have_answers_of_their_own() -> None:
    played = played_by("asks_the_same", Policy(echo))
    assert len(set(told)) == len(told) == len(played.turns) == 5
    assert len({turn.start for turn in played.turns[:4]}) == 1


async def leaves_at_once(base_url: str, api_key: str, task: str) -> str:
    """Is content with the first of its answers."""
    async with NODE.client(base_url, api_key) as client, anyio.create_task_group() as calls:
        calls.start_soon(ask, client, [{"role": "user", "content": "slow?"}])
        await anyio.sleep(0.25)
        with anyio.move_on_after(0.25):
            await ask(client, QUESTION)
        calls.cancel_scope.cancel()
    return "enough"


class Pausing(Policy):
    async def pause(self) -> None:
        await anyio.sleep(1.0)


def test_what_was_sampled_for_an_agent_that_left_is_lost_and_booked() -> None:
    policy = Pausing(lambda request: [*(b"ab" if 0x73 in request.prompt else b"abcdef"), END], seconds=0.0)
    played = played_by("leaves_at_once", policy)
    assert (played.outcome, played.action_count) == (Outcome.OK, 3)
    assert played.lost_tokens == 2
    assert len(policy.said) == 1


def test_where_episodes_go_in_step_nothing_is_sampled_ahead() -> None:
    env, policy = make(f"{__name__}:asks_at_once"), Policy(echo)

    async def main() -> Trajectory | Failure:
        async with sharing("test"):
            await shared(ENDPOINT, NODE.open)
            player = EpisodePlayer(
                lambda kind: env, BYTES, policy, SETTINGS, Phases(LockStep()), now=anyio.current_time
            )
            return await player.play(Lease(1, Task(5, 5, 0, 5), 0), EpisodeProgress())

    played = run_virtual(main)
    assert isinstance(played, Trajectory), played
    starts = [turn.start for turn in played.turns]
    assert [start - starts[0] for start in starts] == [0, 1, 2, 3, 4]


def test_the_limit_of_responses_holds_for_what_is_asked_at_once() -> None:
    policy = Policy(echo)
    played = run_virtual(lambda: play(make(f"{__name__}:is_refused"), policy, max_turns=3))
    assert isinstance(played, Trajectory), played
    assert len(played.turns) == len(policy.said) == 3, "nothing is sampled that the limits refuse"


async def is_refused(base_url: str, api_key: str, task: str) -> str:
    """Asks once, and then four things at once."""
    async with NODE.client(base_url, api_key) as client:
        said = choice_of(await ask(client, QUESTION))["message"]
        async with anyio.create_task_group() as calls:
            for letter in "abcd":
                calls.start_soon(ask, client, [*QUESTION, said, {"role": "user", "content": f"{letter}?"}])
    return "done"


def test_an_engine_that_fails_what_was_asked_ahead_fails_the_episode() -> None:
    def fails(request: ResponseRequest) -> list[int]:
        if "b?" in BYTES.decode(request.prompt):
            raise EngineError("no luck")
        return echo(request)

    played = run_virtual(lambda: play(make(f"{__name__}:asks_at_once"), Policy(fails), max_new_tokens=24))
    assert isinstance(played, Failure)
    assert (played.outcome, played.message) == (Outcome.ENGINE_ERROR, "no luck")
