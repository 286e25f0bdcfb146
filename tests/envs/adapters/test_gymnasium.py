"""Environments of the real Gymnasium: one that takes numbers and draws itself, and one in text."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete, Text

from envs.adapters.gymnasium import Gymnasium, GymnasiumOptions
from flash.environment import SyncEnvironment, wrap
from flash.errors import ConfigError

LAKE = GymnasiumOptions(
    id="FrozenLake-v1",
    kwargs={"render_mode": "ansi", "is_slippery": False},
    actions=["left", "down", "right", "up"],
    instructions="Go to G.\n",
)


class Parrot(gymnasium.Env[str, str]):
    """Wants to hear its seed."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}
    observation_space = Text(100)
    action_space = Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = str(seed)
        return f"say {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == self.word), True, False, {}


gymnasium.register("Parrot-v0", Parrot)


class Die(gymnasium.Env[str, np.int64]):
    """Wants the number 2; its numbers begin with 1."""

    observation_space = Text(100)
    action_space = Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: np.int64) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == 2), True, False, {}


gymnasium.register("Die-v0", Die)


def test_numbers_of_actions_may_begin_above_0() -> None:
    options = GymnasiumOptions(id="Die-v0", actions=["one", "Two", "three"])
    Gymnasium.check(options)
    env = Gymnasium(options)
    env.reset(1)
    assert env.step("two")[1] == 1.0


@pytest.mark.anyio
async def test_named_actions_play_what_draws_itself() -> None:
    Gymnasium.check(LAKE)
    env = Gymnasium(LAKE)
    assert isinstance(env, SyncEnvironment)
    playing = wrap(env)
    first, _ = await playing.reset(1)
    assert isinstance(first, str)
    assert first.startswith("Go to G.\n")
    assert "FHFH" in first
    assert await playing.step("no idea") == (env._shown, 0.0, False, False, {"metrics": {"unreadable": 1.0}})
    for move in ("down", "I go **Down**.", "right", "right", "down"):
        _, reward, over, *_ = await playing.step(move)
        assert (reward, over) == (0.0, False)
    shown, reward, over, truncated, _ = await playing.step("right")
    assert isinstance(shown, str)
    assert (reward, over, truncated) == (1.0, True, False)
    await playing.close()


@pytest.mark.anyio
async def test_text_is_taken_as_it_is() -> None:
    options = GymnasiumOptions(id="Parrot-v0")
    Gymnasium.check(options)
    env = wrap(Gymnasium(options))
    assert await env.reset(7) == ("say 7", {})
    assert (await env.step("7"))[1:3] == (1.0, True)
    await env.reset(8)
    assert (await env.step(" 8"))[1] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "NoSuchLake-v1"}, "cannot be made"),
        ({"id": "FrozenLake-v1", "kwargs": {"nonsense": 1}}, "cannot be made"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b", "c", "d"]}, "shows no text"),
        ({"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}, "actions": ["a"]}, "takes Discrete"),
        ({"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}, "actions": ["a"] * 4}, "takes Discrete"),
        ({"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}, "actions": [*"abcA"]}, "takes Discrete"),
        ({"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}, "actions": [*"abcdA"]}, "takes Discrete"),
        ({"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}, "actions": ["a b", *"cde"]}, "is 'a b'"),
        ({"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}, "actions": ["a.", *"cde"]}, r"is 'a\.'"),
        ({"id": "Parrot-v0", "actions": ["a"]}, "takes Text"),
    ],
)
def test_what_cannot_be_played_in_text_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gymnasium.check(GymnasiumOptions(**options))
