"""Time and memory of the trainer's arithmetic on one card: the output layer, and whole steps."""

from __future__ import annotations

import math
import resource
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.steps import GIB, GROUP_SIZE, apart, random_shard, save_random, step_config

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 1024
"""Numbers of a hidden state, as in Qwen3-0.6B."""
TEMPERATURE = 0.8
PRODUCT = 8192
"""Rows and columns of the matrices whose product is timed."""
MFU_GOAL = 0.35


class LayerCase(msgspec.Struct, frozen=True):
    """One way to compute log-probs and entropies of so many tokens, forwards and backwards."""

    way: Literal["chunks", "whole"]
    tokens: int
    vocabulary: int


class LayerCost(msgspec.Struct, frozen=True):
    """Time and memory of one way, and its result."""

    seconds: float
    peak_bytes: int
    """Most memory beyond the inputs, gradients included."""
    total: float
    """Sum of log-probs and entropies, by which the ways are compared."""


def layer_rows(sizes: Sizes) -> list[Row]:
    """Measure the chunked output layer, and whole logits beside it."""
    cases = [LayerCase(way, sizes.layer_tokens, sizes.layer_vocabulary) for way in ("chunks", "whole")]
    ours, whole = (apart(layer_cost, case) for case in cases)
    assert math.isclose(ours.total, whole.total, rel_tol=1e-3), (ours.total, whole.total)
    case = f"output layer, {sizes.layer_tokens:,} tokens × {sizes.layer_vocabulary:,}"
    return [
        Row(case, "forward_backward_s", "s", ours.seconds, whole.seconds),
        Row(case, "speedup", "×", whole.seconds / ours.seconds),
        Row(case, "peak_gib", "GiB", ours.peak_bytes / GIB, whole.peak_bytes / GIB),
    ]


def layer_cost(case: LayerCase) -> LayerCost:
    """Measure one case, in a process that has done nothing else."""
    import torch

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = time.perf_counter if device == "cuda" else time.process_time
    generator = torch.Generator(device).manual_seed(0)

    def factor(rows: int) -> Tensor:
        # In place: a temporary copy would raise the peak to which the measured one is compared.
        drawn = torch.randn(rows, WIDTH, generator=generator, device=device).mul_(WIDTH**-0.25)
        return drawn.to(torch.bfloat16 if device == "cuda" else torch.float32).requires_grad_()

    def peak() -> int:
        if device == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    hidden_TD, weight_VD = factor(case.tokens), factor(case.vocabulary)
    target_T = torch.randint(0, case.vocabulary, (case.tokens,), generator=generator, device=device)
    grad_T = torch.randn(case.tokens, generator=generator, device=device)
    way = {"chunks": in_chunks, "whole": over_whole_logits}[case.way]
    # Imports and thread pools are neither timed nor counted; the vocabulary is small so that the peak stays low.
    way(hidden_TD[:8], weight_VD[:8], target_T[:8] % 8)[0].sum().backward()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, start = peak(), clock()
    logp_T, entropy_T = way(hidden_TD, weight_VD, target_T)
    (logp_T @ grad_T).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - start
    return LayerCost(seconds, peak() - before, float(logp_T.detach().double().sum() + entropy_T.double().sum()))


def in_chunks(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies as training does."""
    import torch

    from flash.trainer.model.logprobs import selected_logprobs

    temperature_T = torch.full_like(target_T, TEMPERATURE, dtype=torch.float32)
    return selected_logprobs(hidden_TD, weight_VD, None, target_T, temperature_T=temperature_T, entropy_gradient=False)


def over_whole_logits(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies from whole logits, with the entropy outside of the gradient."""
    log_share_TV = ((hidden_TD @ weight_VD.T).float() / TEMPERATURE).log_softmax(-1)
    logp_T = log_share_TV.gather(-1, target_T[:, None])[:, 0]
    with_no_gradient = log_share_TV.detach()
    return logp_T, -(with_no_gradient.exp() * with_no_gradient).sum(-1)


class Measured(msgspec.Struct, frozen=True):
    """Measurements of some training steps."""

    step_s: float
    """Median."""
    tokens: int
    """Tokens that went through the model in a step, prompts included."""
    step_flops: float
    """Model FLOPs of the last step, as the column `mfu` counts them."""
    peak_bytes: int
    product_flops: float
    """FLOP/s of one large product: the most that the card gives."""
    card: str


def mfu_rows(sizes: Sizes) -> list[Row]:
    """Return the model FLOPs of a step over its time, as a share of the data sheet's peak and of one large product."""
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
    return rows if peak is None else [*rows, Row(case, "mfu", "share", flops / peak, None, MFU_GOAL)]


def measure_steps(what: tuple[Sizes, str]) -> Measured:
    """Measure steps of the model in a folder, after one that is not counted. It needs a process of its own."""
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
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            tokens += sum(sample.trajectory.length for sample in shard.samples)
        peak = torch.cuda.max_memory_allocated() if sizes.gpu else 0
        card = torch.cuda.get_device_name() if sizes.gpu else "cpu"
        flops = trainer.flops
        del trainer
        rate = product_flops(gpu=sizes.gpu)
    return Measured(statistics.median(seconds[1:]), tokens // (sizes.steps + 1), flops, peak, rate, card)


def product_flops(*, gpu: bool) -> float:
    """Measure the FLOP/s of one product of two large matrices."""
    import torch

    size, times = (PRODUCT, 20) if gpu else (512, 2)
    kind = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}
    one, other = (torch.randn(size, size, **kind) for _ in range(2))
    torch.mm(one, other)
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        torch.mm(one, other)
    if gpu:
        torch.cuda.synchronize()
    return times * 2.0 * size**3 / (time.perf_counter() - start)
