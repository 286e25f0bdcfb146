"""Parts of scripts/try_install.py that make the machine of a new user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.ordinary_user import as_ordinary_user

ROOT = Path(__file__).parents[1]
"""Root folder of the repository."""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_install

    return try_install


def program(path: Path, text: str = "") -> Path:
    """Write a shell script that can be run, and return its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_machine_without_a_compiler_has_all_else(tried, tmp_path, monkeypatch):
    compilers = ("cc", "gcc", "g++", "c++", "gcc-12", "x86_64-linux-gnu-gcc", "clang", "c99-gcc")
    others = ("make", "git", "gcc-ar", "python3", "ccache", "env")
    for name in (*compilers, *others):
        program(tmp_path / "all" / name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'all'}{os.pathsep}/nowhere")
    path = Path(tried.without_compilers(tmp_path / "some"))
    assert sorted(file.name for file in path.iterdir()) == sorted(others)


def test_a_relative_folder_on_the_path_has_working_links(tried, tmp_path, monkeypatch):
    program(tmp_path / "all" / "make")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "all")
    assert (Path(tried.without_compilers(tmp_path / "some")) / "make").read_text().startswith("#!/bin/sh")


def test_an_interpreter_is_tried_unless_it_is_old_or_broken_or_of_an_environment(tried, tmp_path):
    told = {"new": "echo 3 12 1 True", "old": "echo 3 9 0 True", "venv": "echo 3 12 1 False", "broken": "exit 1"}
    found = [tried.probe(program(tmp_path / "bin" / name, text)) for name, text in told.items()]
    assert [python and python.version for python in found] == [(3, 12, 1), None, None, None]


@pytest.mark.integration
def test_only_settings_that_say_how_the_registry_is_reached_are_kept(tried, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://index.example/simple\nfind-links = /wheels\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_PROXY", "http://proxy.example")
    monkeypatch.setenv("PIP_CONSTRAINT", "pins.txt")
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    seen = tried.variables(tmp_path, "/bin")
    assert seen["PIP_INDEX_URL"] == "https://index.example/simple"
    assert seen["PIP_PROXY"] == seen["https_proxy"] == "http://proxy.example"
    assert (seen["HOME"], seen["PATH"], seen["PIP_CONFIG_FILE"]) == (str(tmp_path), "/bin", "/dev/null")
    assert not {"PIP_FIND_LINKS", "PIP_CONSTRAINT", "PYTHONPATH"} & seen.keys()


def test_each_try_makes_the_environment_and_then_uses_it(tried):
    python = tried.Python(tuple(sys.version_info[:3]), Path(sys.executable))
    for short, last in ((True, "tests"), (False, "make check")):
        assert [step.name for step in tried.steps(python, short)] == ["env", "again", "dry run", last]


def test_a_folder_that_may_not_be_listed_has_no_programs(tried, tmp_path):
    closed = tmp_path / "closed"
    program(closed / "python3.12")
    closed.chmod(0)
    with as_ordinary_user():
        assert [tried.listed(folder) for folder in (closed, closed / "bin", tmp_path / "none")] == [[], [], []]
    closed.chmod(0o755)


def run_script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/try_install.py with these arguments in the folder `cwd`."""
    command = [sys.executable, ROOT / "scripts" / "try_install.py", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_given_interpreter_that_cannot_be_tried_is_refused(tmp_path):
    program(tmp_path / "bin" / "old", "echo 3 9 0 True")
    done = run_script("--python", "bin/old", cwd=tmp_path)
    assert done.returncode == 2
    assert "--python bin/old: expected a program of Python 3.11 or newer" in done.stderr


def test_a_relative_path_of_an_interpreter_counts_from_the_folder_of_the_call(tmp_path):
    # The interpreter cannot run an empty program, so that no trial begins.
    program(tmp_path / "bin" / "new", '[ -n "$2" ] && echo 3 12 1 True')
    done = run_script("--python", "bin/new", cwd=tmp_path)
    assert done.returncode == 2
    assert f"this user may not run {tmp_path / 'bin' / 'new'}" in done.stderr


def test_a_user_that_the_script_cannot_become_is_refused(tmp_path):
    done = run_script("--user", "no such user", cwd=tmp_path)
    wanted = "this machine has no user of this name" if os.geteuid() == 0 else "only root can become another user"
    assert (done.returncode, wanted in done.stderr) == (2, True)
