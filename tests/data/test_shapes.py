"""Rows of all shapes in all forms of files: each gives the same messages, prompts and answers, or one clear message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.data.shapes import ANSWERS, PROMPTS, answer_of, example_of, find_column, prompt_of
from flash.data.tables import Row, column_names, read_rows
from flash.errors import ConfigError
from flash.types import Message
from tests.data.shapes import LEARNED, MIXED, PROMPTED, UNASKED, UNLEARNED
from tests.data.test_tables import CELLS, FORMS, write


@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_every_shape_is_learned_alike_from_every_form_of_file(tmp_path: Path, name: str) -> None:
    for number, (shape, (row, expected)) in enumerate(LEARNED.items()):
        if shape in MIXED and name.endswith((".parquet", ".arrow")):
            continue
        (read,) = read_rows(str(write(tmp_path / str(number) / name, [row])))
        assert example_of(read) == expected, shape


@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_every_shape_gives_its_prompt_and_answer(tmp_path: Path, name: str) -> None:
    for number, (shape, (row, columns, prompt, answer)) in enumerate(PROMPTED.items()):
        if any(kind in name for kind in CELLS) and not isinstance(row.get("answer", row.get("golden", "")), str):
            continue  # cells are text
        path = str(write(tmp_path / str(number) / name, [row]))
        (read,), names = read_rows(path), column_names(path)
        asked = find_column(names, columns.get("prompt"), PROMPTS, "prompt_column", path)
        answered = find_column(names, columns.get("answer"), ANSWERS, "answer_column", path)
        wanted = prompt if isinstance(prompt, str) else tuple(msgspec.convert(prompt, list[Message]))
        assert prompt_of(read, asked) == wanted, shape
        assert answer_of(read, answered) == answer, shape


@pytest.mark.parametrize(("row", "message"), UNLEARNED)
def test_a_row_that_cannot_be_learned_is_refused_with_its_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^rows.jsonl, row 7.*{message}"):
        example_of(Row("rows.jsonl, row 7", row))


@pytest.mark.parametrize(("row", "message"), UNASKED)
def test_a_row_that_asks_nothing_is_refused_with_its_place(row: dict[str, Any], message: str) -> None:
    read = Row("rows.jsonl, row 1", row)
    with pytest.raises(ConfigError, match=f"^rows.jsonl, {message}"):
        _ = prompt_of(read, "prompt"), answer_of(read, "answer")


def test_a_column_is_found_by_its_usual_names_and_a_wrong_name_gets_the_one_of_its_sense() -> None:
    names = ["question", "answer"]
    assert find_column(names, None, PROMPTS, "prompt_column", "x") == "question"
    with pytest.raises(ConfigError, match=r"no column 'solution' \(answer_column\), .*; did you mean 'answer'\?"):
        find_column(names, "solution", ANSWERS, "answer_column", "x.jsonl")
    with pytest.raises(ConfigError, match=r"x\.jsonl has none of the columns prompt, .*, only 'a'; set prompt_column"):
        find_column(["a"], None, PROMPTS, "prompt_column", "x.jsonl")
