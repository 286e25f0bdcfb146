"""Members: which nodes the run has, and how they and their engines are numbered. Pure state.

Node 0 is a member from the start, since the hub is in its loop. Every other node joins when it comes, and its numbers
are free again once it is gone. One that has trainer ranks keeps the number that it has in the job.

Law: of the members that live no two have the same number, and no two engines.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import sha256
from itertools import count

import msgspec

from flash.config.load import dump
from flash.config.tree import Config
from flash.errors import ConfigError, PeerLostError
from flash.hub import protocol as p

HUBS_OWN = 0
"""The node whose loop shares the hub's process."""


class Origin(msgspec.Struct, frozen=True):
    """Where a run was started: what its paths and import paths are relative to."""

    folder: str = ""
    imports: tuple[str, ...] = ()
    """Folders of the user's modules."""
    launch: str = ""
    """The launch of the first node, as in `error.json`."""


def digest(config_text: str) -> str:
    """Tells one configuration from another."""
    return sha256(config_text.encode()).hexdigest()[:16]


class Members:
    """See the module's docstring.

    Args:
        config: the run.
        origin: where it was started.
    """

    def __init__(self, config: Config, origin: Origin) -> None:
        self._config = config
        self._origin = origin
        self._engines = {HUBS_OWN: range(config.engines_on(HUBS_OWN))}
        """The numbers of each member's engines."""

    @cached_property
    def _text(self) -> str:
        return dump(self._config)

    def has_joined(self, node: int) -> bool:
        """Whether this number is that of a node which came by itself, and may go."""
        return node != HUBS_OWN

    @property
    def engines(self) -> int:
        """Engines of all members, started or not."""
        return sum(map(len, self._engines.values()))

    @property
    def numbers(self) -> list[int]:
        """All members, whether they have come yet or not."""
        return sorted(self._engines)

    @property
    def joined(self) -> list[int]:
        """The nodes that have come by themselves."""
        return [node for node in self._engines if self.has_joined(node)]

    def about(self, request: p.RunRequest, version: int, *, ending: bool) -> p.RunReply:
        """What a node has to know to become a member.

        Raises:
            ConfigError: it runs another version of Flash.
        """
        if request.code != p.dialect():
            raise ConfigError(
                f"the hub speaks version {p.dialect()} of the messages, and this node version {request.code}: install "
                "the same version of Flash on both"
            )
        return p.RunReply(
            self._text,
            digest(self._text),
            self._origin.folder,
            list(self._origin.imports),
            self._origin.launch,
            ending,
            version,
        )

    def join(self, request: p.JoinRequest) -> p.JoinReply:
        """Number a new member and its engines.

        Raises:
            ConfigError: there is no room for it.
            PeerLostError: it has heard of another incarnation of this run.
        """
        if request.digest != digest(self._text):
            raise PeerLostError("the hub has started again, with another configuration")
        cluster = self._config.cluster
        if self._config.weights_backend == "ipc":
            raise ConfigError("weights.backend = ipc ends at the trainers' machine: nodes join with tcp or nccl")
        free = (number for number in count(cluster.trainer_nodes) if number not in self._engines)
        own = request.node
        node = own if 0 < own < cluster.trainer_nodes and own not in self._engines else next(free)
        first = 0
        for taken in sorted(self._engines.values(), key=lambda engines: engines.start):
            if first + request.engines <= taken.start:
                break
            first = max(first, taken.stop)
        self._engines[node] = range(first, first + request.engines)
        return p.JoinReply(node, first)

    def may_leave(self, node: int) -> None:
        """Raises ConfigError: the run has no such node."""
        if node not in self.joined:
            known = ", ".join(map(str, self.joined)) or "none"
            raise ConfigError(f"no node {node} has joined this run (those that have: {known})")

    def left(self, node: int) -> None:
        """A member is gone; its numbers are free. The hub's own node ends with the hub."""
        if self.has_joined(node):
            self._engines.pop(node, None)
