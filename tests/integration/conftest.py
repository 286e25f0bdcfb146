"""What tests of whole runs share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.whole_run import COMMAND, CONFIG, Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; the first run makes it, the others find it."""
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str, text: str = CONFIG, command: Sequence[str] = COMMAND) -> Run:
        runs.append(Run(tmp_path, model, *arguments, text=text, command=command))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        run.process.wait(10)
