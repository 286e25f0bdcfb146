"""A worker of an engine records its own steps, the first so many of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flash.profile.parts import parts_in, read_part
from flash.weights.worker_extension import WorkerExtension

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # imports vLLM


class Worker(WorkerExtension):
    """As vLLM's, with ours mixed in."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cpu")

    def execute_model(self, size: int) -> int:
        return int(torch.ones(size).sum())


def recorded(file: Path) -> list[dict[str, Any]]:
    part, _ = read_part(file)
    return [json.loads(bytes(event)) for event in part.events]


def test_the_first_steps_are_recorded_and_all_are_made(tmp_path: Path) -> None:
    worker = Worker(0)
    worker.flash_profile_begin(str(tmp_path), "engine-2", 3)
    assert [worker.execute_model(size) for size in range(5)] == [0, 1, 2, 3, 4]
    assert parts_in(tmp_path) == []
    worker.flash_profile_end()
    assert "execute_model" not in vars(worker), "nothing is left on the worker"
    (file,) = parts_in(tmp_path)
    assert file.name == "engine-2.json.gz"
    facts = read_part(file)[1]
    assert (facts.who, facts.steps) == ("engine 2", 3)
    assert len([event for event in recorded(file) if event["name"] == "engine step"]) == 3
    worker.flash_profile_end()


def test_further_workers_have_files_of_their_own(tmp_path: Path) -> None:
    worker = Worker(1)
    worker.flash_profile_begin(str(tmp_path), "engine-0", 3)
    worker.execute_model(1)
    worker.flash_profile_end()
    (file,) = parts_in(tmp_path)
    assert file.name == "engine-0-worker-1.json.gz"
    assert read_part(file)[1].who == "engine 0 worker 1"
