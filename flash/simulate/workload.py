"""The simulated workload: how long prompts, responses and environments take, and what they earn.

Every quantity is a pure function of the run's seed and of the ids that name it, so that two runs of the same seed meet
the same samples, whatever order they are scheduled in and by which policy.

Three ids name things. A problem is named by its environment seed, which the members of a group share. A response is
named by its request's key (see `flash.rollout.episode.episode.response_key`). The life of an environment is named by
`env_key`: its problem, and how many environments were made for the problem before it.

Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from flash.config.simulate import SimulateConfig
from flash.config.spread import Spread, parse_spread, uniform
from flash.rollout.episode.episode import KEYS_PER_TASK

ENVS_PER_PROBLEM = 1 << 20
"""Environments of one problem that have names of their own."""
_TOKEN_IDS = (1 << 31) - 1
"""Token ids are below this: they travel as int32."""

_NORMAL = NormalDist()

# What a draw is for: two quantities of the same id must not share their random number.
_PROMPT, _RESPONSE, _TURNS, _OBSERVATION, _RESET, _ENV, _REWARD = range(7)
_SLOW, _STOP, _STOP_TURN, _CHANCE, _SUCCESS, _NAME, _ALIKE = range(7, 14)


def turn_of(key: int) -> int:
    """The turn of a response, from 0."""
    return key // 2 % KEYS_PER_TASK


def episode_of(key: int) -> int:
    """A number that the responses of one task share."""
    return key // (2 * KEYS_PER_TASK) * 2 + key % 2


def env_key(problem_seed: int, number: int) -> int:
    """The name of the `number`-th environment, from 0, that was made for a problem."""
    return problem_seed * ENVS_PER_PROBLEM + number


class Workload:
    """What every sample of a simulated run is like.

    `members` are the tasks of a group, redundant ones included: consecutive task ids that share a prompt.
    """

    def __init__(self, settings: SimulateConfig, run_seed: int, max_new_tokens: int, members: int = 1) -> None:
        self._seed = run_seed
        self._limit = max_new_tokens
        self._members = members
        self._alike = settings.length_correlation
        self._slow_share = settings.fail_slow
        self._slow_factor = settings.fail_slow_factor
        self._stop_share = settings.fail_stop
        self._prompt = parse_spread(settings.prompt_tokens)
        self._response = parse_spread(settings.response_tokens)
        self._observation = parse_spread(settings.observation_tokens)
        self._turns = parse_spread(settings.turns)
        self._reset = parse_spread(settings.reset_s)
        self._env = parse_spread(settings.env_s)
        self._reward = parse_spread(settings.reward_s)
        self._success = parse_spread(settings.success)

    def _draw(self, spread: Spread, what: int, *key: int) -> float:
        return spread.draw(uniform(self._seed, what, *key))

    # -- the policy --------------------------------------------------------------------------------------------------

    def prompt_tokens(self, problem_seed: int) -> int:
        """Length of a problem's first observation, at least 1."""
        return max(1, round(self._draw(self._prompt, _PROMPT, problem_seed)))

    def prompt(self, problem_seed: int) -> list[int]:
        """A problem's first observation as tokens. Its first one names the problem, by which an engine knows a prefix
        that it holds already."""
        return tokens(self.name(problem_seed), self.prompt_tokens(problem_seed))

    def name(self, problem_seed: int) -> int:
        """A token id that hardly any other problem has."""
        return int(uniform(self._seed, _NAME, problem_seed) * _TOKEN_IDS)

    def response_tokens(self, key: int) -> int:
        """Length of a response, between 1 and the limit of the run."""
        u = uniform(self._seed, _RESPONSE, key)
        if self._alike:
            # A Gaussian copula: what the members of a group share moves their lengths, and each length by itself
            # keeps the distribution of `response_tokens`.
            group = key // (2 * KEYS_PER_TASK) // self._members
            shared = _NORMAL.inv_cdf(uniform(self._seed, _ALIKE, group, key % 2))
            own = math.sqrt(1 - self._alike) * _NORMAL.inv_cdf(u)
            u = min(max(_NORMAL.cdf(math.sqrt(self._alike) * shared + own), 1e-12), 1 - 1e-12)
        return min(max(1, round(self._response.draw(u))), self._limit)

    def turns(self, problem_seed: int) -> int:
        """Responses of an episode, at least 1."""
        return max(1, round(self._draw(self._turns, _TURNS, problem_seed)))

    # -- the environment ---------------------------------------------------------------------------------------------

    def observation_tokens(self, task_key: int, turn: int) -> int:
        """Length of what the environment shows after its step of a turn, at least 1."""
        return max(1, round(self._draw(self._observation, _OBSERVATION, task_key, turn)))

    def reset_seconds(self, task_key: int) -> float:
        """How long the environment takes to start the problem."""
        return self._draw(self._reset, _RESET, task_key) * self._slowness(task_key)

    def env_seconds(self, task_key: int, turn: int) -> float:
        """How long the environment's step after a turn's response takes, without the reward."""
        return self._draw(self._env, _ENV, task_key, turn) * self._slowness(task_key)

    def reward_seconds(self, task_key: int) -> float:
        """How long the last step takes in addition, for the reward."""
        return self._draw(self._reward, _REWARD, task_key)

    def stop_turn(self, task_key: int, turns: int) -> int | None:
        """The turn whose step the environment never answers; None where it answers all."""
        if uniform(self._seed, _STOP, task_key) >= self._stop_share:
            return None
        return int(uniform(self._seed, _STOP_TURN, task_key) * turns)

    def reward(self, problem_seed: int, task_key: int) -> float:
        """1 with the problem's chance of success, else 0."""
        chance = self._draw(self._success, _CHANCE, problem_seed)
        return float(uniform(self._seed, _SUCCESS, task_key) < chance)

    def _slowness(self, task_key: int) -> float:
        return self._slow_factor if uniform(self._seed, _SLOW, task_key) < self._slow_share else 1.0


def tokens(first: int, count: int) -> list[int]:
    """`count` tokens, at least one, that begin with `first`."""
    made = [0] * count
    made[0] = first
    return made
