"""FrozenLake: walk over the ice to the goal, past the holes, one step a turn, after the game of Gymnasium's toy texts.

    P..O      P the player, G the goal, O a hole, . ice
    .O..
    ..G.
    O...

Lakes are drawn from the seed, start and goal with them, and every one of them has a way. Ice may be slippery: then a
step goes sometimes to one of its two sides. Slips follow from the seed and the number of the step: the members of a
group slip at the same steps, and an evaluation is the same each time.
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

SIZES = (3, 12)
LEAST_HOLES, MOST_HOLES = 0.05, 0.4
"""Without holes there are hardly any lakes to divide; with more of them hardly one has a way."""

DISCOUNT = 0.97
"""Per step, of what a step on slippery ice is worth: of two equally safe ways the shorter one is better."""

SIDES = {"U": "LR", "D": "LR", "L": "UD", "R": "UD"}


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
    template: Template = "plain"
    """How maps are shown: `plain`, for tiny and base models, or `chat`, with the rules."""

    def __post_init__(self) -> None:
        check_common(self.size, SIZES, self.max_moves)
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
        return rows("".join(signs), self.size)


class FrozenLake(GridGame):
    """One walk over a lake."""

    RULES = (
        "You (P) walk over a frozen lake to the goal (G). Ice (.) carries you; in a hole (O) you are lost. Each turn "
        "you see the lake and answer with one step: U (up), D (down), L (left) or R (right). Your last word is your "
        "step.\n\n"
    )
    SIGNS = "PGO."

    def __init__(self, options: FrozenLakeOptions) -> None:
        super().__init__(options.moves, options.template)
        self._options = options

    @classmethod
    def check(cls, options: FrozenLakeOptions) -> None:
        """Draw a lake of each side.

        Raises:
            ConfigError: there is none.
        """
        for seed in (0, HELD_OUT):
            cls(options)._drawn(random.Random(seed), seed >= HELD_OUT)

    def _draw(self, rng: random.Random) -> Lake | None:
        options = self._options
        cells = options.size**2
        start, goal = rng.sample(range(cells), 2)
        holes = frozenset(cell for cell in range(cells) if rng.random() < options.holes) - {start, goal}
        lake = Lake(options.size, holes, goal, start, options.slip)
        return lake if options.shortest <= lake.steps <= options.moves else None

    def _becomes(self, move: str, drawn: float) -> str:
        return SIDES[move][drawn < self._options.slip / 2] if drawn < self._options.slip else move


class FrozenLakeReplay(ReplayedGame, FrozenLake):
    """One walk, for an agent that walks by itself: see `envs.grids.Replay`."""

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
