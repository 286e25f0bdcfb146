"""Log-probs of a served teacher: from a server that counts, and from a real one."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from flash.errors import BreakerError, ConfigError
from flash.rollout.teacher import ServedTeacher
from flash.simulate.clock import run_virtual
from flash.types import Failure, Outcome, Span, Task, Trajectory, Turn, VersionRun
from flash.waiting import first_error
from tests.rollout.test_node import World, make_config

URL = "http://teacher"
SECONDS = 20.0


def trajectory(tokens: Sequence[int], spans: Sequence[tuple[int, int]], branches: tuple[int, ...] = (0,)) -> Trajectory:
    """Return a trajectory of these tokens. `spans` are the (start, stop) positions of its responses; `branches`: its
    branches' first positions."""
    count = sum(stop - start for start, stop in spans)
    which = [max(number for number, begin in enumerate(branches) if begin <= start) for start, _ in spans]
    return Trajectory(
        task=Task(0, 0, 0, seed=0),
        outcome=Outcome.OK,
        reward=1.0,
        token_ids=np.array(tokens, dtype="<i4").tobytes(),
        action_spans=[Span(*span) for span in spans],
        logprobs=np.zeros(count, dtype="<f4").tobytes(),
        versions=[VersionRun(0, count)],
        turns=[Turn("", "", 1.0, 0.0, 0.0, 0.0, branch=number) for number in which],
        branches=branches,
    )


def says(prompt: Sequence[int], place: int) -> float:
    """Return the log-prob of the counting server for a token: another number for each prefix."""
    return -sum(prompt[: place + 1]) / 8


def answer(prompt: Sequence[int], text: Callable[[int], str] = chr) -> httpx.Response:
    """Return vLLM's answer to a prompt, with the log-prob of each token by `says` and its text by `text`."""
    told: list[dict[str, Any] | None] = [None]
    for place, token in enumerate(prompt[1:], 1):
        told.append({str(token): {"logprob": says(prompt, place), "rank": 1, "decoded_token": text(token)}})
    return httpx.Response(200, json={"choices": [{"index": 0, "text": "!", "prompt_logprobs": told}]})


class Counting:
    """A teacher's server, whose log-probs `says` gives. Its first answers are `before`."""

    def __init__(self, *before: httpx.Response | Exception, text: Callable[[int], str] = chr) -> None:
        self._before = list(before)
        self._text = text
        self.asked: list[dict[str, Any]] = []
        """Bodies of the requests."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer with the next of `before`, or else with log-probs."""
        self.asked.append(json.loads(request.content))
        if self._before:
            said = self._before.pop(0)
            if isinstance(said, Exception):
                raise said
            return said
        return answer(self.asked[-1]["prompt"], self._text)


@asynccontextmanager
async def taught(server: Callable[[httpx.Request], httpx.Response]) -> AsyncGenerator[ServedTeacher]:
    """Give the block a teacher whose requests are answered by the function `server`."""
    teacher = ServedTeacher(URL, SECONDS, httpx.MockTransport(server))
    yield teacher
    await teacher.aclose()


def told(made: Trajectory | Failure, server: Callable[[httpx.Request], httpx.Response]) -> Trajectory | Failure:
    """Return the result of a teacher's `score` for `made`, with this server."""

    async def ask() -> Trajectory | Failure:
        async with taught(server) as teacher:
            return await teacher.score(made)

    return run_virtual(ask)


def numbers(made: Trajectory | Failure) -> list[float]:
    """Return the teacher's log-probs of a trajectory."""
    assert isinstance(made, Trajectory)
    assert made.teacher is not None
    return np.frombuffer(made.teacher, dtype="<f4").tolist()


def test_each_sampled_token_gets_what_the_teacher_gives_it_after_its_own_prefix() -> None:
    server = Counting()
    found = numbers(told(trajectory([5, 6, 7, 8, 9], [(1, 3), (4, 5)]), server))
    assert found == [says([5, 6, 7, 8, 9], place) for place in (1, 2, 4)]
    assert server.asked == [{"prompt": [5, 6, 7, 8, 9], "max_tokens": 1, "prompt_logprobs": 0}]


def test_branches_are_read_one_by_one() -> None:
    server = Counting()
    found = numbers(told(trajectory([5, 6, 7, 5, 8, 9], [(1, 3), (4, 6)], (0, 3)), server))
    assert [one["prompt"] for one in server.asked] == [[5, 6, 7], [5, 8, 9]]
    assert found == [says([5, 6, 7], 1), says([5, 6, 7], 2), says([5, 8, 9], 1), says([5, 8, 9], 2)]


def test_what_is_not_trained_is_not_asked_about() -> None:
    server = Counting()
    judged = trajectory([5, 6], [(1, 2)])
    for made in (
        Failure(judged.task, Outcome.ENV_ERROR, "", 3),
        replace(judged, task=replace(judged.task, split="eval")),
    ):
        assert told(made, server) is made
    assert server.asked == []


def test_a_server_that_is_busy_or_gone_is_asked_again() -> None:
    server = Counting(httpx.ConnectError("no route"), httpx.Response(503), httpx.Response(429))
    assert numbers(told(trajectory([5, 6], [(1, 2)]), server)) == [says([5, 6], 1)]
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (httpx.Response(400, text="too long"), "refuses a sample's tokens: HTTP 400: too long"),
        (httpx.Response(501, text="<p>no\nPOST"), "is no server of a model: HTTP 501: <p>no POST"),
        (httpx.Response(200, json={"choices": [{}]}), "expected a server of vLLM"),
        (httpx.Response(200, json={"choices": []}), "expected a server of vLLM"),
        (httpx.Response(200, json={"choices": [{"prompt_logprobs": [None]}]}), "expected a server of vLLM"),
        (
            httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, {"6": {"logprob": -9999.0}}]}]}),
            "gives token 6 the probability 0",
        ),
    ],
)
def test_a_sample_of_which_the_teacher_says_nothing_has_failed(said: httpx.Response, message: str) -> None:
    server = Counting(said)
    failed = told(trajectory([5, 6], [(1, 2)]), server)
    assert isinstance(failed, Failure)
    assert (failed.outcome, failed.tokens) == (Outcome.REWARD_ERROR, 1)
    assert failed.message.startswith("algorithm.teacher.url: http://teacher ")
    assert message in failed.message
    assert len(server.asked) == 1, "the same answer would come again"


def test_a_server_that_stays_away_is_given_up_in_time() -> None:
    async def ask() -> tuple[Trajectory | Failure, float]:
        async with taught(Counting(*[httpx.ConnectError("no route")] * 1000)) as teacher:
            return await teacher.score(trajectory([5, 6], [(1, 2)])), anyio.current_time()

    failed, took = run_virtual(ask)
    assert isinstance(failed, Failure)
    assert failed.message.endswith("gives no answer within 20 s (deadlines.env_step): ConnectError('no route')")
    assert took == SECONDS


def check(server: Counting, length: int = 9) -> None:
    """Check a server at the start of a run, for samples of `length` tokens."""

    async def ask() -> None:
        async with taught(server) as teacher:
            await teacher.check(length, 101, lambda tokens: list(map(chr, tokens)))

    run_virtual(ask)


def test_a_server_reads_the_longest_sample_over_the_whole_vocabulary_at_the_start() -> None:
    server = Counting()
    check(server)
    (asked,) = (one["prompt"] for one in server.asked)
    assert (len(asked), asked[0], asked[-1]) == (9, 0, 100)


def test_a_server_with_other_tokens_or_too_short_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match="token 12 is '\\\\x0c' to the policy and '<12>' to http://teacher: expected a"
    ):
        check(Counting(text="<{}>".format))
    check(Counting(text=lambda token: "\ufffd"))
    check(Counting(text=lambda token: " " + chr(token)))  # as vLLM says it of a token that begins a word
    with pytest.raises(ConfigError, match=r"length is 8; expected vLLM, with --max-model-len above 9 "):
        check(Counting(httpx.Response(400, text="the maximum context length is 8")))


class Taught(World):
    """A run whose node asks a server."""

    server: Callable[[httpx.Request], httpx.Response]

    @property
    def teacher(self) -> ServedTeacher:
        return ServedTeacher(URL, SECONDS, httpx.MockTransport(self.server))


def test_a_run_trains_samples_with_their_teachers_word() -> None:
    world = Taught(make_config())
    world.server = Counting(httpx.Response(500))
    run_virtual(world.run)
    samples = [sample.trajectory for shard in world.trainer.shards for sample in shard.samples]
    assert len(samples) == 4 * 8
    for sample in samples:
        prompt = sample.tokens().tolist()
        expected = [says(prompt, place) for place in np.flatnonzero(sample.action_mask()).tolist()]
        assert numbers(sample) == expected


def test_a_run_whose_teacher_refuses_ends_and_says_so() -> None:
    world = Taught(make_config())
    world.server = lambda request: httpx.Response(401, text="who are you")
    with pytest.raises(BaseExceptionGroup) as raised:
        run_virtual(world.run)
    error = first_error(raised.value)
    assert isinstance(error, BreakerError)
    assert "HTTP 401: who are you" in str(error)


@pytest.mark.parametrize("url", ["http://büro..x:1/v1", "http://[::1"])
def test_a_text_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.teacher.url: '{re.escape(url)}' is no address"):
        ServedTeacher(url, SECONDS)
