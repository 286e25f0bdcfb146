"""The HTTP API, version 1: commands, streams, shells and jobs."""

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
from envs.sandbox.service.endpoint import ApiCall, Endpoint, once, problem_response
from envs.sandbox.text import from_wire
from flash.errors import FlashError

ALIVE_S = 10.0
"""A stream that is silent for this long gets a line that says nothing, so that both ends know the other is there."""


def _awaited(call: ApiCall) -> Exec:
    """A command whose result is waited for."""
    exec = cast("Exec", call.body)
    if exec.timeout is None:
        raise ProblemError(400, "body: Object missing required field `timeout`", "SandboxRefusedError")
    return exec.converted(from_wire)


async def _run(call: ApiCall) -> Result:
    sandbox, lease, exec = call.sandbox, call.lease, _awaited(call)

    async def run() -> Result:
        return await sandbox.ask(RunCommand(exec))

    return await once(call, lease, run)


async def _cancel(call: ApiCall) -> None:
    await call.work.cancel_call(call.path["key"])


async def _stream(call: ApiCall) -> LineStream:
    return LineStream(call.sandbox.open(StreamCommand(_awaited(call))))


class LineStream(Response):
    """A running command as NDJSON. A client that leaves, or does not read, kills the command.

    One task runs the command from its beginning to its end: what it holds is closed by who opened it.
    """

    def __init__(self, items: AbstractAsyncContextManager[AsyncIterator[Chunk | Result]]) -> None:
        super().__init__(media_type=NDJSON)
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines as they come."""
        into, lines = anyio.create_memory_object_stream[StreamLine](1)
        async with anyio.create_task_group() as tasks, into, lines:
            tasks.start_soon(self._pump, into)
            # The first line is waited for before the status is sent: an error gets a status of its own.
            first = await lines.receive()
            if isinstance(first, Broken):
                await problem_response(first.problem)(scope, receive, send)
            else:
                tasks.start_soon(_until_left, receive, tasks.cancel_scope)
                await self._send(first, lines, send)
            tasks.cancel_scope.cancel()

    async def _pump(self, into: MemoryObjectSendStream[StreamLine]) -> None:
        try:
            async with self._items as items:
                async for item in items:
                    await into.send(StreamPiece(item) if isinstance(item, Chunk) else Last(item))
        except FlashError as error:
            await into.send(Broken(problem_of(error)))

    async def _send(self, line: StreamLine, lines: MemoryObjectReceiveStream[StreamLine], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", NDJSON.encode())]})
        while True:
            more = not isinstance(line, Last | Broken)
            await send({"type": "http.response.body", "body": msgspec.json.encode(line) + b"\n", "more_body": more})
            if not more:
                return
            line = Alive()
            with anyio.move_on_after(ALIVE_S):
                line = await lines.receive()


async def _until_left(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _open_session(call: ApiCall) -> SessionInfo:
    session = await call.work.open_session(_name(call))
    return SessionInfo(session.name, session.restarts)


async def _sessions(call: ApiCall) -> list[SessionInfo]:
    return [SessionInfo(session.name, session.restarts) for session in call.work.sessions()]


async def _run_in_session(call: ApiCall) -> SessionResult:
    lease, body = call.lease, cast("RunInSession", call.body)
    session = call.service.work(lease).session(_name(call))

    async def run() -> SessionResult:
        result = await session.run(from_wire(body.command), timeout=body.timeout)
        return SessionResult(result, session.restarts)

    return await once(call, lease, run)


async def _interrupt(call: ApiCall) -> SessionInterrupted:
    return SessionInterrupted(await call.work.session(_name(call)).interrupt())


async def _close_session(call: ApiCall) -> None:
    await call.work.close_session(_name(call))


def _name(call: ApiCall) -> str:
    name = call.path["name"]
    if not 1 <= len(name) <= 64 or not all(each.isascii() and (each.isalnum() or each in "._-") for each in name):
        raise ProblemError(400, "a session's name has 1 to 64 letters, digits, '.', '_' or '-'", "SandboxRefusedError")
    return name


async def _start_job(call: ApiCall) -> JobInfo:
    lease, sandbox, exec = call.lease, call.sandbox, cast("Exec", call.body)
    if exec.stdin:
        raise ProblemError(400, "body: a job has no `stdin`; write it to a file", "SandboxRefusedError")
    exec = exec.converted(from_wire)

    async def start() -> JobInfo:
        job = await sandbox.ask(StartJob(exec))
        call.service.work(lease).add_job(job)
        return JobInfo(job.job_id)

    return await once(call, lease, start)


async def _poll(call: ApiCall) -> JobStatus:
    job = call.work.job(call.path["job"])
    if call.query.wait:
        with anyio.move_on_after(call.query.wait):
            await job.wait(call.query.wait + 1.0)
    return await job.poll()


async def _signal(call: ApiCall) -> None:
    await call.work.job(call.path["job"]).signal(call.body.name)


async def _output(call: ApiCall) -> Output:
    job = call.work.job(call.path["job"])
    query = cast("OutputQuery", call.query)
    return await job.output(query.stream, offset=query.offset, limit=query.limit)


_SANDBOX = "/v1/sandboxes/{id}"
_SESSION = _SANDBOX + "/sessions/{name}"
_JOB = _SANDBOX + "/jobs/{job}"

ENDPOINTS = (
    Endpoint(
        method="POST",
        path=_SANDBOX + "/run",
        summary="Run a command. A client that leaves kills it, unless it gave an idempotency key.",
        handler=_run,
        body=Exec,
        answer=Result,
        keyed=True,
    ),
    Endpoint(
        method="DELETE",
        path=_SANDBOX + "/calls/{key}",
        summary="Cancel the call with this idempotency key; its command is killed.",
        handler=_cancel,
        status=204,
    ),
    Endpoint(
        method="POST",
        path=_SANDBOX + "/stream",
        summary="Run a command with its output as lines of JSON. A client that leaves kills it.",
        handler=_stream,
        body=Exec,
        answer=NDJSON,
    ),
    Endpoint(
        method="GET", path=_SANDBOX + "/sessions", summary="Open shells.", handler=_sessions, answer=list[SessionInfo]
    ),
    Endpoint(
        method="PUT", path=_SESSION, summary="Open a shell.", handler=_open_session, answer=SessionInfo, status=201
    ),
    Endpoint(method="DELETE", path=_SESSION, summary="Close a shell.", handler=_close_session, status=204),
    Endpoint(
        method="POST",
        path=_SESSION + "/run",
        summary="Run a command in a shell.",
        handler=_run_in_session,
        body=RunInSession,
        answer=SessionResult,
        keyed=True,
    ),
    Endpoint(
        method="POST",
        path=_SESSION + "/interrupt",
        summary="Send SIGINT to the command of a shell.",
        handler=_interrupt,
        answer=SessionInterrupted,
    ),
    Endpoint(
        method="POST",
        path=_SANDBOX + "/jobs",
        summary="Start a command in the background.",
        handler=_start_job,
        body=Exec,
        answer=JobInfo,
        status=201,
        keyed=True,
    ),
    Endpoint(
        method="GET",
        path=_JOB,
        summary="How a job stands. `wait` holds the answer back while it runs.",
        handler=_poll,
        query=WaitQuery,
        answer=JobStatus,
    ),
    Endpoint(method="POST", path=_JOB + "/signal", summary="Signal a job.", handler=_signal, body=Signal, status=204),
    Endpoint(
        method="GET",
        path=_JOB + "/output",
        summary="A range of a job's output.",
        handler=_output,
        query=OutputQuery,
        answer=Output,
    ),
)
