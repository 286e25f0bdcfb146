"""Docstrings and comments name modules, classes and functions that exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("flash", "algorithms", "envs")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
NAMED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?:\(\))?`")


def words(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring and comment of a file."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text, lineno=line)):
                yield line, text
            case _:
                pass
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def module(dotted: str) -> ast.Module | None:
    """Return the parsed module or package of this name, or None if there is none."""
    path = ROOT.joinpath(*dotted.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return ast.Module(body=[], type_ignores=[]) if path.is_dir() else None


def members(body: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """Return what a module or class defines or imports, by name, with the fields that methods of a class set."""
    found: dict[str, ast.AST] = {}
    for node in statements(body.body):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.setdefault(name, node)
            case ast.Name(id=name, ctx=ast.Store()):
                found.setdefault(name, node)
            case ast.alias(name=name, asname=other):
                found.setdefault(other or name, node)
            case _:
                pass
    if isinstance(body, ast.ClassDef):
        for node in ast.walk(body):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.setdefault(name, node)
                case _:
                    pass
    return found


def statements(nodes: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield statements and their parts, but nothing of the bodies of functions and classes."""
    for node in nodes:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from statements([one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)])
        else:
            yield from ast.walk(node)


def exists(dotted: str) -> bool:
    """Return True if a dotted name is a module, or a name in one. Imports nothing."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        if (found := module(".".join(parts[:count]))) is not None:
            return defines(found, found, parts[count:])
    return False


def defines(scope: ast.Module, body: ast.Module | ast.ClassDef, names: Sequence[str]) -> bool:
    """Return True if a module or class defines a name, and that name the next one, and so on.

    `scope` is the module of the class. A base of the class from another module is taken to define every name.
    """
    if not names:
        return True
    found = members(body).get(names[0])
    if isinstance(found, ast.ClassDef):
        return defines(scope, found, names[1:])
    if found is not None or isinstance(body, ast.Module):
        return found is not None and len(names) == 1
    bases = [members(scope).get(base.id) for base in body.bases if isinstance(base, ast.Name)]
    return any(
        defines(scope, base, names) if isinstance(base, ast.ClassDef) else base.name not in ("NamedTuple", "Protocol")
        for base in bases
        if isinstance(base, (ast.ClassDef, ast.alias))
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_names_in_docstrings_and_comments_exist(package: str) -> None:
    missing = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in FILES
        if file.relative_to(ROOT).parts[0] == package
        for line, text in words(file)
        for name in NAMED.findall(text)
        if not exists(name)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("flash.hub", True),
        ("flash.hub.work", True),
        ("flash.hub.work.NodeWork", True),
        ("flash.hub.work.NodeWork.lease", True),
        ("flash.hub.work.NodeWork.no_such_method", False),
        ("flash.hub.no_such_module", False),
        ("flash.hub.work.NoSuchClass", False),
    ],
)
def test_a_name_is_found_without_importing_its_module(name: str, there: bool) -> None:
    assert exists(name) == there
