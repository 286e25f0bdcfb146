"""Flash's wheel in an empty environment, outside of the clone: what is in it, and what its commands need and do.

Nothing is fetched. The plain requirements are links to those of this environment, so that the environment has nothing
else. For a run, the path of all other packages is added.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PACKAGES = ("flash", "algorithms", "envs")
SHORT = ("run.steps=2", "tiny_model.warm_start_steps=20", "train.batch_size=32", "eval.problems=16")


class Installed(NamedTuple):
    """An environment with the wheel and its plain requirements."""

    folder: Path
    work: Path
    """Folder in which commands are run."""

    @property
    def packages(self) -> Path:
        return next((self.folder / "lib").glob("python*/site-packages"))

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Run a program of the environment, and return its output. Fails if the program ends with another exit code."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "FLASH_", "PYTEST", "COV_", "VIRTUAL_ENV"))
        }
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.work, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout


def requirements(lines: list[str], extras: tuple[str, ...] = ("",)) -> Iterator[Requirement]:
    """Yield the requirements of this machine."""
    for wanted in map(Requirement, lines):
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            yield wanted


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, because setuptools would leave folders in the clone."""
    source, built = tmp_path_factory.mktemp("source") / "flash", tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "docs", "outputs", "results")
    shutil.copytree(ROOT, source, ignore=unwanted)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(built))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install the wheel into an empty environment, with links to the packages that it plainly requires."""
    found = Installed(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("work"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", found.folder], check=True)
    pip = (sys.executable, "-m", "pip", "--python", found.folder / "bin" / "python")
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo, seen = [*requirements(project["dependencies"])], set[str]()
    while todo:
        wanted = todo.pop()
        if wanted.name.lower() in seen:
            continue
        seen.add(wanted.name.lower())
        package = importlib.metadata.distribution(wanted.name)
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (found.packages / name).symlink_to(Path(str(package.locate_file(name))))
        todo += requirements(package.requires or [], ("", *wanted.extras))
    return found


@pytest.fixture
def complete(installed: Installed) -> Iterator[Installed]:
    """Add the path of all packages of this environment to that one. Flash itself still comes from the wheel."""
    path = installed.packages / "all.pth"
    path.write_text(str(importlib.metadata.distribution("torch").locate_file("")) + "\n")
    yield installed
    path.unlink()


def test_the_wheel_has_all_files_of_the_packages_and_no_others(wheel: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PACKAGES]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        # A vLLM of somebody else in the same environment must not find a plugin.
        assert archive.read(metadata).decode().split("\n\n") == ["[console_scripts]\nflash = flash.__main__:run\n"]
    assert names == {name for name in listing.splitlines() if (ROOT / name).exists()}


def test_without_other_packages_commands_say_what_is_missing_or_do_their_work(installed: Installed) -> None:
    assert f"flash-rl {importlib.metadata.version('flash-rl')}\n" == installed.run("flash", "--version")
    told = installed.run("flash", "init", "project")
    assert "\n    flash install\n" in told
    missing = {
        ("train", "project/run.toml"): "`flash install` installs all packages\n",
        ("sft", "project/run.toml"): "`flash install` installs all packages\n",
        ("eval", "project/run.toml"): "`flash install` installs all packages\n",
        ("rollout", "project/run.toml"): "`flash install` installs all packages\n",
        ("plan", "project/run.toml"): "`flash install` installs all packages\n",
        ("sandbox", "doctor"): "`pip install 'flash-rl[sandbox]'` only those for this\n",
    }
    for arguments, advice in missing.items():
        told = installed.run("flash", *arguments, code=2)
        assert told.startswith("flash: error: ")
        assert "is not installed" in told
        assert told.endswith(advice)
        assert told.count("\n") == 1
    told = installed.run("flash", "doctor", "project/run.toml", code=1)
    assert "vllm is not installed" in told
    assert "→ `flash install` installs" in told
    assert "Error" not in told
    assert "[tiny_model]" in (installed.work / "project" / "run.toml").read_text()
    simulated = (ROOT / "examples" / "simulate.toml").read_text()
    (installed.work / "simulate.toml").write_text(simulated)
    assert "asynchronous" in installed.run("flash", "simulate", "simulate.toml", "run.steps=1")


def test_a_new_project_trains_with_the_wheel(complete: Installed) -> None:
    where = "import flash, envs, algorithms; print(flash.__file__, envs.__file__, algorithms.__file__)"
    assert complete.run("python", "-c", where).count(str(complete.packages)) == len(PACKAGES)
    complete.run("flash", "init", "tried")
    project = complete._replace(work=complete.work / "tried")
    assert "6 passed" in project.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    told = project.run("flash", "doctor", "run.toml")
    assert "missing" not in told
    told = project.run("flash", "train", "run.toml", *SHORT)
    rows = (project.work / "outputs" / "tried" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1]
    assert "Triton" not in told
