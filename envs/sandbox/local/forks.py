"""The forks of a sandbox: started together, and the image that they share removed after the last of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
from anyio.abc import TaskStatus

from envs.sandbox.api import Spec
from envs.sandbox.engines.backend import Images
from flash.errors import SandboxClosedError, SandboxError
from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)


class UnstartedFork(Protocol):
    """A sandbox that is not started yet."""

    @property
    def spec(self) -> Spec: ...

    async def keep(self, *, task_status: TaskStatus[Any]) -> None:
        """Live until it is closed or lost; started when it is ready. Raises SandboxError when it cannot be started."""
        ...


class Forks:
    """The forks of one sandbox, and the image that they began from, which is removed with the last of them.

    Args:
        images: of their engine.
        forks: not started yet.
        removal: seconds for removing the image.
    """

    def __init__(self, images: Images, forks: Sequence[UnstartedFork], removal: float) -> None:
        self._images = images
        self._forks = forks
        self._removal = removal
        self._scope = anyio.CancelScope()
        self._settled = anyio.Event()
        self._ended = anyio.Event()
        self._error: SandboxError | None = None

    async def started(self) -> None:
        """Wait until all of them are ready. Cancelled, it ends them.

        Raises:
            SandboxError: one of them cannot be started, or what they are forked from ended; none is left.
        """
        try:
            await self._settled.wait()
        except BaseException:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            raise
        if self._error is not None:
            await self._ended.wait()
            raise self._error

    async def keep(self) -> None:
        """Start all of them, and live until all have ended; when one cannot be started, none is."""
        try:
            with self._scope:
                await self._live()
        except SandboxError as error:
            self._error = error
        finally:
            if not self._settled.is_set() and self._error is None:
                self._error = SandboxClosedError("the sandbox ended while it was forked")
            self._settled.set()
            await self.forget()
            self._ended.set()

    async def _live(self) -> None:
        async with unwrapped_group() as tasks:
            failures: list[SandboxError] = []

            async def start(fork: UnstartedFork) -> None:
                try:
                    await tasks.start(fork.keep)
                except SandboxError as error:
                    failures.append(error)

            async with anyio.create_task_group() as starts:
                for fork in self._forks:
                    starts.start_soon(start, fork)
            if failures:
                raise failures[0]
            self._settled.set()

    async def forget(self) -> None:
        """Remove the image that they began from; one that cannot be removed is left to the host's next look."""
        with anyio.move_on_after(self._removal, shield=True):
            try:
                await self._images.remove(self._forks[0].spec.image)
            except SandboxError as error:
                _log.warning("removing image %s: %s", self._forks[0].spec.image, error)
