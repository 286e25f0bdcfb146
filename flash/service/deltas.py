"""What an agent is told of an answer, while it is sampled and at its end. Pure.

Law: the pieces together are the message that the answer has, its calls apart. What was told stands: where the whole is
read otherwise than its beginning was, which vLLM's parsers may do, the message says what was told.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flash.service.fields import before
from flash.types import Message, Piece


class AnswerDeltas:
    """One answer.

    Args:
        stop: texts of which the first ends it; it is not told.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._reasoning = ""
        self._content = ""
        self._held = ""
        """What may be the beginning of a text that ends the content."""
        self._stopped = False
        self.pieces: list[Piece] = []
        """What was told so far."""

    def add(self, piece: Piece) -> None:
        """More of it was sampled."""
        self._tell(Piece(self._certain(piece.content), piece.reasoning))

    def _certain(self, content: str) -> str:
        """What of the content so far no text can end before."""
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
        """It is this, by its end. Returns it as it was told."""
        rest = Piece(_rest(self._content, message.content), _rest(self._reasoning, message.reasoning))
        self._tell(rest)
        return msgspec.structs.replace(message, content=self._content, reasoning=self._reasoning)

    def _tell(self, piece: Piece) -> None:
        if piece.content or piece.reasoning:
            self._content += piece.content
            self._reasoning += piece.reasoning
            self.pieces.append(piece)


def _begun(text: str, stop: str) -> int:
    """Letters at the end of a text with which this one may begin."""
    longest = min(len(stop) - 1, len(text))  # a text to stop at may be far longer than any answer
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _rest(told: str, whole: str) -> str:
    """What of a text was not told yet. Parsers may strip the white space before it."""
    if whole.startswith(told):
        return whole[len(told) :]
    begun, stripped = told.lstrip(), whole.lstrip()
    return stripped[len(begun) :] if stripped.startswith(begun) else ""
