"""LocalSandbox: one container with its agent, from its creation to its removal.

Lifecycle: `starting` → `ready` → `closed` (by its owner, its deadline, its idle time or its disk limit) or `lost` (its
container or its agent is gone). One task owns it; leaving the block ends that task, which removes the container before
anything else, also when it is cancelled at any await.

Law: no caller waits for a sandbox that is gone. The end of the link, a missed heartbeat and the end of the container
each end every call in progress with an error that says why.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from envs.sandbox.api import Sandbox, Snapshot, Spec, State
from envs.sandbox.engines import profiles
from envs.sandbox.engines.backend import AGENT_SECRET, Backend, Link, Surroundings
from envs.sandbox.engines.bundle import Options
from envs.sandbox.local import watches
from envs.sandbox.local.channel import Channel
from envs.sandbox.local.commands import AgentCommands
from envs.sandbox.local.files import AgentFiles, restore, send_tree
from envs.sandbox.local.forks import Forks
from envs.sandbox.local.greeting import Hello, NoLink, with_deadline
from envs.sandbox.local.shell_channel import ShellChannel
from envs.sandbox.local.snapshots import INSTANCE, INSTANCE_LABEL, SNAPSHOT_LABEL, SNAPSHOT_NAME, from_snapshot
from flash.errors import (
    SandboxClosedError,
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    SandboxTimeoutError,
)
from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)

LIFE_MARGIN = 5.0
"""Seconds that an agent lives longer than its host lets it."""
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between attempts to reach the engine or the agent again."""
LATE_LOOKS = 6
"""How often a container is removed whose creation was not answered in time: an engine that was stopped and goes on
creates it beside the first removal, or after it."""
FORGET_SECONDS = 5.0
"""For removing the image of a snapshot that failed or was cancelled."""


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of a sandbox. Seconds."""

    start: float = 120.0
    """From the engine being asked until the agent answers."""
    heartbeat: float = 10.0
    """Without hearing from the agent, after which it is asked whether it lives."""
    silence: float = 30.0
    """For it to answer that; afterwards it is lost."""
    orphan: float = 300.0
    """That the agent waits for a host that takes over, when its own is gone."""
    reconnect: float = 30.0
    """For taking over again, when only the link broke."""
    removal: float = 60.0
    """For removing the container, also when the block was cancelled."""


class LocalSandbox(AgentCommands, AgentFiles, Sandbox):
    """See the module. An asynchronous context manager; or a task: `await tasks.start(sandbox.keep)`.

    Args:
        backend: the engine.
        spec: what is wanted.
        name: of the container; a new one by default.
        labels: of the container, by which it is found when this process is gone.
        settings: its deadlines.
        adopt: id of a running container to take over, instead of making one.
    """

    hello: Hello

    def __init__(
        self,
        backend: Backend,
        spec: Spec,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        settings: SandboxSettings | None = None,
        adopt: str | None = None,
    ) -> None:
        profiles.check(spec)
        self._backend = backend
        self._spec = spec
        self._name = name or f"flash-{uuid4().hex[:20]}"
        self._labels = dict(labels or {})
        self._settings = settings or SandboxSettings()
        self._secret = secrets.token_hex(32)
        self._container_id = adopt or ""
        self._adopted = adopt is not None
        self._state: State = "starting"
        self._reason = "the sandbox was not started"
        self._channel = Channel(NoLink())
        self._surroundings = Surroundings(spec.workdir)
        self._connected = anyio.Event()
        self._ending = anyio.Event()
        self._ended = anyio.Event()
        self._uses = 0
        self._removals = 1
        self._unwanted: list[str] = []
        self._forks: TaskGroup
        self._stack = AsyncExitStack()

    @property
    def sandbox_id(self) -> str:
        """The name of its container."""
        return self._name

    @property
    def container_id(self) -> str:
        """The engine's id of its container; empty before it exists."""
        return self._container_id

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str:
        """Why it is lost or closed."""
        return self._reason

    @property
    def busy(self) -> bool:
        """Whether calls are in progress."""
        return self._channel.busy > 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(unwrapped_group())
            await tasks.start(self._own)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end("closed", "the sandbox was closed")
        # Without the block's own error: it is not the task group's.
        await self._stack.__aexit__(None, None, None)

    async def keep(self, *, task_status: TaskStatus[LocalSandbox] = anyio.TASK_STATUS_IGNORED) -> None:
        """Live, as a task of the owner: started when ready, until it is closed or lost and its container removed."""
        async with self:
            task_status.started(self)
            await self._ending.wait()

    async def close(self) -> None:
        """End it; returns when its container is removed, or was given up after its deadline."""
        self._end("closed", "the sandbox was closed")
        await self._ended.wait()

    async def wait_ended(self) -> None:
        """Wait until it is closed or lost, and its container removed."""
        await self._ended.wait()

    async def channel(self) -> Channel:
        """The channel to the agent; while that is being reached again, after that."""
        if self._state == "ready" and self._channel.broken and self._connected.is_set():
            self._connected = anyio.Event()
        if self._state == "ready":
            await self._connected.wait()
        if self._state != "ready":
            raise self._over()
        self._uses += 1
        return self._channel

    def _over(self) -> SandboxError:
        """What a call is told that came too late."""
        return SandboxClosedError(self._reason) if self._state == "closed" else SandboxLostError(self._reason)

    async def snapshot(self) -> Snapshot:
        (await self.channel()).check()
        tag = secrets.token_hex(16)
        name = f"{SNAPSHOT_NAME}:{tag}"
        most = profiles.disk_mib(self._spec) * profiles.MIB
        files = send_tree(self, self.hello.workdir, most) if self._surroundings.files_apart else None
        labels = {**self._labels, SNAPSHOT_LABEL: self._name, INSTANCE_LABEL: INSTANCE}
        try:
            size = await self._backend.commit(self._container_id, name=name, labels=labels, files=files, most=most)
        except BaseException as error:
            # The engine may have made it all the same, or still be at it.
            self._unwanted.append(name)
            await self._forget_unwanted()
            if isinstance(error, SandboxError) and self._ending.is_set():
                raise self._over() from error
            raise
        return Snapshot(tag, msgspec.structs.replace(self._spec, image=name), size)

    async def _forget_unwanted(self) -> None:
        """Remove the images of snapshots that nobody was given, as far as they can be removed now."""
        with anyio.move_on_after(FORGET_SECONDS, shield=True):
            for name in self._unwanted:
                with suppress(SandboxError):
                    await self._backend.remove_image(name)

    async def fork(self, count: int) -> list[LocalSandbox]:
        if count < 1:
            raise SandboxRefusedError(f"at least one fork must be asked for, not {count}")
        spec = (await self.snapshot()).spec
        forks = [LocalSandbox(self._backend, spec, labels=self._labels, settings=self._settings) for _ in range(count)]
        group = Forks(self._backend, forks, self._settings.removal)
        if self._ending.is_set():
            await group.forget()
            raise self._over()
        self._forks.start_soon(group.keep)
        await group.started()
        return forks

    async def _own(self, *, task_status: TaskStatus[None]) -> None:
        """Own the container, and the forks that are made of it."""
        async with unwrapped_group() as self._forks:
            await self._live(task_status)
            self._forks.cancel_scope.cancel()

    async def _live(self, task_status: TaskStatus[None]) -> None:
        """From no container to no container.

        Waits for the owner to end it, for its limits, and for its loss. Unblocked by any of them. Produces a ready
        sandbox, then a removed container.
        """
        try:
            with anyio.move_on_after(self._settings.start) as scope:
                await self._connect(scope, task_status)
            if scope.cancelled_caught and self._state == "starting":
                raise SandboxStartError(
                    f"the sandbox was not ready after {self._settings.start:g} s; look at the engine and its machine"
                )
            self._end("lost", "its link broke, and it could not be reached again")
        finally:
            self._end("closed", "the sandbox was closed")
            with anyio.move_on_after(self._settings.removal, shield=True) as removal:
                await self._remove()
            await self._forget_unwanted()
            if removal.cancelled_caught:
                _log.error("container %s could not be removed in %g s", self._name, self._settings.removal)
            self._ended.set()

    async def _connect(self, scope: anyio.CancelScope, task_status: TaskStatus[None]) -> None:
        """Make the container, and hold a link to it until it is ended; a link that broke is replaced."""
        opener = self._backend.take_over
        if not self._adopted:
            opener = self._backend.attach
            await self._make()
        else:
            await self._find()
        self._surroundings = self._backend.surroundings(self._container_id, self._spec)
        pause = FIRST_PAUSE
        while not self._ending.is_set():
            try:
                async with opener(self._container_id) as link:
                    channel = await self._introduce(link, fresh=opener == self._backend.attach)
                    await self._serve(channel, scope, task_status)
                    pause = FIRST_PAUSE
            except SandboxError as error:
                if self._state == "starting":
                    raise
                _log.warning("sandbox %s: %s", self._name, error)
            if self._ending.is_set():
                return
            if self._connected.is_set():
                self._connected = anyio.Event()
            scope.deadline = min(scope.deadline, anyio.current_time() + self._settings.reconnect)
            await self._check_container()
            if not self._surroundings.address:
                self._end("lost", "its link broke, and a sandbox of its profile is not taken over")
                return
            opener = self._backend.take_over
            await anyio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _make(self) -> None:
        """Create and start the container. A creation is not cut off: its container could not be found again."""
        runtime = self._spec.runtime
        if runtime is not None and runtime not in (info := await self._backend.info()).runtimes:
            raise SandboxRefusedError(
                f"{info.name} has no runtime {runtime!r}, only {', '.join(info.runtimes) or 'its default'}"
            )
        labels = {**self._labels, AGENT_SECRET: self._secret}
        with anyio.CancelScope(shield=True):
            try:
                self._container_id = await self._backend.create(self._spec, name=self._name, labels=labels)
            except SandboxTimeoutError:
                self._removals = LATE_LOOKS
                raise
        await anyio.lowlevel.checkpoint()
        await self._backend.start(self._container_id)
        if runtime is not None:
            found = await self._backend.inspect(self._container_id, runtime=True)
            if found is None or Path(found.runtime).name != runtime:
                raise SandboxRefusedError(
                    f"the engine runs the sandbox under {found.runtime if found else 'nothing'!r} instead of "
                    f"{runtime!r}; Podman takes its runtime from containers.conf"
                )

    async def _find(self) -> None:
        """The container that is to be taken over."""
        found = await self._backend.inspect(self._container_id)
        if found is None or not found.running or AGENT_SECRET not in found.labels:
            raise SandboxLostError(f"container {self._container_id[:20]} does not run, or is no sandbox")
        self._name, self._secret = found.name, found.labels[AGENT_SECRET]
        # What is made of it has to be found like what it was made as; the image's labels are among its own.
        own = (AGENT_SECRET, SNAPSHOT_LABEL, INSTANCE_LABEL)
        self._labels = {name: value for name, value in found.labels.items() if name not in own}

    async def _introduce(self, link: Link, *, fresh: bool) -> Channel:
        """Start the agent, or prove to it that it may trust us."""
        if not fresh:
            await link.send(self._secret.encode())
            return Channel(link)
        around = self._surroundings
        options = Options(
            workdir=around.workdir,
            lifetime=self._spec.deadline_s + LIFE_MARGIN,
            orphan=self._settings.orphan,
            cgroup=around.cgroup,
            address=around.address,
            secret=self._secret,
        )
        kind, detail, rest = await with_deadline(link, options, self._settings.start, around.prelude)
        if kind == "shell":
            return ShellChannel(rest, around.workdir, options.lifetime, int(detail))
        return Channel(rest)

    async def _serve(self, channel: Channel, scope: anyio.CancelScope, task_status: TaskStatus[None]) -> None:
        """Use this channel until it breaks or the sandbox ends."""
        async with unwrapped_group() as tasks:

            async def until(wait: Callable[[], Awaitable[object]]) -> None:
                await wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(until, channel.run)
            tasks.start_soon(until, self._ending.wait)
            try:
                self.hello, _ = await channel.ask("hello", {}, Hello, self._settings.start)
                if self._state == "starting" and not self._adopted and from_snapshot(self._spec):
                    await restore(self, channel, self.hello.workdir)
                if self._state == "starting":
                    # Shells of an earlier host: nobody can close them any more, but their names would be taken.
                    for name in self.hello.sessions:
                        await channel.ask("session_close", {"name": name}, type(None), self._settings.start)
            except SandboxLostError as error:
                raise SandboxStartError(str(error)) from error
            if not self.hello.writable:
                raise SandboxStartError(
                    f"user {self.hello.uid} cannot write to {self.hello.workdir}: in the image that folder is another "
                    "user's; name another workdir, or make it with mode 1777"
                )
            self._channel = channel
            scope.deadline = math.inf
            self._connected.set()
            if self._state == "starting":
                self._state = "ready"
                task_status.started()
            tasks.start_soon(watches.heart, channel, self._settings.heartbeat, self._settings.silence, self._end)
            tasks.start_soon(watches.lifetime, self.hello.lifetime - LIFE_MARGIN, self._spec.deadline_s, self._end)
            if self._spec.idle_s is not None:
                tasks.start_soon(watches.idle, self._spec.idle_s, self._use, self._end)
            if not self._surroundings.disk_enforced:
                disk = profiles.disk_mib(self._spec)
                tasks.start_soon(watches.disk, self._backend, self._container_id, disk, self._end)
        if not self._connected.is_set():
            channel.check()

    def _use(self) -> tuple[int, bool]:
        """How often it was used, and whether it is now."""
        return self._uses, self.busy

    async def _check_container(self) -> None:
        """Say that the sandbox is lost, and why, when its container does not run."""
        try:
            found = await self._backend.inspect(self._container_id)
        except SandboxError:
            return  # The engine cannot be reached; the container may well run.
        if found is None:
            self._end("lost", "its container was removed by somebody else")
        elif not found.running:
            memory = ", for want of memory" if found.oom_killed else ""
            self._end("lost", f"its container ended with exit code {found.exit_code}{memory}")

    def _end(self, state: State, reason: str) -> None:
        """Decide how it ends; the first decision stands."""
        if self._ending.is_set():
            return
        self._state, self._reason = state, f"sandbox {self._name}: {reason}"
        self._ending.set()
        self._connected.set()
        error = SandboxLostError if state == "lost" else SandboxClosedError
        self._channel.break_off(error(self._reason))

    async def _remove(self) -> None:
        """Remove the container, though the engine may fail meanwhile; by name when its creation was not answered."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self._backend.delete(self._container_id or self._name)
                self._removals -= 1
                if self._removals <= 0:
                    return
            except SandboxError as error:
                _log.warning("removing container %s: %s", self._name, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
