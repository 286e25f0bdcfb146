"""LocalSandbox: one container with its agent, from its creation to its removal.

Lifecycle: `starting` → `ready` → `closed` (by its owner, its deadline or its disk limit) or `lost` (its container or
its agent is gone). One task owns it; leaving the block ends that task, which removes the container before anything
else, also when it is cancelled at any await. Idle times, and forks, are the pool's.

Law: no caller waits for a sandbox that is gone. The end of the link, a missed heartbeat and the end of the container
each end every call in progress with an error that says why.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import anyio
import msgspec
from anyio.abc import TaskStatus

from envs.sandbox.api import Snapshot, Spec, State
from envs.sandbox.engines import profiles
from envs.sandbox.engines.backend import (
    INSTANCE,
    INSTANCE_LABEL,
    SNAPSHOT_LABEL,
    SNAPSHOT_NAME,
    Backend,
    Link,
    Surroundings,
    from_snapshot,
)
from envs.sandbox.engines.bundle import Options
from envs.sandbox.local import commands, files
from envs.sandbox.local.channel import Channel
from envs.sandbox.local.container import FIRST_PAUSE, LAST_PAUSE, SandboxContainer
from envs.sandbox.local.greeting import Hello, greet
from envs.sandbox.sandbox import (
    ListFolder,
    OpenSession,
    OpenTerminal,
    PutArchive,
    ReadFile,
    RemovePath,
    RunCommand,
    Sandbox,
    SandboxFacts,
    SandboxOpening,
    SandboxRequest,
    StartJob,
    StreamCommand,
    StreamTree,
    TakeSnapshot,
    WriteFile,
    refused,
)
from envs.sandbox.trees import HEAD_BYTES
from flash.errors import SandboxClosedError, SandboxError, SandboxLostError, SandboxStartError, SandboxTimeoutError
from flash.waiting import unwrapped_group

T = TypeVar("T")

_log = logging.getLogger(__name__)

LIFE_MARGIN = 5.0
"""Seconds that an agent lives longer than its host lets it."""
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
    disk_look: float = 0.5
    """Least time between two measurements of its own layer."""


class LocalSandbox(Sandbox):
    """See the module. An asynchronous context manager.

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
        self._container = SandboxContainer(backend, spec, name, labels, adopt)
        self._settings = settings or SandboxSettings()
        self._state: State = "starting"
        self._reason = "the sandbox was not started"
        self._channel: Channel | None = None
        self._surroundings = Surroundings(spec.workdir)
        self._connected = anyio.Event()
        self._ending = anyio.Event()
        self._ended = anyio.Event()
        self._unwanted: list[str] = []
        self._stack = AsyncExitStack()

    @property
    def facts(self) -> SandboxFacts:  # its id is the name of its container
        return SandboxFacts(self._container.name, self._spec, self._state)

    @property
    def container_id(self) -> str:
        """The engine's id of its container; empty before it exists."""
        return self._container.id

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(unwrapped_group())
            await tasks.start(self._live)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end("closed", "the sandbox was closed")
        # Without the block's own error: it is not the task group's.
        await self._stack.__aexit__(None, None, None)

    async def close(self) -> None:  # returns when its container is removed, or was given up after its deadline
        self._end("closed", "the sandbox was closed")
        await self._ended.wait()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def channel(self) -> Channel:
        """The channel to the agent; while that is being reached again, after that."""
        if self._state == "ready" and self._channel is not None and self._channel.broken and self._connected.is_set():
            self._connected = anyio.Event()
        if self._state == "ready":
            await self._connected.wait()
        if self._state != "ready" or self._channel is None:
            raise self._over()
        return self._channel

    def _over(self) -> SandboxError:
        """What a call is told that came too late."""
        return SandboxClosedError(self._reason) if self._state == "closed" else SandboxLostError(self._reason)

    async def ask(self, request: SandboxRequest[T]) -> T:
        return cast("T", await self._answer(request))

    async def _answer(self, request: SandboxRequest[Any]) -> object:
        """What each request comes to."""
        match request:
            case RunCommand(exec):
                return await commands.run_command(self, exec)
            case StartJob(exec):
                return await commands.start_job(self, exec)
            case ReadFile(path, offset, limit):
                return await files.read_file(self, path, offset, limit)
            case WriteFile(path, data, mode, append):
                return await files.write_file(self, path, data, mode, append)
            case ListFolder(path):
                return await files.list_folder(self, path)
            case RemovePath(path):
                return await files.remove_path(self, path)
            case PutArchive(path, pieces):
                return await files.put_archive(self, path, pieces)
            case TakeSnapshot():
                return await self._snapshot()
            case _:
                raise refused(request)

    def open(self, opening: SandboxOpening[T]) -> AbstractAsyncContextManager[T]:
        return cast("AbstractAsyncContextManager[T]", self._opened(opening))

    def _opened(self, opening: SandboxOpening[Any]) -> AbstractAsyncContextManager[object]:
        match opening:
            case StreamCommand(exec):
                return aclosing(commands.stream_command(self, exec))
            case StreamTree(path, limits):
                return aclosing(files.send_tree(self, path, limits.total, HEAD_BYTES * limits.entries))
            case OpenSession(name):
                return commands.open_session(self, name)
            case OpenTerminal(command):
                return commands.open_terminal(self, command)
            case _:
                raise refused(opening)

    async def _snapshot(self) -> Snapshot:
        (await self.channel()).check()
        tag = secrets.token_hex(16)
        name = f"{SNAPSHOT_NAME}:{tag}"
        most = profiles.disk_mib(self._spec) * profiles.MIB
        tree = files.send_tree(self, self.hello.workdir, most) if self._surroundings.files_apart else None
        labels = {**self._container.labels, SNAPSHOT_LABEL: self._container.name, INSTANCE_LABEL: INSTANCE}
        try:
            size = await self._backend.images.commit(
                self._container.id, name=name, labels=labels, files=tree, most=most
            )
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
                    await self._backend.images.remove(name)

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
                await self._container.remove()
            await self._forget_unwanted()
            if removal.cancelled_caught:
                _log.error("container %s could not be removed in %g s", self._container.name, self._settings.removal)
            self._ended.set()

    async def _connect(self, scope: anyio.CancelScope, task_status: TaskStatus[None]) -> None:
        """Make the container, and hold a link to it until it is ended; a link that broke is replaced."""
        await self._container.begin()
        opener = self._backend.agents.take_over if self._container.adopted else self._backend.agents.attach
        self._surroundings = self._backend.agents.surroundings(self._container.id, self._spec)
        pause = FIRST_PAUSE
        while not self._ending.is_set():
            try:
                async with opener(self._container.id) as link:
                    channel = await self._introduce(link, fresh=opener == self._backend.agents.attach)
                    await self._serve(channel, scope, task_status)
                    pause = FIRST_PAUSE
            except SandboxError as error:
                if self._state == "starting":
                    raise
                _log.warning("sandbox %s: %s", self._container.name, error)
            if self._ending.is_set():
                return
            if self._connected.is_set():
                self._connected = anyio.Event()
            scope.deadline = min(scope.deadline, anyio.current_time() + self._settings.reconnect)
            if gone := await self._container.why_gone():
                self._end("lost", gone)
            elif not self._surroundings.address:
                self._end("lost", "its link broke, and a sandbox of its profile is not taken over")
                return
            opener = self._backend.agents.take_over
            await anyio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _introduce(self, link: Link, *, fresh: bool) -> Channel:
        """Start the agent, or prove to it that it may trust us."""
        if not fresh:
            await link.send(self._container.secret.encode())
            return Channel(link)
        around = self._surroundings
        options = Options(
            workdir=around.workdir,
            lifetime=self._spec.deadline_s + LIFE_MARGIN,
            orphan=self._settings.orphan,
            cgroup=around.cgroup,
            address=around.address,
            secret=self._container.secret,
        )
        return Channel(link, await greet(link, options, self._settings.start, around.prelude))

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
                if self._state == "starting" and not self._container.adopted and from_snapshot(self._spec):
                    await files.restore(self, channel, self.hello.workdir)
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
            tasks.start_soon(self._watch_heart, channel)
            tasks.start_soon(self._watch_life, self.hello.lifetime - LIFE_MARGIN)
            if not self._surroundings.disk_enforced:
                tasks.start_soon(self._watch_disk)
        if not self._connected.is_set():
            channel.check()

    # ---- what ends it, with the reason, while it is used

    async def _watch_heart(self, channel: Channel) -> None:
        """Break the channel off when the agent is silent although it is asked."""
        while True:
            heard = False
            with anyio.move_on_after(self._settings.heartbeat):
                await channel.heard.wait()
                heard = True
            if heard:
                await anyio.sleep(self._settings.heartbeat)
                continue
            try:
                await channel.ask("ping", None, int, self._settings.silence)
            except SandboxTimeoutError:
                self._end("lost", f"its agent did not answer for {self._settings.silence:g} s")
            except SandboxError:
                return

    async def _watch_life(self, left: float) -> None:
        await anyio.sleep(max(0.0, left))
        self._end("closed", f"its deadline of {self._spec.deadline_s:g} s was over")

    async def _watch_disk(self) -> None:
        most = profiles.layer_limit(self._spec)
        use = await self._container.wait_layer_over(most, self._settings.disk_look)
        if use.size > most.size:
            self._end("closed", f"it wrote more than {most.size // profiles.MIB} MiB")
        else:
            self._end("closed", f"it made more than {most.entries} files and folders")

    def _end(self, state: State, reason: str) -> None:
        """Decide how it ends; the first decision stands."""
        if self._ending.is_set():
            return
        self._state, self._reason = state, f"sandbox {self._container.name}: {reason}"
        self._ending.set()
        self._connected.set()
        error = SandboxLostError if state == "lost" else SandboxClosedError
        if self._channel is not None:
            self._channel.break_off(error(self._reason))
