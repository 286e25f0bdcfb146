"""Transcript: the tokens of one episode, from the first observation to the trajectory.

`EpisodePlayer` appends an observation with `add_observation` and the response to it with `add_response`, turn by turn,
and at the end makes the trajectory with `trajectory`. Rules:

1. Tokens are only appended. An observation is *rendered* (turned into tokens) once. A response stays exactly as it was
   sampled, with its log-probs and the numbers of the policy versions that sampled its tokens. No text is tokenized
   twice.
2. Most episodes have one sequence of tokens, branch 0. If the environment continues from an earlier place, for example
   because an agent's client has sent a history that differs from the transcript, a new branch begins. The new branch
   starts with a copy of the tokens up to that place, and the old branch stays unchanged.
3. Copied tokens count as prompt in the new branch. So every sampled token is in exactly one *span* (the positions of
   one response) of one branch, and is trained once.

The environment may choose the place of the next observation, and options of the next response. The environment uses
`flash.rollout.episode.view.TranscriptView` for this. The transcript keeps the choices until they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from flash.environment.interface import Expected, Spoken
from flash.errors import EnvError
from flash.rollout.episode.tokenizer import ResponseReader, Tokenizer
from flash.sampling import Grammar, Kept, Routes, join_kept, join_routes
from flash.types import (
    ASSISTANT,
    TOOL,
    Completion,
    Message,
    Observation,
    Outcome,
    Piece,
    ResponseForm,
    Span,
    Task,
    Tool,
    Trajectory,
    Turn,
    VersionRun,
    append_versions,
)

_T = TypeVar("_T")

LETTERS_PER_TOKEN = 32
"""Most letters that a token is assumed to have, on average over an observation. An observation that cannot fit even so
is refused without being tokenized, because tokenizing megabytes takes seconds. Only long runs of white space have more
letters for each token; an observation with such a run may be refused although it would fit."""
LARGE_LETTERS = 16_384
"""Number of letters from which an observation is rendered in a thread, if the tokenizer is slow. Rendering takes more
than ten milliseconds then, and would block the event loop."""
MESSAGE_LETTERS = 64
"""Number of letters that take as long to render in a chat template as an empty message: about 40 microseconds."""


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an episode, from the configuration of the run."""

    max_length: int
    """Largest number of tokens of a branch, observations and responses together."""
    max_turns: int
    """Number of responses, over all branches, after which an episode is truncated."""
    max_new_tokens: int
    """Largest number of tokens of a response."""
    forms: bool = True
    """True if a response may have a form. The server of a teacher scores all tokens, also those that a form forbids."""


class ResponseOptions(NamedTuple):
    """Options that the environment has set for the next response, through its view. The options hold for that response
    only.

    `EpisodePlayer` makes the request for the response with them.
    """

    name: str = ""
    """Name under which the environment may have announced the next observation, so that the response to it was sampled
    ahead (`flash.rollout.episode.ahead`). Empty if it has not."""
    tokens: int | None = None
    """Largest number of tokens of the response; None: only the limits of the run hold."""
    stop: tuple[str, ...] = ()
    """Texts that end the response."""
    form: ResponseForm | None = None
    """Form that the response must have; None: no form."""
    hear: Callable[[Piece, int], None] | None = None
    """Function that gets each piece of the response while it is sampled, and the size of the prompt in tokens; None: no
    function gets them."""
    calling: bool = True
    """True if the tokenizer reads function calls in the response, so that `hear` does not get their text. False if the
    calls stay part of the text."""


class ResponseEnd(NamedTuple):
    """The end of a response in a branch: a place that a later observation can follow."""

    position: int
    """Number of tokens of the branch up to the end of the response."""
    cut: bool
    """True if the limit on its tokens has cut the response."""
    ended: bool
    """True if the model has ended the response. Then the last token of the response is a token that ends a turn. `cut`
    and `ended` are both False if a stop text, or a stop token that ends no turn, has ended the response."""


class BranchFormat(NamedTuple):
    """The form in which all observations of a branch are rendered, and its responses are read."""

    chat: bool
    """True for chat messages, False for plain text."""
    tokenizer: Tokenizer
    """The model's tokenizer, with the chat template's arguments of this branch."""
    tools: Sequence[Tool] = ()
    """Functions that the prompt of the branch offers."""

    async def grammar(self, form: ResponseForm) -> Grammar:
        """Return the grammar that lets engines sample in a form. Raises EnvError if they cannot sample in this form."""
        grammar = await self.tokenizer.grammar(form, self.tools)
        # Reasoning is read from chat messages only.
        return grammar if self.chat else msgspec.structs.replace(grammar, reasoning=None)

    def start_reading(self, prompt: Sequence[int], *, calling: bool) -> ResponseReader:
        """Return a reader that turns a response into text while it is sampled, for an environment that listens.

        Args:
            prompt: all tokens before the response.
            calling: True if the reader leaves out calls of functions; False if they stay part of the text.
        """
        if self.chat:
            return self.tokenizer.start_reading(prompt, self.tools, calling=calling)
        return ResponseReader(self.tokenizer.decode)

    def read_response(self, token_ids: Sequence[int], ended: bool, prompt: Sequence[int], *, calling: bool) -> Spoken:
        """Return a response as a message, for the environment. Its text equals all pieces of `start_reading` together.

        Args:
            token_ids: the tokens of the response.
            ended: True if the last token of the response is the token with which the model ended it.
            prompt: all tokens before the response.
            calling: True if calls of functions are read; False if they stay part of the text.
        """
        if self.chat:
            return self.tokenizer.read_response(token_ids, ended, prompt, self.tools, calling=calling)
        # Parsers expect an answer in the form that a chat template begins. The parsers might take plain text for
        # reasoning.
        return Spoken(Message(ASSISTANT, self.tokenizer.decode(token_ids)))


class Branch:
    """A sequence of tokens that only grows. The trainer trains each branch as a sequence of its own.

    Args:
        tokens: tokens copied from another branch; empty if the branch copies none.
        ends: ends of the responses among the copied tokens.
        format: the form in which observations are rendered.
    """

    def __init__(self, tokens: Sequence[int], ends: Sequence[ResponseEnd], format: BranchFormat) -> None:
        self.tokens = list(tokens)
        self.format = format
        self.ends = list(ends)
        """Ends of all responses among `tokens`: the copied responses, then the responses sampled in this branch."""
        self.spans: list[Span] = []
        """Start and stop of each response that was sampled in this branch, without copied responses."""
        self.logprobs: list[float] = []
        """Log-prob of each token in `spans`."""
        self.versions: list[VersionRun] = []
        """Policy version of each token in `spans`, run-length encoded."""
        self.kept: list[Kept | None] = []
        """Kept sets of each response in `spans`: the tokens that could have been drawn in place of each token
        (`flash.sampling`). None for a response whose tokens were drawn from the whole vocabulary."""
        self.routes: Routes | None = None
        """Experts that the engine chose for the tokens of the branch; later tokens may still be without a report. None
        if the model is no mixture of experts, or the engine does not report them."""

    def length_after(self, responses: int) -> int:
        """Return the number of tokens of the branch up to the end of its first `responses` responses.

        If `responses` is the number of all its responses, the result also counts the observation after them, if any:
        the next response is appended to that observation.
        """
        if responses == len(self.ends):
            return len(self.tokens)
        return self.ends[responses - 1].position if responses else 0


class Transcript:
    """Tokens, responses and turns of one episode, to which `EpisodePlayer` appends.

    Args:
        tokenizer: the model's tokenizer.
        limits: limits of the episode.
        rendering: lock that is held while a thread renders a large observation. All episodes of the node share it, so
            that at most one thread of the node renders. None: the transcript makes a lock of its own.
    """

    def __init__(self, tokenizer: Tokenizer, limits: EpisodeLimits, rendering: anyio.Lock | None = None) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.rendering = rendering or anyio.Lock()
        self._new_format = BranchFormat(chat=False, tokenizer=tokenizer)
        """Format of the next branch that copies no tokens, and of branch 0 until its first observation is added. A
        branch that copies tokens keeps the format of the original branch."""
        self.branches = [Branch([], [], self._new_format)]
        self.branch = 0
        """Index of the branch that the next observation follows. `add_observation` and `add_response` leave it at the
        branch to which they have appended tokens."""
        self._responses = 0
        """Number of responses of `branch` that the next observation follows. 0: the observation begins a sequence."""
        self.turns: list[Turn] = []
        """Turns that have ended; `EpisodePlayer` appends one after each step of the environment."""
        self.sampled = 0
        """Number of sampled tokens, over all branches."""
        self.last_branch: Branch | None = None
        """Branch of the last response; None before the first one."""
        self._answering = False
        """True from the observation until the response to it is added, so while a response is sampled."""
        self._rendered: tuple[Observation, list[int]] | None = None
        """Observation that was rendered last for the place that the next observation follows, and its tokens. None if
        no observation was rendered for this place."""
        self.rendered_ahead: dict[str, tuple[Expected, list[int]]] = {}
        """Large observations that were rendered before the episode has reached them, with their tokens. The keys are
        the names that the environment has given to the observations. `ResponsesAhead` adds the entries."""
        self.options = ResponseOptions()
        """Options of the next response."""

    # -- limits ------------------------------------------------------------------------------------------------------

    @property
    def turns_left(self) -> int:
        """Number of responses that may still follow, including a response that is being sampled now."""
        return self.limits.max_turns - sum(len(branch.spans) for branch in self.branches)

    def tokens_left(self) -> int:
        """Return the number of tokens that the next observation and the response to it may have together.

        If the observation is already added, this is the number of tokens that the response may have.
        """
        return self.limits.max_length - self.branches[self.branch].length_after(self._responses)

    def room(self, observation: Observation) -> int:
        """Return the number of tokens left for a response if this observation is shown next. It may be negative.

        `EpisodePlayer` ends the episode without room. An environment calls this through its view, so that it can do
        something else instead. An observation that is certainly too large is not rendered, because that could take
        seconds; then the number is only an upper bound below 0. Raises EnvError if the observation cannot be shown.
        """
        left, least = self.tokens_left(), self._min_tokens(observation)
        return left - (least if least > left else len(self.render(observation)))

    def _min_tokens(self, observation: Observation) -> int:
        """Return a lower bound on the tokens of the next observation. The bound is computed without rendering the
        observation."""
        # Tools are shown with the first observation of a sequence only.
        tools = () if self._responses else self._new_format.tools
        # The tokenizer's bound takes trials with the chat template the first time. Small observations do not need it.
        message = self.tokenizer.min_message_tokens if self.needs_thread(observation, tools) else 1
        return min_tokens(observation, tools, message)

    def needs_thread(self, observation: Observation, tools: Sequence[Tool]) -> bool:
        """Return True if a thread should render this observation with these tools, so that the event loop goes on."""
        return self.tokenizer.slow and is_large(observation, tools)

    # -- the next observation ----------------------------------------------------------------------------------------

    def go_on(self, branch: int, responses: int) -> None:
        """Let the next observation follow the first `responses` responses of a branch; environments call this.

        If the branch has more responses than that, a new branch begins when the observation is added. Otherwise the
        branch continues. With `responses` = 0 the observation begins a sequence, without copied tokens.

        Raises:
            EnvError: a response is being sampled. It would be appended to another branch than its prompt.
        """
        if self._answering:
            raise EnvError(
                "an environment chose the place of the next observation (`go_on`) while a response was sampled; choose "
                "it in step()"
            )
        if (branch, responses) != (self.branch, self._responses):
            assert 0 <= responses <= len(self.branches[branch].ends), "the branch has fewer responses"
            self.branch, self._responses, self._rendered = branch, responses, None

    def offer_tools(self, tools: Sequence[Tool]) -> None:
        """Offer functions to the policy: the chat template shows them with the first observation of a branch.

        Environments call this through their view. The functions are offered in each branch that begins after this call
        without copied tokens, and in branch 0 if its first observation was not added yet. The functions replace the
        functions of an earlier call. An empty list offers none.

        Raises:
            EnvError: `tools` is not empty, and the tokenizer cannot read calls of functions from responses.
        """
        if tools:
            self.tokenizer.check_reads_calls()
        self._new_format, self._rendered = self._new_format._replace(tools=list(tools)), None

    def set_template_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Set arguments of the chat template, which override `model.chat_template_kwargs`.

        The arguments come from the info of `reset`, or from the environment through its view. The arguments hold for
        each branch that begins after this call without copied tokens, and for branch 0 if its first observation was not
        added yet. They replace the arguments of an earlier call.

        Raises:
            EnvError: the chat template cannot have such an argument.
        """
        self._new_format = self._new_format._replace(tokenizer=self.tokenizer.with_arguments(arguments))
        self._rendered = None

    @property
    def _begins_branch(self) -> bool:
        """True if the next observation begins a new branch.

        A new branch begins in two cases: the observation follows an earlier response than the last one of the branch,
        or the observation begins a new sequence although the branch has responses.
        """
        return self._responses < len(self.branches[self.branch].ends)

    @property
    def tokens(self) -> list[int]:
        """Tokens of the branch that the next observation or response is appended to."""
        return self.branches[self.branch].tokens

    async def prepare(self, observation: Observation) -> None:
        """Render a large observation that may be shown next, in a thread, and keep its tokens.

        `render` and `room` then use these tokens. They render a small observation themselves, on the event loop. An
        observation that is certainly too large is not rendered; `room` refuses it. The episode and its environment
        choose no other place while this waits for the lock or the thread, so the tokens fit the place at the end.
        Raises EnvError if a large observation cannot be shown.
        """
        if self._rendered is not None and self._rendered[0] == observation:
            return
        tools = () if self._responses else self._new_format.tools
        if not self.needs_thread(observation, tools) or self._min_tokens(observation) > self.tokens_left():
            return
        async with self.rendering:
            # The observation may have been rendered ahead, but perhaps for another place or with another content.
            expected, tokens = self.rendered_ahead.pop(self.options.name, (None, list[int]()))
            place = (self.branch, self._responses, observation)
            if expected is None or (expected.branch, expected.responses, expected.observation) != place:
                tokens = await run_in_thread(lambda: self._render(observation))
        self._rendered = observation, tokens

    def render(self, observation: Observation) -> list[int]:
        """Return the tokens of the next observation. They are kept until its place changes, so do not change the list.

        If the same observation was the last one to be rendered for this place, the kept tokens are returned. Raises
        EnvError if the observation cannot be shown.
        """
        if self._rendered is None or self._rendered[0] != observation:
            self._rendered = observation, self._render(observation)
        return self._rendered[1]

    def _render(self, observation: Observation) -> list[int]:
        """Render the next observation, and return its tokens.

        This method may run in a thread, because the episode waits for the thread and changes nothing meanwhile. If the
        observation begins a sequence, this also sets whether the next format is chat messages or plain text. Raises
        EnvError if the observation cannot be shown.
        """
        if self._responses:
            return self.follow(self.branches[self.branch], self._responses, observation)
        self._new_format = self._new_format._replace(chat=not isinstance(observation, str))
        return self._new_format.tokenizer.render(observation, self._new_format.tools)

    def follow(self, branch: Branch, responses: int, observation: Observation) -> list[int]:
        """Return the tokens of an observation that follows the first `responses` responses of a branch, at least one.

        `ResponsesAhead` also calls this, for places that the episode may reach later.

        Raises:
            EnvError: the observation cannot be shown, or it is text in a branch of chat messages or the reverse.
        """
        if branch.format.chat == isinstance(observation, str):
            forms = ("chat messages", "text") if branch.format.chat else ("text", "chat messages")
            raise EnvError(
                "an environment shows either text or chat messages throughout an episode: reset() returned "
                f"{forms[0]}, a later step() {forms[1]}; return the same form from both"
            )
        end = branch.ends[responses - 1]
        # If a limit or a stop text has ended the response, the token that ends the turn is missing. Then the template's
        # text has to end the turn.
        end_token = branch.tokens[end.position - 1] if end.ended else None
        return branch.format.tokenizer.follow(observation, end_token, branch.format.tools)

    # -- the next response -------------------------------------------------------------------------------------------

    async def set_form(self, form: ResponseForm) -> None:
        """Let the next response have this form. Raises EnvError if it cannot have this form, or any form."""
        if not self.limits.forms:
            raise EnvError(
                "a response cannot have a form with the server of a teacher (algorithm.teacher.url), which scores all "
                "tokens: use algorithm.teacher.path"
            )
        format = self.branches[self.branch].format if self._responses else self._new_format
        await format.grammar(form)  # The grammar is kept for the request.
        self.options = self.options._replace(form=form)

    def take_options(self) -> ResponseOptions:
        """Return the options of the next response, and reset them, because they hold for one response."""
        options, self.options = self.options, ResponseOptions()
        return options

    # -- growing -----------------------------------------------------------------------------------------------------

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Append the tokens of an observation (from `render`) to the branch that it follows, or to a new branch.

        The environment may have chosen the place with `go_on`; otherwise it is after the last response. A new branch
        begins if the observation follows a response that is not the last one of its branch, and also if it begins a
        sequence although the branch has responses.
        """
        if self._begins_branch:
            origin, kept = self.branches[self.branch], self._responses
            length = origin.length_after(kept)
            branch = Branch(origin.tokens[:length], origin.ends[:kept], origin.format)
            branch.routes = origin.routes and origin.routes.part(0, length)
            self.branches.append(branch)
            self.branch = len(self.branches) - 1
        if not self._responses:
            self.branches[self.branch].format = self._new_format
        self.tokens.extend(tokens)
        self._rendered, self._answering = None, True

    def add_response(self, completion: Completion) -> None:
        """Append a response, exactly as it was sampled, to the branch to which the last observation was added.

        The response has at least one token. By default, the next observation follows this response.
        """
        branch = self.branches[self.branch]
        start = len(branch.tokens)
        branch.tokens += completion.token_ids
        branch.logprobs += completion.logprobs
        branch.spans.append(Span(start, len(branch.tokens)))
        # `finish` is "text" if a stop text or a stop token of the sampling settings has ended the response. Such a stop
        # token may also be a token with which the model ends a turn.
        stopped_at_end = (
            completion.finish == "text" and branch.format.chat and branch.format.tokenizer.ends_turn(branch.tokens[-1])
        )
        ended = completion.finish == "stop" or stopped_at_end
        branch.ends.append(ResponseEnd(len(branch.tokens), completion.finish == "length", ended))
        append_versions(branch.versions, completion.versions)
        branch.kept.append(completion.kept)
        if completion.routes is not None:
            # The engine also reports experts for the prompt. For tokens whose experts are already known, the earlier
            # report is kept, because the earlier responses were sampled with the experts of the earlier report.
            known = 0 if branch.routes is None else branch.routes.tokens
            later = completion.routes.part(known, completion.routes.tokens)
            branch.routes = join_routes([branch.routes, later], [known, later.tokens])
        self.last_branch = branch
        # While the response was sampled, the environment may have called `room`, which rendered an observation for the
        # place before the response. After the response, the template renders this observation in another way.
        self._responses, self._rendered, self._answering = len(branch.ends), None, False
        self.sampled += len(completion.token_ids)

    def trajectory(self, task: Task, outcome: Outcome, lost_tokens: int) -> Trajectory:
        """Return the trajectory of a task, which holds all branches one after another.

        `outcome`: `Outcome.OK` or `Outcome.TRUNCATED`; `lost_tokens`: number of tokens that were sampled for the
        episode and are in no branch.
        """
        branches = self.branches
        # A span of a branch counts tokens from the beginning of the branch, but a span of a trajectory counts from the
        # first token of the trajectory.
        begins = list(accumulate((len(branch.tokens) for branch in branches), initial=0))[:-1]
        spans = [
            Span(begin + span.start, begin + span.stop)
            for begin, branch in zip(begins, branches, strict=True)
            for span in branch.spans
        ]
        versions: list[VersionRun] = []
        for branch in branches:
            append_versions(versions, branch.versions)
        kept = [part for branch in branches for part in branch.kept]
        # If these numbers differed, tokens and log-probs would be shifted against each other in the trainer.
        logprobs = sum(len(branch.logprobs) for branch in branches)
        counted = sum(run.count for run in versions)
        assert self.sampled == logprobs == counted, "one log-prob and one version per action token"
        return Trajectory(
            task=task,
            outcome=outcome,
            reward=math.fsum(turn.reward for turn in self.turns),
            token_ids=b"".join(np.array(branch.tokens, dtype="<i4").tobytes() for branch in branches),
            action_spans=spans,
            logprobs=b"".join(np.array(branch.logprobs, dtype="<f4").tobytes() for branch in branches),
            versions=versions,
            turns=self.turns,
            lost_tokens=lost_tokens,
            branches=tuple(begins),
            kept=join_kept(kept, [span.stop - span.start for span in spans]),
            routes=join_routes([branch.routes for branch in branches], [len(branch.tokens) for branch in branches]),
        )


async def run_in_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a thread, and return the result. A caller that is cancelled does not wait for the thread."""
    # The call has its own limiter, because an environment's calls may occupy all threads of the default limiter.
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))


def min_tokens(observation: Observation, tools: Sequence[Tool], message: int) -> int:
    """Return a lower bound on the tokens of an observation and the tools that are shown with it. Renders nothing.

    An observation that does not fit even by this bound is refused without being rendered. `message`: lower bound on the
    tokens of a message without content.
    """
    letters = len(msgspec.json.encode(tools)) if tools else 0
    if isinstance(observation, str):
        return (letters + len(observation)) // LETTERS_PER_TOKEN
    return (letters + _letters(observation)) // LETTERS_PER_TOKEN + _tokens_beside_letters(observation, message)


def is_large(observation: Observation, tools: Sequence[Tool]) -> bool:
    """Return True if a slow tokenizer takes so long for an observation with tools that a thread should render them."""
    letters = len(msgspec.json.encode(tools)) if tools else 0
    if isinstance(observation, str):
        return letters + len(observation) >= LARGE_LETTERS
    return letters + _letters(observation) + MESSAGE_LETTERS * _tokens_beside_letters(observation, 1) >= LARGE_LETTERS


def _letters(observation: Sequence[Message]) -> int:
    """Return the number of letters in messages and their calls."""
    calls = [call for message in observation for call in message.tool_calls]
    letters = sum(len(one.content) + len(one.reasoning) + len(one.name) + len(one.tool_call_id) for one in observation)
    return letters + sum(len(call.id) + len(call.name) + len(call.arguments) for call in calls)


def _tokens_beside_letters(observation: Sequence[Message], message: int) -> int:
    """Return a lower bound on the tokens that messages and calls take beside their letters, such as the end of a turn.

    A message counts as `message` tokens and a call as 1. A result of a tool counts as 1, because some templates show
    the results of several calls as one message. With `message` = 1, this is the number of messages and calls.
    """
    return sum(len(one.tool_calls) + (1 if one.role == TOOL else message) for one in observation)
