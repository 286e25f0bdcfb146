"""Environments of the workloads."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from benchmarks.workloads.environments import RemoteOptions, RemoteTextWorld, _instances
from envs.textworld.games import GameOf, ShownGame
from flash.config.objects import check_options
from flash.config.simulate import Lognormal
from flash.environment import HELD_OUT
from flash.errors import ConfigError


class At(RemoteTextWorld):
    """A game that is there and over with the first command."""

    async def _generated(self, game: GameOf) -> str:
        return game.name

    @staticmethod
    async def player(episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
        return ShownGame(file, [], [], 0.0, False, bool(commands))


class Longer(At):
    """A game that is over with the second command."""

    @staticmethod
    async def player(episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
        return ShownGame(file, [], [], 0.0, False, len(commands) > 1)


async def late(*seeds: int) -> list[float]:
    """How late two answers of each of these episodes are, in a process of their own."""
    _instances.clear()
    found: list[float] = []
    for seed in seeds:
        env = Longer(RemoteOptions(latency=Lognormal(mean=1, deviation=1), template="plain"))
        await env.reset(seed)
        for _ in range(2):
            begun = anyio.current_time()
            await env.step("")
            found.append(round(anyio.current_time() - begun, 6))
    return found


@pytest.mark.virtual
@pytest.mark.anyio
async def test_delays_follow_from_the_seed_the_instance_and_the_turn() -> None:
    delays = await late(3, 3, 4)
    assert len(set(delays)) == 6
    assert min(delays) > 0
    assert await late(3, 4, 3) == [*delays[:2], *delays[4:], *delays[2:4]]
    assert await late(HELD_OUT + 3) == [0, 0]


@pytest.mark.virtual
@pytest.mark.anyio
async def test_an_answer_is_waited_for_and_the_beginning_is_not() -> None:
    env = At(RemoteOptions(latency=7, template="plain"))
    begun = anyio.current_time()
    await env.reset(3)
    assert anyio.current_time() == begun
    assert (await env.step("look"))[2]
    assert anyio.current_time() == begun + 7


def test_a_delay_that_is_no_distribution_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'`env.options.latency`: expected a number, .*, got "soon"'):
        check_options(RemoteTextWorld, {"latency": "soon"}, "env.options")
