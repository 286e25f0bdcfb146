from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.envs.sandbox.podman import PodmanEngine

SLOW_PODMAN = """#!{python}
import socket, sys, time
if "rm" in sys.argv:
    time.sleep(60)
if "service" in sys.argv:
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[-1].removeprefix("unix://"))
    server.listen()
    while True:
        connection, _ = server.accept()
        connection.recv(64)
        connection.sendall(b"HTTP/1.0 200 OK")
        connection.close()
"""
"""A `podman` whose service answers, and whose removal of containers takes a minute."""


def test_an_engine_is_cleaned_up_although_its_containers_are_not_removed_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = tmp_path / "podman"
    podman.write_text(SLOW_PODMAN.format(python=sys.executable))
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    engine = PodmanEngine(command_s=5.0)
    try:
        engine.open()
        assert engine.folder.exists()
    finally:
        engine.close()
    assert not engine.folder.exists()
