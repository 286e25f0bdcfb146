"""How large the house is: files and lines of each room, the control plane, words of documents, wide classes.

`python scripts/house.py` prints it. Lines are those of the files as they stand.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCTION = ("flash", "algorithms", "envs")
CONTROL_PLANE = ("samples", "hub", "rollout", "transport", "weights", "run", "types.py", "errors.py", "waiting.py")
"""What of `flash` moves samples and weights between processes, and starts and ends these."""
MOST_MEMBERS = 12
MOST_PARAMETERS = 8


def lines(path: Path) -> int:
    """Of one file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def python_files(*folders: str) -> list[Path]:
    """All below these folders of the tree."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def rooms() -> Iterator[tuple[str, int, int]]:
    """Each folder of `flash`: its name, its own files and their lines."""
    files = Counter(path.parent for path in python_files("flash"))
    for folder, count in sorted(files.items()):
        yield str(folder.relative_to(ROOT)), count, sum(map(lines, folder.glob("*.py")))


def control_plane() -> int:
    """Its lines."""
    paths = [ROOT / "flash" / name for name in CONTROL_PLANE]
    return sum(lines(path) for place in paths for path in ([place] if place.suffix else place.rglob("*.py")))


def wide() -> Iterator[str]:
    """Classes with more public members, and constructors with more parameters, than a reader keeps in mind."""
    for path in python_files(*PRODUCTION):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            where = f"{path.relative_to(ROOT)}: {node.name}"
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = [each for each in functions if not each.name.startswith("_")]
            if len(public) > MOST_MEMBERS:
                yield f"{where} has {len(public)} public members"
            for made in (each for each in functions if each.name == "__init__"):
                parameters = len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1
                if parameters > MOST_PARAMETERS:
                    yield f"{where} takes {parameters} parameters"


def main() -> None:
    """Print all of it."""
    for name, files, count in rooms():
        sys.stdout.write(f"{name:28}{files:4} files{count:7} lines\n")
    production = sum(map(lines, python_files(*PRODUCTION)))
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in documents)
    sys.stdout.write(f"control plane {control_plane()} lines, production {production} lines, documents {words} words\n")
    sys.stdout.write("".join(f"{each}\n" for each in wide()))


if __name__ == "__main__":
    main()
