"""Lease: one holder's right to a sandbox, from its order to its end, and the sandbox as the holder sees it.

`SandboxLease` is state without tasks; the pool changes it. `LeasedSandbox` has the methods that the holder calls: a
program of this process, or a route of the service for its client.

The holder is notified of each loss exactly once: after a sandbox was replaced, the next call raises SandboxLostError,
unless a call that was in progress has raised it already. So no holder goes on in an empty sandbox without knowing. A
call that was cancelled has not reported the loss.

A broken connection ends the calls in progress with the same error as a loss. The next call finds out which of the two
it was: a sandbox that answers again is used again.
"""

from __future__ import annotations

import builtins
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Literal, Protocol

import anyio
import msgspec

from envs.sandbox.api import (
    Chunk,
    Command,
    FileInfo,
    Job,
    OnLost,
    Result,
    Session,
    Snapshot,
    Spec,
    State,
    Terminal,
)
from envs.sandbox.sandbox import Commands, Sandbox
from envs.sandbox.trees import TreeLimits
from flash.errors import SandboxClosedError, SandboxError, SandboxLostError, SandboxTimeoutError

LeaseState = Literal["queued", "starting", "ready", "failed", "closed"]
"""State of a lease. `queued`: it waits for a host. `starting`: its sandbox starts there. `failed` and `closed`: it has
ended, with and without an error."""

REPLACED_WAIT_S = 20.0
"""Seconds for which a call waits while its lost sandbox is replaced. Shorter than a caller waits beyond its timeout."""
PROBE_S = 5.0
"""Seconds that a sandbox has to answer the probe that finds out if it was lost, or only its connection broke."""


class LeaseOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order of one lease, by a program of this process or by a client of the service."""

    spec: Spec
    """Kind of the sandbox."""
    owner: str
    """Name under which sandboxes are shared fairly; see `envs.sandbox.pool.admission`."""
    token: str = ""
    """Name of the bearer token that may use the lease; empty inside one process."""
    priority: int = 0
    """Orders of one owner with a larger number are served sooner."""
    on_lost: OnLost = "fail"
    """Reaction to a lost sandbox."""
    lease_s: float | None = None
    """Seconds that a renewal lasts; None: the lease needs no renewal."""
    key: str = ""
    """Idempotency key of the request; "" if it has none."""


class SandboxLease:
    """Right to one sandbox. Times are seconds on the event loop's clock.

    The task of `envs.sandbox.pool.serving.LeaseServer` changes it, and `LeasedSandbox` uses it for each call of the
    holder.
    """

    def __init__(self, id: str, order: LeaseOrder) -> None:
        """Begin a lease without a sandbox or a place on a host. `id` is also the id of the sandbox for its holder."""
        self.id = id
        self.order = order
        self.spec = order.spec
        self.owner = order.owner
        self.token = order.token
        self.lease_s = math.inf if order.lease_s is None else order.lease_s
        """Seconds after its last renewal at which the lease ends."""
        self.state: LeaseState = "queued"
        """State of the lease. Set by `set`."""
        self.reason = ""
        """Reason for the current state."""
        self.ending = "it was given back"
        """Reason why the lease ends. Set by `end`."""
        self.error: SandboxError | None = None
        """Error that ended the lease; None if it has not failed."""
        self.sandbox: Sandbox | None = None
        """Sandbox that the lease has now; None while it waits for one."""
        self.host = ""
        """Name of the host where the lease has its place; empty before the first grant."""
        self.generation = 0
        """Number of times the sandbox was replaced after a loss."""
        self.until = anyio.current_time() + self.lease_s
        """Time at which the lease ends unless it is renewed before."""
        self.hard_until = math.inf
        """Time at which the lease ends in any case. Set when the sandbox is first ready, since its lifetime begins
        then."""
        self.created_at = time.time()
        """Unix time of the order."""
        self.scope = anyio.CancelScope()
        """Cancel scope around the task that serves the lease."""
        self.granted = anyio.Event()
        """Set when admission has given the lease a place on `host`; a new event after each return to the queue."""
        self.done = anyio.Event()
        """Set when the sandbox is closed and all records of the lease are removed."""
        self.parent = ""
        """Id of the lease that this one is a fork of; "" if it is no fork."""
        self.children: list[SandboxLease] = []
        """Leases of the forks, which end with this lease."""
        self.snapshots: list[tuple[str, str]] = []
        """Images that the forks began from, each with its host. They are removed after the forks."""
        self.sandbox_id = ""
        """Id of the sandbox in the journal, chosen before the sandbox is created."""
        self.cleared = False
        """True once the lease's snapshots are being removed and its journal entry deleted: nothing may be written any
        more."""
        self.failed_starts = 0
        """Number of failed starts in a row."""
        self.uses = 0
        """Number of calls of the holder in progress. The lease does not idle while it is above 0."""
        self._last_use = anyio.current_time()
        """Time from which idleness counts: the order, the last change to `ready`, or the end of the last call."""
        self._changed = anyio.Event()
        """Event that is set, and replaced by a new one, at each change of state."""
        self._unreported: tuple[Sandbox | None, SandboxLostError] | None = None
        """A lost sandbox, and the error that the holder's next call raises."""
        self._reported: Sandbox | None = None
        """Sandbox for which a call of the holder has raised SandboxLostError. A probe that is answered clears it."""

    def set(self, state: LeaseState, reason: str = "") -> None:
        """Change the state, with its reason, and wake every task that waits for a change.

        The idle time in `due` is counted from the change to `ready` on.
        """
        self.state, self.reason = state, reason
        if state == "ready":
            self._last_use = anyio.current_time()
        self._changed.set()
        self._changed = anyio.Event()

    async def settled(self) -> None:
        """Wait until the lease is neither queued nor starting: it has its sandbox, or has ended."""
        while self.state in ("queued", "starting"):
            await self._changed.wait()

    async def _wait_replaced(self) -> None:
        """Wait until the lease is settled and its sandbox is not one whose loss the holder knows.

        A call may have taken a broken connection for the loss of the sandbox. So a sandbox that counts as lost is
        probed, and one that answers counts as usable again.
        """
        while True:
            changed, sandbox = self._changed, self.sandbox
            if self.state in ("queued", "starting"):
                await changed.wait()
            elif self.state != "ready" or sandbox is None or sandbox is not self._reported:
                return
            elif await _still_answers(sandbox):
                # Another call may have reported the loss of a later sandbox meanwhile.
                if self._reported is sandbox:
                    self._reported = None
            else:
                # A connection that works again changes no state, so the sandbox is probed again after a while.
                with anyio.move_on_after(PROBE_S):
                    await changed.wait()

    async def change(self) -> None:
        """Wait for the next change of state."""
        await self._changed.wait()

    def renew(self) -> None:
        """Extend the lease by `lease_s` from now. The service calls this at each request of the holder."""
        self.until = anyio.current_time() + self.lease_s

    def end(self, reason: str, error: SandboxError | None = None) -> None:
        """Cancel the task that serves the lease, so that it ends. Only the first reason is kept.

        Callers that need the lease's resources to be gone then wait for `done`.
        """
        if not self.scope.cancel_called:
            self.ending, self.error = reason, error
            self.scope.cancel()

    def due(self) -> tuple[float, str]:
        """Return the time at which the lease ends if nothing happens, and the reason.

        While a call is in progress the lease does not idle. The time can move later without a change of state (a
        renewal, a call), so it must be asked for again when the returned time has come.
        """
        idle = math.inf
        if self.spec.idle_s is not None and self.state == "ready":
            idle = (anyio.current_time() if self.uses else self._last_use) + self.spec.idle_s
        times = [
            (self.until, f"the lease was not renewed within {self.lease_s:g} s"),
            (self.hard_until, f"its life of {self.spec.deadline_s:g} s was over"),
            (idle, f"it had no call for {self.spec.idle_s or 0:g} s"),
        ]
        return min(times)

    def lost(self, sandbox: Sandbox | None, error: SandboxLostError) -> None:
        """Record the loss of the sandbox. The next call of the holder raises `error`.

        `LeaseServer` calls this when a sandbox has ended. `Recovery` calls it after a restart of the service, with None
        as the sandbox, since it is unknown then what the holder knows.
        """
        if sandbox is not None and sandbox is self._reported:
            self._unreported = None  # A call in progress has raised the error of this loss already.
        else:
            self._unreported = sandbox, error

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[Sandbox]:
        """Yield the lease's sandbox for one call of the holder, such as a command, a snapshot or a fork.

        A SandboxLostError that leaves the block counts as the report of the loss to the holder.

        Raises:
            SandboxLostError: the sandbox was lost and this call is the first one after that, or it is not replaced in
                time.
            SandboxClosedError: the lease has ended.
            SandboxError: the error that ended the lease.
        """
        sandbox = await self._usable()
        self.uses += 1
        try:
            yield sandbox
        except SandboxLostError:
            self._reported = sandbox
            if self._unreported is not None and self._unreported[0] is sandbox:
                self._unreported = None
            raise
        finally:
            self.uses -= 1
            self._last_use = anyio.current_time()

    async def _usable(self) -> Sandbox:
        """Return the sandbox once the holder may use it, or raise the error that prevents it.

        Waits up to `REPLACED_WAIT_S` for a lost sandbox to be replaced, or for its connection to work again.
        """
        if self._unreported is not None:
            error = self._unreported[1]
            self._unreported = None
            raise error
        with anyio.move_on_after(REPLACED_WAIT_S):
            await self._wait_replaced()
        if self.state == "ready" and self.sandbox is not None and self.sandbox is not self._reported:
            return self.sandbox
        if self.error is not None:
            raise self.error
        if self.state in ("queued", "starting", "ready"):
            raise SandboxLostError(f"waited {REPLACED_WAIT_S:g} s for sandbox {self.id} to be replaced")
        raise SandboxClosedError(f"sandbox {self.id} is closed: {self.reason}")


async def _still_answers(sandbox: Commands) -> bool:
    """Return True if a sandbox that a call reported as lost still answers: only its connection broke for a while."""
    try:
        with anyio.move_on_after(PROBE_S):
            await sandbox.run(["true"], timeout=PROBE_S)
            return True
    except (SandboxLostError, SandboxClosedError, SandboxTimeoutError):
        pass
    except SandboxError:
        return True  # An agent that refuses a command still lives.
    return False


class LeasingPool(Protocol):
    """Operations of a pool that a leased sandbox needs beside its sandbox. `SandboxPool` implements them."""

    async def snapshot(self, lease: SandboxLease) -> Snapshot:
        """Save the files of the lease's sandbox, and record the snapshot. Raises SandboxError."""
        ...

    async def fork(self, parent: SandboxLease, count: int) -> list[SandboxLease]:
        """Start `count` sandboxes with the same files, each with a lease of its own. Raises SandboxError."""
        ...

    async def release(self, lease: SandboxLease) -> None:
        """End a lease, and wait until its sandbox and records are removed."""
        ...


class LeasedSandbox(Sandbox):
    """A sandbox under a lease of a pool, for the holder of the lease.

    `SandboxPool.acquire` gives it to programs of this process; the routes of the service use it for their clients. Each
    method is one use of the lease, and calls the same method of the sandbox that the lease has at that moment. It
    raises the errors of `SandboxLease.use`, and those of that sandbox.

    Parameters: `timeout` and `patience` are seconds; with `patience`, time in which the command had no CPU does not
    count towards `timeout`, until `patience` seconds have passed. `stdin` is the whole input, `env` adds variables, and
    `cwd` is the folder of the command; None: the working directory, where relative paths begin. `offset` and `limit`
    are bytes; a `limit` of None is the whole file. `mode` has the permissions of a new or replaced file.
    """

    def __init__(self, pool: LeasingPool, lease: SandboxLease) -> None:
        """Give the holder of `lease`, which belongs to `pool`, its sandbox."""
        self._pool = pool
        self.lease = lease

    @property
    def sandbox_id(self) -> str:
        """Id of the lease. It stays the same when a lost sandbox is replaced."""
        return self.lease.id

    @property
    def spec(self) -> Spec:
        """Spec of the order."""
        return self.lease.spec

    @property
    def state(self) -> State:
        """State of the sandbox for the holder, made of the lease's state and that of its present sandbox."""
        match self.lease.state:
            case "queued" | "starting":
                return "starting"
            case "ready":
                state = self.lease.sandbox.state if self.lease.sandbox else "starting"
                # A lost sandbox that is replaced has not ended for its holder. The lease stays `ready` until the lost
                # container is removed.
                return "starting" if state == "lost" and self.lease.order.on_lost == "recreate" else state
            case "failed":
                return "lost"
            case "closed":
                return "closed"

    @property
    def generation(self) -> int:
        """Number of times the sandbox was replaced after a loss."""
        return self.lease.generation

    async def run(
        self,
        command: Command,
        *,
        timeout: float,
        patience: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Run a command in the sandbox that the lease has now, as `Commands.run` says."""
        async with self.lease.use() as sandbox:
            return await sandbox.run(command, timeout=timeout, patience=patience, stdin=stdin, env=env, cwd=cwd)

    async def stream(
        self,
        command: Command,
        *,
        timeout: float,
        patience: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> AsyncGenerator[Chunk | Result]:
        """Run a command in the sandbox that the lease has now, as `Commands.stream` says.

        The lease is in use meanwhile.
        """
        async with self.lease.use() as sandbox:
            items = sandbox.stream(command, timeout=timeout, patience=patience, stdin=stdin, env=env, cwd=cwd)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def start(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        patience: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Job:
        """Start a command in the background, as `Commands.start` says.

        The job ends with its sandbox, not with the lease.
        """
        async with self.lease.use() as sandbox:
            return await sandbox.start(command, timeout=timeout, patience=patience, env=env, cwd=cwd)

    @asynccontextmanager
    async def session(self, name: str = "main") -> AsyncGenerator[LeasedSession]:
        """Open a shell in the present sandbox for the time of the block. It does not move to a replacement."""
        # Each command of the session is a use of the lease by itself, so an idle session does not keep the lease alive.
        async with AsyncExitStack() as stack:
            async with self.lease.use() as sandbox:
                session = await stack.enter_async_context(sandbox.session(name))
            yield LeasedSession(self.lease, sandbox, session)

    @asynccontextmanager
    async def terminal(self, command: Command) -> AsyncGenerator[Terminal]:
        """Run a program on a pseudo-terminal for the time of the block, which is one use of the lease."""
        async with self.lease.use() as sandbox, sandbox.terminal(command) as terminal:
            yield terminal

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a file, as `Files.read` says."""
        async with self.lease.use() as sandbox:
            return await sandbox.read(path, offset=offset, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Replace a file or append to it, as `Files.write` says."""
        async with self.lease.use() as sandbox:
            await sandbox.write(path, data, mode=mode, append=append)

    async def list(self, path: str = ".") -> builtins.list[FileInfo]:
        """Return the entries of a folder, as `Files.list` says."""
        async with self.lease.use() as sandbox:
            return await sandbox.list(path)

    async def remove(self, path: str) -> None:
        """Remove a file or tree, as `Files.remove` says."""
        async with self.lease.use() as sandbox:
            await sandbox.remove(path)

    async def put_archive(self, path: str, pieces: AsyncIterator[bytes], size: int | None = None) -> None:
        """Unpack a tar archive in the sandbox as `path`. `pieces` are its bytes, `size` their number if it is known."""
        async with self.lease.use() as sandbox:
            await sandbox.put_archive(path, pieces, size)

    async def get_archive(self, path: str, limits: TreeLimits) -> AsyncGenerator[bytes]:
        """Yield a file or tree as a tar archive, as `Archives.get_archive` says. The lease is in use meanwhile."""
        async with self.lease.use() as sandbox, aclosing(sandbox.get_archive(path, limits)) as pieces:
            async for piece in pieces:
                yield piece

    async def snapshot(self) -> Snapshot:
        """Save the files as an image, and let the pool keep it. The pool uses the lease for that."""
        return await self._pool.snapshot(self.lease)

    async def fork(self, count: int) -> Sequence[LeasedSandbox]:
        """Start `count` sandboxes with the same files on the same host. They end with this lease at the latest."""
        return [LeasedSandbox(self._pool, lease) for lease in await self._pool.fork(self.lease, count)]

    async def wait_ended(self) -> None:
        """Wait until the lease has ended, and its sandbox and records are removed."""
        await self.lease.done.wait()

    async def close(self) -> None:
        """End the lease, and wait until its sandbox and records are removed."""
        await self._pool.release(self.lease)


class LeasedSession:
    """A `Session` whose commands are uses of the lease. `LeasedSandbox.session` yields it."""

    def __init__(self, lease: SandboxLease, sandbox: Sandbox, session: Session) -> None:
        """Wrap `session`, an open session of `sandbox`, for the holder of `lease`."""
        self.lease = lease
        self._sandbox = sandbox
        """Sandbox of the session. The lease may have a later one."""
        self._session = session

    @property
    def name(self) -> str:
        """Name of the session in its sandbox."""
        return self._session.name

    @property
    def restarts(self) -> int:
        """Number of times that the shell was replaced."""
        return self._session.restarts

    async def run(self, command: str, *, timeout: float) -> Result:
        """Run a command in the session's own sandbox. Raises its SandboxLostError if the lease has another one."""
        async with self.lease.use() as sandbox:
            if sandbox is self._sandbox:
                return await self._session.run(command, timeout=timeout)
        # Outside of `use`, because the loss of the session's sandbox says nothing about the sandbox in use.
        return await self._session.run(command, timeout=timeout)

    async def interrupt(self) -> bool:
        """Send SIGINT to the running command, as `Session.interrupt` says. This is no use of the lease."""
        return await self._session.interrupt()

    async def close(self) -> None:
        """End the shell and everything that it started."""
        await self._session.close()
