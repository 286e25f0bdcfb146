"""Faults of the chaos run: their plan, which follows from a seed, and the processes that they can hit."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Literal

import msgspec

from flash.foreign.vllm_processes import WORKER_TITLE

Target = Literal["trainer", "hub", "node", "core", "worker", "launcher", "network"]
How = Literal["kill", "stop", "cut", "half cut"]

PLACES: dict[Target, tuple[int, ...]] = {
    "trainer": (0,),
    "hub": (0,),
    "node": (1, 2),
    "core": (0, 1, 2),
    "worker": (0, 1, 2),
    "launcher": (0, 1, 2),
    "network": (0, 1, 2),
}
"""Hosts of each target: a trainer rank, the hub's node loop, another node loop, an engine's core, a worker of it,
`flash train` itself, and a host's link."""

PROCESSES: tuple[Target, ...] = tuple(target for target in PLACES if target != "network")

Kind = tuple[How, Target]

KINDS: tuple[Kind, ...] = (*product(("kill", "stop"), PROCESSES), ("cut", "network"), ("half cut", "network"))
"""All faults: SIGKILL; SIGSTOP and later SIGCONT; a link on which nothing passes, in both directions or in one."""

GAP_S = 20.0
"""Mean seconds between two faults."""
SHORTEST_S, LONGEST_S = 5.0, 90.0
"""Seconds of a stop or a cut. Their logarithm is uniform, so that short times are as frequent as long ones."""
ROLES: tuple[Target, ...] = ("hub", "node", "trainer")
"""Processes that a launcher starts, by the names that it gives them."""
CORE_TITLE = b"VLLM::EngineCore"


class Fault(msgspec.Struct, frozen=True):
    """A planned fault."""

    at: float
    """Seconds from the beginning."""
    how: How
    target: Target
    host: int
    seconds: float = 0.0
    """Duration; 0 for a kill."""
    deaf: bool = False
    """For a link that is cut in one direction: True if the host receives nothing, False if it sends nothing."""

    @property
    def kind(self) -> str:
        """Name under which it is counted."""
        return f"{self.how} {self.target}"


class InjectedFault(msgspec.Struct, frozen=True):
    """A fault that happened."""

    kind: str
    host: int
    at: float
    """Unix seconds."""
    seconds: float
    victim: int
    """Process id; 0 for a link."""


def plan(seconds: float, seed: int, longest_s: float = LONGEST_S) -> list[Fault]:
    """Plan one fault every `GAP_S` seconds on average: all kinds in a random order, then all in another order."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    left: list[Kind] = []
    at = GAP_S / 2
    while at < seconds:
        left = left or chance.sample(KINDS, len(KINDS))
        how, target = left.pop()
        lasts = math.exp(chance.uniform(math.log(SHORTEST_S), math.log(longest_s)))
        host, deaf = chance.choice(PLACES[target]), chance.random() < 0.5
        faults.append(Fault(at, how, target, host, 0.0 if how == "kill" else lasts, deaf))
        at += GAP_S * chance.uniform(0.5, 1.5)
    return faults


def one_of_each(seed: int, longest_s: float) -> list[Fault]:
    """Return the beginning of a plan, with every kind once."""
    return plan(2 * GAP_S * len(KINDS), seed, longest_s)[: len(KINDS)]


def role(command: bytes) -> Target | None:
    """Return the role of a process in the run, by its command line as /proc shows it; None if it has none."""
    if command.startswith(CORE_TITLE):
        return "core"
    if command.startswith(WORKER_TITLE):
        return "worker"
    words = command.replace(b"\0", b" ").split()
    if words[:1] == [b"flash.run.processes.worker"]:
        return next((target for target in ROLES if target.encode() == words[1]), None)
    if b"flash" in words and b"train" in words and b"-m" in words:
        return "launcher"
    return None
