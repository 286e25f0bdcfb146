"""The simulated workload, its environments and its tokenizer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import pytest

from flash.config.simulate import Lognormal, Normal, SimulateConfig
from flash.rollout.episode.episode import response_key
from flash.simulate.environment import SimEnvironment, SimTokenizer
from flash.simulate.workload import Workload, env_key, episode_of, turn_of
from flash.types import Task


def make(limit: int = 4096, seed: int = 0, **settings: Any) -> Workload:
    """Return a workload with responses of at most `limit` tokens."""
    return Workload(SimulateConfig(**settings), seed, limit)


def test_two_workloads_of_one_seed_agree_and_another_seed_differs() -> None:
    one, same, other = make(), make(), make(seed=1)
    lengths = [[w.response_tokens(key) for key in range(200)] for w in (one, same, other)]
    assert lengths[0] == lengths[1] != lengths[2]


def test_lengths_are_positive_whole_and_within_the_limit() -> None:
    workload = make(
        limit=100,
        response_tokens=Lognormal(mean=80, deviation=200),
        prompt_tokens=Normal(mean=3, deviation=5),
        turns=Normal(mean=1, deviation=2),
    )
    lengths = [workload.response_tokens(key) for key in range(500)]
    assert (min(lengths), max(lengths)) == (1, 100)
    assert min(workload.prompt_tokens(seed) for seed in range(500)) == 1
    assert min(workload.turns(seed) for seed in range(500)) == 1


def test_the_responses_of_a_group_are_as_alike_as_asked_and_spread_as_before() -> None:
    spread = Lognormal(mean=1000, deviation=800, high=4096)
    settings = [SimulateConfig(response_tokens=spread, length_correlation=share) for share in (0.0, 0.8, 1.0)]
    means: list[float] = []
    within: list[float] = []
    for one in settings:
        work = Workload(one, 0, 4096, tasks_per_group=4)
        groups = [
            [work.response_tokens(response_key(Task(4 * group + i, group, i, 0), 0)) for i in range(4)]
            for group in range(2000)
        ]
        means.append(sum(map(sum, groups)) / 8000)
        within.append(sum(max(group) - min(group) for group in groups) / 2000)
    assert means == pytest.approx([means[0]] * 3, rel=0.05)
    assert within[0] > 1.5 * within[1] > within[2] == 0


def test_the_key_of_a_response_tells_its_turn_and_its_episode() -> None:
    tasks = [Task(i, 0, 0, 0, split=split) for i in (0, 1, 77) for split in ("train", "eval")]
    keys = {(task.task_id, task.split, turn): response_key(task, turn) for task in tasks for turn in (0, 1, 4095)}
    assert all(turn_of(key) == turn for (_, _, turn), key in keys.items())
    assert len({episode_of(key) for key in keys.values()}) == len(tasks)


def test_the_share_of_slow_and_of_stopping_environments_is_as_asked() -> None:
    workload = make(env_s=1, fail_slow=0.2, fail_slow_factor=7.0, fail_stop=0.1)
    keys = [env_key(problem, 0) for problem in range(4000)]
    assert sum(workload.env_seconds(key, 0) == 7 for key in keys) / len(keys) == pytest.approx(0.2, abs=0.02)
    stops = [workload.stop_turn(key, 3) for key in keys]
    assert sum(stop is not None for stop in stops) / len(keys) == pytest.approx(0.1, abs=0.02)
    assert {stop for stop in stops if stop is not None} == {0, 1, 2}


def test_rewards_follow_the_chance_of_the_prompt() -> None:
    workload = make(success=[0.1, 0.9])
    means = []
    for problem in range(50):
        rewards = [workload.reward(problem, env_key(problem, i)) for i in range(400)]
        assert set(rewards) <= {0.0, 1.0}
        means.append(sum(rewards) / len(rewards))
    assert all(abs(mean - 0.1) < 0.07 or abs(mean - 0.9) < 0.07 for mean in means)
    assert min(means) < 0.5 < max(means)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_an_environment_takes_the_workloads_time_and_turns() -> None:
    workload = make(turns=3, reset_s=2, env_s=5, reward_s=7)
    env, tokenizer = SimEnvironment(workload, Counter()), SimTokenizer()
    shown, _ = await env.reset(11)
    assert anyio.current_time() == 2
    assert tokenizer.render(shown) == workload.prompt(11)
    for turn in range(3):
        start = anyio.current_time()
        shown, reward, terminated, truncated, _ = await env.step("")
        last = turn == 2
        assert anyio.current_time() - start == (12 if last else 5)
        assert (terminated, truncated) == (last, False)
        if not last:
            assert len(tokenizer.follow(shown, 1)) == 50
    assert reward in (0, 1)
    await env.close()


@pytest.mark.anyio
@pytest.mark.virtual
async def test_members_of_a_group_meet_different_environments_and_the_same_problem() -> None:
    workload, made = make(env_s=Lognormal(mean=5, deviation=5)), Counter[int]()
    shown: set[str] = set()
    seconds: set[float] = set()
    for _ in range(4):
        env = SimEnvironment(workload, made)
        observation, _ = await env.reset(3)
        start = anyio.current_time()
        await env.step("")
        shown.add(str(observation))
        seconds.add(anyio.current_time() - start)
    assert (len(shown), len(seconds)) == (1, 4)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_stopped_environment_never_answers() -> None:
    env = SimEnvironment(make(fail_stop=1.0), Counter())
    await env.reset(0)
    with anyio.move_on_after(1e6) as scope:
        await env.step("")
    assert scope.cancelled_caught
