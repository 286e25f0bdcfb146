"""The documents as a site: it builds without a warning, lists every public name, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envs.sandbox
import flash
import flash.environment
from algorithms import OBJECTIVES

ROOT = Path(__file__).parents[1]
"""Root folder of the repository."""
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|link(?=[^>]*rel="(?:stylesheet|preload|preconnect|icon)"))[^>]*(?:src|href)="(?:https?:)?//[^>]*>"""
)
"""A tag that has the browser fetch something from another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make site` does. A link that leads nowhere or a page in no menu is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    places = set(re.findall(r'id="([\w.]+)"', (site / "api.html").read_text(encoding="utf-8")))
    names = {f"{face.__name__}.{name}" for face in (flash, envs.sandbox) for name in face.__all__}
    names |= {f"flash.environment.{name}" for name in {*flash.environment.__all__} - {*flash.__all__}}
    names |= {path.replace(":", ".") for path in OBJECTIVES.values()}
    assert names - places == set()


def test_every_example_has_a_page(site: Path) -> None:
    for example in (ROOT / "examples").glob("*.toml"):
        page = (site / "examples" / f"{example.name}.html").read_text(encoding="utf-8")
        assert "[run]" in re.sub(r"<[^>]+>", "", page)


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert FETCHED.findall(page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_no_list_or_table_is_shown_as_its_source(site: Path) -> None:
    # Without an empty line before it a list is none, and a table ends at one in its middle.
    for page in site.glob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            assert not re.search(r"^(?:\||- |\d+\. )", paragraph, flags=re.MULTILINE), (page.name, paragraph[:200])


def test_no_bar_in_a_table_is_shown_with_what_escapes_it(site: Path) -> None:
    for page in site.glob("*.html"):
        assert "\\|" not in "".join(re.findall(r"<td>(.*?)</td>", page.read_text(encoding="utf-8"), flags=re.DOTALL)), (
            page
        )
