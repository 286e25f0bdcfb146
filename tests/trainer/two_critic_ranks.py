"""Gloo rank with a critic, for two ranks: updates, saves and restores. Each rank writes its results."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flash.trainer import checkpoint
from flash.trainer.critic import critic_metrics
from tests.trainer.critic_cases import (
    critic_config,
    critic_gradient,
    critic_weights,
    make_critic,
    micro_of,
    random_sequences,
    trained,
    update,
)
from tests.trainer.trainer_cases import Trainer, kept, part_of, random_shard

SPLITS = {
    "even": [[[0, 1], [2]], [[3], [5, 4]]],
    "uneven": [[[0], [1], [2, 3, 4]], [[5]]],
    "all on one": [[], [[0, 1, 2, 3, 4, 5]]],
}
"""For each rank, the sequences of its micro-batches."""
DEALT = ([0, 2, 4, 6, 8, 10, 12], [1, 3, 5, 7, 9, 11])
"""Samples of `random_shard` that each rank trains on before it saves."""


def parts_of(split: str, rank: int) -> list[list[int]]:
    """Return this rank's micro-batches, with empty ones so that both ranks have the same number."""
    longest = max(len(parts) for parts in SPLITS[split])
    return SPLITS[split][rank] + [[]] * (longest - len(SPLITS[split][rank]))


def updated(model: Path, split: str, rank: int) -> dict[str, Any]:
    """Update a critic once on this rank's part of a split, and return its values before, and the results."""
    sequences = random_sequences()
    critic = make_critic(model)
    parts = [[sequences[index] for index in part] for part in parts_of(split, rank)]
    # Dummies take part in the collectives, and their values are ignored.
    values = [critic.values(micro_of(part or sequences)) for part in parts]
    update(critic, parts, trained(sequences))
    return {
        "values": torch.cat([torch.zeros(0), *(value for value, part in zip(values, parts, strict=True) if part)]),
        "gradient": critic_gradient(critic),
        "weights": critic_weights(critic),
        "metrics": critic_metrics([critic]),
    }


def doubled(model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values before and after the head's weights are doubled, without a backward pass between them."""
    critic, micro = make_critic(model), micro_of(random_sequences())
    # Keep the parameters from before the first pass, as an optimizer does.
    parameters = list(critic.model.head.parameters())
    before = critic.values(micro)
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)
    return before, critic.values(micro)


def saved(model: Path, folder: Path, rank: int) -> dict[str, Any]:
    """Save a trained critic, load it into another trainer, and return the weights of both."""
    trainer, restored = (Trainer(critic_config(model)) for _ in range(2))
    trainer.train_step(part_of(random_shard(), DEALT[rank]))
    path = checkpoint.save(folder, trainer, kept(b"hub"), keep=1)
    checkpoint.load(path, restored)
    return {"saved": critic_weights(trainer.critics[0]), "restored": critic_weights(restored.critics[0])}


def main(model: Path, folder: Path, rank: int) -> None:
    """Run rank 0 or 1, and write its results by name to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    results: dict[str, Any] = {split: updated(model, split, rank) for split in SPLITS}
    results |= saved(model, folder, rank)
    results["doubled"] = doubled(model)
    torch.save(results, folder / f"results-{rank}.pt")
    dist.destroy_process_group()
