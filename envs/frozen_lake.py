"""FrozenLake: walk over the ice to the goal and avoid the holes, one move per turn. Based on Gymnasium's toy-text game.

    P..O      P the player, G the goal, O a hole, . ice
    .O..
    ..G.
    O...

Each turn shows the complete map, so that no turn depends on earlier ones. The move is the last word of an answer: one
of the letters `UDLR`, or up, down, left or right. Any other answer uses up a move and changes nothing. Reaching the
goal earns 1. A game is lost, and earns 0, when the player falls into a hole or has used all moves.

The lake, the start and the goal are drawn from the seed, and each lake has a path to the goal. Ice may be slippery: a
move then sometimes goes to one of its two sides. Slips follow from the seed and the number of the move. So all samples
of one problem slip at the same moves, and an evaluation is repeatable. Lakes are divided into training and held-out
ones (for evaluation only) by the ground, the map without the player. The ground does not change during a game, so
training never shows a map of a held-out game.
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
"""Bounds of `size`, the number of rows and of columns."""
LEAST_HOLES, MOST_HOLES = 0.05, 0.4
"""Bounds of `holes`. Without holes there are too few different lakes; with more holes hardly any lake has a path."""

MOST_MOVES = 1000
"""Largest number of moves in one game."""

CHECKED_SEEDS = 4
"""Number of held-out lakes that `check` draws. Only about one lake in ten is held out, so these are harder to find than
training lakes."""
CHECKED_DRAWS, MOST_DRAWS = 2000, 20_000
"""Most lakes drawn for one problem, in `check` and in a run. Options that pass the check by chance, although 2000 draws
seldom suffice, still find a lake in ten times as many."""

DISCOUNT = 0.97
"""Discount of a cell's value per move, so that of two equally safe paths the shorter one is better."""

MOVES: Final[dict[str, tuple[int, int]]] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Rows down and columns to the right for each move."""

WORDS: Final = {"up": "U", "down": "D", "left": "L", "right": "R"} | {letter.lower(): letter for letter in MOVES}
"""Move that each word of an answer names; the words are in lower case."""
SIDES = {"U": "LR", "D": "LR", "L": "UD", "R": "UD"}
"""Moves to the two sides of each move, to which a player may slip."""
SIGNS = "PGO."
"""Characters of a map."""
RULES = (
    "You (P) walk over a frozen lake to the goal (G). Ice (.) carries you; in a hole (O) you are lost. Each turn "
    "you see the lake and answer with one step: U (up), D (down), L (left) or R (right). Your last word is your "
    "step.\n\n"
)
"""Rules of the game, shown in a chat before the first map."""


class FrozenLakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the lakes and the game.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    size: int = 4
    """Number of rows, and of columns."""
    holes: float = 0.2
    """Share of the cells that are holes."""
    shortest: int = 1
    """Fewest moves of the shortest path to the goal."""
    slip: float = 0.0
    """Probability that a move goes to one of its sides; 0.667 in Gymnasium's slippery lakes."""
    max_moves: int | None = None
    """Number of moves after which the game is lost. None: four times `size`."""
    template: Literal["plain", "chat"] = "plain"
    """Form of the prompt. `plain`: the map alone, for tiny and base models. `chat`: a message, first with the rules."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
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
        """Number of moves after which the game is lost."""
        return self.max_moves or 4 * self.size


class Lake(msgspec.Struct, frozen=True):
    """A lake with the player on it. Cells are numbered row by row."""

    size: int
    """Number of rows, and of columns."""
    holes: frozenset[int]
    """Numbers of the cells that are holes."""
    goal: int
    """Number of the goal's cell."""
    player: int
    """Number of the player's cell."""
    slip: float
    """Probability that a move goes to one of its sides."""

    @property
    def ground(self) -> str:
        """Map of the lake without the player."""
        return self._drawn(None)

    @property
    def won(self) -> bool:
        """True if the player is at the goal."""
        return self.player == self.goal

    @property
    def lost(self) -> bool:
        """True if the player is in a hole."""
        return self.player in self.holes

    def show(self) -> str:
        """Return the map with the player."""
        return self._drawn(self.player)

    def moved(self, move: str) -> Lake:
        """Return the lake after exactly this move, a key of `MOVES`. A move off the lake leaves the player in place."""
        player = neighbours(self.player, self.size).get(move, self.player)
        return msgspec.structs.replace(self, player=player)

    def best(self) -> str:
        """Return the move with the highest value: the safest one, and of equally safe moves the faster one.

        Of equal moves, the first in the order of `MOVES` is returned.
        """
        worth = _worth(self.size, self.holes, self.goal, self.slip)
        # Rounded, so that a difference in the last digits does not decide between equal moves.
        return max(MOVES, key=lambda move: round(_outcome(worth, self.player, move, self.size, self.slip), 9))

    @property
    def steps(self) -> float:
        """Number of moves of the shortest path if the ice is not slippery; infinite if there is no path."""
        worth = _worth(self.size, self.holes, self.goal, 0.0).get(self.player)
        # Without slips, the value of a cell is `DISCOUNT` to the power of its distance.
        return math.inf if worth is None else round(math.log(worth, DISCOUNT))

    def _drawn(self, player: int | None) -> str:
        """Return the map, with the player at a cell or without it."""
        signs = ["O" if cell in self.holes else "." for cell in range(self.size**2)]
        signs[self.goal] = "G"
        if player is not None:
            signs[player] = "P"
        return "\n".join("".join(signs[start : start + self.size]) for start in range(0, len(signs), self.size))


class FrozenLake:
    """Environment of one game on a lake. The rollout node makes one object for each episode."""

    def __init__(self, options: FrozenLakeOptions) -> None:
        self._options = options
        self._lake: Lake | None = None
        """Lake of the game; None before `reset` and after the end."""
        self._moves = 0
        """Number of moves so far."""
        self._chance = random.Random()
        """Random numbers of the slips, from the seed of the episode."""

    @classmethod
    def check(cls, options: FrozenLakeOptions) -> None:
        """Draw some lakes, so that options that hardly any lake fits are refused before the run.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: no lake fits the options.
        """
        for seed in (0, *range(HELD_OUT, HELD_OUT + CHECKED_SEEDS)):
            cls(options)._draw(random.Random(seed), is_held_out(seed), CHECKED_DRAWS)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the lake of this seed. All later slips follow from the seed as well.

        Raises:
            ConfigError: no lake fits the options. This is rare after `check`.
        """
        self._chance = random.Random(seed)
        self._lake, self._moves = self._draw(self._chance, is_held_out(seed)), 0
        return self._show(self._lake, first=True), {}

    async def step(self, action: str) -> StepResult:
        """Make the move that the answer names, or a slip to its side.

        Ends the game if it is won, lost or out of moves. Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: `reset` was not called before, or the game has ended.
        """
        if self._lake is None:
            raise EnvError("step() was called before reset() or after the end")
        # The number is drawn also for an unreadable answer, so that slips follow from the number of the move alone.
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
        """Do nothing: there is nothing to release."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` complete training games of an optimal player, to teach a tiny model before the training."""
        rng = random.Random(seed)
        return [self._played(rng) for _ in range(count)]

    def alphabet(self) -> str:
        """Return the characters of the moves and the maps, and of the rules if they are shown.

        They become a tiny model's vocabulary.
        """
        told = RULES if self._options.template == "chat" else ""
        return "".join(dict.fromkeys(f"{SIGNS}\n{''.join(MOVES)}{told}"))

    def _draw(self, rng: random.Random, held_out: bool, most: int = MOST_DRAWS) -> Lake:
        """Draw a training or a held-out lake that fits the options. Raises ConfigError if none of `most` lakes fits."""
        options = self._options
        cells = options.size**2
        for _ in range(most):
            start, goal = rng.sample(range(cells), 2)
            holes = frozenset(cell for cell in range(cells) if rng.random() < options.holes) - {start, goal}
            lake = Lake(options.size, holes, goal, start, options.slip)
            # The search for a path takes longest, so it comes last.
            if in_held_out_part(lake.ground) == held_out and options.shortest <= lake.steps <= options.moves:
                return lake
        raise ConfigError(f"none of {most} lakes fits the options: raise `size`, lower `shortest`, or change `holes`")

    def _slipped(self, move: str, drawn: float) -> str:
        """Return the move that is really made: `move`, or with the probability `slip` one to either of its sides.

        `drawn` is a random number from 0 to 1, which decides.
        """
        if drawn >= self._options.slip:
            return move
        one, other = SIDES[move]
        return other if drawn < self._options.slip / 2 else one

    def _played(self, rng: random.Random) -> SolvedExample:
        """Draw a training lake, and return the complete game of an optimal player on it."""
        turns: list[SolvedExample] = []
        lake = self._draw(rng, held_out=False)
        while not (lake.won or lake.lost or len(turns) == self._options.moves):
            move = lake.best()
            turns.append(SolvedExample(self._text(lake, first=not turns), move))
            lake = lake.moved(self._slipped(move, rng.random()))
        return msgspec.structs.replace(turns[0], later=tuple(turns[1:]))

    def _show(self, lake: Lake, *, first: bool) -> Observation:
        """Return the map as an observation, in the form of the option `template`."""
        text = self._text(lake, first=first)
        return text if self._options.template == "plain" else [Message("user", text)]

    def _text(self, lake: Lake, *, first: bool) -> str:
        """Return the text of the map; the first text of a chat begins with the rules."""
        rules = RULES if first and self._options.template == "chat" else ""
        return f"{rules}{lake.show()}\n"


class FrozenLakeReplay(FrozenLake):
    """Environment for an agent that plays the game by itself: its only answer is the sequence of its moves.

    The task is the first map. The answer is one word of letters; the moves are made one after the other, and the result
    is judged. The solved examples are those of the game, turn by turn, because an agent that shows the map before each
    move sends exactly these prompts to the policy.
    """

    @classmethod
    def check(cls, options: FrozenLakeOptions) -> None:
        """Draw lakes as `FrozenLake` does, and refuse slippery ice, on which an agent cannot know where the player is.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: no lake fits the options, or the ice is slippery.
        """
        super().check(options)
        if options.slip:
            raise ConfigError(
                f"slip must be 0 where an agent plays by itself and sees no slips, but is {options.slip!r}"
            )

    async def step(self, action: str) -> StepResult:
        """Make all moves of the answer, and judge the result. An answer with other characters makes no move.

        Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: `reset` was not called before, or the game has ended.
        """
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
    """Return the move that the last word of an answer names; None if it names no move."""
    words = re.findall(r"[^\W\d_]+", answer)
    return WORDS.get(words[-1].lower()) if words else None


def neighbours(cell: int, size: int) -> dict[str, int]:
    """Return the target cell of each move from a cell of a square map. Moves off the map are left out."""
    row, column = divmod(cell, size)
    return {
        move: (row + down) * size + column + right
        for move, (down, right) in MOVES.items()
        if 0 <= row + down < size and 0 <= column + right < size
    }


def _outcome(worth: dict[int, float], cell: int, move: str, size: int, slip: float) -> float:
    """Return the expected value of a move from `cell`, with slips.

    `worth` has the value of each cell with a path to the goal; other cells have 0. A move off the map stays in place.
    """
    there = neighbours(cell, size)
    sides = sum(worth.get(there.get(side, cell), 0.0) for side in SIDES[move])
    return (1 - slip) * worth.get(there.get(move, cell), 0.0) + slip / 2 * sides


@functools.lru_cache(maxsize=256)
def _worth(size: int, holes: frozenset[int], goal: int, slip: float) -> dict[int, float]:
    """Return the value of each cell with a path to the goal: the discounted probability that an optimal player arrives.

    The first estimate is the distance if the ice were not slippery. Value iteration then refines it (Sutton and Barto,
    2018, section 4.4).
    """
    worth = {goal: 1.0}
    queue = deque([goal])
    while queue:
        cell = queue.popleft()
        for near in neighbours(cell, size).values():
            if near not in worth and near not in holes:
                worth[near] = DISCOUNT * worth[cell]
                queue.append(near)
    # Without slips the distances are exact already, and the loop is left out.
    change = float(slip > 0)  # largest change of a value in one pass over the cells
    while change > 1e-6:  # smaller changes do not reorder moves that are worth telling apart
        change = 0.0
        for cell in worth.keys() - {goal}:
            now = DISCOUNT * max(_outcome(worth, cell, move, size, slip) for move in MOVES)
            change, worth[cell] = max(change, abs(now - worth[cell])), now
    return worth
