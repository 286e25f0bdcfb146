"""LocalSandbox: one container with its agent, from its creation to its removal.

`envs.sandbox.pool.local_host.EngineMaker` creates it. Its commands and files are in `envs.sandbox.local.agent`. In this
package the *host* of an agent is the process that controls it, which is this process.

Lifecycle: `starting` → `ready` → `closed` (by its owner, its deadline or its disk limit) or `lost` (its container or
its agent is gone). One task owns the sandbox. Leaving the block ends that task, which always removes the container,
also if it is cancelled at any await. The pool implements idle times and forks.

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
from anyio.abc import TaskStatus

from envs.sandbox.api import Snapshot, Spec, State
from envs.sandbox.engines import profiles
from envs.sandbox.engines.backend import (
    AGENT_SECRET,
    INSTANCE,
    INSTANCE_LABEL,
    SNAPSHOT_LABEL,
    SNAPSHOT_NAME,
    Backend,
    Link,
    Surroundings,
    from_snapshot,
)
from envs.sandbox.engines.bundle import Hello, Options, greet
from envs.sandbox.engines.machine import LayerUse
from envs.sandbox.local.agent import AgentSandbox
from envs.sandbox.local.channel import Channel
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

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between attempts to reach the engine or the agent again: the first pause, and the longest one."""
MEASURE_PAUSE = 10
"""Pause between two measurements of a container's layer, in multiples of the time that the last one took. The layer is
the files that the container has written on top of its image."""
LATE_REMOVALS = 6
"""Number of removals of a container whose creation was not answered in time. An engine that was suspended and continues
may create the container during the first removal, or after it."""

LIFE_MARGIN = 5.0
"""Seconds that an agent lives longer than its host lets it, so that the host ends the sandbox first, with a reason."""
FORGET_SECONDS = 5.0
"""Seconds to remove the image of a snapshot that failed or was cancelled."""


class SandboxContainer:
    """The container of one sandbox, for `LocalSandbox`, which calls `begin` first and `remove` at the end.

    Args:
        backend: the engine.
        spec: the kind of sandbox.
        name: name of the container; None: a new name.
        labels: labels by which the container is found when this process is gone.
        adopt: id of a running container to take over; None: create one.
    """

    def __init__(
        self, backend: Backend, spec: Spec, name: str | None, labels: Mapping[str, str] | None, adopt: str | None
    ) -> None:
        """Describe the container. Nothing is sent to the engine before `begin`."""
        self._backend = backend
        self._spec = spec
        self._removals = 1
        """Number of successful removals that are left until the container is surely gone."""
        self.adopted = adopt is not None
        """True if a running container is taken over."""
        self.id = adopt or ""
        """Id that the engine gave the container; empty before it exists."""
        self.name = name or f"flash-{uuid4().hex[:20]}"
        """Name of the container, which is the id of the sandbox."""
        self.labels = dict(labels or {})
        """Labels as given, or those of the container that was taken over. Snapshots get them too, so that they are
        found in the same way."""
        self.secret = secrets.token_hex(32)
        """Secret with which a host proves to the agent that it may take over. `begin` replaces it by the container's
        own if that is taken over."""

    async def begin(self) -> None:
        """Create and start the container, or find the one to take over. Raises the SandboxError of a failure."""
        await (self._find() if self.adopted else self._make())

    async def _make(self) -> None:
        """Create and start the container.

        The creation is shielded from cancellation. If its request were cut off, the engine might create the container
        only after `remove` has deleted it.

        Raises:
            SandboxRefusedError: the engine does not have the runtime of the spec, or did not use it.
            SandboxLostError: the container was gone right after its start.
            SandboxError: the engine failed; see `Containers.create` and `Containers.start`.
        """
        runtime = self._spec.runtime
        if runtime is not None and runtime not in (info := await self._backend.info()).runtimes:
            raise SandboxRefusedError(
                f"{info.name} has no runtime {runtime!r}, only {', '.join(info.runtimes) or 'its default'}"
            )
        labels = {**self.labels, AGENT_SECRET: self.secret}
        with anyio.CancelScope(shield=True):
            try:
                self.id = await self._backend.containers.create(self._spec, name=self.name, labels=labels)
            except SandboxTimeoutError:
                self._removals = LATE_REMOVALS
                raise
        await anyio.lowlevel.checkpoint()  # a cancellation during the creation takes effect here
        await self._backend.containers.start(self.id)
        if runtime is not None:
            # Podman reports the real runtime only of a container that was started. Nothing but the agent's loader runs
            # in it yet.
            found = await self._backend.containers.inspect(self.id, runtime=True)
            if found is None:
                raise SandboxLostError(f"container {self.name} was gone right after its start")
            if Path(found.runtime).name != runtime:
                raise SandboxRefusedError(
                    f"the engine runs the sandbox under {found.runtime!r} instead of {runtime!r}; Podman takes its "
                    "runtime from containers.conf"
                )

    async def _find(self) -> None:
        """Find the container to take over, and read its name, labels and secret.

        Raises:
            SandboxLostError: the container does not run, or has no agent.
        """
        found = await self._backend.containers.inspect(self.id)
        if found is None or not found.running or AGENT_SECRET not in found.labels:
            raise SandboxLostError(f"container {self.id[:20]} does not run, or is no sandbox")
        self.name, self.secret = found.name, found.labels[AGENT_SECRET]
        # Labels that were not given by the caller: the secret, and those of a snapshot that is the container's image,
        # since the engine lists the labels of the image among those of the container.
        own = (AGENT_SECRET, SNAPSHOT_LABEL, INSTANCE_LABEL)
        self.labels = {name: value for name, value in found.labels.items() if name not in own}

    async def why_gone(self) -> str:
        """Return why the container does not run, after the link to its agent broke. The text is empty while it runs.

        It is also empty while the engine cannot be reached, because the container may still run.
        """
        try:
            # `surely`: an engine whose monitor process was killed reports a dead container as running.
            found = await self._backend.containers.inspect(self.id, surely=True)
        except SandboxError:
            return ""
        if found is None:
            return "its container was removed by somebody else"
        if found.running:
            return ""
        memory = ", for lack of memory" if found.oom_killed else ""
        # -1: the engine has not noticed the end.
        code = "an unknown exit code" if found.exit_code == -1 else f"exit code {found.exit_code}"
        return f"its container ended with {code}{memory}"

    async def wait_layer_over(self, most: LayerUse, pause_s: float) -> LayerUse:
        """Wait until the container's layer exceeds `most`, and return its use. Few engines can enforce such a limit.

        `pause_s` is the shortest pause in seconds between two measurements.
        """
        while True:
            begun = anyio.current_time()
            # An engine that cannot be reached is ignored: the calls over the link notice when the sandbox is gone.
            with suppress(SandboxError):
                use = await self._backend.containers.layer(self.id, most)
                if use.over(most):
                    return use
            # Measuring a large layer takes long. The pause keeps the share of the time in which it occupies a thread
            # small.
            await anyio.sleep(max(pause_s, MEASURE_PAUSE * (anyio.current_time() - begun)))

    async def remove(self) -> None:
        """Remove the container, with retries while the engine fails; the caller bounds the time.

        Uses the name if the creation was not answered. Then it removes `LATE_REMOVALS` times, because the engine may
        create the container later.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                await self._backend.containers.delete(self.id or self.name)
                self._removals -= 1
                if self._removals <= 0:
                    return
            except SandboxError as error:
                _log.warning("removing container %s: %s", self.name, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of a sandbox, in seconds."""

    start: float = 120.0
    """Time from the request to the engine until the sandbox is ready."""
    heartbeat: float = 10.0
    """Silence of the agent after which it is asked whether it is alive."""
    silence: float = 30.0
    """Time for the agent to answer the question whether it is alive. After it the sandbox is lost."""
    orphan: float = 300.0
    """Time that the agent waits for a host to take over after its own host is gone."""
    reconnect: float = 30.0
    """Time to reach the agent again after the link broke."""
    removal: float = 60.0
    """Time to remove the container. It also applies if the block was cancelled."""
    disk_pause: float = 0.5
    """Shortest pause between two measurements of the container's layer."""


class LocalSandbox(AgentSandbox):
    """A sandbox in a container of this machine's engine. See the module's docstring. An asynchronous context manager.

    Entering the block creates the container and waits until the sandbox is ready. The constructor raises
    SandboxRefusedError for a spec that is wrong, or asks for something that its profile does not allow.

    Args:
        backend: the engine.
        spec: the kind of sandbox.
        name: name of the container; None: a new name.
        labels: labels of the container, by which it is found when this process is gone.
        settings: deadlines of the sandbox.
        adopt: id of a running container to take over; None: create one.
    """

    hello: Hello
    """Facts that the agent reported when it was connected last. Set once the sandbox is ready."""

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
        """Check the spec and describe the sandbox. Entering the block creates the container."""
        profiles.check(spec)
        self._backend = backend
        self._spec = spec
        self._container = SandboxContainer(backend, spec, name, labels, adopt)
        """Container of the sandbox; not created yet."""
        self._settings = settings or SandboxSettings()
        self._state: State = "starting"
        """State that `state` reports. `_serve` sets `ready`, and `_end` the final one."""
        self._reason = "the sandbox was not started"
        """Reason of the end, for the errors of later calls."""
        self._channel: Channel | None = None
        """Channel to the agent, also one that is broken; None before the first one."""
        self._surroundings = Surroundings(spec.workdir)
        """Facts about the container that its agent needs; `_connect` asks the backend for them."""
        self._connected = anyio.Event()
        """Event that is set while the channel works, and at the end. A new event after each break of the link."""
        self._ending = anyio.Event()
        """Event that is set when the final state is known. The task of the sandbox then cleans up."""
        self._ended = anyio.Event()
        """Event that is set when the container is removed, or could not be removed in time."""
        self._unwanted: list[str] = []
        """Images of snapshots that were not returned to any caller."""
        self._stack = AsyncExitStack()
        """Task group of the sandbox, from the beginning of the block to its end."""

    @property
    def sandbox_id(self) -> str:
        """Name of the container."""
        return self._container.name

    @property
    def spec(self) -> Spec:
        """Spec that the sandbox was made with."""
        return self._spec

    @property
    def state(self) -> State:
        """Current state. It never changes again after `lost` or `closed`."""
        return self._state

    @property
    def container_id(self) -> str:
        """Id that the engine gave the container; empty before it exists."""
        return self._container.id

    async def __aenter__(self) -> Self:
        """Start the task `_live`, and return once the sandbox is ready. Raises the SandboxError of a failed start."""
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(unwrapped_group())
            await tasks.start(self._live)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the sandbox, and wait until its container is removed, or could not be removed in time."""
        self._end("closed", "the sandbox was closed")
        # Without the block's own error, because that error is not the task group's.
        await self._stack.__aexit__(None, None, None)

    async def close(self) -> None:
        """End the sandbox. Returns when the container is removed, or when its removal has taken too long."""
        self._end("closed", "the sandbox was closed")
        await self._ended.wait()

    async def wait_ended(self) -> None:
        """Wait until the sandbox has ended and its container is removed, or could not be removed in time."""
        await self._ended.wait()

    async def channel(self) -> Channel:
        """Return the channel to the agent. Waits until the sandbox is ready, or reached again after its link broke.

        Raises:
            SandboxLostError: the sandbox is lost.
            SandboxClosedError: the sandbox is closed.
        """
        # A call may notice the broken channel before `_connect` does, which then opens another one.
        if self._state == "ready" and self._channel is not None and self._channel.broken and self._connected.is_set():
            self._connected = anyio.Event()
        if self._state == "ready":
            await self._connected.wait()
        if self._state != "ready" or self._channel is None:
            raise self._over()
        return self._channel

    def _over(self) -> SandboxError:
        """Return the error for a call after the end of the sandbox."""
        return SandboxClosedError(self._reason) if self._state == "closed" else SandboxLostError(self._reason)

    async def snapshot(self) -> Snapshot:
        """Save the files as an image. The pool calls this for snapshots of a lease's holder and for forks.

        If that fails or is cancelled, the image is removed: the engine may make it all the same, and nobody would know
        its name.

        Raises:
            SandboxLostError: the sandbox was lost.
            SandboxClosedError: the sandbox was closed.
            SandboxError: the engine cannot make the image.
        """
        # The engine may still have a container whose agent is gone. Its files must not be saved as if all were well.
        (await self.channel()).check()
        tag = secrets.token_hex(16)
        name = f"{SNAPSHOT_NAME}:{tag}"
        most = profiles.disk_mib(self._spec) * profiles.MIB
        # A working directory in memory is not in the container's layer, so its files are sent as a stream.
        tree = self.send_tree(self.hello.workdir, most) if self._surroundings.files_apart else None
        labels = {**self._container.labels, SNAPSHOT_LABEL: self._container.name, INSTANCE_LABEL: INSTANCE}
        try:
            size = await self._backend.images.commit(
                self._container.id, name=name, labels=labels, files=tree, most=most
            )
        except BaseException as error:
            # The engine may have made the image in spite of the error, or may still be making it.
            self._unwanted.append(name)
            await self._forget_unwanted()
            if isinstance(error, SandboxError) and self._ending.is_set():
                raise self._over() from error
            raise
        return Snapshot(tag, msgspec.structs.replace(self._spec, image=name), size)

    async def _forget_unwanted(self) -> None:
        """Try to remove the images of snapshots that were not returned to any caller."""
        with anyio.move_on_after(FORGET_SECONDS, shield=True):
            for name in self._unwanted:
                with suppress(SandboxError):
                    await self._backend.images.remove(name)

    async def _live(self, task_status: TaskStatus[None]) -> None:
        """Create the container, use it, and remove it.

        `__aenter__` starts this in a task, and returns when the sandbox is ready. The container is removed when the
        owner ends the sandbox, when it exceeds a limit, or when it is lost.

        Raises:
            SandboxStartError: the sandbox was not ready in time.
            SandboxError: the start failed.
        """
        try:
            with anyio.move_on_after(self._settings.start) as scope:
                await self._connect(scope, task_status)
            # The deadline is that of the start; after a break of the link, it is that of reaching the agent again.
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
        """Start the container and keep a link to the agent until the sandbox ends. A link that broke is replaced.

        The engine breaks links when it restarts; the container and its agent go on meanwhile. Then this host takes over
        again, as another host would. Returns when the sandbox has ended, or cannot be reached again.

        Args:
            scope: cancel scope of the caller. Its deadline bounds the start, and later the time without a link.
            task_status: notified when the sandbox is ready.

        Raises:
            SandboxError: the start failed. Later errors only break the link, and are logged.
        """
        await self._container.begin()
        # Only the first link to a new container is its first process's own streams. Every later link is a new process
        # in the container that connects to the running agent.
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
            # From here on, `channel` waits for the next link.
            if self._connected.is_set():
                self._connected = anyio.Event()
            scope.deadline = min(scope.deadline, anyio.current_time() + self._settings.reconnect)
            gone = await self._container.why_gone()
            if not gone and not self._surroundings.address:
                gone = "its link broke, and a sandbox of its profile is not taken over"
            if gone:
                self._end("lost", gone)
                return
            opener = self._backend.agents.take_over
            await anyio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _introduce(self, link: Link, *, fresh: bool) -> Channel:
        """Start the agent, or prove to a running one that this process may take over. Returns the channel.

        `fresh` is True if the link leads to a first process that waits for the greeting, and not to a running agent.
        Raises the errors of `Link.send` and `greet`: SandboxLostError and SandboxStartError.
        """
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
        """Use this channel until it breaks or the sandbox ends.

        The first channel makes the sandbox ready: files of a snapshot are restored, and sessions of an earlier host are
        closed. While the channel works, tasks watch the agent's heartbeat, the deadline, and the disk unless the kernel
        enforces its limit. The end of `channel.run`, or of the sandbox, cancels all of this at any await.

        Raises:
            SandboxStartError: the agent does not answer, or its working directory cannot be written to.
            SandboxLostError: the channel broke before the agent answered.
        """
        async with unwrapped_group() as tasks:

            async def until(wait: Callable[[], Awaitable[object]]) -> None:
                """Leave the block once `wait` has returned."""
                await wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(until, channel.run)
            tasks.start_soon(until, self._ending.wait)
            try:
                self.hello, _ = await channel.ask("hello", {}, Hello, self._settings.start)
                if self._state == "starting" and not self._container.adopted and from_snapshot(self._spec):
                    await self.restore(channel, self.hello.workdir)
                if self._state == "starting":
                    # The sessions of an earlier host have no owner any more, but their names would be taken.
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
            scope.deadline = math.inf  # Only the start, and the time without a link, are bounded.
            self._connected.set()
            if self._state == "starting":
                self._state = "ready"
                task_status.started()
            tasks.start_soon(self._watch_heart, channel)
            tasks.start_soon(self._watch_life, self.hello.lifetime - LIFE_MARGIN)
            if not self._surroundings.disk_enforced:
                tasks.start_soon(self._watch_disk)
        # The group ended before the agent answered: raise the error of the channel, if that is why.
        if not self._connected.is_set():
            channel.check()

    # ---- tasks that end the sandbox while it is used, each with a reason

    async def _watch_heart(self, channel: Channel) -> None:
        """End the sandbox as lost if the agent stays silent although it is asked.

        Any data from the agent counts as a sign of life, so the agent of a busy sandbox is not asked. Returns when the
        channel breaks.
        """
        while True:
            heard = False
            with anyio.move_on_after(self._settings.heartbeat):
                await channel.heard.wait()
                heard = True
            if heard:
                # Otherwise each piece of data of a busy sandbox would wake this task.
                await anyio.sleep(self._settings.heartbeat)
                continue
            try:
                await channel.ask("ping", None, int, self._settings.silence)
            except SandboxTimeoutError:
                self._end("lost", f"its agent did not answer for {self._settings.silence:g} s")
            except SandboxError:
                return

    async def _watch_life(self, left: float) -> None:
        """Close the sandbox at its deadline, in `left` seconds."""
        await anyio.sleep(max(0.0, left))
        self._end("closed", f"its deadline of {self._spec.deadline_s:g} s was over")

    async def _watch_disk(self) -> None:
        """Close the sandbox when its layer exceeds the limits of its profile on size or number of files."""
        most = profiles.layer_limit(self._spec)
        use = await self._container.wait_layer_over(most, self._settings.disk_pause)
        if use.size > most.size:
            self._end("closed", f"it wrote more than {most.size // profiles.MIB} MiB")
        else:
            self._end("closed", f"it made more than {most.entries} files and folders")

    def _end(self, state: State, reason: str) -> None:
        """Set the final state and its reason, and break the channel off. Only the first call has an effect.

        Called by the owner's `close`, and by the tasks that watch the sandbox. `_live` then removes the container.
        """
        if self._ending.is_set():
            return
        self._state, self._reason = state, f"sandbox {self._container.name}: {reason}"
        self._ending.set()
        self._connected.set()
        error = SandboxLostError if state == "lost" else SandboxClosedError
        if self._channel is not None:
            self._channel.break_off(error(self._reason))
