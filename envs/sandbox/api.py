"""Types of requests to sandboxes and of their results. The local sandbox, the service and its client share them.

A sandbox is an `envs.sandbox.sandbox.Sandbox`: a container of this machine's engine, a sandbox of a pool, or one of a
service over HTTP. Code written against it runs with each.

Every result is final and true: a `Result` is the operating system's report about the command. A call without such a
report raises a `flash.errors.SandboxError`. An error is never turned into a result, so that a failure of the
infrastructure cannot be scored as a wrong answer. Units are seconds and bytes, and MiB if the name ends with `_mib`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from flash.errors import SandboxRefusedError

Profile = Literal["strict", "build", "compat"]
"""Name of a set of restrictions; `envs.sandbox.engines.profiles` has the exact settings."""
State = Literal["starting", "ready", "lost", "closed"]
"""State of a sandbox. `lost`: its container or its agent ended unexpectedly. `closed`: its owner or a limit ended
it."""
StreamName = Literal["stdout", "stderr"]
"""Name of an output stream of a command."""
OnLost = Literal["fail", "recreate"]
"""Reaction to a lost sandbox: the lease ends with the error, or it gets another sandbox, which is empty."""
Command = str | Sequence[str]
"""A command. Text runs in `bash -c` (`sh -c` if the image has no bash); a sequence of words runs without a shell."""

MAX_COMMAND = 1 << 20
"""Longest command, or word of a command, that the service decodes, in characters."""
STREAM_INPUT = 1 << 16
"""Most bytes of standard input that `stream` takes, because they travel to the sandbox in one message."""
MAX_TIMEOUT_S = 86_400.0
"""Longest timeout of a command, in seconds."""
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
"""Time limit of a command, in seconds."""

_CommandText = Annotated[str, Meta(max_length=MAX_COMMAND)]
"""A command, or a word of one."""
_Image = Annotated[str, Meta(max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*\Z")]
"""Name of an image. For a longer name, or other characters, engines respond with an internal error."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kind of a sandbox. Equal specs can share a warm pool."""

    image: _Image
    """Name of an image that the engine has. The image needs a shell at /bin/sh, and Python 3.6 or newer."""
    profile: Profile = "strict"
    """Restrictions of the sandbox."""
    cpus: Annotated[float, Meta(ge=0.01, le=1024)] = 1.0
    """Most CPUs that the sandbox can use. Engines cannot give less than the minimum, and treat almost 0 as no limit."""
    memory_mib: Annotated[int, Meta(ge=16, le=4 << 20)] = 512
    """Hard memory limit in MiB, without swap. Files in memory (/tmp, and /work under `strict`) count. All of them
    together can take three quarters of it, so that files alone cannot stop the sandbox from working."""
    pids: Annotated[int, Meta(ge=8, le=1 << 20)] = 256
    """Most processes and threads at the same time."""
    disk_mib: Annotated[int, Meta(ge=1, le=4 << 20)] | None = None
    """Disk for files in MiB: the size of /work under `strict`, otherwise the most that the sandbox may write to its own
    layer. None: 256, or under `strict` less if the memory allows no more."""
    network: Literal["none", "bridge"] = "none"
    """Network of the sandbox. `bridge`: it can reach everything that the engine's machine can reach."""
    env: dict[str, str] = {}
    """Environment variables of all commands."""
    workdir: Annotated[str, Meta(pattern="^/[^\x00]+$", max_length=4096)] = "/work"
    """Folder where commands start, and to which paths are relative."""
    runtime: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """Engine's name of a container runtime, for instance `runsc`. The sandbox is refused unless it really runs under
    it. None: the engine's default."""
    deadline_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Lifetime of the sandbox in seconds from its start. Afterwards it is closed, even if commands run."""
    idle_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds without a call in progress after which the sandbox is closed. None: never."""
    output_limit: Annotated[int, Meta(ge=1024, le=1 << 26)] = 1 << 20
    """Bytes that are kept of each output stream of a command: half of them from its start, half from its end."""


def check_timeout(seconds: object) -> None:
    """Check that a timeout of a command is a number of seconds, above 0 and up to a day.

    Raises:
        SandboxRefusedError: it is not.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise SandboxRefusedError(
            f"a timeout is a number of seconds, above 0 and up to {MAX_TIMEOUT_S:g}, not {seconds!r:.80}"
        )


def check_command(command: Any, timeout: object, patience: object, env: Mapping[Any, Any] | None) -> None:
    """Refuse a command that no agent could run. A timeout and a patience of None are accepted.

    The types are checked too: the arguments come from programs of users, which no checker of types has seen.

    Raises:
        SandboxRefusedError: the command, a time or a variable is wrong. The message shows it.
    """
    words: list[object] = [command] if isinstance(command, str) else [*(command or ())]
    if not words or not all(isinstance(word, str) for word in words):
        raise SandboxRefusedError(f"a command is text, or a list of at least one word, not {command!r:.80}")
    for seconds in (timeout, patience):
        if seconds is not None:
            check_timeout(seconds)
    for name, value in (env or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise SandboxRefusedError(f"env: names and values are text, but {name!r:.80} is {value!r:.80}")
        if not name or "=" in name:
            raise SandboxRefusedError(f"env: {name!r:.80} cannot be the name of a variable")


def check_session_command(command: object, timeout: object) -> None:
    """Refuse a command that no session could run.

    Raises:
        SandboxRefusedError: the command is no text, or the timeout is wrong. The message shows it.
    """
    if not isinstance(command, str):
        raise SandboxRefusedError(f"a session takes a command as text, not {command!r:.80}")
    check_timeout(timeout)


class Exec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command as it travels to a service over HTTP: the body of `run`, `stream` and `jobs`."""

    command: _CommandText | Sequence[_CommandText]
    """Shell code, or a program with its arguments."""
    timeout: Timeout | None = None
    """Seconds after which the command is killed. None: only when the sandbox ends; allowed for jobs and terminals
    only."""
    patience: Timeout | None = None
    """Seconds on the clock after which the command is killed in any case. If set, `timeout` does not count the time in
    which the command was ready to run but had no CPU. None: `timeout` is on the clock."""
    stdin: bytes = b""
    """Standard input of the command, which ends after these bytes."""
    env: Mapping[str, str] | None = None
    """Environment variables that are added to the sandbox's own."""
    cwd: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """Folder where the command starts; None: the working directory."""

    def __post_init__(self) -> None:
        """Refuse a command that no agent could run. Raises SandboxRefusedError, as `check_command` does."""
        check_command(self.command, self.timeout, self.patience, self.env)

    def converted(self, convert: Callable[[str], str]) -> Exec:
        """Return a copy with each of its texts converted, because texts may contain bytes that are not UTF-8.

        The client converts with `to_wire` before it sends the command, and the service with `from_wire`.
        """
        command, env, cwd = self.command, self.env, self.cwd
        return msgspec.structs.replace(
            self,
            command=convert(command) if isinstance(command, str) else [convert(word) for word in command],
            env=None if env is None else {convert(name): convert(value) for name, value in env.items()},
            cwd=None if cwd is None else convert(cwd),
        )


class Result(msgspec.Struct, frozen=True):
    """Result of a command."""

    exit_code: int | None
    """Exit code; None if a signal ended the command."""
    signal: str | None
    """Name of the signal that ended the command, for instance `SIGKILL`; None if it exited."""
    timed_out: bool
    """True if the command was killed at its timeout. Its output until then is kept."""
    oom_killed: bool
    """True if the kernel killed a process of the sandbox for lack of memory while the command ran."""
    stdout: bytes
    """Standard output: all of it, or its beginning and its end."""
    stderr: bytes
    """Standard error: all of it, or its beginning and its end."""
    stdout_truncated: bool
    """True if bytes from the middle are missing, because more than `output_limit` were written."""
    stderr_truncated: bool
    """True if bytes from the middle of standard error are missing."""
    wall_s: float
    """Duration on the clock, in seconds."""
    cpu_s: float
    """CPU time of the command and of the children that it waited for, in seconds."""
    max_rss: int
    """Largest resident set of one of its processes in bytes; 0 in sessions, where it cannot be measured."""
    waited_s: float = 0.0
    """Seconds in which the command was ready to run but had no CPU; measured only with `patience`."""

    @property
    def ok(self) -> bool:
        """True if the command exited with 0 in time."""
        return self.exit_code == 0 and not self.timed_out


class Chunk(msgspec.Struct, frozen=True):
    """Piece of a command's output, as it was written."""

    stream: StreamName
    """Stream that the command wrote to: `stdout` or `stderr`."""
    data: bytes
    """Bytes of the piece."""


class JobStatus(msgspec.Struct, frozen=True):
    """State of a background job at one moment."""

    running: bool
    """True if the job has not ended."""
    stdout_bytes: int
    """Bytes written so far, including those that are no longer kept."""
    stderr_bytes: int
    """Bytes written to standard error so far."""
    result: Result | None
    """Result of the job; None while it runs."""


class Output(msgspec.Struct, frozen=True):
    """Range of a job's output."""

    offset: int
    """Position of `data` in the stream. It is later than requested if the bytes before it are no longer kept."""
    data: bytes
    """Bytes of the range."""
    total: int
    """Bytes written to the stream so far."""


class FileInfo(msgspec.Struct, frozen=True):
    """Entry of a folder. Links are not followed."""

    name: str
    """Name as `os.fsdecode` returns it: bytes that are not UTF-8 become surrogates. Paths may contain them too."""
    kind: Literal["file", "folder", "link", "other"]
    """Type of the entry; `other` is a device, a pipe or a socket."""
    size: int
    """Size in bytes."""
    mode: int
    """Permissions."""
    modified_s: float
    """Time of the last change, in seconds since the epoch, on the sandbox's clock."""


class Snapshot(msgspec.Struct, frozen=True):
    """Files of a sandbox, saved as an image of its engine. Processes are not part of it."""

    snapshot_id: str
    """Id of the snapshot at its provider."""
    spec: Spec
    """Spec that starts a sandbox with these files."""
    size: int
    """Bytes beyond the image that the sandbox began from, if the engine reports them."""


class Session(Protocol):
    """A shell that stays open between commands and keeps its working directory, variables, functions and options.

    Commands of one session run one after another, in the order of the calls. The end of each command is detected
    reliably, whatever it prints or leaves open. If a command ends the shell (`exit`, `set -e`, a timeout), its result
    is returned as usual. A new shell then replaces the old one, with the variables, functions, options and working
    directory from before that command. Background processes (`&`) of earlier commands go on; those that the command
    itself has started end.
    """

    @property
    def name(self) -> str:
        """Name that the caller chose for the session."""
        ...

    @property
    def restarts(self) -> int:
        """Number of times the shell was replaced."""
        ...

    async def run(self, command: str, *, timeout: float) -> Result:
        """Run one command. After `timeout` seconds, the shell and everything that the command started are killed.

        Raises:
            SandboxBusyError: the earlier commands took all of `timeout` seconds.
            SandboxRefusedError: the command or the timeout is wrong, or the shell did not report how the command ended.
            SandboxError: the sandbox or the session has ended.
        """
        ...

    async def interrupt(self) -> bool:
        """Send SIGINT to the running command, as ctrl-C does. Returns False if no command runs."""
        ...

    async def close(self) -> None:
        """End the shell and everything that it started."""
        ...


class Job(Protocol):
    """A command in the background. It ends with its sandbox."""

    @property
    def job_id(self) -> str:
        """Id by which the sandbox knows the job."""
        ...

    async def poll(self) -> JobStatus:
        """Return the current state without waiting."""
        ...

    async def wait(self, timeout: float) -> Result:
        """Wait for the result. The job goes on if the wait times out.

        Raises:
            SandboxTimeoutError: the job still runs after `timeout` seconds.
        """
        ...

    async def signal(self, name: str = "SIGTERM") -> None:
        """Send a signal to the job's process group. SIGKILL ends the whole group. Does nothing if the job has ended."""
        ...

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        """Return kept bytes of one stream: at most `limit`, from byte `offset` of the stream on."""
        ...


class Terminal(Protocol):
    """A running program on a pseudo-terminal, with bytes in both directions."""

    async def write(self, data: bytes) -> None:
        """Type these bytes. Waits while the program does not read."""
        ...

    async def read(self) -> bytes:
        """Return the next bytes of output; empty once the program has ended."""
        ...
