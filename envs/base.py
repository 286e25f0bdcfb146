"""The environment interface, in the manner of Gym and GEM, asynchronous.

An environment is made once per episode by calling its class with the options of the configuration. The order of calls
is `reset`, `step`, `close`; `close` is called exactly once, also after an error or a cancellation.

`reset(seed)` with the same seed shows the same problem. Seeds of training problems lie below `HELD_OUT` and count up
from one group to the next; seeds of held-out problems lie at or above it. An environment keeps the two sets disjoint.

Blocking environments with the same three methods are taken as they are: `wrap` runs them in a worker thread. Four more
things an environment may offer: `check`, which refuses wrong options before a run starts (`Checked`), `prepare`, which
opens on each node what its episodes share (`Prepared`), solved examples for a supervised warm start (`WarmStart`), and,
where it stands for several environments, the kind of a problem (`Kinds`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import numpy as np

from envs.threaded import Threaded
from flash.errors import EnvError, RewardError
from flash.types import Message, Observation

NOTE_LENGTH = 2000
"""Characters kept of a note."""
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
    """One episode's world."""

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

        What is opened with `envs.shared.shared` stays open for all episodes of the node. An error ends the run.
        """
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


def wrap(env: Environment | SyncEnvironment) -> Environment:
    """An asynchronous environment as it is; a blocking one behind a worker thread, its calls one at a time."""
    if inspect.iscoroutinefunction(env.reset):
        return cast("Environment", env)
    return Threaded(cast("SyncEnvironment", env))


def check_reset_result(result: object) -> ResetResult:
    """The result of `reset`, with chat messages in one form.

    Raises:
        EnvError: the result is not (observation, info).
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"reset() must return (observation, info), but returned {_shape(result)}")
    observation, info = cast("tuple[object, object]", result)
    return _observation("reset", observation), _info("reset", info)


def check_step_result(result: object) -> StepResult:
    """The result of `step`, with plain Python numbers and flags. A reward of True counts as 1, False as 0.

    Raises:
        EnvError: the result is not (observation, reward, terminated, truncated, info).
        RewardError: the reward is not a finite number.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(
            f"step() must return (observation, reward, terminated, truncated, info), but returned {_shape(result)}"
        )
    observation, reward, terminated, truncated, info = cast("tuple[object, object, object, object, object]", result)
    return (
        _observation("step", observation),
        check_reward(reward),
        _flag("terminated", terminated),
        _flag("truncated", truncated),
        _info("step", info),
    )


def metrics_of(info: Info) -> dict[str, float]:
    """`info["metrics"]`: what the environment measured in this step. Of each name the mean over a batch is logged.

    Raises:
        EnvError: it does not map names to finite numbers.
    """
    metrics = info.get("metrics", {})
    if not isinstance(metrics, Mapping):
        raise EnvError(f"info['metrics'] of step() must map names to numbers, but is {metrics!r}")
    numbers: dict[str, float] = {}
    for name, value in cast("Mapping[object, object]", metrics).items():
        number = float(cast("float", value)) if isinstance(value, (Real, np.bool_)) else math.nan
        if not (isinstance(name, str) and name and math.isfinite(number)):
            raise EnvError(f"info['metrics'] of step() must map names to finite numbers, but holds {name!r}: {value!r}")
        numbers[name] = number
    return numbers


def note_of(info: Info) -> str:
    """`info["note"]`: what the environment says of the response, for people who read the samples of a run.

    Raises:
        EnvError: it is no text.
    """
    note = info.get("note", "")
    if not isinstance(note, str):
        raise EnvError(f"info['note'] of step() must be text, but is {note!r} of type {type(note).__name__}")
    return note[:NOTE_LENGTH]


def check_reward(reward: object) -> float:
    """A reward as a float. A bool counts as 0 or 1.

    Raises:
        RewardError: it is not a finite number.
    """
    if not isinstance(reward, (Real, np.bool_)):
        raise RewardError(f"the reward must be a finite number, but is {reward!r} of type {type(reward).__name__}")
    number = float(cast("float", reward))
    if not math.isfinite(number):
        raise RewardError(f"the reward must be a finite number, but is {number}")
    return number


def _observation(method: str, value: object) -> Observation:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise EnvError(
            f"the observation of {method}() must be text or a list of chat messages, but is {type(value).__name__}"
        )
    return [_message(method, item) for item in cast("list[object]", value)]


def _message(method: str, value: object) -> Message:
    if isinstance(value, Message):
        return value
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        role, content = fields.get("role"), fields.get("content")
        if isinstance(role, str) and isinstance(content, str) and len(fields) == 2:
            return Message(role, content)
    raise EnvError(
        f"a chat message of {method}() must be a flash.types.Message or a dict with the texts role and content, "
        f"but is {value!r}"
    )


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise EnvError(f"{name} of step() must be True or False, but is {value!r} of type {type(value).__name__}")
    return bool(value)


def _info(method: str, value: object) -> Info:
    if not isinstance(value, dict):
        raise EnvError(f"info of {method}() must be a dict, but is {value!r} of type {type(value).__name__}")
    return cast("Info", value)


def _shape(result: object) -> str:
    """`a tuple of 4 (str, float, bool, dict)`: enough to see which value is missing."""
    if not isinstance(result, tuple):
        return f"{result!r} of type {type(result).__name__}"
    parts = cast("tuple[object, ...]", result)
    return f"a tuple of {len(parts)} ({', '.join(type(part).__name__ for part in parts)})"
