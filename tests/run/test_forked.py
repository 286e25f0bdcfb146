"""Processes of a job write each line at once, and end with their own exit code if nobody reads their output."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from flash.foreign.forking import ForkServer
from flash.run.joined import say
from flash.run.processes.forked import JobProcess, ProcessOrder
from flash.run.processes.launch_state import SCRATCH, SCRATCH_LOCK
from flash.run.processes.supervisor import End


class Speaks(JobProcess):
    """Prints a line. Then its worker ends with an error, because it has no configuration."""

    def enter(self) -> None:
        super().enter()
        say("hello")


class Stays(JobProcess):
    """Prints a line as the environment of a user does, and lives on."""

    def run(self) -> None:
        self.enter()
        sys.stdout.write("hello\n")
        time.sleep(600)


class Imports(Stays):
    """Prints the place from which it would import a module, and lives on."""

    def enter(self) -> None:
        super().enter()
        found = find_spec("tabnanny")
        sys.stdout.write(f"{found and found.origin}\n")


@contextmanager
def output_into(descriptor: int, pipe: int) -> Generator[None]:
    """Send a standard output of this process, and of processes that start meanwhile, into a pipe. `descriptor` is 1 or
    2, `pipe` the writing end."""
    before = os.dup(descriptor)
    os.dup2(pipe, descriptor)
    try:
        yield
    finally:
        os.dup2(before, descriptor)
        os.close(before)


def start(kind: type[JobProcess], folder: Path) -> JobProcess:
    """Start a process of this class, whose configuration file does not exist."""
    (folder / SCRATCH_LOCK).touch()
    server, variables = ForkServer("flash.run.processes.worker"), {SCRATCH: str(folder)}
    process = kind(server, "node", folder / "missing", ProcessOrder(0), variables)
    process.start()
    return process


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_process_whose_output_nobody_reads_keeps_its_exit_code(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    read, write = os.pipe()
    os.close(read)
    with output_into(descriptor, write):
        process = start(Speaks, tmp_path)
    os.close(write)
    process.join(300)
    assert process.exitcode == End.FINAL


def first_line(kind: type[JobProcess], folder: Path) -> str:
    """Start a process that lives on, and return its first line. Kills the process."""
    read, write = os.pipe()
    with output_into(1, write):
        process = start(kind, folder)
    os.close(write)
    try:
        assert select.select([read], [], [], 30)[0], "the process has printed, and lives on"
        return os.read(read, 1000).decode().partition("\n")[0]
    finally:
        process.kill()
        process.join(300)
        os.close(read)


def test_a_line_is_written_at_once_also_to_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert first_line(Stays, tmp_path) == "hello"


def test_a_file_of_the_user_does_not_replace_an_installed_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tabnanny.py").touch()
    monkeypatch.chdir(tmp_path)
    installed = find_spec("tabnanny")
    assert installed is not None
    assert first_line(Imports, tmp_path) == installed.origin
