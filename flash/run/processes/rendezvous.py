"""Rendezvous of a job's processes: how they find the hub, and at which address other machines reach this machine.

Nodes that join the run find the hub in the same way (`flash.run.processes.hub_place`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError, FlashError
from flash.run.processes.hub_place import HubAddress, HubPlace
from flash.run.processes.supervisor import say
from flash.run.processes.token import VARIABLE

RENDEZVOUS = "FLASH_RDZV_ENDPOINT"
"""Environment variable with HOST:PORT of the first node in a job of several nodes. Each node advertises its address on
the interface that routes to this host."""
ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that belong to no machine (RFC 5737, RFC 3849), so they are routed by this machine's default route."""
RETRY_S = 0.5
"""Seconds between two searches for the hub. A hub that starts, maybe on another machine, cannot notify this process."""
QUIET_S = 20.0
"""Seconds of searching for the hub before a line is printed."""

T = TypeVar("T")


def heed_torchrun(environment: MutableMapping[str, str]) -> None:
    """Set this node's number and the number of nodes from torchrun's variables, if torchrun has started this process.

    Does nothing if FLASH_NNODES is set.

    Raises:
        ConfigError: torchrun has started several processes per node.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "FLASH_NNODES" in environment:
        return
    if environment["LOCAL_WORLD_SIZE"] != "1":
        raise ConfigError("torchrun starts one `flash` per node, which starts the trainer ranks: --nproc-per-node=1")
    environment["FLASH_NNODES"], environment["FLASH_NODE_RANK"] = environment["WORLD_SIZE"], environment["RANK"]
    if environment["WORLD_SIZE"] != "1":
        environment.setdefault(RENDEZVOUS, f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")


def hub_place(config: Config, environment: Mapping[str, str]) -> HubPlace:
    """Return the place where a process of the job finds the hub.

    The place is the hub's host and port if FLASH_TOKEN is set and both are known, for hosts that share no run
    directory. Otherwise it is the run directory.
    """
    first = config.cluster.hub_host or environment.get(RENDEZVOUS, "").rpartition(":")[0].strip("[]")
    if VARIABLE in environment and config.cluster.hub_port and first:
        return HubPlace(host=first, port=config.cluster.hub_port)
    return HubPlace(run_dir=str(config.run_dir.absolute()))


def find_hub(config: Config, token: str | None, use: Callable[[HubAddress], T], *, tells: bool = True) -> T:
    """Wait for the hub of a run, call `use` with its address until it succeeds, and return the result of `use`.

    Args:
        config: the run's configuration.
        token: the value of FLASH_TOKEN; None if it is not set.
        use: connects to the hub. It raises FlashError if another process answers, or if the hub is about to end.
        tells: True to print a line if the search takes long.

    Raises:
        DeadlineError: no hub was found within deadlines.rendezvous.
    """
    place = hub_place(config, os.environ if token is None else os.environ | {VARIABLE: token})
    seconds = config.deadlines.rendezvous
    begun, told = time.monotonic(), False
    while True:
        try:
            return use(place.find(token))
        except FlashError as error:
            # The address may be that of an earlier hub, and the next hub may be about to start.
            problem = error
        waited = time.monotonic() - begun
        if waited >= seconds:
            raise DeadlineError("the hub of this run", seconds, f"the output of the first node ({problem})")
        if tells and waited >= QUIET_S and not told:
            told = True
            say(f"waiting up to {seconds:g} s for the hub of {place}: {problem}")
        time.sleep(RETRY_S)


def advertised_host(config: Config) -> str:
    """Return the address at which the other processes and nodes of the job reach this machine.

    Raises:
        ConfigError: the job has several nodes, and the first one's name or this machine's address cannot be found.
    """
    if config.cluster.hub_host is not None and os.environ["FLASH_NODE_RANK"] == "0":
        return config.cluster.hub_host
    if config.cluster.nodes > 1:
        return address_towards(os.environ[RENDEZVOUS])
    # No other machine needs the address of a job with one node, unless SLURM has started it: then nodes of the cluster
    # may join the run.
    with suppress(ConfigError):
        if RENDEZVOUS in os.environ:
            return address_towards(os.environ[RENDEZVOUS])
    return "127.0.0.1"


Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]
"""Function that finds the addresses of a name, as `socket.getaddrinfo` does."""


def _resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)


def address_towards(endpoint: str, resolve: Resolve = _resolve) -> str:
    """Return this machine's address on the route to `endpoint`, HOST:PORT or [ADDRESS]:PORT of the first node.

    Raises:
        ConfigError: the host cannot be resolved, or only loopback addresses of this machine are found.
    """
    first, _, port = endpoint.rpartition(":")
    first = first.strip("[]")
    try:
        family, _, _, _, place = resolve(first, int(port))[0]
        host = _own_address(family, place)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"{RENDEZVOUS} = {endpoint}: {first} leads to no machine ({error}); expected HOST:PORT of the first node, "
            "or [ADDRESS]:PORT with an address of IPv6"
        ) from error
    if not _is_loopback(host) or first == "localhost" or _is_loopback(first):
        return host
    # Debian's /etc/hosts has a line such as `127.0.1.1 node1`, which resolves a machine's own name to loopback. Other
    # machines would reach themselves at that address.
    for family, far in ELSEWHERE:
        with suppress(OSError):
            if not _is_loopback(own := _own_address(family, (far, int(port)))):
                return own
    with suppress(OSError):
        for *_, place in resolve(socket.gethostname(), int(port)):
            if not _is_loopback(str(place[0])):
                return str(place[0])
    raise ConfigError(
        f"{RENDEZVOUS} = {endpoint}: on this machine {first} is {host}, which other machines cannot reach, and it has "
        "no other address; name one that they reach: cluster.hub_host"
    )


def _own_address(family: int, place: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only chooses the interface that routes to the peer.
        probe.connect(place)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a host name
        return False
