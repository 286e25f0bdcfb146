"""Whether a message of an agent's history stands for an answer of ours. Pure.

Law: what stands for an answer says the same, and what says the same stands for it. Clients write an answer down anew in
ways that change nothing: they strip white space, serialize the arguments of a call again, drop the reasoning, and name
calls by ids of their own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flash.types import Message, ToolCall

READ_LETTERS = 1 << 18
"""Arguments of a call that are read: to read megabytes takes seconds, in which a node does nothing else."""


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
