"""Process that writes one checkpoint, then hangs during the second."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from flash.trainer import checkpoint
from tests.trainer.test_checkpoint import HUB, train, trained
from tests.trainer.trainer_cases import kept


def main(model: Path, run_dir: Path) -> None:
    """Write two checkpoints of the model to the run directory. Makes the file `writing` there before it hangs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = trained(model, 1)
    checkpoint.save(run_dir, trainer, kept(HUB), keep=2)
    train(trainer, 1)

    def hang(_: int) -> None:
        # Replaces `os.fsync`, which the writer calls before the checkpoint gets its final name.
        (run_dir / "writing").touch()
        time.sleep(600)

    os.fsync = hang
    checkpoint.save(run_dir, trainer, kept(HUB), keep=2)
