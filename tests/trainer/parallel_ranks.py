"""Gloo rank that divides layers, rows or experts with others: it trains, loads, saves, and writes its results."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from flash.config.tree import Config
from flash.trainer import checkpoint, checkpoint_files
from flash.trainer.memory import rank_memory
from flash.trainer.model.model import EXPERT_COUNTS, TENSOR_PARALLEL_KINDS, named_full_tensors
from tests.trainer.critic_cases import critic_gradient, set_head
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    gradient_of,
    kept,
    local,
    make_config,
    moments_of,
    part_of,
    partly_kept,
    weights_of,
)


class Layout(NamedTuple):
    """Division of models of some kinds over a number of ranks."""

    ranks: int
    """Number of ranks."""
    parallel: dict[str, int]
    """Table `[parallel]`: sizes of the groups of ranks."""
    kinds: tuple[str, ...]
    """Kinds of models that are trained in this layout."""
    offload: tuple[str, ...] = ()
    """Setting of `train.offload`."""
    others: bool = True
    """True to train a reference and critics beside the policy, if its kind is in `WITH_OTHERS`."""


UNDIVIDED = Layout(1, {}, ())
"""Layout of one process, whose results the other layouts must have."""
DRAWN = "drawn"
"""Kind of model: a llama, some of whose tokens were drawn from a part of the vocabulary."""
DENSE = tuple(kind for kind in TENSOR_PARALLEL_KINDS if kind not in EXPERT_COUNTS)
"""Kinds without experts whose layers can be divided."""
LAYOUTS = {
    "tensor": Layout(2, {"tensor": 2}, DENSE),
    "context": Layout(2, {"context": 2}, (DRAWN, "qwen3", "qwen3_moe")),
    "expert": Layout(2, {"expert": 2}, tuple(EXPERT_COUNTS)),
    "tensor and expert": Layout(
        2, {"tensor": 2, "expert": 2}, tuple(kind for kind in TENSOR_PARALLEL_KINDS if kind in EXPERT_COUNTS)
    ),
    # These layouts have more ranks, which cost more: only kinds whose layers have norms between divided parts.
    "tensor, of 4": Layout(4, {"tensor": 2}, ("qwen3",)),
    "context, of 4": Layout(4, {"context": 2}, ("qwen3",)),
    "expert, of 4": Layout(4, {"expert": 2}, ("qwen3_moe",)),
    "tensor and expert, of 4": Layout(4, {"tensor": 2, "expert": 2}, ("qwen3_moe",)),
    "more than heads of keys": Layout(4, {"context": 4}, (DRAWN, "qwen3"), others=False),
    "tensor and context": Layout(4, {"tensor": 2, "context": 2}, ("qwen3",), others=False),
    "experts over tensor groups": Layout(4, {"tensor": 2, "expert": 4}, ("qwen3_moe",), others=False),
    "experts over rows": Layout(4, {"context": 2, "expert": 4}, ("qwen3_moe",), others=False),
    "all": Layout(4, {"tensor": 2, "context": 2, "expert": 2}, ("qwen3_moe",)),
    "tensor, on the host": Layout(2, {"tensor": 2}, ("qwen3",), ("weights",)),
    "tensor, on the host, of 4": Layout(4, {"tensor": 2}, ("qwen3",), ("weights",), others=False),
    "expert, on the host": Layout(2, {"expert": 2}, ("qwen3_moe",), ("weights",), others=False),
    "all, on the host": Layout(4, {"tensor": 2, "context": 2, "expert": 2}, ("qwen3_moe",), ("weights",)),
}
KINDS = sorted({kind for layout in LAYOUTS.values() for kind in layout.kinds})
SAVED = {
    "tensor": "qwen3", "context": "qwen3", "expert": "qwen3_moe", "tensor and expert, of 4": "qwen3_moe",
    "all, on the host": "qwen3_moe",
}  # fmt: skip
"""Layouts whose checkpoints are tested, each with the kind of its model."""
PLANNED = ("tensor, of 4", "expert, of 4", "experts over tensor groups", "all")
"""Layouts whose memory plans are tested."""
ALONE = "alone"
"""Folder of the checkpoint that one process has saved."""
# Tables of the configuration of a step with critics, a reference, corrections, weights by age and an entropy bonus.
TABLES: dict[str, Any] = {
    "train": {
        "learning_rate": 1e-3, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 80, "async_ratio": 2.0,
    },
    "algorithm": {
        "objective": "asyppo", "entropy_bonus": 0.2, "staleness": {"kind": "linear"},
        "kl": {"coefficient": 0.3}, "corrections": [{"kind": "icepop", "low": 0.01}],
    },
    "critic": {},
}  # fmt: skip
WITH_OTHERS = (DRAWN, "qwen3", "qwen3_moe")
"""Kinds whose policy has a reference and critics beside it. These are models of the same kind, which are divided by the
same code as the policy, so some kinds and layouts show their part in a step."""
LESS = {"qwen2": {"max_grad_norm": 0.1}}
"""Options of `[train]` by kind: one kind whose gradient is clipped, so that the norm over all ranks counts."""
AGAIN = ("qwen3", "qwen3_moe")
"""Kinds whose activations are computed again in the backward pass."""


def has_others(kind: str, layout: Layout) -> bool:
    """Return True if a reference and critics are trained beside the policy."""
    return layout.others and kind in WITH_OTHERS


def configured(folder: Path, kind: str, layout: Layout = UNDIVIDED) -> Config:
    """Return a configuration with every part that a step can have, except rhythm.

    The reference and the critics are left out if `has_others` is False for this kind and layout.
    """
    again: dict[str, Any] = {"activation_checkpointing": kind in AGAIN, "offload": [*layout.offload]}
    train = TABLES["train"] | again | LESS.get(kind, {})
    tables = TABLES | {"train": train, "parallel": layout.parallel}
    if not has_others(kind, layout):
        del tables["critic"]
        tables["algorithm"] = {
            name: tables["algorithm"][name] for name in ("entropy_bonus", "staleness", "corrections")
        }
    return make_config(folder / kind, **tables)


def trained(folder: Path, kind: str, layout: Layout = UNDIVIDED) -> tuple[Trainer, dict[str, Any]]:
    """Return a trainer after one step on its part of a batch whose groups share prompts, and the step's results.

    The results, by name: metrics, bytes of weights and gradients on this rank, gradients of policy and critics, the
    published weights, and the log-probs of the canary.
    """
    trainer, shard = Trainer(configured(folder, kind, layout)), aged_shard(prompt=8)
    if kind == DRAWN:
        shard = partly_kept(shard)
    for index, critic in enumerate(trainer.critics):
        set_head(critic, index)
    trainer.version = shard.step
    mine = list(range(len(shard.samples)))[trainer.mesh.data_shard :: trainer.mesh.data_shards]
    held: list[tuple[int, int]] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: held.append(bytes_of(trainer)))
    metrics = trainer.train_step(part_of(shard, mine))
    return trainer, {
        "metrics": metrics,
        "bytes": held[0],
        "gradient": gradient_of(trainer),
        "critics": [critic_gradient(critic) for critic in trainer.critics],
        "published": {name: tensor.clone() for name, tensor in named_full_tensors(trainer.model)},
        "canary": trainer.canaries.canary(trainer.model).logprobs,
    }


def bytes_of(trainer: Trainer) -> tuple[int, int]:
    """Return the bytes of the policy's weights on this rank, and of their gradients."""
    weights = [*trainer.model.parameters()]
    both = ((local(one) for one in some) for some in (weights, [one.grad for one in weights if one.grad is not None]))
    held = [sum(one.numel() * one.element_size() for one in some) for some in both]
    return held[0], held[1]


def plan(folder: Path, _: int) -> None:
    """Save the planned bytes of weights and gradients by layout. Run in its own process: it makes process groups."""
    found: dict[str, tuple[int, int]] = {}
    for name in PLANNED:
        layout = LAYOUTS[name]
        config = configured(folder, layout.kinds[0], layout)
        memory = rank_memory(replace(config, model=replace(config.model, dtype="bfloat16")), layout.ranks)
        found[name] = (memory.weights, memory.gradients)
    torch.save(found, folder / "plans.pt")


def state_of_all(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weights and moments as full tensors."""
    return weights_of(trainer) | moments_of(trainer)


def saved_and_loaded(folder: Path, name: str, trainer: Trainer) -> dict[str, Any]:
    """Return the state that a layout saves, and the state that it loads from a checkpoint of one process."""
    (folder / name).mkdir(exist_ok=True)
    checkpoint.save(folder / name, trainer, kept(b"hub"), keep=1)
    seen: dict[str, Any] = {"saved": state_of_all(trainer)}
    alone = checkpoint_files.newest_complete(folder / f"{ALONE} {SAVED[name]}")
    assert alone is not None
    checkpoint.load(alone, trainer)
    return seen | {"loaded": state_of_all(trainer)}


def main(folder: Path, ranks: int, rank: int) -> None:
    """Run one rank in all layouts of `ranks` ranks, and write its results by layout and kind to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    # Two ranks check that sequences may share rows in these layouts. More ranks only divide the samples.
    for layout in LAYOUTS.values():
        for kind in layout.kinds if layout.ranks < ranks else ():
            Trainer.packed[Trainer.packing_key(configured(folder, kind, layout))] = True
    results: dict[tuple[str, str], Any] = {}
    for name, layout in LAYOUTS.items():
        for kind in layout.kinds if layout.ranks == ranks else ():
            trainer, seen = trained(folder, kind, layout)
            again = saved_and_loaded(folder, name, trainer) if SAVED.get(name) == kind else {}
            results[name, kind] = seen | again
    torch.save(results, folder / f"results-{ranks}-{rank}.pt")
    dist.destroy_process_group()
