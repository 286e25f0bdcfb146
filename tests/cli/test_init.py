"""`flash init`: the project that it writes is complete, and no file of a user is overwritten."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flash.cli.main import main
from flash.cli.prepare import PROJECT_FILES, run_name
from flash.config.check import unwise
from flash.config.load import load
from flash.errors import ConfigError


@pytest.fixture
def project(
    tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, str]:
    """Return the folder of a new project, which has spaces in its path and is the working directory, and the output of
    the command."""
    folder = tmp_path / "my first project"
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert main(["init", str(folder)]) == 0
    monkeypatch.chdir(folder)
    return folder, capsys.readouterr().out


def test_it_writes_a_config_that_a_run_takes_and_says_how_to_go_on(
    project: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, told = project
    assert {path.name for path in folder.iterdir()} == {*PROJECT_FILES}
    assert f"cd '{folder}'" in told
    assert "flash train run.toml" in told
    assert f". {shlex.quote(sys.prefix)}/bin/activate" in told, "nothing else says where flash is"
    config = load("run.toml")
    assert config.run.name == "my-first-project"
    assert unwise(config) == []
    assert main(["train", "run.toml", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "environment: my_env:Backwards shows 7 tokens: " in said
    assert "outputs/models/my-first-project will be made" in said


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("length", [0, 1])
def test_the_environment_of_the_project_refuses_a_length_without_held_out_words(length: int) -> None:
    """The search for such a word would never end."""
    with pytest.raises(ConfigError, match=rf"Backwards refuses them: .*length must be at least 2, .* but is {length}$"):
        load("run.toml", [f"env.options.length={length}"])


@pytest.mark.slow
def test_the_tests_of_the_project_pass_in_a_folder_of_another_project(project: tuple[Path, str]) -> None:
    (project[0].parent / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--of-a-plugin"\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


@pytest.mark.slow
def test_the_test_for_any_environment_holds_for_another_one_and_finds_a_broken_one(project: tuple[Path, str]) -> None:
    other = 'path = "envs.chain:ChainedSums"\n#'
    text = Path("run.toml").read_text().replace('path = "my_env:Backwards"\noptions', other)
    Path("run.toml").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_environment.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    Path("run.toml").write_text(text.replace("envs.chain:ChainedSums", "my_env:Broken"))
    broken = "\n\nclass Broken(Backwards):\n    async def step(self, action: str) -> None: ..."
    Path("my_env.py").write_text(Path("my_env.py").read_text() + broken)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "step() must return (observation, reward, terminated, truncated, info)" in done.stdout


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "there are files in it, which would be lost" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_an_empty_folder_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {*PROJECT_FILES}


@pytest.mark.parametrize(
    ("folder", "name"), [("a b", "a-b"), (".hidden", "hidden"), ("zwölf", "zw-lf"), ("x" * 200, "x" * 128)]
)
def test_a_run_is_named_after_its_folder(folder: str, name: str) -> None:
    assert run_name(Path("/somewhere") / folder) == name


def test_a_folder_whose_name_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a letter or a digit in the folder's name"):
        run_name(Path("/somewhere/…"))
