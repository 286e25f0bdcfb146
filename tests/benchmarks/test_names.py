"""The table of benchmarks, against the modules that are there."""

import ast
import importlib
from pathlib import Path

from benchmarks.__main__ import MODULES
from benchmarks.form import ROOT

ENTRY_POINTS = ("main", "benchmark", "main_of")
"""Names under which modules call `benchmarks.form.main` and `benchmarks.form.main_of`."""


def names_given(file: Path) -> list[tuple[str, str]]:
    """The benchmarks that a file runs, each with the words behind `python -m` that start it."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    found: list[tuple[str, str]] = []
    for call in ast.walk(ast.parse(file.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ENTRY_POINTS:
            first = call.args[0] if call.args else None
            if isinstance(first, ast.Constant):
                found.append((str(first.value), module))
            elif isinstance(first, ast.Name) and call.func.id == "main_of":
                table = getattr(importlib.import_module(module), first.id)
                found += [(name, f"{module} {name}") for name in table]
    return found


def test_every_benchmark_stands_in_the_table_under_the_name_it_gives_itself():
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert dict(pair for file in files for pair in names_given(file)) == MODULES
