"""Rendezvous of the processes of a job, through torchrun's store, under a prefix of its own after each restart.

Every process says what it is; the first node loop puts the hub's address and a random token there, and which checkpoint
everyone continues from.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError
from flash.foreign.torch import connect_store

if TYPE_CHECKING:
    pass  # pyright: ignore[reportPrivateImportUsage]


class Rank(msgspec.Struct, frozen=True):
    """Where a process stands in the job."""

    node: int
    local: int
    """Among the processes of its node; 0 is the node loop."""
    index: int
    """Among all processes of the job."""
    world: int
    """Number of processes of the job."""
    restarts: int
    """How often torchrun has restarted the processes."""

    @staticmethod
    def from_environment() -> Rank:
        """Read torchrun's variables. Raises ConfigError when they are missing."""
        try:
            return Rank(
                node=int(os.environ["GROUP_RANK"]),
                local=int(os.environ["LOCAL_RANK"]),
                index=int(os.environ["RANK"]),
                world=int(os.environ["WORLD_SIZE"]),
                restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except KeyError as missing:
            raise ConfigError(f"{missing} is not set: start a run with `flash train` or torchrun") from None


class HubAddress(msgspec.Struct, frozen=True):
    """What a peer needs to reach the hub."""

    host: str
    port: int
    token: bytes
    checkpoint: str
    """The checkpoint all processes continue from; empty for a new run."""


class Meeting:
    """The rendezvous of the job's processes between two restarts, over torchrun's store."""

    def __init__(self, rank: Rank, seconds: float) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._seconds = seconds
        self.store = connect_store(host, port, seconds, f"flash/{rank.restarts}")

    def declare(self, rank: Rank, config: Config) -> tuple[int, int]:
        """Say what this process is; return (its index among the trainer ranks, their number)."""
        self.store.set(f"role/{rank.index}", "trainer" if rank.local > 0 else "node")
        roles = [self._get(f"role/{index}", "all processes of the job") for index in range(rank.world)]
        trainers = [index for index, role in enumerate(roles) if role == b"trainer"]
        if len(trainers) != config.trainer_world_size:
            raise ConfigError(
                f"the config wants {config.trainer_world_size} trainer ranks, but {len(trainers)} were started: "
                "use `flash train`, or torchrun --nproc-per-node = 1 + cluster.trainer_ranks on trainer nodes"
            )
        return sum(index < rank.index for index in trainers), len(trainers)

    def announce(self, address: HubAddress) -> None:
        """Tell every process where the hub is."""
        self.store.set("hub", msgspec.json.encode(address).decode())

    def hub(self) -> HubAddress:
        """Wait for the hub's address."""
        return msgspec.json.decode(self._get("hub", "the hub to open its port"), type=HubAddress)

    def _get(self, key: str, waited_for: str) -> bytes:
        from torch.distributed import DistError

        try:
            return self.store.get(key)
        except DistError as error:
            raise DeadlineError(waited_for, self._seconds, f"the other nodes' output ({error})") from None


def advertised_host(config: Config) -> str:
    """The address at which other processes of the job reach this machine."""
    if config.cluster.nodes == 1:
        return "127.0.0.1"
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only chooses the interface that routes to the peer.
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        host = str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname()) if host.startswith("127.") else host
