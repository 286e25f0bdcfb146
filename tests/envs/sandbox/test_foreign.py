"""What aiodocker has but does not promise is still where `docker_api` touches it.

A test that fails here says what moved: look at the release notes of the library, and at the one file that touches it.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import aiodocker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.execs import Exec
from aiodocker.stream import Stream

import envs.sandbox
from envs.sandbox.engines import docker_api

ROOT = Path(envs.sandbox.__path__[0])


def _missing(thing: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not hasattr(thing, name)]


def test_aiodocker_has_what_the_link_to_an_engine_uses():
    query = inspect.signature(aiodocker.Docker._query).parameters
    lost = [name for name in ("path", "method", "params", "data", "headers") if name not in query]
    assert not lost, f"Docker._query takes no {lost}"
    assert "connector" in inspect.signature(aiodocker.Docker).parameters, "Docker takes no connector"
    assert "detach_keys" in inspect.signature(DockerContainer.attach).parameters, "attach takes no detach_keys"
    assert not _missing(DockerContainer, ("attach", "exec")), "DockerContainer lost some"
    assert not _missing(Exec, ("start",)), "Exec lost some"
    assert not _missing(Stream, ("write_in", "read_out", "close", "__aenter__")), "Stream lost some"
    error = DockerError(404, "no")
    assert (error.status, error.message) == (404, "no"), "DockerError has neither status nor message"


def test_its_insides_are_touched_in_one_file():
    found = {path for path in ROOT.rglob("*.py") if "aiodocker" in _imported(path)}
    assert found == {Path(docker_api.__file__)}


def _imported(path: Path) -> set[str]:
    """The libraries that a file imports."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    modules = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {module.partition(".")[0] for module in modules}
