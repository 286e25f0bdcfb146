"""GEM's environments in worker processes, whose random numbers they may seed as they like."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from envs.adapters.gem import Gem, GemOptions
from flash.environment import HELD_OUT, Environment
from flash.errors import ConfigError, EnvError

pytestmark = [pytest.mark.integration, pytest.mark.anyio]

OPTIONS = GemOptions(id="game:Guess-v0", kwargs={"most": 1000})


@pytest.fixture(autouse=True)
def gem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, for worker processes that start from here."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fakes"))


async def numbers(env: Gem, seed: int) -> list[str]:
    assert await env.reset(seed) == ("from 0 to 999\nGuess.\n", {})
    return [(await env.step("?"))[0] for _ in range(3)]


async def test_what_chance_decides_follows_from_the_seed_whatever_else_is_played() -> None:
    Gem.check(OPTIONS)
    await Gem.prepare(OPTIONS)
    before = random.getstate()
    env, other = Gem(OPTIONS), Gem(OPTIONS)
    assert isinstance(env, Environment)
    first = await numbers(env, 5)
    assert await numbers(other, HELD_OUT + 5) != first
    assert await numbers(other, 5) == first
    assert len(set(first)) == 3
    drawn = first[0].removeprefix("it was ").partition("\n")[0]
    await env.reset(5)
    assert await env.step(drawn) == (first[0], 1.0, False, False, {})
    last = await env.step("end")
    assert last == (first[1].partition("\n")[0] + "\n", 0.0, True, False, {})
    await env.close()
    assert random.getstate() == before


async def test_a_process_that_dies_is_an_environment_error() -> None:
    env = Gem(OPTIONS)
    await env.reset(5)
    with pytest.raises(EnvError, match="the process of game:Guess-v0 died"):
        await env.step("crash")
    assert await numbers(Gem(OPTIONS), 5)


async def test_an_environment_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no 'game:Chess-v0', only game:Guess-v0"):
        await Gem.prepare(GemOptions(id="game:Chess-v0"))


async def test_an_environment_whose_own_packages_are_missing_is_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"game:Crosswords-v0 cannot be played: .*No module named 'pandas'"):
        await Gem.prepare(GemOptions(id="game:Crosswords-v0"))


async def test_arguments_that_an_environment_does_not_take_are_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"game:Guess-v0 cannot be played: .*least"):
        await Gem.prepare(GemOptions(id="game:Guess-v0", kwargs={"least": 1}))
