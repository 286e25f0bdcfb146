"""The environment interface, in the manner of Gym and GEM, asynchronous.

An environment is made once per episode by calling its class with the options of the configuration: each as a keyword
argument, or, where the only argument is `options` and annotated with a struct, all in one such struct, which is made
and thereby checked once. `check`, `prepare` and `kind_of` take them in the same form. The order of calls is `reset`,
`step`, `close`; `close` is called exactly once, also after an error or a cancellation.

`reset(seed)` with the same seed shows the same problem. Seeds of training problems lie below `HELD_OUT` and count up
from one group to the next; seeds of held-out problems lie at or above it. An environment keeps the two sets disjoint.

Blocking environments with the same three methods are taken as they are: `wrap` runs them in a worker thread. Five more
things an environment may offer: `check`, which refuses wrong options before a run starts (`Checked`), `prepare`, which
opens on each node what its episodes share (`Prepared`), `inform`, which is given the episode's count of tokens
(`Informed`), solved examples for a supervised warm start (`WarmStart`), and, where it stands for several environments,
the kind of a problem (`Kinds`).
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec

from flash.types import Observation

HELD_OUT = 1 << 31
"""First seed of the held-out problems."""

Info = dict[str, Any]
StepResult = tuple[Observation, float, bool, bool, Info]
"""observation, reward, terminated, truncated, info"""
ResetResult = tuple[Observation, Info]


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


class EpisodeView(Protocol):
    """What an episode tells its environment of tokens, and what that may ask of it."""

    @property
    def last(self) -> Said:
        """The response that `step` was called with last."""
        ...

    @property
    def turns_left(self) -> int:
        """Responses that may still follow."""
        ...

    def room(self, observation: Observation) -> int:
        """Tokens left for a response if this is shown next; 0 or below: shown all the same, it ends the episode.

        Raises:
            EnvError: it cannot be shown, for example because the model's chat template refuses it.
        """
        ...

    def limit(self, tokens: int) -> None:
        """Let the next response have at most so many tokens."""
        ...


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


def is_held_out(seed: int) -> bool:
    """Whether a seed asks for a held-out problem."""
    return seed >= HELD_OUT
