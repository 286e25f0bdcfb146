"""The agent of examples/agent_frozen_lake.toml plays as the environment does, with the official client."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path
from typing import Any

import anyio
import pytest

from envs.agent import Agent, AgentOptions
from envs.frozen_lake import FrozenLake, FrozenLakeOptions
from flash.config.objects import load_object
from flash.environment import HELD_OUT
from flash.rollout.engine import ResponseRequest
from flash.types import Trajectory
from tests.envs.agents import END, Policy, play
from tests.envs.test_frozen_lake import lake

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG: dict[str, Any] = tomllib.loads((EXAMPLES / "agent_frozen_lake.toml").read_text())


class Player:
    """Sees the last map of a prompt, goes the best way, and sometimes any other."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def move(self, shown: str) -> str:
        board = re.findall(r"(?:[.OGP]{4}\n){4}", shown)[-1]
        return self._chance.choice("UDLR") if self._chance.random() < 0.3 else lake(board).best()

    def say(self, request: ResponseRequest) -> list[int]:
        shown = bytes(token for token in request.prompt if token < 256).decode()
        return [*self.move(shown).encode(), END]


async def played_directly(seed: int) -> tuple[float, str]:
    env, player, said = FrozenLake(FrozenLakeOptions(**CONFIG["env"]["options"]["tasks"]["options"])), Player(seed), ""
    shown, over, reward = (await env.reset(seed))[0], False, 0.0
    while not over:
        assert isinstance(shown, str)
        said += player.move(shown)
        shown, reward, over, *_ = await env.step(said[-1])
    return reward, said


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of the example, whose import takes a while."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return load_object("agent_frozen_lake:CLIENT")


@pytest.mark.anyio
@pytest.mark.integration
async def test_an_agent_that_walks_by_itself_earns_what_the_game_gives(client: Any) -> None:
    rewards: list[float] = []
    async with client:
        for seed in [*range(8), HELD_OUT]:
            agent = Agent(AgentOptions(**CONFIG["env"]["options"]))
            with anyio.fail_after(60):
                played = await play(agent, Policy(Player(seed).say, seconds=0.0), seed, in_process=False, max_turns=64)
            assert isinstance(played, Trajectory), played
            said = "".join(turn.action for turn in played.turns)
            assert (played.reward, said) == await played_directly(seed)
            rewards.append(played.reward)
    assert 0 < sum(rewards) < len(rewards)


def test_both_examples_train_the_same_model_on_the_same_lakes() -> None:
    direct: dict[str, Any] = tomllib.loads((EXAMPLES / "frozen_lake.toml").read_text())
    tasks = CONFIG["env"]["options"]["tasks"]
    assert tasks["options"] == direct["env"]["options"]
    same = direct.keys() - {"run", "env"}
    assert {name: CONFIG[name] for name in same} == {name: direct[name] for name in same}
