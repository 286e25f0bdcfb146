"""`flash join` and `flash drain`: arguments that they refuse before they look for a hub, and a hub that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join"], "expected one run directory, such as outputs/quickstart, or --hub HOST:PORT"),
        (["join", "a", "b"], "expected one run directory"),
        (["join", "a", "--hub", "node1:29500"], "expected one run directory"),
        (["join", "--hub", "node1"], "--hub: expected HOST:PORT, got node1"),
        (["join", "--hub", "node1:70000"], "--hub: expected HOST:PORT, got node1:70000"),
        (["join", "--hub", "node1:29500"], "FLASH_TOKEN is not set"),
        (["join", "a", "train.steps=3"], "`train.steps=3` is not a machine's own: the run has it"),
        (["join", "nowhere", "engine.count=2"], "nowhere is no run directory"),
        (["join", "sweep/lr=0.1", "engine.count=2"], "sweep/lr=0.1 is no run directory"),
        (["drain", "a", "b"], "expected the number of a node, as the run's output names it, got b"),
        (["drain", "3"], "expected one run directory"),
        (["drain", "a", "3", "4"], "or --hub HOST:PORT, got a and 3"),
        (["drain", "nowhere", "3"], "nowhere is no run directory"),
    ],
)
def test_wrong_input_gives_an_error_of_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLASH_TOKEN", raising=False)
    for name in ("FLASH_LAUNCHER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert main(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("flash: error: ")
    assert words in line
