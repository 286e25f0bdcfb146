"""What the documents name is there: files, modules, links and import paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import envs.sandbox
import flash
from flash.config.objects import load_object

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = r"(?:flash|algorithms|envs|benchmarks|tests|examples|scripts|docs)"

ELSEWHERE = {"No space left on device"}
"""What the documents explain and no text of ours has."""

TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
"""Text of each page."""


def test_files_that_are_named_exist() -> None:
    for page, text in TEXTS.items():
        named = re.findall(rf"(?<![\w./-])({OURS}/[\w/.-]*\w\.(?:py|toml|md|sh|png|json))", text)
        assert [name for name in named if not (ROOT / name).exists()] == [], page.name


def test_links_lead_somewhere() -> None:
    for page, text in TEXTS.items():
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name


def anchors(text: str) -> set[str]:
    """The anchors of a page that both GitHub and the site make of its headings, and those that the page sets itself."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one)).lower() for one in headings]
    # GitHub keeps each of several hyphens, and the site makes them one.
    return {one.replace(" ", "-") for one in plain if not re.search("[- ]{2}", one)} | {
        *re.findall(r'id="(.+?)"', text)
    }


def test_links_lead_to_a_heading() -> None:
    there = {page.resolve(): anchors(text) for page, text in TEXTS.items()}
    for page, text in TEXTS.items():
        links = re.findall(r"\]\(((?!https?:)[^)#\s]*)#([^)\s]+)\)", text)
        targets = [((page.parent / file).resolve() if file else page, anchor) for file, anchor in links]
        assert [anchor for file, anchor in targets if anchor not in there.get(file, {anchor})] == [], page.name


def test_every_public_name_is_on_the_page_of_the_python_interface() -> None:
    text = TEXTS[ROOT / "docs" / "api.md"]
    assert [name for module in (flash, envs.sandbox) for name in module.__all__ if f"`{name}`" not in text] == []


def test_nobody_is_sent_to_an_index_that_does_not_have_flash() -> None:
    folders = (ROOT / name for name in ("docs", "examples", "flash", "algorithms", "envs"))
    found = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml"))
    files = [ROOT / "README.md", *found]
    advising = [path for path in files if re.search(r"install\s+'?flash-rl", path.read_text(encoding="utf-8"))]
    assert advising == []


def test_modules_that_are_started_or_imported_exist() -> None:
    for page, text in TEXTS.items():
        named = {
            *re.findall(rf"python -m ({OURS}[\w.]*)", text),
            *re.findall(rf"^\s*from ({OURS}[\w.]*) import", text, flags=re.MULTILINE),
        }
        assert [name for name in named if find_spec(name) is None] == [], page.name


def test_names_that_are_imported_exist() -> None:
    for text in TEXTS.values():
        imports = re.findall(rf"^\s*from ({OURS}[\w.]*) import ([\w, ]+)$", text, flags=re.MULTILINE)
        for module, names in imports:
            for name in names.split(","):
                load_object(f"{module}:{name.strip()}")


def test_import_paths_lead_to_something() -> None:
    for text in TEXTS.values():
        for path in re.findall(rf"(?<![\w./-])({OURS}(?:\.\w+)+:\w+)\b", text):
            load_object(path)


def defined(nodes: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the classes, functions, constants and fields that statements define."""
    for node in nodes:
        match node:
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from defined(node.body, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case _:
                pass


def test_classes_and_functions_that_are_named_behind_a_file_exist() -> None:
    names: dict[str, set[str]] = {}
    for page, text in TEXTS.items():
        for file, name in re.findall(rf"(?<![\w./-])({OURS}/[\w/.-]*\w\.py):([A-Za-z_][\w.]*\w)", text):
            if file not in names:
                names[file] = set(defined(ast.parse((ROOT / file).read_text(encoding="utf-8")).body))
            assert name in names[file], f"{page.name}: {file}:{name}"


def test_folders_that_contributors_are_sent_to_exist() -> None:
    named = re.findall(rf"`({OURS}/[\w/-]*)/`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_dir()] == []


def said(file: Path) -> Iterator[str]:
    """The texts of a file, with … for what is filled in."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


@pytest.mark.slow
def test_messages_that_are_explained_are_given() -> None:
    files = [file for folder in ("flash", "envs", "algorithms") for file in (ROOT / folder).rglob("*.py")]
    given = "\n".join(text for file in files for text in said(file))
    for page in ("when-it-fails.md", "objective.md"):
        rows = re.findall(r"^\| (.+?) \|", TEXTS[ROOT / "docs" / page], flags=re.MULTILINE)
        messages = [b or a for row in rows for b, a in re.findall(r"``(.+?)``|`(.+?)`", row)]
        parts = {part.strip() for message in messages for part in message.split("…") if " " in part.strip()}
        assert len(parts) > 5
        assert sorted(part for part in parts - ELSEWHERE if part not in given) == [], page


def test_every_example_is_a_recipe() -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [file.name for file in (ROOT / "examples").glob("*.toml") if f"/{file.name})" not in recipes] == []
