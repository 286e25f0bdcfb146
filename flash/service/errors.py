"""What is answered to a request that is refused."""

from __future__ import annotations

import reprlib

import msgspec

_SHORT = reprlib.Repr()


class ApiError(Exception):
    """An answer that says what was wrong, in the form of the API.

    Args:
        status: of HTTP. 400, 401, 404 and 413 are not tried again by the API's own clients.
        message: for people.
        code: for programs.
        param: the field that is wrong, where it is one.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.said = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        """The body of the answer."""

    @property
    def body(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self.said)


def in_short(value: object) -> str:
    """A value that a client sent, short: however large it is, no more of it is read."""
    return repr(value[:100]) if isinstance(value, str) else _SHORT.repr(value)


def unsupported(name: str, why: str = "leave it out") -> ApiError:
    """A field that is not done here."""
    return ApiError(400, f"`{name}` is not supported here: {why}.", "unsupported_parameter", name)


MASKED = (
    "it would forbid tokens while the answer is sampled, and training, which knows nothing of them, would take the "
    "probabilities of the others wrongly (docs/agents.md, 'Nothing is sampled under a grammar'); leave it out, "
    "ask for the form in words, check what comes, and ask again or reward it so"
)
"""Why nothing is sampled under a grammar."""

TOP = "the run keeps the log-probs of sampled tokens, and of no others"
"""Why nobody is told what might have been sampled."""
