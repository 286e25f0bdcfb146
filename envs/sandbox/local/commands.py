"""Commands and sessions of a sandbox, over the channel to its agent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
import msgspec

from envs.sandbox.api import Chunk, Command, Exec, JobStatus, Output, Result, Spec, StreamName
from envs.sandbox.local.channel import OUTPUT_WINDOW, PIECE, AgentCall, Channel, decode, in_time
from envs.sandbox.text import as_bytes, check_path
from flash.errors import SandboxError, SandboxLimitError, SandboxLostError, SandboxRefusedError

ANSWER_SECONDS = 20.0
"""Seconds for a request that the agent can answer at once. It is long, because the machine may be overloaded."""
LONGEST_COMMAND = 120_000
"""Most bytes of a command with its arguments and variables. The kernel accepts no argument of more than 128 KiB."""
MOST_WORDS = 10_000
"""Most arguments, variable names and variable values of a command together, because all of them travel in one frame."""
STREAMS = ("stdout", "stderr")


class HasAgent(Protocol):
    """The part of a sandbox that commands and files need."""

    @property
    @abstractmethod
    def spec(self) -> Spec: ...

    @abstractmethod
    async def channel(self) -> Channel:
        """Return the channel, once the sandbox is ready. Raises SandboxLostError or SandboxClosedError."""
        ...


class Ending(Result, frozen=True):
    """Result of a command as the agent reports it. It lacks the output that was sent in pieces before it."""

    restarts: int = 0
    """Number of restarts of the session's shell so far."""


def to_result(ending: Ending, output: Mapping[str, bytes]) -> Result:
    """Return the result of a command, with the output that was received before it."""
    return Result(
        ending.exit_code,
        ending.signal,
        ending.timed_out,
        ending.oom_killed,
        output.get("stdout", b"") + ending.stdout,
        output.get("stderr", b"") + ending.stderr,
        ending.stdout_truncated,
        ending.stderr_truncated,
        ending.wall_s,
        ending.cpu_s,
        ending.max_rss,
        ending.waited_s,
    )


def argument_of(exec: Exec, limit: int, **more: object) -> dict[str, object]:
    """Return the agent's argument for a command.

    The agent keeps `limit` bytes of each stream. The items of `more` are added unchanged.

    Raises:
        SandboxRefusedError: a text cannot be encoded.
        SandboxLimitError: the command is too long.
        SandboxFileError: the path of its folder is too long.
    """
    command, timeout, env = exec.command, exec.timeout, exec.env or {}
    asked: dict[str, object] = {"timeout": timeout, "limit": limit, **more}
    if exec.patience is not None:
        asked["patience"] = exec.patience
    if exec.cwd is not None:
        asked["cwd"] = encoded_path(exec.cwd)
    variables = {as_bytes(name): as_bytes(value) for name, value in env.items()}
    if variables:
        asked["env"] = variables
    words = [as_bytes(word) for word in ([command] if isinstance(command, str) else command)]
    asked |= {"command": words[0]} if isinstance(command, str) else {"argv": words}
    every = [*words, *variables, *variables.values()]
    _check_size("bytes", sum(map(len, every)), LONGEST_COMMAND)
    _check_size("arguments", len(every), MOST_WORDS)
    return asked


def _check_size(unit: str, size: int, most: int) -> None:
    if size > most:
        raise SandboxLimitError(
            f"a command and its variables may have {most} {unit}, not {size}; write them to a file, or pass them as "
            "standard input"
        )


def encoded_path(path: str) -> bytes:
    """Return a path as the bytes that the sandbox gets.

    Raises:
        SandboxRefusedError: the path cannot be encoded.
        SandboxFileError: the path is too long.
    """
    check_path(path)
    return as_bytes(path)


class AgentJob:
    """A background job of the agent. See `envs.sandbox.api.Job`."""

    def __init__(self, sandbox: HasAgent, job_id: str) -> None:
        self._sandbox = sandbox
        self.job_id = job_id

    async def poll(self) -> JobStatus:
        channel = await self._sandbox.channel()
        form = tuple[bool, int, int]
        (running, out, err), _ = await channel.ask("job_poll", {"job": self.job_id}, form, ANSWER_SECONDS)
        return JobStatus(running, out, err, None if running else await self.wait(ANSWER_SECONDS))

    async def wait(self, timeout: float) -> Result:
        channel = await self._sandbox.channel()
        room = 2 * self._sandbox.spec.output_limit
        return to_result(*await channel.ask("job_wait", {"job": self.job_id}, Ending, timeout, room=room))

    async def signal(self, name: str = "SIGTERM") -> None:
        channel = await self._sandbox.channel()
        await channel.ask("job_signal", {"job": self.job_id, "signal": name}, type(None), ANSWER_SECONDS)

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        channel = await self._sandbox.channel()
        limit = min(limit, self._sandbox.spec.output_limit)
        asked = {"job": self.job_id, "stream": stream, "offset": offset, "limit": limit}
        (begin, total), output = await channel.ask("job_output", asked, tuple[int, int], ANSWER_SECONDS, room=limit)
        return Output(begin, output.get("stdout", b""), total)


class AgentSession:
    """A shell that the agent keeps open under a name. See `envs.sandbox.api.Session`."""

    def __init__(self, sandbox: HasAgent, name: str) -> None:
        self._sandbox = sandbox
        self.name = name
        self.restarts = 0

    async def run(self, command: str, *, timeout: float) -> Result:
        spec = self._sandbox.spec
        asked = argument_of(Exec(command=command, timeout=timeout), spec.output_limit, name=self.name)
        channel = await self._sandbox.channel()
        # The command may wait for earlier commands for `timeout` seconds, and then run for as long.
        waiting = 2 * timeout + ANSWER_SECONDS
        ending, output = await channel.ask("session_run", asked, Ending, waiting, room=2 * spec.output_limit)
        self.restarts = ending.restarts
        return to_result(ending, output)

    async def interrupt(self) -> bool:
        channel = await self._sandbox.channel()
        return (await channel.ask("session_interrupt", {"name": self.name}, bool, ANSWER_SECONDS))[0]

    async def close(self) -> None:
        channel = await self._sandbox.channel()
        await channel.ask("session_close", {"name": self.name}, type(None), ANSWER_SECONDS)


class AgentTerminal:
    """A program on a pseudo-terminal: one call that streams in both directions until the program ends."""

    def __init__(self, call: AgentCall) -> None:
        self._call = call
        self._ended = False

    async def write(self, data: bytes) -> None:
        await self._call.send(data)

    async def read(self) -> bytes:
        while not self._ended:
            piece = await self._call.next()
            if isinstance(piece, msgspec.Raw):
                self._ended = True
                return decode(piece, Ending).stdout
            data = decode(piece[1], bytes)
            await self._call.grant(data)
            if data:
                return data
        return b""


async def run_command(agent: HasAgent, exec: Exec) -> Result:
    """Run a command and return its result."""
    seconds, limit, short = exec.seconds, agent.spec.output_limit, len(exec.stdin) <= PIECE
    asked = argument_of(exec, limit, stdin=exec.stdin if short else b"", feed=not short)
    channel = await agent.channel()
    async with channel.call("run", asked, seconds + ANSWER_SECONDS, room=2 * limit) as call:
        if short:
            return to_result(*await call.result(Ending))
        async with sending(call, exec.stdin):
            return to_result(*await call.result(Ending))


async def stream_command(agent: HasAgent, exec: Exec) -> AsyncGenerator[Chunk | Result]:
    """Run a command and yield its output as it arrives, then its result."""
    if len(exec.stdin) > PIECE:
        raise SandboxLimitError(f"a stream takes {PIECE} bytes of input; write more to a file")
    deadline = anyio.current_time() + exec.seconds + ANSWER_SECONDS
    asked = argument_of(exec, agent.spec.output_limit, stdin=exec.stdin, stream=True, credit=OUTPUT_WINDOW)
    channel = await agent.channel()
    # No cancel scope may be open across a `yield`: the caller may open scopes of its own meanwhile, and scopes must
    # close in reverse order.
    call = await channel.open("run", asked, room=2 * OUTPUT_WINDOW)
    try:
        while True:
            with in_time("stream", max(ANSWER_SECONDS, deadline - anyio.current_time())):
                piece = await call.next()
            if isinstance(piece, msgspec.Raw):
                yield to_result(decode(piece, Ending), {})
                return
            name, data = piece[0], decode(piece[1], bytes)
            if name not in STREAMS:
                raise SandboxLostError(f"the agent sent output of {name!r}")
            yield Chunk("stdout" if name == "stdout" else "stderr", data)
            await call.grant(data)
    finally:
        await channel.finish(call)


async def start_job(agent: HasAgent, exec: Exec) -> AgentJob:
    """Start a command in the background."""
    if exec.stdin:
        raise SandboxRefusedError("a job has no input; write it to a file")
    asked = argument_of(exec, agent.spec.output_limit)
    channel = await agent.channel()
    # The start is shielded: after a cancellation no caller would know the id of the job.
    job_id = ""
    with anyio.CancelScope(shield=True):
        job_id, _ = await channel.ask("start", asked, str, ANSWER_SECONDS)
    return AgentJob(agent, job_id)


@asynccontextmanager
async def open_session(agent: HasAgent, name: str) -> AsyncGenerator[AgentSession]:
    """Open a session for the time of the block."""
    channel = await agent.channel()
    session = AgentSession(agent, name)
    try:
        # The start is shielded: a cancellation before the answer would leave a shell behind that is never closed.
        with anyio.CancelScope(shield=True):
            await channel.ask("session_open", {"name": name}, int, ANSWER_SECONDS)
        yield session
    finally:
        with anyio.CancelScope(shield=True):
            await _ignore_loss(session.close)


@asynccontextmanager
async def open_terminal(agent: HasAgent, command: Command) -> AsyncGenerator[AgentTerminal]:
    """Run a program on a pseudo-terminal for the time of the block."""
    asked = argument_of(Exec(command=command), agent.spec.output_limit, tty=True, stream=True, credit=OUTPUT_WINDOW)
    channel = await agent.channel()
    call = await channel.open("run", asked, room=2 * OUTPUT_WINDOW)
    try:
        yield AgentTerminal(call)
    finally:
        await channel.finish(call)


@asynccontextmanager
async def sending(call: AgentCall, data: bytes) -> AsyncGenerator[None]:
    """Send input while the block waits for the result."""
    body_error: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_send, call, data)
        try:
            yield
        except Exception as error:
            # The error is raised again below, because the task group would wrap it in an exception group.
            body_error = error
        tasks.cancel_scope.cancel()
    if body_error is not None:
        raise body_error


async def _send(call: AgentCall, data: bytes) -> None:
    await _ignore_loss(lambda: call.send(data, last=True))


async def _ignore_loss(work: Callable[[], Awaitable[None]]) -> None:
    """Call `work` and ignore errors of the sandbox. The call that waits for the result reports a lost sandbox."""
    try:
        await work()
    except SandboxError:
        return
