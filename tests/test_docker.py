"""docker/Dockerfile: what can be checked without building it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from flash.cli.main import parse

ROOT = Path(__file__).parents[1]


def instructions() -> Iterator[tuple[str, str]]:
    """Yield each instruction with its arguments, as one line."""
    lines = [line for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    for line in filter(None, "\n".join(lines).replace("\\\n", " ").splitlines()):
        name, _, arguments = line.partition(" ")
        yield name, re.sub(r"\s+", " ", arguments)


def test_every_instruction_is_one_of_dockers() -> None:
    known = {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}
    assert {name for name, _ in instructions()} <= known


def test_the_program_runs_as_an_ordinary_user() -> None:
    last = [arguments for name, arguments in instructions() if name == "USER"][-1]
    made = " ".join(arguments for name, arguments in instructions() if name == "RUN")
    assert re.search(rf"useradd [^&]*--uid 1000 {last}\b", made)


def test_stages_are_named_before_they_are_used_and_the_base_has_a_version() -> None:
    stages: set[str] = set()
    for name, arguments in instructions():
        if name == "FROM":
            image, _, stage = arguments.partition(" AS ")
            assert image in {"${BASE}", *stages}
            stages.add(stage)
        if source := re.match(r"--from=(\S+)", arguments):
            assert source[1] in stages
    (base,) = (arguments for name, arguments in instructions() if arguments.startswith("BASE="))
    assert re.fullmatch(r"BASE=docker\.io/library/python:3\.1[123]-\S+", base)


def test_the_image_has_packages_in_locked_versions_for_either_kind_of_machine() -> None:
    (build,) = (arguments.removeprefix("BUILD=") for _, arguments in instructions() if arguments.startswith("BUILD="))
    assert 'flash install "--${BUILD}"' in " ".join(arguments for name, arguments in instructions() if name == "RUN")
    for kind in (build, "cuda"):
        assert getattr(parse(["install", f"--{kind}"]), kind) is True


def test_the_builder_gets_what_the_wheel_is_built_from_and_nothing_else() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(kept) == sorted(["flash", "envs", "algorithms", "pyproject.toml", "README.md", "LICENSE"])
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert [name for name in kept if not (ROOT / name).exists()] == []
