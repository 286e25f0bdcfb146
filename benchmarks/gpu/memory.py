"""Peak GPU memory of training steps, compared with the memory that `flash plan` predicts.

Also compares the steps themselves: where weights and moments are stored must not change a step.
"""

from __future__ import annotations

import tempfile
from typing import Any

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.sizes import Shape, Sizes
from benchmarks.gpu.steps import GIB, GROUP_SIZE, apart, random_shard, save_random, step_config
from flash.config.tree import Config

NEAR = 0.15
"""Goal: largest relative error of a prediction."""
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
"""Settings of `[train]` that compute activations again instead of keeping them."""
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"train": RECOMPUTED},
    "moved": {"train": RECOMPUTED | {"offload": ["activations", "moments"]}},
    "weights moved": {"train": RECOMPUTED | {"offload": ["activations", "weights"]}},
    "adapters": {"train": RECOMPUTED, "lora": {"rank": 32}},
}
"""Ways to save memory, as tables of a configuration."""
LARGE = Shape(36, 4096, 12_288, 32, 8, 128, 151_936)
"""Shape of Qwen3-8B, except that its output layer is tied to the embeddings."""
ON_LARGE = ("adapters",)
"""Levers that are measured on the large model, which without them does not fit on the card."""
MOVED = ("moved", "weights moved")
"""Levers that move parts to the host's memory. Their steps are compared with those of "recomputed"."""
STEPS = 2
"""Number of measured steps; the first one also creates the optimizer's state."""
GROUPS = 4
"""Number of groups in the batch of a step."""
ROW = 8192
"""Tokens of a micro-batch, and of its sequences together."""
ALIKE = 1e-3
"""Goal: largest relative difference of losses, entropies and gradient norms from those of "recomputed"."""


class Case(msgspec.Struct, frozen=True):
    """A model, and the way to save memory in which it is trained. Processes of `apart` get it as their argument."""

    folder: str
    """Folder of the model."""
    vocabulary: int
    """Number of token ids of the model."""
    lever: str
    """Name of the way to save memory, a key of `LEVERS`."""
    sizes: Sizes


def memory_rows(sizes: Sizes) -> list[Row]:
    """Return the rows of the part `memory`: each lever on the model of `mfu`, and adapters on a large one on a card."""
    rows: list[Row] = []
    shapes = {"small": sizes.shape} | ({"8 B": LARGE} if sizes.gpu else {})
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            apart(save_random, (shape, folder, "bfloat16", sizes.gpu))
            steps: dict[str, list[float]] = {}  # metrics of the steps with each lever, from `measure_steps`
            for lever in LEVERS if shape is sizes.shape else ON_LARGE:
                case = Case(folder, shape.vocabulary, lever, sizes)
                (peak, steps[lever]), planned = apart(measure_steps, case), apart(planned_bytes, case)
                rows.append(Row(f"{name}, {lever}", "peak_gib", "GiB", peak / GIB, planned / GIB))
                if sizes.gpu:
                    rows.append(Row(f"{name}, {lever}", "plan_error", "share", abs(planned / peak - 1), at_most=NEAR))
                if lever in MOVED:
                    pairs = zip(steps[lever], steps["recomputed"], strict=True)
                    # Losses are sums of numbers of either sign, so near 0, where a relative error says nothing.
                    error = max(abs(one - other) / max(abs(other), 1.0) for one, other in pairs)
                    rows.append(Row(f"{name}, {lever}", "step_error", "share", error, at_most=ALIKE))
    return rows


def configured(case: Case) -> Config:
    """Return the configuration of STEPS steps whose micro-batches are as full as their limit allows."""
    gpu, longest = case.sizes.gpu, case.sizes.length[1]
    config = step_config(case.folder, "bfloat16" if gpu else "float32", longest, GROUPS * GROUP_SIZE, STEPS, gpu=gpu)
    tables: dict[str, Any] = msgspec.to_builtins(config)
    tables["train"] |= {"max_tokens_per_microbatch": ROW if gpu else 16 * longest}
    for name, table in LEVERS[case.lever].items():
        tables[name] = (tables.get(name) or {}) | table
    return msgspec.convert(tables, Config)


def measure_steps(case: Case) -> tuple[int, list[float]]:
    """Train STEPS steps. Returns the largest number of bytes that were allocated on the card, and the steps' metrics.

    The metrics are loss, entropy and gradient norm of the first step, then those of the second. The bytes are 0 without
    a card. Call it through `apart`: it makes a process group, and counts the peak of the whole process.
    """
    import torch

    from flash.foreign.torch import single_process_group
    from flash.trainer.mesh import process_group_backend
    from flash.trainer.step import Trainer

    gpu, config, longest = case.sizes.gpu, configured(case), case.sizes.length[1]
    seen: list[float] = []
    with single_process_group(process_group_backend(cuda=gpu, offloads="weights" in config.train.offload)):
        trainer = Trainer(config)
        for step in range(STEPS):
            metrics = trainer.train_step(random_shard(step, GROUPS, (longest - 8, longest), case.vocabulary))
            seen += [metrics[name] for name in ("loss", "entropy", "grad_norm")]
        return torch.cuda.max_memory_allocated() if gpu else 0, seen


def planned_bytes(case: Case) -> int:
    """Return the bytes that `flash plan` predicts for a single rank. It needs a process without a process group."""
    from flash.trainer.memory import rank_memory

    return rank_memory(configured(case), 1).total
