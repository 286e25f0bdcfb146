"""What travels between the service and its clients: bodies, queries and answers of the HTTP API.

Every body is a struct that refuses unknown fields, sent as JSON, or as msgpack when the content type says so; a command
is an `envs.sandbox.api.Exec`. In JSON, bytes are base64. Names and commands with bytes that are no UTF-8 are escaped as
`envs.sandbox.text` says. An error is a `HttpProblem` (RFC 9457) with the status of `problems.STATUS`; its `cause` is
the class of the error, from which the client makes the same exception again.
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
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
"""Name of a session."""
Owner = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/-]{0,64}$")]
Wait = Annotated[float, Meta(ge=0, le=60)]
"""Seconds to hold an answer back until there is something to say."""
Bytes = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A number of bytes, as Linux counts those of a file."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client sends."""


class SandboxOrder(Body, frozen=True):
    """A wish for a sandbox."""

    spec: Spec
    owner: Owner = ""
    """On whose behalf; sandboxes are shared fairly between owners."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    on_lost: OnLost = "fail"
    lease_s: Annotated[float, Meta(ge=1, le=MAX_TIMEOUT_S)] = 120.0
    """The sandbox ends unless it is used or renewed within this many seconds."""


class RunInSession(Body, frozen=True):
    """One command in a shell."""

    command: Annotated[str, Meta(max_length=MAX_COMMAND)]
    timeout: Timeout


class Signal(Body, frozen=True):
    """A signal for a job."""

    name: Annotated[str, Meta(pattern="^SIG[A-Z0-9+]{1,12}$")] = "SIGTERM"


class Fork(Body, frozen=True):
    """How many forks are asked for."""

    count: Annotated[int, Meta(ge=1, le=256)]


class WaitQuery(Body, frozen=True):
    """`?wait=SECONDS`: hold the answer back for so long."""

    wait: Wait = 0.0


class StatusQuery(Body, frozen=True):
    """`?wait=SECONDS&since=VERSION`: hold the answer back until there is a newer version."""

    wait: Wait = 0.0
    since: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] = -1


class ReadQuery(Body, frozen=True):
    """`?path=…&offset=…&limit=…`: a range of a file, in bytes."""

    path: Path
    offset: Bytes = 0
    limit: Bytes | None = None


class WriteQuery(Body, frozen=True):
    """`?path=…&mode=…&append=…`: where the body is written to; the mode as a decimal number."""

    path: Path
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o644
    append: bool = False


class PathQuery(Body, frozen=True):
    """`?path=…`: a file or folder, the working directory by default."""

    path: Path = "."


class OutputQuery(Body, frozen=True):
    """`?stream=…&offset=…&limit=…`: a range of what a job wrote, in bytes."""

    stream: StreamName = "stdout"
    offset: Bytes = 0
    limit: Annotated[int, Meta(ge=1, le=1 << 20)] = 1 << 16


# ---- answers


class Info(msgspec.Struct, frozen=True):
    """One lease and its sandbox, as its owner sees them."""

    id: str
    owner: str
    state: Literal["queued", "starting", "ready", "failed", "closed"]
    sandbox_state: State
    reason: str
    spec: Spec
    host: str
    generation: int
    """How often it was made again after a loss."""
    created_at: float
    """Unix time of the order."""
    lease_s: float
    position: int | None
    """How many waiting requests are older, while it waits."""
    key: str = ""
    """The idempotency key of its order."""
    waiting_for: str = ""
    problem: HttpProblem | None = None
    """What ended it, if it failed."""


class SessionInfo(msgspec.Struct, frozen=True):
    """One open shell of a sandbox."""

    name: str
    restarts: int


class SessionResult(msgspec.Struct, frozen=True):
    """How a command in a shell ended."""

    result: Result
    restarts: int


class SessionInterrupted(msgspec.Struct, frozen=True):
    """Whether a command was running."""

    interrupted: bool


class JobInfo(msgspec.Struct, frozen=True):
    """A background job that was started."""

    job_id: str


class StreamPiece(msgspec.Struct, frozen=True, tag="chunk"):
    """A line of a stream: output."""

    chunk: Chunk


class Last(msgspec.Struct, frozen=True, tag="result"):
    """The last line of a stream: how the command ended."""

    result: Result


class Broken(msgspec.Struct, frozen=True, tag="problem"):
    """The last line of a stream that failed."""

    problem: HttpProblem


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A line that says nothing: the command is silent, the connection stands."""


StreamLine = StreamPiece | Last | Broken | Alive


class HostStatus(msgspec.Struct, frozen=True):
    """One host: what it has, what it promised, and how it does."""

    name: str
    cpus: float
    """That may be promised."""
    memory_mib: int
    cpus_promised: float
    memory_mib_promised: int
    why_not: str
    """Why it takes no sandboxes; "" when it does."""
    sandboxes: int
    warm: int
    hits: int
    misses: int
    orphans_removed: int
    load: MachineLoad | None
    """Of its machine; null where it is not measured."""


class Status(msgspec.Struct, frozen=True):
    """The whole pool at one moment."""

    version: int
    service: str
    boot: str
    """Another one after each start of the service."""
    hosts: list[HostStatus]
    states: dict[str, int]
    queue: dict[str, int]
    """Waiting requests by owner; to any token but `admin`, those of other tokens in one."""
    hit_rate: float | None
    """Share of the starts that were served by a ready sandbox."""
    failures: dict[str, int]
    """By cause, since the start of the service."""
    recent_failures: list[PoolFailure]
    """These, and the images, only to `admin`: messages name what others use."""
    images_put_aside: dict[str, str]
    sandboxes: list[Info]
    """Those that the caller may use."""


class HttpProblem(msgspec.Struct, frozen=True, kw_only=True):
    """An error (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    cause: str = ""
    """Class of the error in `flash.errors`."""


class Listing(msgspec.Struct, frozen=True):
    """The entries of a folder."""

    entries: list[FileInfo]


class SnapshotInfo(msgspec.Struct, frozen=True):
    """One snapshot, as who may use it sees it."""

    snapshot_id: str
    image: str
    """For the spec of a sandbox that begins with its files."""
    owner: str
    host: str
    size: int
    made_at: float
    """Unix time."""
    expires_at: float
    """Unix time at which it is removed."""


class SnapshotList(msgspec.Struct, frozen=True):
    """Several snapshots, oldest first."""

    snapshots: list[SnapshotInfo]


class SandboxList(msgspec.Struct, frozen=True):
    """Several sandboxes, oldest first."""

    sandboxes: list[Info]
