"""Fake of the part of MLflow's client that Flash uses; it records its calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fake_said import said

from .entities import Metric, Param

NAME = re.compile(r"[/\w.\- :]+")


class MlflowClient:
    def get_experiment_by_name(self, name: str) -> Any:
        self._experiment = name

    def create_experiment(self, name: str) -> str:
        return f"of {name}"

    def create_run(self, experiment_id: str, *, run_name: str) -> Any:
        said("init", project=experiment_id.removeprefix("of "), id="a-run", config={})
        return SimpleNamespace(info=SimpleNamespace(run_id="a-run"))

    def update_run(self, run_id: str, status: str) -> None:
        assert status == "RUNNING"
        said("init", project="flash", id=run_id, config={})

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        assert len(params) <= 100
        for one in (*metrics, *params):
            assert NAME.fullmatch(one.key), one.key
        if params:
            said("settings", of=run_id)
        if metrics:
            (step,) = {one.step for one in metrics}
            said("log", step=step, values={one.key: one.value for one in metrics})

    def delete_run(self, run_id: str) -> None:
        said("delete", id=run_id)

    def set_terminated(self, run_id: str, status: str) -> None:
        said("finish", failed=status == "FAILED")
