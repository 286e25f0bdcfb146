"""A player's process with games that repeat their commands: one hangs for as long as its file is missing, one is slow,
one kills, and one stops in the middle of its answer. An argument says how loading goes: slow, hangs or fails."""

import os
import sys
import time

from envs.textworld import games
from envs.textworld.games import Play, ShownGame


class Repeating(games.Games):
    """Counts the commands that it really plays."""

    answers = os.dup(1)
    """Where messages go, before others take its place."""

    def __init__(self) -> None:
        match sys.argv[1:]:
            case ["slow"]:
                time.sleep(3)
            case ["hangs"]:
                time.sleep(1000)
            case ["fails"]:
                raise ImportError
            case _:
                pass
        self.had: dict[int, list[str]] = {}
        self.played = 0

    def play(self, request: Play) -> ShownGame:
        had = self.had.get(request.episode, [])
        new = request.commands[len(had) :] if request.commands[: len(had)] == had else request.commands
        for command in new:
            self.played += 1
            if command == "hang" and not os.path.exists(request.file):
                time.sleep(1000)
            if command == "half":
                os.write(self.answers, games.LENGTH.pack(100) + b"x")
                time.sleep(1000)
            if command == "die":
                os._exit(1)
            if command == "slow":
                time.sleep(0.5)
        self.had[request.episode] = request.commands
        return ShownGame(request.number, f"{request.commands} {self.played}", [], [], 0.0, False, False)


if __name__ == "__main__":
    games.serve([], Repeating)
