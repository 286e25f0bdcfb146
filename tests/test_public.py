"""The public face: what `import flash` gives, and the page that lists it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flash

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
ALIASES = {"Info", "ResetResult", "StepResult", "Observation", "HELD_OUT"}
"""Types and numbers without a docstring of their own."""


@pytest.mark.parametrize("name", flash.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value: Any = getattr(flash, name)
    assert name in dir(flash)
    assert f"`{name}" in PAGE.read_text(encoding="utf-8")
    if name not in ALIASES:
        assert value.__doc__, f"{name} has no docstring"


def test_the_page_lists_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## `import flash`")[2].partition("\n## ")[0]
    assert {*re.findall(r"^\| `(\w+)", text, flags=re.MULTILINE)} == {*flash.__all__}


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        flash.trian  # noqa: B018


def test_importing_it_and_naming_everything_needs_no_torch() -> None:
    script = (
        "import sys, flash; [getattr(flash, name) for name in flash.__all__];"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
