"""Protocols between the pool, its hosts and their engines.

A host, in the packages `pool` and `service`, is a place with a capacity that starts sandboxes: an engine or another
service. `SandboxPool` and its parts call `Host`. `Maker` is the engine's side: it creates, finds and removes
containers. `envs.sandbox.pool.local_host` connects the two, and `envs.sandbox.remote.host` reaches another service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from uuid import uuid4

import msgspec
from anyio.abc import TaskStatus

from envs.sandbox.api import Spec
from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.pool.admission import Demand
from envs.sandbox.sandbox import Sandbox

Settled = Callable[[str, Sandbox | None], None]
"""Function that is called for each sandbox of an earlier run, with its id and the sandbox; None: it is lost."""


class Ticket(msgspec.Struct, frozen=True):
    """Order to a host to start a sandbox, or to recover one."""

    sandbox_id: str
    """Id of the sandbox, chosen before the sandbox exists."""
    lease: str
    """Id of the lease that the sandbox is for; empty for one that is started ahead of requests."""
    owner: str
    """Owner of that lease."""
    spec: Spec
    """Kind of the sandbox."""
    snapshots: tuple[str, ...] = ()
    """Images made of this sandbox that are reported to a holder or used by forks. Set after a restart only."""


class HostReport(msgspec.Struct, frozen=True):
    """State of a host at one moment."""

    capacity: Demand
    """Resources that may be promised to sandboxes."""
    accepts: bool = True
    """True if the host takes sandboxes."""
    why: str = ""
    """Reason why the host does not take sandboxes; empty if it does."""
    warm: dict[str, int] = {}
    """Number of ready sandboxes by `warm_key`."""
    hits: int = 0
    """Number of requests that found a ready sandbox."""
    misses: int = 0
    """Number of requests that found none."""
    orphans_removed: int = 0
    """Number of containers and snapshots without an owner that were removed."""
    load: MachineLoad | None = None
    """Load of the host's machine; None if it is not measured."""


def ignore(*_: object) -> None:
    """Do nothing: a callback for callers that need no notification."""


class Host(Protocol):
    """A place for sandboxes."""

    @property
    def name(self) -> str:
        """Name of the host, unique in its pool."""
        ...

    def report(self) -> HostReport:
        """Return the current state of the host."""
        ...

    def take(self, spec: Spec) -> Sandbox | None:
        """Take a ready sandbox of this kind, which belongs to the caller from then on; None if there is none.

        It lives at least as long as a new one would.
        """
        ...

    async def start(self, ticket: Ticket) -> Sandbox:
        """Start the sandbox of a ticket. If the start fails or is cancelled, the host removes what it had begun, at the
        latest with its next check, or when the lease at a remote host ends.

        Raises:
            SandboxError: the sandbox cannot be started.
        """
        ...

    async def forget(self, image: str) -> None:
        """Remove a snapshot. If that fails now, it is removed later."""
        ...

    async def recover(
        self, tickets: Sequence[Ticket], *, answered: Callable[[], None] = ignore, settled: Settled = ignore
    ) -> dict[str, Sandbox]:
        """Recover the sandboxes of these tickets after a restart. Returns those that still live, by id.

        All other sandboxes of this service are removed, and so are snapshots of these sandboxes that were never
        reported to a holder. Calls `answered` once the host can start other sandboxes. Calls `settled` for a ticket as
        soon as its result is known, so no lease waits for the recovery of another. A ticket may be left out; for it,
        the result of this method counts.
        """
        ...

    async def run(self, changed: Callable[[], None], *, task_status: TaskStatus[None]) -> None:
        """Do the host's own work until cancelled. Calls `changed` when the report has changed."""
        ...


class Container(msgspec.Struct, frozen=True):
    """A container, or the image of a snapshot, as the engine lists it. `Reaper` decides about both in the same way."""

    id: str
    """Id of the container, or name of the image."""
    labels: Mapping[str, str]
    """Labels, from which `envs.sandbox.pool.ownership` finds the owner."""
    running: bool
    """True if the container runs; False for an image."""
    image: bool = False
    """True if this is the image of a snapshot."""


class Maker(Protocol):
    """Creates, finds and removes sandboxes of one engine, for a `LocalHost` and its `Reaper`."""

    async def capacity(self) -> Demand:
        """Return the resources of the engine's machine.

        Raises:
            SandboxError: the engine does not answer the first time.
        """
        ...

    def load(self) -> MachineLoad | None:
        """Return the load of the engine's machine; None if that is another machine than this one."""
        ...

    async def make(self, spec: Spec, sandbox_id: str, labels: Mapping[str, str]) -> Sandbox:
        """Start a sandbox, and return it once it is ready. `sandbox_id` becomes the name of its container.

        Raises:
            SandboxError: the sandbox cannot be started.
        """
        ...

    async def adopt(self, container: Container, spec: Spec) -> Sandbox:
        """Take over a running container of an earlier run of the service, and return its sandbox.

        Raises:
            SandboxError: the container does not answer.
        """
        ...

    async def containers(self) -> list[Container]:
        """Return every container and snapshot that has labels of Flash, of any service, running or not."""
        ...

    async def remove(self, id: str, *, image: bool) -> None:
        """Remove an image, or a container, running or not. Does nothing if it is gone."""
        ...


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a host."""

    cpu_factor: float = 4.0
    """CPUs promised per CPU of the machine: a sandbox of a rollout waits for the model most of the time."""
    memory_factor: float = 0.8
    """Share of the machine's memory that may be promised."""
    memory_reserve: float = 0.05
    """Share of the machine's memory that must be free, whatever uses the rest, for more sandboxes to start."""
    starts_at_once: int = 8
    """Most sandboxes that start at the same time."""
    look_s: float = 15.0
    """Seconds between two checks of the engine's list of containers."""
    answer_s: float = 20.0
    """Seconds that the engine has to answer a check."""
    adopt_s: float = 15.0
    """Seconds to take over one sandbox of an earlier run. All are taken over at the same time."""
    start_s: float = 120.0
    """Seconds that one sandbox has to start."""
    close_s: float = 30.0
    """Seconds that removing one container may take."""
    orphan_grace_s: float = 60.0
    """Seconds that a service which died has to restart before other services remove its containers."""
    snapshot_s: float = 86_400.0
    """Seconds that a snapshot is kept beyond the deadline of the sandbox that it was made of."""
    warm_age_s: float = 1800.0
    """Seconds after which a ready sandbox is replaced by a new one."""
    idle_warm_s: float = 300.0
    """Seconds after its last request for which a kind is kept ready."""
    warm_max: int = 16
    """Most sandboxes of one kind that are kept ready because of requests."""


def warm_key(spec: Spec) -> str:
    """Return a key that is equal for specs that can share a ready sandbox."""
    # The lifetimes are left out: the lease that takes the sandbox enforces them, and `LocalHost.take` gives it no
    # sandbox that ends earlier.
    return msgspec.json.encode(msgspec.structs.replace(spec, deadline_s=1.0, idle_s=None), order="sorted").decode()


def new_sandbox_id() -> str:
    """Return a new id for a sandbox, which is also the name of its container."""
    return f"flash-{uuid4().hex[:20]}"


def demand(spec: Spec) -> Demand:
    """Return the resources that are promised to a sandbox of this spec."""
    return Demand(max(1, round(spec.cpus * 1000)), spec.memory_mib)
