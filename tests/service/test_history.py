"""Random trees of conversations: the place where each request continues, and training of each sampled token once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from flash.branches import spans_by_turn
from flash.rollout.episode.transcript import EpisodeLimits, Transcript
from flash.service.history import Continuation, History
from flash.trainer.packing import pack
from flash.types import (
    ASSISTANT,
    Completion,
    Message,
    Observation,
    Outcome,
    ShardSample,
    Task,
    Tool,
    ToolCall,
    Trajectory,
    Turn,
    VersionRun,
)
from tests.envs.agents import ASSISTANT as SPEAKS
from tests.envs.agents import END, ROLES, ByteTokenizer
from tests.envs.forms import ADD

ENOUGH = EpisodeLimits(max_length=1 << 20, max_turns=1 << 20, max_new_tokens=1 << 20)
"""Limits that no conversation here reaches."""
WORDS = st.sampled_from(["a", "b", "ab", ""])
OFFER = Message("system", "tools")
ROLE_OF = {token: role for role, token in ROLES.items()} | {SPEAKS: ASSISTANT}


class Request(NamedTuple):
    """A request that an agent makes of an earlier history, and its answer."""

    history: int
    """Number of the earlier history, modulo the number of histories."""
    kept: int
    """Number of first messages of the history that are kept."""
    dropped: int
    """Number of first messages that are dropped from these."""
    rewritten: int
    """Index of the message whose content is replaced; none if there is no such message."""
    strips: bool
    """True if white space is removed around answers."""
    new: list[Message]
    """Messages that follow the history."""
    tools: list[Tool]
    answer: str
    stopped: bool
    """True if the answer ended by itself, and not at a limit."""

    def messages(self, histories: list[list[Message]]) -> list[Message]:
        """Return the messages of the request."""
        messages = list(histories[self.history % len(histories)])[: self.kept][self.dropped :]
        if self.strips:
            messages = list(map(plain, messages))
        if self.rewritten < len(messages):
            messages[self.rewritten] = Message(messages[self.rewritten].role, "rewritten")
        return messages + self.new


REQUESTS = st.builds(
    Request,
    history=st.integers(0, 30),
    kept=st.integers(0, 9) | st.just(100),
    dropped=st.sampled_from([0, 0, 0, 0, 1, 3]),
    rewritten=st.integers(0, 20),
    strips=st.booleans(),
    new=st.lists(st.builds(Message, st.sampled_from(["user", "system"]), WORDS), min_size=1, max_size=2),
    tools=st.sampled_from([[], [], [], [ADD]]),
    answer=st.sampled_from(["x", "y", " x ", "yx"]),
    stopped=st.booleans(),
)


class Offering(ByteTokenizer):
    """Tokenizer whose prompts begin with a message about the tools, if there are any."""

    def check_reads_calls(self) -> None:
        """Do nothing, though this tokenizer reads no calls: tools change only the prompt here."""

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of the observation, after the message about the tools."""
        assert not isinstance(observation, str)
        return super().render([OFFER, *observation] if tools else observation)


def plain(message: Message) -> Message:
    """Return a message; if it is an answer, without white space at its ends, which has no meaning."""
    return Message(message.role, message.content.strip()) if message.role == ASSISTANT else message


def spoken(tokens: list[int]) -> list[Message]:
    """Return the messages of a prompt of the `ByteTokenizer`, without the empty last one, which the policy fills."""
    messages: list[Message] = []
    for token in tokens:
        if token in ROLE_OF:
            messages.append(Message(ROLE_OF[token], ""))
        elif token != END:
            messages[-1] = Message(messages[-1].role, messages[-1].content + chr(token))
    assert messages.pop() == Message(ASSISTANT, "")
    return messages


def begins_with(messages: list[Message], branch: list[Message]) -> bool:
    """Return True if messages begin with all messages of a branch, up to white space around answers."""
    if len(messages) < len(branch):
        return False
    return all(plain(message) == plain(known) for message, known in zip(messages, branch, strict=False))


class Conversation:
    """An agent and a policy. Beside the `History` under test it keeps all messages of each branch, to compare."""

    def __init__(self) -> None:
        self.histories: list[list[Message]] = [[]]
        """Messages of each request with its answer, from which later requests begin."""
        self.branches: list[list[Message]] = [[]]
        """Messages of each branch."""
        self.tools: list[list[Tool]] = [[]]
        """Tools of each branch."""
        self.prompts: list[list[int]] = []
        """Tokens of the prompt of each request."""
        self.said: list[list[int]] = []
        """Tokens of the answer to each request."""
        self._history = History()
        self._transcript = Transcript(Offering(), ENOUGH)

    def ask(self, request: Request) -> None:
        """Make a request of the agent, let the policy answer it, and compare the prompt with the request's messages."""
        messages, transcript = request.messages(self.histories), self._transcript
        place = self._history.place(messages, request.tools)
        self._check(place, messages, request.tools)
        transcript.go_on(place.branch, place.answers)
        if not place.answers:
            transcript.offer_tools(request.tools)
        transcript.add_observation(transcript.render(place.added))
        shown = [OFFER, *messages] if request.tools else messages
        assert list(map(plain, spoken(transcript.tokens))) == list(map(plain, shown)), "it sees what the agent says"
        tokens = [*request.answer.encode()] + [END] * request.stopped
        self.prompts.append(list(transcript.tokens))
        self.said.append(tokens)
        finish = "stop" if request.stopped else "length"
        transcript.add_response(Completion(tokens, [-1.0] * len(tokens), [VersionRun(0, len(tokens))], finish))
        transcript.turns.append(Turn("", "", 0.0, 0.0, 0.0, 0.0, branch=transcript.branch))
        answer = Message(ASSISTANT, request.answer)
        self._history.answer(place, answer, request.tools)
        self.histories.append([*messages, answer])
        before = self.branches[place.branch][: len(messages) - len(place.added)]
        if place.begins:
            self.branches.append([])
            self.tools.append([])
        self.tools[transcript.branch] = request.tools
        self.branches[transcript.branch] = [*before, *place.added, answer]

    def _check(self, place: Continuation, messages: list[Message], tools: list[Tool]) -> None:
        """Check that a request continues the longest branch that it begins with, with the same tools, or a new one."""
        whole = [
            branch
            for branch, known in zip(self.branches, self.tools, strict=True)
            if begins_with(messages, branch) and (known == tools or not branch)
        ]
        assert place.begins == (not whole)
        if whole:
            assert len(self.branches[place.branch]) == max(map(len, whole)) == len(messages) - len(place.added)

    def trajectory(self) -> Trajectory:
        """Return the trajectory of the conversation."""
        return self._transcript.trajectory(Task(1, 1, 0, 1), Outcome.OK, 0)


@given(st.lists(REQUESTS, min_size=1, max_size=12))
@settings(deadline=None)
def test_tokens_trained_are_tokens_sampled_once_each_whatever_an_agent_makes_of_its_history(
    requests: list[Request],
) -> None:
    conversation = Conversation()
    for request in requests:
        conversation.ask(request)
    made = conversation.trajectory()
    assert len(made.branches) == len(conversation.branches)
    tokens = made.tokens().tolist()
    for span, turn, prompt, said in zip(
        spans_by_turn(made), made.turns, conversation.prompts, conversation.said, strict=True
    ):
        assert tokens[made.branches[turn.branch] : span.start] == prompt
        assert tokens[span.start : span.stop] == said
    assert int(made.action_mask().sum()) == made.action_count == sum(map(len, conversation.said))
    packed = pack([ShardSample(0, made)], min_version=0, max_tokens=1 << 20)
    trained = [token for micro in packed for token in micro.target_T.tolist()]
    assert sorted(trained) == sorted(token for said in conversation.said for token in said)
    assert sum(micro.sequences for micro in packed) == len(made.branches)


def test_a_new_branch_begins_after_the_last_answer_that_it_shares_with_one() -> None:
    history = History()
    one, two, three = (Message("user", content) for content in ("one", "two", "three"))
    first, second = Message(ASSISTANT, "1"), Message(ASSISTANT, "2")
    history.answer(history.place([one]), first)
    history.answer(history.place([one, first, two]), second)
    assert history.place([one, first, three]) == (0, 1, True, [three])
    assert history.place([one, first, two, second, three]) == (0, 2, False, [three])
    assert history.place([one, first, two]) == (0, 1, True, [two]), "the same again is another branch"
    assert history.place([one]) == (0, 0, True, [one])
    history.answer(history.place([one, first, three]), second)
    assert history.place([one, first, three, second, two]) == (1, 2, False, [two])
    assert history.place([one, first, three, one]) == (0, 1, True, [three, one]), "where it was said first"


def test_the_parts_of_an_answer_that_a_client_sends_as_messages_of_their_own_are_that_answer() -> None:
    history = History()
    asked, more = Message("user", "one"), Message("user", "two")
    call = (ToolCall("a", "add", "{}"),)
    history.answer(history.place([asked]), Message(ASSISTANT, "said", "thought", call))
    said, thought = Message(ASSISTANT, "said"), Message(ASSISTANT, "", "thought")
    for parts in ([said, thought], [thought, said], [said]):
        place = history.place([asked, *parts, Message(ASSISTANT, "", tool_calls=call), more])
        assert place == (0, 1, False, [more])
    called = Message(ASSISTANT, "", tool_calls=call)
    for parts in ([called, said], [said, said, called]):
        assert history.place([asked, *parts, more]).answers == 0
