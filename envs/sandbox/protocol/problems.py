"""Conversion of errors for HTTP.

The service turns an exception into a status and a problem+json body. The client makes the same exception from these.
"""

from __future__ import annotations

from envs.sandbox.protocol.wire import HttpProblem
from envs.sandbox.text import encodable
from flash import errors
from flash.errors import FlashError, SandboxError

MEDIA_TYPE = "application/problem+json"

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


class ProblemError(Exception):
    """A problem that ends a request, for cases that have no class in `flash.errors`."""

    def __init__(self, status: int, detail: str, cause: str = "") -> None:
        super().__init__(detail)
        self.problem = HttpProblem(title=TITLES[status], status=status, detail=encodable(detail), cause=cause)


def problem_of(error: FlashError) -> HttpProblem:
    """Return the body that the service sends for an error."""
    cause = next((each.__name__ for each in type(error).__mro__ if each.__name__ in STATUS), "SandboxError")
    status = STATUS[cause]
    return HttpProblem(title=TITLES[status], status=status, detail=encodable(str(error)), cause=cause)


def error_of(problem: HttpProblem) -> SandboxError:
    """Return the error that the client raises for a problem that it has received."""
    kind = getattr(errors, problem.cause, None) if problem.cause in STATUS else None
    if kind is None or not issubclass(kind, SandboxError):
        kind = errors.SandboxRefusedError if 400 <= problem.status < 500 else errors.SandboxLostError
        return kind(f"{problem.status} {problem.title}: {problem.detail}")
    return kind(problem.detail)
