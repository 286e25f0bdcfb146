"""The directions of imports: who may know whom, and that no files import each other in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("flash", "algorithms", "envs", "benchmarks")

APART = {"agent", "project"}
"""Folders of what runs elsewhere: inside of sandboxes, and as a user's own project."""

FLOORS = [
    {"errors", "text", "ages", "sampling", "foreign", "install"},
    {"types"},
    {"waiting", "branches", "config"},
    {"transport", "environment", "observe", "http"},
    {"weights", "samples", "service", "view"},
    {"hub", "data"},
    {"rollout", "trainer"},
    {"run"},
    {"simulate"},
    {"cli"},
    {"__init__", "__main__"},
]
"""The rooms of `flash`, from the ground up: a room imports from lower floors only."""

MOST_FILES = 20
"""Of one room."""

GROUND = {"errors", "text", "types", "waiting", "config", "environment", "http", "service", "data"}
"""Rooms of `flash` that environments may use: the contract, the rooms below it, the server and the endpoint for agents,
and rows of data sets."""


def imports() -> dict[str, set[str]]:
    """For each file of the packages the files that it imports, wherever the import stands."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not APART & {*path.relative_to(ROOT).parts}
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative imports are not used here"
                names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        # `from package import module` is about the module, not about the package.
        known = {
            name
            for name in names & files.keys()
            if not any(other.startswith(f"{name}.") for other in names & files.keys())
        }
        found[module] = known - {module}
    return found


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return imports()


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' → '.join(error.args[1])}")


def test_every_room_of_flash_has_a_floor(graph: dict[str, set[str]]) -> None:
    rooms = {room(module) for module in graph if module.partition(".")[0] == "flash"}
    assert rooms == set().union(*FLOORS)


def test_flash_imports_towards_the_ground(graph: dict[str, set[str]]) -> None:
    floor = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    upward = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if module.partition(".")[0] == other.partition(".")[0] == "flash"
        and room(module) != room(other)
        and floor[room(other)] >= floor[room(module)]
    ]
    assert upward == []


def test_rooms_are_small() -> None:
    files = [file for top in PACKAGES[:3] for file in (ROOT / top).rglob("__init__.py")]
    folders = [file.parent for file in files if not APART & {*file.parts}]
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    crowded = {name: size for name, size in sizes.items() if size > MOST_FILES}
    assert crowded == {}


def test_samples_know_no_peer_and_no_clock(graph: dict[str, set[str]]) -> None:
    below = {"errors", "text", "types", "sampling", "ages", "branches", "config", "environment", "observe", "samples"}
    known = {room(other) for module, others in graph.items() for other in others if module.startswith("flash.samples.")}
    # From `flash.waiting` they take only what runs a generator to its end; nothing here waits.
    assert known <= below | {"advantages", "waiting"}
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "flash/samples").glob("*.py")}
    assert [path for path, source in sources.items() if "import anyio" in source or "import time" in source] == []


def test_flash_knows_of_environments_only_what_commands_say_of_sandboxes(graph: dict[str, set[str]]) -> None:
    known = {
        (module, other)
        for module, others in graph.items()
        for other in others
        if module.partition(".")[0] == "flash" and other.partition(".")[0] == "envs"
    }
    assert known == {("flash.cli.prepare", "envs.sandbox.doctor")}


def test_environments_know_the_contract_and_the_ground(graph: dict[str, set[str]]) -> None:
    beyond = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if module.partition(".")[0] == "envs" and other.partition(".")[0] == "flash" and room(other) not in GROUND
    ]
    assert beyond == []


def test_benchmarks_know_no_tests() -> None:
    files = [path for path in (ROOT / "benchmarks").rglob("*.py") if "tests" in imported(path)]
    assert files == []


def imported(path: Path) -> set[str]:
    """The packages that a file imports from."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_objectives_know_nothing_else(graph: dict[str, set[str]]) -> None:
    beyond = {other for module, others in graph.items() if module.partition(".")[0] == "algorithms" for other in others}
    assert {other.partition(".")[0] for other in beyond} <= {"algorithms"}
