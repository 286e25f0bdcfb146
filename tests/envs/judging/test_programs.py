"""The program of an answer, held against a table of the forms that models write."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from envs.judging.calls import provided_names
from envs.judging.chooser import choose_python
from envs.judging.options import LANGUAGES
from envs.judging.programs import find_blocks, last_block

NAMES = ("python", *LANGUAGES["python"].fences)
CHARACTERS = {
    "␍": "\r",
    "␉": "\t",
    "⟨BOM⟩": "\ufeff",
    "⟨NBSP⟩": "\u00a0",
    "⟨ZWSP⟩": "\u200b",
    "⟨LS⟩": "\u2028",
}


class Row(NamedTuple):
    """An answer of the table, and the program that should be graded."""

    form: str
    answer: str
    program: str
    calls: list[str]


def read_table() -> list[Row]:
    """Return the rows of `answers.txt`. Marks in the answers stand for characters that editors change."""
    text = Path(__file__).with_name("answers.txt").read_text(encoding="utf-8")
    for mark, character in CHARACTERS.items():
        text = text.partition("\n\n=== ")[0] + "\n\n=== " + text.partition("\n\n=== ")[2].replace(mark, character)
    rows: list[Row] = []
    for part in text.split("\n=== ")[1:]:
        form, _, rest = part.partition("\n")
        answer, _, graded = rest.partition("\n---")
        call, _, program = graded.partition("\n")
        rows.append(Row(form, answer, program.strip("\n"), call.split()))
    return rows


def graded(answer: str, calls: list[str]) -> str:
    """Return the program that a judge would grade: chosen at once, or by the chooser."""
    found = find_blocks(answer, NAMES)
    if not found.blocks or found.certain:
        return found.blocks[0][0] if found.blocks else ""
    provided = provided_names() if calls else []
    return choose_python(
        {"blocks": found.blocks, "calls": calls, "prints": not calls, "reads": not calls, "provided": provided}
    )


ROWS = read_table()


def test_the_table_has_two_hundred_forms():
    assert len({row.form for row in ROWS}) == len(ROWS) >= 200


def test_the_program_of_an_answer_is_found():
    for row in ROWS:
        assert graded(row.answer, row.calls).strip("\n") == row.program, row.form


@pytest.mark.parametrize(
    ("answer", "block"),
    [
        ("Run\n```bash\nls\n```\nthen\n```\nout\n```", "ls"),
        ("```sh\nls\n```\n```bash\npwd\n```", "pwd"),
        ("I look: ```bash\nls\n```", "ls"),
        ("```bash\nls", "ls"),
        ("<think>\n```bash\nrm x\n```\n</think>\n```\nls\n```", "ls"),
        ("```python\nx\n```", None),
        ("I am done\n```", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_commands_of_an_answer_are_its_last_block(answer: str, block: str | None):
    assert last_block(answer, ("bash", "sh", "shell")) == block


@pytest.mark.parametrize(
    "piece", ["```\n", "```python\n", "```text\n", "`", "<answer>", "> ", " ", "\n", "'", "~~~ x\n"]
)
def test_a_degenerate_answer_has_few_texts(piece: str):
    found = find_blocks(piece * (100_000 // len(piece)), NAMES)
    assert sum(map(len, found.blocks)) < 100
