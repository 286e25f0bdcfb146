"""Course: how far a run has come, how it will end, and waiting for it to go on. The parts of the hub share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from flash.errors import FlashError, PeerLostError
from flash.hub.bells import Bell, Bells
from flash.types import Published


class RunEnd(msgspec.Struct, frozen=True):
    """How the run ended."""

    reason: Literal["finished", "interrupted"]
    version: int
    ledger: dict[str, int]
    unfinished: str = ""
    """What did not end within `deadlines.shutdown` of an interrupt, in words."""


class Course:
    """`version`: what the run has reached; the trainer ranks may be on their way to it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.published: Published | None = None
        """The newest version that engines may have."""
        self.reachable = False
        """Whether those live who published it: else nobody can fetch it."""
        self.stopping: Literal["finished", "interrupted"] | None = None
        self.done = False
        """Whether everybody may leave."""
        self.progress = 0
        """Counts what ends a stage."""
        self.error: FlashError | None = None
        """What ended the run."""
        self.bells = Bells()

    async def until(self, bell: Bell, condition: Callable[[], bool]) -> None:
        """Wait, under the caller's deadline, until the condition is true or the run has failed.

        Whatever may make it true has to ring the bell.
        """
        while not condition():
            if self.error is not None:
                raise self.error
            await self.bells.heard(bell)

    def fail(self, error: FlashError) -> None:
        """End the run with this error; the first one wins."""
        self.error = self.error or error
        self.bells.ring_all()

    def refuse_at_end(self) -> None:
        """Raises PeerLostError: the run has failed, and who comes now is to wait for the next hub."""
        if self.error is not None:
            raise PeerLostError("this hub is about to end")

    def interrupt(self) -> None:
        """Stop after the running step; a run that has trained everything ends at once."""
        self.stopping = "interrupted"
        self.bells.ring("run", "batches", "engines")

    def end(self) -> None:
        """Let everybody leave."""
        self.done = True
        self.bells.ring_all()
