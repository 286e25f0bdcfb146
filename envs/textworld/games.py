"""Generate games of TextWorld; play these, and ALFWorld's. In worker processes only: see `envs.workers`.

What a game comes to is a function of its file and the commands so far: a worker that has not seen the earlier ones
plays them first, so that any worker can go on where another one ended, or died.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import signal
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

OPEN_GAMES = 64
"""Of a worker; the one that was played longest ago is closed for the next, and would be played anew."""

PDDL: Final = ".tw-pddl"
"""What the names of ALFWorld's games end with."""

PROMPT = re.compile(r"\n>[^\n]*\Z")
"""What a game ends its text with."""


class GameOf(msgspec.Struct, frozen=True):
    """Which game: all of it follows from this."""

    kind: str
    level: int
    seed: int
    held_out: bool

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.kind}-{self.level}-{self.seed}"


class ShownGame(msgspec.Struct, frozen=True):
    """What a game shows."""

    text: str
    commands: list[str]
    """That do something here."""
    solution: list[str]
    """Commands that win it from here; empty when there are none."""
    score: float
    """As a share of the highest one."""
    won: bool
    lost: bool


def _coins(level: int, held_out: bool) -> dict[str, Any]:
    return {"level": level}


def _simple(level: int, held_out: bool) -> dict[str, Any]:
    return {"rewards": "dense", "goal": ("detailed", "brief", "none")[level - 1], "test": held_out}


def _cooking(level: int, held_out: bool) -> dict[str, Any]:
    """More of everything from level to level; of other food where it is held out."""
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
    "coin_collector": (300, _coins),
    "treasure_hunter": (30, _coins),
    "simple": (3, _simple),
    "cooking": (4, _cooking),
}
"""For each kind its highest level, and the settings of its challenge for a level."""


def generate(game: GameOf, folder: str) -> str:
    """Make a game, unless it is there; the path of its file. Takes seconds: Inform compiles it."""
    place = Path(folder) / game.name
    file = place / "game.z8"
    if not file.exists():
        library = _library()
        challenges = importlib.import_module("textworld.challenges").CHALLENGES
        scratch = Path(folder) / f".{game.name}.{os.getpid()}"
        options = library.GameOptions()
        options.seeds, options.path = game.seed, str(scratch / "game.z8")
        scratch.mkdir(parents=True, exist_ok=True)
        made = challenges[f"tw-{game.kind}"][1](KINDS[game.kind][1](game.level, game.held_out), options)
        library.generator.compile_game(made, options)
        try:
            scratch.rename(place)
        except OSError:  # another process was sooner
            shutil.rmtree(scratch)
    return str(file)


Turn = tuple[ShownGame, str]
"""What is shown, and the command that is given to that."""


def walk(game: GameOf, folder: str) -> list[Turn]:
    """A whole game by its own solution."""
    file, games = generate(game, folder), Games()
    commands: list[str] = []
    turns: list[Turn] = []
    with _quiet():
        shown = games.play(0, file, [])
        while shown.solution and not (shown.won or shown.lost):
            turns.append((shown, shown.solution[0]))
            commands.append(shown.solution[0])
            shown = games.play(0, file, commands)
    return turns


def play(episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
    """What a game shows after these commands. A worker of which it takes more than `timeout` seconds dies."""
    with _quiet():
        games = _games()
        # Only now: loading TextWorld takes a second, and on a busy machine many.
        signal.setitimer(signal.ITIMER_REAL, timeout)
        return games.play(episode, file, commands)


def load_library() -> None:
    """Load TextWorld, so that no game has to wait for it."""
    with _quiet():
        _library()


@functools.cache
def _games() -> Games:
    _library()
    return Games()


@contextmanager
def _quiet() -> Generator[None]:
    """What the games' interpreter prints must not get between what a worker says to its owner."""
    said = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(said, 1)
        os.close(said)


class Games:
    """The open games of a process."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, tuple[Any, str, list[str], Any]] = OrderedDict()
        """For each episode its game, its file, the commands so far, and its state."""

    def play(self, episode: int, file: str, commands: Sequence[str]) -> ShownGame:
        """Give a game the commands that it has not had."""
        game, known, had, state = self._open.pop(episode, (None, "", [], None))
        if game is None or known != file or had != commands[: len(had)]:
            if game is not None:
                game.close()
            game, had = _start(file), []
            state = game.reset()
        for command in commands[len(had) :]:
            state, _, _ = game.step(command)
        self._open[episode] = (game, file, [*commands], state)
        if len(self._open) > OPEN_GAMES:
            self._open.popitem(last=False)[1][0].close()
        return _shown(state, begun=not commands)


def _start(file: str) -> Any:
    library = _library()
    names = ["admissible_commands", "description", "objective", "score", "max_score", "won", "lost"]
    if file.endswith(PDDL):  # its policy is a planner's, which would run anew at each turn
        game = library.start(file, library.EnvInfos(**dict.fromkeys(names, True)))
        things: dict[str, Any] = game._entity_infos
        for thing, name in names_of(things).items():
            things[thing].name = name
        return game
    return library.start(file, library.EnvInfos(**dict.fromkeys([*names, "policy_commands"], True)))


def names_of(things: Iterable[str]) -> dict[str, str]:
    """What ALFWorld calls the things of a game, whose ids begin with their kind: by kind and number, from the last."""
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for thing in sorted(things, reverse=True):
        kind, placed, _ = thing.partition("_bar_")
        if placed and "basin" in thing:
            kind += "basin"
        counts[kind] += 1
        names[thing] = f"{kind} {counts[kind]}" if placed else kind
    return names


def _shown(state: Any, *, begun: bool) -> ShownGame:
    whole = begun and state.objective
    text = f"{state.objective}\n\n{state.description}" if whole else PROMPT.sub("", state.feedback)
    return ShownGame(
        re.sub(r"\n\s*\n+", "\n\n", text).strip().encode("ascii", "replace").decode(),
        list(state.admissible_commands),
        list(state.policy_commands or ()),
        float(state.score or 0) / max(1, state.max_score or 0),
        bool(state.won),
        bool(state.lost),
    )


def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("textworld")
