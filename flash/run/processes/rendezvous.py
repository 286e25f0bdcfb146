"""Rendezvous of a job's processes: all of them with the hub, the trainer ranks also with each other.

The hub is found as by nodes that join (`flash.run.processes.hub_place`). The trainer ranks of all
nodes meet in torchrun's store, anew after each restart. It is open to anyone who reaches the host: nothing in it is
secret.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError, FlashError
from flash.foreign.torch import ROOM, connect_store
from flash.run.processes.hub_place import HubAddress, HubPlace
from flash.run.processes.token import VARIABLE

RENDEZVOUS = "FLASH_RDZV_ENDPOINT"
"""Variable with HOST:PORT of the first node of several, where their trainer ranks meet."""
RETRY_S = 0.5
"""Between two looks for the hub: nobody can tell us that one has started, maybe on another machine."""
QUIET_S = 20.0
"""Seconds for which nothing is said of looking for it."""

T = TypeVar("T")


class Rank(msgspec.Struct, frozen=True):
    """Where a process stands among those of its agent, or, of a trainer rank, among those of all nodes."""

    node: int
    """Among the nodes with trainers, as the launchers were told: torchrun's own count follows the hosts' names."""
    local: int
    """Among the processes of its node's agent."""
    index: int
    """Among all processes that torchrun starts together."""
    world: int
    """How many these are."""
    restarts: int
    """How often the agent of this node has restarted its own."""
    room: str
    """Where all of these meet, and no others."""

    @staticmethod
    def from_environment() -> Rank:
        """Read the launcher's variables and torchrun's. Raises ConfigError when they are missing."""
        try:
            return Rank(
                node=int(os.environ["FLASH_NODE_RANK"]),
                local=int(os.environ["LOCAL_RANK"]),
                index=int(os.environ["RANK"]),
                world=int(os.environ["WORLD_SIZE"]),
                restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                room=os.environ[ROOM],
            )
        except KeyError as missing:
            raise ConfigError(f"{missing} is not set: start a run with `flash train`") from None


def hub_place(config: Config, environment: Mapping[str, str]) -> HubPlace:
    """Where a process of the job finds the hub: in the run directory, or, where hosts share none, at its port."""
    first = config.cluster.hub_host or environment.get(RENDEZVOUS, "").rpartition(":")[0]
    if VARIABLE in environment and config.cluster.hub_port and first:
        return HubPlace(host=first, port=config.cluster.hub_port)
    return HubPlace(run_dir=str(config.run_dir.absolute()))


def find_hub(config: Config, token: str | None, use: Callable[[HubAddress], T], *, tells: bool = True) -> T:
    """Wait for the hub of a run, and begin to use it: what was done with the first that let us.

    Args:
        config: the run.
        token: the value of FLASH_TOKEN.
        use: connects to it; raises FlashError where it is not the one, or about to end.
        tells: whether people are told when it takes long.

    Raises:
        DeadlineError: there was none.
    """
    place = hub_place(config, os.environ if token is None else os.environ | {VARIABLE: token})
    seconds = config.deadlines.rendezvous
    begun, told = time.monotonic(), False
    while True:
        try:
            return use(place.find(token))
        except FlashError as error:
            # The hub before this one may have left its address, and the next one may be on its way.
            problem = error
        waited = time.monotonic() - begun
        if waited >= seconds:
            raise DeadlineError("the hub of this run", seconds, f"the output of the first node ({problem})")
        if tells and waited >= QUIET_S and not told:
            told = True
            sys.stderr.write(f"flash: waiting up to {seconds:g} s for the hub of {place}: {problem}\n")
            sys.stderr.flush()
        time.sleep(RETRY_S)


class Meeting:
    """The rendezvous of the trainer ranks between two restarts, over torchrun's store."""

    def __init__(self, rank: Rank, seconds: float) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._seconds = seconds
        self.store = connect_store(host, port, seconds, f"flash/{rank.room}")

    def declare(self, rank: Rank, config: Config) -> tuple[int, int]:
        """Say which node's process this is; return (its index among the trainer ranks, their number).

        Raises:
            ConfigError: two nodes were given the same number.
        """
        self.store.set(f"place/{rank.index}", f"{rank.node} {rank.local}")
        places = [self._get(f"place/{index}", "all trainer ranks of the job") for index in range(rank.world)]
        if len(set(places)) < rank.world:
            taken = sorted({int(place.split()[0]) for place in places})
            raise ConfigError(
                f"two nodes of this job have the same FLASH_NODE_RANK (in use are {taken}): give each of the "
                f"{config.cluster.trainer_nodes} nodes with trainers its own, from 0 on"
            )
        return rank.node * config.cluster.trainer_ranks + rank.local, config.trainer_world_size

    def _get(self, key: str, waited_for: str) -> bytes:
        from torch.distributed import DistError

        try:
            return self.store.get(key)
        except DistError as error:
            raise DeadlineError(waited_for, self._seconds, f"the other nodes' output ({error})") from None


def advertised_host(config: Config) -> str:
    """The address at which the other processes and nodes of the job reach this machine.

    A job of one node has none, but where SLURM has started it: then others of the cluster may join, where names lead to
    their machines.
    """
    if config.cluster.hub_host is not None and os.environ["FLASH_NODE_RANK"] == "0":
        return config.cluster.hub_host
    if config.cluster.nodes > 1:
        return _address_towards(os.environ[RENDEZVOUS])
    with suppress(OSError):
        if RENDEZVOUS in os.environ:
            return _address_towards(os.environ[RENDEZVOUS])
    return "127.0.0.1"


def _address_towards(endpoint: str) -> str:
    """This machine's address on the way to HOST:PORT. Raises OSError: a name leads nowhere."""
    first, _, port = endpoint.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only chooses the interface that routes to the peer.
        probe.connect((first, int(port)))
        host = str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname()) if host.startswith("127.") else host
