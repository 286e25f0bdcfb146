"""The limits of the code's size and of its docstrings, which scripts/house.py measures."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.house import ROAD, ROOT, Docstring, docstrings, folders, lines, road_lines

MOST_POINTING = 0.03
"""Share of a folder's docstrings that may begin with a word that points outside them."""
MOST_ROAD_FILES = 34
"""Largest number of files on the road of a sample."""
MOST_ROAD_LINES = 16_500
"""Bounds on the road of a sample, from its lease to the gradient."""


@pytest.mark.slow
def test_docstrings_stand_alone() -> None:
    pointing = [one for room in folders().values() if room.share > MOST_POINTING for one in room.pointing]
    assert not pointing, "\n".join(f"{one.file.relative_to(ROOT)}:{one.line}: {one.text[:100]}" for one in pointing)


def test_the_road_of_a_sample_is_short() -> None:
    assert len(set(ROAD)) == len(ROAD) <= MOST_ROAD_FILES
    assert road_lines() <= MOST_ROAD_LINES, [f"{lines(ROOT / 'flash' / file)} {file}" for file in ROAD]


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("What JSON says.", True),
        ("The same of its rows.", True),
        ("Others of the group.", True),
        ("None: it is off.", True),
        ("Return the parsed JSON.", False),
        ("The samples of a group.", False),
        ("Oneness of the group.", False),
        ("Whatever a user gives.", False),
    ],
)
def test_a_docstring_that_needs_another_text_is_known_by_its_first_word(text: str, points: bool) -> None:
    assert Docstring(Path("x.py"), 1, text).points_outside is points


def test_docstrings_are_those_of_modules_classes_functions_constants_and_fields() -> None:
    text = '''"""Module."""
A = 1
"""Constant."""
class B:
    """Class."""
    c: int
    """Field."""
    def d(self):
        """Function."""
        return "no docstring"
'''
    found = [(one.line, one.text) for one in docstrings(Path("x.py"), ast.parse(text))]
    assert sorted(found) == [(1, "Module."), (3, "Constant."), (5, "Class."), (7, "Field."), (9, "Function.")]
