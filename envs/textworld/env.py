"""Environment over games that TextWorld generates.

A game is generated when it is first needed, which takes seconds, and then kept in a folder. Training uses `games`
different games. Held-out games are for evaluation only and have other seeds; if the kind has separate content for
tests, they use that. Worker processes generate and play the games: see `envs.workers`.
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
from flash.errors import ConfigError, EnvError, advice_for_extra
from flash.types import Observation
from flash.waiting import run_apart

_T = TypeVar("_T")

MOST_GAMES = 1_000_000
"""Largest value of the option `games`. It is far below `HELD_OUT`, so that no training number is a held-out one."""

GENERATE_S = 300.0
"""Seconds for a game to be generated. Compiling takes seconds; the limit is for slow and busy machines."""


class TextWorldOptions(GameOptions, frozen=True, kw_only=True):
    """Options that choose the games and how they are played.

    Raises:
        ConfigError: an option is wrong. The message names it, with the given value and the expected one.
    """

    kind: Literal["coin_collector", "treasure_hunter", "simple", "cooking"] = "coin_collector"
    """Kind of quest. `coin_collector`: find a coin in a maze. `treasure_hunter`: take the right object and not the
    wrong one, behind doors that may be locked. `simple`: bring food to the kitchen. `cooking`: cook a recipe."""
    level: int = 1
    """Difficulty, from 1 up to 300, 30, 3 and 4 for the four kinds."""
    games: int = 100
    """Number of different games for training. Evaluation has as many others."""
    folder: str = "outputs/textworld"
    """Folder in which generated games are kept."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        highest = KINDS[self.kind][0]
        if not 1 <= self.level <= highest:
            raise ConfigError(f"level must be from 1 to {highest} for {self.kind}, but is {self.level!r}")
        super().__post_init__()
        if not 1 <= self.games <= MOST_GAMES:
            raise ConfigError(f"games must be a whole number from 1 to {MOST_GAMES}, but is {self.games!r}")

    @property
    def place(self) -> str:
        """Absolute path of the folder, so that processes with another working directory find it."""
        return os.path.abspath(self.folder)

    def game_of(self, seed: int) -> GameOf:
        """Return the game of a seed: training seeds take the `games` numbers in turn, held-out seeds their own ones."""
        held_out = is_held_out(seed)
        first = HELD_OUT if held_out else 0
        return GameOf(self.kind, self.level, first + (seed - first) % self.games, held_out)


class TextWorld(TextGame[TextWorldOptions]):
    """Environment that plays one generated game in each episode. The rollout node makes one object for each episode."""

    def __init__(self, options: TextWorldOptions) -> None:
        super().__init__(options)

    @classmethod
    def check(cls, options: TextWorldOptions) -> None:
        """Check that the packages are installed; import none, because the import takes seconds.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: a package is missing.
        """
        for package in ("textworld", "jericho"):
            try:
                version(package)
            except PackageNotFoundError:
                raise ConfigError(
                    f"{package} is not installed, and needs a C compiler: {advice_for_extra('environments')}"
                ) from None

    @classmethod
    def held_out_problems(cls, options: TextWorldOptions) -> int:
        """Return the number of held-out games. An evaluation plays each of them once."""
        return options.games

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start the game of this seed and return its first observation. It is generated before, if it does not exist.

        Raises:
            EnvError: the game was not generated or did not start in time, or one of the two raised an error.
        """
        return await self._begin(await self._generated(self._options.game_of(seed))), {}

    async def _generated(self, game: GameOf) -> str:
        """Return the path of a game's file, which is generated if it does not exist. Tests override this method.

        Raises:
            EnvError: the game was not generated in time, generating it raised an error, or the worker died.
        """
        return await _make_in_worker(generate, game, self._options.place)

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` training games, each with the commands of its own solution, to teach a small model to play.

        Another process generates and plays the games; this call blocks meanwhile. Raises EnvError if that fails.
        """
        # Consecutive games, other ones for each `seed`. With few games they repeat, and each is played once.
        numbers = [(seed * count + index) % self._options.games for index in range(count)]
        examples = {number: self._example(number) for number in sorted(set(numbers))}
        return [examples[number] for number in numbers]

    def alphabet(self) -> str:
        """Return the characters that a game can show: printable ASCII, since games are written in English.

        They become a tiny model's vocabulary.
        """
        return "".join(map(chr, range(32, 127))) + "\n"

    def _example(self, number: int) -> SolvedExample:
        """Return training game `number` as one example: its first turn, with all later turns in `later`."""
        turns = _solution_turns(self._options.game_of(number), self._options.place)
        shown = [SolvedExample(self._text(one, first=not index), say) for index, (one, say) in enumerate(turns)]
        return msgspec.structs.replace(shown[0], later=tuple(shown[1:]))


@functools.cache
def _solution_turns(game: GameOf, folder: str) -> list[Turn]:
    """Return the turns of a game's solution. Blocks while another process plays it. Raises EnvError if that fails.

    Each turn is kept for the next batch of examples, because playing a game takes seconds.
    """
    return run_apart(_make_in_worker, walk, game, folder)


async def _make_in_worker(make: Callable[[GameOf, str], _T], game: GameOf, folder: str) -> _T:
    """Call `make`, which is `generate` or `walk`, in a worker process and return its result.

    Raises:
        EnvError: the game was not generated in time, `make` raised an error, or the worker process died.
    """
    try:
        return await in_worker(GENERATE_S, make, game, folder)
    except TimeoutError:
        raise EnvError(f"{game.name} was not generated within {GENERATE_S:g} s") from None
    except anyio.BrokenWorkerProcess:
        raise EnvError(f"the process that generates {game.name} died") from None
