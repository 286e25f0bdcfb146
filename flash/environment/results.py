"""What environments return, checked and brought into one form: each mistake is an error that shows the value."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Mapping, Set
from numbers import Real
from typing import Any, TypeGuard, cast

import numpy as np

from flash.environment.interface import Info, ResetResult, SolvedExample, StepResult
from flash.errors import EnvError, RewardError
from flash.types import Message, Observation

VALUE_LENGTH = 80
"""Characters of a wrong value that an error repeats."""
NOTE_LENGTH = 2000
"""Characters kept of a note."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = VALUE_LENGTH


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


def check_solved_examples(alphabet: object, examples: object, count: int) -> None:
    """What the methods of a `WarmStart` have returned when they were asked for so many examples.

    Raises:
        EnvError: it is no text, or no list of so many examples in characters of that text.
    """
    if not _is_text(alphabet) or not alphabet:
        raise EnvError(f"alphabet() must return a text of all characters, but returned {shown(alphabet)}")
    given = cast("list[object]", examples) if isinstance(examples, list) else []
    if len(given) != count or not all(map(_is_example, given)):
        raise EnvError(
            f"solved_examples({count}, seed) must return a list of {count} flash.environment.SolvedExample, whose "
            f"prompts and answers are texts, but returned {shown(examples)}"
        )
    for example in cast("list[SolvedExample]", given):
        check_letters(example, set(alphabet))


def check_letters(example: SolvedExample, alphabet: Set[str]) -> None:
    """Raises EnvError: a turn of it has characters that the alphabet lacks."""
    for turn in (example, *example.later):
        if strange := set(turn.prompt + turn.answer) - alphabet:
            raise EnvError(
                f"the example {turn.prompt[:VALUE_LENGTH]!r} → {turn.answer[:VALUE_LENGTH]!r} has characters that the "
                f"environment's alphabet() lacks: {''.join(sorted(strange))[:VALUE_LENGTH]!r}"
            )


def metrics_of(info: Info) -> dict[str, float]:
    """`info["metrics"]`: what the environment measured in this step. Of each name the mean over a batch is logged.

    Raises:
        EnvError: it does not map names to finite numbers.
    """
    metrics = info.get("metrics", {})
    if not isinstance(metrics, Mapping):
        raise EnvError(f"info['metrics'] of step() must map names to numbers, but is {shown(metrics)}")
    numbers: dict[str, float] = {}
    for name, value in cast("Mapping[object, object]", metrics).items():
        number = _number(value) if isinstance(value, (Real, np.bool_)) else math.nan
        if not (isinstance(name, str) and name and math.isfinite(number)):
            named = repr(name) if isinstance(name, str) else shown(name)
            raise EnvError(
                f"info['metrics'] of step() must map names to finite numbers, but holds {named}: {shown(value)}"
            )
        numbers[_text("a name in info['metrics'] of step()", name)] = number
    return numbers


def template_arguments(info: Info) -> dict[str, Any]:
    """Return the arguments of the chat template that `reset` gives.

    Raises:
        EnvError: they are not a table.
    """
    given: object = info.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) for name in cast("Mapping[object, object]", given)
    ):
        raise EnvError(
            f"reset() returned chat_template_kwargs in its info that are {_SHORT.repr(given)}: expected names with "
            "values, as {'enable_thinking': False}"
        )
    return dict(cast("Mapping[str, Any]", given))


def note_of(info: Info) -> str:
    """`info["note"]`: what the environment says of the response, for people who read the samples of a run.

    Raises:
        EnvError: it is no text.
    """
    note = info.get("note", "")
    if not isinstance(note, str):
        raise EnvError(f"info['note'] of step() must be text, but is {shown(note)}")
    return _text("info['note'] of step()", note[:NOTE_LENGTH])


def check_reward(reward: object) -> float:
    """A reward as a float. A bool counts as 0 or 1.

    Raises:
        RewardError: it is not a finite number.
    """
    if not isinstance(reward, (Real, np.bool_)):
        raise RewardError(f"the reward must be a finite number, but is {shown(reward)}; {_as_number(reward)}")
    number = _number(reward)
    if not math.isfinite(number):
        raise RewardError(
            f"the reward must be a finite number, but is {number}; look for a division by 0 or the log of it, and give "
            "0.0 where nothing can be said"
        )
    return number


def _as_number(reward: object) -> str:
    """How what is no number is made one."""
    if reward is None:
        return "does a path through the reward end without `return`? Give 0.0 where nothing can be said"
    if isinstance(reward, (str, bytes)):
        return "give float(…) of it"
    if inspect.isawaitable(reward):
        return "nothing has awaited it: make the function `async def`, and `await` in it"
    if callable(getattr(reward, "item", None)):
        return "give `.item()` of a tensor or an array, which is the Python number, where it holds just one"
    return "give a float or an int, such as a sum or a mean of several"


def shown(value: object) -> str:
    """Show a user's value and its type in one short line, also where the value cannot show itself."""
    try:
        text = " ".join(_SHORT.repr(value).split())[:VALUE_LENGTH]
    except BaseException:  # the class is a user's
        text = "a value that cannot be shown"
    return f"{text} of type {type(value).__name__}"


def _is_text(value: object) -> TypeGuard[str]:
    """Whether it is text that a tokenizer can hold: halves of surrogate pairs are none."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def _is_example(one: object) -> bool:
    """Whether it is one, with texts in all its turns: nobody checks a struct's fields."""
    if not isinstance(one, SolvedExample):
        return False
    prompt, answer, later = cast("tuple[object, object, object]", (one.prompt, one.answer, one.later))
    if not isinstance(later, tuple):
        return False
    return _is_text(prompt) and _is_text(answer) and all(map(_is_example, cast("tuple[object, ...]", later)))


def _observation(method: str, value: object) -> Observation:
    if isinstance(value, str):
        return _text(f"the observation of {method}()", value)
    if not isinstance(value, list):
        raise EnvError(
            f"the observation of {method}() must be text or a list of chat messages, but is {type(value).__name__}"
        )
    return [_message(method, item) for item in cast("list[object]", value)]


def _message(method: str, value: object) -> Message:
    if isinstance(value, Message):
        _text(f"a chat message of {method}()", value.role + value.content)
        return value
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        role, content = fields.get("role"), fields.get("content")
        if isinstance(role, str) and isinstance(content, str) and len(fields) == 2:
            return _message(method, Message(role, content))
    raise EnvError(
        f"a chat message of {method}() must be a flash.types.Message or a dict with the texts role and content, "
        f"but is {shown(value)}"
    )


def _number(value: object) -> float:
    """A real number as a float; infinite where there is none so large."""
    try:
        return float(cast("float", value))
    except OverflowError:
        return math.inf


def _text(what: str, text: str) -> str:
    """The text. Raises EnvError where it cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvError(
            f"{what} has a lone surrogate at {error.start}, which is no text: {text[error.start :][:40]!r}; bytes of a "
            'file\'s name that are no UTF-8 become such: show text.encode("utf-8", "replace").decode()'
        ) from None
    return text


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise EnvError(f"{name} of step() must be True or False, but is {shown(value)}")
    return bool(value)


def _info(method: str, value: object) -> Info:
    if not isinstance(value, dict):
        raise EnvError(f"info of {method}() must be a dict, but is {shown(value)}")
    return cast("Info", value)


def _shape(result: object) -> str:
    """`a tuple of 4 (str, float, bool, dict)`: enough to see which value is missing."""
    if not isinstance(result, tuple):
        return shown(result)
    parts = cast("tuple[object, ...]", result)
    return f"a tuple of {len(parts)} ({', '.join(type(part).__name__ for part in parts)})"
