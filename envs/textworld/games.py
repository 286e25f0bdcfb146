"""Generate games of TextWorld; play these, and ALFWorld's. Only in processes of its own: `python -m envs.textworld` is
a player.

A player loads TextWorld and writes an empty message. Then it reads requests from its standard input and writes what a
game shows to its standard output, each a msgpack message after its length. What a game comes to is a function of its
file and the commands so far: a player that has not seen the earlier ones plays them first, so that any player can go on
where another one ended.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import struct
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

LENGTH: Final = struct.Struct("<I")
"""Before each message: its bytes."""

OPEN_GAMES = 64
"""Of a player; the one that was played longest ago is closed for the next, and would be played anew."""

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


class Play(msgspec.Struct, frozen=True):
    """Say what a game shows after these commands."""

    number: int
    """Of the request; the answer has it too."""
    episode: int
    file: str
    commands: list[str]


class ShownGame(msgspec.Struct, frozen=True):
    """What a game shows."""

    number: int
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
    file, player = generate(game, folder), Games()
    commands: list[str] = []
    turns: list[Turn] = []
    shown = player.play(Play(0, 0, file, []))
    while shown.solution and not (shown.won or shown.lost):
        turns.append((shown, shown.solution[0]))
        commands.append(shown.solution[0])
        shown = player.play(Play(0, 0, file, list(commands)))
    return turns


class Games:
    """The open games of a process."""

    def __init__(self) -> None:
        _library()  # now, and not within the deadline of the first game
        self._open: OrderedDict[int, tuple[Any, str, list[str], Any]] = OrderedDict()
        """For each episode its game, its file, the commands so far, and its state."""

    def play(self, request: Play) -> ShownGame:
        """Give a game the commands that it has not had."""
        game, file, had, state = self._open.pop(request.episode, (None, "", [], None))
        if game is None or file != request.file or had != request.commands[: len(had)]:
            if game is not None:
                game.close()
            game, state, had = _start(request.file), None, []
            state = game.reset()
        for command in request.commands[len(had) :]:
            state, _, _ = game.step(command)
        self._open[request.episode] = (game, request.file, request.commands, state)
        if len(self._open) > OPEN_GAMES:
            self._open.popitem(last=False)[1][0].close()
        return _shown(request, state)


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


def _shown(request: Play, state: Any) -> ShownGame:
    whole = not request.commands and state.objective
    text = f"{state.objective}\n\n{state.description}" if whole else PROMPT.sub("", state.feedback)
    return ShownGame(
        request.number,
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


def serve(arguments: list[str], make: type[Games] = Games) -> None:
    """Answer requests until there are no more; or walk the one game that is read, as its folder is named."""
    # What the games' interpreter prints must not get between the messages.
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if arguments:
        turns = walk(msgspec.msgpack.decode(requests.read(), type=GameOf), arguments[0])
        answers.write(msgspec.msgpack.encode(turns))
        answers.close()
        return
    games, decoder = make(), msgspec.msgpack.Decoder(Play)
    answers.write(LENGTH.pack(0))
    answers.flush()
    while (message := _read(requests)) is not None:
        shown = msgspec.msgpack.encode(games.play(decoder.decode(message)))
        answers.write(LENGTH.pack(len(shown)) + shown)
        answers.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None
