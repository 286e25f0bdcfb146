"""Time and memory of whole training steps on one card."""

from __future__ import annotations

import statistics
import tempfile
import time

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.steps import GIB, GROUP_SIZE, apart, random_shard, save_random, step_config

PRODUCT = 8192
"""Rows and columns of the matrices whose product is timed."""
MFU_GOAL = 0.35
"""Goal of the model FLOPs of a step, as a share of the peak in the card's data sheet."""


class Measured(msgspec.Struct, frozen=True):
    """Measurements of some training steps."""

    step_s: float
    """Median seconds of a step."""
    tokens: int
    """Tokens that went through the model in a step, prompts included."""
    step_flops: float
    """Model FLOPs of the last step, as the column `mfu` counts them."""
    peak_bytes: int
    """Most bytes of the card that were allocated; 0 without a card."""
    product_flops: float
    """FLOP/s of one large product: the most that the card gives."""
    card: str
    """Name of the card, or `cpu`."""


def mfu_rows(sizes: Sizes) -> list[Row]:
    """Return the rows of whole training steps: time, throughput, memory, and model FLOPs per second. The part `mfu`.

    The FLOPs per second are shares of the peak in the card's data sheet, and of one large product on this card.
    """
    from flash.trainer.performance import peak_flops

    with tempfile.TemporaryDirectory() as folder:
        apart(save_random, (sizes.shape, folder, "bfloat16", False))
        found = apart(measure_steps, (sizes, folder))
    flops = found.step_flops / found.step_s
    case = f"training step, {sizes.shape.layers} layers × {sizes.shape.width}, {found.tokens:,} tokens"
    peak = peak_flops(found.card)
    rows = [
        Row(case, "step_s", "s", found.step_s),
        Row(case, "trained_tokens_per_s", "tokens/s", found.tokens / found.step_s),
        Row(case, "peak_gib", "GiB", found.peak_bytes / GIB),
        Row(case, "of_one_large_product", "share", flops / found.product_flops),
    ]
    return rows if peak is None else [*rows, Row(case, "mfu", "share", flops / peak, at_least=MFU_GOAL)]


def measure_steps(what: tuple[Sizes, str]) -> Measured:
    """Measure steps of the model in a folder, after one that is not counted. `what` are the sizes and the folder.

    `apart` runs this in a process of its own, because it needs its own process group. One argument is all that `apart`
    can pass.
    """
    import torch

    from flash.foreign.torch import single_process_group
    from flash.trainer.step import Trainer

    sizes, folder = what
    dtype = "bfloat16" if sizes.gpu else "float32"
    config = step_config(folder, dtype, sizes.length[1], sizes.sequences, sizes.steps + 1, gpu=sizes.gpu)
    with single_process_group("nccl" if sizes.gpu else "gloo"):
        trainer = Trainer(config)
        seconds: list[float] = []
        tokens = 0
        for step in range(sizes.steps + 1):
            shard = random_shard(step, sizes.sequences // GROUP_SIZE, sizes.length, sizes.shape.vocabulary)
            start = time.perf_counter()
            trainer.train_step(shard)
            if sizes.gpu:
                torch.cuda.synchronize()  # the call returns before the card has computed
            seconds.append(time.perf_counter() - start)
            tokens += sum(sample.trajectory.length for sample in shard.samples)
        peak = torch.cuda.max_memory_allocated() if sizes.gpu else 0
        card = torch.cuda.get_device_name() if sizes.gpu else "cpu"
        flops = trainer.flops
        del trainer  # frees its memory for the large matrices
        rate = product_flops(gpu=sizes.gpu)
    return Measured(statistics.median(seconds[1:]), tokens // (sizes.steps + 1), flops, peak, rate, card)


def product_flops(*, gpu: bool) -> float:
    """Measure the FLOP/s of one product of two large matrices, on the card or, if `gpu` is False, on the CPU."""
    import torch

    size, times = (PRODUCT, 20) if gpu else (512, 2)
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(one, other)
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        torch.mm(one, other)
    if gpu:
        torch.cuda.synchronize()
    return times * 2.0 * size**3 / (time.perf_counter() - start)
