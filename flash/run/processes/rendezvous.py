"""How the processes of a job find the hub, and at which address this machine is found.

The hub is found as by nodes that join (`flash.run.processes.hub_place`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import TypeVar

from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError, FlashError
from flash.run.processes.hub_place import HubAddress, HubPlace
from flash.run.processes.supervisor import say
from flash.run.processes.token import VARIABLE

RENDEZVOUS = "FLASH_RDZV_ENDPOINT"
"""Variable with HOST:PORT of the first node of several, towards which each has the address that the others reach."""
RETRY_S = 0.5
"""Between two looks for the hub: nobody can tell us that one has started, maybe on another machine."""
QUIET_S = 20.0
"""Seconds for which nothing is said of looking for it."""

T = TypeVar("T")


def heed_torchrun(environment: MutableMapping[str, str]) -> None:
    """Take this machine's place in its job from torchrun's variables, where it has started us and nothing else says it.

    Raises:
        ConfigError: it has started several processes per node.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "FLASH_NNODES" in environment:
        return
    if environment["LOCAL_WORLD_SIZE"] != "1":
        raise ConfigError("torchrun starts one `flash` per node, which starts the trainer ranks: --nproc-per-node=1")
    environment["FLASH_NNODES"], environment["FLASH_NODE_RANK"] = environment["WORLD_SIZE"], environment["RANK"]
    if environment["WORLD_SIZE"] != "1":
        environment.setdefault(RENDEZVOUS, f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")


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
            say(f"waiting up to {seconds:g} s for the hub of {place}: {problem}")
        time.sleep(RETRY_S)


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
