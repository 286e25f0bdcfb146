"""Locks of a run directory: one launch and its processes hold them as long as any of them lives."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flash.errors import RunDirectoryError
from flash.run.processes.locks import Busy, exclusive, exclusive_run, is_free, run_lock

LAUNCHER = """
import sys
from pathlib import Path
from flash.run.processes.locks import exclusive
with exclusive(Path(sys.argv[1]), 0):
    print("here", flush=True)
    sys.stdin.read()
"""
"""Program that holds the lock of a launcher until its input is closed."""

FORKING = """
import os, sys, time
from pathlib import Path
from flash.run.processes.locks import exclusive
with exclusive(Path(sys.argv[1]), 0):
    if (child := os.fork()) == 0:
        time.sleep(60)
    print(child, flush=True)
    sys.stdin.read()
"""
"""Program that holds the lock of a launcher, with a forked child that outlives it."""

PROCESS = """
import sys
from pathlib import Path
from flash.run.processes.locks import share
share(Path(sys.argv[1]))
print("here", flush=True)
sys.stdin.read()
"""
"""Program that holds the lock of a launcher's process until its input is closed."""

Start = Callable[[str, Path], "subprocess.Popen[str]"]
"""Function that starts a program with the path of its lock file."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a program with a lock. The programs are killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(program: str, path: Path) -> subprocess.Popen[str]:
        """Start a program that takes the lock `path`, and wait until it has the lock."""
        command = [sys.executable, "-c", program, str(path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_launch_is_refused_with_the_process_that_holds_the_run_directory(tmp_path: Path, start: Start) -> None:
    run = tmp_path / "outputs" / "mine"
    run.parent.mkdir()
    holder = start(LAUNCHER, run_lock(run))
    words = rf"{re.escape(str(run))} is in use by process {holder.pid} on {socket.gethostname()}, since 20\d\d-"
    with pytest.raises(RunDirectoryError, match=words), exclusive_run(run, 0):
        pass


def test_a_lock_file_that_names_no_holder_is_held_by_some_process(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "lock"
    start(LAUNCHER, path)
    for content in (b"", b'{"pid": 1, "host": "\xff", "since": 0}'):
        path.write_bytes(content)
        with pytest.raises(Busy, match="another process that has only just started"), exclusive(path, 0):
            pass


def test_a_killed_launcher_holds_nothing(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "lock"
    holder = start(LAUNCHER, path)
    assert not is_free(path)
    holder.kill()
    holder.wait()
    assert is_free(path)


def test_processes_that_a_killed_launcher_left_behind_count_until_they_have_ended(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "lock"
    launcher = start(LAUNCHER, path)
    processes = [start(PROCESS, path), start(PROCESS, path)]
    launcher.kill()
    launcher.wait()
    for process in processes:
        with (
            pytest.raises(Busy, match=rf"processes that were started by process {launcher.pid} on "),
            exclusive(path, 0),
        ):
            pass
        process.kill()
        process.wait()
    assert is_free(path)


def test_a_launch_waits_for_processes_that_are_about_to_end(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "lock"
    path.touch()
    process = start(PROCESS, path)
    ending = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
    with exclusive(path, wait_s=60):
        assert process.wait(10) == -signal.SIGKILL
    ending.wait()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "lock"
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert not is_free(path)
        process.kill()
        process.wait()
        assert is_free(path)
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = r"check that run\.output_dir names a folder"
    with pytest.raises(RunDirectoryError, match=words), exclusive_run(tmp_path / "file" / "mine", 0):
        pass


def test_the_lock_stays_where_it_is_when_a_new_run_moves_the_old_folder_away(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    with exclusive_run(run, 0):
        run.mkdir()
        run.rename(tmp_path / "mine.1")
        assert run_lock(run).is_file()
    assert os.listdir(tmp_path / "mine.1") == []
