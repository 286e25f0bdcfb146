r"""Find the final answer in a worked solution, in linear time.

`envs.rewards.math` compares the answer with the reference. Both modules use the patterns of numbers and words here.
Every pattern takes linear time on any text, because repetitions that could overlap are bounded.
"""

from __future__ import annotations

import re

from envs.judging.programs import answer_part, final_part

MOST_CHARACTERS = 600
"""Longest expression or number that is read, in characters. A longer one is equal only to the same text."""

MOST_WORDLESS = 100
"""Longest text without numbers, in characters, that is an answer by itself, such as `B` or `Paris`."""

SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\ufe63\uff0d\u2013\u2010\u2011", "-"),
        **dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f", " "),
        **dict.fromkeys("÷\u2044\u2215", "/"),
        **dict.fromkeys("\u200b\ufeff", ""),
        **dict.fromkeys("“”", '"'),
        **dict.fromkeys("·⋅", r"\cdot "),
        "×": r"\times ",
        "％": "%",
        "’": "'",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt",
        "°": r"^\circ",
        "²": "^2",
        "³": "^3",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
    }
)
"""Unicode characters with several forms, each with its ASCII or LaTeX form."""

# The start of a box (`\boxed{`, or a box without braces as `bare`), an escaped character, or a plain brace.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,3}(?:\{|(?P<bare>[-+]?[\w.,/]{1,40}))|\\.|[{}]", re.DOTALL)
# A character that makes the content of a box an answer.
_FILLED = re.compile(r"[^ \n\t$.,]")
# GSM8K's mark of the final answer, and the rest of its line.
_MARKED = re.compile(r"(?<!#)####(?!#)\s{0,4}([^\n]*)")
# A heading of Markdown, which begins with the same mark: words, or a number and words.
_HEADING = re.compile(r"[*_ ]*(?:\d{1,3}[.)][ \t]+[A-Za-z]|[A-Za-z]{2})")
# Blanks up to the end of the text.
_BLANK_REST = re.compile(r"\s*\Z")
# Phrases before an answer, such as "the final answer is" or "Answer:".
_ANSWER_IS = re.compile(
    r"\banswer\b[*_]{0,3}(?:[ \t]{1,3}[\w$\\]{1,20}){0,6}?[ \t]{0,3}"
    r"(?:(?:[*_]{0,3}:|=|\b(?:is|are|equals|would be)\b)[ \t]{0,3}[:*_]{0,4})",
    re.IGNORECASE,
)
_BETWEEN = re.compile(
    r"(?:[\s$,;&]|\\[,;:!()\[\] ]|\\q?quad(?![A-Za-z])|\b(?:and|or)\b|\\text\{\s{0,3}(?:and|or)\s{0,3}\})*"
)
"""Pattern of the text between boxes that form one list."""
WIDEST_BETWEEN = 40
"""Longest text between two boxes of a list, in characters."""
MOST_LISTED = 64
"""Largest number of different contents in one list of boxes."""
_EXPRESSION = re.compile(r"(?=.*[+*/^(){}\[\],\\|=]|-?\w+ - \w+)[-+(\[{\\|\w.][-\w +*/^(){}\[\].,!|\\:=]*")
"""Pattern of a line of operators, names and numbers that is more than a number."""
# The end of an answer within a line: the end of a sentence, or a word that begins a reason.
_CLAUSE_END = re.compile(
    r"[.!?;]+['\"*_)]{0,4}(?=\s|$)|[\s,]\(?(?:because|since|as|so|which|where|when|but|after|hence|thus|i\.e\.|given)\b"
)

DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\[,!]|[ ])\d{3})+(?!\d)|\d+)"
"""Part of patterns: digits with or without separators of thousands."""
# Further parts: a decimal; the argument of a command; one value, such as a decimal, a fraction, a root or π, with its
# exponent; an operator between two values.
_DECIMAL = rf"(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+(?!\w))?"
_PART = r"(?:\{[^{}]{1,60}\}|\d)"
_ATOM = (
    rf"(?:{_DECIMAL}|\\[dtc]?frac[ ]?{_PART}[ ]?{_PART}|\\sqrt(?:\[\d{{1,3}}\])?[ ]?{_PART}|\\pi(?![a-z]))"
    rf"(?:[ ]?!|[ ]?\^[ ]?(?:\{{[^{{}}]{{1,60}}\}}|-?\d{{1,20}}))?"
)
_OPERATOR = r"""
    [ ]{0,2}(?:[-+/*:]|\\times|\\cdot|\\div)[ ]{0,2}-?  # a sign
    | [ ]{1,2}x[ ]{1,2}
    | [ ]?(?=\\)  # nothing, before a root or a fraction
    | [ ](?=\d+[ ]?/)  # a mixed number
"""
VALUE = re.compile(
    rf"""(?:(?<![\w)}}])-[ ]?)?(?<![\w^.])(?:\\?\$[ ]?)?{_ATOM}(?:(?:{_OPERATOR}){_ATOM})*
    (?:[ ]?\\?%|[ ](?:percent|percentage|per[ ]cent|pct)\b)?""",
    re.VERBOSE,
)
"""Pattern of the numbers in running text, with the operators between them."""

# Two numbers with a dash, which are a range and not a difference.
_RANGE = re.compile(rf"({_DECIMAL})-({_DECIMAL})")
# A formula between dollar signs, or in LaTeX's brackets for formulas.
_INSIDE = r"((?:[^\\]|\\(?![()\[\]])){1,1000})"
_MATH = re.compile(
    rf"\$\$([^$]{{1,1000}})\$\$|(?<!\\)\$((?:\\\$|[^$\n]){{1,1000}})\$|\\\({_INSIDE}\\\)|\\\[{_INSIDE}\\\]",
    re.DOTALL,
)
COMMAND = re.compile(r"\\[A-Za-z]+")
"""Pattern of a LaTeX command."""
FUNCTIONS = frozenset(
    """
    and sin cos tan sec csc cot log exp sqrt max min gcd lcm det mod arcsin arccos arctan sinh cosh
    """.split()  # noqa: SIM905
)
"""Words that are part of a formula."""
PLAIN_NAMES = {
    **{
        name: name
        for name in ("pi", "alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "sigma", "phi", "omega")
    },
    **dict.fromkeys(("infinity", "Infinity", "infty", "oo"), "infty"),
}
"""Names of symbols that are written without a backslash, with the command for each."""


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a text, as it is written there but for the signs that `SIGNS` replaces; None if none.

    Only the text after the reasoning counts, and of that the last `<answer>…</answer>`. The places of the answer are
    tried in this order: after `####`; the last complete `\boxed{…}` that is not empty; after "answer is"; the complete
    text if it is one expression; the last number; the complete text if it is short and has no number. Boxes with only
    commas or "and" between them form one list. If all boxes are empty or unclosed, there is no answer: numbers outside
    of them do not count. Nor is there one after "the answer is not".
    """
    text = final_part(text)
    inside = answer_part(text)
    text = (text if inside is None else inside).translate(SIGNS)
    # A heading of Markdown has the mark too, unless it ends the text.
    for mark in reversed([*_MARKED.finditer(text)]):
        line = mark[1].strip()
        if line and (not _HEADING.match(line) or _BLANK_REST.match(text, mark.end())):
            return _clause(line)
    if (box := last_box(text)) is not None:
        return box or None
    for said in reversed([*_ANSWER_IS.finditer(text)]):
        rest = text[said.end() : said.end() + 2 * MOST_CHARACTERS].lstrip(" \t\n*_:")
        if clause := _clause(rest):
            return None if clause.startswith("not ") else clause
    stripped = text.strip(" \n\t*`.")
    return stripped if _is_expression(stripped) else _last_value(text)


def last_box(text: str) -> str | None:
    """Return the content of the complete, non-empty box that ends last.

    Boxes with only separators between them form a list. It counts as one box, whose contents are separated by commas.
    After `MOST_LISTED` contents a new list begins. The result is empty if all boxes are empty or unclosed, and None if
    the text opens no box.
    """
    stack: list[tuple[int, int]] = []  # starts of each open brace or box and of its content; -1 for a plain brace
    opened, last_end = False, 0
    # Start and end of each content in the list that the last box belongs to. The contents themselves are not copied:
    # nested boxes would need quadratic time and memory.
    listed: list[tuple[int, int]] = []

    def close(start: int, begin: int, until: int, end: int) -> None:
        """Record the box from `start` to `end`, whose content is from `begin` to `until`, in this list or a new one."""
        nonlocal last_end
        between = text[last_end:start] if last_end <= start <= last_end + WIDEST_BETWEEN else "-"
        if not (0 < len(listed) < MOST_LISTED and _BETWEEN.fullmatch(between)):
            listed[:] = [(begin, until)]
        # A content that is in the list already is not repeated, because solutions often box an answer twice.
        elif not any(until - begin == last - first and text[begin:until] == text[first:last] for first, last in listed):
            listed.append((begin, until))
        last_end = end

    for token in _BRACE.finditer(text):
        sign = token[0]
        if token["bare"]:
            opened = True
            close(token.start(), *token.span("bare"), token.end())
        elif sign in ("{", "}") or sign.startswith(("\\boxed", "\\fbox")):
            if sign != "}":
                opened = opened or sign != "{"
                stack.append((token.start(), -1 if sign == "{" else token.end()))
            elif stack:
                start, begin = stack.pop()
                if begin >= 0 and _FILLED.search(text, begin, token.start()):
                    close(start, begin, token.start(), token.end())
    return ", ".join(text[first:last] for first, last in listed) if opened else None


def _is_expression(text: str) -> bool:
    """Return True if a text is one formula or list, such as `3x + 1` or `(3, 4)`, and not a sentence with a number."""
    if len(text) > MOST_WORDLESS or not _EXPRESSION.fullmatch(text):
        return False
    words = re.findall(r"[A-Za-z]{2,}", COMMAND.sub("", text))
    return all(word.lower() in FUNCTIONS or word in PLAIN_NAMES for word in words)


def _clause(text: str) -> str:
    """Return the answer at the beginning of a text: the formula that the text begins with, or the first sentence.

    A first formula before a comma, "and" or "or" is part of a list, so the sentence is returned. A sentence with one
    formula, and with no number outside of it, counts as that formula.
    """
    line = text[: 2 * MOST_CHARACTERS].lstrip("*_ \t")  # twice: markup around the answer is removed later
    formula = _MATH.match(line)
    if formula and not re.match(r"[*_ ]{0,4}(?:,|and\b|or\b)", line[formula.end() :]):
        return _with_percent(line, formula)
    line = line.partition("\n")[0]
    end = _CLAUSE_END.search(line)
    clause = (line[: end.start()] if end else line).strip("*_ \t,")
    formulas = [*_MATH.finditer(clause)]
    if len(formulas) == 1 and not re.search(r"\d", clause[: formulas[0].start()] + clause[formulas[0].end() :]):
        return formulas[0][0]
    return clause


def _with_percent(text: str, formula: re.Match[str]) -> str:
    """Return a formula, with the percent sign that may follow it in the text."""
    percent = re.compile(r"\s?(?:\\?%|percent\b|per cent\b|pct\b)").match(text, formula.end())
    return formula[0] + (percent[0] if percent else "")


def _last_value(text: str) -> str | None:
    """Return the last number of a text, or the formula that contains it. A range such as `3-5` becomes `3 to 5`.

    A text without numbers is returned as it is; None if it is empty, has several lines, or is longer than
    `MOST_WORDLESS` characters.
    """
    # A digit right after a command, as in `\frac12`, would not begin a number.
    text = re.sub(r"\\([A-Za-z]{1,20})(?=\d)", r"\\\1 ", text)
    values = [*VALUE.finditer(text)]
    if not values:
        text = text.strip()
        return text if 0 < len(text) <= MOST_WORDLESS and "\n" not in text else None
    last = values[-1]
    for formula in _MATH.finditer(text):
        if formula.start() <= last.start() and last.end() <= formula.end():
            return _with_percent(text, formula)
    ends = _RANGE.fullmatch(last[0])
    return f"{ends[1]} to {ends[2]}" if ends else last[0]
