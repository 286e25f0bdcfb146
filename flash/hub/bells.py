"""Bells: who waits for what, so that a change wakes those whom it concerns and nobody else.

A thousand engines wait for their next version while results come in by the thousand; each wakes one or two waiters.
"""

from __future__ import annotations

from typing import Literal

import anyio

Bell = Literal["run", "batches", "engines", "versions", "put off", "ranks"] | tuple[Literal["leases", "cancels"], int]
"""What may have changed: the run's progress, whether a batch can be formed, the versions of engines, the published one,
what was put off, which processes the trainer ranks are, what a node may have, what it is to cancel."""


class Bells:
    """Events by name. Rings are not remembered: a waiter looks at its condition first."""

    def __init__(self) -> None:
        self._events: dict[Bell, anyio.Event] = {}

    async def heard(self, bell: Bell) -> None:
        """Wait, under the caller's deadline, for the next ring."""
        event = self._events.get(bell)
        if event is None:
            event = self._events[bell] = anyio.Event()
        await event.wait()

    def ring(self, *bells: Bell) -> None:
        """Wake those who wait for any of these."""
        for bell in bells:
            if (event := self._events.pop(bell, None)) is not None:
                event.set()

    def ring_all(self) -> None:
        """Wake everybody."""
        self.ring(*list(self._events))
