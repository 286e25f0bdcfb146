"""Rendezvous of a job's processes: how they find the hub, and at which address other machines reach this machine.

`find_hub` is the search of a trainer rank, which blocks its thread. `HubSearch` is the search of a node loop and of a
launcher on their event loops: for the first hub of a run, and for the next one after a hub has ended. Both ask the
place of the hub (`flash.run.processes.hub_place`) again and again until a hub answers.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio

from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError, FlashError, TransportError
from flash.hub import protocol as p
from flash.observe.rundir.rundir import RunDirectory
from flash.run.processes.hub_place import TOKEN_VARIABLE, HubAddress, HubPlace
from flash.run.processes.launch_state import RENDEZVOUS, ErrorMarker
from flash.run.processes.supervisor import say
from flash.transport.client import connect
from flash.transport.frames import ReplyT, Request
from flash.waiting import deadline

DOCUMENTATION_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that belong to no machine (RFC 5737, RFC 3849), so they are routed by this machine's default route."""
RANK_RETRY_S = 0.5
"""Seconds between two searches of `find_hub`. A hub that starts, maybe on another machine, cannot notify this
process."""
QUIET_S = 20.0
"""Seconds of searching for the hub before `find_hub` prints a line."""

ASK_S = 20.0
"""Seconds in which a hub has to describe its run, while the deadlines of the run are not known yet."""
RETRY_S = 1.0
"""Seconds between two searches of `HubSearch`. A hub that starts cannot notify this process."""

T = TypeVar("T")
"""Result of the function with which `find_hub` uses an address."""


def hub_place(config: Config, environment: Mapping[str, str]) -> HubPlace:
    """Return the place where a process of the job finds the hub. Launchers and trainer ranks call this.

    The place is the hub's host and port if FLASH_TOKEN is set and both are known, for hosts that share no run
    directory. Otherwise it is the run directory.
    """
    first = config.cluster.hub_host or environment.get(RENDEZVOUS, "").rpartition(":")[0].strip("[]")
    if TOKEN_VARIABLE in environment and config.cluster.hub_port and first:
        return HubPlace(host=first, port=config.cluster.hub_port)
    return HubPlace(run_dir=str(config.run_dir.absolute()))


def find_hub(config: Config, token: str | None, use: Callable[[HubAddress], T], *, prints: bool = True) -> T:
    """Wait for the hub of a run, call `use` with its address until it succeeds, and return the result of `use`.

    A trainer rank calls this to connect to the hub.

    Args:
        config: the run's configuration.
        token: the value of FLASH_TOKEN; None if it is not set.
        use: connects to the hub. It raises FlashError if another process answers, or if the hub is about to end.
        prints: True to print a line if the search takes long.

    Raises:
        DeadlineError: no hub was found within deadlines.rendezvous.
    """
    place = hub_place(config, os.environ if token is None else os.environ | {TOKEN_VARIABLE: token})
    seconds = config.deadlines.rendezvous
    begun, printed = time.monotonic(), False
    while True:
        try:
            return use(place.find(token))
        except FlashError as error:
            # The address may be that of an earlier hub, and the next hub may be about to start.
            problem = error
        waited = time.monotonic() - begun
        if waited >= seconds:
            raise DeadlineError("the hub of this run", seconds, f"the output of the first node ({problem})")
        if prints and waited >= QUIET_S and not printed:
            printed = True
            say(f"waiting up to {seconds:g} s for the hub of {place}: {problem}")
        time.sleep(RANK_RETRY_S)


def advertised_host(config: Config) -> str:
    """Return the address at which the other processes and nodes of the job reach this machine.

    The hub, the store of the trainer ranks and the senders of weights listen at this address.

    Raises:
        ConfigError: the job has several nodes, and the first one's name or this machine's address cannot be found.
    """
    # The launcher sets FLASH_NODE_RANK for all of its processes. `cluster.hub_host` is the name of the first node.
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
    """Return the addresses of a host name. Raises OSError if it has none."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)


def address_towards(endpoint: str, resolve: Resolve = _resolve) -> str:
    """Return this machine's address on the route to `endpoint`, HOST:PORT or [ADDRESS]:PORT of the first node.

    `resolve` finds the addresses of a name; tests replace it.

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
            f"{RENDEZVOUS} = {endpoint}: {first} cannot be resolved ({error}); expected HOST:PORT of the first node, "
            "or [ADDRESS]:PORT with an address of IPv6"
        ) from error
    if not _is_loopback(host) or first == "localhost" or _is_loopback(first):
        return host
    # Debian's /etc/hosts has a line such as `127.0.1.1 node1`, which resolves a machine's own name to loopback. Other
    # machines would reach themselves at that address.
    for family, far in DOCUMENTATION_ADDRESSES:  # the address on the interface of the default route
        with suppress(OSError):
            if not _is_loopback(own := _own_address(family, (far, int(port)))):
                return own
    with suppress(OSError):
        for *_, place in resolve(socket.gethostname(), int(port)):
            if not _is_loopback(str(place[0])):
                return str(place[0])
    raise ConfigError(
        f"{RENDEZVOUS} = {endpoint}: on this machine {first} is {host}, which other machines cannot reach, and it has "
        "no other address; set cluster.hub to an address that they reach"
    )


def _own_address(family: int, place: tuple[Any, ...]) -> str:
    """Return this machine's address on the interface that routes to the socket address `place`. Raises OSError."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only chooses the interface that routes to the peer.
        probe.connect(place)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    """Return True for a loopback address. A host name is none."""
    try:
        # Before Python 3.13, `is_loopback` is False for ::ffff:127.0.0.1, the loopback of IPv4 written as IPv6.
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:  # a host name
        return False


async def ask(address: HubAddress, request: Request[ReplyT], seconds: float = ASK_S) -> ReplyT:
    """Connect to a hub as a guest, send one request, and return the reply. A guest is a peer without a part in the run.

    Searches for a hub call this, and so do commands such as `flash drain`. The hub has `seconds` for the connection,
    and as many for the reply.

    Raises:
        FlashError: see `connect` and `Client.call`. If no hub lets this process in at a loopback address, the message
            adds that only the hub's own machine reaches it there.
    """
    connected = False
    try:
        async with connect(address.host, address.port, address.token, f"guest-{os.getpid()}", seconds) as hub:
            connected = True
            return await hub.call(request, seconds)
    except TransportError as error:
        # On another machine than the hub's, no process listens at a loopback address, or one of this machine, which has
        # another token or none. After the hub has proven the token, errors have other causes.
        if not connected and _is_loopback(address.host):
            error.args = (f"{error} (only nodes on its own machine can join, unless cluster.hub names a host)",)
        raise


class HubSearch:
    """Search for the hubs of one run, of which there is at most one at a time. A hub that ends may have a successor.

    Args:
        place: place of the hubs.
        token: the value of FLASH_TOKEN; None if it is not set.
        prints: True to print a line when the search has to wait.
        silence_s: seconds after which a hub that is announced but does not answer ends the search with an error. None:
            the search tries again until its own time is over.
    """

    def __init__(
        self, place: HubPlace, token: str | None, *, prints: bool = True, silence_s: float | None = None
    ) -> None:
        self._prints = prints
        self._silence_s = silence_s
        self._place = place
        self._token = token
        self._summary = 0
        """Time of the last change of the run's summary when a hub last answered, as `_written` returns it."""

    async def find(self, wait_s: float, before: p.RunReply | None = None) -> tuple[HubAddress, p.RunReply] | None:
        """Wait for the hub. Returns its address and its description of the run; None if the run has ended.

        Args:
            wait_s: seconds to wait for a hub; 0: ask once, without a retry.
            before: description of the run, if a hub of it was found before. Without it the result is never None.

        Raises:
            DeadlineError: no hub was found in time, or the hub did not answer.
            FlashError: this process cannot join the hub; or the run has failed; or, if `wait_s` is 0, there is no hub.
        """
        problem = printed = ""
        # With 0 seconds, one try is limited: `ask` takes at most ASK_S for the connection and ASK_S for the reply.
        with deadline(
            wait_s or 2 * ASK_S, f"the hub of {self._place}", lambda: f"the output of the first node ({problem})"
        ):
            while True:
                address = None
                try:
                    address = self._place.find(self._token)
                    # The dialect is a digest of all message types: the hub refuses a process with other code.
                    run = await ask(address, p.RunRequest(p.dialect()), self._silence_s or ASK_S)
                    self._summary = _written(self._place)
                    return address, run
                except FlashError as error:
                    # Without an address the search goes on: there is no hub, or it has just ended, and the next one may
                    # be about to start. It also goes on after a TransportError, because any process may answer at an
                    # old address. Other errors are the hub's own answer, which would not change.
                    silent = self._silence_s is not None and isinstance(error, DeadlineError)
                    if wait_s == 0 or silent or (address is not None and not isinstance(error, TransportError)):
                        raise
                    problem = str(error)
                    why = f": {problem}" if self._place.announced else ", which the first node starts"
                    if self._prints and why != printed:
                        printed = why
                        say(f"waiting up to {wait_s:g} s for the hub of {self._place}{why}")
                # No hub has answered: perhaps because the run is over.
                if before is not None and self._has_ended(before):
                    return None
                await anyio.sleep(RETRY_S)

    def _has_ended(self, run: p.RunReply) -> bool:
        """Return True if the run directory shows that the run has ended since a hub last answered.

        Without a shared run directory this cannot be known; then the search goes on until its time is over. `run` is
        the description of the run by its last hub. Raises FlashError if the run has failed.
        """
        if not self._place.run_dir:
            return False
        error = ErrorMarker(Path(self._place.run_dir), run.launch).message()
        if error is not None:
            raise FlashError(f"the run of {self._place} has failed: {error}")
        return _written(self._place) != self._summary


def _written(place: HubPlace) -> int:
    """Return the time at which the summary of a run was last written, in Unix nanoseconds; 0 if there is none. Each end
    of a run writes it again, so another time shows that the run has ended."""
    with suppress(OSError):
        if place.run_dir:
            return RunDirectory(Path(place.run_dir)).summary.stat().st_mtime_ns
    return 0
