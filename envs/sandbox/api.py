"""What is asked of sandboxes and what comes back: the types that the local class, the service and its client share.

A sandbox itself is `envs.sandbox.sandbox:Sandbox`, had over a container engine of this machine, from a pool of them, or
over HTTP from a service. Code written against it runs with each.

Every answer is final and true: a `Result` is what the operating system said of the command; a call that has none raises
an error of `flash.errors.SandboxError`. An error never stands for a result, so that a failure of the infrastructure
cannot be scored as a wrong answer. Units: seconds, bytes, MiB where the name says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from flash.errors import SandboxRefusedError

Profile = Literal["strict", "build", "compat"]
"""How much a sandbox may do; the exact settings are in `envs.sandbox.engines.profiles`."""
State = Literal["starting", "ready", "lost", "closed"]
"""`lost`: its container or its agent is gone without our asking; `closed`: ended by its owner or by a limit."""
StreamName = Literal["stdout", "stderr"]
OnLost = Literal["fail", "recreate"]
"""What becomes of a lease whose sandbox is lost: it ends with the error, or gets another sandbox, which is empty."""
Command = str | Sequence[str]
"""Text is run by `bash -c` (`sh -c` where the image has no bash), a sequence as it is, without a shell."""

MAX_COMMAND = 1 << 20
"""Characters of a command, or of one of its words, that the service decodes."""
MAX_TIMEOUT_S = 86_400.0
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]

_CommandText = Annotated[str, Meta(max_length=MAX_COMMAND)]
_Image = Annotated[str, Meta(max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*\Z")]
"""Name of an image. Engines answer a longer one, or other characters, with an internal error."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What kind of sandbox is wanted. Equal specs can share a warm pool."""

    image: _Image
    """An image that the engine has. It needs a shell at /bin/sh, and Python 3.6 or newer."""
    profile: Profile = "strict"
    cpus: Annotated[float, Meta(ge=0.01, le=1024)] = 1.0
    """Engines give no less, and take next to nothing for no limit at all."""
    memory_mib: Annotated[int, Meta(ge=16, le=4 << 20)] = 512
    """Hard limit, without swap. Files in memory (/tmp, and /work under `strict`) count; all of them together can take
    three quarters of it, so that no file keeps the sandbox from working."""
    pids: Annotated[int, Meta(ge=8, le=1 << 20)] = 256
    disk_mib: Annotated[int, Meta(ge=1, le=4 << 20)] | None = None
    """Room for files: the size of /work under `strict`, otherwise what the sandbox may write to its own layer. None:
    256, or under `strict` what the memory allows."""
    network: Literal["none", "bridge"] = "none"
    env: dict[str, str] = {}
    workdir: Annotated[str, Meta(pattern="^/[^\x00]+$", max_length=4096)] = "/work"
    """Where commands start, and what relative paths are relative to."""
    runtime: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """The engine's name of a container runtime, for instance `runsc`; the sandbox is refused unless it really runs
    under it. None: the engine's default."""
    deadline_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Life of the sandbox from its start; afterwards it is closed, whatever it does."""
    idle_s: Annotated[float, Meta(gt=0)] | None = None
    """Closed after this long without a call in progress."""
    output_limit: Annotated[int, Meta(ge=1024, le=1 << 26)] = 1 << 20
    """Bytes kept of each stream of a command: the first half of them and the last half."""


def check_timeout(seconds: object) -> None:
    """Refuse what is no time for a command: not a number of seconds above 0, up to a day.

    Raises:
        SandboxRefusedError: saying what it is.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise SandboxRefusedError(
            f"a timeout is a number of seconds, above 0 and up to {MAX_TIMEOUT_S:g}, not {seconds!r:.80}"
        )


class Exec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command to be run: from the caller's arguments, over HTTP, to the agent's channel."""

    command: _CommandText | Sequence[_CommandText]
    timeout: Timeout | None = None
    """Seconds after which it is killed; None: as long as the sandbox lives, which only a job or a terminal may."""
    patience: Timeout | None = None
    """Seconds on the clock after which it is killed, where `timeout` does not count the time in which it was ready to
    run and had no CPU. None: `timeout` is on the clock."""
    stdin: bytes = b""
    env: Mapping[str, str] | None = None
    """Added to the sandbox's own."""
    cwd: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """Where it starts; None: in the working directory."""

    def __post_init__(self) -> None:
        """Refuse what no agent could run: the constructor of a struct checks nothing itself."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("command", "timeout", "env")}
        command, timeout, env = fields["command"], fields["timeout"], fields["env"] or {}
        words: list[object] = [command] if isinstance(command, str) else [*(command or ())]
        if not words or not all(isinstance(word, str) for word in words):
            raise SandboxRefusedError(f"a command is text, or a list of at least one word, not {command!r:.80}")
        for seconds in (timeout, self.patience):
            if seconds is not None:
                check_timeout(seconds)
        for name, value in env.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise SandboxRefusedError(f"env: names and values are text, but {name!r:.80} is {value!r:.80}")
            if not name or "=" in name:
                raise SandboxRefusedError(f"env: {name!r:.80} cannot be the name of a variable")

    @property
    def seconds(self) -> float:
        """Return the longest time of a command that is waited for. Raises SandboxRefusedError when it has none."""
        if self.timeout is None:
            raise SandboxRefusedError("a command that is waited for needs a timeout")
        return max(self.timeout, self.patience or 0.0)

    def converted(self, convert: Callable[[str], str]) -> Exec:
        """The same with each of its texts converted: they may have bytes that are no UTF-8."""
        command, env, cwd = self.command, self.env, self.cwd
        return msgspec.structs.replace(
            self,
            command=convert(command) if isinstance(command, str) else [convert(word) for word in command],
            env=None if env is None else {convert(name): convert(value) for name, value in env.items()},
            cwd=None if cwd is None else convert(cwd),
        )


class Result(msgspec.Struct, frozen=True):
    """How a command ended."""

    exit_code: int | None
    """None when a signal ended it."""
    signal: str | None
    """For instance `SIGKILL`; None when it exited."""
    timed_out: bool
    """Its time was over and it was killed; what it wrote until then is kept."""
    oom_killed: bool
    """While it ran, the kernel killed a process of the sandbox for want of memory."""
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    """Bytes from the middle are missing: more than `output_limit` were written."""
    stderr_truncated: bool
    wall_s: float
    cpu_s: float
    """Of the command and the children it waited for."""
    max_rss: int
    """Largest resident set of one of its processes; 0 in sessions, where it cannot be measured."""
    waited_s: float = 0.0
    """Time in which it was ready to run and had no CPU, where the command has `patience`."""

    @property
    def ok(self) -> bool:
        """Whether it exited with 0 in time."""
        return self.exit_code == 0 and not self.timed_out


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a command's output as it comes."""

    stream: StreamName
    data: bytes


class JobStatus(msgspec.Struct, frozen=True):
    """A background job at one moment."""

    running: bool
    stdout_bytes: int
    """Written so far, kept or not."""
    stderr_bytes: int
    result: Result | None
    """Once it has ended."""


class Output(msgspec.Struct, frozen=True):
    """A range of a job's output."""

    offset: int
    """Where `data` begins: later than asked for when the bytes before it are not kept any more."""
    data: bytes
    total: int
    """Bytes written to the stream so far."""


class FileInfo(msgspec.Struct, frozen=True):
    """One entry of a folder. Links are not followed."""

    name: str
    """As `os.fsdecode` gives it: bytes that are no UTF-8 are surrogates, and paths may have them too."""
    kind: Literal["file", "folder", "link", "other"]
    size: int
    mode: int
    modified_s: float
    """Since the epoch, on the sandbox's clock."""


class Snapshot(msgspec.Struct, frozen=True):
    """The files of a sandbox, kept as an image of its engine. Processes are not part of it."""

    snapshot_id: str
    spec: Spec
    """Starts a sandbox with these files."""
    size: int
    """Bytes that it takes beyond the image it began from, as far as the engine says."""


class Session(Protocol):
    """A shell that lives on between commands: working directory, variables, functions and options stay.

    Commands of one session run one after another, in the order of the calls. Each has its own end, whatever it prints
    or leaves open. A command that ends the shell (`exit`, `set -e`, a timeout) is answered like any other; the shell is
    then replaced by one with the variables, functions, options and working directory from before that command.
    """

    @property
    def name(self) -> str: ...

    @property
    def restarts(self) -> int:
        """How often the shell was replaced."""
        ...

    async def run(self, command: str, *, timeout: float) -> Result:
        """Run one command. A timeout kills what the command started, and the shell with it."""
        ...

    async def interrupt(self) -> bool:
        """Send SIGINT to the running command, as ctrl-C would; False when none runs."""
        ...

    async def close(self) -> None:
        """End the shell and everything it started."""
        ...


class Job(Protocol):
    """A command in the background. It ends with its sandbox."""

    @property
    def job_id(self) -> str: ...

    async def poll(self) -> JobStatus:
        """How it stands, at once."""
        ...

    async def wait(self, timeout: float) -> Result:
        """Its result. Raises SandboxTimeoutError when it still runs after `timeout` seconds; it goes on running."""
        ...

    async def signal(self, name: str = "SIGTERM") -> None:
        """Send a signal to its process group, nothing when it has ended. SIGKILL ends all of it."""
        ...

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        """A range of what it wrote."""
        ...


class Terminal(Protocol):
    """A running program on a pseudo-terminal: bytes in both directions."""

    async def write(self, data: bytes) -> None: ...

    async def read(self) -> bytes:
        """Return the next bytes of output; empty once the program has ended."""
        ...
