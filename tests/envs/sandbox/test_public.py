"""The public names of `envs.sandbox`: all there, all described, and none of them paid for before it is used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envs.sandbox

HEAVY = ("aiodocker", "starlette", "uvicorn", "aiohttp", "httpx", "websockets")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", envs.sandbox.__all__)
def test_each_public_name_exists_and_says_what_it_is(name):
    found = getattr(envs.sandbox, name)
    assert found.__name__ == name
    assert len((inspect.getdoc(found) or "").split()) > 3, f"{name} has no docstring that says more than its name"
    assert name in dir(envs.sandbox)


def test_the_checker_knows_the_same_names():
    assert envs.sandbox.__file__ is not None
    text = Path(envs.sandbox.__file__).read_text().partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    imported = re.findall(r"\b\w+\b", " ".join(re.findall(r"import \(?([^)]*?)(?:\)|\n(?! {8}))", text)))
    assert sorted(imported) == sorted(envs.sandbox.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Sandboxes'"):
        _ = envs.sandbox.Sandboxes


def test_importing_the_package_and_its_interfaces_imports_no_engine_and_no_server():
    code = f"import sys, envs.sandbox; envs.sandbox.Spec; sys.exit(str([n for n in {HEAVY} if n in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1)
    assert done.stderr.strip() == ""


def test_the_client_of_a_service_needs_neither_an_engine_nor_the_service():
    code = (
        "import sys, envs.sandbox, envs.sandbox.remote.host; envs.sandbox.SandboxClient; "
        "found = [n for n in ('aiodocker', 'starlette', 'uvicorn', 'envs.sandbox.service') if n in sys.modules]; "
        "sys.exit(str(found or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
