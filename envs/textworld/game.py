"""TextGame: an environment that plays one game of TextWorld, with one command in each turn.

`envs.textworld.env` plays generated games with it, and `envs.adapters.alfworld` plays the games of ALFWorld. The games
run in worker processes (`envs.textworld.games`). An episode only keeps its commands so far and sends all of them with
each turn, so that any worker can continue its game.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Generic, Literal, TypeVar

import anyio
import msgspec

from envs.textworld import games
from envs.textworld.games import ShownGame
from envs.workers import in_worker
from flash.environment import StepResult
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

RULES = (
    "You play a text adventure. Each turn you are told what you see; the last line of your answer is your command.\n\n"
)
"""Instructions of the first observation, with `template = "chat"`."""

MOST_MOVES = 1000
"""Largest value of `max_moves`: each turn sends all earlier commands to a worker."""

COMMAND_LENGTH = 100
"""Largest number of characters of a command; the rest is cut off. No game has a longer command."""

LOAD_S = 180.0
"""Seconds for a worker to load TextWorld. Loading takes about one second on an idle core, and more on a busy one."""

_episodes = itertools.count()
"""Source of the numbers by which workers recognize the episodes of this process and their open games."""


class GameOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for playing games.

    Raises:
        ConfigError: an option is wrong. The message names it, with the given value and the expected one.
    """

    admissible: bool = True
    """Show, in each turn, the commands that have an effect."""
    reward: Literal["progress", "end"] = "progress"
    """Reward scheme. `progress`: each step earns the increase of the score, 1 in total. `end`: winning the game earns
    1, and nothing else earns a reward."""
    max_moves: int = 50
    """Number of commands after which the game ends."""
    template: Literal["chat", "plain"] = "chat"
    """Form of observations. `chat`: messages, of which the first explains the task. `plain`: text with a prompt, for
    tiny and base models."""
    timeout: float = 30.0
    """Seconds for a game to answer a command."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not 1 <= self.max_moves <= MOST_MOVES:
            raise ConfigError(f"max_moves must be a whole number from 1 to {MOST_MOVES}, but is {self.max_moves!r}")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")


async def play_in_worker(episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
    """Return the state of a game after these commands, which a worker plays.

    `episode` is the number of the episode, and `file` is the path of the game. The deadline of `timeout` seconds counts
    from the moment when a worker is free and has loaded TextWorld.

    Raises:
        EnvError: the game did not answer in time or raised an error, its worker died, or did not load TextWorld.
    """
    last = repr(commands[-1]) if commands else "its start"
    try:
        return await in_worker(LOAD_S + timeout, games.play, episode, file, commands, timeout)
    except anyio.BrokenWorkerProcess:
        raise EnvError(f"the game did not answer {last} within {timeout:g} s, or its process died over it") from None
    except TimeoutError:
        raise EnvError(f"no worker loaded TextWorld within {LOAD_S:g} s: is the machine overloaded?") from None


_Options = TypeVar("_Options", bound=GameOptions)


class TextGame(Generic[_Options]):
    """Environment of one game in each episode.

    The `reset` of a subclass chooses the game and passes its file to `_begin`.
    """

    player: ClassVar[Callable[[int, str, Sequence[str], float], Awaitable[ShownGame]]] = staticmethod(play_in_worker)
    """Function that plays the commands: `play_in_worker`, or a fake of a test."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._episode = next(_episodes)
        """Number by which workers recognize the episode."""
        self._file = ""
        """Path of the game's file; empty before `reset` and after the end."""
        self._commands: list[str] = []
        """Commands of the episode so far."""
        self._score = 0.0
        """Score after the last turn, from which the next turn's reward is computed."""

    @classmethod
    async def prepare(cls, options: _Options) -> None:
        """Load TextWorld in a worker before the first episode, because loading takes long.

        Each node calls this once, before its engines start.

        Raises:
            EnvError: TextWorld cannot be loaded.
        """
        try:
            await in_worker(LOAD_S, games.load_library)
        except (TimeoutError, anyio.BrokenWorkerProcess) as error:
            raise EnvError(f"no worker loads TextWorld: {type(error).__name__} {error}") from None

    async def _begin(self, file: str) -> Observation:
        """Start the game of a file and return its first observation. Raises EnvError if the game does not start."""
        self._file, self._commands = file, []
        shown = await self._play()
        self._score = shown.score
        return self._show(shown, first=True)

    async def step(self, action: str) -> StepResult:
        """Give the last line of the answer to the game as a command, and return the new state and its reward.

        The episode ends when the game is won or lost, or after `max_moves` commands. Returns (observation, reward,
        terminated, truncated, info).

        Raises:
            EnvError: the game did not answer, `reset` was not called before, or the episode has ended.
        """
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
        """Do nothing: workers close games that are no longer played."""

    async def _play(self) -> ShownGame:
        """Return the state of the game after all commands so far. Raises EnvError if the game does not answer."""
        return await type(self).player(self._episode, self._file, self._commands, self._options.timeout)

    def _show(self, shown: ShownGame, *, first: bool) -> Observation:
        """Return a state as an observation, in the form of the option `template`."""
        text = self._text(shown, first=first)
        return text if self._options.template == "plain" else [Message("user", text)]

    def _text(self, shown: ShownGame, *, first: bool) -> str:
        """Return the text of a state: with the rules before the first one in a chat, and with the possible commands."""
        commands = f"\n\nCommands: {', '.join(shown.commands)}" if self._options.admissible else ""
        if self._options.template == "plain":
            return f"{'' if first else chr(10)}{shown.text}{commands}\n> "
        return f"{RULES if first else ''}{shown.text}{commands}"


def command_of(action: str) -> str:
    """Return the command in the last line of an answer: at most `COMMAND_LENGTH` characters, without a leading `>`.

    Backslashes are removed: the games' interpreter takes them for its own commands, and hangs on unknown ones.
    """
    return action.replace("\\", "").strip().rpartition("\n")[2].strip().lstrip(">").strip()[:COMMAND_LENGTH]
