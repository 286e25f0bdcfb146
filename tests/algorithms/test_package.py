"""The package as a whole: what it imports, and that it documents itself."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import algorithms
from algorithms import OBJECTIVES
from algorithms.corrections import Geometric, IcePop, SequenceMask, TokenTis
from algorithms.references import Kl
from algorithms.rhythm import Rhythm
from algorithms.shaping import LengthPenalty, Overlong
from algorithms.staleness import ExponentialStaleness
from scripts.reference_docs import field_docs
from tests.algorithms.cases import objective_class

MODULES = [module.name for module in pkgutil.walk_packages(algorithms.__path__, "algorithms.")]
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_importing_and_making_objectives_needs_no_torch() -> None:
    code = (
        "import sys, importlib, algorithms\n"
        f"for name in {MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "for path in algorithms.OBJECTIVES.values():\n"
        "    module, name = path.split(':')\n"
        "    getattr(sys.modules[module], name)()\n"
        "assert 'torch' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('flash', 'envs')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


FAMILIES = ("clipped", "reinforce", "sequence", "trust_region")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_stands_in_the_file_of_its_family_and_names_its_paper(name: str) -> None:
    kind = objective_class(name)
    assert kind.__module__ in [f"algorithms.objectives.{family}" for family in FAMILIES]
    assert re.search(r"arXiv \d{4}\.\d{5}|et al\. \d{4}", inspect.getdoc(kind) or "")


@pytest.mark.parametrize(
    "struct",
    [
        *map(objective_class, OBJECTIVES),
        *(TokenTis, IcePop, SequenceMask, Geometric, Kl, Overlong, LengthPenalty, ExponentialStaleness, Rhythm),
    ],
)
def test_every_option_says_what_it_means(struct: type[msgspec.Struct]) -> None:
    assert set(field_docs(struct)) == {field.name for field in msgspec.structs.fields(struct)}


def test_the_page_names_the_options_of_rhythm() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## The rhythm of attention")[1].split("\n## ")[0]
    assert all(f"`{field.name}`" in section for field in msgspec.structs.fields(Rhythm))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_page_names_every_objective_and_its_options(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert rows
    options = {field.name for field in msgspec.structs.fields(objective_class(name))}
    assert all(any(f"`{option}`" in row for row in rows) for option in options)
