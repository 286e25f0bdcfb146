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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHORT = ("run.steps=2", "tiny_model.warm_start_steps=20", "train.batch_size=32", "eval.problems=16")


class Installed(NamedTuple):
    """An environment with the wheel and its plain requirements."""

    folder: Path
    work: Path
    """Folder in which commands are run."""

    @property
    def packages(self) -> Path:
        return next((self.folder / "lib").glob("python*/site-packages"))

    def run(self, program: str, *arguments: str, code: int = 0, path: Path | None = None) -> str:
        """Run a program of the environment, and return its output. Fails if the program ends with another exit code.

        `path` is a folder with further packages.
        """
        variables = clean_variables() | ({} if path is None else {"PYTHONPATH": str(path)})
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.work, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout


def clean_variables() -> dict[str, str]:
    """Return the variables of this process without those that lead to other packages or describe this test."""
    unwanted = ("PYTHON", "FLASH_", "PYTEST", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def requirements(lines: list[str], extras: tuple[str, ...] = ("",)) -> Iterator[Requirement]:
    """Yield the requirements of this machine."""
    for wanted in map(Requirement, lines):
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            yield wanted


def link(wanted: list[str], folder: Path) -> None:
    """Make links in a folder to all that these requirements bring, as it is installed in this environment."""
    todo, seen = [*requirements(wanted)], set[str]()
    while todo:
        one = todo.pop()
        if one.name.lower() in seen:
            continue
        seen.add(one.name.lower())
        package = importlib.metadata.distribution(one.name)
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (folder / name).exists():  # several packages may be parts of one
                (folder / name).symlink_to(Path(str(package.locate_file(name))))
        todo += requirements(package.requires or [], ("", *one.extras))


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
    options = ("--quiet", "--no-deps", "--no-index")
    subprocess.run([*pip, "install", *options, wheel], check=True, env=clean_variables())
    link(PROJECT["dependencies"], found.packages)
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
        ("sandbox", "doctor"): "the extra `sandbox` of Flash's wheel only those for this\n",
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


def test_a_package_of_the_user_that_hides_one_of_flash_is_told(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    load = "from flash.config.objects import load_object; load_object('envs.arithmetic:Arithmetic')"
    told = installed.run("python", "-c", load, code=1, path=tmp_path)
    assert f"`envs` is the package in {tmp_path / 'envs'}, which hides {installed.packages / 'envs'}; give" in told


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("view", "flash.view.app, flash.cli.runs"),
        ("sandbox", "envs.sandbox.engines.docker, envs.sandbox.remote.client, envs.sandbox.cli, envs.agent"),
        ("math", "envs.rewards.math"),
        ("train", "flash.run.trainer_rank, flash.run.sft_rank, flash.observe.plots, gguf, accelerate, peft"),
    ],
)
def test_an_extra_brings_what_its_commands_import(
    installed: Installed, tmp_path: Path, extra: str, modules: str
) -> None:
    link(PROJECT["optional-dependencies"][extra], tmp_path)
    installed.run("python", "-c", f"import {modules}", path=tmp_path)


OTHER_VLLM = """
import sys
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

load_general_plugins()
print(current_platform.device_name, isinstance(shm_broadcast.SpinCondition, type), "flash" in sys.modules)
"""
"""A program with vLLM and without Flash. It prints whether vLLM's processes wait as vLLM has it, and if Flash was
loaded."""


def test_a_vllm_of_another_program_loads_nothing_of_flash(complete: Installed) -> None:
    assert complete.run("python", "-c", OTHER_VLLM).splitlines()[-1].split()[1:] == ["True", "False"]


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
