"""Messages between the service and its clients: bodies, queries and answers of the HTTP API.

Every body is a struct that refuses unknown fields. It is sent as JSON, or as msgpack if the content type says so. The
body of a command is an `envs.sandbox.api.Exec`. JSON carries bytes as base64. Names and commands with bytes that are
not UTF-8 are escaped as `envs.sandbox.text` describes. An error is sent as a `HttpProblem` (RFC 9457) with its status
from `problems.STATUS`. The client makes the same exception from `cause`, the name of the error's class.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from envs.sandbox.api import (
    MAX_COMMAND,
    MAX_TIMEOUT_S,
    Chunk,
    FileInfo,
    OnLost,
    Result,
    Spec,
    State,
    StreamName,
    Timeout,
)
from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.pool.failures import PoolFailure

BINARY = "application/octet-stream"
MSGPACK = "application/msgpack"
NDJSON = "application/x-ndjson"
TAR = "application/x-tar"

Path = Annotated[str, Meta(min_length=1, max_length=4096, pattern="^[^\x00]+$")]
"""Path of a file in a sandbox."""
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
"""Name of a session."""
Owner = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/-]{0,64}$")]
"""Name of an owner of sandboxes."""
Wait = Annotated[float, Meta(ge=0, le=60)]
"""Seconds for which the service may hold an answer back while there is nothing to report."""
Bytes = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Number of bytes. Linux limits the size of a file to the same range."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body or query that a client sends."""


class SandboxOrder(Body, frozen=True):
    """An order for a sandbox."""

    spec: Spec
    owner: Owner = ""
    """Owner of the sandbox. The pool shares its sandboxes fairly between owners."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    on_lost: OnLost = "fail"
    lease_s: Annotated[float, Meta(ge=1, le=MAX_TIMEOUT_S)] = 120.0
    """Seconds after which the sandbox ends, unless it is used or renewed before."""


class RunInSession(Body, frozen=True):
    """A command to run in a session."""

    command: Annotated[str, Meta(max_length=MAX_COMMAND)]
    timeout: Timeout


class Signal(Body, frozen=True):
    """A signal for a job."""

    name: Annotated[str, Meta(pattern="^SIG[A-Z0-9+]{1,12}$")] = "SIGTERM"


class Fork(Body, frozen=True):
    """An order for forks: the number of them."""

    count: Annotated[int, Meta(ge=1, le=256)]


class WaitQuery(Body, frozen=True):
    """Query `?wait=SECONDS`: the time for which the answer may be held back."""

    wait: Wait = 0.0


class StatusQuery(Body, frozen=True):
    """Query `?wait=SECONDS&since=VERSION`: hold the answer back until there is a newer version than `since`."""

    wait: Wait = 0.0
    since: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] = -1


class ReadQuery(Body, frozen=True):
    """Query `?path=…&offset=…&limit=…`: a range of a file, in bytes."""

    path: Path
    offset: Bytes = 0
    limit: Bytes | None = None


class WriteQuery(Body, frozen=True):
    """Query `?path=…&mode=…&append=…`: the file that the body is written to. `mode` is a decimal number."""

    path: Path
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o644
    append: bool = False


class PathQuery(Body, frozen=True):
    """Query `?path=…`: a file or folder; the working directory by default."""

    path: Path = "."


class OutputQuery(Body, frozen=True):
    """Query `?stream=…&offset=…&limit=…`: a range of the output of a job, in bytes."""

    stream: StreamName = "stdout"
    offset: Bytes = 0
    limit: Annotated[int, Meta(ge=1, le=1 << 20)] = 1 << 16


# ---- answers


class Info(msgspec.Struct, frozen=True):
    """A lease and its sandbox, as the owner sees them."""

    id: str
    owner: str
    state: Literal["queued", "starting", "ready", "failed", "closed"]
    sandbox_state: State
    reason: str
    spec: Spec
    host: str
    generation: int
    """Number of times that the sandbox was replaced after a loss."""
    created_at: float
    """Unix time of the order."""
    lease_s: float
    position: int | None
    """Number of older requests in the wait queue; None if the lease is not in the queue."""
    key: str = ""
    """Idempotency key of the order."""
    waiting_for: str = ""
    problem: HttpProblem | None = None
    """Error that ended the lease, if it failed."""


class SessionInfo(msgspec.Struct, frozen=True):
    """An open session of a sandbox."""

    name: str
    restarts: int


class SessionResult(msgspec.Struct, frozen=True):
    """Result of a command in a session."""

    result: Result
    restarts: int


class SessionInterrupted(msgspec.Struct, frozen=True):
    """Answer to an interrupt: True if a command was running."""

    interrupted: bool


class JobInfo(msgspec.Struct, frozen=True):
    """A background job that was started."""

    job_id: str


class StreamPiece(msgspec.Struct, frozen=True, tag="chunk"):
    """Line of a stream with a piece of output."""

    chunk: Chunk


class Last(msgspec.Struct, frozen=True, tag="result"):
    """Last line of a stream: the result of the command."""

    result: Result


class Broken(msgspec.Struct, frozen=True, tag="problem"):
    """Last line of a stream that failed."""

    problem: HttpProblem


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Line of a stream without content. It shows that the connection still works while the command writes nothing."""


StreamLine = StreamPiece | Last | Broken | Alive
"""A line of a stream."""


class HostStatus(msgspec.Struct, frozen=True):
    """Resources, sandboxes and counters of one host."""

    name: str
    cpus: float
    """CPUs that sandboxes may be granted on this host."""
    memory_mib: int
    cpus_promised: float
    memory_mib_promised: int
    why_not: str
    """Reason why the host takes no sandboxes; empty if it takes them."""
    sandboxes: int
    warm: int
    hits: int
    misses: int
    orphans_removed: int
    load: MachineLoad | None
    """Load of the host's machine; null if it is not measured."""


class Status(msgspec.Struct, frozen=True):
    """State of the whole pool at one moment."""

    version: int
    service: str
    boot: str
    """Identifier of this start of the service. It changes with each start."""
    hosts: list[HostStatus]
    states: dict[str, int]
    queue: dict[str, int]
    """Number of waiting requests by owner. A token other than `admin` sees the owners of other tokens as one entry."""
    hit_rate: float | None
    """Share of the starts that were served by a warm sandbox."""
    failures: dict[str, int]
    """Number of failures by cause, since the start of the service."""
    recent_failures: list[PoolFailure]
    """Latest failures; empty unless the caller is `admin`, because their messages name images and hosts of other
    tokens. For the same reason `images_put_aside` is empty."""
    images_put_aside: dict[str, str]
    sandboxes: list[Info]
    """Sandboxes that the caller may use."""


class HttpProblem(msgspec.Struct, frozen=True, kw_only=True):
    """An error in the form of RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    cause: str = ""
    """Name of the error's class in `flash.errors`."""


class Listing(msgspec.Struct, frozen=True):
    """The entries of a folder."""

    entries: list[FileInfo]


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot, as the tokens that may use it see it."""

    snapshot_id: str
    image: str
    """Image to name in the `Spec` of a sandbox that starts with these files."""
    owner: str
    host: str
    size: int
    made_at: float
    """Unix time at which the snapshot was made."""
    expires_at: float
    """Unix time at which the snapshot will be removed."""


class SnapshotList(msgspec.Struct, frozen=True):
    """Several snapshots, oldest first."""

    snapshots: list[SnapshotInfo]


class SandboxList(msgspec.Struct, frozen=True):
    """Several sandboxes, oldest first."""

    sandboxes: list[Info]
