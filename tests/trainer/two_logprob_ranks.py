"""Gloo rank, for two ranks: the gradient of log-probs and entropies of its part of a batch. Rank 0 writes it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer.packed_cases import gradient, sharded

PARTS = ([0, 1, 4], [2, 3])
"""Sequences of each rank."""


def main(folder: Path, rank: int, *models: Path) -> None:
    """Run rank 0 or 1 with each model, in float32 and in bfloat16. The ranks meet, and write results, in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    # FSDP averages over ranks, but the gradient of the batch is the sum.
    results = {
        (str(model), dtype): gradient(sharded(model, dtype), PARTS[rank], scale=2.0)
        for model in models
        for dtype in ("float32", "bfloat16")
    }
    if rank == 0:
        torch.save(results, folder / "gradients.pt")
    dist.destroy_process_group()
