"""Process group of one rank, and folders of tiny models, for all tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainer.trainer_cases import write_model


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Create a process group of one rank. FSDP needs a group even then.

    The group ends with the file, because later tests of the same worker run code that makes its own group.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose output layer shares its weights with the embedding."""
    return write_model(tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose output layer has weights of its own."""
    return write_model(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tied_model: Path, untied_model: Path) -> Path:
    """Return each of the two tiny models in turn."""
    return tied_model if request.param == "tied" else untied_model
