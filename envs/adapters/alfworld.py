"""Games of ALFWorld: a task in a household, a command each turn, from the files that its own command downloads."""

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

from envs.data.split import Split
from envs.textworld.game import GameOptions, TextGame
from envs.textworld.games import PDDL
from flash.environment import Info
from flash.errors import ConfigError, EnvError
from flash.types import Observation

LEFT_OUT = re.compile("movable|Sliced")
"""In the names of tasks that ALFWorld does not play as text."""


class AlfworldOptions(GameOptions, frozen=True, kw_only=True):
    """Which games."""

    folder: str = os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")
    """Has `json_2.1.1`."""
    held_out: Literal["valid_seen", "valid_unseen"] = "valid_unseen"
    """The games for evaluation: in rooms of training, or in others."""


class _File(NamedTuple):
    prompt: str
    """Its path."""


class _Game(msgspec.Struct):
    solvable: bool = False


class Alfworld(TextGame[AlfworldOptions]):
    """One game."""

    def __init__(self, options: AlfworldOptions) -> None:
        super().__init__(options)

    @classmethod
    def check(cls, options: AlfworldOptions, find: Callable[[str], object] = importlib.util.find_spec) -> None:
        """Look whether the files and the packages are there; `find` finds no package of None.

        Raises:
            ConfigError: they are not.
        """
        for package in ("textworld", "fast_downward"):
            if find(package) is None:
                how = "pip install -e '.[environments]' 'textworld[pddl]' in Flash's folder"
                raise ConfigError(f"{package} is not installed: {how}")
        _games(options)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the room and the task of this seed's game."""
        file = await anyio.to_thread.run_sync(_game_of, self._options, seed, abandon_on_cancel=True)
        return await self._begin(file), {"game": Path(file).parts[-3]}


@functools.lru_cache(maxsize=4)
def _games(options: AlfworldOptions) -> Split[_File]:
    """Both sides. Raises ConfigError."""
    sides: list[list[_File]] = []
    for side in ("train", options.held_out):
        place = Path(options.folder).expanduser() / "json_2.1.1" / side
        files = [file for file in sorted(place.glob(f"*/*/game{PDDL}")) if not LEFT_OUT.search(file.parts[-3])]
        if not files:
            raise ConfigError(
                f"there are no games of ALFWorld in {place}: expected */*/game{PDDL}, as the command "
                "`alfworld-download` of the package alfworld leaves them; say where in `folder`, or in ALFWORLD_DATA"
            )
        sides.append([_File(os.path.abspath(file)) for file in files])
    return Split(*sides)


def _game_of(options: AlfworldOptions, seed: int) -> str:
    """The seed's game, or the next one that can be solved."""
    games = _games(options)
    for place in range(seed, seed + len(games.train) + len(games.held_out)):
        file = games.of_seed(place).prompt
        if msgspec.json.decode(Path(file).read_bytes(), type=_Game).solvable:
            return file
    raise EnvError(f"no game of ALFWorld in {options.folder} can be solved")
