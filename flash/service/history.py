"""What was said in one episode so far, and where a request goes on. Pure.

Law: what a request adds is all of it that the policy has not seen where it goes on. A request that begins with all that
was said in a branch goes on in it, in the one of which most was said; any other one begins a new branch, after the last
answer that it shares with one, or from nothing. An answer that comes back need only say the same
(`flash.service.matching`): what was sampled stays as it was. The tools stand before all of it, so that a branch has the
same ones throughout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from flash.service.matching import says_the_same
from flash.types import Message, Tool


class Place(NamedTuple):
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

    def place(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Place:
        """Where a request goes on."""
        shared = [branch.shared(messages, tools) for branch in self._branches]
        whole = [number for number, branch in enumerate(self._branches) if shared[number] == len(branch.said)]
        if whole:
            number = max(whole, key=shared.__getitem__)
            return Place(number, len(self._branches[number].answers), False, list(messages[shared[number] :]))
        answers = [bisect_left(branch.answers, shared[number]) for number, branch in enumerate(self._branches)]
        begins = [
            branch.answers[count - 1] + 1 if count else 0 for branch, count in zip(self._branches, answers, strict=True)
        ]
        number = max(range(len(begins)), key=begins.__getitem__)
        return Place(number, answers[number], True, list(messages[begins[number] :]))

    def answer(self, place: Place, message: Message, tools: Sequence[Tool] = ()) -> None:
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
