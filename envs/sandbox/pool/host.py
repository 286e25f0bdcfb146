"""What the pool needs of a host, and what a host needs of its engine.

`Host` is the pool's side: a place with a capacity that starts sandboxes. `Maker` is the engine's side: it makes, finds
and removes containers. `envs.sandbox.pool.local_host` stands between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from uuid import uuid4

import msgspec
from anyio.abc import TaskStatus

from envs.sandbox.api import Spec
from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.pool.ownership import OwnerLock, machine
from envs.sandbox.pool.placement import Demand
from envs.sandbox.sandbox import Sandbox


class Ticket(msgspec.Struct, frozen=True):
    """What a sandbox is started for."""

    sandbox_id: str
    """Its id, chosen before it exists."""
    lease: str
    owner: str
    spec: Spec
    snapshots: tuple[str, ...] = ()
    """After a restart: the images made of it that somebody knows of."""


class HostReport(msgspec.Struct, frozen=True):
    """A host at one moment."""

    capacity: Demand
    accepts: bool = True
    why: str = ""
    """Why it does not accept."""
    warm: dict[str, int] = {}
    """Ready sandboxes by `warm_key`."""
    hits: int = 0
    misses: int = 0
    orphans_removed: int = 0
    load: MachineLoad | None = None
    """None where it is not measured."""


Settled = Callable[[str, Sandbox | None], None]
"""Told of the id of a sandbox of an earlier run: the sandbox, or None where it is lost."""


def ignore(*_: object) -> None:
    """Where nobody wants to be told."""


class Host(Protocol):
    """A place for sandboxes."""

    @property
    def name(self) -> str: ...

    def report(self) -> HostReport:
        """What is known of it now."""
        ...

    def take(self, spec: Spec) -> Sandbox | None:
        """A ready sandbox of this kind, which is the caller's from now on."""
        ...

    async def start(self, ticket: Ticket) -> Sandbox:
        """Start one. Leaves nothing behind when it fails or is cancelled.

        Raises:
            SandboxError: it cannot be started.
        """
        ...

    async def forget(self, image: str) -> None:
        """Remove a snapshot. What cannot be removed now is removed when its time is over."""
        ...

    async def recover(
        self, tickets: Sequence[Ticket], *, answered: Callable[[], None] = ignore, settled: Settled = ignore
    ) -> dict[str, Sandbox]:
        """After a restart: the sandboxes of these tickets that still live, by id.

        All other sandboxes of ours are removed, and so are snapshots of these that nobody was told of. Calls `answered`
        once it can start others, and `settled` for each ticket as soon as it is known: no sandbox waits for another.
        """
        ...

    async def run(self, changed: Callable[[], None], *, task_status: TaskStatus[None]) -> None:
        """Do the host's own work until cancelled; call `changed` when its report has changed."""
        ...


class Identity(msgspec.Struct, frozen=True):
    """Which service this is, as its containers' labels say."""

    service: str
    lock: str
    machine: str
    run: str

    @classmethod
    def of(cls, service: str, lock: OwnerLock) -> Identity:
        """For a service that holds its lock."""
        return cls(service, str(lock.path), machine(), uuid4().hex[:12])


class Container(msgspec.Struct, frozen=True):
    """One container, or the image that a snapshot is, as the engine lists it."""

    id: str
    labels: Mapping[str, str]
    running: bool
    image: bool = False


class Maker(Protocol):
    """Makes sandboxes on one engine."""

    async def capacity(self) -> Demand:
        """What the engine's machine has. Raises SandboxError when the engine does not answer the first time."""
        ...

    def load(self) -> MachineLoad | None:
        """What the engine's machine does; None where that is not this machine."""
        ...

    async def make(self, spec: Spec, sandbox_id: str, labels: Mapping[str, str]) -> Sandbox:
        """A started sandbox with these labels. Raises SandboxError."""
        ...

    async def adopt(self, container: Container, spec: Spec, sandbox_id: str) -> Sandbox:
        """Take over a running container. Raises SandboxError when it does not answer."""
        ...

    async def containers(self) -> list[Container]:
        """Every container and snapshot with one of our labels, whoever made it, running or not."""
        ...

    async def remove(self, id: str, *, image: bool) -> None:
        """Remove a container, whatever it does, or an image. Nothing when it is gone."""
        ...


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a host keeps itself."""

    cpu_factor: float = 4.0
    """CPUs promised per CPU there: a sandbox of a rollout waits for the model most of the time."""
    memory_factor: float = 0.8
    """Share of the memory that may be promised."""
    memory_reserve: float = 0.05
    """Share of the machine's memory that must be free, whoever uses the rest, for more sandboxes to start."""
    starts_at_once: int = 8
    """Sandboxes started at the same time."""
    look_s: float = 15.0
    """Seconds between two looks at the engine's list of containers."""
    answer_s: float = 20.0
    """Seconds for the engine to answer a look."""
    adopt_s: float = 15.0
    """Seconds for one sandbox of an earlier run to be taken over; all at the same time."""
    start_s: float = 120.0
    """Seconds for one sandbox to start."""
    close_s: float = 30.0
    """Seconds for one container to be removed."""
    orphan_grace_s: float = 60.0
    """Seconds for a service that died to come back before others remove its containers."""
    snapshot_s: float = 86_400.0
    """Seconds that a snapshot is kept beyond the life of the sandbox that it was made of."""
    warm_age_s: float = 1800.0
    """Seconds after which a ready sandbox is replaced by a new one."""
    idle_warm_s: float = 300.0
    """Seconds for which a kind that was asked for is kept ready."""
    warm_max: int = 16
    """Most sandboxes of one kind kept ready because they were asked for."""


def warm_key(spec: Spec) -> str:
    """Equal for specs that can share a ready sandbox: how long it may live is decided by who takes it."""
    return msgspec.json.encode(msgspec.structs.replace(spec, deadline_s=1.0, idle_s=None), order="sorted").decode()


def new_sandbox_id() -> str:
    """The name of a container to be."""
    return f"flash-{uuid4().hex[:20]}"


def demand(spec: Spec) -> Demand:
    """What a sandbox of this spec is promised."""
    return Demand(max(1, round(spec.cpus * 1000)), spec.memory_mib)
