"""The environment interface, in the manner of Gym and GEM, asynchronous.

An environment is made once per episode by calling its class with the options of the configuration: each as a keyword
argument, or, where the only argument is `options` and annotated with a struct, all in one such struct, which is made
and thereby checked once. `check`, `prepare` and `kind_of` take them in the same form. The order of calls
is `reset`, `step`, `close`; `close` is called exactly once, also after an error or a cancellation.

`reset(seed)` with the same seed shows the same problem. Seeds of training problems lie below `HELD_OUT` and count up
from one group to the next; seeds of held-out problems lie at or above it. An environment keeps the two sets disjoint.

Blocking environments with the same three methods are taken as they are: `wrap` runs them in a worker thread. Six more
things an environment may offer: `check`, which refuses wrong options before a run starts (`Checked`), `prepare`, which
opens on each node what its episodes share (`Prepared`), `inform`, which is given the episode's count of tokens
(`Informed`), solved examples for a supervised warm start (`WarmStart`), where it stands for several environments, the
kind of a problem (`Kinds`), and, where it is put around another environment, which one (`Wrapping`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import msgspec

from flash.config.section import (
    BelowOne,
    Biases,
    NonNegative,
    Penalty,
    Positive,
    PositiveFloat,
    Temperature,
    Texts,
    TokenIds,
    TopK,
    TopP,
)
from flash.sampling import Sampling
from flash.types import Message, Observation, Piece, Tool

HELD_OUT = 1 << 31
"""First seed of the held-out problems."""

Info = dict[str, Any]
"""Returned by `reset` and `step` beside the rest. `metrics`, names with numbers, and `note`, a text, are logged; of
`reset`, `chat_template_kwargs` are arguments of the model's chat template for the whole episode."""
StepResult = tuple[Observation, float, bool, bool, Info]
"""observation, reward, terminated, truncated, info"""
ResetResult = tuple[Observation, Info]
"""observation, info"""


class SolvedExample(msgspec.Struct, frozen=True):
    """A prompt and a right answer, for a supervised warm start."""

    prompt: str
    answer: str
    later: tuple[SolvedExample, ...] = ()
    """The turns that follow: what the environment shows after the answer, and the right answer to that."""


@runtime_checkable
class Environment(Protocol):
    """One episode's world: what the policy is shown, what its answers lead to, and their rewards."""

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start the problem of this seed and show it."""
        ...

    async def step(self, action: str) -> StepResult:
        """Take the policy's answer as text. The reward must be a finite number."""
        ...

    async def close(self) -> None:
        """Release what the episode holds."""
        ...


@runtime_checkable
class SyncEnvironment(Protocol):
    """A plain Gym-style environment: the same three methods, blocking. It is run in a worker thread."""

    def reset(self, seed: int) -> tuple[Observation, Info]: ...

    def step(self, action: str) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class Checked(Protocol):
    """An environment class that refuses wrong options before anything starts."""

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raise `ConfigError` if an episode with these options cannot work.

        Takes what the class takes, types already checked against its signature. Runs in the process that reads the
        configuration: look at files and columns, load nothing large.
        """
        ...


@runtime_checkable
class Prepared(Protocol):
    """An environment class that opens things before its first episode."""

    @classmethod
    async def prepare(cls, **options: Any) -> None:
        """Called once on each node, before its engines start, with the options of the configuration.

        What is opened with `flash.environment.shared` stays open for all episodes of the node. An error ends the run.
        """
        ...


class Said(msgspec.Struct, frozen=True):
    """A response, in tokens."""

    prompt_tokens: int
    """All that stood before it."""
    tokens: int
    cut: bool
    """The token limit ended it, not the model."""


class Spoken(msgspec.Struct, frozen=True):
    """A response as a message."""

    message: Message
    """The assistant's, with its reasoning and calls where the model's parsers have found some."""
    malformed: bool = False
    """It begins a call that could not be read, and is part of the content."""


class Expected(msgspec.Struct, frozen=True):
    """What an environment will show, after what is shown next, and how it will want the response to that."""

    name: str
    """Its own, by which `EpisodeView.comes` says that it is shown next."""
    observation: Observation
    branch: int
    responses: int
    """Where it follows, as for `EpisodeView.go_on`."""
    tools: Sequence[Tool] = ()
    """Tools that are offered, and"""
    template: Mapping[str, Any] = MappingProxyType({})
    """arguments of the chat template, where the observation follows no response."""
    tokens: int | None = None
    stop: tuple[str, ...] = ()
    hear: Callable[[Piece], None] | None = None
    calling: bool = True
    """As for `EpisodeView.listen`."""


class LastResponse(Protocol):
    """The response that `step` was called with last."""

    @property
    def last(self) -> Said:
        """The response that `step` was called with last."""
        ...

    def scored(self) -> list[tuple[str, float]]:
        """Text and log-prob of each token of the last response, as it was sampled."""
        ...

    def spoken(self, *, calling: bool = True) -> Spoken:
        """The last response, read by the parsers of the run; `calling`: whether calls are looked for."""
        ...


class NextResponse(Protocol):
    """How the next response is to be sampled."""

    @property
    def sampling(self) -> Sampling:
        """From which distribution all responses of the episode are drawn."""
        ...

    def limit(self, tokens: int) -> None:
        """Let the next response have at most so many tokens."""
        ...

    def stop_at(self, texts: Sequence[str]) -> None:
        """Let the next response end with the first of these texts that comes, if one does."""
        ...

    def listen(self, hear: Callable[[Piece], None], *, calling: bool = True) -> None:
        """Let this hear the next response while it is sampled, as `spoken` will read it; nothing of its calls.

        It hears no more than what is certain by then, and not the end: that is `last`, `spoken` and the action.
        """
        ...


class WhatIsLeft(Protocol):
    """What may still follow."""

    @property
    def turns_left(self) -> int:
        """Responses that may still follow."""
        ...

    @property
    def branches_left(self) -> int:
        """Branches that may still begin."""
        ...

    async def prepare(self, observation: Observation) -> None:
        """Render an observation that may be shown next, in a thread if it is large: `room` takes no time then.

        Raises:
            EnvError: it cannot be shown.
        """
        ...

    def room(self, observation: Observation) -> int:
        """Tokens left for a response if this is shown next; 0 or below: shown all the same, it ends the episode.

        Raises:
            EnvError: it cannot be shown, for example because the model's chat template refuses it.
        """
        ...


class WhatIsShown(Protocol):
    """Where what is shown next stands, what it offers, and what will be shown later."""

    def go_on(self, branch: int, responses: int) -> None:
        """What is shown next follows the first so many responses of a branch; without it, the last response.

        Branches are counted from 0 in the order in which they begin; the responses that one follows count as its own.
        Where these are all that it has, it goes on; else a new one begins with its tokens up to there, which are prompt
        in the new one. After none, a new one begins with what is shown. Nothing changes before something is shown.
        """
        ...

    def offer(self, tools: Sequence[Tool]) -> None:
        """Let the policy call these functions: the model's chat template shows them with the first observation.

        To be called before that is rendered; of branches, before each that follows no response.

        Raises:
            EnvError: the run has no parser of calls (model.tool_parser).
        """
        ...

    def template(self, arguments: Mapping[str, Any]) -> None:
        """Give the model's chat template these arguments, which come before `model.chat_template_kwargs`.

        To be called before the first observation is rendered; of branches, before each that follows no response. What
        `reset` returns as `chat_template_kwargs` in its info does the same.

        Raises:
            EnvError: an argument is not the template's to have.
        """
        ...

    def expect(self, expected: Expected) -> None:
        """Let a later response be sampled from now on, beside the one under way, where the limits of the run have room.

        It is taken when just this is shown, with the same limits; what is never shown is sampled for nothing.
        """
        ...

    def comes(self, name: str) -> None:
        """What is shown next was expected by this name, if anything was."""
        ...


class EpisodeView(LastResponse, NextResponse, WhatIsLeft, WhatIsShown, Protocol):
    """What an episode tells its environment of tokens, and what that may ask of it."""


@runtime_checkable
class Informed(Protocol):
    """An environment, not a blocking one, that wants to know of tokens."""

    def inform(self, episode: EpisodeView) -> None:
        """Called once, before `reset`."""
        ...


@runtime_checkable
class WarmStart(Protocol):
    """An environment that can show how its problems are solved, for teaching a small model to answer at all."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training problems with right answers, the same for the same seed. Never a held-out problem.

        The prompt is exactly the text that `reset` shows, the answer exactly what `step` rewards; so turn by turn.
        """
        ...

    def alphabet(self) -> str:
        """Every character that occurs in a prompt or an answer, each once: the tiny model's vocabulary."""
        ...


@runtime_checkable
class Kinds(Protocol):
    """An environment class that stands for several kinds of environments, so that each may fail on its own."""

    @classmethod
    def kind_of(cls, seed: int, **options: Any) -> str:
        """The kind of the problem of this seed: the same in every process, for the same options."""
        ...


@runtime_checkable
class Collected(Protocol):
    """An environment class whose problems are collected, such as the rows of a data set. It may have either method."""

    @classmethod
    def held_out_problems(cls, **options: Any) -> int | None:
        """Return the number of held-out problems, which consecutive seeds show once each; None: there is no limit.

        An evaluation asks each of them once: problems that came again would narrow the interval of its mean.
        """
        ...

    @classmethod
    def solution_of(cls, seed: int, **options: Any) -> str | None:
        """Return the collected answer to the problem of a seed; None: it has none.

        `flash train --dry-run` tries it: where even that gets no reward, nothing may ever get one.
        """
        ...


@runtime_checkable
class Wrapping(Protocol):
    """An environment class around another one, such as tools for its problems.

    Kinds, domains, names, numbers and solutions of problems are those of the other class, unless the outer one has
    these methods itself.
    """

    @classmethod
    def wrapped(cls, **options: Any) -> tuple[type[Any], dict[str, Any]]:
        """Return the class of the environment inside, and its keyword arguments."""
        ...


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does with the problems of one kind. None: as the run's configuration has it."""

    weight: PositiveFloat = 1.0
    """Its share of the trained groups, in proportion to the other weights."""
    group_size: Positive | None = None
    """Samples per prompt."""
    drop_equal_rewards: bool | None = None
    """Whether groups are filtered out whose rewards are all equal."""
    accuracy_bounds: tuple[float, float] | None = None
    """Groups are filtered out whose mean reward lies outside."""
    max_turns: Positive | None = None
    """Responses after which an episode is truncated."""
    max_new_tokens: Positive | None = None
    """Longest response, in tokens."""
    temperature: Temperature | None = None
    """Of sampling, and of the trainer's log-probs. Evaluations have their own."""
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: BelowOne | None = None
    min_tokens: NonNegative | None = None
    stop: Texts | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: Biases | None = None
    repetition_penalty: Penalty | None = None
    """As the keys of `[rollout]` that have these names."""


NO_DOMAINS: Mapping[str, Domain] = MappingProxyType({})
"""Of a run over problems of one kind."""


@runtime_checkable
class Domains(Kinds, Protocol):
    """An environment class whose kinds are domains, each with a share of what is trained and limits of its own."""

    @classmethod
    def domains(cls, **options: Any) -> dict[str, Domain]:
        """Every kind that `kind_of` names, for the same options."""
        ...


def is_held_out(seed: int) -> bool:
    """Whether a seed asks for a held-out problem."""
    return seed >= HELD_OUT
