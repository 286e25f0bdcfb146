"""The table of benchmarks, against the modules that are there."""

import ast
import importlib
from pathlib import Path

from benchmarks.__main__ import BENCHMARKS, command
from benchmarks.form import ROOT


def names_given(file: Path) -> list[tuple[str, list[str]]]:
    """The benchmarks that a file runs, each with the words behind `python -m` that start it."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    found: list[tuple[str, list[str]]] = []
    for call in ast.walk(ast.parse(file.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("main", "main_of"):
            first = call.args[0] if call.args else None
            if isinstance(first, ast.Constant):
                found.append((str(first.value), [module]))
            elif isinstance(first, ast.Name) and call.func.id == "main_of":
                table = getattr(importlib.import_module(module), first.id)
                found += [(name, [module, name]) for name in table]
    return found


def test_every_benchmark_stands_in_the_table_under_the_name_it_gives_itself():
    files = sorted(file for file in (ROOT / "benchmarks").rglob("*.py") if file.parent.name != "gpu")
    named = dict(pair for file in files for pair in names_given(file))
    assert named == {name: command(name)[2:] for name in BENCHMARKS}


def test_each_benchmark_is_explained_in_one_short_line():
    assert all(0 < len(benchmark.about) <= 68 and "\n" not in benchmark.about for benchmark in BENCHMARKS.values())
