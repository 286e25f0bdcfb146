"""Results of environments: check them and bring them into one form. Each mistake is an error that shows the value.

The classes are a user's, so a result may have any type, and its methods may raise anything. The player of episodes
calls the functions through `flash.environment.calls.check_returned`, which adds to the error which method returned the
value. `check_solved_examples` and `check_letters` are for the warm start of a tiny model: Flash makes a small model,
and first trains it on examples that the environment has solved.
"""

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
"""Largest number of characters of a wrong value that an error message shows, so that the message stays readable."""
NOTE_LENGTH = 2000
"""Largest number of characters of a note that are kept. The limit is needed because each sample carries its notes to
the hub."""
_SHORT = reprlib.Repr()
"""Printer of a user's value that cuts long texts and long containers, so that it takes little time."""
_SHORT.maxstring = _SHORT.maxother = VALUE_LENGTH


def check_reset_result(result: object) -> ResetResult:
    """Return the result of `reset`, in which all chat messages are `Message` structs. Called after each `reset`.

    Raises:
        EnvError: the result is not (observation, info), or one of the two has a wrong type.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"reset() must return (observation, info), but returned {_shape(result)}")
    observation, info = cast("tuple[object, object]", result)
    return _observation("reset", observation), _info("reset", info)


def check_step_result(result: object) -> StepResult:
    """Return the result of `step`, with a plain Python number and flags. A reward of True counts as 1, False as 0.

    Called after each `step`.

    Raises:
        EnvError: the result is not (observation, reward, terminated, truncated, info), or one of them has a wrong type.
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
    """Check the results of both methods of a `WarmStart`, whose method `solved_examples` was called for `count`
    examples.

    Raises:
        EnvError: the alphabet is not a text, or the examples are not a list of `count` examples in its characters.
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
    """Raise EnvError if a turn of an example has characters that the alphabet lacks.

    The alphabet is the vocabulary of the tiny model, which could not learn such an example.
    """
    for turn in (example, *example.later):
        if strange := set(turn.prompt + turn.answer) - alphabet:
            raise EnvError(
                f"the example {turn.prompt[:VALUE_LENGTH]!r} → {turn.answer[:VALUE_LENGTH]!r} has characters that the "
                f"environment's alphabet() lacks: {''.join(sorted(strange))[:VALUE_LENGTH]!r}"
            )


def metrics_of(info: Info) -> dict[str, float]:
    """Return `info["metrics"]` of `step`: numbers that the environment measured, by name. The mean over a batch is
    logged.

    Called after each `step`; empty if the info has no metrics. Numbers are returned as plain floats.

    Raises:
        EnvError: the value does not map names to finite numbers.
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
    """Return `info["chat_template_kwargs"]` of `reset`: arguments of the model's chat template, by name.

    Called after each `reset`. None counts as no arguments.

    Raises:
        EnvError: the value is not a mapping whose keys are texts.
    """
    given: object = info.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) for name in cast("Mapping[object, object]", given)
    ):
        raise EnvError(
            "info['chat_template_kwargs'] of reset() must map names to values, such as {'enable_thinking': False}, but "
            f"is {shown(given)}"
        )
    return dict(cast("Mapping[str, Any]", given))


def note_of(info: Info) -> str:
    """Return `info["note"]` of `step`: a remark on the response, for people who read the samples of a run.

    Called after each `step`; empty if the info has no note. A long note is cut after `NOTE_LENGTH` characters.

    Raises:
        EnvError: the value is not text.
    """
    note = info.get("note", "")
    if not isinstance(note, str):
        raise EnvError(f"info['note'] of step() must be text, but is {shown(note)}")
    return _text("info['note'] of step()", note[:NOTE_LENGTH])


def check_reward(reward: object) -> float:
    """Return a reward as a float. A bool counts as 0 or 1.

    Raises:
        RewardError: the reward is not a finite number.
    """
    if not isinstance(reward, (Real, np.bool_)):
        raise RewardError(f"the reward must be a finite number, but is {shown(reward)}; {_advice_on_reward(reward)}")
    number = _number(reward)
    if not math.isfinite(number):
        raise RewardError(
            f"the reward must be a finite number, but is {number}; look for a division by 0 or the log of it, and "
            "return 0.0 where an answer cannot be judged"
        )
    return number


def _advice_on_reward(reward: object) -> str:
    """Return advice on how to return a number in place of a wrong reward, for the error message of `check_reward`."""
    if reward is None:
        return "does a path through the reward end without `return`? Return 0.0 where an answer cannot be judged"
    if isinstance(reward, (str, bytes)):
        return "return float(…) of it"
    if inspect.isawaitable(reward):
        return "it was not awaited: make the function `async def`, and `await` it there"
    if callable(getattr(reward, "item", None)):
        return "return `.item()` of a tensor or an array that holds one number"
    return "return a float or an int, such as the sum or the mean of several"


def shown(value: object) -> str:
    """Return a user's value and its type in one short line for an error message, even if the value's `repr` fails. The
    value is cut to VALUE_LENGTH characters."""
    try:
        text = " ".join(_SHORT.repr(value).split())[:VALUE_LENGTH]
    except BaseException:  # the class is a user's, and its `repr` may raise anything
        text = "a value that cannot be shown"
    return f"{text} of type {type(value).__name__}"


def _is_text(value: object) -> TypeGuard[str]:
    """Return True for text that a tokenizer accepts: text without lone surrogates."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def _is_example(one: object) -> bool:
    """Return True for a `SolvedExample` with texts in all its turns. Python does not check the fields of a struct."""
    if not isinstance(one, SolvedExample):
        return False
    prompt, answer, later = cast("tuple[object, object, object]", (one.prompt, one.answer, one.later))
    if not isinstance(later, tuple):
        return False
    return _is_text(prompt) and _is_text(answer) and all(map(_is_example, cast("tuple[object, ...]", later)))


def _observation(method: str, value: object) -> Observation:
    """Return an observation, in which all chat messages are `Message` structs. Raises EnvError if it has a wrong type.

    `method`: `reset` or `step`, for the error.
    """
    if isinstance(value, str):
        return _text(f"the observation of {method}()", value)
    if not isinstance(value, list):
        raise EnvError(
            f"the observation of {method}() must be text or a list of chat messages, but is {type(value).__name__}"
        )
    return [_message(method, item) for item in cast("list[object]", value)]


def _message(method: str, value: object) -> Message:
    """Return a chat message as a struct. The message may be given as a dict of role and content. Raises EnvError for
    anything else.

    `method`: `reset` or `step`, for the error.
    """
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
    """Return a real number as a float; infinity if it is too large for a float. The callers refuse infinity."""
    try:
        return float(cast("float", value))
    except OverflowError:
        return math.inf


def _text(phrase: str, text: str) -> str:
    """Return a text unchanged. Raise EnvError if UTF-8 cannot encode it.

    Such a text could neither be tokenized nor be sent to the hub. `phrase` is a phrase for the text in the error.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvError(
            f"{phrase} has a lone surrogate at {error.start}, which cannot be encoded: {text[error.start :][:40]!r}; "
            "Python puts lone surrogates in place of bytes of a file's name that are not UTF-8: return "
            'text.encode("utf-8", "replace").decode() instead'
        ) from None
    return text


def _flag(name: str, value: object) -> bool:
    """Return `terminated` or `truncated` as a plain bool. Raises EnvError if the value is no bool; numpy's bools
    count."""
    if not isinstance(value, (bool, np.bool_)):
        raise EnvError(f"{name} of step() must be True or False, but is {shown(value)}; return bool(…) of it")
    return bool(value)


def _info(method: str, value: object) -> Info:
    """Return the info of a result unchanged. Raises EnvError if the info is no dict.

    `method`: `reset` or `step`, for the error. `metrics_of`, `note_of` and `template_arguments` check the entries.
    """
    if not isinstance(value, dict):
        raise EnvError(
            f"info of {method}() must be a dict, but is {shown(value)}; return {{}} if there is nothing to log"
        )
    return cast("Info", value)


def _shape(result: object) -> str:
    """Return `a tuple of 4 (str, float, bool, dict)`, for example, so that an error shows which value is missing."""
    if not isinstance(result, tuple):
        return shown(result)
    parts = cast("tuple[object, ...]", result)
    return f"a tuple of {len(parts)} ({', '.join(type(part).__name__ for part in parts)})"
