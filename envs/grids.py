"""Games on a square map, one move a turn: what `envs.frozen_lake` and `envs.sokoban` have in common.

The map is shown before every move, so that each turn stands for itself. A move is the last word of an answer: a letter
of `UDLR`, or up, down, left or right. Anything else is a move that changes nothing. A game that is won earns 1, any
other 0; it is lost when nothing can be won any more, or when its moves are used up.

Maps are divided by what never changes in a game, the ground: no map of a held-out game, at whatever move, is ever met
in training.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from typing import ClassVar, Final, Literal, Protocol

import msgspec

from envs.generated import in_held_out_part
from flash.environment import Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

MOVES: Final[dict[str, tuple[int, int]]] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Rows and columns that a move goes down and to the right."""

WORDS: Final = {"up": "U", "down": "D", "left": "L", "right": "R"} | {letter.lower(): letter for letter in MOVES}

MOST_MOVES = 1000
"""Of one game."""

MOST_DRAWS = 2000
"""Grounds drawn for one problem: about one in ten is held out, and few of the rest fit no options at all."""

Template = Literal["plain", "chat"]
"""`plain`: the bare map, for tiny and base models; `chat`: messages, the first of which says the rules."""


class Board(Protocol):
    """A map at one moment of a game. It is never changed: a move makes another one."""

    @property
    def ground(self) -> str:
        """What no move changes."""
        ...

    @property
    def won(self) -> bool:
        """Whether the game is over, and won."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it cannot be won any more."""
        ...

    def show(self) -> str:
        """The map, a line each row."""
        ...

    def moved(self, move: str) -> Board:
        """The map after one of `MOVES`."""
        ...

    def best(self) -> str:
        """A move that a perfect player makes."""
        ...


class GridGame(ABC):
    """One game.

    Args:
        max_moves: after which it is lost.
        template: how maps are shown.
    """

    RULES: ClassVar[str]
    """In words, before the first map of a chat."""
    SIGNS: ClassVar[str]
    """Every character of a map."""

    def __init__(self, max_moves: int, template: Template) -> None:
        self._max_moves = max_moves
        self._template = template
        self._board: Board | None = None
        self._moves = 0
        self._chance = random.Random()

    @abstractmethod
    def _draw(self, rng: random.Random) -> Board | None:
        """A map at the start of a game; None where the ground that was drawn has no fitting one."""

    def _becomes(self, move: str, drawn: float) -> str:
        """What becomes of a move, by a number drawn from 0 to 1."""
        return move

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the map of this seed. What chance decides later follows from the seed too, move by move."""
        self._chance = random.Random(seed)
        self._board, self._moves = self._drawn(self._chance, is_held_out(seed)), 0
        return self._show(self._board, first=True), {}

    async def step(self, action: str) -> StepResult:
        """Make one move."""
        if self._board is None:
            raise EnvError("step() was called before reset() or after the end")
        board, move, drawn = self._board, read_move(action), self._chance.random()
        if move is not None:
            board = board.moved(self._becomes(move, drawn))
        self._moves += 1
        info: Info = {"metrics": {"unreadable": float(move is None)}}
        if not (board.won or board.lost or self._moves == self._max_moves):
            self._board = board
            return self._show(board, first=False), 0.0, False, False, info
        self._board = None
        info["metrics"] |= {"moves": float(self._moves)}
        return "", float(board.won), True, False, info

    async def close(self) -> None:  # noqa: B027
        """Nothing to release."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training games of a perfect player, whole."""
        rng = random.Random(seed)
        return [self._played(rng) for _ in range(count)]

    def alphabet(self) -> str:
        """The moves and what maps, and where they are told the rules, consist of."""
        told = self.RULES if self._template == "chat" else ""
        return "".join(dict.fromkeys(f"{self.SIGNS}\n{''.join(MOVES)}{told}"))

    def _drawn(self, rng: random.Random, held_out: bool) -> Board:
        for _ in range(MOST_DRAWS):
            board = self._draw(rng)
            if board is not None and in_held_out_part(board.ground) == held_out:
                return board
        raise ConfigError(f"none of {MOST_DRAWS} maps that were drawn fits the options: make it larger, or ask less")

    def _played(self, rng: random.Random) -> SolvedExample:
        turns: list[SolvedExample] = []
        board = self._drawn(rng, held_out=False)
        while not (board.won or board.lost or len(turns) == self._max_moves):
            move = board.best()
            turns.append(SolvedExample(self._text(board, first=not turns), move))
            board = board.moved(self._becomes(move, rng.random()))
        return msgspec.structs.replace(turns[0], later=tuple(turns[1:]))

    def _show(self, board: Board, *, first: bool) -> Observation:
        text = self._text(board, first=first)
        return text if self._template == "plain" else [Message("user", text)]

    def _text(self, board: Board, *, first: bool) -> str:
        rules = self.RULES if first and self._template == "chat" else ""
        return f"{rules}{board.show()}\n"


class ReplayedGame(GridGame):
    """The same games for an agent that plays them by itself: its one answer is all the moves that it has made.

    The task is the first map. The moves, letters in one word, are made one after the other, and what they come to is
    judged. The solved examples are those of the game, turn by turn: an agent that shows the map before every move asks
    just that.
    """

    async def step(self, action: str) -> StepResult:
        """Make all the moves."""
        if self._board is None:
            raise EnvError("step() was called before reset() or after the end")
        board, self._board = self._board, None
        moves = 0
        for move in action.strip() if MOVES.keys() >= set(action.strip()) else "":
            if board.won or board.lost or moves == self._max_moves:
                break
            board, moves = board.moved(move), moves + 1
        return "", float(board.won), True, False, {"metrics": {"moves": float(moves)}}


def read_move(answer: str) -> str | None:
    """The move that the last word of an answer says; None where it says none."""
    words = re.findall(r"[^\W\d_]+", answer)
    return WORDS.get(words[-1].lower()) if words else None


def neighbours(cell: int, size: int) -> dict[str, int]:
    """Where each move leads from a cell of a square map, counted row by row; moves off the map are left out."""
    row, column = divmod(cell, size)
    return {
        move: (row + down) * size + column + right
        for move, (down, right) in MOVES.items()
        if 0 <= row + down < size and 0 <= column + right < size
    }


def rows(signs: str, size: int) -> str:
    """A map of signs, counted row by row, as lines."""
    return "\n".join(signs[start : start + size] for start in range(0, size * size, size))


def check_common(size: int, sizes: tuple[int, int], max_moves: int | None) -> None:
    """Refuse what no game can have.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """
    smallest, largest = sizes
    if not smallest <= size <= largest:
        raise ConfigError(f"size must be a whole number from {smallest} to {largest}, but is {size!r}")
    if max_moves is not None and not 1 <= max_moves <= MOST_MOVES:
        raise ConfigError(f"max_moves must be a whole number from 1 to {MOST_MOVES}, but is {max_moves!r}")
