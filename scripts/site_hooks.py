"""Hooks of mkdocs that add a page to the site for each file outside docs/ that the documents link to.

mkdocs calls the two hooks by their names. The pages exist in the site only: no file is copied into the repository.

A page of docs/ may have marks `<!-- api: MODULE -->` or `<!-- api: MODULE: NAME NAME -->`. In the site, the docstrings
of the module or of these names appear there, by directives (`::: PATH`) of the plugin mkdocstrings.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
"""Root folder of the repository, from which Flash is imported."""
sys.path.insert(0, str(ROOT))

from algorithms import OBJECTIVES  # noqa: E402 - the path has to be there first

EXAMPLES = ("toml", "py", "yaml")
"""Suffixes of the files in examples/ that get a page. They are also the names of the languages for highlighting."""
CONTRIBUTING = "CONTRIBUTING.md"
"""File in the root of the repository that gets a page."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add pages for CONTRIBUTING.md and the examples to the files of the site. mkdocs calls it once for each build."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in sorted((ROOT / "examples").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix[1:] in EXAMPLES:
            text = f"# {name}\n\n```{path.suffix[1:]}\n{path.read_text(encoding='utf-8')}```\n"
            files.append(File.generated(config, f"{name}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    # In the site this page lies beside those of docs/.
    text = (ROOT / CONTRIBUTING).read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, CONTRIBUTING, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links out of docs/ to the added pages, and replace `api` marks by directives of mkdocstrings."""
    # In a table, GitHub requires that a bar inside code is escaped, but mkdocs would show the backslash.
    markdown = re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), markdown)
    markdown = re.sub(rf"\]\(\.\./(examples/[\w/-]+\.(?:{'|'.join(EXAMPLES)}))\)", r"](\1.md)", markdown)
    markdown = markdown.replace(f"](../{CONTRIBUTING})", f"]({CONTRIBUTING})")
    return re.sub(r"<!-- api: ([\w.]+)(:[ \w]+)? -->", lambda found: _listed(found[1], found[2]), markdown)


def _listed(module: str, names: str | None) -> str:
    """Return directives of mkdocstrings for names of a module. The arguments are the two parts of an `api` mark.

    `names` has a colon and the names with spaces between them; None: all public names of the module. The name
    `algorithms.OBJECTIVES` stands for the classes of all objectives, which are in several modules.
    """
    if module == "algorithms.OBJECTIVES":
        paths = [path.replace(":", ".") for path in OBJECTIVES.values()]
    elif names:
        paths = [f"{module}.{name}" for name in names[1:].split()]
    else:
        return f"\n::: {module}\n"
    return "".join(
        f"\n::: {path}\n    options: {{show_root_heading: true, show_root_toc_entry: true, inherited_members: true}}\n"
        for path in paths
    )
