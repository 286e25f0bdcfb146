"""Fake of the part of Weights & Biases that Flash uses; it records its calls."""

from __future__ import annotations

from typing import Any

from fake_said import said


class Settings:
    def __init__(self, *, silent: bool) -> None:
        assert silent


class Run:
    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert step_metric in (None, "train/global_step")

    def log(self, data: dict[str, float]) -> None:
        step = data.pop("train/global_step")
        said("log", step=step, values=data)

    def finish(self, exit_code: int | None = None) -> None:
        said("finish", failed=bool(exit_code))


def init(*, project: str, id: str, name: str, resume: str, config: dict[str, Any], dir: str, settings: Settings) -> Run:
    assert resume == "allow"
    said("init", project=project, id=id, config=config)
    return Run()
