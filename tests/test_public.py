"""The public faces: what `import flash` and `import envs.sandbox` give."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import envs.sandbox
import flash

ALIASES = {"Info", "ResetResult", "StepResult", "Observation", "HELD_OUT"}
"""Types and numbers, which have no docstring of their own."""
FACES = pytest.mark.parametrize("face", [flash, envs.sandbox], ids=lambda face: face.__name__)


@FACES
def test_every_public_name_is_there_and_documented(face: ModuleType) -> None:
    for name in face.__all__:
        value: Any = getattr(face, name)
        assert name in dir(face)
        assert name in ALIASES or value.__doc__, f"{face.__name__}.{name} has no docstring"


@FACES
def test_another_name_is_an_attribute_error(face: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        face.trian  # noqa: B018


def test_importing_flash_and_naming_everything_needs_no_torch() -> None:
    script = (
        "import sys, flash; [getattr(flash, name) for name in flash.__all__];"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
