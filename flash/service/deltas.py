"""The pieces of an answer that an agent receives while the answer is sampled and at its end. Pure.

Law: the pieces together are the message of the answer, without its calls. A piece that was sent is never taken back:
vLLM's parsers may read the whole text differently from its beginning, and then the message contains the pieces as they
were sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flash.service.fields import before
from flash.types import Message, Piece


class AnswerDeltas:
    """Pieces of one answer.

    Args:
        stop: stop texts. The content ends before the first one, which the agent does not receive.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._reasoning = ""
        self._content = ""
        self._held = ""
        """End of the content that is not sent yet, since it may be the beginning of a stop text."""
        self._stopped = False
        self.pieces: list[Piece] = []
        """Pieces that were sent so far."""

    def add(self, piece: Piece) -> None:
        """Take a newly sampled piece, and send the part of it that cannot belong to a stop text."""
        self._tell(Piece(self._certain(piece.content), piece.reasoning))

    def _certain(self, content: str) -> str:
        """Return the part of the new content that can be sent, and hold back a possible beginning of a stop text."""
        if self._stopped:
            return ""
        content, found = before(self._held + content, self._stop)
        if found:
            self._stopped = True
            return content
        held = max((_begun(content, stop) for stop in self._stop), default=0)
        at = len(content) - held
        self._held = content[at:]
        return content[:at]

    def finish(self, message: Message) -> Message:
        """Send the rest of the answer, whose message is `message`. Returns the message as it was sent."""
        rest = Piece(_rest(self._content, message.content), _rest(self._reasoning, message.reasoning))
        self._tell(rest)
        return msgspec.structs.replace(message, content=self._content, reasoning=self._reasoning)

    def _tell(self, piece: Piece) -> None:
        if piece.content or piece.reasoning:
            self._content += piece.content
            self._reasoning += piece.reasoning
            self.pieces.append(piece)


def _begun(text: str, stop: str) -> int:
    """Return the number of letters at the end of `text` that may be the beginning of the stop text."""
    longest = min(len(stop) - 1, len(text))  # A stop text may be far longer than the answer.
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _rest(told: str, whole: str) -> str:
    """Return the end of `whole` that was not sent yet. Parsers may strip the white space at the beginning."""
    if whole.startswith(told):
        return whole[len(told) :]
    begun, stripped = told.lstrip(), whole.lstrip()
    return stripped[len(begun) :] if stripped.startswith(begun) else ""
