"""Faults of the chaos run: their plan, which follows from a seed, and the processes that they can hit."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Literal

import msgspec

from flash.foreign.vllm_processes import WORKER_TITLE

Target = Literal["trainer", "hub", "node", "core", "worker", "launcher", "network"]
"""Part of the run that a fault hits; `TARGET_HOSTS` describes them."""
How = Literal["kill", "stop", "cut", "half cut"]
"""`kill`: SIGKILL. `stop`: SIGSTOP and later SIGCONT. `cut` and `half cut`: nothing passes a host's link, in both
directions or in one."""

TARGET_HOSTS: dict[Target, tuple[int, ...]] = {
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

PROCESSES: tuple[Target, ...] = tuple(target for target in TARGET_HOSTS if target != "network")
"""Targets that are processes."""

Kind = tuple[How, Target]
"""Kind of a fault."""

KINDS: tuple[Kind, ...] = (*product(("kill", "stop"), PROCESSES), ("cut", "network"), ("half cut", "network"))
"""All kinds of faults."""

GAP_S = 20.0
"""Mean seconds between two faults."""
SHORTEST_S, LONGEST_S = 5.0, 90.0
"""Seconds of a stop or a cut. Their logarithm is uniform, so that short times are as frequent as long ones."""
ROLES: tuple[Target, ...] = ("hub", "node", "trainer")
"""Processes that a launcher starts, by the names that it gives them."""
CORE_TITLE = b"VLLM::EngineCore"
"""Beginning of the title of an engine's core process, which vLLM sets."""


class Fault(msgspec.Struct, frozen=True):
    """A planned fault."""

    at: float
    """Seconds from the beginning."""
    how: How
    target: Target
    host: int
    """Number of the host, counted from 0."""
    seconds: float = 0.0
    """Duration; 0 for a kill."""
    deaf: bool = False
    """For a link that is cut in one direction: True if the host receives nothing, False if it sends nothing."""

    @property
    def kind(self) -> str:
        """Name of the fault's kind, such as `kill hub`."""
        return f"{self.how} {self.target}"


class InjectedFault(msgspec.Struct, frozen=True):
    """A fault that happened."""

    kind: str
    """Name of its kind, such as `kill hub`."""
    host: int
    """Number of the host, counted from 0."""
    at: float
    """Time of the fault, in Unix seconds."""
    seconds: float
    """Duration; 0 for a kill."""
    victim: int
    """Id of the process that was hit; 0 for a link."""


def plan(seconds: float, seed: int, longest_s: float = LONGEST_S) -> list[Fault]:
    """Plan faults for `seconds`, one every `GAP_S` on average.

    All kinds come in a random order, then all in another order, and so on. The seed decides the orders, hosts and
    durations. No stop or cut lasts longer than `longest_s`.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    remaining: list[Kind] = []
    at = GAP_S / 2
    while at < seconds:
        remaining = remaining or chance.sample(KINDS, len(KINDS))
        how, target = remaining.pop()
        lasts = math.exp(chance.uniform(math.log(SHORTEST_S), math.log(longest_s)))
        host, deaf = chance.choice(TARGET_HOSTS[target]), chance.random() < 0.5
        faults.append(Fault(at, how, target, host, 0.0 if how == "kill" else lasts, deaf))
        at += GAP_S * chance.uniform(0.5, 1.5)
    return faults


def one_of_each(seed: int, longest_s: float) -> list[Fault]:
    """Return a plan with each kind once, for `--quick`."""
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
