"""ApiError: the response to a request that is refused."""

from __future__ import annotations

import reprlib

import msgspec

_SHORT = reprlib.Repr()


class ApiError(Exception):
    """An error response in the format of the OpenAI API.

    Args:
        status: HTTP status. OpenAI's clients do not retry after 400, 401, 404 and 413.
        message: error message for people.
        code: name of the error for programs; None: it has none.
        param: the request field that is wrong; None: no single field is wrong.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.said = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        """Body of the response, before it is encoded as JSON."""

    @property
    def body(self) -> bytes:
        """Body of the response, as JSON."""
        return msgspec.json.encode(self.said)


def in_short(value: object) -> str:
    """Return a short representation of a value from a client. The time does not grow with the size of the value."""
    return repr(value[:100]) if isinstance(value, str) else _SHORT.repr(value)


def unsupported(name: str, why: str = "leave it out") -> ApiError:
    """Return the error for a request field that the service does not support. `why` is the reason or the remedy."""
    return ApiError(400, f"`{name}` is not supported here: {why}.", "unsupported_parameter", name)


MASKED = (
    "it would forbid tokens while the answer is sampled, and training, which knows nothing of them, would take the "
    "probabilities of the others wrongly (docs/agents.md, 'Nothing is sampled under a grammar'); leave it out, "
    "ask for the form in words, check what comes, and ask again or reward it so"
)
"""Reason why nothing is sampled under a grammar, as part of an error message."""

TOP = "the run keeps the log-probs of sampled tokens, and of no others"
"""Reason why an answer has no log-probs of tokens that were not sampled, as part of an error message."""
