"""`flash view`, `flash watch` and `flash trace`: arguments that they refuse, and the place of the trace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from flash.cli.main import main
from tests.view.recorded import record
from tests.view.served import served


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must fail without any output, and return its error message."""
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("command", ["view", "trace", "watch"])
def test_a_folder_that_is_no_run_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, command, str(tmp_path))
    assert error == f"flash: error: {tmp_path} is no run directory: it holds no config.toml\n"


def test_without_a_name_and_without_runs_there_is_nothing_to_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("view", "watch"):
        error = error_of(capsys, command)
        assert error.endswith(f"there is no run in outputs/ here: name a run directory: flash {command} RUN_DIR\n")


def test_ports_that_are_wrong_or_taken_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(record(tmp_path / "run", steps=1).path)
    assert "--port: expected 0 to 65535, got 65536" in error_of(capsys, "view", run, "--port", "65536")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = error_of(capsys, "view", run, "--port", str(port))
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use; choose another port" in error


def test_the_trace_is_in_the_run_directory_or_at_the_named_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(tmp_path / "run", steps=2)
    for words, file in [([], run.path / "trace.json"), (["--output", f"{tmp_path}/x.json"], tmp_path / "x.json")]:
        assert main(["trace", str(run.path), *words]) == 0
        assert capsys.readouterr().out.startswith(f"{file}: open it at ui.perfetto.dev")
        assert json.loads(file.read_text())["traceEvents"]
    run.spans.unlink()
    assert "there is nothing to trace yet" in error_of(capsys, "trace", str(run.path))
    assert "does not exist" in error_of(capsys, "trace", str(run.path), "--output", f"{tmp_path}/no/x.json")


def test_characters_that_the_output_cannot_encode_are_escaped(tmp_path: Path) -> None:
    run = record(tmp_path / "run", steps=2)
    command = [sys.executable, "-m", "flash", "watch", str(run.path)]
    told = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert rb"step 2/60 \u2588" in told.stdout


@pytest.mark.parametrize(
    "nonsense", [b"GET / HTTP/1.1\r\n" + 200_000 * b"A: b\r\n", b"\x16\x03\x01", b"GET " + 200_000 * b"/"]
)
def test_nonsense_is_refused_and_other_requests_are_answered(nonsense: bytes, tmp_path: Path) -> None:
    run = record(tmp_path / "run", steps=1)
    with served(run.path) as url:
        stranger = socket.create_connection(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])))
        with stranger:
            stranger.settimeout(20)
            with suppress(ConnectionError):  # the refusal may overtake what is still to be sent
                stranger.sendall(nonsense + b"\r\n" * (len(nonsense) < 10))
                assert stranger.recv(100).startswith(b"HTTP/1.1 4")
        with urllib.request.urlopen(f"{url}api/contents") as answer:
            assert answer.status == 200
