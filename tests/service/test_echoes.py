"""Histories as clients repeat them in each request: if the meaning is the same, the episode stays one branch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.service.chat import ChatFormat, PolicyAnswer, read
from flash.service.history import Continuation, History
from flash.types import Message, ToolCall

Given = dict[str, Any]

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "find")
]
CALLS = (ToolCall("9f0000001", "add", '{"a":1, "b":{"c":[true,"é"]}}'), ToolCall("9f0000002", "add", '{"a": 2}'))
ANSWERS = {
    "words": Message("assistant", " It is\ntwo. \n"),
    "a thought and words": Message("assistant", "two", "\nhm\n"),
    "a thought in the words": Message("assistant", "<think>\nhm\n</think>\n\ntwo"),
    "a thought that the template began": Message("assistant", "hm\n</think>\n\ntwo"),
    "calls": Message("assistant", "", "", CALLS),
    "one call": Message("assistant", "", "", CALLS[:1]),
    "words and calls": Message("assistant", "let me\n", "", CALLS),
    "all": Message("assistant", "let me", "hm", CALLS),
    "a broken call": Message("assistant", "", "", (ToolCall("9f0000003", "add", '{"a": '),)),
}


class Told(NamedTuple):
    """An answer as a client received it. The methods return it in other forms, in which clients repeat it.

    A form is a list of messages, because some clients send the parts of an answer as several messages.
    """

    message: Given
    """Message of the answer, decoded from JSON."""
    turn: int
    """Number of the request that repeats it, counted from 0."""

    @property
    def content(self) -> str:
        return self.message["content"] or ""

    def but(self, **fields: Any) -> list[Given]:
        """Return the message with other values of these fields."""
        return [{**self.message, **fields}]

    def without(self, *names: str) -> Given:
        return {key: value for key, value in self.message.items() if key not in names}

    def calls(self, change: Callable[[Given, int], Given]) -> list[Given]:
        """Return the message with the result of `change` for each call and its index."""
        if "tool_calls" not in self.message:
            return [self.message]
        return self.but(tool_calls=[change(call, index) for index, call in enumerate(self.message["tool_calls"])])

    def arguments(self, write: Callable[[Any], Any]) -> list[Given]:
        """Return the message with the arguments of each call as `write` writes them, if they are JSON."""

        def rewritten(call: Given, index: int) -> Given:
            function = call["function"]
            try:
                value = json.loads(function["arguments"])
            except ValueError:
                return call
            return {**call, "function": {**function, "arguments": write(value)}}

        return self.calls(rewritten)

    def thought(self, form: Callable[[str, str], Given]) -> list[Given]:
        """Return the message with reasoning and content in the fields of `form`; unchanged if it has no reasoning."""
        before, mark, words = self.content.partition("</think>")
        reasoning = self.message.get("reasoning") or before.removeprefix("<think>") * bool(mark)
        words = words.strip() if mark else self.content
        return (
            [{**self.without("reasoning", "reasoning_content"), **form(reasoning.strip(), words)}]
            if reasoning
            else [self.message]
        )


SAME: dict[str, Callable[[Told], list[Given]]] = {
    "as it is": lambda told: [told.message],
    "role, content and calls alone": lambda told: [told.without("reasoning", "reasoning_content", "refusal")],
    "null fields of the official client": lambda told: told.but(
        refusal=None, annotations=None, audio=None, function_call=None, name=None
    ),
    "empty lists": lambda told: told.but(annotations=[], tool_calls=told.message.get("tool_calls", [])),
    "a name": lambda told: told.but(name="solver"),
    "stripped": lambda told: told.but(content=told.content.strip()),
    "the end stripped": lambda told: told.but(content=told.content.rstrip()),
    "blanks for nothing": lambda told: told.but(content=told.content or " "),
    "an empty text for null": lambda told: told.but(content=told.content),
    "null for an empty text": lambda told: told.but(content=told.content or None),
    "no content": lambda told: [told.message if told.content else told.without("content")],
    "one part": lambda told: told.but(content=[{"type": "text", "text": told.content}]),
    "two parts": lambda told: told.but(
        content=[{"type": "text", "text": told.content[:4]}, {"type": "text", "text": told.content[4:]}]
    ),
    "no parts": lambda told: told.but(content=told.content or []),
    "reasoning_content alone": lambda told: [told.without("reasoning")],
    "reasoning alone": lambda told: [told.without("reasoning_content")],
    "no reasoning": lambda told: told.thought(lambda thought, words: {"content": words}),
    "empty reasoning": lambda told: told.thought(lambda thought, words: {"content": words, "reasoning": ""}),
    "reasoning as `thinking`": lambda told: told.thought(
        lambda thought, words: {"content": words, "thinking": thought}
    ),
    "reasoning in marks": lambda told: told.thought(
        lambda thought, words: {"content": f"<think>\n{thought}\n</think>\n\n{words}"}
    ),
    "reasoning in marks and beside": lambda told: told.thought(
        lambda thought, words: {"content": f"<think>{thought}</think>{words}", "reasoning_content": thought}
    ),
    "reasoning taken out of the marks": lambda told: told.thought(
        lambda thought, words: {"content": words, "reasoning_content": thought}
    ),
    "ids new in each request": lambda told: told.calls(lambda call, at: {**call, "id": f"call_{told.turn}_{at}"}),
    "ids counted in each message": lambda told: told.calls(lambda call, at: {**call, "id": str(at)}),
    "ids cut": lambda told: told.calls(lambda call, at: {**call, "id": call["id"][-3:]}),
    "no ids": lambda told: told.calls(lambda call, at: {**call, "id": ""}),
    "an index of calls": lambda told: told.calls(lambda call, at: {**call, "index": at}),
    "arguments with blanks": lambda told: told.arguments(lambda value: json.dumps(value, indent=2)),
    "arguments without blanks": lambda told: told.arguments(lambda value: json.dumps(value, separators=(",", ":"))),
    "arguments with other escapes": lambda told: told.arguments(lambda value: json.dumps(value, ensure_ascii=False)),
    "arguments in another order": lambda told: told.arguments(
        lambda value: json.dumps(dict(reversed(list(value.items()))))
    ),
    "arguments as an object": lambda told: told.arguments(lambda value: value),
    "words and calls apart": lambda told: (
        [told.without("tool_calls"), {"role": "assistant", "content": None, "tool_calls": told.message["tool_calls"]}]
        if told.content and "tool_calls" in told.message
        else [told.message]
    ),
    "each call apart": lambda told: (
        [told.but(tool_calls=told.message["tool_calls"][:1])[0]]
        + [{"role": "assistant", "content": "", "tool_calls": [call]} for call in told.message["tool_calls"][1:]]
        if "tool_calls" in told.message
        else [told.message]
    ),
}
"""Ways to write an answer down that say the same."""

OTHER: dict[str, Callable[[Told], list[Given]]] = {
    "other words": lambda told: told.but(content="three"),
    "words cut off": lambda told: told.but(content="It"),
    "nothing": lambda told: told.but(content="", tool_calls=None),
    "another speaker": lambda told: [{"role": "user", "content": told.content}],
    "other reasoning": lambda told: told.but(reasoning="oh", reasoning_content="oh"),
    "other reasoning in marks": lambda told: told.but(content=f"<think>oh</think>{told.content}"),
    "another function": lambda told: told.but(tool_calls=[{"function": {"name": "find", "arguments": "{}"}}]),
    "another argument": lambda told: told.but(tool_calls=[{"function": {"name": "add", "arguments": '{"a": 3}'}}]),
    "one more call": lambda told: told.but(
        tool_calls=[*told.message.get("tool_calls", []), {"function": {"name": "add", "arguments": "{}"}}]
    ),
}
"""Ways that say something else."""


class Client:
    """Client that repeats the whole conversation in each request, in a form that differs from request to request."""

    def __init__(self, form: Callable[[Told], list[Given]]) -> None:
        self.form = form
        """Function that returns the form in which an answer is repeated."""
        self.history = History()
        self.turns: list[tuple[Given, list[str]]] = []
        """Messages of the answers so far, as the client received them, and the results of their calls."""

    def request(self) -> bytes:
        """Return the body of the next request.

        Every second request differs where it means the same: another role of the system, white space, content in parts,
        results in another order if their ids differ, tools in another order.
        """
        now = len(self.turns)
        messages: list[Given] = [{"role": ["system", "developer"][now % 2], "content": "be brief" + " " * (now % 2)}]
        messages.append({"role": "user", "content": ["1+1?", [{"type": "text", "text": "1+1?"}]][now % 2]})
        for told, results in self.turns:
            echo = self.form(Told(told, now))
            messages += echo
            ids = [call.get("id", "") for one in echo for call in one.get("tool_calls") or ()]
            shown = list(zip(ids, results, strict=False))
            if len(set(ids)) == len(ids) and now % 2:
                shown.reverse()
            messages += [{"role": "tool", "tool_call_id": id, "content": result} for id, result in shown]
            messages.append({"role": "user", "content": "go on", "name": "eve"})
        tools = [dict(reversed(tool.items())) for tool in TOOLS[:: 1 - 2 * (now % 2)]]
        return msgspec.json.encode({"model": "policy", "messages": messages, "tools": tools})

    def ask(self, answer: Message) -> Continuation:
        """Send the next request, which the policy answers with `answer`. Return the place at which it continues."""
        asked = read(self.request())
        place = self.history.place(asked.messages, asked.tools)
        self.history.answer(place, answer, asked.tools)
        told = json.loads(ChatFormat("1").body([PolicyAnswer(answer, cut=False, prompt_tokens=1, tokens=1)]))
        results = [f"result {len(self.turns)} {index}" for index in range(len(answer.tool_calls))]
        self.turns.append((told["choices"][0]["message"], results))
        return place


def renumbered(answer: Message, turn: int) -> Message:
    """Return an answer whose calls have ids that no other turn has."""
    calls = tuple(
        ToolCall(f"{call.id[:-1]}{turn}{index}", call.name, call.arguments)
        for index, call in enumerate(answer.tool_calls)
    )
    return msgspec.structs.replace(answer, tool_calls=calls)


def check_one_branch(client: Client, answers: Sequence[Message]) -> None:
    """Check that each request continues the only branch, and that results have the ids that the policy sampled."""
    for turn, answer in enumerate([*answers, Message("assistant", "done")]):
        place = client.ask(answer)
        assert (place.branch, place.answers) == (0, turn)
        assert place.begins is False
        if turn:
            calls = answers[turn - 1].tool_calls
            shown = [(one.tool_call_id, one.name, one.content) for one in place.added if one.role == "tool"]
            assert shown == [(call.id, call.name, f"result {turn - 1} {index}") for index, call in enumerate(calls)]


@pytest.mark.parametrize("form", SAME.values(), ids=SAME)
def test_an_answer_that_comes_back_saying_the_same_goes_on_in_one_branch(form: Callable[[Told], list[Given]]) -> None:
    for answer in ANSWERS.values():
        check_one_branch(Client(form), [renumbered(answer, turn) for turn in range(4)])


@given(st.lists(st.tuples(st.sampled_from(list(ANSWERS)), st.sampled_from(list(SAME))), min_size=1, max_size=8))
def test_a_client_may_write_each_answer_and_each_request_in_another_form(turns: list[tuple[str, str]]) -> None:
    rng = random.Random(repr(turns))
    check_one_branch(
        Client(lambda told: SAME[rng.choice(turns)[1]](told)),
        [renumbered(ANSWERS[answer], turn) for turn, (answer, _) in enumerate(turns)],
    )


@pytest.mark.parametrize("form", OTHER.values(), ids=OTHER)
def test_an_answer_that_comes_back_saying_something_else_begins_a_branch(form: Callable[[Told], list[Given]]) -> None:
    for answer in ANSWERS.values():
        client = Client(form)
        client.ask(answer)
        place = client.ask(answer)
        assert (place.branch, place.answers, place.begins) == (0, 0, True), answer


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("system", {"role": "system", "content": "be long"}),
        ("user", {"role": "user", "content": "1+2?"}),
    ],
)
def test_other_words_of_others_begin_a_branch(name: str, change: Given) -> None:
    history, first = History(), [Message("system", "be brief"), Message("user", "1+1?")]
    history.answer(history.place(first), Message("assistant", "2"))
    changed = [Message(**change) if one.role == name else one for one in first]
    place = history.place([*changed, Message("assistant", "2"), Message("user", "go on")])
    assert (place.answers, place.begins) == (0, True)


def test_results_that_change_places_are_other_results() -> None:
    history, first = History(), [Message("user", "1+1?")]
    history.answer(history.place(first), ANSWERS["calls"])
    results = [Message("tool", text, tool_call_id=call.id) for text, call in zip("ab", CALLS, strict=True)]
    said = [*first, ANSWERS["calls"], *results]
    history.answer(history.place(said), Message("assistant", "done"))
    turned = [*first, ANSWERS["calls"], *reversed(results), Message("assistant", "done"), Message("user", "and?")]
    assert history.place(turned) == (0, 2, False, [Message("user", "and?")])
    swapped = [Message("tool", text, tool_call_id=call.id) for text, call in zip("ba", CALLS, strict=True)]
    place = history.place([*first, ANSWERS["calls"], *swapped, Message("assistant", "done"), Message("user", "and?")])
    assert (place.branch, place.answers, place.begins) == (0, 1, True)
