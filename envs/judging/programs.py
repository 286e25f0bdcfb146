"""Find the program in an answer: the fenced blocks of the text, ordered by how likely each is the program.

Only the text after the reasoning counts, and of that the part in `<answer>` tags if there are any. Blocks with the
language's name come first, the last of them before the others. Blocks without a name count only if no block has the
language's name. Prose without a block counts only if there is no block at all. If that leaves a choice,
`envs.judging.chooser` makes it in the sandbox with the parser of the language, because parsing a model's text may take
any time.

`envs.judging.judge` calls `find_blocks`. Environments with shell commands call `last_block`, and verifiers of texts
call `final_part`. Everything in this module takes time linear in the length of the answer, because it runs on the event
loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CHOOSER = Path(__file__).with_name("chooser.py").read_text(encoding="utf-8")
"""Source of the chooser, which the Python of the sandbox executes."""

MOST_BLOCKS = 12
"""Number of blocks that are considered: the last ones of an answer."""
MOST_FENCES = 256
"""Number of lines that are considered as the beginning or end of a block: the last ones."""
MOST_ENDS = 4
"""Number of lines that are tried as the end of one block."""

# Tags around the reasoning of the usual models.
END_OF_THOUGHT = ("</think>", "</thinking>", "</thought>", "</reasoning>", "</seed:think>", "[/THINK]")
START_OF_THOUGHT = ("<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[THINK]")
"""Tags before the reasoning, of the same models as `END_OF_THOUGHT`."""
ANSWER_TAGS = (("<answer>", "</answer>"), ("<solution>", "</solution>"))
"""Pairs of tags around an answer; the first pair that is found counts."""
QUOTES = "\"'`"
"""Quotation marks. A tag after one of them is part of a program's text."""

CONTAINER = re.compile(r"[\s>]*(?:[-*+]\s+|\d{1,9}[.)]\s+)?[\s>]*\Z")
"""Pattern of the text before a fence within a quotation or a list."""
WIDEST_CONTAINER = 80
"""Number of characters before a fence that are matched. The pattern's time is quadratic in this number."""
QUOTATION = re.compile(r"\s{0,3}>\s?")
"""Pattern of the mark before a line of a quotation."""
ODD_MARKS = "\u00b4\u2018\u2019\u02cb'["
"""First characters of fences that are not made of backticks or tildes."""
ODD_FENCE = re.compile(r"([\u00b4\u2018\u2019\u02cb]{3,}|'{3,})([^'\u00b4\u2018\u2019\u02cb]*)\Z")
"""Pattern of a fence in which typography has replaced the backticks."""
WORDS = re.compile(r"[^\s,:;={}()\[\]|\"'<>/\\]+")
"""Pattern of the words after a fence, among which is the name of the language."""
IGNORED_WORDS = frozenset({"lang", "language", "code", "code-block", "code-cell", "sourcecode", "solution", "answer"})
"""Words in a block's name that are not the name of a language."""
INLINE = re.compile(r"```([^`\n]+)```")
"""Pattern of a block on a single line."""
ODD = re.compile(r"[\u201c\u201d\u2018\u2019\u00a0\u200b\ufeff]|^[ \t]*(?:>>>|%|!)|\A\s", re.MULTILINE)
"""Pattern in a program that was typeset, indented or copied from a console."""


class Fence(NamedTuple):
    """A line that may begin or end a block, such as ```` ```python ````. `_scan` finds them."""

    line: int
    """Number of the line, counted from 0."""
    before: str
    """Text before the marks."""
    marks: str
    """Backticks or tildes of the fence."""
    info: str
    """Text after the marks."""
    named: bool | None
    """True if `info` names the language; None if it names no language at all."""

    @property
    def clean(self) -> bool:
        """True if nothing but the marks of a list or a quotation precedes the fence."""
        return len(self.before) <= WIDEST_CONTAINER and CONTAINER.match(self.before) is not None

    @property
    def ends_only(self) -> bool:
        """True if the fence is taken for the end of a block only: it has no text after it, or a sentence, which has
        blanks and does not name the language."""
        return not self.info or (not self.named and " " in self.info)


class Block(NamedTuple):
    """A fenced block. Its end is not certain, since a program may contain fences itself."""

    named: bool
    """True if the block has the name of the language."""
    texts: list[str]
    """Texts that the block may be, the most likely first."""
    closed: bool = True
    """False if no fence ends the block."""


def final_part(answer: str) -> str:
    """Return the text of an answer after the last end of a reasoning, with the line ends of Unix.

    Returns an empty text if the answer begins with a reasoning that does not end, and the whole answer if it has no
    reasoning.
    """
    text = answer.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    ends = [at + len(tag) for tag in END_OF_THOUGHT if (at := _rfind_tag(text, tag)) >= 0]
    if ends:
        return text[max(ends) :]
    return "" if text.lstrip().startswith(START_OF_THOUGHT) else text


class Found(NamedTuple):
    """Blocks of an answer that may be its program, the best first; empty if there is no program."""

    blocks: list[list[str]]
    """For each block, the texts that it may be, the most likely first."""
    certain: bool
    """True if the first text is the program as it stands: there is no other text, its block is closed or is a single
    line without fences, and nothing in the block looks typeset or copied."""


def find_blocks(answer: str, names: Sequence[str]) -> Found:
    """Find the texts that may be a program in the language of `names`, which are its usual names in a fence.

    An answer without a block, whose reasoning is left out (`final_part`), is one text. The result is empty if this text
    is blank or has nothing but fences. `envs.judging.tests.choose_program` chooses among the texts later.
    """
    text = final_part(answer)
    lines, fences = _scan(text, names)
    blocks = _fenced(lines, fences)
    inside = answer_part(text)
    if inside is not None:
        # Blocks inside of the tags count alone. Without any, the whole content comes before the blocks elsewhere.
        blocks = _fenced(*_scan(inside, names)) or [Block(False, [inside.strip("\n")]), *blocks]
    elif not any(block.named for block in blocks):
        blocks = [*blocks, *_head(lines, fences)] or _inline(text, names)
    if not blocks:
        marks = {fence.line for fence in fences}
        words = "\n".join(line for at, line in enumerate(lines) if at not in marks).strip()
        # No block at all: the answer itself, if it is more than fences. Prose may surround the program, unless there is
        # only one line.
        return Found([[text.strip("\n")]] if words else [], "\n" not in words)
    sure = len(blocks) == len(blocks[0].texts) == 1 and blocks[0].closed and not ODD.search(blocks[0].texts[0])
    return Found([block.texts for block in blocks], sure)


def last_block(answer: str, names: Sequence[str]) -> str | None:
    """Return the last block named by one of `names`, or the last unnamed one if none is; None if there is neither.

    Of a block with several possible texts, the most likely one is returned. The reasoning is left out (`final_part`).
    """
    blocks = _fenced(*_scan(final_part(answer), names))
    return blocks[0].texts[0] if blocks else None


def question_of(found: Found, calls: Sequence[str], provided: Sequence[str], *, prints: bool, reads: bool) -> bytes:
    """Return the input of `envs.judging.chooser`, which runs in the sandbox, as JSON.

    `calls` are the functions that the tests call, and `provided` the names that the program need not import. `prints`
    is True if a test expects output, and `reads` if a test gives input.
    """
    asked = {"blocks": found.blocks, "calls": calls, "prints": prints, "reads": reads, "provided": provided}
    return json.dumps(asked).encode()


def _head(lines: list[str], fences: list[Fence]) -> list[Block]:
    """Return the text before the first of `fences` as a block, in a list.

    The prompt may have opened this block, so that the answer only ends it. The list is empty if there is no fence, if
    text follows the first fence, so that it begins a block, or if the text before it is blank. `lines` and `fences` are
    the result of `_scan`, so of an answer with more than `MOST_FENCES` fences the first ones are part of the text.
    """
    if not fences or fences[0].info:
        return []
    head = "\n".join([*lines[: fences[0].line], fences[0].before]).strip("\n")
    return [Block(False, [head])] if head.strip() else []


def _inline(text: str, names: Sequence[str]) -> list[Block]:
    """Return the programs in single-line code spans, the last first: those that name the language, or all if none does.

    `find_blocks` uses them only if the answer has no block with its own lines. Only the last `MOST_BLOCKS` spans count.
    """
    blocks: list[Block] = []
    for span in INLINE.findall(text)[-MOST_BLOCKS:]:
        name, _, rest = span.strip().partition(" ")
        named = bool(rest.strip()) and _is_language(name, names)
        blocks.append(Block(bool(named), [rest.strip() if named else span.strip()]))
    return [block for block in blocks[::-1] if block.named] or blocks[::-1]


def _rfind_tag(text: str, tag: str, end: int | None = None) -> int:
    """Return the position of the last occurrence of a tag before `end` that is not quoted; -1 if there is none."""
    at = text.rfind(tag, 0, end)
    # A tag right after a fence of backticks is not quoted.
    while at > 0 and text[at - 1] in QUOTES and text[max(at - 3, 0) : at] != "```":
        at = text.rfind(tag, 0, at)
    return at


def answer_part(text: str) -> str | None:
    """Return the text in the last answer tags; None if there are no tags, or only white space in them.

    Tags that are not closed enclose the rest of the text, if they stand at the beginning of a line.
    """
    for opening, closing in ANSWER_TAGS:
        end = _rfind_tag(text, closing)
        start = _rfind_tag(text, opening, None if end < 0 else end)
        # A tag that is only mentioned stands in the middle of a line.
        if start >= 0 and (end >= 0 or text[:start].rpartition("\n")[2].strip() == ""):
            inside = text[start + len(opening) : len(text) if end < 0 else end]
            if inside.strip():
                return inside
    return None


def _is_language(info: str, names: Sequence[str]) -> bool | None:
    """Return True if `info`, the text after a fence, names the language of `names`, and False for another language.

    Returns None if it names no language at all.
    """
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
    """Return the lines of a text, and the fences among them: the last `MOST_FENCES`, in order."""
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
    """Marks of the open block whose fence typography has changed; empty if none is open."""
    for place in reversed(places):
        line = lines[place].rstrip()
        at = max(line.rfind("```"), line.rfind("~~~"))
        if at >= 0:
            start = len(line[:at].rstrip(line[at]))
            before, marks, info = line[:start], line[start : at + 3], line[at + 3 :].strip()
            # Backticks or the same marks elsewhere in the line make it a code span, and no fence.
            if "`" not in info and marks not in before:
                fences.append(Fence(place, before, marks, info, _is_language(info, names)))
            continue
        bare = line.strip()
        if bare in ("[PYTHON]", "[/PYTHON]"):
            # Tags of CodeLlama. Their marks differ from those of all other fences, so that they match only each other.
            info = "python" if bare == "[PYTHON]" else ""
            fences.append(Fence(place, "", "[]", info, _is_language(info, names)))
        elif (match := ODD_FENCE.match(bare)) and ((named := _is_language(match[2], names)) or (odd and bare == odd)):
            # Three quotes also begin a string in a program, so they are a fence only with the name of the language.
            odd = "" if odd else match[1]
            fences.append(Fence(place, line[: line.index(match[1])], match[1], match[2].strip(), named))
    return lines, fences


def _fenced(lines: list[str], fences: list[Fence]) -> list[Block]:
    """Return the blocks with the language's name, or else the unnamed blocks: the last first, without empty ones.

    Blocks with the name of another language are left out. `lines` and `fences` are the result of `_scan`.
    """
    spans: list[tuple[bool, int, int]] = []
    """For each block: True if it has the language's name, and the indices in `fences` of its first and last fence."""
    place = 0
    while place < len(fences):
        opening = fences[place]
        end = _closing(fences, place)
        if opening.named or (opening.named is None and (opening.clean or not opening.info)):
            spans.append((bool(opening.named), place, end))
        # A fence that is never closed may be no fence, and must not hide the blocks after it. The fence at the end of a
        # block is passed over if it only ends it; else it may begin the next block.
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
    """Return the index of the fence that ends the block opened by `fences[place]`; `len(fences)` if none does.

    As in Markdown, the end has the same marks, at least as many. It has no text after the marks. A fence with a
    sentence, or one that begins another block of the language, also ends a block if nothing but list or quotation marks
    precedes it.
    """
    opening = fences[place]
    indent = len(opening.before) if opening.clean else 0
    for at in range(place + 1, len(fences)):
        fence = fences[at]
        if fence.marks[0] != opening.marks[0] or len(fence.marks) < len(opening.marks):
            continue
        if fence.clean and len(fence.before) > indent + 3:
            continue  # it is part of a string in the program
        if not fence.info or ((fence.ends_only or fence.named) and fence.clean):
            return at
    return len(fences)


def _texts(lines: list[str], fences: list[Fence], place: int, end: int) -> list[str]:
    """Return the texts that a block may be, the most likely first, without empty ones.

    The block begins at `fences[place]`. The first text ends at `fences[end]`, or at the end of the answer if `end` is
    `len(fences)`. The others end at other fences after the beginning, because the program may contain fences.
    """
    opening = fences[place]
    others = [fence for at, fence in enumerate(fences[place + 1 :], place + 1) if at != end][:MOST_ENDS]
    closing = fences[end] if end < len(fences) else None
    first_line = opening.info.partition(" ")[2].strip()
    texts: list[str] = []
    for fence in [closing, *others]:
        body = lines[opening.line + 1 : len(lines) if fence is None else fence.line]
        # The end may be on the last line of the program.
        if fence is not None and not fence.clean and not fence.info:
            body = [*body, fence.before]
        text = "\n".join(_inner(body, opening)).strip("\n")
        # The first line of the program may follow the name of the language on the same line.
        for one in (text, f"{first_line}\n{text}") if first_line else (text,):
            if one.strip() and one not in texts:
                texts.append(one)
    return texts


def _inner(body: list[str], opening: Fence) -> list[str]:
    """Return the lines `body` of a block without the marks of the list or quotation that contains it.

    `opening` is the fence at the beginning of the block, whose indent and marks its lines share.
    """
    depth = opening.before.count(">") if opening.clean else 0
    for _ in range(depth):
        body = [QUOTATION.sub("", line, count=1) for line in body]
    indent = 0 if depth or not opening.clean else len(opening.before)
    return [line[min(indent, len(line) - len(line.lstrip())) :] for line in body]
