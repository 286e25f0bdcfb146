"""Scratch folder of a job, and the folders and shared memory of killed jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from flash.run.processes.launch_state import (
    SCRATCH,
    SHARED_MEMORY,
    remember_shared_memory,
    remove_abandoned,
    scratch_folder,
)

KILLED = """
import os, signal, tempfile
from flash.run.processes.launch_state import scratch_folder
with scratch_folder() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Program that is killed while it has a scratch folder."""

NAMELESS = """
import os, pwd, sys
from pathlib import Path
from flash.run.processes.launch_state import scratch_folder
os.setgid(54321)
os.setuid(54321)
for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
    os.environ.pop(name, None)
with scratch_folder(Path(sys.argv[1])):
    print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""
"""Program that makes a scratch folder as a user without a name."""

ENGINE = """
import mmap, os, sys, tempfile
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=8)
resource_tracker.unregister(memory._name, "shared_memory")  # as if it had been killed, too
with open(os.path.join(os.fsencode(tempfile.gettempdir()), b"\\xff"), "wb+") as file:  # a name that is no text
    file.truncate(8)
    mapped = mmap.mmap(file.fileno(), 8)
print(memory.name, flush=True)
sys.stdin.read()
"""
"""Program that leaves shared memory behind, as a killed engine does."""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a short path that is TMPDIR."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_processes_of_the_job_find_a_folder_that_is_gone_with_the_job(temporary: Path) -> None:
    with scratch_folder(temporary) as folder:
        assert folder.parent == temporary
        assert os.environ["TMPDIR"] == os.environ[SCRATCH] == str(folder)
        (folder / "folder").mkdir()
        (folder / "folder" / "socket").touch()
    assert list(temporary.iterdir()) == []
    assert os.environ["TMPDIR"] == str(temporary)
    assert SCRATCH not in os.environ


def test_compiled_kernels_outlive_the_job(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with scratch_folder(temporary) as folder:
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == temporary != folder


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_name_has_a_folder_for_compiled_kernels(temporary: Path) -> None:
    temporary.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", NAMELESS, str(temporary)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{temporary}/torchinductor_uid_54321\n", "")


def test_the_next_launch_removes_the_folder_of_a_killed_one(temporary: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (left,) = temporary.iterdir()
    assert (left / "socket").exists()
    with scratch_folder(temporary) as folder:
        assert list(temporary.iterdir()) == [folder]


def test_the_folder_of_a_job_that_lives_stays(temporary: Path) -> None:
    with scratch_folder(temporary) as folder:
        other = [
            sys.executable,
            "-c",
            "from flash.run.processes.launch_state import *; remove_abandoned(Path(tempfile.gettempdir()))",
        ]
        subprocess.run(other, check=True, env=os.environ | {"TMPDIR": str(temporary)})
        assert folder.exists()


def test_a_process_keeps_the_folder_that_its_killed_launcher_left(temporary: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (left,) = temporary.iterdir()
    joined = "join_scratch_folder(); print(flush=True); sys.stdin.read()"
    program = f"import sys; from flash.run.processes.launch_state import *; {joined}"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {SCRATCH: str(left)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    remove_abandoned(temporary)
    assert left.exists()
    process.communicate()
    remove_abandoned(temporary)
    assert not left.exists()


def test_shared_memory_that_engines_left_goes_with_the_folder_and_no_other(temporary: Path) -> None:
    others = SharedMemory(create=True, size=8)
    try:
        with scratch_folder(temporary) as folder:
            engine = subprocess.Popen(
                [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            assert engine.stdout is not None
            left = Path("/dev/shm", engine.stdout.readline().decode().strip())
            for _ in range(2):  # it is noted again and again, and is there once
                remember_shared_memory(engine.pid)
            assert (folder / SHARED_MEMORY).read_text() == f"{left.name}\n"
            engine.kill()
            engine.communicate()
            assert left.exists()
        assert not left.exists()
        assert Path("/dev/shm", others.name).exists()
    finally:
        others.close()
        others.unlink()


def test_a_note_that_cannot_be_written_costs_no_engine(temporary: Path) -> None:
    with scratch_folder(temporary) as folder:
        (folder / SHARED_MEMORY).mkdir()
        remember_shared_memory(os.getpid())
        (folder / SHARED_MEMORY).rmdir()


@pytest.mark.parametrize("name", ["d" * 80, "ü" * 30])
def test_a_folder_for_temporary_files_that_is_too_deep_for_sockets_is_not_used(
    name: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / name
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with scratch_folder(deep) as folder:
        assert len(os.fsencode(folder)) < 64
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    assert len(os.fsencode(left)) < 64
    with scratch_folder(deep):
        assert not left.exists()
