"""The names of vLLM's parsers, which are read from its source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "from flash.foreign.vllm_parsers import parser_names; print(parser_names('reasoning'))"


def names(folder: Path) -> subprocess.CompletedProcess[str]:
    """Print the names of reasoning parsers in a process that imports from `folder` first. Return the ended process."""
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )


def test_the_names_are_the_keys_of_the_list(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "reasoning").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    source = "_REASONING_PARSERS_TO_REGISTER = {'b': ('module', 'B'), 'a': ('module', 'A')}"
    (tmp_path / "vllm" / "reasoning" / "__init__.py").write_text(source)
    assert names(tmp_path).stdout == "['a', 'b']\n"


@pytest.mark.parametrize("source", [None, "", "_REASONING_PARSERS_TO_REGISTER = dict()"])
def test_a_vllm_that_lists_its_parsers_elsewhere_is_an_error_that_names_the_file_to_adapt(
    tmp_path: Path, source: str | None
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    if source is not None:
        (tmp_path / "vllm" / "reasoning").mkdir()
        (tmp_path / "vllm" / "reasoning" / "__init__.py").write_text(source)
    told = names(tmp_path).stderr
    assert (
        "LookupError: the installed vLLM lists its parsers (`reasoning`) in another place: adapt flash/foreign" in told
    )
