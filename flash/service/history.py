"""What was said in one episode so far, and what a request adds to it. Pure.

Law: what a request adds is all of it that the policy has not seen. A request that begins with all that was said, as it
was said, goes on; any other one is a branch, for which there is no place in one sequence of tokens. Of an answer that
comes back, white space at its ends does not count: many agents strip it, and what was sampled stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from flash.types import Message

ASSISTANT = "assistant"


class History:
    """Messages that were shown and answers that were given, in order."""

    def __init__(self) -> None:
        self._said: list[Message] = []
        self._answers: set[int] = set()
        """Places of what we answered."""

    def added(self, messages: Sequence[Message]) -> list[Message] | None:
        """What a request adds; None when it does not begin with all that was said."""
        said = len(self._said)
        if len(messages) < said or not all(map(self._same, range(said), messages)):
            return None
        return list(messages[said:])

    def _same(self, place: int, message: Message) -> bool:
        known = self._said[place]
        if place not in self._answers:
            return known == message
        return message.role == ASSISTANT and message.content.strip() == known.content.strip()

    def show(self, messages: Sequence[Message]) -> None:
        """These were shown."""
        self._said += messages

    def answer(self, content: str) -> None:
        """This was answered."""
        self._answers.add(len(self._said))
        self._said.append(Message(ASSISTANT, content))
