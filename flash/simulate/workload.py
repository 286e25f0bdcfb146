"""Workload: lengths of prompts and responses, durations of environments, and rewards of a simulated run.

Every value is a pure function of the run's seed and of ids. So two runs with one seed have the same samples, whatever
the order and the policy of their scheduling.

There are three kinds of ids. A problem has the seed of its environment, which all tasks of a group share. A response
has the key of its request (see `flash.rollout.episode.episode.response_key`). An environment has its `env_key`, which
consists of its problem and of the number of environments that were made for the problem before.

Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from flash.config.simulate import Sampler, SimulateConfig, sampler, uniform
from flash.rollout.episode.episode import KEYS_PER_TASK

ENVS_PER_PROBLEM = 1 << 20
"""Number of environments of one problem that get different keys."""
_TOKEN_IDS = (1 << 31) - 1
"""Upper bound of token ids, which are encoded as int32."""

_NORMAL = NormalDist()
"""Standard normal distribution, which `Workload.response_tokens` uses."""

# Purposes of random draws (`Workload._draw`): two quantities of the same id must not use the same random number.
_PROMPT, _RESPONSE, _TURNS, _OBSERVATION, _RESET, _ENV, _REWARD = range(7)
_SLOW, _STOP, _STOP_TURN, _CHANCE, _SUCCESS, _NAME, _GROUP_LENGTH = range(7, 14)


def turn_of(key: int) -> int:
    """Return the turn of a response, counted from 0. `key` is the key of its request (`response_key`)."""
    # A key is (task id · KEYS_PER_TASK + turn) · 2, plus 1 for an evaluation. Both kinds of tasks count from 0.
    return key // 2 % KEYS_PER_TASK


def episode_of(key: int) -> int:
    """Return a number that all responses of one task share, and no others. `key` is the key of a request."""
    return key // (2 * KEYS_PER_TASK) * 2 + key % 2


def env_key(problem_seed: int, number: int) -> int:
    """Return the key of the `number`-th environment, counted from 0, that was made for a problem."""
    return problem_seed * ENVS_PER_PROBLEM + number


class Workload:
    """Lengths, durations and rewards of all samples of a simulated run. Engines and environments of the run share it.

    Args:
        settings: the simulation's settings.
        run_seed: the run's seed.
        max_new_tokens: most tokens of a response.
        tasks_per_group: number of tasks in a group, including redundant ones. They share a prompt and have consecutive
            task ids.
    """

    def __init__(self, settings: SimulateConfig, run_seed: int, max_new_tokens: int, tasks_per_group: int = 1) -> None:
        self._seed = run_seed
        self._limit = max_new_tokens
        self._tasks_per_group = tasks_per_group
        self._length_correlation = settings.length_correlation
        self._slow_share = settings.fail_slow
        self._slow_factor = settings.fail_slow_factor
        self._stop_share = settings.fail_stop
        self._prompt = sampler(settings.prompt_tokens)
        self._response = sampler(settings.response_tokens)
        self._observation = sampler(settings.observation_tokens)
        self._turns = sampler(settings.turns)
        self._reset = sampler(settings.reset_s)
        self._env = sampler(settings.env_s)
        self._reward = sampler(settings.reward_s)
        self._success = sampler(settings.success)

    def _draw(self, values: Sampler, purpose: int, *key: int) -> float:
        """Draw a value for a purpose and an id. Equal arguments give equal values."""
        return values.draw(uniform(self._seed, purpose, *key))

    # -- the policy --------------------------------------------------------------------------------------------------

    def prompt_tokens(self, problem_seed: int) -> int:
        """Return the length of a problem's first observation, at least 1."""
        return max(1, round(self._draw(self._prompt, _PROMPT, problem_seed)))

    def prompt(self, problem_seed: int) -> list[int]:
        """Return the tokens of a problem's first observation.

        The first token identifies the problem, so that an engine can recognize a prefix in its cache.
        """
        return tokens(self.problem_token(problem_seed), self.prompt_tokens(problem_seed))

    def problem_token(self, problem_seed: int) -> int:
        """Return the token id that identifies a problem. Two problems are unlikely to have the same one."""
        return int(uniform(self._seed, _NAME, problem_seed) * _TOKEN_IDS)

    def response_tokens(self, key: int) -> int:
        """Return the length of a response, between 1 and the limit of the run. `key` is the key of its request."""
        u = uniform(self._seed, _RESPONSE, key)
        if self._length_correlation:
            # Gaussian copula: a number that the tasks of a group share correlates their lengths, while each single
            # length keeps the distribution of `response_tokens`.
            group = key // (2 * KEYS_PER_TASK) // self._tasks_per_group
            shared = math.sqrt(self._length_correlation) * _NORMAL.inv_cdf(
                uniform(self._seed, _GROUP_LENGTH, group, key % 2)
            )
            own = math.sqrt(1 - self._length_correlation) * _NORMAL.inv_cdf(u)
            # `draw` takes a number between 0 and 1, which rounding may reach.
            u = min(max(_NORMAL.cdf(shared + own), 1e-12), 1 - 1e-12)
        return min(max(1, round(self._response.draw(u))), self._limit)

    def turns(self, problem_seed: int) -> int:
        """Return the number of responses in an episode, at least 1."""
        return max(1, round(self._draw(self._turns, _TURNS, problem_seed)))

    # -- the environment ---------------------------------------------------------------------------------------------

    # `environment` is the key of an environment (`env_key`), and `turn` is counted from 0.

    def observation_tokens(self, environment: int, turn: int) -> int:
        """Return the length of the observation after a turn, at least 1."""
        return max(1, round(self._draw(self._observation, _OBSERVATION, environment, turn)))

    def reset_seconds(self, environment: int) -> float:
        """Return the seconds of the environment's reset."""
        return self._draw(self._reset, _RESET, environment) * self._slowness(environment)

    def env_seconds(self, environment: int, turn: int) -> float:
        """Return the seconds of the environment's step after a turn, without the reward."""
        return self._draw(self._env, _ENV, environment, turn) * self._slowness(environment)

    def reward_seconds(self, environment: int) -> float:
        """Return the additional seconds of the last step, for the reward."""
        return self._draw(self._reward, _REWARD, environment)

    def stop_turn(self, environment: int, turns: int) -> int | None:
        """Return the turn whose step the environment never finishes; None if it finishes all of its `turns` turns."""
        if uniform(self._seed, _STOP, environment) >= self._stop_share:
            return None
        return int(uniform(self._seed, _STOP_TURN, environment) * turns)

    def reward(self, problem_seed: int, environment: int) -> float:
        """Return 1 with the problem's probability of success, else 0."""
        chance = self._draw(self._success, _CHANCE, problem_seed)
        return float(uniform(self._seed, _SUCCESS, environment) < chance)

    def _slowness(self, environment: int) -> float:
        """Return the factor of an environment's times: `fail_slow_factor` for the share `fail_slow`, else 1."""
        return self._slow_factor if uniform(self._seed, _SLOW, environment) < self._slow_share else 1.0


def tokens(first: int, count: int) -> list[int]:
    """Return `count` tokens, at least one: `first`, followed by zeros."""
    made = [0] * count
    made[0] = first
    return made
