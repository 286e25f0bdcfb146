"""One of several gloo ranks whose layers are divided: trains, loads and saves. Each rank writes what it saw."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flash.config.tree import Config
from flash.trainer.model.model import DIVIDED, named_full_tensors
from flash.trainer.state import checkpoint, stored
from flash.trainer.step import Trainer
from tests.trainer.critic_cases import critic_gradient, set_head
from tests.trainer.trainer_cases import aged_shard, gradient_of, kept, make_config, moments_of, part_of, weights_of

TENSOR = 2
ALONE = "alone"
"""Folder of what one process has saved."""
TABLES: dict[str, Any] = {
    "train": {
        "learning_rate": 1e-3, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 80, "async_ratio": 2.0,
    },
    "algorithm": {
        "objective": "asyppo", "entropy_bonus": 0.2, "staleness": {"kind": "linear"},
        "kl": {"coefficient": 0.3}, "corrections": [{"kind": "icepop", "low": 0.01}],
    },
    "critic": {"max_grad_norm": 1e9},
}  # fmt: skip
LESS = {"qwen2": {"max_grad_norm": 0.1}}


def tensor_config(folder: Path, kind: str, tensor: int = 1) -> Config:
    """All that a step can have beside rhythm; one kind is computed again in the backward pass, one is clipped."""
    train = TABLES["train"] | {"activation_checkpointing": kind == "qwen3"} | LESS.get(kind, {})
    return make_config(folder / kind, **TABLES | {"train": train, "parallel": {"tensor": tensor}})


def trained(folder: Path, kind: str, tensor: int = 1) -> tuple[Trainer, dict[str, Any]]:
    """A trainer after one step on its part of a batch whose groups share prompts, and what is seen of it."""
    trainer, shard = Trainer(tensor_config(folder, kind, tensor)), aged_shard(prompt=8)
    for index, critic in enumerate(trainer.critics):
        set_head(critic, index)
    trainer.version = shard.step
    mine = list(range(len(shard.samples)))[trainer.mesh.data_shard :: trainer.mesh.data_shards]
    metrics = trainer.train_step(part_of(shard, mine))
    return trainer, {
        "metrics": metrics,
        "gradient": gradient_of(trainer),
        "critics": [critic_gradient(critic) for critic in trainer.critics],
        "published": {name: tensor.clone() for name, tensor in named_full_tensors(trainer.model)},
        "canary": trainer.canaries.canary(trainer.model).logprobs,
    }


def kinds_of(ranks: int) -> tuple[str, ...]:
    """Of two ranks all; of more, which cost more, the one whose layers have norms between divided parts."""
    return DIVIDED if ranks == TENSOR else DIVIDED[-1:]


def state_of_all(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    return weights_of(trainer) | moments_of(trainer)


def main(folder: Path, ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    here = folder / str(ranks)
    dist.init_process_group(
        "gloo", init_method=f"file://{here}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    steps = {kind: trained(folder, kind, TENSOR) for kind in kinds_of(ranks)}
    results: dict[str, Any] = {kind: seen for kind, (_, seen) in steps.items()}
    trainer = steps[DIVIDED[-1]][0]
    checkpoint.save(here, trainer, kept(b"hub"), keep=1)
    results["saved"] = state_of_all(trainer)
    alone = stored.newest_complete(folder / ALONE)
    assert alone is not None
    checkpoint.load(alone, trainer)
    results["loaded"] = state_of_all(trainer)
    torch.save(results, here / f"results-{rank}.pt")
    dist.destroy_process_group()
