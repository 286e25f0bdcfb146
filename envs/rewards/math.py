"""Mathematical equality: the final answer of a worked solution against the reference, as values and not as texts.

The comparison is the `math-verify` package's (fractions, sets, intervals, units, LaTeX). It is slow and can run long on
odd input, so this verifier is not marked inline: the worker's deadline is the only one, and math-verify's own are off.
"""

from __future__ import annotations

import re
from typing import Any

from flash.errors import ConfigError, RewardError

try:
    import math_verify  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(
        "envs.rewards.math needs the package math-verify: pip install -e '.[math]' in Flash's folder"
    ) from error

_BOXED = "\\boxed{"

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?")
"""An integer, decimal or fraction; commas may separate thousands."""


def math_equal(completion: str, answer: str) -> float:
    """1.0 when the completion's final answer equals the reference, else 0.0.

    The final answer is the content of the last `\\boxed{…}`, or without one the last number. The reference may be a
    bare expression, a boxed one, or a solution that ends in `#### 42`.

    Raises:
        RewardError: the reference cannot be read as mathematics.
    """
    found = last_boxed(completion) or last_number(completion)
    if found is None:
        return 0.0
    reference = _parsed(last_boxed(answer) or answer.rpartition("####")[2].strip())
    if not reference:
        raise RewardError(f"the reference answer {answer!r} cannot be read as mathematics")
    return float(math_verify.verify(reference, _parsed(found), timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    """What the last complete `\\boxed{…}` holds; braces inside it are balanced."""
    start = text.rfind(_BOXED)
    while start >= 0:
        depth = 1
        begin = start + len(_BOXED)
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position].strip()
        start = text.rfind(_BOXED, 0, start)
    return None


def last_number(text: str) -> str | None:
    """The last number of a text, without thousands separators."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def _parsed(expression: str) -> list[Any]:
    return math_verify.parse(f"\\boxed{{{expression}}}", parsing_timeout=0)
