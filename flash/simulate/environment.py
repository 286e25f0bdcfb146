"""Simulated environments and the tokenizer that goes with them.

Observations are texts that only say how long they are, `<first token> × <count>`, so that rendering them costs
nothing; responses decode to nothing, since nobody reads them.
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
    """Renders the observations of `SimEnvironment`."""

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """As many tokens as the text says."""
        if not isinstance(observation, str):
            raise EnvError("simulated environments show text")
        first, _, count = observation.partition(" × ")
        return tokens(int(first), int(count))

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """The same; the turn's end adds nothing."""
        return self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        """No text: nobody reads a simulated response."""
        return ""


class SimEnvironment:
    """One environment of the workload.

    Its behaviour is named by its problem and by how many environments of this problem were reset before, which `made`
    counts: with the members of a group started in order this is the member's index, and a retried sample meets another
    environment.
    """

    def __init__(self, workload: Workload, made: Counter[int]) -> None:
        self._workload = workload
        self._made = made
        self._turn = 0

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the problem, after the time it takes."""
        self._seed = seed
        self._key = env_key(seed, self._made[seed])
        self._made[seed] += 1
        self._turns = self._workload.turns(seed)
        self._stop = self._workload.stop_turn(self._key, self._turns)
        await _pass(self._workload.reset_seconds(self._key))
        return f"{self._workload.name(seed)} × {self._workload.prompt_tokens(seed)}", {}

    async def step(self, action: str) -> StepResult:
        """Take the time of a step. The last one scores the episode and takes the reward's time too."""
        turn, self._turn = self._turn, self._turn + 1
        last = self._turn == self._turns
        if turn == self._stop:
            await anyio.sleep_forever()
        seconds = self._workload.env_seconds(self._key, turn)
        await _pass(seconds + (self._workload.reward_seconds(self._key) if last else 0.0))
        if last:
            return "", self._workload.reward(self._seed, self._key), True, False, {}
        return f"0 × {self._workload.observation_tokens(self._key, turn)}", 0.0, False, False, {}

    async def close(self) -> None:
        """Takes no time, and there is nothing to release."""


async def _pass(seconds: float) -> None:
    """Let time pass, if any is to pass."""
    if seconds > 0:
        await anyio.sleep(seconds)
