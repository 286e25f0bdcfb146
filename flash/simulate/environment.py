"""SimEnvironment and SimTokenizer: a simulated environment, and the tokenizer of its observations.

`flash.simulate.world` gives both to the real nodes of a simulated run. Times and lengths come from the `Workload`.
An observation is a text `<first token> × <count>`, which is cheap to render: it gives only the first token and the
length. Responses decode to the empty text, since a simulated environment does not read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import anyio

from flash.environment.interface import Info, StepResult
from flash.errors import EnvError
from flash.rollout.episode.tokenizer import Tokenizer
from flash.simulate.workload import Workload, env_key, tokens
from flash.types import Observation, Tool


class SimTokenizer(Tokenizer):
    """A tokenizer that renders the observations of `SimEnvironment`."""

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of an observation, as many as its text gives."""
        if not isinstance(observation, str):
            raise EnvError("simulated environments show text")
        first, _, count = observation.partition(" × ")
        return tokens(int(first), int(count))

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a later observation. Nothing is added for the end of the turn before it."""
        return self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return no text, since no one reads a simulated response."""
        return ""


class SimEnvironment:
    """A simulated environment of one episode. The node calls `reset` once, then `step` for each response.

    The environment's behaviour depends on its problem and on the number of environments of this problem that were reset
    before. `env_counts` counts them, and all nodes of the simulation share it. If the members of a group start in
    order, this number is the index of the member. A sample that is retried gets an environment with another behaviour.
    """

    def __init__(self, workload: Workload, env_counts: Counter[int]) -> None:
        self._workload = workload
        self._env_counts = env_counts
        """Number of environments that were reset before, by the seed of their problem."""
        self._turn = 0
        """Number of the next turn, counted from 0. `reset` sets all other attributes: the seed of the problem, the key
        by which the workload draws times, the number of turns, and the turn in which the environment stops."""

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the first observation of the problem with this seed, after the time of a reset."""
        self._seed = seed
        self._key = env_key(seed, self._env_counts[seed])
        self._env_counts[seed] += 1
        self._turns = self._workload.turns(seed)
        self._stop_turn = self._workload.stop_turn(self._key, self._turns)
        await _sleep(self._workload.reset_seconds(self._key))
        return f"{self._workload.problem_token(seed)} × {self._workload.prompt_tokens(seed)}", {}

    async def step(self, action: str) -> StepResult:
        """Take the time of a step, and return an observation, or after the last turn the reward.

        A `StepResult` is (observation, reward, terminated, truncated, info), as in gymnasium. The last step also takes
        the time of the reward. An environment that stops in this turn never returns, until the node cancels it.
        `action` is empty, since simulated responses have no text.
        """
        turn, self._turn = self._turn, self._turn + 1
        last = self._turn == self._turns
        if turn == self._stop_turn:
            await anyio.sleep_forever()
        seconds = self._workload.env_seconds(self._key, turn)
        await _sleep(seconds + (self._workload.reward_seconds(self._key) if last else 0.0))
        if last:
            return "", self._workload.reward(self._seed, self._key), True, False, {}
        return f"0 × {self._workload.observation_tokens(self._key, turn)}", 0.0, False, False, {}

    async def close(self) -> None:
        """Do nothing: the environment holds no resources."""


async def _sleep(seconds: float) -> None:
    """Sleep for `seconds`; do not yield to the event loop if that is 0, which makes large simulations faster."""
    if seconds > 0:
        await anyio.sleep(seconds)
