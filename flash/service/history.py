"""What was said in one episode so far, and where a request goes on. Pure.

Law: what a request adds is all of it that the policy has not seen where it goes on. A request that begins with all that
was said in a branch goes on in it, in the branch of which most was said. Any other request begins a new branch, after
the last answer that it shares with a branch, or from nothing. The policy's sampled tokens stay as they are: a message
that says the same as an answer stands for it. The tools stand before all messages, so that a branch has the same tools
throughout.

Clients write a history down again in ways that change nothing: `by_place` names calls by their places, `in_order`
sorts their results, `says_the_same` compares two messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from flash.types import ASSISTANT, TOOL, Message, Tool, ToolCall

TEXT = "text"
"""Role of a text that is gone on with, where nobody speaks."""

READ_LETTERS = 1 << 18
"""Longest arguments of a call that are parsed. Parsing megabytes takes seconds, in which a node does nothing else."""

THINK, THOUGHT = "<think>", "</think>"
"""Marks around reasoning in a content, as models and clients write it."""


class Continuation(NamedTuple):
    """Where a request goes on."""

    branch: int
    """Number of the branch, counted from 0 in the order in which branches began."""
    answers: int
    """Number of answers of that branch that are kept, including answers shared with an earlier branch."""
    begins: bool
    """True if a new branch begins there."""
    added: list[Message]
    """Messages that the request shows beyond what was said up to there. Results bear the ids that the policy knows."""


class _Branch:
    """Messages that were shown and answers that were given, in order."""

    def __init__(self, said: Sequence[Message], answers: Sequence[int], tools: Sequence[Tool]) -> None:
        self.said = list(said)
        """Messages with the ids that the policy has seen."""
        self.tools = list(tools)
        self.answers = list(answers)
        """Places of our answers in `said`, ascending."""
        self._placed: list[Message] | None = None

    def add(self, messages: Iterable[Message]) -> None:
        """Append messages."""
        self.said += messages
        self._placed = None

    def shared(self, placed: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return where a request stands behind each message of this branch that it repeats, from the first on.

        The first place is 0, behind none. With other tools nothing is repeated.
        """
        places = [0]
        if not _same_tools(tools, self.tools):
            return places
        if self._placed is None:
            self._placed = by_place(self.said)
        for known in self._placed:
            start = places[-1]
            if start == len(placed):
                break
            length = _repeats(known, placed, start)
            if not length:
                break
            places.append(start + length)
        return places

    def shown_after(self, kept: int, messages: Sequence[Message], placed: Sequence[Message]) -> list[Message]:
        """Return messages that follow the first `kept` here, with results named by the ids that the policy has seen."""
        ids = [call.id for message in self.said[:kept] for call in message.tool_calls]
        shown = list(messages)
        for index, message in enumerate(placed):
            place = message.tool_call_id
            if message.role == TOOL and place.isdecimal() and int(place) < len(ids):
                shown[index] = msgspec.structs.replace(shown[index], tool_call_id=ids[int(place)], name=message.name)
        return shown


class History:
    """The branches of one episode."""

    def __init__(self) -> None:
        self._branches = [_Branch([], [], [])]

    def place(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Continuation:
        """Return where a request goes on."""
        messages = in_order(messages)
        placed = by_place(messages)
        places = [branch.shared(placed, tools) for branch in self._branches]
        shared = [len(one) - 1 for one in places]
        whole = [number for number, branch in enumerate(self._branches) if shared[number] == len(branch.said)]
        if whole:
            number = max(whole, key=shared.__getitem__)
            kept, answers = shared[number], len(self._branches[number].answers)
        else:
            given = [bisect_left(branch.answers, shared[number]) for number, branch in enumerate(self._branches)]
            begins = [
                branch.answers[count - 1] + 1 if count else 0
                for branch, count in zip(self._branches, given, strict=True)
            ]
            number = max(range(len(begins)), key=begins.__getitem__)
            kept, answers = begins[number], given[number]
        start = places[number][kept]
        added = self._branches[number].shown_after(kept, messages[start:], placed[start:])
        return Continuation(number, answers, not whole, added)

    def answer(self, place: Continuation, message: Message, tools: Sequence[Tool] = ()) -> None:
        """Record that the messages a request adds were shown, and what the policy answered."""
        branch = self._branches[place.branch]
        if place.begins:
            until = branch.answers[place.answers - 1] + 1 if place.answers else 0
            branch = _Branch(branch.said[:until], branch.answers[: place.answers], [])
            self._branches.append(branch)
        branch.tools = list(tools)
        branch.answers.append(len(branch.said) + len(place.added))
        branch.add([*place.added, message])


class EarlierAnswers:
    """Conversations up to each earlier answer, for requests that name one or repeat its text."""

    def __init__(self) -> None:
        self.responses: dict[str, list[Message]] = {}
        """Messages by the names of responses, without their instructions."""
        self._texts: dict[str, tuple[list[Message], str]] = {"": ([], "")}
        """Messages by their whole text, and the text that ended the last answer, which was sampled and not shown."""

    def parts(self, text: str) -> list[Message]:
        """Return a text as the messages that it begins with, and what it adds.

        An agent writes down the text that ended an answer as what comes next: it is not shown a second time.
        """
        known = max(
            (said for said in list(self._texts) if len(said) < len(text) and text.startswith(said)), key=len, default=""
        )
        said, stop = self._texts[known]
        return [*said, Message(TEXT, text[len(known) :].removeprefix(stop))]

    def answered(self, text: str, parts: list[Message], answer: Message, stop: str) -> None:
        """Record the answer that goes on with a text, and the text that ended it, if one did."""
        self._texts[text + answer.content] = [*parts, answer], stop


def in_order(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of parallel calls in the order of the calls.

    A chat template that shows no ids tells results apart by their order alone.
    """
    ordered, start = list(messages), 0
    if not any(message.role == TOOL for message in messages):
        return ordered
    placed = by_place(messages)
    for stop in range(len(placed) + 1):
        if stop < len(placed) and placed[stop].role == TOOL:
            continue
        places = [message.tool_call_id for message in placed[start:stop]]
        if len(places) > 1 and all(place.isdecimal() for place in places):
            order = sorted(range(start, stop), key=lambda at: int(placed[at].tool_call_id))
            ordered[start:stop] = [ordered[at] for at in order]
        start = stop + 1
    return ordered


def _repeats(known: Message, messages: Sequence[Message], start: int) -> int:
    """Return how many messages from `start` on say together what `known` did; 0 if they say something else."""
    message = messages[start]
    if known == message or says_the_same(known, message):
        return 1
    # Some clients write thoughts, words and calls of one answer as messages of their own.
    for stop in range(start + 1, len(messages)):
        more = messages[stop]
        if not (message.role == more.role == ASSISTANT and _follows(message, more)):
            return 0
        content, reasoning = message.content or more.content, message.reasoning or more.reasoning
        message = Message(ASSISTANT, content, reasoning, message.tool_calls + more.tool_calls)
        if len(message.tool_calls) > len(known.tool_calls):
            return 0
        if says_the_same(known, message):
            return stop - start + 1
    return 0


def _follows(last: Message, more: Message) -> bool:
    """Return True if `more` goes on with an assistant's message: thoughts come before words, and words before calls."""
    if more.tool_calls:
        return not (more.content or more.reasoning)
    if more.reasoning:
        return False
    return not (last.content or last.tool_calls)


def by_place(messages: Sequence[Message]) -> list[Message]:
    """Return messages with calls named by their places in the conversation, counted from 0, and results likewise.

    A result belongs to the newest call of its id; of calls with one id in a message, to the first without a result. A
    result of an unknown id keeps it behind a question mark.
    """
    if not any(message.tool_calls or message.role == TOOL for message in messages):
        return list(messages)
    placed: list[Message] = []
    waiting: dict[str, list[tuple[int, str]]] = {}
    count = 0
    for message in messages:
        if message.tool_calls:
            waiting.update((call.id, []) for call in message.tool_calls)
            calls: list[ToolCall] = []
            for call in message.tool_calls:
                waiting[call.id].append((count, call.name))
                calls.append(ToolCall(str(count), call.name, call.arguments))
                count += 1
            message = msgspec.structs.replace(message, tool_calls=tuple(calls))
        elif message.role == TOOL:
            found = waiting.get(message.tool_call_id)
            if found:
                place, name = found.pop(0) if len(found) > 1 else found[0]
                message = msgspec.structs.replace(message, tool_call_id=str(place), name=name or message.name)
            else:
                message = msgspec.structs.replace(message, tool_call_id=f"?{message.tool_call_id}")
        placed.append(message)
    return placed


def says_the_same(known: Message, message: Message) -> bool:
    """Return True if a message of a request says what a message that was said before did.

    White space at the ends of texts does not count. An assistant's reasoning may be left out, or stand in the content
    between `<think>` and `</think>`. The arguments of a call are compared as JSON values: spaces, escapes and the order
    of keys do not count, except in arguments of more than `READ_LETTERS`. Ids of calls do not count; results are
    compared by the ids that `by_place` gives.
    """
    if message.role != known.role:
        return False
    if message.role == TEXT:
        return message.content == known.content
    if message.role != ASSISTANT:
        return (
            message.content.strip() == known.content.strip()
            and message.tool_call_id == known.tool_call_id
            and (message.name == known.name or not message.tool_call_id.startswith("?"))
        )
    if len(message.tool_calls) != len(known.tool_calls):
        return False
    if message.content.strip() != known.content.strip() or message.reasoning.strip() not in (
        "",
        known.reasoning.strip(),
    ):
        thought, said = _thought_and_said(message)
        known_thought, known_said = _thought_and_said(known)
        if said != known_said or thought not in ("", known_thought):
            return False
    return all(map(_same_call, known.tool_calls, message.tool_calls))


def _thought_and_said(message: Message) -> tuple[str, str]:
    """Return an assistant's reasoning, wherever it stands, and the rest of the content."""
    content = message.content.strip()
    before, mark, after = content.partition(THOUGHT)
    reasoning = message.reasoning.strip()
    if not mark and not content.startswith(THINK):
        return reasoning, content
    # A chat template may have begun the reasoning: then the answer has only the second mark.
    inside = before.strip().removeprefix(THINK).strip()
    return inside if reasoning in ("", inside) else f"{reasoning}\n{inside}".strip(), after.strip()


def _same_tools(tools: Sequence[Tool], others: Sequence[Tool]) -> bool:
    """Return True if two requests offer the same functions, in any order."""
    if len(tools) != len(others):
        return False
    return list(tools) == list(others) or sorted(map(_written, tools)) == sorted(map(_written, others))


def _written(tool: Tool) -> bytes:
    return msgspec.json.encode(tool, order="deterministic")


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    if one.name != other.name:
        return False
    if one.arguments == other.arguments:
        return True
    if max(len(one.arguments), len(other.arguments)) > READ_LETTERS:
        return False
    return _value(one.arguments) == _value(other.arguments)


def _value(arguments: str) -> Any:
    """Return the parsed JSON; no arguments are an empty object. Text that is not JSON is returned unchanged."""
    if not arguments.strip():
        return _typed({})
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return _typed({} if value is None else value)


def _typed(value: Any) -> Any:
    """Return a JSON value with booleans apart from numbers: to Python 1 is True. 1 and 1.0 stay one number."""
    match value:
        case bool():
            return (value,)
        case dict():
            return {key: _typed(inner) for key, inner in value.items()}
        case list():
            return [_typed(inner) for inner in value]
        case _:
            return value
