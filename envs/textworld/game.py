"""One game of TextWorld, a command each turn."""

from __future__ import annotations

import itertools
from typing import Generic, Literal, TypeVar

import msgspec

from envs.textworld.games import ShownGame
from envs.textworld.player import Player, open_player
from flash.environment import StepResult, shared
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

RULES = (
    "You play a text adventure. Each turn you are told what you see; the last line of your answer is your command.\n\n"
)

MOST_MOVES = 1000

COMMAND_LENGTH = 100
"""Characters of a command; no game knows a longer one."""

PLAYER = "envs.textworld"
"""What the episodes of a node share their process under."""

_episodes = itertools.count()


class GameOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How games are played.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    admissible: bool = True
    """Whether the commands that do something are shown each turn."""
    reward: Literal["progress", "end"] = "progress"
    """`progress`: each step earns what it adds to the score, of 1 in all; `end`: only a game that is won earns 1."""
    max_moves: int = 50
    """Commands after which the game is over."""
    template: Literal["chat", "plain"] = "chat"
    """`chat`: messages, the first of which says what to do; `plain`: text with a prompt, for tiny and base models."""
    timeout: float = 30.0
    """Seconds for a game to answer a command."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_moves <= MOST_MOVES:
            raise ConfigError(f"max_moves must be a whole number from 1 to {MOST_MOVES}, but is {self.max_moves!r}")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")


_Options = TypeVar("_Options", bound=GameOptions)


class TextGame(Generic[_Options]):
    """One game. `reset` gives the file of it to `_begin`."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._episode = next(_episodes)
        self._file = ""
        self._commands: list[str] = []
        self._score = 0.0

    @classmethod
    async def prepare(cls, options: _Options) -> None:
        """Start the process that plays, which takes its time.

        Raises:
            EnvError: it does not load TextWorld.
        """
        await (await shared(PLAYER, open_player)).load()

    async def _begin(self, file: str) -> Observation:
        self._file, self._commands = file, []
        shown = await self._play()
        self._score = shown.score
        return self._show(shown, first=True)

    async def step(self, action: str) -> StepResult:
        """Give a command."""
        if not self._file:
            raise EnvError("step() was called before reset() or after the end")
        self._commands.append(command_of(action))
        shown = await self._play()
        gained, self._score = shown.score - self._score, shown.score
        reward = gained if self._options.reward == "progress" else float(shown.won)
        if shown.won or shown.lost or len(self._commands) == self._options.max_moves:
            self._file = ""
            moves = float(len(self._commands))
            return "", reward, True, False, {"metrics": {"won": float(shown.won), "moves": moves}}
        return self._show(shown, first=False), reward, False, False, {}

    async def close(self) -> None:
        """Nothing to release: the player closes games that are not played any more."""

    async def _play(self) -> ShownGame:
        player: Player = await shared(PLAYER, open_player)
        return await player.play(self._episode, self._file, self._commands, self._options.timeout)

    def _show(self, shown: ShownGame, *, first: bool) -> Observation:
        text = self._text(shown, first=first)
        return text if self._options.template == "plain" else [Message("user", text)]

    def _text(self, shown: ShownGame, *, first: bool) -> str:
        commands = f"\n\nCommands: {', '.join(shown.commands)}" if self._options.admissible else ""
        if self._options.template == "plain":
            return f"{'' if first else chr(10)}{shown.text}{commands}\n> "
        return f"{RULES if first else ''}{shown.text}{commands}"


def command_of(action: str) -> str:
    """The command that an answer ends with, without backslashes: the games' interpreter takes those for orders of its
    own, and never returns from ones that it does not know."""
    return action.replace("\\", "").strip().rpartition("\n")[2].strip().lstrip(">").strip()[:COMMAND_LENGTH]
