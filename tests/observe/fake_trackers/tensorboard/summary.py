"""Fake of the part of TensorBoard's writer that Flash uses; it records its calls by step."""

from __future__ import annotations

from pathlib import Path

from fake_said import said


class Writer:
    def __init__(self, output: str) -> None:
        Path(output).mkdir(parents=True, exist_ok=True)
        said("init", project="flash", id=Path(output).name, config={})
        self._step: int | None = None
        self._values: dict[str, float] = {}

    def add_scalar(self, tag: str, data: float, step: int, *, wall_time: float) -> None:
        assert self._step in (None, step)
        assert wall_time > 0
        self._step = step
        self._values[tag] = data

    def flush(self) -> None:
        said("log", step=self._step, values=self._values)
        self._step, self._values = None, {}

    def close(self) -> None:
        said("finish")
