"""The environment interface: asynchronous, in the manner of Gym and GEM.

An environment is made once for each episode: its class is called with the options of the configuration, each as a
keyword argument. If the only argument is named `options` and annotated with a struct, the class gets all options in one
such struct. Classmethods such as `check` and `kind_of` get the options in the same form. The order of calls is `reset`,
`step`, `close`; `close` is called exactly once, also after an error or a cancellation.

`reset(seed)` shows the same problem for the same seed. Seeds of training problems lie below `HELD_OUT` and count up
from one group to the next; a group is the samples of one problem. Seeds of held-out problems, which are only used in
evaluations, lie at or above `HELD_OUT`. An environment keeps the two sets of problems disjoint.

Blocking environments with the same three methods are accepted too: `wrap` runs them in threads. The protocols below are
optional. A class may refuse wrong options before a run starts (`Checked`), open resources on each node (`Prepared`),
follow the tokens of its episode (`Informed`), give solved examples for a supervised warm start (`WarmStart`), stand for
several kinds of problems (`Kinds`, `Domains`), have collected problems (`Collected`), or wrap another environment
(`Wrapping`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import msgspec

from flash.config.section import (
    BelowOne,
    Biases,
    Ends,
    NonNegative,
    Penalty,
    Positive,
    PositiveFloat,
    Temperature,
    TopK,
    TopP,
)
from flash.sampling import Sampling
from flash.types import Message, Observation, Piece, ResponseForm, Tool

HELD_OUT = 1 << 31
"""First seed of the held-out problems, which are the problems of evaluations. Training problems have smaller seeds."""

Info = dict[str, Any]
"""Further results of `reset` and `step`, by name. In the info of `step`, `metrics` (names with numbers) and `note` (a
text) are logged. In the info of `reset`, `chat_template_kwargs` are arguments of the model's chat template for the
whole episode."""
StepResult = tuple[Observation, float, bool, bool, Info]
"""(observation, reward, terminated, truncated, info). The observation is shown next, and is not used at the end of the
episode. `terminated` and `truncated` end the episode: the problem is over, or the environment has cut it off."""
ResetResult = tuple[Observation, Info]
"""(observation, info). The observation is the problem: plain text, or messages for the model's chat template."""


class SolvedExample(msgspec.Struct, frozen=True):
    """A prompt and a correct answer, for a supervised warm start."""

    prompt: str
    """Text that `reset` shows, or in a later turn the next observation."""
    answer: str
    """Text that `step` rewards."""
    later: tuple[SolvedExample, ...] = ()
    """The turns that follow in the same episode: each has the next observation as its prompt, and the correct
    answer."""


@runtime_checkable
class Environment(Protocol):
    """The environment of one episode: it shows a problem, takes the policy's answers, and rewards them.

    Any error that a method raises fails the episode, as does a call that takes longer than its deadline. A call of
    `reset` or `step` may be cancelled at each `await`.
    """

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start the problem of this seed and show it."""
        ...

    async def step(self, action: str) -> StepResult:
        """Take the policy's answer as text. The reward must be a finite number."""
        ...

    async def close(self) -> None:
        """Release the resources that the episode holds."""
        ...


@runtime_checkable
class SyncEnvironment(Protocol):
    """A blocking environment in the manner of Gym: the same three methods as `Environment`. They run in a thread."""

    def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start the problem of this seed and show it."""
        ...

    def step(self, action: str) -> StepResult:
        """Take the policy's answer as text. The reward must be a finite number."""
        ...

    def close(self) -> None:
        """Release the resources that the episode holds."""
        ...


@runtime_checkable
class Checked(Protocol):
    """An environment class that refuses wrong options before anything starts."""

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raise `ConfigError` if an episode with these options cannot work.

        The options have been checked against the types of the class's signature already. The method runs in the process
        that reads the configuration: it may look at files and columns, but must not load anything large.
        """
        ...


@runtime_checkable
class Prepared(Protocol):
    """An environment class that opens resources before its first episode."""

    @classmethod
    async def prepare(cls, **options: Any) -> None:
        """Open the resources of a node. This is called once on each node, before its engines start; an error ends the
        run.

        A resource that is opened with `flash.environment.shared` stays open for all episodes of the node.
        """
        ...


class Said(msgspec.Struct, frozen=True):
    """Size of a response and of its prompt, in tokens. It is the value of `EpisodeView.last`."""

    prompt_tokens: int
    """Number of tokens before the response."""
    tokens: int
    """Number of tokens of the response."""
    cut: bool
    """True if the token limit ended the response, not the model."""


class Spoken(msgspec.Struct, frozen=True):
    """Response as a chat message. `EpisodeView.spoken` returns it."""

    message: Message
    """The assistant's message, with the reasoning and the calls that the model's parsers have found."""
    malformed: bool = False
    """True if the response begins a call that could not be read. The call is then part of the content."""


class Expected(msgspec.Struct, frozen=True):
    """An observation that the environment will probably show later, and the options of the response to it.

    The response can be sampled ahead of time, while another response is being sampled.
    """

    name: str
    """A name that the environment gives to this observation. `EpisodeView.comes` announces the observation by it."""
    observation: Observation
    """The observation itself."""
    branch: int
    """Index of the branch (sequence of tokens) that the observation follows, as in `EpisodeView.go_on`."""
    responses: int
    """Number of responses of that branch that the observation follows, as in `EpisodeView.go_on`."""
    tools: Sequence[Tool] = ()
    """Tools that are offered. Used only if the observation follows no response."""
    template: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the chat template. Used only if the observation follows no response."""
    tokens: int | None = None
    """Largest number of tokens of the response; None: only the limits of the run hold."""
    stop: tuple[str, ...] = ()
    """Texts that end the response."""
    form: ResponseForm | None = None
    """Form that the response must have; None: no form."""
    hear: Callable[[Piece, int], None] | None = None
    """Function that is called with each piece of the response while it is sampled, and with the size of the prompt in
    tokens; None: no function."""
    calling: bool = True
    """True if calls of functions are separated from the text; the pieces that `hear` gets are then without them."""


class LastResponse(Protocol):
    """The part of `EpisodeView` about the response that was last given to `step`. Use it only after a response."""

    @property
    def last(self) -> Said:
        """The size of the last response."""
        ...

    def scored(self) -> list[tuple[str, float]]:
        """Return the text and the log-prob of each token of the last response, as it was sampled."""
        ...

    def spoken(self, *, calling: bool = True) -> Spoken:
        """Return the last response as a message. The run's parsers separate the reasoning and the calls from the text.

        After plain text, all of the response is content: parsers read only responses to chat messages.

        `calling`: True if calls of functions are separated from the text; False if they stay part of it.
        """
        ...


class NextResponse(Protocol):
    """The part of `EpisodeView` with settings of the next response. Each holds for that response only."""

    @property
    def sampling(self) -> Sampling:
        """The distribution from which all responses of the episode are drawn."""
        ...

    def limit(self, tokens: int) -> None:
        """Limit the next response to this number of tokens. The limits of the run hold, too."""
        ...

    def stop_at(self, texts: Sequence[str]) -> None:
        """End the next response after the first of these texts that it contains."""
        ...

    async def form(self, form: ResponseForm) -> None:
        """Let the next response have this form: a text that follows a JSON schema, or calls of functions.

        Call it after `go_on`, `offer` and `template`, because the form depends on the tools and on the chat template.
        The trainer learns which tokens the form has forbidden, and trains the policy under the form.

        Raises:
            EnvError: engines cannot sample in this form, or its grammar takes them too much time.
        """
        ...

    def listen(self, hear: Callable[[Piece, int], None], *, calling: bool = True) -> None:
        """Call `hear` with pieces of the next response, and the size of its prompt in tokens, while it is sampled.

        A piece is never corrected later: all pieces together are the text that `spoken` will return. Calls of functions
        are left out if `calling` is True. `hear` is not called at the end of the response; `step` is. If `hear` raises
        an error, the episode fails as if `step` had raised it.
        """
        ...


class RemainingRoom(Protocol):
    """The part of `EpisodeView` with the turns and tokens that the limits of the run still allow."""

    @property
    def turns_left(self) -> int:
        """Number of responses that may still follow."""
        ...

    async def prepare(self, observation: Observation) -> None:
        """Render a large observation that may be shown next, in a thread, so that `room` returns at once.

        Does nothing if the observation is small, or certainly too large.

        Raises:
            EnvError: a large observation cannot be shown.
        """
        ...

    def room(self, observation: Observation) -> int:
        """Return the number of tokens left for a response if this observation is shown next.

        An observation that leaves 0 tokens or fewer ends the episode if it is shown. For an observation that is
        certainly too large, the result is a negative upper bound.

        Raises:
            EnvError: the observation cannot be shown, for example because the model's chat template refuses it.
        """
        ...

    async def count(self, expected: Expected) -> int:
        """Return the number of tokens of the prompt that the response to an observation would have. Changes nothing.

        `expected` describes the observation and its place; its fields about the response are not used. An observation
        that is certainly too large is not rendered; the result is then a lower bound that exceeds `model.max_length`. A
        large observation is rendered in a thread.

        Raises:
            EnvError: the observation cannot be shown.
        """
        ...


class NextObservation(Protocol):
    """The part of `EpisodeView` with settings of the next observation, and announcements of later ones."""

    def go_on(self, branch: int, responses: int) -> None:
        """Let the next observation follow the first `responses` responses of a branch. By default, it follows the last
        response.

        Branches are counted from 0 in the order in which they begin. Responses that a branch has copied from another
        one count as its own. If the branch has no more than `responses`, it continues. Otherwise a new branch begins
        with a copy of the tokens up to the end of these responses. The copied tokens are prompt in the new branch. With
        0 responses, the new branch begins with the observation alone. Nothing changes before the observation is shown.
        Call it in `step`, before it returns.

        Raises:
            EnvError: a response is being sampled.
        """
        ...

    def offer(self, tools: Sequence[Tool]) -> None:
        """Let the policy call these functions: the model's chat template shows them with the first observation.

        Call it before the first observation is rendered, and again before each branch that follows no response.

        Raises:
            EnvError: the run has no parser of calls (model.tool_parser).
        """
        ...

    def template(self, arguments: Mapping[str, Any]) -> None:
        """Give the model's chat template these arguments, which override `model.chat_template_kwargs`.

        Call it before the first observation is rendered, and again before each branch that follows no response.
        `chat_template_kwargs` in the info that `reset` returns have the same effect.

        Raises:
            EnvError: the chat template cannot have such an argument.
        """
        ...

    def expect(self, expected: Expected) -> None:
        """Start to sample the response to a later observation, beside the response that is being sampled, if the limits
        of the run allow it; otherwise do nothing.

        The response is used if `comes` announces this observation later, and exactly it is shown with the same limits.
        Otherwise the tokens of the response are lost.
        """
        ...

    def comes(self, name: str) -> None:
        """Announce that the next observation may be the one that was passed to `expect` with this name.

        Without this call, the response that was sampled ahead is not used. Call it in `step`, before it returns.
        """
        ...


class EpisodeView(LastResponse, NextResponse, RemainingRoom, NextObservation, Protocol):
    """The view of an episode's tokens, with which an environment reads and steers them. An `Informed` environment gets
    it."""


@runtime_checkable
class Informed(Protocol):
    """An environment that reads or steers the tokens of its episode. It must be asynchronous."""

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode. This is called once, before `reset`."""
        ...


@runtime_checkable
class WarmStart(Protocol):
    """An environment that can show how its problems are solved, to teach a small model to answer at all.

    The object is made outside of an episode, so none of its other methods is called, not even `close`.
    """

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` training problems with correct answers, the same for the same seed; never a held-out problem.

        Called when a tiny model is made, for each batch of its warm start. The prompt is exactly the text that `reset`
        shows, and the answer exactly the text that `step` rewards. The same holds for later turns.
        """
        ...

    def alphabet(self) -> str:
        """Return every character that occurs in a prompt or an answer, each once: the tiny model's vocabulary. Called
        when a tiny model is made."""
        ...


@runtime_checkable
class Kinds(Protocol):
    """An environment class that stands for several kinds of problems, so that failures are counted for each kind."""

    @classmethod
    def kind_of(cls, seed: int, **options: Any) -> str:
        """Return the kind of the problem of a seed: the same in every process, for the same options. The hub calls this
        for each problem that it issues."""
        ...


@runtime_checkable
class Collected(Protocol):
    """An environment class whose problems are collected, such as rows of a data set.

    The class may have one of the methods, or both. Each is looked up by its name.
    """

    @classmethod
    def held_out_problems(cls, **options: Any) -> int | None:
        """Return the number of held-out problems; None if there is no limit. Consecutive seeds show each problem once.

        An evaluation uses each problem once: repeated problems would make the confidence interval of its mean too
        narrow.
        """
        ...

    @classmethod
    def solution_of(cls, seed: int, **options: Any) -> str | None:
        """Return the known answer to the problem of a seed; None if there is none.

        `flash train --dry-run` tries this answer: if even the known answer gets no reward, perhaps no answer can.
        """
        ...


@runtime_checkable
class Wrapping(Protocol):
    """An environment class that wraps another one, for example to offer tools for its problems.

    The optional methods of the inner class, such as `kind_of`, are used unless the outer class has them itself.
    """

    @classmethod
    def wrapped(cls, **options: Any) -> tuple[type[Any], dict[str, Any]]:
        """Return the inner environment class, and its keyword arguments, for these options of the outer one."""
        ...


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the problems of one kind. Where a field is None, the setting of the run's configuration holds."""

    weight: PositiveFloat = 1.0
    """Share of the trained groups, in proportion to the weights of the other domains."""
    group_size: Positive | None = None
    """Samples per prompt."""
    drop_equal_rewards: bool | None = None
    """True if groups whose rewards are all equal are filtered out."""
    accuracy_bounds: tuple[float, float] | None = None
    """Lowest and highest mean reward of a group; other groups are filtered out."""
    max_turns: Positive | None = None
    """Responses after which an episode is truncated."""
    max_new_tokens: Positive | None = None
    """Longest response, in tokens."""
    temperature: Temperature | None = None
    """Temperature of sampling, and of the trainer's log-probs. Evaluations have a temperature of their own."""
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: BelowOne | None = None
    min_tokens: NonNegative | None = None
    stop: Ends | None = None
    logit_bias: Biases | None = None
    repetition_penalty: Penalty | None = None
    """Each field from `top_k` to `repetition_penalty` replaces the key of the same name in `[rollout]`, for samples of
    the domain."""


@runtime_checkable
class Domains(Kinds, Protocol):
    """An environment class whose kinds are domains: each has a share of the trained groups, and limits of its own."""

    @classmethod
    def domains(cls, **options: Any) -> dict[str, Domain]:
        """Return the domain of every kind that `kind_of` returns, for the same options. Called when a configuration is
        checked, and at the start of the hub and of each node."""
        ...


def is_held_out(seed: int) -> bool:
    """Return True if the problem of this seed is held out for evaluations, and so never trained."""
    return seed >= HELD_OUT
