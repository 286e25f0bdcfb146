"""Function `flash.play`: an episode with given answers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import flash
from envs.workers import in_worker
from flash.config.tree import Config
from flash.environment import EpisodeView, ResponseForm


class Guess:
    """Environment that ends with reward 1 at a certain answer, and goes on after any other."""

    def __init__(self, number: int = 2) -> None:
        self._number = number

    async def reset(self, seed: int) -> Any:
        self._turn = 0
        return f"seed {seed}: ", {}

    async def step(self, action: str) -> Any:
        self._turn += 1
        ended = action == str(self._number)
        info = {"metrics": {"turns": self._turn}, "note": f"said {action!r}"}
        return "again: ", float(ended), ended, False, info

    async def close(self) -> None: ...


class Blocking:
    """Environment with plain methods. It raises on every answer but the empty one, and gives no number as a reward."""

    def reset(self, seed: int) -> Any:
        return [{"role": "user", "content": "hello"}], {}

    def step(self, action: str) -> Any:
        if action:
            raise KeyError(action)
        return "", None, True, False, {}

    def close(self) -> None: ...


class Formed:
    """Environment that asks for an answer in JSON."""

    def inform(self, episode: EpisodeView) -> None:
        self._episode = episode

    async def reset(self, seed: int) -> Any:
        await self._episode.form(ResponseForm({"type": "object"}))
        return "an object: ", {}

    async def step(self, action: str) -> Any:
        return "", float(action == "{}"), True, False, {}

    async def close(self) -> None: ...


def make_config(env: type[object], **rollout: Any) -> Config:
    """Return a configuration with an environment of this file, and with settings of `[rollout]`."""
    tree = {
        "run": {"name": "test"},
        "model": {"path": "none"},
        "env": {"path": f"{__name__}:{env.__name__}"},
        "cluster": {"gpus_per_node": 0},
        "rollout": rollout,
    }
    return msgspec.convert(tree, Config)


def test_a_given_answer_is_not_changed_by_the_form_that_it_should_have() -> None:
    assert [flash.play(make_config(Formed), [answer], 1).reward for answer in ("{}", "no object")] == [1.0, 0.0]


def test_each_turn_takes_the_next_answer() -> None:
    played = flash.play(make_config(Guess), ["", "ä", "2", "3"], seed=7)
    assert played.shown == ["seed 7: ", "again: ", "again: "]
    assert (played.rewards, played.reward, played.truncated) == ([0.0, 0.0, 1.0], 1.0, False)
    assert played.metrics == {"turns": 3.0}
    assert played.notes == ["said ''", "said 'ä'", "said '2'"]


def test_an_episode_is_cut_off_at_the_turns_of_the_run() -> None:
    played = flash.play(make_config(Guess, max_turns=2), ["0", "1", "2"])
    assert (played.rewards, played.truncated) == ([0.0, 0.0], True)


def test_an_answer_may_be_longer_than_a_model_s() -> None:
    played = flash.play(make_config(Guess, max_turns=1, max_new_tokens=1), ["x" * 10_000])
    assert len(played.notes[0]) > 1_000


def test_an_episode_that_goes_on_after_the_last_answer_is_an_error() -> None:
    with pytest.raises(
        flash.EnvError, match=r"the episode goes on after 1 answer\(s\): give one answer for each response"
    ):
        flash.play(make_config(Guess), ["0"])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("", r"must be a finite number, but is None.*Blocking\.step \(.*test_play\.py:\d+\)"),
        ("x", "raised KeyError: 'x'"),
    ],
)
def test_forbidden_results_of_an_environment_are_reported(answer: str, told: str) -> None:
    with pytest.raises(flash.EnvError, match=told):
        flash.play(make_config(Blocking), [answer])


@pytest.mark.anyio
async def test_an_episode_is_played_where_a_loop_runs_already() -> None:
    assert flash.play(make_config(Guess), ["2"]).rewards == [1.0]
    with pytest.raises(flash.EnvError, match="goes on after 1 answer"):
        flash.play(make_config(Guess), ["0"])


class OneClient(Guess):
    """Environment with a lock for all episodes, like a client at the top of a module. The lock belongs to the loop on
    which a task first waits for it."""

    lock = asyncio.Lock()

    async def step(self, action: str) -> Any:
        async def holds() -> None:
            """Hold the lock for one turn of the loop."""
            async with self.lock:
                await asyncio.sleep(0)

        await asyncio.gather(holds(), holds())
        return await super().step(action)


def test_all_episodes_of_a_process_are_played_on_one_loop() -> None:
    for _ in range(2):
        assert flash.play(make_config(OneClient), ["0", "2"]).rewards == [0.0, 1.0]


class InWorker(Guess):
    """Environment that counts the letters of the answer in a worker process, which is kept for later calls."""

    async def step(self, action: str) -> Any:
        assert await in_worker(60, len, action) == 1
        return await super().step(action)


def test_a_worker_process_of_one_episode_serves_the_next_one() -> None:
    for _ in range(3):
        assert flash.play(make_config(InWorker), ["0", "2"]).rewards == [0.0, 1.0]
