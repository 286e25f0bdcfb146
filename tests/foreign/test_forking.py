"""Processes that are forked from a server with imports: each has its own environment, cores and random numbers."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flash.foreign.forking import ForkedProcess, ForkServer, _Popen, python_command  # pyright: ignore[reportPrivateUsage]

ROOT = Path(__file__).parents[2]
IN_A_CONTAINER = ["unshare", "--pid", "--fork"]
"""Command that runs another one as the first process of a new PID namespace. There, a process sees no parent (id 0)."""
FIRST = f"from {__name__} import Answering, answer_of; print(answer_of(Answering.server))"


class Answering(ForkedProcess):
    """Forked process that leaves an answer in a file. Subclasses give other answers."""

    server = ForkServer()

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file

    def run(self) -> None:
        self.enter()
        Path(self._file).write_text(json.dumps(self.answer()))

    def answer(self) -> object:
        """Return an answer that JSON can hold, in the forked process."""
        return "here"


def answer_of(server: ForkServer, kind: type[Answering] = Answering) -> object:
    """Return the answer of a process that is forked from `server`."""
    file = Path(os.environ["TMPDIR"]) / f"told-{os.getpid()}"
    process = kind(str(file))
    process.server = server
    process.start()
    process.join()
    assert process.exitcode == 0
    return json.loads(file.read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files (TMPDIR)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_process_that_sees_no_parent_can_have_processes_forked(tmp_path: Path) -> None:
    if subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a new PID namespace cannot be made here")
    own = os.environ | {"TMPDIR": str(tmp_path)}
    command = [*IN_A_CONTAINER, sys.executable, "-c", FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=own, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("here\n", "")


class Drawn(Answering):
    """Reports a random number of numpy and one of torch, without seeds of its own."""

    def answer(self) -> object:
        import numpy as np
        import torch

        return [float(np.random.rand()), float(torch.rand(1, dtype=torch.float64))]


@pytest.mark.usefixtures("folder")
def test_two_processes_of_one_server_do_not_draw_the_same_random_numbers() -> None:
    server = ForkServer("numpy.random", "torch")
    one, other = answer_of(server, Drawn), answer_of(server, Drawn)
    assert isinstance(one, list)
    assert isinstance(other, list)
    assert len({*one, *other}) == 4


class Starting(Answering):
    """Reports the start method of multiprocessing, before and after it has set one itself."""

    def answer(self) -> object:
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("spawn")
        return [before, multiprocessing.get_start_method()]


@pytest.mark.usefixtures("folder")
def test_a_forked_process_has_pythons_default_start_method_until_it_sets_another() -> None:
    assert answer_of(Answering.server, Starting) == [None, "spawn"]


class Parent(Answering):
    """Reports the process id of its server."""

    def answer(self) -> object:
        return os.getppid()


class Nested(Answering):
    """Has processes forked, and reports for each of them if its own server has forked it."""

    wanted = (((), {}), (("json",), {}), (("json", "csv"), {"KIND": "a"}), (("html",), {}), (("json",), {"KIND": "b"}))

    def answer(self) -> object:
        servers = [ForkServer(*modules, variables=variables) for modules, variables in self.wanted]
        return [answer_of(server, Parent) == os.getppid() for server in servers]


@pytest.mark.usefixtures("folder")
def test_a_forked_process_uses_its_own_server_for_others_if_that_has_the_modules_and_variables() -> None:
    assert answer_of(ForkServer("csv", "json", variables={"KIND": "a"}), Nested) == [True, True, True, False, False]


class Importing(Answering):
    """Reports the file of a module that its server has imported."""

    def answer(self) -> object:
        return sys.modules["tabnanny"].__file__


def test_a_server_and_other_processes_import_installed_modules_before_those_of_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tabnanny.py").write_text("")
    monkeypatch.chdir(folder)
    installed = find_spec("tabnanny")
    assert installed is not None
    assert answer_of(ForkServer("tabnanny"), Importing) == installed.origin
    command = [*python_command("import tabnanny; print(tabnanny.__file__, sys.argv[1])"), "argument"]
    assert subprocess.check_output(command, text=True) == f"{installed.origin} argument\n"


FINDER = """
import importlib.util, pathlib, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        file = pathlib.Path(ROOT, name, "__init__.py")
        if path is None and file.exists():
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])

sys.meta_path = [*(finder for finder in sys.meta_path if "editable" not in repr(finder)), Finder]
"""
"""Finds Flash as an editable installation does: after the folders of the import path."""
ASKS = """
import os, pathlib
from flash.foreign.forking import ForkedProcess, ForkServer

class Asks(ForkedProcess):
    server = ForkServer()

    def run(self):
        self.enter()
        import flash
        pathlib.Path(os.environ["TMPDIR"], "found").write_text(flash.Environment.__module__)

def ask():
    process = Asks()
    process.start()
    process.join()
"""


def test_a_folder_called_flash_in_the_working_directory_does_not_hide_the_package(tmp_path: Path) -> None:
    code, work = tmp_path / "code", tmp_path / "work"
    code.mkdir()
    (work / "flash").mkdir(parents=True)
    (code / "sitecustomize.py").write_text(FINDER.replace("ROOT", repr(str(ROOT))))
    (code / "asks.py").write_text(ASKS)
    own = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(code)}
    command = [sys.executable, "-P", "-c", "from asks import ask; ask()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=own, cwd=work)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "found").read_text() == "flash.environment.interface"


class Folder(Answering):
    """Reports the folder for its temporary files."""

    def answer(self) -> object:
        return tempfile.gettempdir()


def test_a_forked_process_uses_the_folder_for_temporary_files_of_its_own_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "asks.py").write_text("import tempfile; tempfile.gettempdir()")
    monkeypatch.syspath_prepend(folder)
    server = ForkServer("asks")
    answer_of(server)
    (folder / "own").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "own"))
    assert answer_of(server, Folder) == str(folder / "own")


SOCKETS = f"""if True:
    import os
    from pathlib import Path
    from {__name__} import Answering, answer_of
    os.umask(0)
    answer_of(Answering.server)
    (socket,) = Path(os.environ["TMPDIR"]).glob("forks-*")
    print(oct(socket.stat().st_mode & 0o777))
"""


def test_only_the_owner_may_use_the_socket_of_a_server_which_is_removed_with_its_process(tmp_path: Path) -> None:
    own = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", SOCKETS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=own, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("0o600\n", "")
    assert [*tmp_path.glob("forks-*")] == []


def test_a_process_does_not_seem_to_run_while_another_thread_reads_its_exit_code() -> None:
    read, write = os.pipe()
    handle: Any = _Popen.__new__(_Popen)
    handle.sentinel, handle.returncode, handle._polling = read, None, threading.Lock()
    codes: list[int | None] = []
    polling = threading.Thread(target=lambda: codes.append(handle.poll()))
    # This thread stands for the one that reads: the code is out of the pipe, and `returncode` is not set yet.
    with handle._polling:
        polling.start()
        polling.join(0.2)
        assert polling.is_alive(), "it waits for the code"
        handle.returncode = 2
    polling.join()
    assert codes == [2]
    for descriptor in (read, write):
        os.close(descriptor)
