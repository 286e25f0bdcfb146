"""Fixtures of the tests of whole runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.whole_run import COMMAND, CONFIG, Run, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model, which the first run with the table [tiny_model] makes."""
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that starts a run. Its processes are killed at the end of the test."""
    runs: list[Run] = []

    def begin(*arguments: str, text: str = CONFIG, command: Sequence[str] = COMMAND, real: bool = False) -> Run:
        if "[tiny_model]" not in text:
            make_model(model, tmp_path / "first")
        runs.append(Run(tmp_path, model, *arguments, text=text, command=command, real=real))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(10)
