"""Tables of the HTTP API, version 1: commands, streams, sessions and jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import cast

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from envs.sandbox.api import Chunk, Exec, JobStatus, Output, Result
from envs.sandbox.protocol.problems import ProblemError, problem_of
from envs.sandbox.protocol.wire import (
    NDJSON,
    Alive,
    Broken,
    JobInfo,
    Last,
    OutputQuery,
    RunInSession,
    SessionInfo,
    SessionInterrupted,
    SessionResult,
    Signal,
    StreamLine,
    StreamPiece,
    WaitQuery,
)
from envs.sandbox.sandbox import RunCommand, StartJob, StreamCommand
from envs.sandbox.service.endpoint import ApiCall, Endpoints, once, problem_response, until_left
from envs.sandbox.text import from_wire
from flash.errors import FlashError

ALIVE_S = 10.0
"""Seconds of silence after which a stream gets a line without content, so that both ends notice a broken connection."""


ENDPOINTS = Endpoints()

_SANDBOX = "/v1/sandboxes/{id}"
_SESSION = _SANDBOX + "/sessions/{name}"
_JOB = _SANDBOX + "/jobs/{job}"


def _awaited(call: ApiCall) -> Exec:
    """Return the command in the body of a call that waits for the result. Such a command needs a timeout."""
    exec = cast("Exec", call.body)
    if exec.timeout is None:
        raise ProblemError(400, "body: Object missing required field `timeout`", "SandboxRefusedError")
    return exec.converted(from_wire)


@ENDPOINTS.add("POST", _SANDBOX + "/run", body=Exec, keyed=True)
async def _run(call: ApiCall) -> Result:
    """Run a command. It is killed if the client disconnects, unless the call has an idempotency key."""
    sandbox, lease, exec = call.sandbox, call.lease, _awaited(call)

    async def run() -> Result:
        return await sandbox.ask(RunCommand(exec))

    return await once(call, lease, run)


@ENDPOINTS.add("DELETE", _SANDBOX + "/calls/{key}")
async def _cancel(call: ApiCall) -> None:
    """Cancel the call with this idempotency key. Its command is killed."""
    await call.work.cancel_call(call.path["key"])


@ENDPOINTS.add("POST", _SANDBOX + "/stream", body=Exec, media_type=NDJSON)
async def _stream(call: ApiCall) -> LineStream:
    """Run a command, with its output as lines of JSON. It is killed if the client disconnects."""
    return LineStream(call.sandbox.open(StreamCommand(_awaited(call))))


class LineStream(Response):
    """Answer with the output of a running command as NDJSON.

    The command is killed if the client disconnects or does not read. One task runs the command from start to end, so
    that the task that opened its resources also closes them.
    """

    def __init__(self, items: AbstractAsyncContextManager[AsyncIterator[Chunk | Result]]) -> None:
        super().__init__(media_type=NDJSON)
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines as they arrive."""
        into, lines = anyio.create_memory_object_stream[StreamLine](1)
        async with anyio.create_task_group() as tasks, into, lines:
            tasks.start_soon(self._pump, into)
            # The first line is awaited before the status is sent, so that an early error is answered with its own
            # status.
            first = await lines.receive()
            if isinstance(first, Broken):
                await problem_response(first.problem)(scope, receive, send)
            else:
                tasks.start_soon(until_left, receive, tasks.cancel_scope)
                await self._send(first, lines, send)
            tasks.cancel_scope.cancel()

    async def _pump(self, into: MemoryObjectSendStream[StreamLine]) -> None:
        """Run the command and pass on its output, its result or its error."""
        try:
            async with self._items as items:
                async for item in items:
                    await into.send(StreamPiece(item) if isinstance(item, Chunk) else Last(item))
        except FlashError as error:
            await into.send(Broken(problem_of(error)))

    async def _send(self, line: StreamLine, lines: MemoryObjectReceiveStream[StreamLine], send: Send) -> None:
        """Send the response line by line, with an `Alive` line after each silence."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", NDJSON.encode())]})
        while True:
            more = not isinstance(line, Last | Broken)
            await send({"type": "http.response.body", "body": msgspec.json.encode(line) + b"\n", "more_body": more})
            if not more:
                return
            line = Alive()
            with anyio.move_on_after(ALIVE_S):
                line = await lines.receive()


@ENDPOINTS.add("PUT", _SESSION, status=201)
async def _open_session(call: ApiCall) -> SessionInfo:
    """Open a session: a shell that stays open."""
    session = await call.work.open_session(_name(call))
    return SessionInfo(session.name, session.restarts)


@ENDPOINTS.add("GET", _SANDBOX + "/sessions")
async def _sessions(call: ApiCall) -> list[SessionInfo]:
    """List the open sessions."""
    return [SessionInfo(session.name, session.restarts) for session in call.work.sessions()]


@ENDPOINTS.add("POST", _SESSION + "/run", body=RunInSession, keyed=True)
async def _run_in_session(call: ApiCall) -> SessionResult:
    """Run a command in a session."""
    lease, body = call.lease, cast("RunInSession", call.body)
    session = call.service.work(lease).session(_name(call))

    async def run() -> SessionResult:
        result = await session.run(from_wire(body.command), timeout=body.timeout)
        return SessionResult(result, session.restarts)

    return await once(call, lease, run)


@ENDPOINTS.add("POST", _SESSION + "/interrupt")
async def _interrupt(call: ApiCall) -> SessionInterrupted:
    """Send SIGINT to the command of a session."""
    return SessionInterrupted(await call.work.session(_name(call)).interrupt())


@ENDPOINTS.add("DELETE", _SESSION)
async def _close_session(call: ApiCall) -> None:
    """Close a session."""
    await call.work.close_session(_name(call))


def _name(call: ApiCall) -> str:
    """Return the session's name in the path. Raises ProblemError if it is not valid."""
    name = call.path["name"]
    if not 1 <= len(name) <= 64 or not all(each.isascii() and (each.isalnum() or each in "._-") for each in name):
        raise ProblemError(400, "a session's name has 1 to 64 letters, digits, '.', '_' or '-'", "SandboxRefusedError")
    return name


@ENDPOINTS.add("POST", _SANDBOX + "/jobs", body=Exec, status=201, keyed=True)
async def _start_job(call: ApiCall) -> JobInfo:
    """Start a command in the background."""
    lease, sandbox, exec = call.lease, call.sandbox, cast("Exec", call.body)
    if exec.stdin:
        raise ProblemError(400, "body: a job has no `stdin`; write it to a file", "SandboxRefusedError")
    exec = exec.converted(from_wire)

    async def start() -> JobInfo:
        job = await sandbox.ask(StartJob(exec))
        call.service.work(lease).add_job(job)
        return JobInfo(job.job_id)

    return await once(call, lease, start)


@ENDPOINTS.add("GET", _JOB, query=WaitQuery)
async def _poll(call: ApiCall) -> JobStatus:
    """Show the state of a job. `wait` holds the answer back while the job runs."""
    job = call.work.job(call.path["job"])
    if call.query.wait:
        with anyio.move_on_after(call.query.wait):
            await job.wait(call.query.wait + 1.0)
    return await job.poll()


@ENDPOINTS.add("POST", _JOB + "/signal", body=Signal)
async def _signal(call: ApiCall) -> None:
    """Send a signal to a job."""
    await call.work.job(call.path["job"]).signal(call.body.name)


@ENDPOINTS.add("GET", _JOB + "/output", query=OutputQuery)
async def _output(call: ApiCall) -> Output:
    """Read a range of a job's output."""
    job = call.work.job(call.path["job"])
    query = cast("OutputQuery", call.query)
    return await job.output(query.stream, offset=query.offset, limit=query.limit)
