"""Faults of the chaos run: their plan, which follows from a seed, and the processes that they can hit.

`benchmarks.real.chaos` makes the plan, and `benchmarks.real.chaos_cluster.Job` carries out its faults.
"""

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
"""Kind of a fault: what is done, and to which part of the run."""

KINDS: tuple[Kind, ...] = (*product(("kill", "stop"), PROCESSES), ("cut", "network"), ("half cut", "network"))
"""All kinds of faults."""

GAP_S = 20.0
"""Mean seconds between two faults."""
SHORTEST_S, LONGEST_S = 5.0, 90.0
"""Seconds of a stop or a cut. Their logarithm is uniform, so that short times are as frequent as long ones."""
ROLES: tuple[Target, ...] = ("hub", "node", "trainer")
"""Targets that a launcher starts. The command line of such a process has the name of its role."""
CORE_TITLE = b"VLLM::EngineCore"
"""Beginning of the title of an engine's core process, which vLLM sets."""


class Fault(msgspec.Struct, frozen=True):
    """A planned fault."""

    at: float
    """Time of the fault, in seconds from the first step with all engines."""
    how: How
    target: Target
    host: int
    """Number of the host, counted from 0."""
    seconds: float = 0.0
    """Duration of a stop or a cut; 0 for a kill."""
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
    rng = random.Random(seed)
    faults: list[Fault] = []
    remaining: list[Kind] = []  # kinds that have not come since all of them were put into a random order
    at = GAP_S / 2
    while at < seconds:
        remaining = remaining or rng.sample(KINDS, len(KINDS))
        how, target = remaining.pop()
        duration = math.exp(rng.uniform(math.log(SHORTEST_S), math.log(longest_s)))
        host, deaf = rng.choice(TARGET_HOSTS[target]), rng.random() < 0.5
        faults.append(Fault(at, how, target, host, 0.0 if how == "kill" else duration, deaf))
        at += GAP_S * rng.uniform(0.5, 1.5)
    return faults


def one_of_each(seed: int, longest_s: float) -> list[Fault]:
    """Return a plan with each kind once, for `--quick`. The parameters are those of `plan`."""
    # Two gaps per fault are more time than all kinds need, so that the plan is long enough.
    return plan(2 * GAP_S * len(KINDS), seed, longest_s)[: len(KINDS)]


def role(command: bytes) -> Target | None:
    """Return the part of the run that a process is; None if it is none that a fault can hit.

    `command` is the process's command line as /proc shows it, with a zero byte after each word. `Job.victims` calls
    this for each process on a host.
    """
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
