"""Fake of the part of trackio that Flash uses; it records its calls."""

from __future__ import annotations

from typing import Any

from fake_said import said


class Run:
    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        said("log", step=step, values=metrics)

    def finish(self) -> None:
        said("finish")


def init(
    project: str,
    *,
    name: str,
    config: dict[str, Any],
    resume: str,
    embed: bool,
    auto_log_gpu: bool,
    auto_log_cpu: bool,
) -> Run:
    assert resume == "allow"
    said("init", project=project, id=name, config=config)
    return Run()
