"""Episodes of environments that misbehave: each is one typed failure, and its neighbours and the loop go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from flash.environment import wrap
from flash.rollout.episode.episode import EpisodePlayer, EpisodeProgress
from flash.rollout.episode.phases import Phases
from flash.simulate.clock import run_virtual
from flash.types import Failure, Outcome, Trajectory
from tests.misuse import misbehaving as m
from tests.rollout.test_episode import LEASE, SETTINGS, CharTokenizer, Script, say

QUICK = msgspec.structs.replace(SETTINGS, step_s=0.1, close_s=0.1)
PLACES = ("start", "reset", "step", "close")
KINDS = (m.Misbehaving, m.Blocking)


async def play(make_env: Callable[[], Any], settings: Any = SETTINGS) -> Trajectory | Failure:
    """Play one episode, and another one of an orderly environment beside it."""
    results: dict[str, Trajectory | Failure] = {}

    async def one(name: str, make_env: Callable[[], Any]) -> None:
        proxy = Script(say("a"))
        proxy.seconds = 0.0
        parts = (lambda kind: wrap(make_env()), CharTokenizer(), proxy, settings, Phases())
        results[name] = await EpisodePlayer(*parts, now=anyio.current_time).play(LEASE, EpisodeProgress())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, "this", make_env)
        tasks.start_soon(one, "neighbour", partial(m.Misbehaving, "", lambda: None))
    neighbour = results["neighbour"]
    assert isinstance(neighbour, Trajectory)
    assert neighbour.reward == 1.0
    return results["this"]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_is_raised_is_the_failure_of_that_sample_with_file_and_line(kind: type[Any]) -> None:
    for place in PLACES:
        for name, make in m.EXCEPTIONS.items():
            result = await play(partial(kind, place, m.raising(make)))
            case = f"{kind.__name__}.{place} raises {name}: {str(result)[:300]}"
            assert isinstance(result, Failure), case
            expected = Outcome.REWARD_ERROR if name == "reward" else Outcome.ENV_ERROR
            assert result.outcome is expected, case
            assert name in ("reward", "sandbox") or "misbehaving.py:" in result.message, case
            assert len(result.message) < 3000, case


@pytest.mark.anyio
@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("name", [name for name, (_, virtual) in m.HANGS.items() if not virtual])
async def test_a_hang_that_spins_ends_at_the_deadline_and_leaves_an_idle_loop(place: str, name: str) -> None:
    await hangs(place, name)
    await asyncio.sleep(0.01)
    loop: Any = asyncio.get_running_loop()
    assert not loop._ready, "nothing keeps the loop busy"


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("name", [name for name, (_, virtual) in m.HANGS.items() if virtual])
def test_a_hang_ends_at_the_deadline(place: str, name: str) -> None:
    run_virtual(hangs, place, name)


async def hangs(place: str, name: str) -> None:
    result = await play(partial(m.Misbehaving, place, m.HANGS[name][0]), QUICK)
    assert isinstance(result, Failure)
    assert result.outcome is Outcome.ENV_TIMEOUT
    assert "took longer than 0.1 s, at " in result.message
    assert "misbehaving.py:" in result.message
    assert ("was abandoned" in result.message) == (name not in m.ENDS)


@pytest.mark.anyio
@pytest.mark.parametrize("place", PLACES[1:])
async def test_a_thread_that_never_returns_is_named_and_left_behind(place: str) -> None:
    begun = time.monotonic()
    result = await play(partial(m.Blocking, place, m.sleeps_in_its_thread), QUICK)
    assert isinstance(result, Failure)
    assert result.outcome is Outcome.ENV_TIMEOUT
    assert "misbehaving.py:" in result.message
    assert "in a thread, which nothing can end" in result.message
    assert time.monotonic() - begun < 60, "nobody waits for the thread"


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_each_wrong_result_is_refused_and_each_kind_of_number_is_a_reward(kind: type[Any]) -> None:
    async def steps_to(result: Any) -> Trajectory | Failure:
        return await play(partial(kind, "step", lambda: result))

    for name, reward in m.REWARDS.items():
        result = await steps_to(("", reward, True, False, {}))
        assert isinstance(result, Failure), name
        assert result.outcome is (Outcome.ENV_ERROR if name == "evil" else Outcome.REWARD_ERROR), name
        assert "misbehaving.py:" in result.message, name
    for name, wrong in m.RESULTS.items():
        result = await steps_to(wrong)
        assert isinstance(result, Failure), name
        assert result.outcome is Outcome.ENV_ERROR, name
        assert "misbehaving.py:" in result.message, name
    for name, reward in m.GOOD_REWARDS.items():
        result = await steps_to(("", reward, True, False, {}))
        assert isinstance(result, Trajectory), name
        assert result.reward == 1.0, name


@pytest.mark.parametrize("name", ["sleep", "cleans up for ever", "shields"])
def test_a_cancelled_episode_ends_whatever_its_environment_does(name: str) -> None:
    async def cancelled() -> float:
        with anyio.move_on_after(1):
            await play(partial(m.Misbehaving, "step", m.HANGS[name][0]))
        return anyio.current_time()

    assert run_virtual(cancelled) < 10


def test_what_reset_sets_in_the_context_step_sees() -> None:
    result = run_virtual(play, m.Contextual)
    assert isinstance(result, Trajectory)
    assert result.reward == 5.0
