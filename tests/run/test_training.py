"""What `flash.train` tells of a run that failed."""

from __future__ import annotations

import json
from pathlib import Path

from flash.errors import FlashError, WeightsError
from flash.run.training import error_left


def leave(folder: Path, time: float) -> None:
    row = {"launch": "x/1", "error": "WeightsError", "message": "engine 0 differs", "time": time}
    (folder / "error.json").write_text(json.dumps(row))


def test_the_error_that_a_run_has_left_is_of_its_own_class(tmp_path: Path) -> None:
    leave(tmp_path, time=20.0)
    error = error_left(tmp_path, since=10.0)
    assert type(error) is WeightsError
    assert str(error) == "engine 0 differs"


def test_the_error_of_an_earlier_launch_is_not_told_again(tmp_path: Path) -> None:
    leave(tmp_path, time=5.0)
    error = error_left(tmp_path, since=10.0)
    assert type(error) is FlashError
    assert "its output above" in str(error)


def test_without_an_error_or_with_half_of_one_the_output_is_pointed_to(tmp_path: Path) -> None:
    assert "its output above" in str(error_left(tmp_path, since=0.0))
    (tmp_path / "error.json").write_text('{"launch"')
    assert "its output above" in str(error_left(tmp_path, since=0.0))
