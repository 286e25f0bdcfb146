"""Fingerprints differ if the options, the files that they name, or the modules of the classes differ."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from flash.config.tree import EnvConfig
from flash.environment import fingerprint as module
from flash.environment.fingerprint import fingerprint


def of(path: str = "envs.dataset:DatasetEnv", **options: Any) -> str:
    """Return the fingerprint of an environment with these options."""
    return fingerprint(EnvConfig(path, options))


def test_other_options_or_another_class_give_another_fingerprint() -> None:
    assert of(digits=1) == of(digits=1)
    assert len({of(digits=1), of(digits=2), of(), of("envs.arithmetic:Arithmetic"), of("nowhere.at_all:Env")}) == 5


def test_a_package_that_fails_to_import_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_package").mkdir()
    (tmp_path / "failing_package" / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert of(verifier="failing_package.rewards:score") != of(verifier="no_package.rewards:score")


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_that_an_option_names_counts_by_its_content(tmp_path: Path, nested: bool) -> None:
    file = tmp_path / "data.jsonl"
    options: dict[str, Any] = {"kinds": {"a": {"options": [str(file)]}}} if nested else {"path": str(file)}
    missing = of(**options)
    file.write_text("one")
    one = of(**options)
    file.write_text("two")
    two = of(**options)
    file.write_text("one")
    assert len({missing, one, two}) == 3
    assert of(**options) == one


def test_a_folder_counts_by_its_files(tmp_path: Path) -> None:
    before = of(path=str(tmp_path))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.toml").write_text("x")
    after = of(path=str(tmp_path))
    assert after != before
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "one.pyc").write_text("x")
    assert of(path=str(tmp_path)) == after


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("one")
    with file.open("ab") as stream:
        stream.truncate(module.MAX_BYTES + 1)
    before = of(path=str(file))
    with file.open("ab") as stream:
        stream.truncate(module.MAX_BYTES + 2)
    assert of(path=str(file)) != before


def test_a_small_file_after_a_huge_one_is_read(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as stream:
        stream.truncate(module.MAX_BYTES + 1)
    small = tmp_path / "b"
    small.write_text("one")
    before = of(path=str(tmp_path))
    times = small.stat().st_atime_ns, small.stat().st_mtime_ns
    small.write_text("two")
    os.utime(small, ns=times)
    assert of(path=str(tmp_path)) != before


def test_the_files_of_a_folder_are_read_up_to_the_limit_for_all_files(tmp_path: Path) -> None:
    """Files beyond the limit count by their sizes and times, and a pipe is not read."""
    for name in ("a", "b", "c"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(module.MAX_BYTES // 2)
    os.mkfifo(tmp_path / "pipe")
    before = of(path=str(tmp_path))
    last = tmp_path / "c"
    times = last.stat().st_atime_ns, last.stat().st_mtime_ns
    with last.open("r+b") as stream:
        stream.write(b"x")
    os.utime(last, ns=times)
    assert of(path=str(tmp_path)) == before, "the last file was read, beyond the limit"
    with (tmp_path / "a").open("r+b") as stream:
        stream.write(b"x")
    assert of(path=str(tmp_path)) != before


def test_an_edited_class_has_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("edited_env", None)
    file = tmp_path / "edited_env.py"
    file.write_text("class Env: pass")
    before = of("edited_env:Env")
    file.write_text("class Env: digits = 2")
    assert of("edited_env:Env") != before
    mixed = of("envs.mixture:Mixture", kinds={"a": {"env": "edited_env:Env"}})
    file.write_text("class Env: digits = 3")
    assert of("envs.mixture:Mixture", kinds={"a": {"env": "edited_env:Env"}}) != mixed
