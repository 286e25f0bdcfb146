"""The table of benchmarks, against the modules that are there."""

import ast
from pathlib import Path

from benchmarks.__main__ import MODULES
from benchmarks.form import ROOT

ENTRY_POINTS = ("main", "benchmark")
"""What modules call `benchmarks.form.main`."""


def names_given(file: Path) -> list[str]:
    """The first arguments of the calls of `benchmarks.form.main` in a file, where they are written out."""
    return [
        str(call.args[0].value)
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ENTRY_POINTS
        and call.args
        and isinstance(call.args[0], ast.Constant)
    ]


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def test_every_benchmark_stands_in_the_table_under_the_name_it_gives_itself():
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    found = {name: module_of(file) for file in files for name in names_given(file)}
    assert found == MODULES
