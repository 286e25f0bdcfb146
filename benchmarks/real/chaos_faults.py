"""The faults of the chaos run: which ones fall when, by seed, and whom of the processes on a host they hit."""

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
"""On which hosts each target is: a trainer rank, the hub's node loop, another node loop, an engine's core, a worker of
it, `flash train` itself, and a host's link."""

PROCESSES: tuple[Target, ...] = tuple(target for target in PLACES if target != "network")

Kind = tuple[How, Target]

KINDS: tuple[Kind, ...] = (*product(("kill", "stop"), PROCESSES), ("cut", "network"), ("half cut", "network"))
"""SIGKILL; SIGSTOP, and after a while SIGCONT; nothing gets through, in both directions or in one."""

GAP_S = 20.0
"""Between two faults, on average."""
SHORTEST_S, LONGEST_S = 5.0, 90.0
"""How long something is stopped or cut off; short times are as likely as long ones, by their logarithm."""
ROLES: tuple[Target, ...] = ("hub", "node", "trainer")
"""What a launcher starts, by the names that it gives them."""
CORE_TITLE = b"VLLM::EngineCore"


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong."""

    at: float
    """Seconds from the beginning."""
    how: How
    target: Target
    host: int
    seconds: float = 0.0
    """How long it lasts; 0 for a kill."""
    deaf: bool = False
    """Of a link that is cut in one direction: whether the host hears nothing. Otherwise nobody hears it."""

    @property
    def kind(self) -> str:
        """What it is counted as."""
        return f"{self.how} {self.target}"


class Struck(msgspec.Struct, frozen=True):
    """A fault that fell."""

    kind: str
    host: int
    at: float
    """Unix seconds."""
    seconds: float
    victim: int
    """A process id; 0 for a link."""


def plan(seconds: float, seed: int, longest_s: float = LONGEST_S) -> list[Fault]:
    """One fault every `GAP_S` seconds: all kinds in an order by chance, then all of them in another one."""
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
    """The beginning of a plan, with every kind once."""
    return plan(2 * GAP_S * len(KINDS), seed, longest_s)[: len(KINDS)]


def role(command: bytes) -> Target | None:
    """What a process is to the run, by its command line as /proc shows it."""
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
