"""Games that TextWorld generates.

A game is generated when it is first asked for, and kept in a folder, since that takes seconds. There are `games`
different ones for training; held-out games have other seeds, and where the kind has a part for tests they are of that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, TypeVar

import anyio
import msgspec

from envs.textworld.game import GameOptions, TextGame
from envs.textworld.games import KINDS, GameOf, Turn, generate, walk
from envs.workers import in_worker
from flash.environment import HELD_OUT, Info, SolvedExample, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Observation
from flash.waiting import run_apart

_T = TypeVar("_T")

MOST_GAMES = 1_000_000

GENERATE_S = 300.0
"""Seconds for a game to be generated, by when it has been compiled on the slowest machine."""


class TextWorldOptions(GameOptions, frozen=True, kw_only=True):
    """Which games are played, and how.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    kind: Literal["coin_collector", "treasure_hunter", "simple", "cooking"] = "coin_collector"
    """What the quest is: to find a coin in a maze; to take the right object and not the wrong one, behind doors that
    may be locked; to bring food to the kitchen; or to cook a recipe."""
    level: int = 1
    """How difficult: from 1 to 300, 30, 3 and 4."""
    games: int = 100
    """Different games for training, and so many others for evaluation."""
    folder: str = "outputs/textworld"
    """Where generated games are kept."""

    def __post_init__(self) -> None:
        highest = KINDS[self.kind][0]
        if not 1 <= self.level <= highest:
            raise ConfigError(f"level must be from 1 to {highest} for {self.kind}, but is {self.level!r}")
        super().__post_init__()
        if not 1 <= self.games <= MOST_GAMES:
            raise ConfigError(f"games must be a whole number from 1 to {MOST_GAMES}, but is {self.games!r}")

    @property
    def place(self) -> str:
        """The folder, wherever processes work."""
        return os.path.abspath(self.folder)

    def game_of(self, seed: int) -> GameOf:
        """The game of a seed."""
        held_out = is_held_out(seed)
        number = held_out * HELD_OUT + (seed - held_out * HELD_OUT) % self.games
        return GameOf(self.kind, self.level, number, held_out)


class TextWorld(TextGame[TextWorldOptions]):
    """One game."""

    def __init__(self, options: TextWorldOptions) -> None:
        super().__init__(options)

    @classmethod
    def check(cls, options: TextWorldOptions) -> None:
        """Look whether the packages are there.

        Raises:
            ConfigError: one is missing.
        """
        for package in ("textworld", "jericho"):
            try:
                version(package)
            except PackageNotFoundError:
                how = "`make env` installs it where there is a C compiler, or pip install -e '.[environments]'"
                raise ConfigError(f"{package} is not installed: {how} in Flash's folder") from None

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the beginning of the game of this seed."""
        return await self._begin(await self._generated(self._options.game_of(seed))), {}

    async def _generated(self, game: GameOf) -> str:
        """The file of a game, once it is there."""
        return await _made(generate, game, self._options.place)

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training games, each by its own solution. Generates and plays them in a process of its own."""
        numbers = [(seed * count + index) % self._options.games for index in range(count)]
        walks = {number: self._walked(number) for number in sorted(set(numbers))}
        return [walks[number] for number in numbers]

    def alphabet(self) -> str:
        """Printable ASCII: games are written in English."""
        return "".join(map(chr, range(32, 127))) + "\n"

    def _walked(self, number: int) -> SolvedExample:
        turns = _walked(self._options.game_of(number), self._options.place)
        shown = [SolvedExample(self._text(one, first=not index), say) for index, (one, say) in enumerate(turns)]
        return msgspec.structs.replace(shown[0], later=tuple(shown[1:]))


@functools.cache
def _walked(game: GameOf, folder: str) -> list[Turn]:
    """Blocks while a process walks the game. Raises EnvError."""
    return run_apart(_made, walk, game, folder)


async def _made(make: Callable[[GameOf, str], _T], game: GameOf, folder: str) -> _T:
    """What a worker makes of a game. Raises EnvError."""
    try:
        return await in_worker(GENERATE_S, make, game, folder)
    except TimeoutError:
        raise EnvError(f"{game.name} was not generated within {GENERATE_S:g} s") from None
    except anyio.BrokenWorkerProcess:
        raise EnvError(f"the process that generates {game.name} died") from None
