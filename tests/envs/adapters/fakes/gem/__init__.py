"""GEM as far as its adapter sees it: a registry, and environments that seed the whole process."""

import random
from typing import Any


class Guess:
    """The number is drawn from the process's random numbers, again at each turn."""

    def __init__(self, most: int) -> None:
        self.most = most

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        self.number = random.randrange(self.most)
        return f"from 0 to {self.most - 1}", {"suffix": "Guess."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            import os

            os._exit(1)
        said, self.number = self.number, random.randrange(self.most)
        return f"it was {said}", float(action == str(said)), action == "end", False, {"suffix": "Guess again."}


def make(name: str, **kwargs: Any) -> Guess:
    if name == "game:Crosswords-v0":
        raise ImportError("Could not import Crosswords. Error: No module named 'pandas'")
    return Guess(**kwargs)
