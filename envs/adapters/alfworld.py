"""ALFWorld: household tasks as text games, one command per turn. `alfworld-download` provides the game files.

`envs.textworld.game` plays the games in worker processes. Training and evaluation use different games.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import anyio.to_thread
import msgspec

from envs.data.split import KEPT, Split
from envs.textworld.game import GameOptions, TextGame
from envs.textworld.games import PDDL
from flash.environment import Info, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Observation

LEFT_OUT = re.compile("movable|Sliced")
"""Pattern in the names of tasks that ALFWorld does not play as text."""


class AlfworldOptions(GameOptions, frozen=True, kw_only=True):
    """Selection of the games."""

    folder: str = os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")
    """Folder with the data of ALFWorld; it must contain `json_2.1.1`."""
    held_out: Literal["valid_seen", "valid_unseen"] = "valid_unseen"
    """Games for evaluation: `valid_seen` uses rooms of the training games, `valid_unseen` other rooms."""


class _File(NamedTuple):
    """A game file as a row of `envs.data.split`."""

    prompt: str
    """Absolute path of the game file, so that worker processes find it. `Split` tells rows apart by this field."""


class _Game(msgspec.Struct):
    """The field of a game file that is read here."""

    solvable: bool = False
    """True if ALFWorld has found a solution of the task."""


class Alfworld(TextGame[AlfworldOptions]):
    """Environment that plays one game of ALFWorld in each episode.

    The rollout node makes one object for each episode.
    """

    # The run reads the class of the options from this annotation.
    def __init__(self, options: AlfworldOptions) -> None:
        super().__init__(options)

    @classmethod
    def check(cls, options: AlfworldOptions, find: Callable[[str], object] = importlib.util.find_spec) -> None:
        """Refuse options with which no episode can start: the files or the packages are missing.

        Called when the configuration is read, so it reads no game. `find` returns None for a package that is not
        installed; only tests replace it.

        Raises:
            ConfigError: a package or the game files are missing.
        """
        for package in ("textworld", "fast_downward"):
            if find(package) is None:
                how = "`pip install 'textworld[pddl]'` installs it where there is a C compiler"
                raise ConfigError(f"{package} is not installed: {how}")
        _games(options)  # raises ConfigError if a side has no games

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start this seed's game, and return its first observation with the task; the info has the game's folder.

        Raises:
            ConfigError: a side has no games.
            EnvError: no game of the side can be solved, or the game did not start in time.
        """
        file = await anyio.to_thread.run_sync(_game_of, self._options, seed, abandon_on_cancel=True)
        return await self._begin(file), {"game": Path(file).parts[-3]}


@functools.lru_cache(maxsize=KEPT)
def _games(options: AlfworldOptions) -> Split[_File]:
    """Find the files of the training and the held-out games, in the order of their paths, and read none.

    Raises:
        ConfigError: a side has no games.
    """
    sides: list[list[_File]] = []
    for side in ("train", options.held_out):
        folder = Path(options.folder).expanduser() / "json_2.1.1" / side
        files = [file for file in sorted(folder.glob(f"*/*/game{PDDL}")) if not LEFT_OUT.search(file.parts[-3])]
        if not files:
            raise ConfigError(
                f"there are no games of ALFWorld in {folder}: expected */*/game{PDDL}, as the command "
                "`alfworld-download` of the package alfworld leaves them; say where in `folder`, or in ALFWORLD_DATA"
            )
        sides.append([_File(os.path.abspath(file)) for file in files])
    return Split(*sides)


def _game_of(options: AlfworldOptions, seed: int) -> str:
    """Return the path of the seed's game, or of the next game of the same side that can be solved.

    The games follow each other in the order of their paths, and the first one follows the last. So two seeds of one
    epoch share the game after an unsolvable one, also in evaluations.

    Raises:
        ConfigError: the games cannot be found any more.
        EnvError: no game of the side can be solved.
    """
    games = _games(options)
    side, place = (games.held_out if is_held_out(seed) else games.train), games.place(seed)
    for file in (row.prompt for row in side[place:] + side[:place]):
        if msgspec.json.decode(Path(file).read_bytes(), type=_Game).solvable:
            return file
    raise EnvError(
        f"none of the {len(side)} games of ALFWorld in {Path(side[0].prompt).parents[2]} can be solved; run "
        "`alfworld-download` of the package alfworld again"
    )
