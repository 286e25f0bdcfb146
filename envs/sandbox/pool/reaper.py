"""Reaper: finds containers and snapshots of an engine that have no owner any more, and removes them.

It decides from labels alone, so that any service that reaches the engine cleans up after any other.

Conservation: every container with our service's label is known to its host, or removed at the host's next check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import anyio

from envs.sandbox.engines.backend import INSTANCE, INSTANCE_LABEL
from envs.sandbox.pool.host import Container, HostSettings, Identity, Maker, Ticket
from envs.sandbox.pool.ownership import PREFIX, Labels, OwnerAlive, OwnerVerdict, verdict
from flash.errors import SandboxError

_log = logging.getLogger(__name__)

FORGET_PAUSE_S = 1.0
"""Seconds between two attempts to remove a snapshot, while the engine may be restarting."""


class Reaper:
    """Removes containers and snapshots without an owner from one engine."""

    def __init__(
        self,
        maker: Maker,
        identity: Identity,
        settings: HostSettings,
        *,
        alive: Callable[[Labels, str], OwnerAlive],
        wall: Callable[[], float],
    ) -> None:
        """Create a reaper. Only tests replace `alive` and `wall`."""
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
        """Store the tickets that an earlier run of the service had."""
        self._restored = {ticket.sandbox_id: ticket for ticket in tickets}

    def is_ours(self, container: Container) -> bool:
        """Return True if this service created the container, in this run or an earlier one."""
        labels = Labels.read(container.labels)
        return labels is not None and labels.service == self._identity.service

    def is_untold(self, image: Container) -> bool:
        """Return True if the image is a snapshot whose service died before it could report it to the holder."""
        ticket = self._restored.get(image.labels.get(f"{PREFIX}box", ""))
        return ticket is not None and image.id not in ticket.snapshots

    def leftovers(self, containers: Sequence[Container], known: Collection[str]) -> list[Container]:
        """Return the containers and images to remove now. `known` has our sandboxes that live or are starting."""
        return [each for each in containers if self._is_leftover(each, known)]

    def _is_leftover(self, container: Container, known: Collection[str]) -> bool:
        labels = Labels.read(container.labels)
        if labels is None:
            return False
        if labels.service == self._identity.service:
            if container.image:
                late = self._wall() > labels.deadline + self._settings.snapshot_s
                # An engine may finish a snapshot after the process that asked for it has ended.
                untold = container.labels.get(INSTANCE_LABEL) != INSTANCE and self.is_untold(container)
                return late or untold or container.id in self._forgotten
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
        """Remove these. A container or image that cannot be removed now is found again at the next check."""

        async def remove(container: Container) -> None:
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
        """Try to remove a snapshot until the engine accepts it."""
        while True:
            try:
                return await self._maker.remove(image, image=True)
            except SandboxError as error:
                _log.warning("snapshot %s cannot be removed yet: %s", image, error)
                await anyio.sleep(FORGET_PAUSE_S)
