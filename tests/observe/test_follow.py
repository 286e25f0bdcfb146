"""Rows of a growing file are read once and completely, and from the start if the file was replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flash.errors import RunDirectoryError
from flash.observe.rundir.rundir import Followed, RunDirectory, write_atomically


def following(path: Path) -> Followed[dict[str, Any]]:
    """Return the rows of a file, which were read once."""
    followed = Followed(path, dict[str, Any])
    followed.read()
    return followed


def append(path: Path, data: bytes) -> None:
    """Append bytes to a file, as a run does."""
    with path.open("ab") as file:
        file.write(data)


def test_rows_are_there_once_their_lines_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    followed = following(file)
    assert (followed.rows, followed.restarts) == ([], 0)
    append(file, b'{"a": 1}\n{"a"')
    followed.read()
    assert followed.rows == [{"a": 1}]
    append(file, b": 2}\n")
    followed.read()
    followed.read()
    assert (followed.rows, followed.restarts) == ([{"a": 1}, {"a": 2}], 0)


def test_a_line_that_was_torn_and_gone_on_behind_is_no_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append(file, b'{"a": 1}\n{"a": {"a": 2}\n{"a": 3}\n')
    assert following(file).rows == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("line", [b'{"\xff": 1}', b'{"a": ' + 100_000 * b"[", b"\x00\x00"])
def test_a_line_that_a_broken_disk_made_is_no_row(line: bytes, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    append(directory.metrics, b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    assert following(directory.metrics).rows == directory.read_metrics() == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("how", ["replaced", "cut", "gone"])
def test_a_file_that_is_another_one_is_read_anew(how: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append(file, b'{"a": 1}\n{"a": 2}\n')
    followed = following(file)
    if how == "replaced":  # with as many bytes as before
        write_atomically(file, b'{"a": 3}\n{"a": 4}\n')
    elif how == "cut":
        file.write_bytes(b'{"a": 5}\n')
    else:
        file.unlink()
    followed.read()
    rest = {"replaced": [{"a": 3}, {"a": 4}], "cut": [{"a": 5}], "gone": []}[how]
    assert (followed.rows, followed.restarts) == (rest, 1)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=f"cannot read {tmp_path}"):
        following(tmp_path)
