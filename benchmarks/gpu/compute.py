"""The trainer's arithmetic on one card: the output layer, and whole steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Literal

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.sizes import Sizes
from benchmarks.real.objective_cost import GIB, LayerCase, apart, layer_cost, random_shard, step_config
from flash.config.tree import Config

PRODUCT = 8192
"""Rows and columns of the matrices whose product is timed."""
MFU_GOAL = 0.35


def layer_rows(sizes: Sizes) -> list[Row]:
    """The chunked output layer against whole logits."""
    cases = [LayerCase(way, sizes.layer_tokens, sizes.layer_vocabulary) for way in ("chunks", "whole")]
    ours, whole = (apart(layer_cost, case) for case in cases)
    case = f"output layer, {sizes.layer_tokens:,} tokens × {sizes.layer_vocabulary:,}"
    return [
        Row(case, "forward_backward_s", "s", ours.seconds, whole.seconds),
        Row(case, "speedup", "×", whole.seconds / ours.seconds),
        Row(case, "peak_gib", "GiB", ours.peak_bytes / GIB, whole.peak_bytes / GIB),
    ]


class Measured(msgspec.Struct, frozen=True):
    """What training steps took."""

    step_s: float
    """Median."""
    tokens: int
    """That went through the model in a step, prompts included."""
    step_flops: float
    """Model FLOPs of the last step, as the column `mfu` counts them."""
    peak_bytes: int
    product_flops: float
    """FLOP/s of one large product: what the card gives at best, where it is measured."""
    card: str


def mfu_rows(sizes: Sizes) -> list[Row]:
    """Return the model FLOPs of a step over its time, as a share of the data sheet's peak and of one large product."""
    from flash.trainer.performance import peak_flops

    found = apart(measure_steps, sizes)
    flops = found.step_flops / found.step_s
    case = f"training step, {sizes.shape.layers} layers × {sizes.shape.width}, {found.tokens:,} tokens"
    peak = peak_flops(found.card)
    rows = [
        Row(case, "step_s", "s", found.step_s),
        Row(case, "trained_tokens_per_s", "tokens/s", found.tokens / found.step_s),
        Row(case, "peak_gib", "GiB", found.peak_bytes / GIB),
        Row(case, "of_one_large_product", "share", flops / found.product_flops),
    ]
    return rows if peak is None else [*rows, Row(case, "mfu", "share", flops / peak, None, MFU_GOAL)]


def measure_steps(sizes: Sizes) -> Measured:
    """Some steps after one that is not counted. Makes a process group, so it wants a process of its own."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3ForCausalLM

    from flash.trainer.step import Trainer

    dist.init_process_group("nccl" if sizes.gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(sizes.shape.config()).to(torch.bfloat16).save_pretrained(folder)
        dtype = "bfloat16" if sizes.gpu else "float32"
        config = step_config_for(folder, dtype, sizes.length[1], sizes.sequences, sizes.steps + 1, gpu=sizes.gpu)
        trainer = Trainer(config)
    seconds: list[float] = []
    tokens = 0
    for step in range(sizes.steps + 1):
        shard = random_shard(step, sizes.sequences // 8, sizes.length, sizes.shape.vocabulary)
        start = time.perf_counter()
        trainer.train_step(shard)
        if sizes.gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        tokens += sum(sample.trajectory.length for sample in shard.samples)
    peak = torch.cuda.max_memory_allocated() if sizes.gpu else 0
    card = torch.cuda.get_device_name() if sizes.gpu else "cpu"
    flops = trainer.flops
    del trainer
    rate = product_flops(gpu=sizes.gpu)
    dist.destroy_process_group()
    return Measured(statistics.median(seconds[1:]), tokens // (sizes.steps + 1), flops, peak, rate, card)


def step_config_for(
    folder: str, dtype: Literal["float32", "bfloat16"], longest: int, sequences: int, steps: int, *, gpu: bool
) -> Config:
    """Steps of one minibatch with GRPO: answers of at most `longest` tokens, so many sequences."""
    config = step_config("grpo", folder, steps)
    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(config.model, dtype=dtype, max_length=longest + 64),
        rollout=replace(config.rollout, max_new_tokens=longest),
        train=replace(config.train, batch_size=sequences, minibatches=1, max_tokens_per_microbatch=16_384),
        cluster=replace(config.cluster, gpus_per_node=1 if gpu else 0),
        engine=replace(config.engine, share_gpus=gpu),
    )


def product_flops(*, gpu: bool) -> float:
    """FLOP/s of one product of two large matrices."""
    import torch

    size, times = (PRODUCT, 20) if gpu else (512, 2)
    one, other = (
        torch.randn(size, size, device="cuda" if gpu else "cpu", dtype=torch.bfloat16 if gpu else torch.float32)
        for _ in range(2)
    )
    torch.mm(one, other)
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        torch.mm(one, other)
    if gpu:
        torch.cuda.synchronize()
    return times * 2.0 * size**3 / (time.perf_counter() - start)
