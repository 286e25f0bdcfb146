"""What the documents name is there: files, modules, links and import paths."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from flash.config.objects import load_object

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = r"(?:flash|algorithms|envs|benchmarks|tests|examples|scripts|docs)"


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        rf"(?<![\w./-])({OURS}/[\w/.-]*\w\.(?:py|toml|md|sh|png|json))", page.read_text(encoding="utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_modules_that_are_started_or_imported_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {
        *re.findall(rf"python -m ({OURS}[\w.]*)", text),
        *re.findall(rf"^\s*from ({OURS}[\w.]*) import", text, flags=re.MULTILINE),
    }
    assert [name for name in named if find_spec(name) is None] == []


def test_names_that_are_imported_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    imports = re.findall(rf"^\s*from ({OURS}[\w.]*) import ([\w, ]+)$", text, flags=re.MULTILINE)
    for module, names in imports:
        for name in names.split(","):
            load_object(f"{module}:{name.strip()}")


def test_import_paths_lead_to_something(page: Path) -> None:
    for path in re.findall(rf"(?<![\w./-])({OURS}(?:\.\w+)+:\w+)\b", page.read_text(encoding="utf-8")):
        load_object(path)
