"""What it costs to follow the rhythm of attention.

Step: training steps on the tiny model of the examples, 16 sequences of 512 tokens, one minibatch. `left_by_rhythm` is
the time of a step without rhythm over that with it. `first`: the heads are settled, so the training pass itself is
looked at; `batch`: a pass of its own comes before. Times are processor time of one thread, medians over steps that take
turns.

Memory: a pass over one layer of that model and one sequence, whose attention is looked at block by block; the reference
is transformers' eager attention, asked for its weights. Each in a process of its own, beyond what was held before.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.real.objective_cost import (
    GROUP_SIZE,
    PROMPT,
    TINY_VOCABULARY,
    apart,
    make_tiny_model,
    memory_now,
    memory_peak,
    random_shard,
)
from flash.config.tree import Config

if TYPE_CHECKING:
    from flash.trainer.step import Trainer

LENGTH = 512
"""Tokens of a sequence in a step."""
LONG, QUICK_LONG = 8192, 1024
"""Tokens of the sequence whose memory is measured."""
GROUPS = 2
"""Of a batch."""
LEFT = 0.95
"""Goal: the share of a step that remains for all else."""
MEMORY = 0.05
"""Goal: of what eager attention takes."""
MIB = 2**20
WAYS: dict[str, dict[str, Any] | None] = {"none": None, "first": {"heads": "first"}, "batch": {"heads": "batch"}}
"""Tables of rhythm."""


class StepsCase(msgspec.Struct, frozen=True):
    """So many steps to measure, on sequences of so many tokens."""

    steps: int
    tokens: int = LENGTH


def step_seconds(case: StepsCase) -> dict[str, float]:
    """Median processor time of a step, by way. Makes a process group, so it wants a process of its own."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from flash.foreign.torch import private_store
    from flash.trainer.step import Trainer

    disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=private_store(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        trainers = {name: Trainer(config(folder, rhythm)) for name, rhythm in WAYS.items()}
        # The first step settles the heads, and is no example of the others.
        rows = [
            {name: one_step(trainer, step, case.tokens) for name, trainer in trainers.items()}
            for step in range(case.steps + 1)
        ][1:]
    dist.destroy_process_group()
    return {name: statistics.median(row[name] for row in rows) for name in WAYS}


def one_step(trainer: Trainer, step: int, tokens: int) -> float:
    """Seconds of the processor."""
    shard = random_shard(step, groups=GROUPS, answers=(tokens - PROMPT, tokens - PROMPT))
    start = time.process_time()
    trainer.train_step(shard)
    return time.process_time() - start


def config(folder: str, rhythm: dict[str, Any] | None) -> Config:
    """The default objective, with or without rhythm."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "rhythm_cost", "steps": 1000},
        "model": {"path": folder, "dtype": "float32", "max_length": LENGTH},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": LENGTH - PROMPT},
        "train": {"batch_size": GROUPS * GROUP_SIZE},
        "cluster": {"gpus_per_node": 0},
        "algorithm": {} if rhythm is None else {"rhythm": rhythm},
    }
    return msgspec.convert(tables, Config)


class PassCase(msgspec.Struct, frozen=True):
    """One way to see the attention of a sequence of so many tokens."""

    way: Literal["blocks", "eager"]
    tokens: int


def pass_bytes(case: PassCase) -> int:
    """The most bytes that a pass held beyond what was there before."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    look = {"blocks": look_at_blocks, "eager": look_eagerly}[case.way]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        make_tiny_model(folder, layers=1)
        return look(folder, case.tokens)


def look_at_blocks(folder: str, tokens: int) -> int:
    """As training does it."""
    import torch.distributed as dist

    from algorithms.rhythm import Rhythm
    from flash.config.tree import ModelConfig
    from flash.foreign.torch import private_store
    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.logprobs import watch_attention
    from flash.trainer.model.model import load_model, shard_model
    from flash.trainer.packing import pack
    from flash.trainer.rhythm import RhythmPass

    dist.init_process_group("gloo", store=private_store(), rank=0, world_size=1)
    described = ModelConfig(path=folder, dtype="float32")
    model = shard_model(load_model(described), trainer_mesh("cpu"), described)
    rhythm = RhythmPass(Rhythm(), model)
    shard = random_shard(0, groups=1, answers=(tokens - PROMPT, tokens - PROMPT))
    (micro,) = pack(shard.samples[:1], min_version=0, max_tokens=tokens)
    before = memory_now("cpu")
    watch = rhythm.watch(micro)
    watch_attention(model, micro, watch)
    rhythm.collect(watch)
    found = memory_peak("cpu") - before
    dist.destroy_process_group()
    return found


def look_eagerly(folder: str, tokens: int) -> int:
    """The weights of all rows at once."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.randint(0, TINY_VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    model(ids[:, :8], output_attentions=True)
    before = memory_now("cpu")
    model(ids, output_attentions=True, logits_to_keep=1)
    return memory_peak("cpu") - before


def measure(args: Args) -> list[Row]:
    """Steps, then memory."""
    seconds = apart(step_seconds, StepsCase(3 if args.quick else 15))
    tokens = QUICK_LONG if args.quick else LONG
    ours, eager = (apart(pass_bytes, PassCase(way, tokens)) / MIB for way in ("blocks", "eager"))
    # A quick run's few tokens fit into some blocks: there the memory shows nothing.
    goal = None if args.quick else MEMORY * eager
    rows = [Row(f"step of {LENGTH} tokens, {name}", "step_ms", "ms", 1e3 * one) for name, one in seconds.items()]
    for name in ("first", "batch"):
        left = seconds["none"] / seconds[name]
        rows.append(Row(f"step of {LENGTH} tokens, {name}", "left_by_rhythm", "share", left, goal=LEFT))
    return [*rows, Row(f"pass over {tokens:,} tokens", "peak_mib", "MiB", ours, eager, goal)]


if __name__ == "__main__":
    main("rhythm_cost", __doc__ or "", measure)
