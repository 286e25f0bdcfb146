"""Folder of a call from Python: it is removed with the call, and the next call removes those of killed calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flash.run.command import BOOT, CALL_LOCK, call_folder

PROGRAM = """
import subprocess, sys
from pathlib import Path
from flash.run.command import call_folder
with call_folder(Path(sys.argv[1])) as (folder, lock):
    (folder / "run.toml").touch()
    command = subprocess.Popen(["sleep", "600"], pass_fds=[lock], stdout=subprocess.DEVNULL)
    print(command.pid, folder, flush=True)
    if sys.stdin.readline() == "the command ends\\n":
        command.kill()
        command.wait()
        print("it has ended", flush=True)
        sys.stdin.read()
"""
"""Program with a folder of a call. It starts a command, and ends the command when a line asks for it."""


@contextmanager
def calling(output_dir: Path) -> Generator[tuple[subprocess.Popen[str], Path]]:
    """Run the program and its command while the block runs. Yields the process of the program, and its folder."""
    words = [sys.executable, "-c", PROGRAM, str(output_dir)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid, folder = program.stdout.readline().split()
        command = os.pidfd_open(int(pid))
        try:
            yield program, Path(folder)
        finally:
            program.kill()
            with suppress(ProcessLookupError):  # the program has ended it
                signal.pidfd_send_signal(command, signal.SIGKILL)
            os.close(command)


def left(output_dir: Path) -> list[Path]:
    """Return the folders that are left beside the one of a new call."""
    with call_folder(output_dir) as (own, _):
        return sorted(set(output_dir.iterdir()) - {own})


def test_the_folder_of_a_killed_call_stays_until_its_command_has_ended(tmp_path: Path) -> None:
    with calling(tmp_path) as (program, folder):
        assert left(tmp_path) == [folder], "both are alive"
        program.kill()
        program.wait()
        assert left(tmp_path) == [folder], "the command is alive, and reads its configuration"
    # The kernel releases the lock when the command has ended, shortly after the signal.
    while (folder / CALL_LOCK).exists():
        assert left(tmp_path) in ([folder], [])
    assert left(tmp_path) == []


def test_the_folder_of_a_program_stays_when_its_command_has_ended(tmp_path: Path) -> None:
    with calling(tmp_path) as (program, folder):
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("the command ends\n")
        program.stdin.flush()
        assert program.stdout.readline() == "it has ended\n"
        assert left(tmp_path) == [folder]
        program.stdin.close()
        program.wait()
        assert left(tmp_path) == []
        assert not folder.exists()


def test_calls_of_one_program_leave_the_folders_of_each_other(tmp_path: Path) -> None:
    with call_folder(tmp_path) as (first, _):
        with call_folder(tmp_path) as (second, _):
            assert set(tmp_path.iterdir()) == {first, second}
        assert left(tmp_path) == [first]
        assert left(tmp_path) == [first], "the first check has not released the lock"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{another start} {device}", "{start} {another device}", "", None])
def test_a_folder_whose_lock_cannot_be_seen_from_here_stays(text: str | None, tmp_path: Path) -> None:
    folder = tmp_path / ".call-other"
    folder.mkdir()
    device = folder.stat().st_dev
    places = {"start": BOOT.read_text().strip(), "another start": "0", "device": device, "another device": device + 1}
    if text is not None:
        (folder / CALL_LOCK).write_text(text.format_map(places))
    assert left(tmp_path) == [folder]
    (folder / CALL_LOCK).write_text("{start} {device}".format_map(places))
    assert left(tmp_path) == [], "the lock of this file is free"
