"""Law: inside `envs.sandbox` imports run only towards the ground; `tests/test_imports.py` finds circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import envs.sandbox

LAYERS = (
    ("api", "trees", "user_folder"),
    ("agent", "sandbox", "text", "tokens"),
    ("engines",),
    ("local", "images"),
    ("pool", "doctor"),
    ("protocol",),
    ("service", "remote"),
    ("open",),
    ("cli",),
)
"""From the ground up. Files and folders of one layer know nothing of each other."""

ROOT = Path(envs.sandbox.__path__[0])
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}


def _imports(path: Path) -> Iterator[str]:
    """What a file imports of `envs.sandbox`, wherever in it: as names of modules below that."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found = [f"{module}.{alias.name}" for alias in names]
            case _:
                found = []
        for name in found:
            if name.startswith("envs.sandbox."):
                yield name.removeprefix("envs.sandbox.")


FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")


def test_every_file_belongs_to_a_layer():
    rooms = {path.relative_to(ROOT).with_suffix("").parts[0] for path in FILES}
    assert rooms == set(HEIGHT)


def test_imports_run_only_towards_the_ground():
    upwards: list[str] = []
    for path in FILES:
        room = path.relative_to(ROOT).with_suffix("").parts[0]
        for name in _imports(path):
            other = name.partition(".")[0]
            # What is no room is a name of the package itself, which stands above all of them.
            if other != room and HEIGHT.get(other, len(LAYERS)) >= HEIGHT[room]:
                upwards.append(f"{path.relative_to(ROOT)} imports envs.sandbox.{name}")
    assert not upwards, "; ".join(upwards)
