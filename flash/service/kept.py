"""What an episode keeps for who names what was said, or repeats it as one text, instead of saying it again. Pure."""

from __future__ import annotations

from flash.types import Message

TEXT = "text"
"""Speaks where a text is gone on with, and nobody has a role."""


class Kept:
    """What was said up to each answer."""

    def __init__(self) -> None:
        self.responses: dict[str, list[Message]] = {}
        """By the names of responses, without their instructions."""
        self._texts: dict[str, tuple[list[Message], str]] = {"": ([], "")}
        """By texts with what came after them; and the text that ended it, which is said and not told."""

    def parts(self, text: str) -> list[Message]:
        """A text as what was said before, as far as it begins so, and what it adds.

        An agent writes down the text that ended an answer as what comes next: it is not shown a second time.
        """
        known = max(
            (said for said in self._texts if len(said) < len(text) and text.startswith(said)), key=len, default=""
        )
        said, stop = self._texts[known]
        return [*said, Message(TEXT, text[len(known) :].removeprefix(stop))]

    def answered(self, text: str, parts: list[Message], answer: Message, stop: str) -> None:
        """A text was gone on with, up to `stop` where that is one."""
        self._texts[text + answer.content] = [*parts, answer], stop
