"""The HTTP API, version 1, as a table: one function for each path and method.

`envs.sandbox.service.endpoint` checks a request and calls the function. A function about a command or a file calls the
same method of the lease's sandbox, an `envs.sandbox.pool.lease.LeasedSandbox`. The docstrings of the functions are the
summaries of the OpenAPI document, so they speak to the users of the API.

The first argument, an `ApiCall`, has the `Service`, the name of the caller's `token`, and the variable parts of the
`path`. It finds the lease of the path; each access to `renewed_lease()`, `sandbox` or `work` (sessions, jobs and keyed
calls) also renews it, since its holder lives. A FlashError or ProblemError that a function raises is answered as a
problem. A client that disconnects cancels the function.

Trees travel as tar archives, piece by piece, and are never stored here. The sandbox unpacks an upload. The client
unpacks a download with `envs.sandbox.trees`, which does not trust it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from envs.sandbox.api import Chunk, Exec, JobStatus, Output, Result, Snapshot, StreamName
from envs.sandbox.pool.lease import SandboxLease
from envs.sandbox.protocol import (
    BINARY,
    NDJSON,
    TAR,
    Alive,
    Broken,
    Bytes,
    Fork,
    HttpProblem,
    Info,
    JobInfo,
    Last,
    Listing,
    Mode,
    OutputLimit,
    Path,
    ProblemError,
    RunInSession,
    SandboxList,
    SandboxOrder,
    SessionInfo,
    SessionInterrupted,
    SessionResult,
    Signal,
    SnapshotInfo,
    SnapshotList,
    Status,
    StreamLine,
    StreamPiece,
    Version,
    Wait,
    problem_of,
)
from envs.sandbox.service.endpoint import ApiCall, Endpoints, once, problem_response, until_left
from envs.sandbox.text import from_wire, to_wire
from envs.sandbox.trees import TreeLimits
from flash.errors import FlashError

_ATTACHMENT = {"content-disposition": "attachment"}
"""Headers that make a browser save a file instead of showing content from a sandbox. They have no file name, since it
would also be chosen in the sandbox."""
HELD_BYTES = 1 << 17
"""Bytes of an archive that are held back before the first is sent, so that an early error can be answered with its own
status."""
STATUS_EVERY_S = 0.2
"""Shortest time between two answers to a caller that waits for changes of the status, in seconds."""
ALIVE_S = 10.0
"""Seconds of silence after which a stream gets a line without content, so that both ends notice a broken connection."""

API = Endpoints()
"""Table of all endpoints, in the order of the OpenAPI document."""

# Paths below which several endpoints are.
_SANDBOX = "/v1/sandboxes/{id}"
_FILES = _SANDBOX + "/files"
_TREE = _SANDBOX + "/tree"
_SESSION = _SANDBOX + "/sessions/{name}"
_JOB = _SANDBOX + "/jobs/{job}"


@API.add("POST", "/v1/sandboxes", status=201, keyed=True)
async def _order(call: ApiCall, body: SandboxOrder, wait: Wait = 0.0) -> Info:
    """Order a sandbox. `wait` holds the answer back until it is ready; otherwise ask for it again by its id."""
    lease = call.service.order(body, call.token, call.key)
    lease.renew()  # An order that is sent again with its key finds the same lease.
    with anyio.move_on_after(_hold_seconds(lease, wait)):
        await lease.settled()
    return call.service.info(lease)


def _hold_seconds(lease: SandboxLease, wait: float) -> float:
    """Return the seconds for which an answer about a lease is held back: `wait`, but at most half of `lease_s`.

    The holder cannot renew the lease while it waits, so a longer wait would let the lease run out.
    """
    return min(wait, lease.lease_s / 2)


@API.add("GET", "/v1/sandboxes")
async def _list(call: ApiCall) -> SandboxList:
    """List your sandboxes."""
    return SandboxList([call.service.info(lease) for lease in call.service.visible(call.token)])


@API.add("GET", _SANDBOX)
async def _show(call: ApiCall, wait: Wait = 0.0) -> Info:
    """Show one sandbox, and renew its lease. `wait` holds the answer back while it is queued or starting."""
    lease = call.renewed_lease()
    with anyio.move_on_after(_hold_seconds(lease, wait)):
        await lease.settled()
    return call.service.info(lease)


@API.add("GET", _SANDBOX + "/end")
async def _ended(call: ApiCall, wait: Wait = 0.0) -> Info:
    """Renew the lease. `wait` holds the answer back until the sandbox has ended."""
    lease = call.renewed_lease()
    with anyio.move_on_after(_hold_seconds(lease, wait)):
        await lease.done.wait()
    return call.service.info(lease)


@API.add("POST", _SANDBOX + "/renew")
async def _renew(call: ApiCall) -> Info:
    """Renew the lease."""
    return call.service.info(call.renewed_lease())


@API.add("DELETE", _SANDBOX)
async def _close(call: ApiCall) -> None:
    """End a sandbox, and wait until it is removed."""
    await call.service.pool.release(call.renewed_lease())


@API.add("POST", _SANDBOX + "/snapshot", status=201)
async def _snapshot(call: ApiCall) -> Snapshot:
    """Keep the files of a sandbox as a snapshot."""
    return await call.service.snapshot(call.renewed_lease())


@API.add("GET", "/v1/snapshots")
async def _snapshots(call: ApiCall) -> SnapshotList:
    """List your snapshots."""
    return SnapshotList(
        [
            SnapshotInfo(
                snapshot_id=kept.snapshot_id,
                image=kept.image,
                owner=kept.owner,
                host=kept.host,
                size=kept.size,
                made_at=kept.made_at,
                expires_at=kept.until,
            )
            for kept in call.service.snapshots(call.token)
        ]
    )


@API.add("DELETE", "/v1/snapshots/{snapshot}")
async def _forget(call: ApiCall) -> None:
    """Remove a snapshot. Its host waits with the removal while a sandbox runs from it."""
    await call.service.forget(call.path["snapshot"], call.token)


@API.add("POST", _SANDBOX + "/fork", status=201, keyed=True)
async def _fork(call: ApiCall, body: Fork) -> SandboxList:
    """Start more sandboxes with the same files. They end with this one at the latest."""
    lease = call.renewed_lease()

    async def fork() -> SandboxList:
        """Fork the sandbox, and describe the forks."""
        forks = await call.service.pool.fork(lease, body.count)
        return SandboxList([call.service.info(each) for each in forks])

    return await once(call, body, fork)


@API.add("GET", "/v1/status")
async def _status(call: ApiCall, wait: Wait = 0.0, since: Version = -1) -> Status:
    """Show the state of the whole pool. `wait` holds the answer back until it differs from version `since`."""
    if wait:
        # Several changes in a row become one answer.
        await anyio.sleep(STATUS_EVERY_S)
        with anyio.move_on_after(wait):
            await call.service.pool.state.changed_since(since)
    return call.service.status(call.token)


# ---- files


@API.add("GET", _FILES, gives=BINARY)
async def _read(call: ApiCall, path: Path, offset: Bytes = 0, limit: Bytes | None = None) -> Response:
    """Read bytes of a file."""
    data = await call.sandbox.read(path, offset=offset, limit=limit)
    return Response(data, media_type=BINARY, headers=_ATTACHMENT)


@API.add("PUT", _FILES, takes=BINARY)
async def _write(call: ApiCall, path: Path, mode: Mode = 0o644, append: bool = False) -> None:
    """Replace a file in one step, or append to it."""
    # The HTTP server bounds the bytes of a body, and of all bodies in memory.
    data = await call.request.body()
    await call.sandbox.write(path, data, mode=mode, append=append)


@API.add("GET", _SANDBOX + "/entries")
async def _list_files(call: ApiCall, path: Path = ".") -> Listing:
    """List the entries of a folder."""
    entries = await call.sandbox.list(path)
    return Listing([msgspec.structs.replace(entry, name=to_wire(entry.name)) for entry in entries])


@API.add("DELETE", _FILES)
async def _remove(call: ApiCall, path: Path = ".") -> None:
    """Remove a file or a folder."""
    await call.sandbox.remove(path)


@API.add("PUT", _TREE, takes=TAR)
async def _upload(call: ApiCall, path: Path = ".") -> None:
    """Copy a tree, or one file, into the sandbox, as a tar archive."""
    length = call.request.headers.get("content-length")
    await call.sandbox.put_archive(path, call.request.stream(), int(length) if length else None)


@API.add("GET", _TREE, gives=TAR, keyed=True)
async def _download(call: ApiCall, path: Path = ".") -> Response:
    """Download a tree, or one file, as a tar archive of untrusted content. An answer that breaks off has failed. The
    same call with the same idempotency key then gets the error, if it was the sandbox that failed."""
    sandbox, work, key = call.sandbox, call.work, call.key
    # The same call is sent again to learn why the first answer broke off.
    if key and (error := work.kept_error(key)) is not None:
        raise error
    return TreeStream(sandbox.get_archive(path, TreeLimits()), partial(work.keep_error, key) if key else None)


class TreeStream(Response):
    """Answer with a tar archive of a sandbox, sent while it arrives.

    For a slow client only a few pieces are held in memory, and none in a file. An error in the first `HELD_BYTES` is
    answered with its own status. A later error ends the connection.
    """

    def __init__(self, pieces: AsyncGenerator[bytes], broke: Callable[[FlashError], None] | None) -> None:
        """Create the answer.

        Args:
            pieces: generator of the archive; the answer closes it.
            broke: function that keeps the error which ended the connection, for a client that asks for it; None if the
                client cannot ask.
        """
        super().__init__(media_type=TAR, headers=_ATTACHMENT)
        self._pieces = pieces
        self._broke = broke

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A client that disconnects ends the copy."""
        problem: HttpProblem | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_left, receive, tasks.cancel_scope)
            problem = await self._copy(scope, send)
            tasks.cancel_scope.cancel()
        if problem is not None:
            await problem_response(problem)(scope, receive, send)

    async def _copy(self, scope: Scope, send: Send) -> HttpProblem | None:
        """Send the archive. Returns an error that occurred before anything was sent, for `__call__` to answer; else
        None.

        After a later error the connection is broken off: the status was sent already, and the client must not take the
        part that it has for a whole archive.
        """
        held, begun = bytearray(), False

        async def give(piece: bytes, *, more: bool) -> None:
            """Send a piece of the body, and the head of the answer before the first. `more` is False for the last."""
            nonlocal begun
            if not begun:
                # Without the content length that `Response` computes for an empty body: the real length is not known.
                kept = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": kept})
                begun = True
            await send({"type": "http.response.body", "body": piece, "more_body": more})

        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    held += piece
                    if begun or len(held) >= HELD_BYTES:
                        await give(bytes(held), more=True)
                        held.clear()
            await give(bytes(held), more=False)
        except FlashError as error:
            if not begun:
                return problem_of(error)
            if self._broke is not None:
                self._broke(error)
            # `flash.http.server` stores the connection of a request there.
            scope["state"]["connection"].abort()
            await anyio.sleep_forever()  # until the disconnection is noticed and cancels this task
        return None


# ---- commands


@API.add("POST", _SANDBOX + "/run", keyed=True)
async def _run(call: ApiCall, body: Exec) -> Result:
    """Run a command. It is killed if the client disconnects, unless the call has an idempotency key."""
    sandbox, timeout, command = call.sandbox, _timeout(body), body.converted(from_wire)

    async def run() -> Result:
        """Run the command of the body."""
        return await sandbox.run(
            command.command,
            timeout=timeout,
            patience=command.patience,
            stdin=command.stdin,
            env=command.env,
            cwd=command.cwd,
        )

    return await once(call, body, run)


def _timeout(body: Exec) -> float:
    """Return the timeout of a command whose result the client waits for. Raises ProblemError if it has none."""
    if body.timeout is None:
        raise ProblemError(400, "body: Object missing required field `timeout`", "SandboxRefusedError")
    return body.timeout


@API.add("DELETE", _SANDBOX + "/calls/{key}")
async def _cancel(call: ApiCall) -> None:
    """Cancel the call with this idempotency key. Its command is killed."""
    await call.work.cancel_call(call.path["key"])


@API.add("POST", _SANDBOX + "/stream", gives=NDJSON)
async def _stream(call: ApiCall, body: Exec) -> Response:
    """Run a command, with its output as lines of JSON. It is killed if the client disconnects."""
    sandbox, timeout, command = call.sandbox, _timeout(body), body.converted(from_wire)
    return LineStream(
        sandbox.stream(
            command.command,
            timeout=timeout,
            patience=command.patience,
            stdin=command.stdin,
            env=command.env,
            cwd=command.cwd,
        )
    )


class LineStream(Response):
    """Answer with the output of a running command as NDJSON.

    The command is killed if the client disconnects or does not read. One task runs the command from start to end, so
    that the task that opened its resources also closes them.
    """

    def __init__(self, items: AsyncGenerator[Chunk | Result]) -> None:
        """Create the answer. `items` yields output and then the result, as `Commands.stream` does."""
        super().__init__(media_type=NDJSON)
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines as they arrive. A client that disconnects ends the command."""
        into, lines = anyio.create_memory_object_stream[StreamLine](1)
        async with anyio.create_task_group() as tasks, into, lines:
            tasks.start_soon(self._pump, into)
            tasks.start_soon(until_left, receive, tasks.cancel_scope)
            # The first line is awaited before the status is sent, so that an early error is answered with its own
            # status. Not for ever: a client takes a long silence for a service that does not answer.
            first: StreamLine = Alive()
            with anyio.move_on_after(ALIVE_S):
                first = await lines.receive()
            if isinstance(first, Broken):
                await problem_response(first.problem)(scope, receive, send)
            else:
                await self._send(first, lines, send)
            tasks.cancel_scope.cancel()

    async def _pump(self, into: MemoryObjectSendStream[StreamLine]) -> None:
        """Run the command, and pass its output, and then its result or its error, on to `into`.

        `into` holds one line, so the command waits while the client does not read.
        """
        try:
            async with aclosing(self._items) as items:
                async for item in items:
                    await into.send(StreamPiece(item) if isinstance(item, Chunk) else Last(item))
        except FlashError as error:
            await into.send(Broken(problem_of(error)))

    async def _send(self, line: StreamLine, lines: MemoryObjectReceiveStream[StreamLine], send: Send) -> None:
        """Send the response line by line, beginning with `line`, with an `Alive` line after each silence."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", NDJSON.encode())]})
        while True:
            more = not isinstance(line, Last | Broken)
            await send({"type": "http.response.body", "body": msgspec.json.encode(line) + b"\n", "more_body": more})
            if not more:
                return
            line = Alive()
            with anyio.move_on_after(ALIVE_S):
                line = await lines.receive()


@API.add("PUT", _SESSION, status=201)
async def _open_session(call: ApiCall) -> SessionInfo:
    """Open a session: a shell that stays open."""
    session = await call.work.open_session(_name(call))
    return SessionInfo(session.name, session.restarts)


@API.add("GET", _SANDBOX + "/sessions")
async def _sessions(call: ApiCall) -> list[SessionInfo]:
    """List the open sessions."""
    return [SessionInfo(session.name, session.restarts) for session in call.work.sessions()]


@API.add("POST", _SESSION + "/run", keyed=True)
async def _run_in_session(call: ApiCall, body: RunInSession) -> SessionResult:
    """Run a command in a session. It is killed if the client disconnects, unless the call has an idempotency key."""
    work, name = call.work, _name(call)

    async def run() -> SessionResult:
        """Run the command of the body in the session."""
        # The session is looked up only here: after a restart of the service it is gone, but a repeated call must get
        # the SandboxLostError of `once`.
        session = work.session(name)
        result = await session.run(from_wire(body.command), timeout=body.timeout)
        return SessionResult(result, session.restarts)

    return await once(call, body, run)


@API.add("POST", _SESSION + "/interrupt")
async def _interrupt(call: ApiCall) -> SessionInterrupted:
    """Send SIGINT to the command of a session."""
    return SessionInterrupted(await call.work.session(_name(call)).interrupt())


@API.add("DELETE", _SESSION)
async def _close_session(call: ApiCall) -> None:
    """Close a session."""
    await call.work.close_session(_name(call))


def _name(call: ApiCall) -> str:
    """Return the session's name in the path. Raises ProblemError if it is not valid."""
    name = call.path["name"]
    if not 1 <= len(name) <= 64 or not all(each.isascii() and (each.isalnum() or each in "._-") for each in name):
        raise ProblemError(400, "a session's name has 1 to 64 letters, digits, '.', '_' or '-'", "SandboxRefusedError")
    return name


@API.add("POST", _SANDBOX + "/jobs", status=201, keyed=True)
async def _start_job(call: ApiCall, body: Exec) -> JobInfo:
    """Start a command in the background."""
    sandbox, work, command = call.sandbox, call.work, body.converted(from_wire)
    if body.stdin:
        raise ProblemError(400, "body: a job has no `stdin`; write it to a file", "SandboxRefusedError")

    async def start() -> JobInfo:
        """Start the command of the body, and remember its job."""
        job = await sandbox.start(
            command.command, timeout=command.timeout, patience=command.patience, env=command.env, cwd=command.cwd
        )
        work.add_job(job)
        return JobInfo(job.job_id)

    return await once(call, body, start)


@API.add("GET", _JOB)
async def _poll(call: ApiCall, wait: Wait = 0.0) -> JobStatus:
    """Show the state of a job. `wait` holds the answer back while the job runs."""
    job = call.work.job(call.path["job"])
    if wait := _hold_seconds(call.renewed_lease(), wait):
        with anyio.move_on_after(wait):
            # One second more, so that the end of the block ends the wait, and not a SandboxTimeoutError.
            await job.wait(wait + 1.0)
    return await job.poll()


@API.add("POST", _JOB + "/signal")
async def _signal(call: ApiCall, body: Signal) -> None:
    """Send a signal to a job."""
    await call.work.job(call.path["job"]).signal(body.name)


@API.add("GET", _JOB + "/output")
async def _output(
    call: ApiCall, stream: StreamName = "stdout", offset: Bytes = 0, limit: OutputLimit = 1 << 16
) -> Output:
    """Read a range of a job's output."""
    job = call.work.job(call.path["job"])
    return await job.output(stream, offset=offset, limit=limit)
