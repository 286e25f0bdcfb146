"""What a trainer rank needs in memory, measured, beside what `flash plan` says.

Real steps of a Qwen3 of 300 M random weights, and of a mixture of experts, in float32 on the CPU, on ranks that share
the weights by FSDP. Counted are the most bytes of a rank's process beyond what it has before there is this model: what
it keeps (weights, gradients, moments), what is at work, and both. Loading: the same for its part of the weights, beside
what a rank takes that loads the whole model first; the goal is its part and one tensor. A checkpoint and an export: the
same beyond what the rank has after a step.

The C library is told to give back what is freed: left alone it keeps holes of freed tensors between others, which no
plan knows. A GPU's allocator has its own.

What is planned for models that nobody has run here stands below: GiB of a card, of their shapes, in rows of 8,192
tokens in bfloat16.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.real.objective_cost import GROUP_SIZE, random_shard
from flash.config.tree import Config

if TYPE_CHECKING:
    from flash.trainer.memory import RankMemory
    from flash.trainer.step import Trainer

GIB = 2**30
LENGTH = 64
"""Tokens of a sequence."""
MICRO_BATCH = 256
"""Tokens of a micro-batch; each rank has two of them in its second step."""
VOCABULARY = 16_000
PROMPT = 2
DENSE, QUICK, FIRST = (1024, 4096, 17), (512, 2048, 8), (64, 64, 1)
"""Width, width between, layers. The last is of a model that is trained before anything is measured."""
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
MIXTURES = (512, 256, 8), (256, 256, 4)
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": ("qwen3", {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                           "num_attention_heads": 32, "num_key_value_heads": 8}),
    "Qwen3-32B": ("qwen3", {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                            "num_attention_heads": 64, "num_key_value_heads": 8}),
    "Qwen3-235B-A22B": ("qwen3_moe", {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
                                      "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts": 128,
                                      "num_experts_per_tok": 8}),
}  # fmt: skip
CARDS, ROW = (8, 64), 8192
RECOMPUTED: dict[str, Any] = {"max_tokens_per_microbatch": ROW, "activation_checkpointing": True}
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {"train": {"max_tokens_per_microbatch": ROW}},
    "recomputed": {"train": RECOMPUTED},
    "offloaded": {"train": RECOMPUTED | {"offload": ["activations", "moments"]}},
    "weights_offloaded": {"train": RECOMPUTED | {"offload": ["activations", "weights"]}},
    "adapters": {"train": RECOMPUTED, "lora": {"rank": 32}},
}
"""Tables of a configuration."""
STORING = 2
"""On so many ranks a checkpoint is written, and an export."""
NEAR = 0.15
"""Goal: how far a prediction may be from what is measured."""
MAPPED = -3
"""glibc's M_MMAP_THRESHOLD: allocations from so many bytes on are given back as soon as they are freed."""


class Case(msgspec.Struct, frozen=True):
    """One rank of so many."""

    folder: str
    rank: int
    ranks: int


class Measured(msgspec.Struct, frozen=True):
    """Most bytes of a rank's process, beyond those before there was a model, or those after a step."""

    whole: int
    """Loading all of it."""
    loading: int
    kept: int
    """Weights, gradients and moments together: of tensors."""
    step: int
    saving: int = 0
    exporting: int = 0


def make_model(folder: Path, size: tuple[int, int, int], **experts: Any) -> None:
    """Random weights, in bfloat16 as pretrained ones come."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    width, between, layers = size
    kind: Any = CONFIG_MAPPING["qwen3_moe" if experts else "qwen3"]
    shape = kind(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=between, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 128, 1), head_dim=64,
        tie_word_embeddings=True, dtype="bfloat16", **experts,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(shape)
    model.to(torch.bfloat16).save_pretrained(folder)


def configured(folder: str, **changes: dict[str, Any]) -> Config:
    """The default objective."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "parallel_memory", "steps": 10, "output_dir": folder},
        "model": {"path": folder, "dtype": "float32", "max_length": LENGTH},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": LENGTH - PROMPT},
        "train": {"batch_size": GROUP_SIZE, "max_tokens_per_microbatch": MICRO_BATCH},
        "weights": {"canary_tokens": 8},
        "cluster": {"gpus_per_node": 0},
    }
    named = {*tables, *changes}
    return msgspec.convert({name: tables.get(name, {}) | changes.get(name, {}) for name in named}, Config)


def measured(case: Case) -> Measured:
    """As a trainer rank does it."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.model import load_model, load_sharded, shard_model
    from flash.trainer.step import Trainer

    ctypes.CDLL(None).mallopt(MAPPED, 2**20)
    disable_progress_bar()
    torch.set_num_threads(1)
    meeting = f"file://{case.folder}/store-{case.ranks}"
    dist.init_process_group("gloo", init_method=meeting, rank=case.rank, world_size=case.ranks)
    config, mesh = configured(case.folder), trainer_mesh("cpu")
    # What is imported and set up in a first step is no model's.
    one_step(Trainer(configured(f"{case.folder}/first")), 0, case, LENGTH)
    seen = {
        "whole": beyond(lambda: shard_model(load_model(config.model), mesh, config.model)),
        "loading": beyond(lambda: load_sharded(config.model, mesh)),
    }
    before = most_bytes(anew=True)
    trainer = Trainer(config)
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.update(kept=kept(trainer)))
    one_step(trainer, 0, case, PROMPT + 2)  # makes the moments
    one_step(trainer, 1, case, LENGTH)
    seen["step"] = most_bytes() - before
    if case.ranks == STORING:
        seen |= stored(trainer, Path(case.folder))
    dist.destroy_process_group()
    return Measured(**seen)


def stored(trainer: Trainer, folder: Path) -> dict[str, int]:
    """Bytes for a checkpoint, and for an export."""
    from flash.trainer import checkpoint
    from flash.trainer.checkpoint_files import file_entry

    def keep_nothing(file: Path) -> Any:
        file.write_bytes(b"")
        return file_entry(file, file.parent)

    return {
        "saving": beyond(lambda: checkpoint.save(folder, trainer, keep_nothing, keep=1)),
        "exporting": beyond(lambda: checkpoint.export_hf(trainer.model, Untold(), folder / "model")),
    }


class Untold:
    """A tokenizer of which nothing is written."""

    def save_pretrained(self, folder: Path) -> None:
        """Nothing."""


def kept(trainer: Trainer) -> int:
    """Bytes of this rank's weights, gradients and moments."""
    weights: list[Any] = list(trainer.model.parameters())
    moments = [one for state in trainer.optimizer.state.values() for one in state.values() if one.dim() > 0]
    tensors = [*weights, *(weight.grad for weight in weights), *moments]
    return sum(one.to_local().numel() * one.element_size() for one in tensors)


def beyond(work: Any) -> int:
    """Most bytes of this process while it does something, beyond those before."""
    before = most_bytes(anew=True)
    made = work()
    most = most_bytes() - before
    del made
    return most


def one_step(trainer: Trainer, step: int, case: Case, length: int) -> None:
    """With eight sequences of that length on each rank."""
    shard = random_shard(step, case.ranks, (length - PROMPT, length - PROMPT), VOCABULARY, PROMPT)
    trainer.train_step(msgspec.structs.replace(shard, samples=shard.samples[case.rank :: case.ranks]))


def most_bytes(*, anew: bool = False) -> int:
    """That this process held so far, or, from here on, what it holds now."""
    if anew:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def on_all(folder: str, ranks: int) -> Measured:
    """The most of the ranks."""
    with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(measured, [Case(folder, rank, ranks) for rank in range(ranks)]))
    columns = zip(*map(msgspec.structs.astuple, found), strict=True)
    return Measured(*map(max, columns))


def planned(folder: str, ranks: int, changes: dict[str, dict[str, Any]] | None = None) -> RankMemory:
    """What `flash plan` says. In a process that has no process group."""
    from flash.trainer.memory import rank_memory

    return rank_memory(configured(folder, **(changes or {})), ranks)


def large_rows(folder: Path, planner: ProcessPoolExecutor) -> Iterator[Row]:
    """What is planned for large models."""
    from transformers import CONFIG_MAPPING

    for name, (kind, sizes) in LARGE.items():
        described: Any = CONFIG_MAPPING[kind]
        described(vocab_size=151_936, head_dim=128, tie_word_embeddings=False, **sizes).save_pretrained(folder)
        for cards, (lever, tables) in product(CARDS, LEVERS.items()):
            model = {"dtype": "bfloat16", "max_length": ROW}
            changes = {"model": model, "rollout": {"max_new_tokens": ROW - PROMPT}} | tables
            memory = planner.submit(planned, str(folder), cards, changes).result()
            yield Row(f"{name}, {cards} cards", f"{lever}_gib", "GiB", memory.total / GIB)


def rows_of(folder: str, name: str, ranks: int, tensor: int, planner: ProcessPoolExecutor) -> Iterator[Row]:
    """Of a model on so many ranks, whose largest tensor has so many numbers."""
    ours, plan = on_all(folder, ranks), planner.submit(planned, folder, ranks).result()
    case, kept = f"{name}, {ranks} rank{'s' * (ranks > 1)}", plan.weights + plan.gradients + plan.moments
    goal = (plan.weights + 4 * tensor) / GIB
    yield Row(case, "kept_gib", "GiB", ours.kept / GIB, kept / GIB)
    yield Row(case, "at_work_gib", "GiB", (ours.step - ours.kept) / GIB, plan.at_work / GIB)
    yield Row(case, "step_gib", "GiB", ours.step / GIB, plan.total / GIB)
    yield Row(case, "prediction_error", "", abs(plan.total / ours.step - 1), goal=NEAR)
    yield Row(case, "loading_gib", "GiB", ours.loading / GIB, ours.whole / GIB, goal)
    if ranks == STORING:
        yield Row(case, "saving_gib", "GiB", ours.saving / GIB)
        yield Row(case, "exporting_gib", "GiB", ours.exporting / GIB)


def measure(args: Args) -> list[Row]:
    """Each model and number of ranks; quick: smaller ones, on two ranks."""
    dense, mixture = (QUICK, MIXTURES[1]) if args.quick else (DENSE, MIXTURES[0])
    rows: list[Row] = []
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=spawning) as planner:
        for name, size, experts, counts in (
            ("dense", dense, {}, (1, 2, 4)),
            ("mixture", mixture, EXPERTS, (2,)),
        ):
            where = f"{folder}/{name}"
            # Here: where there are several ranks, transformers writes on the first one alone.
            make_model(Path(where), size, **experts)
            make_model(Path(where, "first"), FIRST, **experts)
            width, between, _ = size
            largest = max(VOCABULARY * width, 32 * 2 * between * width if experts else 0)
            for ranks in counts[:2] if args.quick else counts:
                rows += rows_of(where, name, ranks, largest, planner)
        if not args.quick:
            rows += large_rows(Path(folder, "large"), planner)
    return rows


if __name__ == "__main__":
    main("parallel_memory", __doc__ or "", measure)
