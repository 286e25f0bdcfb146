"""Sokoban: push every box onto a target; boxes cannot be pulled. One step a turn.

    -#--      @ the player, $ a box, . a target, # a wall, - floor; * a box on a target, + the player on one
    -$@-
    --.-      The edge of the map is a wall too.
    ----

Maps are drawn from the seed. All positions that can still be won, and how many steps they are away from it, are found
by playing backwards from the end; a game begins in one of them, at a distance that the options give, and is lost in any
other.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque

import msgspec

from envs.grids import MOVES, GridGame, ReplayedGame, Template, check_common, neighbours, rows
from flash.environment import HELD_OUT
from flash.errors import ConfigError

SIZES = (3, 8)
MOST_BOXES = 4
LEAST_WALLS, MOST_WALLS = 0.05, 0.35
"""Without walls there are hardly any maps to divide; with more of them boxes hardly move."""

MOST_POSITIONS = 25_000
"""Of player and boxes on a map: all are looked at, which takes a tenth of a second for so many."""

OPPOSITE = {"U": "D", "D": "U", "L": "R", "R": "L"}

Position = tuple[int, tuple[int, ...]]
"""The player's cell, and the boxes' in ascending order."""


class SokobanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What maps are like.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    size: int = 4
    """Rows, and columns."""
    boxes: int = 1
    """Boxes, and targets."""
    walls: float = 0.15
    """Share of the cells that are walls."""
    shortest: int = 2
    """Steps of the shortest solution, at least."""
    longest: int = 12
    """And at most."""
    max_moves: int | None = None
    """Steps after which the game is lost; None: twice `longest`."""
    template: Template = "plain"
    """How maps are shown: `plain`, for tiny and base models, or `chat`, with the rules."""

    def __post_init__(self) -> None:
        check_common(self.size, SIZES, self.max_moves)
        if not 1 <= self.boxes <= MOST_BOXES:
            raise ConfigError(f"boxes must be a whole number from 1 to {MOST_BOXES}, but is {self.boxes!r}")
        if not LEAST_WALLS <= self.walls <= MOST_WALLS:
            raise ConfigError(f"walls must be a share from {LEAST_WALLS} to {MOST_WALLS}, but is {self.walls!r}")
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(
                f"shortest must be a whole number from 1 to longest = {self.longest}, but is {self.shortest!r}"
            )
        if self.moves < self.longest:
            raise ConfigError(f"max_moves = {self.moves} must be at least longest = {self.longest}")
        positions = self.size**2 * math.comb(self.size**2 - 1, self.boxes)
        if positions > MOST_POSITIONS:
            raise ConfigError(
                f"size = {self.size} with boxes = {self.boxes} has {positions} positions, and at most {MOST_POSITIONS} "
                "are looked at: make the map smaller, or take a box away"
            )

    @property
    def moves(self) -> int:
        """Steps of a game."""
        return self.max_moves or 2 * self.longest


class Room(msgspec.Struct, frozen=True):
    """A map with the player and the boxes on it. Cells are counted row by row."""

    size: int
    walls: frozenset[int]
    targets: tuple[int, ...]
    position: Position

    @property
    def ground(self) -> str:
        """Walls and targets."""
        signs = ("#" if cell in self.walls else "." if cell in self.targets else "-" for cell in range(self.size**2))
        return rows("".join(signs), self.size)

    @property
    def won(self) -> bool:
        """Every box on a target."""
        return self.position[1] == self.targets

    @property
    def lost(self) -> bool:
        """No steps solve it any more."""
        return self.position not in distances(self.size, self.walls, self.targets)

    def show(self) -> str:
        """The map."""
        player, boxes = self.position
        signs = list(self.ground.replace("\n", ""))
        for box in boxes:
            signs[box] = "*" if box in self.targets else "$"
        signs[player] = "+" if player in self.targets else "@"
        return rows("".join(signs), self.size)

    def moved(self, move: str) -> Room:
        """After a step; one against a wall, or against a box that cannot be pushed, leads nowhere."""
        player, boxes = self.position
        there = neighbours(player, self.size).get(move)
        if there is None or there in self.walls:
            return self
        if there in boxes:
            behind = neighbours(there, self.size).get(move)
            if behind is None or behind in self.walls or behind in boxes:
                return self
            boxes = _with_box(boxes, there, behind)
        return msgspec.structs.replace(self, position=(there, boxes))

    def best(self) -> str:
        """A step on a shortest way."""
        away = distances(self.size, self.walls, self.targets)
        return min(MOVES, key=lambda move: away.get(self.moved(move).position, math.inf))


class Sokoban(GridGame):
    """One map to solve."""

    RULES = (
        "Push every box ($) onto a target (.). You (@) push a box by walking against it; you cannot pull, nor push "
        "two. Walls (#) and the edge of the map stop you; a box on a target is *, you on a target are +. Each turn you "
        "see the map and answer with one step: U (up), D (down), L (left) or R (right). Your last word is your "
        "step.\n\n"
    )
    SIGNS = "#-.@$*+"

    def __init__(self, options: SokobanOptions) -> None:
        super().__init__(options.moves, options.template)
        self._options = options

    @classmethod
    def check(cls, options: SokobanOptions) -> None:
        """Draw a map of each side.

        Raises:
            ConfigError: there is none.
        """
        game = cls(options)
        for seed in (0, HELD_OUT):
            game._drawn(random.Random(seed), seed >= HELD_OUT)

    def _draw(self, rng: random.Random) -> Room | None:
        options = self._options
        cells = range(options.size**2)
        targets = tuple(sorted(rng.sample(cells, options.boxes)))
        walls = frozenset(cell for cell in cells if rng.random() < options.walls) - frozenset(targets)
        away = distances(options.size, walls, targets)
        fitting = [position for position, steps in away.items() if options.shortest <= steps <= options.longest]
        return Room(options.size, walls, targets, rng.choice(fitting)) if fitting else None


class SokobanReplay(ReplayedGame, Sokoban):
    """One map, for an agent that plays it by itself: see `envs.grids.Replay`."""


@functools.lru_cache(maxsize=64)
def distances(size: int, walls: frozenset[int], targets: tuple[int, ...]) -> dict[Position, int]:
    """Of every position that can be solved, the fewest steps to the end; found backwards, breadth first."""
    near = [{move: to for move, to in neighbours(cell, size).items() if to not in walls} for cell in range(size**2)]
    away: dict[Position, int] = {
        (cell, targets): 0 for cell in range(size**2) if cell not in walls and cell not in targets
    }
    queue = deque(away)
    while queue:
        player, boxes = queue.popleft()
        for move, ahead in MOVES_BACK:
            before = near[player].get(move)
            if before is None or before in boxes:
                continue
            earlier = [(before, boxes)]
            pushed = near[player].get(ahead)
            if pushed is not None and pushed in boxes:
                earlier.append((before, _with_box(boxes, pushed, player)))
            for position in earlier:
                if position not in away:
                    away[position] = away[player, boxes] + 1
                    queue.append(position)
    return away


MOVES_BACK = tuple((OPPOSITE[move], move) for move in MOVES)
"""For each move the one that undoes it, and the move itself."""


def _with_box(boxes: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    return tuple(sorted({*boxes} - {old} | {new}))
