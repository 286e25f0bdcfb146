"""FrozenLake: walk over the ice to the goal, past the holes, one step a turn, after the game of Gymnasium's toy texts.

    P..O      P the player, G the goal, O a hole, . ice
    .O..
    ..G.
    O...

The map is shown before every step, so that each turn stands for itself. A step is the last word of an answer: a letter
of `UDLR`, or up, down, left or right. Anything else is a step that changes nothing. A game that is won earns 1, any
other 0; it is lost in a hole, or when its steps are used up.

Lakes are drawn from the seed, start and goal with them, and every one of them has a way. Ice may be slippery: then a
step goes sometimes to one of its two sides. Slips follow from the seed and the number of the step: the members of a
group slip at the same steps, and an evaluation is the same each time. Lakes are divided by what never changes in a
game, the ground: no map of a held-out game, at whatever step, is ever met in training.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import deque
from typing import Final, Literal

import msgspec

from envs.generated import in_held_out_part
from flash.environment import HELD_OUT, Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

SMALLEST, LARGEST = 3, 12
LEAST_HOLES, MOST_HOLES = 0.05, 0.4
"""Without holes there are hardly any lakes to divide; with more of them hardly one has a way."""

MOST_MOVES = 1000
"""Of one game."""

MOST_DRAWS = 2000
"""Lakes drawn for one problem: about one in ten is held out, and few of the rest fit no options at all."""

DISCOUNT = 0.97
"""Per step, of what a step on slippery ice is worth: of two equally safe ways the shorter one is better."""

MOVES: Final[dict[str, tuple[int, int]]] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Rows and columns that a step goes down and to the right."""

WORDS: Final = {"up": "U", "down": "D", "left": "L", "right": "R"} | {letter.lower(): letter for letter in MOVES}
SIDES = {"U": "LR", "D": "LR", "L": "UD", "R": "UD"}
SIGNS = "PGO."
RULES = (
    "You (P) walk over a frozen lake to the goal (G). Ice (.) carries you; in a hole (O) you are lost. Each turn "
    "you see the lake and answer with one step: U (up), D (down), L (left) or R (right). Your last word is your "
    "step.\n\n"
)
"""In words, before the first map of a chat."""


class FrozenLakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What lakes are like.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    size: int = 4
    """Rows, and columns."""
    holes: float = 0.2
    """Share of the cells that are holes."""
    shortest: int = 1
    """Steps of the shortest way, at least."""
    slip: float = 0.0
    """Probability with which a step goes to one of its sides; 0.667 in Gymnasium's slippery lakes."""
    max_moves: int | None = None
    """Steps after which the game is lost; None: four times `size`."""
    template: Literal["plain", "chat"] = "plain"
    """How maps are shown: `plain`, for tiny and base models, or `chat`, with the rules."""

    def __post_init__(self) -> None:
        if not SMALLEST <= self.size <= LARGEST:
            raise ConfigError(f"size must be a whole number from {SMALLEST} to {LARGEST}, but is {self.size!r}")
        if self.max_moves is not None and not 1 <= self.max_moves <= MOST_MOVES:
            raise ConfigError(f"max_moves must be a whole number from 1 to {MOST_MOVES}, but is {self.max_moves!r}")
        if not LEAST_HOLES <= self.holes <= MOST_HOLES:
            raise ConfigError(f"holes must be a share from {LEAST_HOLES} to {MOST_HOLES}, but is {self.holes!r}")
        if not 0 <= self.slip < 1:
            raise ConfigError(f"slip must be a probability below 1, but is {self.slip!r}")
        if not 1 <= self.shortest <= self.moves:
            raise ConfigError(f"shortest must be from 1 to max_moves = {self.moves}, but is {self.shortest!r}")

    @property
    def moves(self) -> int:
        """Steps of a game."""
        return self.max_moves or 4 * self.size


class Lake(msgspec.Struct, frozen=True):
    """A lake with the player on it. Cells are counted row by row."""

    size: int
    holes: frozenset[int]
    goal: int
    player: int
    slip: float

    @property
    def ground(self) -> str:
        """The lake without the player."""
        return self._drawn(None)

    @property
    def won(self) -> bool:
        """At the goal."""
        return self.player == self.goal

    @property
    def lost(self) -> bool:
        """In a hole."""
        return self.player in self.holes

    def show(self) -> str:
        """The map."""
        return self._drawn(self.player)

    def moved(self, move: str) -> Lake:
        """After a step; a step off the lake leads nowhere."""
        player = neighbours(self.player, self.size).get(move, self.player)
        return msgspec.structs.replace(self, player=player)

    def best(self) -> str:
        """The step that most surely leads to the goal, and the shorter one of two alike."""
        worth = _worth(self.size, self.holes, self.goal, self.slip)
        return max(MOVES, key=lambda move: round(_outcome(worth, self.player, move, self.size, self.slip), 9))

    @property
    def steps(self) -> float:
        """Of the shortest way on firm ice; infinite where there is none."""
        worth = _worth(self.size, self.holes, self.goal, 0.0).get(self.player)
        return math.inf if worth is None else round(math.log(worth, DISCOUNT))

    def _drawn(self, player: int | None) -> str:
        signs = ["O" if cell in self.holes else "." for cell in range(self.size**2)]
        signs[self.goal] = "G"
        if player is not None:
            signs[player] = "P"
        return "\n".join("".join(signs[start : start + self.size]) for start in range(0, len(signs), self.size))


class FrozenLake:
    """One walk over a lake."""

    def __init__(self, options: FrozenLakeOptions) -> None:
        self._options = options
        self._lake: Lake | None = None
        self._moves = 0
        self._chance = random.Random()

    @classmethod
    def check(cls, options: FrozenLakeOptions) -> None:
        """Draw a lake of each side.

        Raises:
            ConfigError: there is none.
        """
        for seed in (0, HELD_OUT):
            cls(options)._draw(random.Random(seed), seed >= HELD_OUT)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the lake of this seed. What chance decides later follows from the seed too, step by step."""
        self._chance = random.Random(seed)
        self._lake, self._moves = self._draw(self._chance, is_held_out(seed)), 0
        return self._show(self._lake, first=True), {}

    async def step(self, action: str) -> StepResult:
        """Make one step."""
        if self._lake is None:
            raise EnvError("step() was called before reset() or after the end")
        lake, move, drawn = self._lake, read_move(action), self._chance.random()
        if move is not None:
            lake = lake.moved(self._slipped(move, drawn))
        self._moves += 1
        info: Info = {"metrics": {"unreadable": float(move is None)}}
        if not (lake.won or lake.lost or self._moves == self._options.moves):
            self._lake = lake
            return self._show(lake, first=False), 0.0, False, False, info
        self._lake = None
        info["metrics"] |= {"moves": float(self._moves)}
        return "", float(lake.won), True, False, info

    async def close(self) -> None:
        """Nothing to release."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training games of a perfect player, whole."""
        rng = random.Random(seed)
        return [self._played(rng) for _ in range(count)]

    def alphabet(self) -> str:
        """The steps and what maps, and where they are told the rules, consist of."""
        told = RULES if self._options.template == "chat" else ""
        return "".join(dict.fromkeys(f"{SIGNS}\n{''.join(MOVES)}{told}"))

    def _draw(self, rng: random.Random, held_out: bool) -> Lake:
        options = self._options
        cells = options.size**2
        for _ in range(MOST_DRAWS):
            start, goal = rng.sample(range(cells), 2)
            holes = frozenset(cell for cell in range(cells) if rng.random() < options.holes) - {start, goal}
            lake = Lake(options.size, holes, goal, start, options.slip)
            if options.shortest <= lake.steps <= options.moves and in_held_out_part(lake.ground) == held_out:
                return lake
        raise ConfigError(f"none of {MOST_DRAWS} maps that were drawn fits the options: make it larger, or ask less")

    def _slipped(self, move: str, drawn: float) -> str:
        """What becomes of a step, by a number drawn from 0 to 1."""
        return SIDES[move][drawn < self._options.slip / 2] if drawn < self._options.slip else move

    def _played(self, rng: random.Random) -> SolvedExample:
        turns: list[SolvedExample] = []
        lake = self._draw(rng, held_out=False)
        while not (lake.won or lake.lost or len(turns) == self._options.moves):
            move = lake.best()
            turns.append(SolvedExample(self._text(lake, first=not turns), move))
            lake = lake.moved(self._slipped(move, rng.random()))
        return msgspec.structs.replace(turns[0], later=tuple(turns[1:]))

    def _show(self, lake: Lake, *, first: bool) -> Observation:
        text = self._text(lake, first=first)
        return text if self._options.template == "plain" else [Message("user", text)]

    def _text(self, lake: Lake, *, first: bool) -> str:
        rules = RULES if first and self._options.template == "chat" else ""
        return f"{rules}{lake.show()}\n"


class FrozenLakeReplay(FrozenLake):
    """The same walks for an agent that walks by itself: its one answer is all the steps that it has made.

    The task is the first map. The steps, letters in one word, are made one after the other, and what they come to is
    judged. The solved examples are those of the game, turn by turn: an agent that shows the map before every step asks
    just that.
    """

    @classmethod
    def check(cls, options: FrozenLakeOptions) -> None:
        """Draw a lake, and refuse ice on which an agent cannot know where it stands.

        Raises:
            ConfigError: there is no such lake, or it is slippery.
        """
        super().check(options)
        if options.slip:
            raise ConfigError(
                f"slip must be 0 where an agent plays by itself and sees no slips, but is {options.slip!r}"
            )

    async def step(self, action: str) -> StepResult:
        """Make all the steps."""
        if self._lake is None:
            raise EnvError("step() was called before reset() or after the end")
        lake, self._lake = self._lake, None
        moves = 0
        for move in action.strip() if MOVES.keys() >= set(action.strip()) else "":
            if lake.won or lake.lost or moves == self._options.moves:
                break
            lake, moves = lake.moved(move), moves + 1
        return "", float(lake.won), True, False, {"metrics": {"moves": float(moves)}}


def read_move(answer: str) -> str | None:
    """The step that the last word of an answer says; None where it says none."""
    words = re.findall(r"[^\W\d_]+", answer)
    return WORDS.get(words[-1].lower()) if words else None


def neighbours(cell: int, size: int) -> dict[str, int]:
    """Where each step leads from a cell of a square map, counted row by row; steps off the map are left out."""
    row, column = divmod(cell, size)
    return {
        move: (row + down) * size + column + right
        for move, (down, right) in MOVES.items()
        if 0 <= row + down < size and 0 <= column + right < size
    }


def _outcome(worth: dict[int, float], cell: int, move: str, size: int, slip: float) -> float:
    """What a step is worth on average."""
    there = neighbours(cell, size)
    sides = sum(worth.get(there.get(side, cell), 0.0) for side in SIDES[move])
    return (1 - slip) * worth.get(there.get(move, cell), 0.0) + slip / 2 * sides


@functools.lru_cache(maxsize=256)
def _worth(size: int, holes: frozenset[int], goal: int, slip: float) -> dict[int, float]:
    """For each cell with a way to the goal, how surely, and with `DISCOUNT` how soon, a perfect player gets there.

    By distance on firm ice, from there by value iteration (Sutton and Barto, 2018, section 4.4).
    """
    worth = {goal: 1.0}
    queue = deque([goal])
    while queue:
        cell = queue.popleft()
        for near in neighbours(cell, size).values():
            if near not in worth and near not in holes:
                worth[near] = DISCOUNT * worth[cell]
                queue.append(near)
    change = float(slip > 0)
    while change > 1e-6:
        change = 0.0
        for cell in worth.keys() - {goal}:
            now = DISCOUNT * max(_outcome(worth, cell, move, size, slip) for move in MOVES)
            change, worth[cell] = max(change, abs(now - worth[cell])), now
    return worth
