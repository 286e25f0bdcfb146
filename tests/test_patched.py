"""Tests give a program its fakes: they replace nothing in a module, but where the system itself is what misbehaves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ALLOWED = {
    "trainer/test_checkpoint.py": ["setattr", "setattr"],  # `os.fsync`, `Path.rename`: where a writer dies
    "trainer/killed_writer.py": ["os.fsync"],
    "envs/sandbox/local/test_probes.py": ["setattr"],  # `time.time`: a wall clock that jumps
    "http/test_server.py": ["setattr"],  # `socket.socket`: a kernel without the address family
    # Of a process of its own, which becomes another program.
    "forked_command.py": ["sys.stdout", "sys.stderr", "sys.argv", "sys.argv"],
    "fuzz/weights.py": ["threading.excepthook"],  # made to be set
}
"""Attributes that each file replaces. All of them belong to Python or the operating system."""


def replaced(code: str) -> Iterator[str]:
    """Calls that patch, by their names, and attributes of imported names that are assigned."""
    nodes = [*ast.walk(ast.parse(code))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" as name)):
                yield name
            case ast.ImportFrom(module="unittest.mock") | ast.alias(name="mock" | "unittest.mock"):
                yield "mock"
            case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()) if root(value) in names:
                yield ast.unparse(node)
            case _:
                pass


def root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.slow
def test_nothing_is_patched_but_the_system() -> None:
    found = {str(path.relative_to(TESTS)): [*replaced(path.read_text())] for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        'monkeypatch.setattr(module, "LIMIT", 1)',
        'patcher.delattr("package.module.name")',
        "from unittest import mock",
        "from unittest.mock import patch",
        "import unittest.mock",
        "from package import module\nmodule.LIMIT = 1",
        "import package.module\npackage.module.LIMIT += 1",
        "from package import module as other\ndel other.LIMIT",
    ],
)
def test_every_way_of_it_is_seen(code: str) -> None:
    assert len([*replaced(code)]) == 1


def test_fakes_the_environment_and_entries_of_modules_are_no_patches() -> None:
    code = 'import os, sys\nfake.limit = 1\nos.environ["A"] = "b"\nmonkeypatch.setenv("A", "b")\n'
    assert not [*replaced(f"{code}monkeypatch.setitem(sys.modules, 'package', None)")]
