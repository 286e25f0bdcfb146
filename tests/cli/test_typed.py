"""Words of the command that a hint tells the user to repeat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flash.cli.arguments import typed
from flash.run.processes.launch_state import caller_file


def test_a_script_that_stands_for_the_command_is_named_once() -> None:
    environment = {"FLASH_TYPED": "'./launch.sh' 'mine.toml' 'run.name=a b'"}
    assert typed(["/root/.venv/bin/flash", "train", "mine.toml"], environment) == [
        *("./launch.sh", "mine.toml", "run.name=a b")
    ]
    assert environment == {}


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (".venv/bin/flash", ".venv/bin/flash"),
        ("{folder}/flash", "flash"),
        ("/elsewhere/flash", "/elsewhere/flash"),
        ("/somewhere/flash/__main__.py", "flash"),
    ],
)
def test_the_program_is_named_as_it_was_called(tmp_path: Path, program: str, named: str) -> None:
    found = tmp_path / "flash"
    found.touch(mode=0o755)
    argv = [program.format(folder=tmp_path), "train", "mine.toml"]
    assert typed(argv, {"PATH": str(tmp_path)}) == [named, "train", "mine.toml"]


def test_only_a_child_of_the_program_that_has_started_a_command_reports_to_it() -> None:
    assert caller_file({"FLASH_CALLER": f"{os.getppid()}:/a:b/error.json"}) == Path("/a:b/error.json")
    assert caller_file({"FLASH_CALLER": f"{os.getpid()}:/a/error.json"}) is None
    assert caller_file({}) is None
