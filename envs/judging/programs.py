"""Programs in answers: the fenced blocks of a text, and which of them is graded.

Only what follows the reasoning counts, and of that the part in `<answer>` tags where there are any. Blocks named by the
language come first, the last of them before the others; unnamed blocks count only where none is named, and words
without a block only where there is no block at all. Where that leaves a choice, `envs.judging.chooser` makes it in the
sandbox, with the parser of the language: reading a text that a model wrote can take any time.

Everything here is linear in the answer: it runs on the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CHOOSER = Path(__file__).with_name("chooser.py").read_text(encoding="utf-8")
"""The source of the chooser, which is given to the Python of the sandbox."""

MOST_BLOCKS = 12
"""Blocks of an answer that are looked at, the last ones."""
MOST_FENCES = 256
"""Lines that may begin or end a block that are looked at, the last ones."""
MOST_ENDS = 4
"""Lines at which one block may end that are tried."""

END_OF_THOUGHT = ("</think>", "</thinking>", "</thought>", "</reasoning>", "</seed:think>", "[/THINK]")
START_OF_THOUGHT = ("<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[THINK]")
ANSWER_TAGS = (("<answer>", "</answer>"), ("<solution>", "</solution>"))
QUOTES = "\"'`"
"""A tag behind one of these characters is a text of the program."""

CONTAINER = re.compile(r"[\s>]*(?:[-*+]\s+|\d{1,9}[.)]\s+)?[\s>]*\Z")
"""Precedes a fence within a quotation or a list."""
WIDEST_CONTAINER = 80
"""Characters of it that are looked at: the pattern takes their square."""
QUOTATION = re.compile(r"\s{0,3}>\s?")
ODD_MARKS = "\u00b4\u2018\u2019\u02cb'["
"""Characters with which other fences begin."""
ODD_FENCE = re.compile(r"([\u00b4\u2018\u2019\u02cb]{3,}|'{3,})([^'\u00b4\u2018\u2019\u02cb]*)\Z")
"""A fence of characters that typography puts in the place of backticks."""
WORDS = re.compile(r"[^\s,:;={}()\[\]|\"'<>/\\]+")
IGNORED_WORDS = frozenset({"lang", "language", "code", "code-block", "code-cell", "sourcecode", "solution", "answer"})
"""Words of a block's name that name no language."""
INLINE = re.compile(r"```([^`\n]+)```")
ODD = re.compile(r"[\u201c\u201d\u2018\u2019\u00a0\u200b\ufeff]|^[ \t]*(?:>>>|%|!)|\A\s", re.MULTILINE)
"""Shows a program that was typeset, indented or copied from a console."""


class Fence(NamedTuple):
    """A line that may begin or end a block."""

    line: int
    before: str
    """Text in front of the marks."""
    marks: str
    info: str
    """Text behind the marks."""
    named: bool | None
    """True if that is a name of the language; None if it names no language at all."""

    @property
    def clean(self) -> bool:
        """True if nothing but the marks of a list or a quotation is in front."""
        return len(self.before) <= WIDEST_CONTAINER and CONTAINER.match(self.before) is not None

    @property
    def ends_only(self) -> bool:
        """True if it cannot begin a block: it has no name, or a sentence behind it."""
        return not self.info or (not self.named and " " in self.info)


class Block(NamedTuple):
    """A fenced block and the texts that it may be, the most likely first."""

    named: bool
    texts: list[str]
    closed: bool = True


def final_part(answer: str) -> str:
    """Return the text of an answer behind its reasoning; empty if it does not come to the end of that."""
    text = answer.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    ends = [at + len(tag) for tag in END_OF_THOUGHT if (at := _rfind_tag(text, tag)) >= 0]
    if ends:
        return text[max(ends) :]
    return "" if text.lstrip().startswith(START_OF_THOUGHT) else text


class Found(NamedTuple):
    """The blocks of an answer that may be its program, the best first; none if there is no program."""

    blocks: list[list[str]]
    """For each block the texts that it may be, the most likely first."""
    certain: bool
    """True if there is nothing to choose."""


def find_blocks(answer: str, names: Sequence[str]) -> Found:
    """Find what may be a program in the language of these names. An answer without a fence is one block."""
    text = final_part(answer)
    lines, fences = _scan(text, names)
    blocks = _fenced(lines, fences)
    inside = answer_part(text)
    if inside is not None:
        blocks = _fenced(*_scan(inside, names)) or [Block(False, [inside.strip("\n")]), *blocks]
    elif not any(block.named for block in blocks):
        blocks = [*blocks, *_head(lines, fences)] or _inline(text, names)
    if not blocks:
        marks = {fence.line for fence in fences}
        words = "\n".join(line for at, line in enumerate(lines) if at not in marks).strip()
        # Words may stand around the program, unless there is but one line.
        return Found([[text.strip("\n")]] if words else [], "\n" not in words)
    sure = len(blocks) == len(blocks[0].texts) == 1 and blocks[0].closed and not ODD.search(blocks[0].texts[0])
    return Found([block.texts for block in blocks], sure)


def last_block(answer: str, names: Sequence[str]) -> str | None:
    """Return the last fenced block named by one of `names`, or by none if no block is; None without such a block."""
    blocks = _fenced(*_scan(final_part(answer), names))
    return blocks[0].texts[0] if blocks else None


def question_of(found: Found, calls: Sequence[str], provided: Sequence[str], *, prints: bool, reads: bool) -> bytes:
    """Return the input of the chooser."""
    asked = {"blocks": found.blocks, "calls": calls, "prints": prints, "reads": reads, "provided": provided}
    return json.dumps(asked).encode()


def _head(lines: list[str], fences: list[Fence]) -> list[Block]:
    """Return the text before the first fence where that has no name: the prompt may have begun the block it ends."""
    if not fences or fences[0].info:
        return []
    head = "\n".join([*lines[: fences[0].line], fences[0].before]).strip("\n")
    return [Block(False, [head])] if head.strip() else []


def _inline(text: str, names: Sequence[str]) -> list[Block]:
    """Return the programs that begin and end on one line."""
    blocks: list[Block] = []
    for span in INLINE.findall(text)[-MOST_BLOCKS:]:
        name, _, rest = span.strip().partition(" ")
        named = bool(rest.strip()) and _is_language(name, names)
        blocks.append(Block(bool(named), [rest.strip() if named else span.strip()]))
    return [block for block in blocks[::-1] if block.named] or blocks[::-1]


def _rfind_tag(text: str, tag: str, end: int | None = None) -> int:
    """Return the last place of a tag that is not quoted; -1 without one."""
    at = text.rfind(tag, 0, end)
    while at > 0 and text[at - 1] in QUOTES and text[max(at - 3, 0) : at] != "```":
        at = text.rfind(tag, 0, at)
    return at


def answer_part(text: str) -> str | None:
    """Return the text in the last answer tags; None without one."""
    for opening, closing in ANSWER_TAGS:
        end = _rfind_tag(text, closing)
        start = _rfind_tag(text, opening, None if end < 0 else end)
        # A tag that is only spoken of stands within a line.
        if start >= 0 and (end >= 0 or text[:start].rpartition("\n")[2].strip() == ""):
            inside = text[start + len(opening) : len(text) if end < 0 else end]
            if inside.strip():
                return inside
    return None


def _is_language(info: str, names: Sequence[str]) -> bool | None:
    """Return True if the name of a block is one of a language; None if it names no language at all."""
    words = [word.lower().removeprefix("language-").removeprefix("lang-") for word in WORDS.findall(info)]
    words = [word.lstrip(".#") for word in words]
    words = [word for word in words if word and word not in IGNORED_WORDS]
    if not words:
        return None
    known = {_core(name) for name in names}
    return _core(words[0]) in known or _core(words[0].rpartition(".")[2]) in known


def _core(name: str) -> str:
    """Return the name of a language without its version."""
    return name.lower().rstrip("0123456789.-_*")


def _scan(text: str, names: Sequence[str]) -> tuple[list[str], list[Fence]]:
    """Return the lines of a text, and the last ones of them that may begin or end a block."""
    lines = text.split("\n")
    places: list[int] = []
    for place in range(len(lines) - 1, -1, -1):
        line = lines[place]
        if line and ("```" in line or "~~~" in line or line.lstrip()[:1] in ODD_MARKS):
            places.append(place)
            if len(places) == MOST_FENCES:
                break
    fences: list[Fence] = []
    odd = ""
    for place in reversed(places):
        line = lines[place].rstrip()
        at = max(line.rfind("```"), line.rfind("~~~"))
        if at >= 0:
            start = len(line[:at].rstrip(line[at]))
            before, marks, info = line[:start], line[start : at + 3], line[at + 3 :].strip()
            if "`" not in info and marks not in before:
                fences.append(Fence(place, before, marks, info, _is_language(info, names)))
            continue
        bare = line.strip()
        if bare in ("[PYTHON]", "[/PYTHON]"):
            info = "python" if bare == "[PYTHON]" else ""
            fences.append(Fence(place, "", "[]" * 2, info, _is_language(info, names)))
        elif (match := ODD_FENCE.match(bare)) and ((named := _is_language(match[2], names)) or (odd and bare == odd)):
            # Three quotes begin a text of a program as well: they are a fence only with the name of the language.
            odd = "" if odd else match[1]
            fences.append(Fence(place, line[: line.index(match[1])], match[1], match[2].strip(), named))
    return lines, fences


def _fenced(lines: list[str], fences: list[Fence]) -> list[Block]:
    """Return the blocks named by the language, or else those named by nothing: the last first, no empty one."""
    spans: list[tuple[bool, int, int]] = []
    place = 0
    while place < len(fences):
        opening = fences[place]
        end = _closing(fences, place)
        if opening.named or (opening.named is None and (opening.clean or not opening.info)):
            spans.append((bool(opening.named), place, end))
        # A fence that is never closed may be no fence, and must not hide the blocks behind it.
        place = place + 1 if end == len(fences) else end + fences[end].ends_only
    for wanted in (True, False):
        blocks: list[Block] = []
        for named, place, end in reversed(spans):
            if named == wanted and len(blocks) < MOST_BLOCKS and (texts := _texts(lines, fences, place, end)):
                blocks.append(Block(named, texts, end < len(fences)))
        if blocks:
            return blocks
    return []


def _closing(fences: list[Fence], place: int) -> int:
    """Return the place of the fence that ends the block opened at `place`; the number of fences if none does."""
    opening = fences[place]
    indent = len(opening.before) if opening.clean else 0
    for at in range(place + 1, len(fences)):
        fence = fences[at]
        if fence.marks[0] != opening.marks[0] or len(fence.marks) < len(opening.marks):
            continue
        if fence.clean and len(fence.before) > indent + 3:
            continue  # It stands within a text of the program.
        if not fence.info or ((fence.ends_only or fence.named) and fence.clean):
            return at
    return len(fences)


def _texts(lines: list[str], fences: list[Fence], place: int, end: int) -> list[str]:
    """Return the texts that a block may be: up to its end, and up to other fences, which may be the program's own."""
    opening = fences[place]
    others = [fence for at, fence in enumerate(fences[place + 1 :], place + 1) if at != end][:MOST_ENDS]
    first = fences[end] if end < len(fences) else None
    rest = opening.info.partition(" ")[2].strip()
    texts: list[str] = []
    for fence in [first, *others]:
        body = lines[opening.line + 1 : len(lines) if fence is None else fence.line]
        if fence is not None and not fence.clean and not fence.info:
            body = [*body, fence.before]
        text = "\n".join(_inner(body, opening)).strip("\n")
        # The first line of the program may stand behind the name of the language.
        for one in (text, f"{rest}\n{text}") if rest else (text,):
            if one.strip() and one not in texts:
                texts.append(one)
    return texts


def _inner(body: list[str], opening: Fence) -> list[str]:
    """Return the lines of a block without the marks of the list or the quotation that it stands in."""
    depth = opening.before.count(">") if opening.clean else 0
    for _ in range(depth):
        body = [QUOTATION.sub("", line, count=1) for line in body]
    indent = 0 if depth or not opening.clean else len(opening.before)
    return [line[min(indent, len(line) - len(line.lstrip())) :] for line in body]
