r"""Compare the final answer of a worked solution with the reference, as values and not as texts.

`math_equal` is the verifier: `envs.rewards.verifier` calls it in a worker process for each answer.
`envs.rewards.final_answer` finds the answer. This module compares numbers exactly. The package math-verify compares all
other answers: expressions, sets, intervals, matrices, relations. It evaluates its input, so the size of an expression
is estimated first: `10^{10^{10}}` and `99999999999!` are equal only to the same text. A comparison may use `MOST_CPU_S`
of the worker's own processor time, on which other processes have no influence; an answer that needs more is wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from envs.rewards.final_answer import (
    COMMAND,
    DIGITS,
    FUNCTIONS,
    MOST_CHARACTERS,
    PLAIN_NAMES,
    SIGNS,
    VALUE,
    final_answer,
    last_box,
)
from flash.errors import ConfigError, RewardError, advice_for_extra

try:
    import math_verify  # pyright: ignore[reportMissingImports]
    import sympy  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
except ImportError as error:
    raise ConfigError(
        f"envs.rewards.math needs the package math-verify, which is not installed: {advice_for_extra('math')}"
    ) from error

MOST_CPU_S = 2.0
"""Processor seconds of one comparison; most take 0.05. Only a process's main thread can be interrupted."""

MOST_DIGITS = 10_000
"""Largest number of decimal digits of a number that is evaluated, and largest power of ten that a text may name."""

MOST_POWER = 300.0
"""Largest exponent of ten in an estimate of digits. Python raises OverflowError for `10 ** 309.0`."""

ROUNDED_DIGITS = 6
"""Number of digits from which a decimal may be a rounded fraction or root. A shorter decimal is exact."""

MOST_TERMS = 10_000
"""Largest number of terms of a sum or product that is evaluated."""

MOST_DEPTH = 25
"""Deepest nesting of brackets in an expression that is read. Each level doubles the time of math-verify's parser."""

MOST_SIDES = 6
"""Largest number of sides of an equation that are compared."""

_READING = math_verify.LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=replace(math_verify.LatexExtractionConfig().normalization_config, units=False),
)
"""Settings for math-verify's reading of a box. Without units: it would read the letter m as metres, also in algebra."""

_T = TypeVar("_T")

# -- reading it ------------------------------------------------------------------------------------------------------

# Commands without a meaning: sizes of brackets, styles, and thin blanks within numbers.
_NOTHING = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])|\\!\s?|\\,(?=\d{3})|\{\}|\\(?=\n)"
)
# Forms of the empty set.
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s?\\\}")
# Pictographs and emoji.
_PICTURES = re.compile("[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]")
# A decimal with a repeating part, such as `0.1\overline{6}`.
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s?(?:\{\s?(\d{1,20})\s?\}|(\d))")
# A number in another base, such as `101_2`.
_BASED = re.compile(r"([0-9A-Za-z]{1,100})\s?_\s?(?:\{\s?(\d{1,2})\s?\}|(\d))")
# Any run of blanks, also of LaTeX's.
_BLANK = re.compile(r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|[~\s])+")
# Commands that change only the appearance of their argument.
_WRAPPED = re.compile(
    r"\\(?:text|textnormal|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|operatorname|mbox|boxed|fbox|emph)\s?\{([^{}]*)\}"
)
# A currency before or after a number.
_CURRENCY = r"(?:US|CA|AU)?(?:\\?\$|[€£¥₹₩])|USD|EUR|GBP|Rs\.?"
_AROUND = re.compile(rf"(?P<sign>-?)\s?(?:{_CURRENCY})\s?(?P<of>[-\d.].*)|(?P<before>.*\d)\s?(?:{_CURRENCY})")
# Words before a number that do not change its value here.
_ABOUT = re.compile(r"(?:approximately|about|around|roughly|exactly|only|\\approx|\\sim)\s?", re.IGNORECASE)
# A complete text that is one number: a decimal, also with a power of ten, a fraction or a mixed number. Words such as
# `million` and a percent sign scale it.
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s?(?:
        (?P<decimal>{DIGITS}(?:\.\d*)?|\.\d+)
            (?:[eE](?P<e>[-+]?\d+)|\s?(?:\\times|\\cdot|\*|x)\s?10\s?\^\s?(?:\{{\s?(?P<p>[-+]?\d+)\s?\}}|(?P<q>[-+]?\d+)))?
        | (?:(?P<whole>\d+)\s)?(?P<above>{DIGITS}(?:\.\d+)?)\s?/\s?(?P<below>{DIGITS}(?:\.\d+)?)
        | (?P<whole_2>\d+)?\s?\\frac\s?(?:\{{\s?(?P<above_2>-?{DIGITS}(?:\.\d+)?)\s?\}}|(?P<above_3>\d))\s?
            (?:\{{\s?(?P<below_2>{DIGITS}(?:\.\d+)?)\s?\}}|(?P<below_3>\d))
    )(?:\s?(?P<scale>hundred|thousand|million|billion|trillion)s?)?
    (?P<percent>\s?(?:\\?%|percent(?:age)?|per\scent|pct))?""",
    re.VERBOSE,
)
# Powers of ten of the words that scale a number.
_SCALE = {"": 0, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# A number with a unit, such as `5 m^2` or `60 km/h`.
_EXPONENT = r"(?:\s?\^\s?\{?\s?-?\d\s?\}?)?"
_UNIT = re.compile(
    r"(?P<number>.*?[\d}%.!])(?:\s?\^\s?\{?\s?\\circ\s?\}?\s?[CFK]?|(?P<gap>\s?)"
    rf"(?P<words>[A-Za-zµμΩ]+\.?{_EXPONENT}(?:[ /*.'-]{{1,3}}[A-Za-zµμΩ]+\.?{_EXPONENT}){{0,6}}))"
)
_FOREIGN_UNIT = re.compile(
    r"(.*\d)\s?(?!.*[百千万亿億十半백천만억])[\u0400-\u04ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]{1,12}"
)
"""Pattern of a number with a unit or a counting word in other scripts. Words such as `万` are factors, not units."""
_UNITS = frozenset(
    """
    mm cm dm km nm um kg mg lb lbs oz ml mL dl cl kW MW kWh Hz kHz MHz GHz kJ kcal cal eV keV MeV Pa kPa atm bar mol
    sec secs min mins hr hrs ms ns ft yd mi mph kph kmh rpm rad deg st nd rd th am pm AM PM GB MB KB TB
    """.split()  # noqa: SIM905
)
"""Units with two or more letters, which may follow a number without a blank."""
_ONE_LETTER = frozenset("mshgNJWVAKCFLltTd")
"""Units with one letter. They need a blank before them, because `5m` would otherwise be 5."""
# Words that are no units, although they may follow a number.
_NO_UNIT = frozenset(
    """
    and or to not mod pi sqrt sin cos tan sec cot log ln exp plus minus times over divided infinity than if with gcd
    lcm max min hundred thousand million billion trillion percent per
    """.split()  # noqa: SIM905
)
_PLAIN_NAME = re.compile(rf"(?<![\\A-Za-z])(?:{'|'.join(PLAIN_NAMES)})(?![A-Za-z])")
"""Pattern of a key of `PLAIN_NAMES`."""
# A word of a sentence, and not a command or a variable.
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[Nn]o(?![A-Za-z]))")
# The begin or end of a LaTeX environment, such as a matrix.
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s?\{[a-z*]{1,20}\}(?:\{[lcr|]{1,20}\})?")
# The letter of a multiple-choice option, alone (`_LETTER`) or before the text of the option (`_CHOICE`).
_LETTER = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s)?(?:\(\s?([A-Ja-j])\s?\)|([A-J])\b(?![\s\w^+*/=-]))[).:]*"
)
_CHOICE = re.compile(rf"{_LETTER.pattern}(?:\s+[\w$\\(].*)?")
# The left side of an equation that defines a name: a variable, a function, a derivative or a phrase.
_NAME = re.compile(
    r"(?:\\?[A-Za-z]+(?:_\{?\w{1,10}\}?)?'?|[A-Za-z]'{0,2}\s?\([A-Za-z\d, -]{1,20}\)"
    r"|\\frac\{d[A-Za-z]?\}\{d[A-Za-z]\}|[A-Za-z][A-Za-z _-]{1,60})\s?"
)
# An equals sign or an implication, at which an equation is split.
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)|\\implies|\\Rightarrow")
# Signs of lists, relations and sets: a text with one of them is not split at its equals signs.
_RELATION = re.compile(r"[,;<>]|\\(?:le|ge|ne|in|begin|cup|pm)(?![A-Za-z])|\s(?:and|or)\s")
_GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega|angle)(?![A-Za-z])")
"""Pattern of the commands that are variables."""
_BINOMIAL = re.compile(r"\\[dt]?binom\s?\{([^{}]*)\}\s?\{([^{}]*)\}")
"""Pattern of a binomial coefficient."""


class _Number(NamedTuple):
    """Value of a written number."""

    value: Fraction
    """Exact value as written."""
    rounded: Fraction | None
    """Half a unit of the last digit, if the number is a decimal that may be rounded; else None."""


class _TooLong(BaseException):
    """Raised in a comparison that has used up its processor time. It is no Exception, which a library might catch."""


def _plain(text: str) -> str:
    """Return an answer or a reference without markup that only changes its appearance, for the comparison."""
    text = text.translate(SIGNS).strip()
    for _ in range(4):  # Wrapping commands nest.
        text = _WRAPPED.sub(r" \1 ", text)
    text = _PICTURES.sub("", _EMPTY.sub(r"\\emptyset ", _NOTHING.sub("", text)))
    text = _REPEATING.sub(_as_fraction, text.rstrip("\\ "))
    text = _BLANK.sub(" ", text).replace("{,}", ",")
    # One spelling of each command.
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
    text = re.sub(r"\\sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\(?:leq?|leqslant)(?![a-z])", r"\\le", re.sub(r"\\(?:geq?|geqslant)(?![a-z])", r"\\ge", text))
    # Brackets of LaTeX and dollar signs around the whole text, and then dollar signs around each part of a list. Such a
    # dollar sign is not a currency.
    text = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", text.strip(' *`"\n'))
    text = re.sub(r"^(\$\$?)((?:\\\$|[^$])+)\1(\s?(?:\\?%|percent|per cent)?)\.?$", r"\2\3", text.strip())
    text = re.sub(r"\$([^$]{1,200})\$(?=\s?(?:,|and|or|$))", r"\1", text) if text.count("$") > 1 else text
    return text.strip(' *`"\n').rstrip(".,;:").strip()


def _as_fraction(repeating: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: `0.1\\overline{6}` is 15/90. `repeating` is a match of `_REPEATING`."""
    whole, before, period = repeating[1], repeating[2], repeating[3] or repeating[4]
    above = int(whole + before + period) - int(whole + before or "0")
    return rf"\frac{{{above}}}{{{'9' * len(period) + '0' * len(before)}}}"


def _folded(text: str) -> str:
    """Return a text in the form in which two texts are compared: without blanks and dollar signs.

    The word `to`, as in a range, becomes a dash. A text with words of a sentence becomes lower case; formulas do not.
    """
    bare = re.sub(r"\s+to\s+", "-", text)
    bare = re.sub(r"[\s$]+", "", bare)
    return bare.casefold() if _is_words(text) else bare


def _is_words(text: str) -> bool:
    """Return True if a text has words of a sentence, and is not only a formula."""
    words = _WORD.findall(_ENVIRONMENT.sub("", text))
    return any(word.lower() not in FUNCTIONS and word not in PLAIN_NAMES for word in words)


def _number(text: str) -> _Number | None:
    """Return the value of a text that is one number.

    A word of `_ABOUT` at the beginning, a currency and a unit are skipped. A word of `_SCALE` and a percent sign scale
    the number.

    Returns None for any other text, for a division by 0, and for a number whose power of ten, scale included, is beyond
    `MOST_DIGITS`.
    """
    text = text[about.end() :] if (about := _ABOUT.match(text)) else text
    around = _AROUND.fullmatch(text)
    if around:
        text = around["before"] or f"{around['sign']}{around['of']}"
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return _number(bare) if (bare := _without_unit(text)) else None
    shift = _SCALE[found["scale"] or ""] - (2 if found["percent"] else 0)
    power = found["e"] or found["p"] or found["q"] or "0"
    if abs(shift + int(power)) > MOST_DIGITS:  # `int` is cheap: `_equal` lets no text beyond `MOST_CHARACTERS` get here
        return None
    factor = Fraction(10) ** (shift + int(power))
    sign = -1 if found["sign"] == "-" else 1
    if found["decimal"]:
        digits = re.sub(r"[ ,]|\\[,!]", "", found["decimal"])
        decimals = len(digits.partition(".")[2])
        # Zeros at the beginning do not count. A text with fewer digits is not a rounded value (`ROUNDED_DIGITS`).
        exact = not decimals or len(digits.replace(".", "").lstrip("0")) < ROUNDED_DIGITS
        return _Number(sign * Fraction(digits) * factor, None if exact else factor / (2 * 10**decimals))
    above, below = (
        Fraction(re.sub(r"[ ,]|\\[,!]", "", found[name] or found[f"{name}_2"] or found[f"{name}_3"]))
        for name in ("above", "below")
    )
    whole = int(found["whole"] or found["whole_2"] or 0)
    return _Number(sign * (whole + above / below) * factor, None) if below else None


def _without_unit(text: str) -> str | None:
    """Return the number before a unit, as text; None if the text does not end with a unit.

    A sign of degrees is always a unit, and so is a word in a script of `_FOREIGN_UNIT`. Without a blank before it, any
    other unit must consist of known units, the first one with several letters. After a blank, up to six known units or
    other words are accepted, except the words of `_NO_UNIT` and unknown letters other than `a`.
    """
    if foreign := _FOREIGN_UNIT.fullmatch(text):
        return foreign[1]
    found = _UNIT.fullmatch(text)
    if found is None:
        return None
    if found["words"] is None:  # Degrees.
        return found["number"]
    words = re.findall(r"[A-Za-zµμΩ]+", found["words"])
    # More than six words are a sentence and not a unit.
    if len(words) > 6 or not _NO_UNIT.isdisjoint(word.lower() for word in words[:-1]) or words[-1].lower() in _NO_UNIT:
        return None
    known = all(word in _UNITS or word in _ONE_LETTER for word in words)
    if not found["gap"]:
        return found["number"] if known and words[0] in _UNITS else None
    return (
        found["number"] if known or all(len(word) > 1 or word in _ONE_LETTER or word == "a" for word in words) else None
    )


# -- comparing -------------------------------------------------------------------------------------------------------


def math_equal(completion: str, answer: str) -> float:
    r"""Return 1.0 if the final answer of a completion equals the reference, else 0.0. No answer is a wrong answer.

    The reference `answer` is a bare answer, a text with a last box, or a solution that ends in `#### 42`. If it has
    both, the text after `####` counts.

    Raises:
        RewardError: the reference is empty, or reading it takes too much time.
    """
    box = last_box(answer)
    written = answer.rpartition("####")[2] if "####" in answer else answer if box is None else box
    if not (reference := _plain(written)):
        raise RewardError(f"the reference answer {answer!r} cannot be read as mathematics")
    found = final_answer(completion)
    return float(found is not None and _equal(_plain(found), reference))


def _equal(found: str, reference: str) -> bool:
    """Return True if an answer equals the reference, as text, choice, number, equation or expression.

    Both are texts that `_plain` has returned. Raises RewardError as `_same_expression` does.
    """
    if _folded(found) == _folded(reference):
        return True
    if max(len(found), len(reference)) > MOST_CHARACTERS:
        return False
    # A multiple-choice reference needs that letter; for another reference, a letter before the answer is skipped.
    choice = _CHOICE.fullmatch(found)
    if letter := _LETTER.fullmatch(reference):
        return choice is not None and _letter(choice) == _letter(letter)
    if choice and (label := _LETTER.match(found)):
        return _equal(found[label.end() :].strip(), reference)
    # A sentence counts as its only number. A text that is this number is not judged again without end.
    if _is_words(found) and not _is_words(reference) and _number(found) is None:
        spoken = [value[0].strip() for value in VALUE.finditer(found)]
        return len(spoken) == 1 and spoken != [found] and "not " not in found and _equal(spoken[0], reference)
    # Equations: if both define a variable of one letter, it must be the same one. All sides must have the same value.
    name, values = _sides(found)
    wanted_name, wanted = _sides(reference)
    simple = [_NAME.fullmatch(one) is not None for one in (name, wanted_name) if one]
    # The left side of a reference may matter, as in `x^2 + y^2 = 1`. Then math-verify compares the complete equations.
    if len(wanted) > 1 or (wanted_name and (len(values) > 1 or not all(simple))):
        return _same_expression(found, reference)
    if len(name) == len(wanted_name) == 1 and name != wanted_name:
        return False
    return all(map(_same_value, values, [*values[1:], *wanted]))


def _letter(choice: re.Match[str]) -> str:
    """Return the letter of a matched multiple-choice option."""
    return (choice[1] or choice[2]).upper()


def _sides(text: str) -> tuple[str, list[str]]:
    """Return the name that an equation defines, and its other sides: of `x = 2 + 3 = 5`, `x` and the two values.

    The name is empty if there is none. A text that is no equation, or a relation or list, is one side. Of more than
    `MOST_SIDES` sides, the last ones are returned.
    """
    if _RELATION.search(text):
        return "", [text]
    # The equals sign in `\sum_{k=1}` does not make an equation.
    text = re.sub(r"_\s?\{[^{}]*\}", lambda below: below[0].replace("=", "\0"), text)
    parts = [side.replace("\0", "=") for part in _EQUALS.split(text) if (side := part.strip())]
    # The exact side counts, as in `x = \frac{1}{3} \approx 0.33`. If the exact side is a name, the rounded value counts
    # too.
    exact, about, rounded = parts[-1].partition("\\approx") if parts else ("", "", "")
    if about and exact.strip() and rounded.strip():
        parts[-1:] = [exact.strip(), rounded.strip()] if _has_letters(exact) else [exact.strip()]
    name = ""
    # Sides before the value: names, and expressions with variables if the last side is a number.
    while len(parts) > 1 and _has_letters(parts[0]) and (_NAME.fullmatch(parts[0]) or not _has_letters(parts[-1])):
        name = parts.pop(0)
    # The name may also be on the right: `5 = x`.
    if len(parts) > 1 and re.fullmatch(r"[A-Za-z]", parts[-1]):
        name = parts.pop()
    return name, parts[-MOST_SIDES:] or [text]


def _has_letters(text: str) -> bool:
    """Return True if a text has variables."""
    return re.search(r"[A-Za-z]", COMMAND.sub("", text)) is not None or _GREEK.search(text) is not None


def _same_value(found: str, reference: str) -> bool:
    """Return True if two texts are equal as texts, numbers or expressions. One of them may be a rounded decimal.

    Raises RewardError as `_same_expression` does.
    """
    if _folded(found) == _folded(reference):
        return True
    ours, theirs = _BASED.fullmatch(found), _BASED.fullmatch(reference)
    if ours and theirs and found[0].isdigit() and reference[0].isdigit():
        return _in_base(ours) == _in_base(theirs)
    one, other = _number(found), _number(reference)
    if one is None or other is None:
        return _same_expression(found, reference)
    if one.value == other.value:
        return True
    # A decimal may be a rounded fraction, but not a rounded form of another decimal.
    roundings = [number.rounded for number in (one, other) if number.rounded is not None]
    return len(roundings) == 1 and abs(one.value - other.value) <= roundings[0]


def _in_base(number: re.Match[str]) -> int | str:
    """Return the value of a number such as `101_2`; its text if the digits are invalid in that base."""
    try:
        return int(number[1], int(number[2] or number[3]))
    except ValueError:
        return number[0]


def _same_expression(found: str, reference: str) -> bool:
    """Return True if math-verify finds both formulas equal in value.

    Returns False also if one of them cannot be read or is too large, or if the comparison takes more than `MOST_CPU_S`.

    Raises:
        RewardError: reading the reference takes more than `MOST_CPU_S`.
    """
    ours, theirs = _latex(found), _latex(reference)
    if ours is None or theirs is None:
        return False
    try:
        wanted = _bounded(_parsed, theirs)
    except TimeoutError:
        raise RewardError(f"the reference {reference!r} takes more than {MOST_CPU_S:g} s to be read") from None
    if wanted is None or math.isinf(_digits(wanted)):
        return False
    rounded = next((number.rounded for text in (found, reference) if (number := _number(text))), None)
    try:
        return _bounded(_verified, ours, wanted, rounded)
    except TimeoutError:
        return False


def _verified(latex: str, wanted: Any, rounded: Fraction | None) -> bool:
    """Return True if a formula has the wanted value. Runs under `_bounded`, which limits its time.

    `wanted` is the reference as a sympy object. `rounded` is the tolerance if one of the two is a decimal that may be
    rounded; None: they must be equal, apart from errors of floating point.
    """
    try:
        found = _parsed(latex)
        if found is None or math.isinf(_digits(found)):
            return False
        values = [one.doit() for one in (found, wanted) if isinstance(one, sympy.Expr)]
        if len(values) == 2 and all(value.is_number and value.is_finite for value in values):
            ours, theirs = values
            if ours.is_Rational and theirs.is_Rational and rounded is None:
                return bool(ours == theirs)
            # math-verify rounds the difference of two numbers to 15 decimals, so that all tiny numbers would be equal.
            apart, size = (abs(sympy.N(one, 40)) for one in (ours - theirs, abs(ours) + abs(theirs)))
            inexact = any(value.has(sympy.Float) for value in values)
            return bool(apart <= (rounded or size * sympy.Float(1e-12 if inexact else 1e-30)))
        return bool(math_verify.verify([wanted], [found], timeout_seconds=None, allow_set_relation_comp=True))
    except Exception:  # math-verify and sympy raise many kinds of errors for formulas that they cannot handle
        return False


@functools.lru_cache(maxsize=256)
def _parsed(latex: str) -> Any:
    """Return the unevaluated sympy object that math-verify reads in a formula; None if it reads none.

    The results are kept, because all samples of a problem are compared with one reference.
    """
    found = math_verify.parse(f"\\boxed{{{latex}}}", [_READING], fallback_mode="no_fallback", parsing_timeout=0)
    return found[0] if found else None


def _latex(text: str) -> str | None:
    """Return an answer as a formula for math-verify, or None if math-verify must not read it.

    None is returned for words, which it would read as products of letters, and for text without a letter or digit.
    Formulas that are too long, nested too deeply or costly to read are refused, too.
    """
    text = re.sub(r"\s(?:and|or)\s", ", ", text).replace("**", "^")
    # Functions and symbols that are written without a backslash.
    text = re.sub(r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|exp|sqrt)(?![A-Za-z])", r"\\\1 ", text)
    text = _PLAIN_NAME.sub(lambda name: f"\\{PLAIN_NAMES[name[0]]} ", text)
    text = re.sub(r"\\sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\s?\\?%", r"\\cdot\\frac{1}{100}", text)
    if len(text) > MOST_CHARACTERS or _is_words(text) or not re.search(r"\w", text) or _depth(text) > MOST_DEPTH:
        return None
    # math-verify evaluates binomials, gcd and lcm while it reads them, so large ones are refused here.
    binomials = _BINOMIAL.findall(text)
    if len(re.findall(r"binom|\\choose", text)) > len(binomials) or re.search(r"\^|!|\d{6}", str(binomials)):
        return None
    return None if re.search(r"gcd|lcm", text) and re.search(r"\^|!", text) else text


def _depth(text: str) -> int:
    """Return the depth to which brackets nest; 0 without brackets."""
    steps = (1 if sign in "([{" else -1 for sign in text if sign in "()[]{}")
    return max(itertools.accumulate(steps), default=0)


def _digits(found: Any) -> float:
    """Return an estimate of the decimal digits that sympy would compute exactly; infinite if they are too many.

    Sums, products, powers and factorials grow when they are evaluated. Other functions, such as `exp`, count as little
    more than their arguments, because sympy keeps them as they are.
    """
    if isinstance(found, sympy.MatrixBase):
        return max(map(_digits, found.flat()), default=0.0)
    if not isinstance(found, sympy.Basic):
        return 0.0
    if isinstance(found, sympy.Rational):
        return max(abs(int(found.p)), int(found.q)).bit_length() * math.log10(2)
    if isinstance(found, sympy.Float):
        # sympy keeps only the precision of a Float, but as an exponent its magnitude counts. `math.log10` would turn a
        # tiny Float into 0.0, and fail.
        return abs(float(sympy.log(abs(found)))) / math.log(10) if found else 0.0
    if isinstance(found, (sympy.Sum, sympy.Product)):
        # Digits of the limits, so about the logarithms of the numbers of terms.
        bounds = [max(map(_digits, tuple(limit)[1:]), default=0.0) for limit in found.limits]
        if max(bounds) > math.log10(MOST_TERMS):
            return math.inf
        digits = _digits(found.function) * 10 ** sum(bounds)
    else:
        parts = [*map(_digits, found.args)]
        most = max(parts, default=0.0)
        if isinstance(found, sympy.Pow):
            digits = max(parts[0], 1.0) * 10 ** min(parts[1], MOST_POWER)
        elif isinstance(found, (sympy.factorial, sympy.factorial2, sympy.subfactorial, sympy.gamma)):
            digits = (most + 1) * 10 ** min(most, MOST_POWER)
        else:
            digits = sum(parts) + 1
    return digits if digits <= MOST_DIGITS else math.inf


def _bounded(call: Callable[..., _T], *arguments: object) -> _T:
    """Call a function, which may use `MOST_CPU_S` of processor time, and return its result.

    Processor time proves that the call itself is slow, because a busy machine does not add to it. Outside of the main
    thread the call has no limit.

    Raises:
        TimeoutError: the call used more processor time.
        Exception: an error of the call.
    """
    # Only the main thread may set a signal handler. In workers of `envs.rewards.verifier` it is always that thread.
    if threading.current_thread() is not threading.main_thread():
        return call(*arguments)
    running = True

    def stop(*_: object) -> None:
        """Interrupt the call. A signal that arrives after its end is ignored."""
        if running:
            raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    # The timer repeats, because a library may have caught the first exception.
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S, MOST_CPU_S / 10)
    try:
        return call(*arguments)
    except _TooLong:
        raise TimeoutError from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
