"""What training steps take of a card at most, beside what `flash plan` says of them. Wherever weights are, they are the
same steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.compute import step_config_for
from benchmarks.gpu.sizes import Shape, Sizes
from benchmarks.real.objective_cost import GIB, apart, random_shard
from flash.config.tree import Config

NEAR = 0.15
"""Goal: how far a prediction may be from what is measured."""
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"train": RECOMPUTED},
    "moved": {"train": RECOMPUTED | {"offload": ["activations", "moments"]}},
    "weights moved": {"train": RECOMPUTED | {"offload": ["activations", "weights"]}},
    "adapters": {"train": RECOMPUTED, "lora": {"rank": 32}},
}
"""Tables of a configuration."""
LARGE = Shape(36, 4096, 12_288, 32, 8, 128, 151_936)
"""Of Qwen3-8B, but for an output layer of its own."""
ON_LARGE = ("adapters",)
MOVED = ("moved", "weights moved")
ROW = 8192
"""Tokens of a micro-batch, and of its sequences together."""


ALIKE = 1e-3
"""Goal: how far losses, entropies and norms of gradients of two steps may be from those of "recomputed"."""


class Case(msgspec.Struct, frozen=True):
    """A model, and what is changed of a configuration."""

    folder: str
    vocabulary: int
    lever: str
    sizes: Sizes


def memory_rows(sizes: Sizes) -> list[Row]:
    """Each lever, on the model of `mfu` and, of adapters, on one of eight billion weights."""
    rows: list[Row] = []
    shapes = {"small": sizes.shape} | ({"8 B": LARGE} if sizes.gpu else {})
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            apart(save_random, (shape, folder, sizes.gpu))
            steps: dict[str, list[float]] = {}
            for lever in LEVERS if shape is sizes.shape else ON_LARGE:
                case = Case(folder, shape.vocabulary, lever, sizes)
                (peak, steps[lever]), planned = apart(measured, case), apart(planned_bytes, case)
                rows.append(Row(f"{name}, {lever}", "peak_gib", "GiB", peak / GIB, planned / GIB))
                if sizes.gpu:
                    rows.append(Row(f"{name}, {lever}", "plan_error", "share", abs(planned / peak - 1), None, NEAR))
                if lever in MOVED:
                    pairs = zip(steps[lever], steps["recomputed"], strict=True)
                    # Losses are sums of numbers of either sign, so near 0.
                    error = max(abs(one - other) / max(abs(other), 1.0) for one, other in pairs)
                    rows.append(Row(f"{name}, {lever}", "step_error", "share", error, None, ALIKE))
    return rows


def save_random(asked: tuple[Shape, str, bool]) -> None:
    """A model with random weights in bfloat16."""
    import torch
    from transformers import Qwen3ForCausalLM

    shape, folder, gpu = asked
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        Qwen3ForCausalLM(shape.config()).save_pretrained(folder)


def configured(case: Case) -> Config:
    """Its micro-batches are as full as may be."""
    longest = case.sizes.length[1]
    config = step_config_for(
        case.folder, "bfloat16" if case.sizes.gpu else "float32", longest, 32, 2, gpu=case.sizes.gpu
    )
    tables: dict[str, Any] = msgspec.to_builtins(config)
    most = ROW if case.sizes.gpu else 16 * longest
    tables["train"] |= {"max_tokens_per_microbatch": most}
    for name, table in LEVERS[case.lever].items():
        tables[name] = (tables.get(name) or {}) | table
    return msgspec.convert(tables, Config)


def measured(case: Case) -> tuple[int, list[float]]:
    """Most bytes of the card in two steps, without one 0; and loss, entropy and norm of the gradient of each step."""
    import torch

    from flash.foreign.torch import single_process_group
    from flash.trainer.mesh import process_group_backend
    from flash.trainer.step import Trainer

    gpu, config, longest = case.sizes.gpu, configured(case), case.sizes.length[1]
    seen: list[float] = []
    with single_process_group(process_group_backend(cuda=gpu, offloads="weights" in config.train.offload)):
        trainer = Trainer(config)
        for step in range(2):
            metrics = trainer.train_step(random_shard(step, 4, (longest - 8, longest), case.vocabulary))
            seen += [metrics[name] for name in ("loss", "entropy", "grad_norm")]
        return torch.cuda.max_memory_allocated() if gpu else 0, seen


def planned_bytes(case: Case) -> int:
    """What one rank of one is said to take."""
    from flash.trainer.memory import rank_memory

    assert Path(case.folder, "config.json").is_file()
    return rank_memory(configured(case), 1).total
