"""Small runs for the tests of bundles, and archives that are nearly bundles."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from flash.config.load import dump
from flash.config.tree import Config
from flash.observe.rundir.rundir import RunDirectory
from flash.run.replay import one_rank
from flash.samples.batches import split_into_shards
from flash.trainer import checkpoint
from flash.trainer.model.tiny_model import save_tokenizer
from flash.types import Batch, VersionRun
from flash.waiting import run_to_end
from tests.trainer.trainer_cases import Trainer, kept, make_config, make_trajectory, write_model

EVERY = 2
"""Steps between two checkpoints of a run."""


def model_at(folder: Path, **options: Any) -> Path:
    """Write a random model with a tokenizer to `folder`, and return the folder. `options` are settings of the model."""
    write_model(folder, tied=True, **options)
    save_tokenizer(folder, "envs.arithmetic:Arithmetic", {})
    return folder


def config_of(folder: Path, model: Path, /, **tables: dict[str, Any]) -> Config:
    """Return the configuration of a run whose environment is not there, so that nothing can import it."""
    defaults = {"run": {"name": "run", "output_dir": str(folder)}, "env": {"path": "no_such_module:Environment"}}
    merged = {name: defaults.get(name, {}) | tables.get(name, {}) for name in defaults | tables}
    return make_config(model, **merged)


def batch_of(step: int) -> Batch:
    """Return three groups of four random samples of version `step`."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(2, 20, 12).tolist()
    made = [
        make_trajectory(number // 4, number % 4, [VersionRun(step, length)], rng, reward=float(rng.normal()))
        for number, length in enumerate(lengths)
    ]
    return Batch(step, step, made, [])


def make_run(config: Config, steps: int) -> Path:
    """Train a run of one rank in this process, and return its directory. It keeps all batches and checkpoints."""
    directory = RunDirectory.open(config.run_dir, dump(config))
    with one_rank(config):
        train(Trainer(config), directory, steps)
    return directory.path


def train(trainer: Trainer, directory: RunDirectory, steps: int, ranks: int = 1, rank: int = 0) -> None:
    """Train the batches of the first `steps` steps on one of `ranks` ranks. Rank 0 records batches and metrics."""
    for step in range(steps):
        batch = batch_of(step)
        metrics = trainer.train_step(run_to_end(split_into_shards(batch, ranks))[rank])
        if rank == 0:
            directory.write_batch(batch, keep_all=True)
            directory.append_metrics({"step": step, "hub_only": 1.5, "host": "a-host", **metrics})
        if trainer.version % EVERY == 0:
            checkpoint.save(directory.path, trainer, kept(b"the hub's state"), keep=9)


def train_on_two_ranks(config: Config, steps: int, rank: int) -> None:
    """Train a run on two ranks, of which this process is one."""
    store = config.run_dir.with_name("store")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    train(Trainer(config), RunDirectory(config.run_dir), steps, 2, rank)
    dist.destroy_process_group()


def members_of(bundle: Path) -> dict[str, bytes]:
    """Return the content of each member, read by Python's own tarfile."""
    with tarfile.open(bundle, "r:") as archive:
        return {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]


def packed(members: Mapping[str, bytes], file: Path, change: Callable[[tarfile.TarFile], None] | None = None) -> Path:
    """Write an archive of these members with right checksums to `file`, and return the file. `change` adds further
    members in front of the checksums."""
    content = {name: data for name, data in members.items() if name != "SHA256SUMS"}
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in content.items())
    with file.open("wb") as out, tarfile.open(fileobj=out, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        for name, data in content.items():
            add(archive, name, data)
        if change is not None:
            change(archive)
        add(archive, "SHA256SUMS", sums.encode())
    # tarfile fills its last record with zeros, where a bundle ends after two blocks.
    data = file.read_bytes().rstrip(b"\0")
    file.write_bytes(data + bytes(-len(data) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE))
    return file


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields: Any) -> None:
    """Add a member with this content, and with these fields of its header, to an archive."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))
