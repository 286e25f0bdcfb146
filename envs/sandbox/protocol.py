"""Messages and errors of the HTTP API, between the service and its clients.

Every body is a struct that refuses unknown fields. It is sent as JSON, or as msgpack if the content type says so. The
body of a command is an `envs.sandbox.api.Exec`. JSON carries bytes as base64. Names and commands with bytes that are
not UTF-8 are escaped as `envs.sandbox.text` describes.

An error is sent as a `HttpProblem` (RFC 9457) with its status from `STATUS`: `problem_of` makes it of an exception. The
client makes the same exception from `cause`, the name of the error's class, with `error_of`.
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
    Timeout,
)
from envs.sandbox.pool.state import HostStatus, PoolFailure
from flash import errors
from flash.errors import FlashError, SandboxError, encodable

BINARY = "application/octet-stream"
"""Media type of the bytes of a file."""
MSGPACK = "application/msgpack"
"""Media type of requests and responses of Flash's own client."""
NDJSON = "application/x-ndjson"
"""Media type of a streamed response: one JSON object per line."""
TAR = "application/x-tar"
"""Media type of a file or tree as a tar archive."""
PROBLEM_JSON = "application/problem+json"
"""Media type of a response with an error (RFC 9457)."""

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
Mode = Annotated[int, Meta(ge=0, le=0o777)]
"""Permissions of a file, as a decimal number."""
Version = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
"""Version of the pool's state that a client knows; -1: none."""
OutputLimit = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Most bytes of a job's output that one call returns."""

STATUS: dict[str, int] = {
    "SandboxRefusedError": 422,
    "SandboxBusyError": 503,
    "SandboxStartError": 502,
    "SandboxLostError": 410,
    "SandboxClosedError": 410,
    "SandboxTimeoutError": 504,
    "SandboxLimitError": 413,
    "SandboxFileError": 404,
    "SandboxError": 500,
    "ConfigError": 400,
}
"""HTTP status of each class of error."""
TITLES = {
    400: "Bad request",
    401: "Not authorised",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    415: "Unsupported media type",
    422: "Refused",
    500: "Internal error",
    502: "The sandbox could not be started",
    503: "No room now",
    504: "Not in time",
}
"""Title of a problem, by HTTP status."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that a client sends."""


class SandboxOrder(Body, frozen=True):
    """An order for a sandbox."""

    spec: Spec
    owner: Owner = ""
    """Owner of the sandbox. The pool shares its sandboxes fairly between owners."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Orders of one owner with a larger number are served sooner."""
    on_lost: OnLost = "fail"
    """Reaction to a lost sandbox."""
    lease_s: Annotated[float, Meta(ge=1, le=MAX_TIMEOUT_S)] = 120.0
    """Seconds after which the sandbox ends, unless it is used or renewed before."""


class RunInSession(Body, frozen=True):
    """A command to run in a session."""

    command: Annotated[str, Meta(max_length=MAX_COMMAND)]
    """Shell code."""
    timeout: Timeout
    """Seconds after which the command is killed."""


class Signal(Body, frozen=True):
    """A signal for a job."""

    name: Annotated[str, Meta(pattern="^SIG[A-Z0-9+]{1,12}$")] = "SIGTERM"
    """Name of the signal."""


class Fork(Body, frozen=True):
    """An order for forks: the number of them."""

    count: Annotated[int, Meta(ge=1, le=256)]
    """Number of new sandboxes."""


# ---- answers


class Info(msgspec.Struct, frozen=True):
    """A lease and its sandbox, as the owner sees them."""

    id: str
    """Id of the lease, by which clients name the sandbox."""
    owner: str
    """Name of the token, and after a slash the owner of the order if it named one."""
    state: Literal["queued", "starting", "ready", "failed", "closed"]
    """State of the lease."""
    sandbox_state: State
    """State of the sandbox that the lease has now."""
    reason: str
    """Reason for the state of the lease; may be empty."""
    spec: Spec
    host: str
    """Name of the host of the sandbox; empty while the lease waits for one."""
    generation: int
    """Number of times that the sandbox was replaced after a loss."""
    created_at: float
    """Unix time of the order."""
    lease_s: float
    """Seconds after which the lease ends unless it is used or renewed before."""
    position: int | None
    """Number of older requests in the wait queue; None if the lease is not in the queue."""
    key: str = ""
    """Idempotency key of the order."""
    waiting_for: str = ""
    """Reason why the order is still in the wait queue; empty if it is not."""
    problem: HttpProblem | None = None
    """Error that ended the lease, if it failed."""


class SessionInfo(msgspec.Struct, frozen=True):
    """An open session of a sandbox."""

    name: str
    """Name that the client chose for the session."""
    restarts: int
    """Number of times that the shell was replaced, because a command ended it."""


class SessionResult(msgspec.Struct, frozen=True):
    """Result of a command in a session."""

    result: Result
    restarts: int
    """Number of times that the shell was replaced so far."""


class SessionInterrupted(msgspec.Struct, frozen=True):
    """Answer to an interrupt: True if a command was running."""

    interrupted: bool
    """True if a command was running."""


class JobInfo(msgspec.Struct, frozen=True):
    """A background job that was started."""

    job_id: str
    """Id by which the client asks for the job."""


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


class Status(msgspec.Struct, frozen=True):
    """State of the whole pool at one moment."""

    version: int
    """Number of changes so far. A client waits for a version other than the one it knows."""
    service: str
    """Name of the service."""
    boot: str
    """Identifier of this start of the service. It changes with each start."""
    hosts: list[HostStatus]
    """State of each host."""
    states: dict[str, int]
    """Number of leases in each state."""
    queue: dict[str, int]
    """Number of waiting requests by owner. A token other than `admin` sees the owners of other tokens as one entry."""
    hit_rate: float | None
    """Share of the starts that were served by a ready sandbox; None if there was no start."""
    failures: dict[str, int]
    """Number of failures by cause, since the start of the service."""
    recent_failures: list[PoolFailure]
    """Latest failures; empty unless the caller is `admin`, because their messages name images and hosts of other
    tokens. For the same reason `images_put_aside` is empty."""
    images_put_aside: dict[str, str]
    """Last error of each image in quarantine, because its sandboxes only fail to start."""
    sandboxes: list[Info]
    """Sandboxes that the caller may use."""


class HttpProblem(msgspec.Struct, frozen=True, kw_only=True):
    """An error in the form of RFC 9457."""

    type: str = "about:blank"
    """Kind of the problem in RFC 9457, which is not used here."""
    title: str
    """Short text for the status, as in `TITLES`."""
    status: int
    """HTTP status."""
    detail: str
    """Error message."""
    cause: str = ""
    """Name of the error's class in `flash.errors`."""


class Listing(msgspec.Struct, frozen=True):
    """The entries of a folder."""

    entries: list[FileInfo]


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot, as the tokens that may use it see it."""

    snapshot_id: str
    """Id by which clients remove the snapshot."""
    image: str
    """Image to name in the `Spec` of a sandbox that starts with these files."""
    owner: str
    """Owner of the sandbox that the snapshot was made of."""
    host: str
    """Name of the host that has the image; such sandboxes start only there."""
    size: int
    """Bytes beyond the image that the sandbox began from."""
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


class ProblemError(Exception):
    """A problem that ends a request, for cases that have no class in `flash.errors`."""

    def __init__(self, status: int, detail: str, cause: str = "") -> None:
        """Make the error. `cause` is the class in `flash.errors` that the client raises; empty: by the status."""
        super().__init__(detail)
        self.problem = HttpProblem(title=TITLES[status], status=status, detail=encodable(detail), cause=cause)


def problem_of(error: FlashError) -> HttpProblem:
    """Return the body that the service sends for an error."""
    cause = next((each.__name__ for each in type(error).__mro__ if each.__name__ in STATUS), "SandboxError")
    status = STATUS[cause]
    return HttpProblem(title=TITLES[status], status=status, detail=encodable(str(error)), cause=cause)


def error_of(problem: HttpProblem) -> SandboxError:
    """Return the error that the client raises for a problem that it has received: the class that the service raised."""
    # Another version of the service may send a cause that this version does not know; then the status decides.
    kind = getattr(errors, problem.cause, None) if problem.cause in STATUS else None
    if kind is None or not issubclass(kind, SandboxError):
        kind = errors.SandboxRefusedError if 400 <= problem.status < 500 else errors.SandboxLostError
        return kind(f"{problem.status} {problem.title}: {problem.detail}")
    return kind(problem.detail)
