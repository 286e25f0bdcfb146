"""Generation and play of TextWorld games, and play of ALFWorld games. Runs in worker processes only (`envs.workers`).

`envs.textworld.env` calls `generate` and `walk` there, and `envs.textworld.game` calls `play` in each turn.

The state of a game depends only on its file and the commands so far. A worker that has not seen the earlier commands
plays them first. So any worker can continue the game of another worker, also of one that has died.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import signal
import tempfile
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

OPEN_GAMES = 64
"""Number of games that a worker keeps open. For one more, the game that was played least recently is closed. If that
game is needed again, its commands are replayed."""

GAME_FILE: Final = "game.z8"
"""Name of the file of a generated game in its folder."""

PDDL: Final = ".tw-pddl"
"""Suffix of the file names of ALFWorld's games."""

PROMPT = re.compile(r"\n>[^\n]*\Z")
"""Pattern of the prompt at the end of a game's text, which observations do not show."""


class GameOf(msgspec.Struct, frozen=True):
    """Identity of a game, which determines all of its content."""

    kind: str
    """Kind of quest: a key of `KINDS`."""
    level: int
    """Difficulty, from 1 to the highest level of the kind."""
    seed: int
    """Seed of the generator."""
    held_out: bool
    """True for a game of evaluation, which uses the kind's own content for tests if there is some."""

    @property
    def name(self) -> str:
        """Name of the game's folder. It leaves out `held_out`, because held-out games have seeds of their own."""
        return f"{self.kind}-{self.level}-{self.seed}"


class ShownGame(msgspec.Struct, frozen=True):
    """State of a game, as the player sees it."""

    text: str
    """Text of the game after the last command, or its objective and first scene."""
    commands: list[str]
    """Commands that have an effect in this state."""
    solution: list[str]
    """Commands that win the game from this state; empty if there are none."""
    score: float
    """Score as a share of the highest possible score."""
    won: bool
    """True if the game is won; it takes no more commands."""
    lost: bool
    """True if the game is lost; it takes no more commands."""


def _by_level(level: int, held_out: bool) -> dict[str, Any]:
    """Return the settings of a kind that has only a level. Its held-out games differ from others by their seeds."""
    return {"level": level}


def _simple(level: int, held_out: bool) -> dict[str, Any]:
    """Return the settings of a simple game: higher levels describe the goal less. Held-out games use other content."""
    return {"rewards": "dense", "goal": ("detailed", "brief", "none")[level - 1], "test": held_out}


def _cooking(level: int, held_out: bool) -> dict[str, Any]:
    """Return the settings of a cooking game: each level has more of everything, and held-out games have other food."""
    return {
        "recipe": (1, 1, 2, 3)[level - 1],
        "take": (1, 1, 2, 3)[level - 1],
        "go": (1, 1, 6, 9)[level - 1],
        "open": level >= 2,
        "cook": level >= 2,
        "cut": level >= 3,
        "drop": level >= 4,
        "recipe_seed": 0,
        "split": "test" if held_out else "train",
    }


KINDS: Final[dict[str, tuple[int, Callable[[int, bool], dict[str, Any]]]]] = {
    "coin_collector": (300, _by_level),
    "treasure_hunter": (30, _by_level),
    "simple": (3, _simple),
    "cooking": (4, _cooking),
}
"""Highest level of each kind, and the function that returns the settings of its challenge for a level."""


def generate(game: GameOf, folder: str) -> str:
    """Generate a game, unless its file exists, and return the path of the file. `folder` has one folder for each game.

    Takes seconds, because the compiler Inform compiles the game. Raises OSError if the game cannot be moved to its
    folder, and errors of TextWorld if it cannot be made. If the worker is killed meanwhile, a hidden folder is left.
    """
    place = Path(folder) / game.name
    file = place / GAME_FILE
    if not file.exists():
        library = _library()
        challenges = importlib.import_module("textworld.challenges").CHALLENGES
        Path(folder).mkdir(parents=True, exist_ok=True)
        # The game is compiled in a folder of this process and then moved, so that no process plays an unfinished file.
        with tempfile.TemporaryDirectory(prefix=f".{game.name}.", dir=folder) as temporary:
            scratch = Path(temporary, game.name)
            scratch.mkdir()
            options = library.GameOptions()
            options.seeds, options.path = game.seed, str(scratch / GAME_FILE)
            # An entry of TextWorld's table is a description, the function that makes a game, and a parser of options.
            make, settings = challenges[f"tw-{game.kind}"][1], KINDS[game.kind][1](game.level, game.held_out)
            made = make(settings, options)
            library.generator.compile_game(made, options)
            move_to_final_place(scratch, place)
    return str(file)


def move_to_final_place(scratch: Path, place: Path) -> None:
    """Move the folder of a generated game to its final place, or delete it if another process has put the game there.

    Raises:
        OSError: the folder cannot be moved, and there is no game at the final place.
    """
    try:
        scratch.rename(place)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not (place / GAME_FILE).exists():
            raise


Turn = tuple[ShownGame, str]
"""State of a game, and the command of the solution in this state."""


def walk(game: GameOf, folder: str) -> list[Turn]:
    """Generate a game if needed, play its own solution, and return all turns.

    `TextWorld.solved_examples` makes examples of them, to teach a small model to play. `folder` has one folder for each
    game. Raises the errors of `generate`.
    """
    file, games = generate(game, folder), Games()
    commands: list[str] = []
    turns: list[Turn] = []
    shown = games.play(0, file, [])
    while shown.solution and not (shown.won or shown.lost):
        turns.append((shown, shown.solution[0]))
        commands.append(shown.solution[0])
        shown = games.play(0, file, commands)
    return turns


def play(episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
    """Return the state of the game in `file` after these commands. It stays open under the number `episode`.

    If the game takes more than `timeout` seconds, an alarm signal kills the worker: a game's interpreter is C code,
    which no exception interrupts. `envs.workers` sets the signal's default action and clears the timer after the call.
    """
    games = _games()
    # The timer starts only now: loading TextWorld takes a second, and much longer on a busy machine.
    signal.setitimer(signal.ITIMER_REAL, timeout)
    return games.play(episode, file, commands)


def load_library() -> None:
    """Load TextWorld in this worker before the first game."""
    _library()


@functools.cache
def _games() -> Games:
    """Return the open games of this worker process. The first call loads TextWorld."""
    _library()
    return Games()


class _OpenGame(NamedTuple):
    """A game that a worker keeps open for an episode."""

    game: Any
    """TextWorld's object for the game."""
    file: str
    """Path of the game's file."""
    commands: list[str]
    """Commands that the game has received."""
    state: Any
    """TextWorld's state of the game after these commands."""


class Games:
    """The open games of a worker process, at most `OPEN_GAMES`.

    A game that is not open is played again from its start.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[int, _OpenGame] = OrderedDict()
        """Open game of each episode by the episode's number, the least recently played one first."""

    def play(self, episode: int, file: str, commands: Sequence[str]) -> ShownGame:
        """Give a game the commands that it has not received yet, and return its state.

        The game is started again from its file if it is not open, or if the earlier commands differ. An open game that
        has missed turns, which other workers played, gets all commands of these turns.

        Args:
            episode: number of the episode, under which the game is kept open.
            file: path of the game's file.
            commands: all commands of the episode so far; empty: the first state.
        """
        known = self._open.pop(episode, None)
        if known is not None and (known.file != file or known.commands != commands[: len(known.commands)]):
            known.game.close()
            known = None
        if known is None:
            game = _start(file)
            known = _OpenGame(game, file, [], game.reset())
        state = known.state
        # If a command raises an error, the game stays taken out, and a later call starts it again.
        for command in commands[len(known.commands) :]:
            state, _, _ = known.game.step(command)
        self._open[episode] = _OpenGame(known.game, file, [*commands], state)
        if len(self._open) > OPEN_GAMES:
            _, least_recent = self._open.popitem(last=False)
            least_recent.game.close()
        return _shown(state, begun=not commands)


def _start(file: str) -> Any:
    """Start a game and return TextWorld's object for it.

    In ALFWorld's games, things get the names that ALFWorld uses.
    """
    library = _library()
    names = ["admissible_commands", "description", "objective", "score", "max_score", "won", "lost"]
    # Without `policy_commands`: a planner computes these for ALFWorld, and would run again in each turn.
    if file.endswith(PDDL):
        game = library.start(file, library.EnvInfos(**dict.fromkeys(names, True)))
        things: dict[str, Any] = game._entity_infos
        for thing, name in names_of(things).items():
            things[thing].name = name
        return game
    return library.start(file, library.EnvInfos(**dict.fromkeys([*names, "policy_commands"], True)))


def names_of(things: Iterable[str]) -> dict[str, str]:
    """Return the names that ALFWorld gives to the things of a game, by id.

    An id begins with the kind of the thing. A placed thing is named after its kind and a number; numbers count the ids
    in descending order. A thing without a place is named after its kind only.
    """
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for thing in sorted(things, reverse=True):
        kind, placed, _ = thing.partition("_bar_")
        if placed and "basin" in thing:  # ALFWorld names the basin of a sink apart from the sink: `sinkbasin 1`
            kind += "basin"
        counts[kind] += 1
        names[thing] = f"{kind} {counts[kind]}" if placed else kind
    return names


def _shown(state: Any, *, begun: bool) -> ShownGame:
    """Return a state of TextWorld in the form that players see. Text that is not ASCII is replaced by `?`.

    With `begun`, the state is the first one, which shows the objective as well.
    """
    with_objective = begun and state.objective
    text = f"{state.objective}\n\n{state.description}" if with_objective else PROMPT.sub("", state.feedback)
    return ShownGame(
        re.sub(r"\n\s*\n+", "\n\n", text).strip().encode("ascii", "replace").decode(),
        list(state.admissible_commands),
        list(state.policy_commands or ()),
        float(state.score or 0) / max(1, state.max_score or 0),
        bool(state.won),
        bool(state.lost),
    )


def _library() -> Any:
    """Import TextWorld and return its module. Only workers call this, because the import takes a second."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("textworld")
