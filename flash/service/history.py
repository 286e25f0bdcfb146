"""History: the messages of an episode so far, and the branch in which a request continues. It has no task and no clock.

Law: a request adds exactly those of its messages that the policy has not seen at the place where the request continues.
A request that begins with all messages of a branch continues that branch; if several qualify, the one with the most
messages. Any other request begins a new branch after the last answer that it shares with a branch, or an empty branch.
The policy's sampled tokens never change: a message of the request that says the same as an answer is replaced by the
answer. The prompt shows the tools before all messages, so all requests of a branch have the same tools.

Clients may repeat the history in another form with the same meaning. Therefore `number_calls` replaces the ids of calls
by numbers, `sort_results` sorts the results of calls, and `says_the_same` compares two messages.

Each argument `tools` in this module is `AgentRequest.prompt_beginning` of a request: its tools, and the arguments of
the chat template if it has any. A *call* is a call of a function (a tool) by the policy, and a *result* is a message
with the result of one. `EpisodeSession` of `sessions` calls `History.place` when it looks at a request, and
`History.answer` when the request has its answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from flash.types import ASSISTANT, TOOL, Message, Tool, ToolCall

TEXT = "text"
"""Role of a text in the completions API, which has no speakers."""

PARSED_CHARACTERS = 1 << 18
"""Most characters of a call's arguments that are parsed as JSON. Parsing megabytes takes seconds, during which the node
does nothing else."""

THINK, THINK_END = "<think>", "</think>"
"""Marks before and after reasoning inside a content, as models and clients write them."""


class Continuation(NamedTuple):
    """The branch and the place in it at which a request continues."""

    branch: int
    """Number of the branch, counted from 0 in the order in which branches began."""
    answers: int
    """Number of answers of that branch that come before the place, including answers shared with an earlier branch."""
    begins: bool
    """True if a new branch begins there: it has the messages of `branch` up to the place."""
    added: list[Message]
    """Messages of the request after that place. Results have the ids of calls that the policy has seen."""


class _Branch:
    """Branch of an episode: the messages that the policy has seen and the answers that it gave, in order."""

    def __init__(self, messages: Sequence[Message], answers: Sequence[int], tools: Sequence[Tool]) -> None:
        self.messages = list(messages)
        """Messages and answers, with the ids of calls that the policy has seen."""
        self.tools = list(tools)
        """Tools of the newest request of this branch. Those of its other requests are equal, in any order."""
        self.answers = list(answers)
        """Indices of the policy's answers in `messages`, ascending."""
        self._numbered: list[Message] | None = None
        """Result of `number_calls(messages)`; None if it is not computed yet."""

    def add(self, messages: Iterable[Message]) -> None:
        """Append messages to the branch. The caller adds to `answers` and sets `tools`."""
        self.messages += messages
        self._numbered = None

    def repeated(self, numbered: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ends, in a request, of the first messages of this branch that the request repeats.

        Element i of the result is the number of messages of the request that say the same as the first i messages of
        this branch. The first element is 0. A request with other tools repeats nothing.

        Args:
            numbered: result of `number_calls` for the messages of the request.
            tools: tools of the request.
        """
        ends = [0]
        if not _same_tools(tools, self.tools):
            return ends
        if self._numbered is None:
            self._numbered = number_calls(self.messages)
        for known in self._numbered:
            start = ends[-1]
            if start == len(numbered):
                break
            length = _repeats(known, numbered, start)
            if not length:
                break
            ends.append(start + length)
        return ends

    def with_known_ids(self, kept: int, messages: Sequence[Message], numbered: Sequence[Message]) -> list[Message]:
        """Return `messages`, in which results have the ids of calls that the policy has seen, and the functions' names.

        The client may have renamed the ids of calls, and may leave out the name in a result.

        Args:
            kept: number of messages of this branch after which `messages` follow.
            messages: messages that a request adds there.
            numbered: the same messages, with the numbers of `number_calls` instead of ids.
        """
        ids = [call.id for message in self.messages[:kept] for call in message.tool_calls]
        renamed = list(messages)
        for index, message in enumerate(numbered):
            number = message.tool_call_id
            # A result of a call that the request itself adds keeps its id: `ids` has only calls of this branch.
            if message.role == TOOL and number.isdecimal() and int(number) < len(ids):
                renamed[index] = msgspec.structs.replace(
                    renamed[index], tool_call_id=ids[int(number)], name=message.name
                )
        return renamed


class History:
    """Messages and answers of one episode, in branches. Each `EpisodeSession` has one. The module has the rules."""

    def __init__(self) -> None:
        self._branches = [_Branch([], [], [])]
        """Branches, in the order in which they began. The first one is empty until the first answer."""

    def place(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Continuation:
        """Return the place at which a request continues. Changes nothing: the request has no answer yet.

        The session calls this when the environment takes the request, and when a request arrives while another one is
        open. `messages` are all messages of the request.
        """
        messages = sort_results(messages)
        numbered = number_calls(messages)
        ends = [branch.repeated(numbered, tools) for branch in self._branches]
        shared = [len(one) - 1 for one in ends]  # number of first messages of each branch that the request repeats
        # Branches of which the request repeats all messages: it continues the longest of them.
        whole = [number for number, branch in enumerate(self._branches) if shared[number] == len(branch.messages)]
        if whole:
            number = max(whole, key=shared.__getitem__)
            kept, answers = shared[number], len(self._branches[number].answers)
        else:
            # Otherwise a new branch begins, after the last answer that the request shares with any branch. `given` has
            # the number of shared answers in each branch, and `kept_by_branch` the number of messages up to the last of
            # them.
            given = [bisect_left(branch.answers, shared[number]) for number, branch in enumerate(self._branches)]
            kept_by_branch = [
                branch.answers[count - 1] + 1 if count else 0
                for branch, count in zip(self._branches, given, strict=True)
            ]
            number = max(range(len(given)), key=kept_by_branch.__getitem__)
            kept, answers = kept_by_branch[number], given[number]
        start = ends[number][kept]
        added = self._branches[number].with_known_ids(kept, messages[start:], numbered[start:])
        return Continuation(number, answers, not whole, added)

    def answer(self, place: Continuation, message: Message, tools: Sequence[Tool] = ()) -> None:
        """Record the messages that a request has added at `place`, and the policy's answer to them.

        `place` comes from the method `place` and no answer was recorded since. `tools` are those of the request.
        """
        branch = self._branches[place.branch]
        if place.begins:
            until = branch.answers[place.answers - 1] + 1 if place.answers else 0
            branch = _Branch(branch.messages[:until], branch.answers[: place.answers], [])
            self._branches.append(branch)
        branch.tools = list(tools)
        branch.answers.append(len(branch.messages) + len(place.added))
        branch.add([*place.added, message])


class EarlierAnswers:
    """Conversations up to each earlier answer of an episode, for requests that name one or repeat its text.

    Each `EpisodeSession` has one. The endpoints of `app` add each answer of responses and completions. The `read`
    functions of these APIs look earlier ones up.
    """

    def __init__(self) -> None:
        self.responses: dict[str, list[Message]] = {}
        """Messages of the conversation up to each response, without instructions, by the id of the response."""
        self._texts: dict[str, tuple[list[Message], str]] = {"": ([], "")}
        """For each text up to the end of an answer: its messages, and the stop text that ended the answer. The policy
        has sampled the stop text, but the agent has not received it."""

    def parts(self, text: str) -> list[Message]:
        """Split a text into the messages of the longest earlier text that it begins with, and a message with the rest.

        Agents often write the stop text of an answer behind it. It is removed from the rest, because the policy has
        sampled it already.
        """
        # The keys are copied, because this runs in a thread for long texts, while the event loop may add one.
        earlier = (one for one in list(self._texts) if len(one) < len(text) and text.startswith(one))
        known = max(earlier, key=len, default="")
        messages, stop = self._texts[known]
        return [*messages, Message(TEXT, text[len(known) :].removeprefix(stop))]

    def add_text(self, text: str, parts: list[Message], answer: Message, stop: str) -> None:
        """Record the answer to a text, for later texts that begin with both.

        `parts` are the messages of the text, from `parts`. `stop` is the stop text that ended the answer, or empty.
        """
        self._texts[text + answer.content] = [*parts, answer], stop


def sort_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages with successive results in the order of their calls.

    Successive results of which one belongs to no known call are left in their order.
    """
    # Chat templates that do not show the ids of calls identify a result by its position alone.
    ordered, start = list(messages), 0
    if not any(message.role == TOOL for message in messages):
        return ordered
    numbered = number_calls(messages)
    # The messages from `start` to `stop` are successive results, with a message of another role, or the end, at `stop`.
    for stop in range(len(numbered) + 1):
        if stop < len(numbered) and numbered[stop].role == TOOL:
            continue
        numbers = [message.tool_call_id for message in numbered[start:stop]]
        if len(numbers) > 1 and all(number.isdecimal() for number in numbers):
            order = sorted(range(start, stop), key=lambda at: int(numbered[at].tool_call_id))
            ordered[start:stop] = [ordered[at] for at in order]
        start = stop + 1
    return ordered


def _repeats(known: Message, messages: Sequence[Message], start: int) -> int:
    """Return how many messages, from index `start` on, together say the same as `known`; 0 if no number of them does.

    `known` is a message of a branch, and `messages` are those of a request. Calls are numbered in both.
    """
    message = messages[start]
    if known == message or says_the_same(known, message):
        return 1
    # Some clients send the reasoning, the content and the calls of one answer as separate messages.
    for stop in range(start + 1, len(messages)):
        more = messages[stop]
        if not (message.role == more.role == ASSISTANT and _follows(message, more)):
            return 0
        # `_follows` makes sure that at most one of the two has a content, and at most one a reasoning.
        content, reasoning = message.content or more.content, message.reasoning or more.reasoning
        message = Message(ASSISTANT, content, reasoning, message.tool_calls + more.tool_calls)
        if len(message.tool_calls) > len(known.tool_calls):
            return 0
        if says_the_same(known, message):
            return stop - start + 1
    return 0


def _follows(last: Message, more: Message) -> bool:
    """Return True if `more` can be the next part of the answer that the assistant's message `last` begins.

    Reasoning and content come before the calls. They come in either order: a stream sends reasoning after content if
    the parser finds it only in the complete answer. A message with calls follows if it has nothing else.
    """
    if more.tool_calls:
        return not (more.content or more.reasoning)
    if more.reasoning:
        return not (more.content or last.reasoning or last.tool_calls)
    return not (last.content or last.tool_calls)


def number_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the id of each call is its number in the conversation, counted from 0.

    Messages are compared in this form, because clients may rename ids. A result gets the number of its call. A result
    belongs to the newest message with calls of its id; if that message has several such calls, to the first one without
    a result. A result of an unknown id keeps the id, after a question mark.
    """
    if not any(message.tool_calls or message.role == TOOL for message in messages):
        return list(messages)
    numbered: list[Message] = []
    # Number and function of the calls that a result of an id may belong to: by the id, the calls of the newest message
    # that has the id.
    candidates: dict[str, list[tuple[int, str]]] = {}
    count = 0
    for message in messages:
        if message.tool_calls:
            candidates.update((call.id, []) for call in message.tool_calls)
            calls: list[ToolCall] = []
            for call in message.tool_calls:
                candidates[call.id].append((count, call.name))
                calls.append(ToolCall(str(count), call.name, call.arguments))
                count += 1
            message = msgspec.structs.replace(message, tool_calls=tuple(calls))
        elif message.role == TOOL:
            found = candidates.get(message.tool_call_id)
            if found:
                # The last call stays, so that a second result of one call belongs to it, too.
                number, name = found.pop(0) if len(found) > 1 else found[0]
                message = msgspec.structs.replace(message, tool_call_id=str(number), name=name or message.name)
            else:
                message = msgspec.structs.replace(message, tool_call_id=f"?{message.tool_call_id}")
        numbered.append(message)
    return numbered


def says_the_same(known: Message, message: Message) -> bool:
    """Return True if a message of a request says the same as `known`, a message of a branch.

    White space at the beginning and end of a text is ignored, except in completions. An assistant's reasoning may be
    missing, or be part of the content between `<think>` and `</think>`. The arguments of a call are compared as JSON
    values, so spaces, escapes and the order of keys are ignored; arguments longer than `PARSED_CHARACTERS` are compared
    as text. The ids of calls are ignored. Results are compared by the ids that `number_calls` gives.
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
    # Only if the texts differ as they are: one side may have its reasoning inside the content.
    if message.content.strip() != known.content.strip() or message.reasoning.strip() not in (
        "",
        known.reasoning.strip(),
    ):
        reasoning, content = _reasoning_and_content(message)
        known_reasoning, known_content = _reasoning_and_content(known)
        if content != known_content or reasoning not in ("", known_reasoning):
            return False
    return all(map(_same_call, known.tool_calls, message.tool_calls))


def _reasoning_and_content(message: Message) -> tuple[str, str]:
    """Return an assistant's reasoning, from its own field and from the content, and the content without it."""
    content = message.content.strip()
    before, mark, after = content.partition(THINK_END)
    reasoning = message.reasoning.strip()
    if not mark and not content.startswith(THINK):
        return reasoning, content
    # Some chat templates write the first mark into the prompt. The answer then contains only the second mark.
    inside = before.strip().removeprefix(THINK).strip()
    # A client may send one reasoning in both places.
    return inside if reasoning in ("", inside) else f"{reasoning}\n{inside}".strip(), after.strip()


def _same_tools(tools: Sequence[Tool], others: Sequence[Tool]) -> bool:
    """Return True if two requests have equal functions, in any order, and equal arguments of the chat template."""
    if len(tools) != len(others):
        return False
    return list(tools) == list(others) or sorted(map(_encoded, tools)) == sorted(map(_encoded, others))


def _encoded(tool: Tool) -> bytes:
    """Encode a tool with sorted keys, so that equal tools are equal bytes."""
    return msgspec.json.encode(tool, order="deterministic")


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    """Return True if two calls have the same function and arguments. Ids are ignored."""
    if one.name != other.name:
        return False
    if one.arguments == other.arguments:
        return True
    if max(len(one.arguments), len(other.arguments)) > PARSED_CHARACTERS:
        return False
    return _value(one.arguments) == _value(other.arguments)


def _value(arguments: str) -> Any:
    """Return the arguments of a call as a value that can be compared: the parsed JSON, as `_typed` returns it.

    Empty arguments and null are an empty object. Text that is not JSON, or that nests too deeply, is returned
    unchanged.
    """
    if not arguments.strip():
        return _typed({})
    try:
        value = msgspec.json.decode(arguments)
        # msgspec decodes deeper nesting than the recursion of `_typed` reaches.
        return _typed({} if value is None else value)
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _typed(value: Any) -> Any:
    """Return a JSON value in which no boolean equals a number; in Python, 1 == True. 1 and 1.0 stay equal."""
    match value:
        case bool():
            return (value,)
        case dict():
            return {key: _typed(inner) for key, inner in value.items()}
        case list():
            return [_typed(inner) for inner in value]
        case _:
            return value
