"""Program that writes one checkpoint, then hangs during the second. Arguments: model folder, run directory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from flash.trainer import checkpoint
from tests.trainer.test_checkpoint import HUB, train, trained
from tests.trainer.trainer_cases import kept


def main(model: Path, run_dir: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = trained(model, 1)
    checkpoint.save(run_dir, trainer, kept(HUB), keep=2)
    train(trainer, 1)

    def hang(descriptor: int) -> None:
        sys.stdout.write("writing\n")
        sys.stdout.flush()
        time.sleep(600)

    os.fsync = hang
    checkpoint.save(run_dir, trainer, kept(HUB), keep=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
