"""Ownership of containers: labels that name the owner, a lock that shows if the owner still runs, and the reaper.

Every container carries `Labels` from the moment it exists: the engine writes them together with the container, so that
no crash can separate the two. The labels name the service that created the container, and its deadline. The service's
lock file shows if it still runs: the kernel releases the lock when the process ends, also after `kill -9`.

`verdict` decides from these alone, so every process that can reach the engine decides alike. `Reaper` removes the
containers and snapshots of an engine that have no owner any more, whichever service created them.
`envs.sandbox.pool.local_host.LocalHost` calls it at each check of its engine.

Law: every container with our service's label is known to its host, or removed at the host's next check.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from uuid import uuid4

import anyio
import msgspec

from envs.sandbox.engines.backend import INSTANCE, INSTANCE_LABEL
from envs.sandbox.pool.host import Container, HostSettings, Maker, Ticket
from flash.errors import ConfigError, SandboxError

_log = logging.getLogger(__name__)

PREFIX = "flash.sandbox."
"""Prefix of the names of all our labels."""

MARGIN_S = 60.0
"""Seconds past its deadline after which a container of an unknown owner is removed: clocks of two machines differ."""

_FLOCK = "@hhqqi0q"
"""Layout of `struct flock`: type, whence, start, length, process."""

FORGET_PAUSE_S = 1.0
"""Seconds between two attempts to remove a snapshot, while the engine may be restarting."""


class Labels(msgspec.Struct, frozen=True):
    """Labels of a container, parsed."""

    sandbox_id: str = msgspec.field(name="box")
    """Id of the sandbox that the container is."""
    service: str
    """Id of the service that created it; unchanged by a restart of that service."""
    deadline: float
    """Unix time after which the container must not exist."""
    lock: str
    """Path of the lock file that the service holds while it runs."""
    machine: str
    """Boot id of the machine that the lock file is on."""
    lease: str = ""
    """Id of the lease that it was created for; "" if it was created ahead of any request."""
    owner: str = ""
    """Owner of that lease; "" if there is none."""
    run: str = ""
    """Id of the run of the service that created it: each start has another one."""

    def as_dict(self) -> dict[str, str]:
        """Return the labels as an engine takes them."""
        return {PREFIX + name: str(value) for name, value in msgspec.to_builtins(self).items()}

    @classmethod
    def read(cls, labels: Mapping[str, str]) -> Labels | None:
        """Parse a container's labels; None if they are not ours, or damaged."""
        ours = {name.removeprefix(PREFIX): value for name, value in labels.items() if name.startswith(PREFIX)}
        try:
            return msgspec.convert(ours, cls, strict=False)
        except msgspec.ValidationError:
            return None


class OwnerAlive(Enum):
    """Liveness of a container's owner."""

    YES = "yes"
    """The owner holds its lock."""
    NO = "no"
    """The owner's lock is free, or its file is gone."""
    UNKNOWN = "unknown"
    """The owner runs, or ran, on another machine, or its lock file cannot be read."""


class OwnerVerdict(Enum):
    """Decision about a container."""

    KEEP = "keep"
    """The owner lives; or nobody knows if it does, and the deadline has not passed."""
    ORPHAN = "orphan"
    """The owner is gone: remove the container unless the owner restarts within the grace period."""
    REMOVE = "remove"
    """The deadline has passed."""


def verdict(labels: Labels, alive: OwnerAlive, now: float) -> OwnerVerdict:
    """Decide about a container of another service at unix time `now`.

    A container with a living owner is kept, whatever the clock says: the owner enforces deadlines itself, on a clock
    that does not jump.
    """
    if alive is OwnerAlive.YES:
        return OwnerVerdict.KEEP
    if alive is OwnerAlive.NO:
        return OwnerVerdict.ORPHAN
    return OwnerVerdict.REMOVE if now > labels.deadline + MARGIN_S else OwnerVerdict.KEEP


def machine() -> str:
    """Return the boot id of this machine.

    A container that outlives a boot has lost its owner, and its label then names another boot.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def owner_alive(labels: Labels, this_machine: str) -> OwnerAlive:
    """Find out if the process that owns a container still runs, by its lock file.

    Unknown for a container of another boot than `this_machine`, and if the lock file cannot be opened. A file that is
    gone means that the owner is gone.
    """
    if labels.machine != this_machine:
        return OwnerAlive.UNKNOWN
    try:
        descriptor = os.open(labels.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return OwnerAlive.NO
    except OSError:
        return OwnerAlive.UNKNOWN
    try:
        # The lock is queried, not taken: a lock held for a moment could make the owner's own start fail.
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
    finally:
        os.close(descriptor)
    return OwnerAlive.NO if struct.unpack(_FLOCK, found)[0] == fcntl.F_UNLCK else OwnerAlive.YES


def _whole_file(kind: int) -> bytes:
    """Return a `struct flock` for a lock of this kind on a whole file."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


class OwnerLock:
    """A lock that a service holds while it runs. A context manager. `owner_alive` queries it from other processes."""

    def __init__(self, path: Path) -> None:
        """Describe the lock. Entering the block creates the file at `path`, and takes the lock."""
        self.path = path
        self._descriptor: int | None = None
        """Open lock file; None outside of the block."""

    def __enter__(self) -> OwnerLock:
        """Take the lock.

        Raises:
            ConfigError: another process holds the lock.
            OSError: the file cannot be opened.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # The lock belongs to the open file, not to the process, so another part of this process sees it as well.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise ConfigError(f"{self.path} is held: a service with this state folder runs already") from None
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock. The file stays: removing it could remove the file that the next owner has just locked."""
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None


class Identity(msgspec.Struct, frozen=True):
    """Identity of a service, as in the labels of its containers."""

    service: str
    """Id of the service, which a restart does not change."""
    lock: str
    """Path of its lock file."""
    machine: str
    """Boot id of the machine that it runs on."""
    run: str
    """Id of this start of the service."""

    @classmethod
    def of(cls, service: str, lock: OwnerLock) -> Identity:
        """Return the identity of a service that holds its lock."""
        return cls(service, str(lock.path), machine(), uuid4().hex[:12])


class Reaper:
    """Removes containers and snapshots without an owner from one engine. `LocalHost` calls it at each check."""

    def __init__(
        self,
        maker: Maker,
        identity: Identity,
        settings: HostSettings,
        *,
        alive: Callable[[Labels, str], OwnerAlive],
        wall: Callable[[], float],
    ) -> None:
        """Create a reaper.

        Args:
            maker: lists and removes the containers of the engine.
            identity: identity of the own service.
            settings: settings of the host.
            alive: function that finds out if the owner of a container still runs. Only tests replace it.
            wall: function that returns the unix time. Only tests replace it.
        """
        self.removed = 0
        """Containers and snapshots removed so far."""
        self._maker = maker
        self._identity = identity
        self._settings = settings
        self._alive = alive
        self._wall = wall
        self._orphans: dict[str, float] = {}
        """Event-loop time at which a container was first seen without its owner."""
        self._forgotten: set[str] = set()
        """Snapshots whose removal failed; they are removed at the next check."""
        self._restored: dict[str, Ticket] = {}
        """Tickets of an earlier run, by sandbox id."""

    def restored(self, tickets: Sequence[Ticket]) -> None:
        """Store the tickets of an earlier run of the service, for `is_unreported`."""
        self._restored = {ticket.sandbox_id: ticket for ticket in tickets}

    def is_ours(self, container: Container) -> bool:
        """Return True if this service created the container, in this run or an earlier one."""
        labels = Labels.read(container.labels)
        return labels is not None and labels.service == self._identity.service

    def is_unreported(self, image: Container) -> bool:
        """Return True if the image is a snapshot whose service died before it could report it to the holder."""
        ticket = self._restored.get(image.labels.get(f"{PREFIX}box", ""))
        return ticket is not None and image.id not in ticket.snapshots

    def leftovers(self, containers: Sequence[Container], known: Collection[str]) -> list[Container]:
        """Return the containers and images to remove now, of all that the engine lists.

        `known` has our sandboxes that live or are starting.
        """
        listed = {each.id for each in containers}
        self._orphans = {id: seen for id, seen in self._orphans.items() if id in listed}
        return [each for each in containers if self._is_leftover(each, known)]

    def _is_leftover(self, container: Container, known: Collection[str]) -> bool:
        """Return True if a container or image must be removed now.

        A container of this service is left over if it is not `known`. A snapshot of this service is left over if it is
        too old, was never reported to a holder, or could not be removed before. For other services `verdict` decides.
        """
        labels = Labels.read(container.labels)
        if labels is None:
            return False
        if labels.service == self._identity.service:
            if container.image:
                late = self._wall() > labels.deadline + self._settings.snapshot_s
                # An engine may finish a snapshot after the process that asked for it has ended.
                unreported = container.labels.get(INSTANCE_LABEL) != INSTANCE and self.is_unreported(container)
                return late or unreported or container.id in self._forgotten
            return labels.sandbox_id not in known
        judged = verdict(labels, self._alive(labels, self._identity.machine), self._wall())
        if judged is not OwnerVerdict.ORPHAN:
            self._orphans.pop(container.id, None)
            return judged is OwnerVerdict.REMOVE
        # The grace period is counted on the event loop's clock from the first sight: a jump of the wall clock removes
        # nothing.
        now = anyio.current_time()
        return now - self._orphans.setdefault(container.id, now) >= self._settings.orphan_grace_s

    async def remove_all(self, containers: Sequence[Container]) -> None:
        """Remove these containers and images at the same time.

        One that cannot be removed now is only logged, and is found again at the next check.
        """

        async def remove(container: Container) -> None:
            """Remove one container or image, within `HostSettings.close_s`."""
            try:
                with anyio.fail_after(self._settings.close_s):
                    await self._maker.remove(container.id, image=container.image)
            except (SandboxError, TimeoutError) as error:
                _log.warning("container %s cannot be removed yet: %s", container.id, error)
                return
            self.removed += 1
            self._orphans.pop(container.id, None)
            self._forgotten.discard(container.id)

        async with anyio.create_task_group() as tasks:
            for container in containers:
                tasks.start_soon(remove, container)

    async def forget(self, image: str) -> None:
        """Remove a snapshot now, or at the next check if the engine does not answer in time."""
        try:
            with anyio.fail_after(self._settings.close_s):
                await self._forget(image)
        except TimeoutError:
            self._forgotten.add(image)

    async def _forget(self, image: str) -> None:
        """Try to remove a snapshot until the engine accepts it: an engine may be restarting."""
        while True:
            try:
                return await self._maker.remove(image, image=True)
            except SandboxError as error:
                _log.warning("snapshot %s cannot be removed yet: %s", image, error)
                await anyio.sleep(FORGET_PAUSE_S)
