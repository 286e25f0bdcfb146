"""What was said in one episode so far, and where a request goes on. Pure.

Law: what a request adds is all of it that the policy has not seen where it goes on. A request that begins with all that
was said in a branch goes on in it, in the one of which most was said; any other one begins a new branch, after the last
answer that it shares with one, or from nothing. What comes back stands for an answer of ours if it says the same, and
what was sampled stays as it was: clients write an answer down anew in ways that change nothing. They strip white space,
serialize the arguments of a call again, drop the reasoning, and name calls by ids of their own. The tools stand before
all of it, so that a branch has the same ones throughout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from flash.types import Message, Tool, ToolCall

TEXT = "text"
"""Speaks where a text is gone on with, and nobody has a role."""

READ_LETTERS = 1 << 18
"""Arguments of a call that are read: to read megabytes takes seconds, in which a node does nothing else."""


class Continuation(NamedTuple):
    """Where a request goes on."""

    branch: int
    """Counted from 0 in the order in which they began."""
    answers: int
    """After so many answers of that branch, those that it shares with an earlier one among them."""
    begins: bool
    """There a new branch begins."""
    added: list[Message]
    """What the request shows beyond what was said up to there."""


class _Branch:
    """Messages that were shown and answers that were given, in order."""

    def __init__(self, said: Sequence[Message], answers: Sequence[int], tools: Sequence[Tool]) -> None:
        self.said = list(said)
        self.tools = list(tools)
        self.answers = list(answers)
        """Places of what we answered, ascending."""

    def shared(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        """How many messages from the first on are as they were said here, with the same tools."""
        if list(tools) != self.tools:
            return 0
        answers = frozenset(self.answers)
        for place, (known, message) in enumerate(zip(self.said, messages, strict=False)):
            if not (says_the_same(known, message) if place in answers else known == message):
                return place
        return min(len(self.said), len(messages))


class History:
    """The branches of one episode."""

    def __init__(self) -> None:
        self._branches = [_Branch([], [], [])]

    def place(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Continuation:
        """Where a request goes on."""
        shared = [branch.shared(messages, tools) for branch in self._branches]
        whole = [number for number, branch in enumerate(self._branches) if shared[number] == len(branch.said)]
        if whole:
            number = max(whole, key=shared.__getitem__)
            return Continuation(number, len(self._branches[number].answers), False, list(messages[shared[number] :]))
        answers = [bisect_left(branch.answers, shared[number]) for number, branch in enumerate(self._branches)]
        begins = [
            branch.answers[count - 1] + 1 if count else 0 for branch, count in zip(self._branches, answers, strict=True)
        ]
        number = max(range(len(begins)), key=begins.__getitem__)
        return Continuation(number, answers[number], True, list(messages[begins[number] :]))

    def answer(self, place: Continuation, message: Message, tools: Sequence[Tool] = ()) -> None:
        """What a request adds was shown, and this was answered."""
        branch = self._branches[place.branch]
        if place.begins:
            until = branch.answers[place.answers - 1] + 1 if place.answers else 0
            branch = _Branch(branch.said[:until], branch.answers[: place.answers], [])
            self._branches.append(branch)
        branch.tools = list(tools)
        branch.said += place.added
        branch.answers.append(len(branch.said))
        branch.said.append(message)


class EarlierAnswers:
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


def says_the_same(answer: Message, message: Message) -> bool:
    """Whether a message says what an answer of ours said.

    White space at the ends of texts does not count, nor do the ids of calls, and reasoning may be left out. The
    arguments of a call are compared as JSON values: spaces, escapes and the order of keys do not count, but in those
    of more than `READ_LETTERS`.
    """
    return (
        message.role == answer.role
        and message.content.strip() == answer.content.strip()
        and message.reasoning.strip() in ("", answer.reasoning.strip())
        and len(message.tool_calls) == len(answer.tool_calls)
        and all(map(_same_call, answer.tool_calls, message.tool_calls))
    )


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    if one.name != other.name:
        return False
    if one.arguments == other.arguments:
        return True
    if max(len(one.arguments), len(other.arguments)) > READ_LETTERS:
        return False
    return _value(one.arguments) == _value(other.arguments)


def _value(arguments: str) -> Any:
    """What JSON says; what is no JSON says itself, and an empty text that there are no arguments."""
    if not arguments.strip():
        return _typed({})
    try:
        return _typed(msgspec.json.decode(arguments))
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _typed(value: Any) -> Any:
    """The same with truth values apart from numbers: to Python 1 is True. 1 and 1.0 stay one number."""
    match value:
        case bool():
            return (value,)
        case dict():
            return {key: _typed(inner) for key, inner in value.items()}
        case list():
            return [_typed(inner) for inner in value]
        case _:
            return value
