"""What a trainer rank needs in memory, measured, beside what `flash plan` says.

Real steps of a Qwen3 with random weights, in float32 on the CPU, on ranks that share its weights by FSDP. Counted are
the most bytes of a rank's process beyond what it has before there is this model. Loading: the same up to the first
step, beside what a rank takes that loads the whole model first; the goal is its part and one tensor.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.real.objective_cost import random_shard
from flash.config.tree import Config

if TYPE_CHECKING:
    from flash.trainer.step import Trainer

GIB = 2**30
RANKS = (1, 2, 4)
LENGTH = 128
"""Tokens of a sequence."""
MICRO_BATCH = 512
"""Tokens of a micro-batch; each rank has two of them in a step."""
VOCABULARY = 32_000
GROUP_SIZE = 8
PROMPT = 2
FULL, QUICK, SMALLEST = (1024, 3072, 20), (256, 768, 4), (64, 64, 1)
"""Width, width between, layers."""
FIRST = "first"
"""The folder of the smallest."""
NEAR = 0.15
"""Goal: how far a prediction may be from what is measured."""


class Case(msgspec.Struct, frozen=True):
    """One rank of so many."""

    folder: str
    rank: int
    ranks: int
    whole: bool
    """Load the whole model, and shard it then; no step."""


class Measured(msgspec.Struct, frozen=True):
    """Bytes of a rank's process, beyond those before there was a model."""

    loading: int
    step: int


def make_model(folder: Path, size: tuple[int, int, int]) -> None:
    """Random weights, in bfloat16 as pretrained ones come."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width, between, layers = size
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=between, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 128, 1), head_dim=64,
        tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(shape)
    model.to(torch.bfloat16).save_pretrained(folder)


def configured(folder: str, **model: Any) -> Config:
    """The default objective."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "parallel_memory", "steps": 10},
        "model": {"path": folder, "dtype": "float32", "max_length": LENGTH} | model,
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": LENGTH - PROMPT},
        "train": {"batch_size": GROUP_SIZE, "max_tokens_per_microbatch": MICRO_BATCH},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(tables, Config)


def measured(case: Case) -> Measured:
    """As a trainer rank does it."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.model import load_model, shard_model
    from flash.trainer.step import Trainer

    disable_progress_bar()
    torch.set_num_threads(1)
    meeting = f"file://{case.folder}/store-{case.ranks}-{case.whole}"
    dist.init_process_group("gloo", init_method=meeting, rank=case.rank, world_size=case.ranks)
    config = configured(case.folder)
    # What is imported and set up in a first step is no model's.
    one_step(Trainer(configured(f"{case.folder}/{FIRST}")), 0, case)
    gc.collect()
    before = most_bytes(anew=True)
    if case.whole:
        model = shard_model(load_model(config.model), trainer_mesh("cpu"), config.model)
        seen = Measured(most_bytes() - before, 0)
        del model
        dist.destroy_process_group()
        return seen
    trainer = Trainer(config)
    loading = most_bytes() - before
    for step in range(2):
        one_step(trainer, step, case)
    seen = Measured(loading, most_bytes() - before)
    dist.destroy_process_group()
    return seen


def one_step(trainer: Trainer, step: int, case: Case) -> None:
    """With full micro-batches of the longest sequences."""
    shard = random_shard(step, case.ranks, (LENGTH - PROMPT, LENGTH - PROMPT), VOCABULARY, PROMPT)
    trainer.train_step(msgspec.structs.replace(shard, samples=shard.samples[case.rank :: case.ranks]))


def most_bytes(*, anew: bool = False) -> int:
    """That this process held so far, or, from here on, what it holds now."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def on_all(folder: str, ranks: int, *, whole: bool) -> Measured:
    """The largest of the ranks."""
    with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(measured, [Case(folder, rank, ranks, whole) for rank in range(ranks)]))
    return Measured(max(one.loading for one in found), max(one.step for one in found))


def planned(folder: str, ranks: int) -> tuple[int, int]:
    """Bytes that `flash plan` says of a step, and of the weights that a rank keeps."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        memory = pool.submit(_plan, folder, ranks).result()
    return memory


def _plan(folder: str, ranks: int) -> tuple[int, int]:
    from flash.trainer.memory import rank_memory

    memory = rank_memory(configured(folder), ranks)
    return memory.total, memory.weights


def measure(args: Args) -> list[Row]:
    """Each number of ranks."""
    rows: list[Row] = []
    size = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        # Here: where there are several ranks, transformers writes on the first one alone.
        make_model(Path(folder), size)
        make_model(Path(folder, FIRST), SMALLEST)
        for ranks in RANKS[: 2 if args.quick else None]:
            case = f"{ranks} ranks"
            whole, ours = (on_all(folder, ranks, whole=whole) for whole in (True, False))
            step, weights = planned(folder, ranks)
            tensor = 4 * VOCABULARY * size[0]
            rows += [
                Row(case, "loading_gib", "GiB", ours.loading / GIB, whole.loading / GIB, (weights + tensor) / GIB),
                Row(case, "step_gib", "GiB", ours.step / GIB, step / GIB),
                Row(case, "prediction_error", "", abs(step / ours.step - 1), goal=NEAR),
            ]
    return rows


if __name__ == "__main__":
    main("parallel_memory", __doc__ or "", measure)
