"""AgentSandbox: commands, sessions, files and trees of one sandbox, as calls to the agent inside.

`envs.sandbox.pool.lease.LeasedSandbox` calls these methods; each sends one operation of
`envs.sandbox.agent.main.OPERATIONS` over the channel and decodes the answer. The subclass
`envs.sandbox.local.sandbox.LocalSandbox` owns the container and the channel.

Everything that the agent sends is untrusted: it is decoded as the expected types, its size is bounded, and an answer
that the agent may not give makes the sandbox count as lost.
"""

from __future__ import annotations

import builtins
import errno
import math
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Literal

import anyio
import msgspec

from envs.sandbox.api import (
    STREAM_INPUT,
    Chunk,
    Command,
    FileInfo,
    JobStatus,
    Output,
    Result,
    StreamName,
    check_command,
    check_session_command,
    check_timeout,
)
from envs.sandbox.local.channel import OUTPUT_WINDOW, PIECE, AgentCall, Channel, decode, in_time
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.text import as_bytes, check_path
from envs.sandbox.trees import HEAD_BYTES, TreeLimits
from flash.errors import (
    SandboxBusyError,
    SandboxError,
    SandboxFileError,
    SandboxLimitError,
    SandboxLostError,
    SandboxRefusedError,
)

ANSWER_SECONDS = 20.0
"""Seconds for a request that the agent can answer at once. It is long, because the machine may be overloaded."""
LONGEST_COMMAND = 120_000
"""Most bytes of a command with its arguments and variables. The kernel accepts no argument of more than 128 KiB."""
MOST_WORDS = 10_000
"""Most arguments, variable names and variable values of a command together, because all of them travel in one frame."""
READ_LIMIT = 1 << 26
"""Most bytes that one `read` returns."""
READ_PIECE = 1 << 20
"""Bytes that are requested from the agent at a time."""
WRITE_LIMIT = 1 << 28
"""Most bytes that one `write` takes."""
WRITE_RATE = 1 << 20
"""Bytes per second that a `write` is expected to reach on an overloaded machine; its deadline follows from that."""
LIST_ROOM = 1 << 26
"""Most bytes that the agent may send for one listing."""
TREE_SECONDS = 600.0
"""Seconds that the agent's worker has to copy or remove a tree."""
ARCHIVE_BYTES = 1 << 26
"""Bytes that an archive may have beyond twice `most`, the limit on the content of its files, if the caller names no
number. Each file has a header of up to 2 KiB."""
TRANSCRIPT_BYTES = 4096
"""Most bytes of standard error that are kept of a worker of the agent: a process that sends a tree."""
_NO_ROOM = ("No space left", f"Errno {errno.EFBIG}")
"""Parts of the agent's error messages that mean that a limit was reached. The functions of the agent that handle trees
run in worker processes, which report errors of the file system as text."""
_Entry = tuple[bytes, Literal["file", "folder", "link", "other"], int, int, float]
"""Entry of a folder as the agent sends it: name, kind, size, mode, modification time."""


class Ending(Result, frozen=True):
    """Result of a command or of a worker as the agent reports it. It lacks output that was sent in pieces before it."""

    restarts: int = 0
    """Number of restarts of the session's shell so far."""


def to_result(ending: Ending, output: Mapping[str, bytes]) -> Result:
    """Return the result of a command: the agent's report `ending`, with the output by stream that came before it."""
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


class AgentSandbox(Sandbox):
    """A sandbox whose methods are calls to its agent. The subclass `LocalSandbox` provides channel and lifecycle.

    Each call, except that of a terminal, waits for the agent for a bounded time, and then raises SandboxTimeoutError.
    Every call raises SandboxLostError or SandboxClosedError if the sandbox has ended or ends meanwhile. If a call is
    cancelled, the agent is notified and stops it, too. Relative paths begin at the working directory.

    Parameters of commands: `timeout` and `patience` are seconds, `stdin` is the whole input, `env` has variables that
    are added to the sandbox's own, and `cwd` is the folder where the command starts; None: the working directory.
    """

    @abstractmethod
    async def channel(self) -> Channel:
        """Return the channel to the agent, once it works. Raises SandboxLostError or SandboxClosedError."""

    # ---- commands

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
        """Run a command to its end with one call of the agent, and return its result, as `Commands.run` says.

        The agent stops the command after `timeout` seconds. With `patience`, time in which the command was ready to run
        but had no CPU does not count, until `patience` seconds have passed on the clock.
        """
        check_timeout(timeout)
        limit, short = self.spec.output_limit, len(stdin) <= PIECE
        argument = command_argument(command, limit, timeout, patience, env, cwd)
        # Short input travels with the command, which saves a round trip. `feed` announces longer input, which follows
        # as the agent takes it.
        argument |= {"stdin": stdin if short else b"", "feed": not short}
        # The agent stops the command at the latest after the larger of the two times.
        seconds = max(timeout, patience or 0.0) + ANSWER_SECONDS
        channel = await self.channel()
        # `room` is the most bytes of output that the agent may send: `limit` for each of the two streams.
        async with channel.call("run", argument, seconds, room=2 * limit) as call:
            if short:
                return to_result(*await call.result(Ending))
            async with _sending(call, stdin):
                return to_result(*await call.result(Ending))

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
        """Run a command and yield its output as it arrives, then its result, as `Commands.stream` says.

        The end of the loop, also an early one, ends the call, and the agent then kills the command.

        Raises:
            SandboxLimitError: more than `STREAM_INPUT` bytes of input.
        """
        check_timeout(timeout)
        if len(stdin) > STREAM_INPUT:
            raise SandboxLimitError(f"a stream takes {STREAM_INPUT} bytes of input; write more to a file")
        deadline = anyio.current_time() + max(timeout, patience or 0.0) + ANSWER_SECONDS
        argument = command_argument(command, self.spec.output_limit, timeout, patience, env, cwd)
        argument |= {"stdin": stdin, "stream": True, "credit": OUTPUT_WINDOW}
        channel = await self.channel()
        # No cancel scope may be open across a `yield`: the caller may open scopes of its own meanwhile, and scopes must
        # close in reverse order.
        call = await channel.open("run", argument, room=2 * OUTPUT_WINDOW)
        try:
            while True:
                with in_time("stream", max(ANSWER_SECONDS, deadline - anyio.current_time())):
                    piece = await call.next()
                if isinstance(piece, msgspec.Raw):
                    yield to_result(decode(piece, Ending), {})
                    return
                # A piece is the name of the stream and the bytes.
                name, data = piece[0], decode(piece[1], bytes)
                if name not in ("stdout", "stderr"):
                    raise SandboxLostError(f"the agent sent output of {name!r}")
                yield Chunk("stdout" if name == "stdout" else "stderr", data)
                # Only now, so that a command waits while the caller does not take its output.
                await call.grant(data)
        finally:
            await channel.finish(call)

    async def start(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        patience: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> AgentJob:
        """Start a command in the background, as `Commands.start` says.

        The agent keeps the job until its sandbox ends.
        """
        argument = command_argument(command, self.spec.output_limit, timeout, patience, env, cwd)
        channel = await self.channel()
        job_id = ""
        # Shielded: otherwise a cancelled call might leave a job of which nobody knows the id.
        with anyio.CancelScope(shield=True):
            job_id, _ = await channel.ask("start", argument, str, ANSWER_SECONDS)
        return AgentJob(self, job_id)

    @asynccontextmanager
    async def session(self, name: str = "main") -> AsyncGenerator[AgentSession]:
        """Open a shell of the agent for the time of the block. Raises SandboxBusyError if the name is taken."""
        channel = await self.channel()
        session = AgentSession(self, name)
        taken = False
        try:
            # The start is shielded: a cancellation before the answer would leave a shell behind that is never closed.
            with anyio.CancelScope(shield=True):
                try:
                    await channel.ask("session_open", {"name": name}, int, ANSWER_SECONDS)
                except SandboxBusyError:
                    taken = True
                    raise
            yield session
        finally:
            # After any other error, such as a timeout, the agent may have opened the shell. One whose name was taken is
            # another caller's, and the agent closes shells by name.
            if not taken:
                with anyio.CancelScope(shield=True):
                    await _ignore_loss(session.close)

    @asynccontextmanager
    async def terminal(self, command: Command) -> AsyncGenerator[AgentTerminal]:
        """Run a program on a pseudo-terminal for the time of the block. The end of the block kills it.

        It has no timeout. Raises SandboxRefusedError or SandboxLimitError for a command that no agent could run.
        """
        argument = command_argument(command, self.spec.output_limit)
        argument |= {"tty": True, "stream": True, "credit": OUTPUT_WINDOW}
        channel = await self.channel()
        call = await channel.open("run", argument, room=2 * OUTPUT_WINDOW)
        try:
            yield AgentTerminal(call)
        finally:
            await channel.finish(call)

    # ---- files

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a regular file from byte `offset` on: at most `limit`, or all if it is None.

        Raises:
            SandboxFileError: the file cannot be read, or changed meanwhile; or a number is negative.
            SandboxLimitError: more than `READ_LIMIT` bytes are requested, or are there without a limit.
        """
        if offset < 0 or (limit is not None and limit < 0):
            raise SandboxFileError(f"{path}: offset and limit cannot be negative")
        if limit is not None and limit > READ_LIMIT:
            raise SandboxLimitError(f"{path}: one read gives {READ_LIMIT} bytes, not {limit}; read it in ranges")
        channel = await self.channel()
        # One byte more than may be returned shows that the file is too long.
        wanted = READ_LIMIT + 1 if limit is None else limit
        data, first = bytearray(), None
        # Also with a limit of 0 the agent is asked once, and reports a file that cannot be read.
        while len(data) < wanted or first is None:
            size = min(wanted - len(data), READ_PIECE)
            argument = {"path": encoded_path(path), "offset": offset + len(data), "limit": size}
            # The agent sends the file's device, number, time of modification and size with each range. If they differ
            # between two ranges, the ranges do not belong to the same content.
            identity, output = await channel.ask("read", argument, list[int], ANSWER_SECONDS, room=size)
            if first not in (None, identity):
                raise SandboxFileError(f"{path}: changed while it was read; try again")
            first, piece = identity, output.get("stdout", b"")
            data += piece
            if len(piece) < size or not size:
                break
        if len(data) > READ_LIMIT:
            raise SandboxLimitError(f"{path}: has more than the {READ_LIMIT} bytes of one read; read it in ranges")
        return bytes(data)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Replace a file atomically, or append to it, as `Files.write` says. `mode` is for a new or replaced file.

        Raises:
            SandboxLimitError: more than `WRITE_LIMIT` bytes, or the disk is full.
            SandboxRefusedError: the mode is wrong, or the path cannot be encoded.
            SandboxFileError: the file cannot be written.
        """
        if len(data) > WRITE_LIMIT:
            raise SandboxLimitError(f"{path}: one write takes {WRITE_LIMIT} bytes, not {len(data)}")
        if not 0 <= mode <= 0o777:
            raise SandboxRefusedError(f"{path}: a mode is a number from 0 to 0o777, not {mode:#o}")
        channel = await self.channel()
        argument = {"path": encoded_path(path), "mode": mode, "append": append}
        async with channel.call("write", argument, ANSWER_SECONDS + len(data) / WRITE_RATE) as call:
            await call.send(data, last=True)
            await call.result(type(None))

    async def list(self, path: str = ".") -> builtins.list[FileInfo]:
        """Return the entries of a folder, sorted by name; for a file or a link, its own entry.

        Raises:
            SandboxFileError: there is no such folder, or it cannot be read.
            SandboxLimitError: the folder has too many entries.
        """
        channel = await self.channel()
        entries: list[FileInfo] = []
        async with channel.call("list", {"path": encoded_path(path)}, ANSWER_SECONDS, room=LIST_ROOM) as call:
            while not isinstance(piece := await call.next(), msgspec.Raw):
                batch = decode(piece[1], list[_Entry])
                # A program of the sandbox may have replaced the agent. Callers join these names to paths of their own,
                # and must not leave the folder.
                if any(name in (b"", b".", b"..") or b"/" in name or b"\0" in name for name, *_ in batch):
                    raise SandboxLostError(f"{path}: the agent sent a name that no file can have")
                entries += [FileInfo(os.fsdecode(name), kind, size, mode, at) for name, kind, size, mode, at in batch]
        return entries

    async def remove(self, path: str) -> None:
        """Let a worker of the agent remove a file or tree, as `Files.remove` says."""
        await self._work(await self.channel(), "remove", path)

    # ---- trees

    async def put_archive(self, path: str, pieces: AsyncIterator[bytes], size: int | None = None) -> None:
        """Let a worker of the agent unpack a tar archive as `path`, while its pieces arrive.

        `size`, the number of bytes, is not needed here. Raises the errors of `_check_worker`, and of `pieces`.
        """
        channel = await self.channel()
        argument = self._work_argument("receive", path) | {"feed": True}
        room = 2 * self.spec.output_limit
        async with channel.call("work", argument, TREE_SECONDS + ANSWER_SECONDS, room=room) as call:
            async for piece in pieces:
                await call.send(piece)
            await call.send(b"", last=True)
            _check_worker(path, (await call.result(Ending))[0])

    def get_archive(self, path: str, limits: TreeLimits) -> AsyncGenerator[bytes]:
        """Yield a file or tree of the sandbox as a tar stream. `Files.download` unpacks it within the same limits."""
        return self.send_tree(path, limits.total, HEAD_BYTES * limits.entries)

    async def restore(self, channel: Channel, workdir: str) -> None:
        """Fill the working directory with the files of the snapshot, if the image has an archive of them.

        `workdir` is the path of the working directory. The sandbox is not ready yet. `channel()` would wait for that,
        so the channel is an argument. Raises the errors of `_work`.
        """
        await self._work(channel, "restore", workdir)

    async def send_tree(self, path: str, most: int | None = None, heads: int = ARCHIVE_BYTES) -> AsyncGenerator[bytes]:
        """Let a worker of the agent pack a file or tree, and yield the tar stream while it arrives.

        Args:
            path: the file or folder.
            most: most bytes of the files' content, holes included; None: no limit.
            heads: bytes that the stream may have beyond twice `most`.

        Raises:
            SandboxLimitError: the content exceeds `most`, and the message names the file; or the stream is too long,
                whatever the agent reports.
        """
        channel = await self.channel()
        argument = self._work_argument("send", path) | {"stream": True, "credit": OUTPUT_WINDOW}
        if most is not None:
            argument["most"] = most
        room = math.inf if most is None else 2 * most + heads
        deadline = anyio.current_time() + TREE_SECONDS
        call = await channel.open("work", argument, room=2 * OUTPUT_WINDOW)
        transcript = b""
        try:
            while True:
                with in_time("send", max(ANSWER_SECONDS, deadline - anyio.current_time())):
                    piece = await call.next()
                if isinstance(piece, msgspec.Raw):
                    _check_worker(path, decode(piece, Ending), transcript)
                    return
                data = decode(piece[1], bytes)
                await call.grant(data)
                if piece[0] == "stderr":
                    transcript = (transcript + data)[:TRANSCRIPT_BYTES]
                else:
                    room -= len(data)
                    if room < 0:
                        raise SandboxLimitError(f"{path}: too many files for an archive of {most} bytes of content")
                    yield data
        finally:
            await channel.finish(call)

    def _work_argument(self, function: str, path: str) -> dict[str, object]:
        """Return the argument of the agent's operation `work`, which runs a function on a path in a worker process.

        `function` is `remove`, `send`, `receive` or `restore`.
        """
        limit = self.spec.output_limit
        return {"timeout": TREE_SECONDS, "limit": limit, "function": function, "path": encoded_path(path)}

    async def _work(self, channel: Channel, function: str, path: str) -> None:
        """Run one of the agent's functions on a path, to its end. Raises the error of `_check_worker` if it fails."""
        argument, room = self._work_argument(function, path), 2 * self.spec.output_limit
        ending, _ = await channel.ask("work", argument, Ending, TREE_SECONDS + ANSWER_SECONDS, room=room)
        _check_worker(path, ending)


class AgentJob:
    """A background job of the agent, which `AgentSandbox.start` returns. It implements `envs.sandbox.api.Job`."""

    def __init__(self, sandbox: AgentSandbox, job_id: str) -> None:
        """Name a job that the agent of `sandbox` has started."""
        self._sandbox = sandbox
        self.job_id = job_id
        """Id that the agent chose."""

    async def poll(self) -> JobStatus:
        """Return the current state, with the result if the job has ended. Raises SandboxRefusedError if it is unknown.

        The agent knows the last 1,000 jobs of a sandbox.
        """
        channel = await self._sandbox.channel()
        form = tuple[bool, int, int]
        (running, out, err), _ = await channel.ask("job_poll", {"job": self.job_id}, form, ANSWER_SECONDS)
        return JobStatus(running, out, err, None if running else await self.wait(ANSWER_SECONDS))

    async def wait(self, timeout: float) -> Result:
        """Wait for the result. Raises SandboxTimeoutError after `timeout` seconds; the job goes on."""
        channel = await self._sandbox.channel()
        room = 2 * self._sandbox.spec.output_limit
        return to_result(*await channel.ask("job_wait", {"job": self.job_id}, Ending, timeout, room=room))

    async def signal(self, name: str = "SIGTERM") -> None:
        """Send a signal to the job's process group, as `Job.signal` says. Raises SandboxRefusedError for no signal."""
        channel = await self._sandbox.channel()
        await channel.ask("job_signal", {"job": self.job_id, "signal": name}, type(None), ANSWER_SECONDS)

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        """Return at most `limit` bytes of the kept output of one stream, from byte `offset` of the stream on.

        The agent keeps the first and the last bytes. The range begins later if the bytes at `offset` were dropped.
        """
        channel = await self._sandbox.channel()
        limit = min(limit, self._sandbox.spec.output_limit)
        argument = {"job": self.job_id, "stream": stream, "offset": offset, "limit": limit}
        (begin, total), output = await channel.ask("job_output", argument, tuple[int, int], ANSWER_SECONDS, room=limit)
        return Output(begin, output.get("stdout", b""), total)


class AgentSession:
    """A shell that the agent keeps open under a name. It implements `envs.sandbox.api.Session`."""

    def __init__(self, sandbox: AgentSandbox, name: str) -> None:
        """Name a shell of `sandbox`, which `AgentSandbox.session` opens and closes. The caller chose the name."""
        self._sandbox = sandbox
        self.name = name
        self.restarts = 0
        """Number of times that the shell was replaced."""

    async def run(self, command: str, *, timeout: float) -> Result:
        """Run one command after the earlier ones of this session, and return its result.

        Raises:
            SandboxBusyError: the earlier commands took all of `timeout` seconds.
            SandboxRefusedError: the command or the timeout is wrong.
        """
        check_session_command(command, timeout)
        limit = self._sandbox.spec.output_limit
        argument = command_argument(command, limit, timeout) | {"name": self.name}
        channel = await self._sandbox.channel()
        # The command waits for up to `timeout` seconds for its turn, and may then run for `timeout` seconds.
        seconds = 2 * timeout + ANSWER_SECONDS
        ending, output = await channel.ask("session_run", argument, Ending, seconds, room=2 * limit)
        self.restarts = ending.restarts
        return to_result(ending, output)

    async def interrupt(self) -> bool:
        """Send SIGINT to the running command of this session. Returns False if no command runs."""
        channel = await self._sandbox.channel()
        return (await channel.ask("session_interrupt", {"name": self.name}, bool, ANSWER_SECONDS))[0]

    async def close(self) -> None:
        """End the shell and all processes that it started. Commands that wait or run in it fail."""
        channel = await self._sandbox.channel()
        await channel.ask("session_close", {"name": self.name}, type(None), ANSWER_SECONDS)


class AgentTerminal:
    """A program on a pseudo-terminal: one call that streams in both directions until the program ends.

    `AgentSandbox.terminal` yields it. It implements `envs.sandbox.api.Terminal`.
    """

    def __init__(self, call: AgentCall) -> None:
        """Use a call of the agent's operation `run`, which `AgentSandbox.terminal` ends."""
        self._call = call
        self._ended = False
        """True once the program has ended."""

    async def write(self, data: bytes) -> None:
        """Type these bytes. Waits while the program does not read; drops them once it has ended."""
        await self._call.send(data)

    async def read(self) -> bytes:
        """Return the next bytes of output; empty once the program has ended."""
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


def command_argument(
    command: Command,
    limit: int,
    timeout: float | None = None,
    patience: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> dict[str, object]:
    """Check the parameters of a command, and return the argument of the agent's operations `run` and `start`.

    `AgentSession.run` adds the name of the session, for `session_run`. The agent keeps `limit` bytes of each output
    stream. The other parameters are those of `Commands.run`.

    Raises:
        SandboxRefusedError: an argument is wrong, or a text cannot be encoded.
        SandboxLimitError: the command is too long.
        SandboxFileError: the path of its folder is too long.
    """
    check_command(command, timeout, patience, env)
    argument: dict[str, object] = {"timeout": timeout, "limit": limit}
    if patience is not None:
        argument["patience"] = patience
    if cwd is not None:
        argument["cwd"] = encoded_path(cwd)
    variables = {as_bytes(name): as_bytes(value) for name, value in (env or {}).items()}
    if variables:
        argument["env"] = variables
    words = [as_bytes(word) for word in ([command] if isinstance(command, str) else command)]
    argument |= {"command": words[0]} if isinstance(command, str) else {"argv": words}
    texts = [*words, *variables, *variables.values()]
    for unit, size, most in (
        ("bytes", sum(map(len, texts)), LONGEST_COMMAND),
        ("arguments", len(texts), MOST_WORDS),
    ):
        if size > most:
            raise SandboxLimitError(
                f"a command and its variables may have {most} {unit}, not {size}; write them to a file, or pass them "
                "as standard input"
            )
    return argument


def encoded_path(path: str) -> bytes:
    """Return a path as the bytes that the sandbox gets.

    Raises:
        SandboxRefusedError: the path cannot be encoded.
        SandboxFileError: the path is too long.
    """
    check_path(path)
    return as_bytes(path)


def _check_worker(path: str, ending: Ending, transcript: bytes = b"") -> None:
    """Raise an error if a worker of the agent has failed on `path`. Its error output is the message.

    `transcript` is error output of the worker that was streamed, so it is not part of `ending`.

    Raises:
        SandboxLimitError: the worker took too long, too much memory or too much disk.
        SandboxFileError: another failure.
    """
    if ending.exit_code == 0 and not ending.timed_out:
        return
    text = (transcript + ending.stderr).decode("utf-8", "replace").strip()[:500]
    if ending.oom_killed or ending.timed_out or any(each in text for each in _NO_ROOM):
        raise SandboxLimitError(f"{path}: {text or 'took too long, or too much memory'}")
    raise SandboxFileError(f"{path}: {text or f'failed with {ending.signal or ending.exit_code}'}")


@asynccontextmanager
async def _sending(call: AgentCall, data: bytes) -> AsyncGenerator[None]:
    """Send all of `data` as input of a command while the block waits for the result.

    The end of the block ends the sending, since a command may end without reading its input. Raises the error of the
    block; errors of the sending are ignored.
    """
    body_error: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ignore_loss, lambda: call.send(data, last=True))
        try:
            yield
        except Exception as error:
            # The error is raised again below, because the task group would wrap it in an exception group.
            body_error = error
        tasks.cancel_scope.cancel()
    if body_error is not None:
        raise body_error


async def _ignore_loss(work: Callable[[], Awaitable[None]]) -> None:
    """Call `work` and ignore errors of the sandbox.

    For the sending of input, the call that waits for the result reports a lost sandbox; for the end of a session, the
    shell is gone then.
    """
    try:
        await work()
    except SandboxError:
        return
