"""EngineMaker: a `Maker` over a container engine, and the `LocalHost` over it.

Each sandbox lives in a task of the maker. Leaving `open_maker` ends all of them and removes their containers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

from anyio.abc import TaskGroup, TaskStatus

from envs.sandbox.api import Spec
from envs.sandbox.engines.backend import SNAPSHOT_LABEL, Backend
from envs.sandbox.engines.machine import MachineLoad, MachineMeter
from envs.sandbox.local.sandbox import LocalSandbox, SandboxSettings
from envs.sandbox.pool.admission import Demand
from envs.sandbox.pool.host import Container, HostSettings
from envs.sandbox.pool.local_host import LocalHost
from envs.sandbox.pool.ownership import PREFIX, Identity
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxError, SandboxStartError
from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)

_MIB = 1 << 20


class EngineMaker:
    """Creates sandboxes on one engine. `open_maker` opens it."""

    def __init__(self, backend: Backend, tasks: TaskGroup, settings: SandboxSettings) -> None:
        self._backend = backend
        self._tasks = tasks
        self._settings = settings
        self._capacity: Demand | None = None
        self._meter: MachineMeter | None = None

    async def capacity(self) -> Demand:
        """Return the resources of the engine's machine."""
        if self._capacity is None:
            # Asked only once: the result stays the same, and Podman takes a second of CPU to answer.
            info = await self._backend.info()
            self._capacity = Demand(1000 * info.cpus, info.memory // _MIB)
            self._meter = MachineMeter() if info.here else None
        return self._capacity

    def load(self) -> MachineLoad | None:
        """Return the load of the engine's machine; None if that is another machine than this one."""
        return self._meter.read() if self._meter else None

    async def make(self, spec: Spec, sandbox_id: str, labels: Mapping[str, str]) -> Sandbox:
        return await self._keep(
            LocalSandbox(self._backend, spec, name=sandbox_id, labels=labels, settings=self._settings)
        )

    async def adopt(self, container: Container, spec: Spec, sandbox_id: str) -> Sandbox:
        """Take over a running container."""
        return await self._keep(LocalSandbox(self._backend, spec, adopt=container.id, settings=self._settings))

    async def containers(self) -> list[Container]:
        """Return every container and snapshot that has our labels, of any service.

        `LocalHost` compares them with its records, and removes those that have no owner.
        """
        containers = await self._backend.containers.list({f"{PREFIX}service": ""})
        images = await self._backend.images.list({SNAPSHOT_LABEL: ""})
        return [
            *(Container(each.container_id, each.labels, each.running) for each in containers),
            *(Container(name, labels, False, image=True) for name, labels in images.items()),
        ]

    async def remove(self, id: str, *, image: bool) -> None:
        if image:
            await self._backend.images.remove(id)
        else:
            await self._backend.containers.delete(id)

    async def _keep(self, sandbox: LocalSandbox) -> LocalSandbox:
        """Run a sandbox in a task of its own, and return once it is ready.

        If the caller is cancelled before that, the sandbox ends.
        """
        outcome = await self._tasks.start(self._live, sandbox)
        if isinstance(outcome, SandboxError):
            raise outcome
        return sandbox

    async def _live(self, sandbox: LocalSandbox, *, task_status: TaskStatus[SandboxError | None]) -> None:
        """Run one sandbox until it has ended. The started value is None once it is ready, or the error of its start.

        The sandbox has a task of its own because its block must be left by the task that has entered it, and the caller
        of `make` goes on before.
        """
        started = False
        try:
            async with sandbox:
                started = True
                task_status.started(None)
                await sandbox.wait_ended()
        except SandboxError as error:
            if not started:
                task_status.started(error)
        except Exception:  # boundary of a sandbox: a bug ends this sandbox, not the service
            _log.exception("sandbox %s failed", sandbox.sandbox_id)
            if not started:
                task_status.started(SandboxStartError(f"sandbox {sandbox.sandbox_id} failed; the log says why"))


@asynccontextmanager
async def open_maker(backend: Backend, settings: SandboxSettings | None = None) -> AsyncGenerator[EngineMaker]:
    """Open a maker for the time of the block."""
    async with unwrapped_group() as tasks:
        yield EngineMaker(backend, tasks, settings or SandboxSettings())
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_engine_host(
    backend: Backend,
    identity: Identity,
    *,
    name: str | None = None,
    settings: HostSettings | None = None,
    warm: Sequence[tuple[Spec, int]] = (),
) -> AsyncGenerator[LocalHost]:
    """Open a host over this engine for the time of the block.

    Args:
        backend: the engine.
        identity: identity of the service that the host belongs to.
        name: name of the host; the machine's name by default.
        settings: settings of the host.
        warm: pairs of a spec and the number of sandboxes of it that are always kept ready.
    """
    async with open_maker(backend) as maker:
        yield LocalHost(name or os.uname().nodename, maker, identity, settings=settings, warm=warm)
