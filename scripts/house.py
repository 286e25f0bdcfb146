"""Print how large the code is and how readable its docstrings are, so that a change for the worse is noticed.

`python scripts/house.py` prints one row for each folder, then the road of a sample, then the totals. `--list` adds each
docstring whose first word points to something outside it. tests/test_house.py checks the limits.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
"""Root folder of the repository."""
PRODUCTION = ("flash", "algorithms", "envs")
"""Folders with the code that users run. Tests, benchmarks and scripts are not counted."""
SMALL = 60
"""Number of lines below which a file counts as small. A package's `__init__.py` never counts as small."""
POINTERS = (
    *("What", "Who", "Whose", "Whom", "Whether", "Which", "Where", "How", "Why"),
    *("Of", "Those", "These", "That", "As", "By", "With", "From", "Its", "Their", "It", "They"),
    *("None", "One", "Ones", "Other", "Others", "Another", "The same", "Nobody", "Somebody", "So", "Such"),
)
"""First words of docstrings that can be understood only together with other text. They detect a form, not the sense."""
POINTER = re.compile(rf"(?:{'|'.join(POINTERS)})\b")
"""Pattern of the beginning of such a docstring."""

ROAD = (
    "samples/tasks.py",
    "samples/buffer.py",
    "samples/journal.py",
    "samples/store.py",
    "hub/work.py",
    "hub/gate.py",
    "hub/hub.py",
    "hub/protocol.py",
    "transport/server.py",
    "transport/frames.py",
    "transport/client.py",
    "rollout/scheduler.py",
    "rollout/episode/episode.py",
    "rollout/episode/transcript.py",
    "rollout/episode/tokenizer.py",
    "rollout/episode/chat_template.py",
    "rollout/proxy.py",
    "rollout/routing.py",
    "rollout/engine.py",
    "rollout/vllm/engine.py",
    "foreign/vllm.py",
    "samples/groups.py",
    "hub/steps.py",
    "samples/batches.py",
    "trainer/loop.py",
    "trainer/step.py",
    "trainer/plan.py",
    "trainer/packing.py",
    "trainer/references.py",
    "trainer/model/logprobs.py",
    "trainer/model/packed.py",
    "trainer/model/attention.py",
    "trainer/objective.py",
    "trainer/optimizer.py",
)
"""Files of `flash` through which the task, the requests and the tokens of one sample pass, from lease to gradient.

They are in the order in which a sample reaches them. Environments, configuration and objectives are left out. So are
files that every folder uses, such as `types.py`, and files that only observe or count, such as metrics.
"""


class Docstring(NamedTuple):
    """The docstring of a module, class, function, constant or field."""

    file: Path
    line: int
    text: str

    @property
    def points_outside(self) -> bool:
        """True if the first word can be understood only together with other text."""
        return POINTER.match(self.text) is not None


class Folder(NamedTuple):
    """Size and docstrings of one folder, without the folders inside it."""

    files: int
    """Number of Python files."""
    small: int
    """Number of files of fewer than `SMALL` lines."""
    lines: int
    """Number of lines of all files."""
    classes: int
    """Number of classes, also of classes inside others."""
    docstrings: list[Docstring]
    """All docstrings, file by file."""

    @property
    def pointing(self) -> list[Docstring]:
        """Docstrings whose first word points outside them."""
        return [one for one in self.docstrings if one.points_outside]

    @property
    def share(self) -> float:
        """Share of the docstrings whose first word points outside them."""
        return len(self.pointing) / max(len(self.docstrings), 1)


def lines(file: Path) -> int:
    """Return the number of lines of a file."""
    return len(file.read_text(encoding="utf-8").splitlines())


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Yield each Python file of the folders in `PRODUCTION`, with its parsed source."""
    for name in PRODUCTION:
        for file in sorted((ROOT / name).rglob("*.py")):
            yield file, ast.parse(file.read_text(encoding="utf-8"))


def docstrings(file: Path, tree: ast.Module) -> Iterator[Docstring]:
    """Yield every docstring of a file. A text below a constant or a field is its docstring."""
    # Every text that stands alone as a statement counts, because nothing else in the tree has that form.
    for node in ast.walk(tree):
        body: object = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                    yield Docstring(file, line, text.strip())
                case _:
                    pass


@cache
def folders() -> dict[str, Folder]:
    """Return each folder in `PRODUCTION` that holds Python files, by its path from the root. The result is kept,
    because several callers need it."""
    found: dict[str, list[tuple[Path, ast.Module]]] = defaultdict(list)
    for file, tree in sources():
        found[str(file.parent.relative_to(ROOT))].append((file, tree))
    return {
        name: Folder(
            files=len(members),
            small=sum(file.name != "__init__.py" and lines(file) < SMALL for file, _ in members),
            lines=sum(lines(file) for file, _ in members),
            classes=sum(isinstance(node, ast.ClassDef) for _, tree in members for node in ast.walk(tree)),
            docstrings=[one for file, tree in members for one in docstrings(file, tree)],
        )
        for name, members in sorted(found.items())
    }


def namesakes() -> dict[str, list[str]]:
    """Return each name that several public classes have, with their files.

    Such names confuse readers, so the report lists them.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for file, tree in sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(ROOT)))
    return {name: files for name, files in sorted(found.items()) if len(files) > 1}


def report(*, every: bool) -> Iterator[str]:
    """Yield the lines to print. If `every` is True, include each docstring whose first word points outside it."""
    rooms = folders()
    yield f"{'folder':40}{'files':>6}{'small':>6}{'lines':>7}{'classes':>8}{'pointing':>9}"
    for name, room in rooms.items():
        yield f"{name:40}{room.files:6}{room.small:6}{room.lines:7}{room.classes:8}{room.share:9.1%}"
        if every:
            for one in room.pointing:
                yield f"    {one.file.relative_to(ROOT)}:{one.line}: {one.text.splitlines()[0][:100]}"
    yield f"\nthe road of a sample: {len(ROAD)} files, {road_lines()} lines"
    yield from (f"    {lines(ROOT / 'flash' / file):5}  flash/{file}" for file in ROAD)
    yield ""
    for name, files in namesakes().items():
        yield f"two public classes are called {name}: {', '.join(files)}"
    yield total([*rooms.values()])


def road_lines() -> int:
    """Return the lines of all files on the road of a sample."""
    return sum(lines(ROOT / "flash" / file) for file in ROAD)


def total(rooms: Sequence[Folder]) -> str:
    """Return the line of totals over the folders `rooms`."""
    texts, pointing = sum(len(one.docstrings) for one in rooms), sum(len(one.pointing) for one in rooms)
    return (
        f"all: {sum(one.files for one in rooms)} files, {sum(one.small for one in rooms)} of them under {SMALL} lines; "
        f"{sum(one.lines for one in rooms)} lines; {sum(one.classes for one in rooms)} classes; "
        f"{pointing} of {texts} docstrings ({pointing / texts:.1%}) begin with a word that points outside them"
    )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each docstring whose first word points outside it")
    sys.stdout.write("".join(f"{line}\n" for line in report(every=parser.parse_args().list)))


if __name__ == "__main__":
    main()
