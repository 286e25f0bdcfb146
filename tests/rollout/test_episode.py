"""Episodes of many turns on the virtual clock, around a scripted proxy and environment.

A token is a character. Each method of an `Env` takes 2 s, and each token of a `Script` takes 0.5 s. A response ends
with the token `EOS` unless it was cut.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import anyio
import msgspec
import numpy as np
import pytest

from flash.environment import EpisodeView, Said, wrap
from flash.environment.interface import Expected, Spoken
from flash.errors import EngineError, EnvError, RewardError
from flash.rollout.engine import ResponseRequest
from flash.rollout.engine_state import OutageClock
from flash.rollout.episode.episode import (
    EpisodePlayer,
    EpisodeProgress,
    EpisodeSettings,
    Responder,
    response_key,
    response_seed,
)
from flash.rollout.episode.phases import LockStep, Phases
from flash.rollout.episode.tokenizer import ResponseReader, Tokenizer
from flash.rollout.episode.transcript import LARGE_LETTERS
from flash.sampling import Kept, Sampling
from flash.simulate.clock import VirtualLoop, run_virtual
from flash.types import Completion, Failure, Lease, Message, Outcome, Piece, Span, Task, Tool, Trajectory, VersionRun

EOS = 0
"""Token with which the model ends a response."""
SETTINGS = EpisodeSettings(
    seed=7,
    max_new_tokens=8,
    max_length=200,
    max_turns=10,
    step_s=20,
    close_s=30,
    generate_s=40,
    episode_s=1000,
)
LEASE = Lease(1, Task(42, 7, 0, seed=5, kind="game"), min_version=3)


class CharTokenizer(Tokenizer):
    """A tokenizer of characters. A later observation begins with `|` if the model ended its response, else with `/`."""

    def render(self, observation: Any, tools: Sequence[Tool] = ()) -> list[int]:
        return [ord(c) for c in text_of(observation)]

    def follow(self, observation: Any, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        return [ord(c) for c in ("/" if end is None else "|") + text_of(observation)]

    def ends_turn(self, token: int) -> bool:
        return token == EOS

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t) for t in token_ids if t != EOS)


def text_of(observation: Any) -> str:
    """Return the text of an observation: the text itself, or the joined contents of its messages."""
    return observation if isinstance(observation, str) else "".join(m.content for m in observation)


class Script:
    """A proxy that gives one completion after another. Each token takes half a second and is reported when it comes."""

    def __init__(self, *completions: Completion | Exception) -> None:
        self._completions = list(completions)
        self.calls: list[ResponseRequest] = []
        self.seconds = 0.5

    async def generate(self, request: ResponseRequest) -> Completion:
        """Return the next completion, or raise the next error after two tokens."""
        self.calls.append(request)
        completion = self._completions.pop(0)
        for _ in range(2 if isinstance(completion, Exception) else len(completion.token_ids)):
            await anyio.sleep(self.seconds)
            request.on_tokens([0])
        if isinstance(completion, Exception):
            raise completion
        return completion


def say(text: str, *versions: tuple[int, int], stop: bool = True) -> Completion:
    """Return a response with a different log-prob for each token, all of version 3 unless `versions` are given."""
    tokens = [ord(c) for c in text] + ([EOS] if stop else [])
    runs = [VersionRun(*run) for run in versions] or [VersionRun(3, len(tokens))]
    return Completion(tokens, [-token / 1000 for token in tokens], runs, "stop" if stop else "length")


class Env:
    """An environment that returns one result after another; it sleeps in each method and counts calls."""

    def __init__(self, *results: Any, first: Any = "start", seconds: float = 2.0) -> None:
        self._results = list(results)
        self._first, self._seconds = first, seconds
        self.actions: list[str] = []
        self.closed = 0

    async def reset(self, seed: int) -> Any:
        """Return the first observation."""
        await anyio.sleep(self._seconds)
        return self._first, {}

    async def step(self, action: str) -> Any:
        """Return the next result, or raise it if it is an error."""
        self.actions.append(action)
        await anyio.sleep(self._seconds)
        result = self._results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    async def close(self) -> None:
        """Count the call."""
        self.closed += 1
        await anyio.sleep(self._seconds)


def go(shown: Any, reward: float = 0.0) -> Any:
    """Return the result of a step after which the episode goes on with the observation `shown`."""
    return shown, reward, False, False, {}


def end(reward: float, *, truncated: bool = False) -> Any:
    """Return the result of the last step of an episode, which the environment ends or, if `truncated`, cuts."""
    return "over", reward, not truncated, truncated, {}


def episode(env: Any, proxy: Responder, phases: Phases | None = None, **changes: Any) -> EpisodePlayer:
    """Return a player of episodes in `env`. `changes` replace fields of `SETTINGS`."""
    settings = msgspec.structs.replace(SETTINGS, **changes)
    return EpisodePlayer(lambda kind: env, CharTokenizer(), proxy, settings, phases or Phases(), now=now)


def now() -> float:
    """Return the time in Unix seconds, far from 0, on the virtual clock."""
    return 1e6 + anyio.current_time()


def run(env: Any, proxy: Responder, lease: Lease = LEASE, **changes: Any) -> Trajectory | Failure:
    """Play one episode on the virtual clock, and return its result. `changes` replace fields of `SETTINGS`."""

    async def go() -> Trajectory | Failure:
        return await episode(env, proxy, **changes).play(lease, EpisodeProgress())

    return run_virtual(go)


def succeed(env: Any, proxy: Responder, **changes: Any) -> Trajectory:
    """Play one episode, and return its trajectory. A failure fails the test."""
    result = run(env, proxy, **changes)
    assert isinstance(result, Trajectory)
    return result


def fail(env: Any, proxy: Responder, **changes: Any) -> Failure:
    """Play one episode, and return its failure. Checks that the environment was closed once."""
    result = run(env, proxy, **changes)
    assert isinstance(result, Failure)
    assert env.closed == 1
    return result


FIVE = ["a", "bb", "ccc", "dd", "e"]
"""Texts of five responses: 9 characters, and with the ends 14 tokens."""


def five_turns() -> tuple[Env, Script]:
    """Return an environment of five turns, and a proxy with a response for each."""
    env = Env(*(go(f"after {i}", i / 10) for i in range(4)), end(1.0))
    return env, Script(*(say(text) for text in FIVE))


def test_law_4_tokens_are_only_appended_over_five_turns() -> None:
    env, proxy = five_turns()
    trajectory = succeed(env, proxy)
    tokens = trajectory.tokens().tolist()
    said = "start" + "".join(f"{text}\0|after {i}" for i, text in enumerate(FIVE[:-1])) + "e\0"
    assert tokens == [ord(c) for c in said]
    for request, span in zip(proxy.calls, trajectory.action_spans, strict=True):
        assert request.prompt == tokens[: span.start]
    assert env.actions == FIVE


def test_what_the_environment_measures_stays_with_its_turn_and_the_last_word_counts() -> None:
    first, second = {"metrics": {"moves": 1, "lost": 2.0}}, {"metrics": {"moves": 2}, "note": "won"}
    env = Env(("on", 0.0, False, False, first), ("over", 1.0, True, False, second))
    trajectory = succeed(env, Script(say("a"), say("b")))
    assert [turn.metrics for turn in trajectory.turns] == [{"moves": 1.0, "lost": 2.0}, {"moves": 2.0}]
    assert [turn.note for turn in trajectory.turns] == ["", "won"]
    assert trajectory.env_metrics() == {"moves": 2.0, "lost": 2.0}


def test_metrics_that_are_no_numbers_end_the_episode_with_an_error() -> None:
    failure = fail(Env(("over", 1.0, True, False, {"metrics": {"moves": "two"}})), Script(say("a")))
    assert failure.outcome is Outcome.ENV_ERROR
    assert "holds 'moves': 'two'" in failure.message


def test_each_action_token_keeps_its_span_its_log_prob_and_its_place_in_the_mask() -> None:
    trajectory = succeed(*five_turns())
    tokens, mask = trajectory.tokens(), trajectory.action_mask()
    assert [tokens[s.start : s.stop].tolist() for s in trajectory.action_spans] == [say(t).token_ids for t in FIVE]
    assert trajectory.behaviour().tolist() == pytest.approx((-tokens[mask] / 1000).tolist())
    assert trajectory.action_count == mask.sum() == 14
    assert not mask[: trajectory.action_spans[0].start].any()


def test_each_turn_keeps_its_texts_its_reward_and_its_times() -> None:
    trajectory = succeed(*five_turns())
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.1, 0.2, 0.3, 1.0]
    assert trajectory.reward == pytest.approx(1.6)
    assert [turn.action for turn in trajectory.turns] == FIVE
    assert [turn.observation for turn in trajectory.turns] == ["start", *(f"after {i}" for i in range(4))]
    # The reset takes 2 s. A turn takes the time of its response and 2 s for the step.
    assert [turn.start - 1e6 for turn in trajectory.turns[:3]] == [2.0, 5.0, 8.5]
    assert [turn.generate_s for turn in trajectory.turns[:3]] == [1.0, 1.5, 2.0]
    assert {turn.env_s for turn in trajectory.turns} == {2.0}


def test_versions_run_on_over_turns() -> None:
    env = Env(go("x"), go("x"), end(1.0))
    proxy = Script(say("ab", (3, 1), (4, 2)), say("cd", (4, 3)), say("ef", (4, 1), (6, 2)))
    trajectory = succeed(env, proxy)
    assert trajectory.versions == [VersionRun(3, 1), VersionRun(4, 6), VersionRun(6, 2)]
    assert trajectory.oldest_version == 3
    assert len(trajectory.action_versions()) == trajectory.action_count


def test_a_request_carries_the_lease_and_a_key_of_its_turn() -> None:
    env, proxy = Env(go("x"), end(1.0)), Script(say("a"), say("b"))
    retried = msgspec.structs.replace(LEASE, task=msgspec.structs.replace(LEASE.task, attempt=2))
    run(env, proxy, lease=retried)
    told = [(call.min_version, call.group_id, call.task_id, call.timeout_s) for call in proxy.calls]
    assert told == [(3, 7, 42, 40)] * 2
    assert [call.key for call in proxy.calls] == [response_key(LEASE.task, 0), response_key(LEASE.task, 1)]


def test_keys_differ_between_tasks_turns_and_splits() -> None:
    tasks = [Task(i, 0, 0, seed=0, split=split) for i in range(5) for split in ("train", "eval")]
    keys = [response_key(task, turn) for task in tasks for turn in range(5)]
    assert len(set(keys)) == len(keys)


def test_seeds_differ_between_runs_problems_samples_turns_splits_and_attempts() -> None:
    tasks = [
        Task(0, 0, sample, seed=problem, split=split, attempt=attempt)
        for problem in range(5)
        for sample in range(2)
        for split in ("train", "eval")
        for attempt in range(3)
    ]
    seeds = [response_seed(run, task, turn) for run in range(3) for task in tasks for turn in range(5)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert response_seed(0, Task(7, 3, 1, seed=2), 0) == response_seed(0, Task(9, 4, 1, seed=2), 0), "not the number"


def test_a_response_is_asked_for_with_its_seed_where_the_run_has_one() -> None:
    proxy = Script(say("a"), say("b"))
    run(Env(go("more"), end(1.0)), proxy)
    assert [call.seed for call in proxy.calls] == [response_seed(7, LEASE.task, turn) for turn in (0, 1)]
    bare = Script(say("a"))
    run(Env(end(1.0)), bare, seed=None)
    assert bare.calls[0].seed is None


def test_each_response_is_sampled_as_its_task_says_and_the_trajectory_tells_it() -> None:
    env, proxy = Env(go("x"), end(1.0)), Script(say("a"), say("b"))
    task = msgspec.structs.replace(LEASE.task, sampling=Sampling(0.3))
    trajectory = run(env, proxy, lease=msgspec.structs.replace(LEASE, task=task))
    assert [call.sampling for call in proxy.calls] == [Sampling(0.3)] * 2
    assert isinstance(trajectory, Trajectory)
    assert trajectory.task.sampling == Sampling(0.3)


def test_a_trajectory_has_the_kept_sets_of_all_its_responses() -> None:
    said = [
        msgspec.structs.replace(one, kept=Kept.of(range(count), [count] + [0] * (len(one.token_ids) - 1)))
        for one, count in ((say("ab"), 3), (say("cde"), 2))
    ]
    trajectory = run(Env(go("x"), end(1.0)), Script(*said))
    assert isinstance(trajectory, Trajectory)
    assert trajectory.kept == Kept.of([0, 1, 2, 0, 1], [3, 0, 0, 2, 0, 0, 0])


def test_the_environment_is_made_for_the_kind_of_the_task() -> None:
    kinds: list[str] = []

    def make(kind: str) -> Any:
        """Make an environment, and note the kind."""
        kinds.append(kind)
        return Env(end(1.0))

    async def main() -> None:
        made = EpisodePlayer(make, CharTokenizer(), Script(say("a")), SETTINGS, Phases(), now=now)
        await made.play(LEASE, EpisodeProgress())

    run_virtual(main)
    assert kinds == ["game"]


# -- how an episode ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "stop", "outcome"),
    [
        (end(1.0), True, Outcome.OK),
        (end(1.0), False, Outcome.TRUNCATED),
        (end(1.0, truncated=True), True, Outcome.TRUNCATED),
    ],
    ids=["ended", "cut off", "truncated"],
)
def test_the_last_response_and_the_environment_decide_the_outcome(last: Any, stop: bool, outcome: Outcome) -> None:
    trajectory = succeed(Env(go("x", 0.5), last), Script(say("a", stop=False), say("b", stop=stop)))
    assert trajectory.outcome == outcome
    assert trajectory.reward == 1.5


def test_what_follows_a_response_that_was_cut_off_is_told_so() -> None:
    trajectory = succeed(Env(go("x"), go("y"), end(1.0)), Script(say("a", stop=False), say("b"), say("c")))
    assert bytes(trajectory.tokens().tolist()) == b"starta/xb\0|yc\0"


def test_a_domain_has_limits_of_its_own() -> None:
    own = msgspec.structs.replace(SETTINGS, max_turns=1, max_new_tokens=3)
    script = Script(say("a"))
    trajectory = succeed(Env(go("x", 0.5)), script, domains={"game": own})
    assert (len(trajectory.turns), trajectory.outcome) == (1, Outcome.TRUNCATED)
    assert script.calls[0].max_new_tokens == 3
    assert len(succeed(Env(go("x"), end(1.0)), Script(say("a"), say("b")), domains={"other": own}).turns) == 2


def test_after_max_turns_the_episode_is_truncated_with_the_rewards_so_far() -> None:
    env = Env(go("x", 0.25), go("y", 0.5), go("never shown", 9.0))
    trajectory = succeed(env, Script(say("a"), say("b")), max_turns=2)
    assert trajectory.outcome == Outcome.TRUNCATED
    assert trajectory.reward == 0.75
    assert bytes(trajectory.tokens().tolist()) == b"starta\0|xb\0"


# The first turn has 7 tokens (`start`, `a` and its end), and the observation after it 11, with its mark.
@pytest.mark.parametrize(("max_length", "turns"), [(18, 1), (19, 2)])
def test_an_observation_that_leaves_no_room_for_a_response_truncates_the_episode(max_length: int, turns: int) -> None:
    env = Env(go("ten chars.", 0.25), end(1.0))
    trajectory = succeed(env, Script(say("a"), say("b", stop=False)), max_length=max_length)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.TRUNCATED, turns)
    assert trajectory.action_spans[-1].stop == trajectory.length <= max_length


def test_a_response_gets_no_more_tokens_than_there_is_room_for() -> None:
    proxy = Script(say("a"), say("b"))
    run(Env(go("x"), end(1.0)), proxy, max_length=12)
    # The prompts have 5 and 9 of the 12 tokens.
    assert [call.max_new_tokens for call in proxy.calls] == [7, 3]


def test_the_last_observation_is_not_rendered() -> None:
    result = ([Message("odd", "one")], 1.0, True, False, {})
    assert succeed(Env(result), Script(say("a"))).action_spans == [Span(5, 7)]


def test_chat_messages_follow_chat_messages() -> None:
    env = Env(go([{"role": "user", "content": "more"}]), end(1.0), first=[{"role": "user", "content": "hi"}])
    trajectory = succeed(env, Script(say("a"), say("b")))
    assert bytes(trajectory.tokens().tolist()) == b"hia\0|moreb\0"
    assert [turn.observation for turn in trajectory.turns] == ["user: hi", "user: more"]


@pytest.mark.parametrize(("said", "mark"), [(say("a"), b"\0|"), (say("a", stop=False), b"/")])
def test_a_token_that_a_run_names_as_an_end_ends_the_turn_where_it_is_the_models_own(
    said: Completion, mark: bytes
) -> None:
    env = Env(go([{"role": "user", "content": "more"}]), end(1.0), first=[{"role": "user", "content": "hi"}])
    trajectory = succeed(env, Script(msgspec.structs.replace(said, finish="text"), say("b")))
    assert bytes(trajectory.tokens().tolist()) == b"hia" + mark + b"moreb\0"


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (
            OSError("disk on fire"),
            Outcome.ENV_ERROR,
            r"environment step 3 \(seed 5\) raised OSError: disk on fire .*py:",
        ),
        (EnvError("no such move"), Outcome.ENV_ERROR, "no such move"),
        (RewardError("no judge"), Outcome.REWARD_ERROR, "no judge"),
        (asyncio.CancelledError(), Outcome.ENV_ERROR, r"environment step 3 \(seed 5\) was cancelled from within .*py:"),
        (TimeoutError("inner"), Outcome.ENV_ERROR, "raised TimeoutError: inner"),
        (("x", float("nan"), False, False, {}), Outcome.REWARD_ERROR, "finite number"),
        (("x", 1.0, False), Outcome.ENV_ERROR, "step"),
        (go([]), Outcome.ENV_ERROR, "either text or chat messages"),
    ],
)
def test_an_error_in_turn_three_is_typed_and_reports_the_tokens_of_three_turns(
    error: Any, outcome: Outcome, text: str
) -> None:
    env = Env(go("x"), go("y"), error)
    failure = fail(env, Script(say("aaa"), say("bb"), say("c")))
    assert (failure.outcome, failure.tokens) == (outcome, 4 + 3 + 2)
    assert re.search(text, failure.message)


def test_an_engine_error_in_turn_two_reports_the_tokens_of_the_broken_response_too() -> None:
    env = Env(go("x"))
    failure = fail(env, Script(say("aaa"), EngineError("out of memory")))
    assert (failure.outcome, failure.message, failure.tokens) == (Outcome.ENGINE_ERROR, "out of memory", 4 + 2)


def test_a_response_without_a_token_is_an_engine_error() -> None:
    failure = fail(Env(end(1.0)), Script(Completion([], [], [], "stop")))
    assert failure.outcome == Outcome.ENGINE_ERROR
    assert "ended a response (seed 5) without a token" in failure.message


def test_an_environment_that_cannot_be_made_is_an_error_of_the_environment() -> None:
    def make(kind: str) -> Any:
        raise RuntimeError(f"no {kind} here")

    async def main() -> Trajectory | Failure:
        made = EpisodePlayer(make, CharTokenizer(), Script(), SETTINGS, Phases(LockStep()), now=now)
        return await made.play(LEASE, EpisodeProgress())

    failure = run_virtual(main)
    assert isinstance(failure, Failure)
    assert failure.outcome == Outcome.ENV_ERROR
    assert "environment start (seed 5) raised RuntimeError: no game here" in failure.message


def test_a_first_observation_without_tokens_is_an_error_of_the_environment() -> None:
    failure = fail(Env(first=""), Script())
    assert failure.outcome == Outcome.ENV_ERROR
    assert "empty prompt" in failure.message


def test_a_first_observation_without_room_for_an_answer_is_too_long() -> None:
    failure = fail(Env(first="x" * 200), Script())
    assert failure.outcome == Outcome.TOO_LONG
    assert "model.max_length is 200" in failure.message


class UnspeakableError(Exception):
    """An error whose message raises."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (BaseExceptionGroup("tasks", [SystemExit(3)]), "SystemExit: 3"),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [KeyError("x")])]), "KeyError: 'x'"),
        (UnspeakableError(), "UnspeakableError: it cannot be shown"),
    ],
)
def test_whatever_an_environment_raises_is_an_error_of_its_own_and_not_the_end_of_the_node(
    error: BaseException, text: str
) -> None:
    failure = fail(Env(error), Script(say("a")))
    assert failure.outcome == Outcome.ENV_ERROR
    assert f"environment step 1 (seed 5) raised {text}" in failure.message


@pytest.mark.parametrize("reward", [10**400, -(10**400)])
def test_a_reward_too_large_for_a_float_is_no_finite_number(reward: int) -> None:
    failure = fail(Env(("", reward, True, False, {})), Script(say("a")))
    assert failure.outcome == Outcome.REWARD_ERROR
    assert "the reward must be a finite number, but is" in failure.message


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (None, "is None of type NoneType; does a path through the reward end without `return`?"),
        ("1.0", "is '1.0' of type str; return float(…) of it"),
        (np.ones(2), "is array([1., 1.]) of type ndarray; return `.item()` of a tensor or an array"),
        ([1.0], "is [1.0] of type list; return a float or an int"),
        (math.nan, "is nan; look for a division by 0 or the log of it"),
    ],
)
def test_a_reward_of_another_kind_is_told_with_the_step_that_returned_it_and_what_to_do(
    reward: object, told: str
) -> None:
    failure = fail(Env(("", reward, True, False, {})), Script(say("a")))
    assert failure.message.startswith("environment step (seed 5): the reward must be a finite number, but ")
    assert told in failure.message
    line = Env.step.__code__.co_firstlineno
    assert failure.message.endswith(f"; returned by Env.step ({__file__}:{line})")


def test_a_blocking_environment_is_told_by_its_own_class() -> None:
    class Blocking:
        def reset(self, seed: int) -> str:
            return "no info"

        def step(self, action: str) -> None: ...

        def close(self) -> None: ...

    failure = anyio.run(episode(wrap(Blocking()), Script(say("a"))).play, LEASE, EpisodeProgress())
    assert isinstance(failure, Failure)
    assert "Blocking.reset (" in failure.message


class Knowing(Env):
    """An environment that asks the episode about tokens, and limits the second response to three."""

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode."""
        self.episode = episode
        self.knew: list[tuple[Said, int, int]] = []

    async def step(self, action: str) -> Any:
        """Note the last response, the turns that are left, and the room after the next observation."""
        result = await super().step(action)
        self.knew.append((self.episode.last, self.episode.turns_left, self.episode.room(result[0])))
        if len(self.knew) == 1:
            self.episode.limit(3)
        return result


def test_an_environment_that_wants_to_know_of_tokens_is_told_and_may_ask_for_fewer() -> None:
    env = Knowing(go("after"), go("x" * 400), end(1.0))
    proxy = Script(say("abc"), say("def", stop=False), say("g"))
    trajectory = succeed(env, proxy)
    assert trajectory.outcome is Outcome.TRUNCATED
    assert env.knew == [
        (Said(prompt_tokens=5, tokens=4, cut=False), 9, 200 - len("startabc0|after")),
        (Said(prompt_tokens=15, tokens=3, cut=True), 8, 200 - len("startabc0|afterdef/") - 400),
    ]
    assert [call.max_new_tokens for call in proxy.calls] == [8, 3]


def test_the_limit_that_an_environment_asks_for_is_for_one_response() -> None:
    env, proxy = Knowing(go("after"), go("on"), end(1.0)), Script(say("a"), say("b"), say("c"))
    succeed(env, proxy)
    assert [call.max_new_tokens for call in proxy.calls] == [8, 3, 8]


class Parsing(CharTokenizer):
    """A tokenizer whose parser of responses to chat messages makes all letters capital."""

    def read_response(self, token_ids: Sequence[int], *_: Any, **__: Any) -> Spoken:
        """Return the response in capital letters."""
        return Spoken(Message("assistant", self.decode(token_ids).upper()))

    def start_reading(self, *_: Any, **__: Any) -> ResponseReader:
        """Return a reader of capital letters."""
        return ResponseReader(lambda token_ids: self.decode(token_ids).upper())


class Reporting(Script):
    """A proxy that reports the tokens of a response when it is done."""

    async def generate(self, request: ResponseRequest) -> Completion:
        """Report all tokens of the next completion at once, and return it."""
        completion = self._completions.pop(0)
        assert isinstance(completion, Completion)
        request.on_tokens(completion.token_ids)
        return completion


class Listening(Env):
    """An environment that listens to the first response, and reads it when it is complete."""

    def inform(self, episode: EpisodeView) -> None:
        """Collect the pieces of the first response."""
        self.episode = episode
        self.pieces: list[Piece] = []
        episode.listen(lambda piece, _: self.pieces.append(piece))

    async def step(self, action: str) -> Any:
        """Read the whole response."""
        self.spoken = self.episode.spoken()
        return await super().step(action)


@pytest.mark.parametrize(("first", "read"), [("start", "abc"), ([Message("user", "start")], "ABC")])
def test_a_response_reads_like_its_pieces_and_parsers_read_responses_to_chat_messages_only(
    first: Any, read: str
) -> None:
    env = Listening(end(1.0), first=first)
    player = EpisodePlayer(lambda kind: env, Parsing(), Reporting(say("abc")), SETTINGS, Phases(), now=lambda: 0.0)
    run_virtual(lambda: player.play(LEASE, EpisodeProgress()))
    assert "".join(piece.content for piece in env.pieces) == read
    assert env.spoken == Spoken(Message("assistant", read))


class Deaf(Env):
    """An environment that raises an error when it gets a piece of a response."""

    def inform(self, episode: EpisodeView) -> None:
        """Listen to the first response."""
        episode.listen(self.hear)

    def hear(self, piece: Piece, prompt_tokens: int) -> None:
        """Raise an error."""
        raise KeyError(piece.content)


def test_an_error_of_a_function_that_listens_to_a_response_fails_the_episode() -> None:
    failure = fail(Deaf(end(1.0)), Reporting(say("abc")))
    assert failure.outcome == Outcome.ENV_ERROR
    assert "listener to a response raised KeyError: 'abc" in failure.message
    assert "test_episode.py" in failure.message


class Measuring(Env):
    """An environment that asks for the room of its next observation while the response before it is sampled."""

    def inform(self, episode: EpisodeView) -> None:
        """Measure the next observation at each piece of the first response."""
        self.left: list[int] = []
        episode.listen(lambda *_: self.left.append(episode.room("more")))


def test_an_observation_measured_while_a_response_is_sampled_is_rendered_again_to_follow_it() -> None:
    env = Measuring(go("more"), end(1.0))
    played = succeed(env, Reporting(say("a"), say("b")))
    assert "".join(map(chr, played.tokens())).replace("\0", "0") == "starta0|moreb0"
    assert len(env.left) == 1


class Branching(Env):
    """An environment that goes on at given places after its steps, and records the room that it had."""

    def __init__(self, *results: Any, places: Sequence[tuple[int, int]]) -> None:
        super().__init__(*results)
        self._places = list(places)

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode."""
        self.episode = episode
        self.left: list[int] = []

    async def step(self, action: str) -> Any:
        """Choose the place of the next observation, and note the room there."""
        result = await super().step(action)
        if self._places:
            self.episode.go_on(*self._places.pop(0))
            self.left.append(self.episode.room(result[0]))
        return result


def test_an_environment_that_goes_on_elsewhere_makes_branches_of_their_own_prompts() -> None:
    # After the second response the environment goes back to the first one, so a second branch begins there.
    env = Branching(go("more", 0.5), go("other"), go("on"), end(1.0), places=[(0, 1), (0, 1), (1, 2)])
    script = Script(say("a", (3, 2)), say("bc", (4, 3)), say("d", (4, 2)), say("e", (5, 2)))
    played = succeed(env, script)
    first, later = "starta0|morebc0", "starta0|otherd0|one0"
    assert "".join(map(chr, played.tokens())).replace("\0", "0") == first + later
    assert played.branches == (0, len(first))
    assert [turn.branch for turn in played.turns] == [0, 0, 1, 1]
    assert [turn.reward for turn in played.turns] == [0.5, 0.0, 0.0, 1.0]
    assert played.versions == [VersionRun(3, 2), VersionRun(4, 5), VersionRun(5, 2)]
    sampled = played.tokens()[played.action_mask()]
    assert "".join(map(chr, sampled)).replace("\0", "0") == "a0bc0d0e0", (
        "what a branch has from another is prompt in it"
    )
    prompts = ["".join(map(chr, request.prompt)).replace("\0", "0") for request in script.calls]
    assert prompts == ["start", "starta0|more", "starta0|other", "starta0|otherd0|on"]
    assert env.left == [200 - len(prompt) for prompt in ("starta0|more", "starta0|other", "starta0|otherd0|on")]


class Impatient(Branching):
    """An environment that chooses the place of the observation after the next one while the response is sampled."""

    async def step(self, action: str) -> Any:
        """Choose a place at a piece of the next response, once all places of `Branching` are used."""
        result = await super().step(action)
        if not self._places:
            self.episode.listen(lambda *_: self.episode.go_on(0, 2))
        return result


def test_an_environment_that_goes_on_elsewhere_while_a_response_is_sampled_fails() -> None:
    env = Impatient(go("more"), go("other"), end(1.0), places=[(0, 1), (0, 1)])
    failure = fail(env, Reporting(say("a"), say("bc"), say("d")))
    assert failure.outcome == Outcome.ENV_ERROR
    assert "while a response was sampled" in failure.message


class HalfBlocking(Env):
    """An environment with one method that is not a coroutine."""

    def step(self, action: str) -> Any:
        """Return the result itself, and nothing to await."""
        return end(1.0)


def test_an_environment_that_is_asynchronous_in_part_is_told_so() -> None:
    failure = fail(HalfBlocking(), Script(say("a")))
    assert failure.outcome == Outcome.ENV_ERROR
    assert failure.message == (
        "environment step 1 (seed 5) returned tuple, which cannot be awaited; make reset, step and close all "
        "`async def`, or none of them"
    )


class Broken(Env):
    """An environment that cannot be closed."""

    async def close(self) -> None:
        """Raise an error after the count."""
        await super().close()
        raise OSError("still mounted")


def test_an_environment_that_cannot_be_closed_is_an_error_of_its_own() -> None:
    failure = fail(Broken(end(1.0)), Script(say("a")))
    assert failure.outcome == Outcome.ENV_ERROR
    assert "environment close (seed 5) raised OSError: still mounted" in failure.message


def test_an_environment_that_cannot_be_closed_does_not_hide_the_first_error() -> None:
    failure = fail(Broken(RewardError("no judge")), Script(say("a")))
    assert (failure.outcome, failure.message) == (Outcome.REWARD_ERROR, "no judge")


# -- deadlines --------------------------------------------------------------------------------------------------------


class Hanging(Env):
    """An environment that never returns from one of its methods."""

    def __init__(self, where: str, *results: Any) -> None:
        super().__init__(*results)
        self._where = where

    async def reset(self, seed: int) -> Any:
        if self._where == "reset":
            await anyio.sleep_forever()
        return await super().reset(seed)

    async def step(self, action: str) -> Any:
        if self._where == f"step {len(self.actions) + 1}":
            await anyio.sleep_forever()
        return await super().step(action)

    async def close(self) -> None:
        await super().close()
        if self._where == "close":
            await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("where", "seconds", "key", "tokens"),
    [
        ("reset", 20, "deadlines.env_step", 0),
        ("step 2", 20, "deadlines.env_step", 4),
        ("close", 30, "deadlines.close", 4),
    ],
)
def test_law_1_an_environment_that_hangs_is_given_up_with_what_how_long_and_what_to_look_at(
    where: str, seconds: int, key: str, tokens: int
) -> None:
    failure = fail(Hanging(where, go("x"), end(1.0)), Script(say("a"), say("b")))
    assert (failure.outcome, failure.tokens) == (Outcome.ENV_TIMEOUT, tokens)
    assert f"environment {where} (seed 5) took longer than {seconds} s" in failure.message
    assert key in failure.message


@pytest.mark.parametrize(
    ("env", "seconds", "outcome", "text", "tokens"),
    [
        (Env(go("x"), end(1.0)), 3.0, Outcome.ENGINE_ERROR, "waiting for response 1 (seed 5); look at the engines", 1),
        (Env(go("x"), end(1.0)), 4.0, Outcome.ENV_TIMEOUT, "waiting for environment step 1 (seed 5)", 2),
        (Env(go("x"), end(1.0)), 5.5, Outcome.ENGINE_ERROR, "waiting for response 2 (seed 5); look at the engines", 2),
        (Env(go("x"), end(1.0)), 1.0, Outcome.ENV_TIMEOUT, "waiting for environment reset (seed 5)", 0),
    ],
    ids=["response", "step", "second response", "reset"],
)
def test_law_1_the_deadline_of_the_episode_names_what_was_pending(
    env: Env, seconds: float, outcome: Outcome, text: str, tokens: int
) -> None:
    failure = fail(env, Script(say("a"), say("b")), episode_s=seconds)
    assert (failure.outcome, failure.tokens) == (outcome, tokens)
    assert f"the episode took longer than {seconds:g} s; it was {text}" in failure.message
    assert "deadlines.episode" in failure.message


class Blocked(CharTokenizer):
    """A tokenizer that renders no large observation before `released` is set."""

    slow = True

    def __init__(self) -> None:
        self.begun = threading.Event()
        """Set when a thread has begun to render a large observation."""
        self.released = threading.Event()

    def render(self, observation: Any, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens; wait for `released` if the observation is large."""
        if len(observation) >= LARGE_LETTERS:
            self._wait()
        return super().render(observation, tools)

    def follow(self, observation: Any, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens after `released` is set."""
        self._wait()
        return super().follow(observation, end, tools)

    def _wait(self) -> None:
        self.begun.set()
        self.released.wait()

    def make_loop(self) -> VirtualLoop:
        """Return a virtual clock that stands still until a thread of its loop has begun to render.

        Otherwise the deadline could pass before the thread has begun. The thread then ends at once and reports that,
        which the clock refuses.
        """
        begun = self.begun

        class Waiting(VirtualLoop):
            def jump(self, seconds: float | None) -> None:
                if any(getattr(thread, "loop", None) is self for thread in threading.enumerate()):
                    begun.wait()
                super().jump(seconds)

        return Waiting()


class CountsPrompts(Env):
    """An environment that counts the tokens of prompts after each response, without showing them."""

    def __init__(self, *results: Any, observation: str = "more") -> None:
        super().__init__(*results)
        self.observation = observation

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode."""
        self.episode = episode
        self.counts: list[list[int]] = []

    async def step(self, action: str) -> Any:
        """Count the prompt with `observation` at each place of branch 0, from its beginning on."""
        result = await super().step(action)
        places = range(len(self.counts) + 2)
        self.counts.append([await self.episode.count(Expected("", self.observation, 0, place)) for place in places])
        return result


def test_prompts_are_counted_at_each_place_of_a_branch_and_nothing_is_shown() -> None:
    env = CountsPrompts(go("on"), end(1.0))
    played = succeed(env, Script(say("a"), say("b")))
    assert "".join(map(chr, played.tokens())).replace("\0", "0") == "starta0|onb0"
    assert env.counts == [[len("more"), len("starta0|more")], [4, len("starta0|more"), len("starta0|onb0|more")]]
    assert len(played.branches) == 1


@pytest.mark.parametrize(("letters", "count"), [(100, LARGE_LETTERS + 100), (100 * LARGE_LETTERS, None)])
def test_a_large_prompt_is_counted_in_a_thread_and_one_that_is_far_too_large_is_not_rendered(
    letters: int, count: int | None
) -> None:
    class Slow(CharTokenizer):
        slow = True
        threads: ClassVar[list[int]] = []

        def render(self, observation: Any, tools: Sequence[Tool] = ()) -> list[int]:
            if len(observation) >= LARGE_LETTERS:
                self.threads.append(threading.get_ident())
            return super().render(observation, tools)

    env = CountsPrompts(end(1.0), observation="x" * (LARGE_LETTERS + letters))
    settings = msgspec.structs.replace(SETTINGS, max_length=LARGE_LETTERS)
    player = EpisodePlayer(lambda kind: env, Slow(), Script(say("a")), settings, Phases(), now=lambda: 0.0)
    assert isinstance(anyio.run(player.play, LEASE, EpisodeProgress()), Trajectory)
    first = env.counts[0][0]
    if count is None:
        assert LARGE_LETTERS < first < letters
        assert not Slow.threads
    else:
        assert first == count
        assert Slow.threads
        assert threading.get_ident() not in Slow.threads


@pytest.mark.parametrize(
    ("env", "number"), [(Env(first="a" * LARGE_LETTERS), 1), (Env(go("a" * LARGE_LETTERS)), 2)], ids=["first", "later"]
)
def test_law_1_a_deadline_that_passes_while_an_observation_is_rendered_names_the_observation(
    env: Env, number: int
) -> None:
    tokenizer = Blocked()
    room = {"max_length": 10 * LARGE_LETTERS, "episode_s": 5.5}
    settings = msgspec.structs.replace(SETTINGS, **room)
    player = EpisodePlayer(lambda kind: env, tokenizer, Script(say("a")), settings, Phases(), now=now)
    failure = anyio.run(
        lambda: player.play(LEASE, EpisodeProgress()), backend_options={"loop_factory": tokenizer.make_loop}
    )
    # The thread ends now that the virtual clock, which refuses the reports of threads, is gone.
    tokenizer.released.set()
    assert isinstance(failure, Failure)
    assert failure.outcome == Outcome.ENV_TIMEOUT
    assert f"waiting for observation {number} to become tokens (seed 5); look at the size of" in failure.message


@pytest.mark.parametrize(
    ("method", "outcome", "text"),
    [
        ("generated", Outcome.ENGINE_ERROR, "waiting for the responses of other episodes; look at rollout.barriers"),
        ("stepped", Outcome.ENV_TIMEOUT, "waiting for the environments of other episodes; look at rollout.barriers"),
    ],
)
def test_law_1_waiting_for_other_episodes_is_under_the_deadline_of_the_episode(
    method: str, outcome: Outcome, text: str
) -> None:
    class Stuck(Phases):
        async def generated(self, lease: Lease) -> None:
            await anyio.sleep(0 if method == "stepped" else 1e9)

        async def stepped(self, lease: Lease) -> None:
            await anyio.sleep(0 if method == "generated" else 1e9)

    failure = fail(Env(end(1.0)), Script(say("a")), phases=Stuck())
    assert failure.outcome == outcome
    assert text in failure.message


class Announcing(Env):
    """An environment whose first response is sampled ahead."""

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode."""
        self._episode = episode

    async def reset(self, seed: int) -> Any:
        """Announce the first observation, so that its response is sampled during the reset."""
        self._episode.expect(Expected("first", "start", branch=0, responses=0))
        self._episode.comes("first")
        await anyio.sleep(0.1)
        return "start", {}


def test_an_outage_does_not_count_while_the_episode_waits_for_a_response_that_was_sampled_ahead() -> None:
    async def scenario() -> None:
        outages, requests = OutageClock(1000), list[ResponseRequest]()

        class Restarting:
            """A proxy whose only engine restarts while it samples a response."""

            async def generate(self, request: ResponseRequest) -> Completion:
                requests.append(request)
                outages.begin()
                await anyio.sleep(100)
                outages.end()
                return say("a")

        env = Announcing(end(1))
        settings = msgspec.structs.replace(SETTINGS, episode_s=10)
        player = EpisodePlayer(lambda kind: env, CharTokenizer(), Restarting(), settings, Phases(), outages, now=now)
        result = await player.play(LEASE, EpisodeProgress())
        assert isinstance(result, Trajectory), result
        assert len(requests) == 1, "the response was sampled ahead"

    run_virtual(scenario)


def test_closing_has_its_own_deadline_beside_that_of_the_episode() -> None:
    # The step ends at 5 s, and closing takes until 7 s.
    trajectory = succeed(Env(end(1.0)), Script(say("a")), episode_s=5.5)
    assert trajectory.outcome == Outcome.OK


# -- cancellation -----------------------------------------------------------------------------------------------------


class Counting(Phases):
    """Phases that count the episodes inside, and sleep, so that each phase has an await."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.entered = 0

    def enter(self, lease: Lease) -> None:
        """Count the episode."""
        self.inside += 1
        self.entered += 1

    def leave(self, lease: Lease) -> None:
        """Count the episode out."""
        self.inside -= 1

    async def generated(self, lease: Lease) -> None:
        """Take a second."""
        await anyio.sleep(1)

    async def stepped(self, lease: Lease) -> None:
        """Take a second."""
        await anyio.sleep(1)


CANCELLED_AT = [0.0, *(i / 4 + 0.1 for i in range(64))]
"""Seconds: in each await of an episode of two turns, which takes 12 s and 2 s more to close."""


@pytest.mark.parametrize("hanging", [False, True])
def test_a_cancelled_episode_closes_its_environment_once_and_tells_its_tokens(hanging: bool) -> None:
    for seconds in CANCELLED_AT:
        env = Hanging("close" if hanging else "", go("x"), end(1.0))
        phases = Counting()
        progress = EpisodeProgress()
        results: list[Any] = []

        async def cancelled(
            env: Env = env,
            phases: Counting = phases,
            progress: EpisodeProgress = progress,
            results: list[Any] = results,
            seconds: float = seconds,
        ) -> float:
            with anyio.CancelScope() as scope:
                scope.deadline = anyio.current_time() + seconds
                results.append(await episode(env, Script(say("a"), say("b")), phases).play(LEASE, progress))
            return anyio.current_time()

        finished = run_virtual(cancelled)
        # The reset takes 2 s, each phase 1 s, each token 0.5 s, and the step 2 s.
        sampled_at = [3.5, 4.0, 8.5, 9.0]
        assert env.closed == 1
        assert (phases.inside, phases.entered) == (0, 1)
        assert progress.tokens == sum(at <= seconds for at in sampled_at)
        assert bool(results) == (seconds >= 12)
        assert finished <= min(seconds, 12) + (30 if hanging else 2)


def test_one_episode_object_lives_many_leases_at_once() -> None:
    results: dict[int, Trajectory | Failure] = {}

    class Echo:
        """A proxy that answers with the last character of the prompt, and takes longer for later tasks."""

        async def generate(self, request: ResponseRequest) -> Completion:
            await anyio.sleep(request.task_id)
            return say(chr(request.prompt[-1]))

    async def main() -> None:
        made = EpisodePlayer(
            lambda kind: Env(go(kind), go(kind), end(1.0), first=kind),
            CharTokenizer(),
            Echo(),
            SETTINGS,
            Phases(LockStep()),
            now=now,
        )

        async def one(number: int) -> None:
            lease = Lease(number, Task(number, 0, number, seed=0, kind="abc"[number]), min_version=0)
            results[number] = await made.play(lease, EpisodeProgress())

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(one, number)

    run_virtual(main)
    for number, kind in enumerate("abc"):
        trajectory = results[number]
        assert isinstance(trajectory, Trajectory)
        assert bytes(trajectory.tokens().tolist()).decode() == f"{kind}{kind}\0|{kind}{kind}\0|{kind}{kind}\0"


class Argued(CharTokenizer):
    """A tokenizer that shows the arguments of its chat template before the first observation."""

    def __init__(self, shown: str = "") -> None:
        self._shown = shown

    def with_arguments(self, arguments: Any) -> Tokenizer:
        """Return a tokenizer that shows these arguments."""
        return Argued(str(dict(arguments)))

    def render(self, observation: Any, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of the arguments and the observation."""
        return [ord(c) for c in self._shown + text_of(observation)]


GIVEN = {"chat_template_kwargs": {"a": 1}}


@pytest.mark.parametrize(
    ("info", "prompt"), [({}, "start"), (GIVEN, "{'a': 1}start"), ({"chat_template_kwargs": 7}, "")]
)
def test_reset_may_give_arguments_of_the_chat_template(info: dict[str, Any], prompt: str) -> None:
    class Giving(Env):
        async def reset(self, seed: int) -> Any:
            return "start", info

    script, env = Script(say("ok")), Giving(("", 1.0, True, False, {}))
    player = EpisodePlayer(lambda kind: env, Argued(), script, SETTINGS, Phases(), now=lambda: 0.0)
    played = run_virtual(lambda: player.play(LEASE, EpisodeProgress()))
    if prompt:
        assert "".join(map(chr, script.calls[0].prompt)) == prompt
    else:
        assert isinstance(played, Failure)
        assert "info['chat_template_kwargs'] of reset() must map names to values, such as" in played.message
