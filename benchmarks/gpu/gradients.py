"""Gradients of one step beside those of a processor in float32: of a card, and of two cards that divide a model."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.sizes import MIDDLE, Shape, Sizes, mixture_model, needs_cards
from benchmarks.gpu.steps import GROUP_SIZE, apart, random_shard, save_random, step_config
from flash.config.tree import ParallelConfig

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = (40, 200)
"""Shortest and longest answer, in tokens."""
GROUPS = 4
RANKS = 2
LAYOUTS = {
    "tensor": ParallelConfig(tensor=RANKS),
    "context": ParallelConfig(context=RANKS),
    "expert": ParallelConfig(expert=RANKS),
}
GOALS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest distance of a gradient from the reference, relative to the norm of the reference."""


class Case(msgspec.Struct, frozen=True):
    """One step of one rank."""

    folder: str
    """Folder of the model."""
    dtype: Literal["float32", "bfloat16"]
    gpu: bool
    vocabulary: int
    into: str
    """File to which rank 0 writes the gradient."""
    parallel: ParallelConfig = ParallelConfig()
    ranks: int = 1
    rank: int = 0
    """Number of this rank, and of its card."""


def exact_rows(sizes: Sizes) -> list[Row]:
    """Compare each precision on the card with float32 on the processor, and with the same step again."""
    import torch

    shape = MIDDLE if sizes.gpu else sizes.shape
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        apart(save_random, (shape, folder, "float32", False))

        def gradient(name: str, dtype: Literal["float32", "bfloat16"], *, gpu: bool) -> dict[str, Tensor]:
            file = f"{folder}/{name}.pt"
            apart(take_gradient, Case(folder, dtype, gpu, shape.vocabulary, file))
            return torch.load(file)

        exact = gradient("reference", "float32", gpu=False)
        for dtype in ("float32", "bfloat16"):
            ours = gradient(dtype, dtype, gpu=sizes.gpu)
            again = gradient(f"{dtype}-again", dtype, gpu=sizes.gpu)
            case = f"gradient in {dtype}, {shape.layers} layers × {shape.width}"
            same = all(torch.equal(again[name], value) for name, value in ours.items())
            rows += [
                Row(case, "error_of_float32", "share", distance(ours, exact), None, GOALS[dtype]),
                Row(case, "worst_tensor", "share", max(distance({n: v}, {n: exact[n]}) for n, v in ours.items())),
                Row(case, "same_again", "yes/no", float(same), None, 1.0),
            ]
    return rows


def divided_rows(sizes: Sizes) -> list[Row]:
    """Compare layers, rows and experts that two ranks divide with one processor, in float32.

    Raises:
        Skipped: there are fewer than two cards.
    """
    import torch

    needs_cards(sizes, RANKS)
    rows: list[Row] = []
    shape = MIDDLE if sizes.gpu else sizes.shape
    for kind, parallel in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            if kind == "expert":
                apart(save_mixture, (shape, folder))
            else:
                apart(save_random, (shape, folder, "float32", False))
            alone = Case(folder, "float32", False, shape.vocabulary, f"{folder}/alone.pt")
            apart(take_gradient, alone)
            shared = msgspec.structs.replace(
                alone, gpu=sizes.gpu, into=f"{folder}/shared.pt", parallel=parallel, ranks=RANKS
            )
            with ProcessPoolExecutor(RANKS, mp_context=multiprocessing.get_context("spawn")) as pool:
                list(pool.map(take_gradient, [msgspec.structs.replace(shared, rank=rank) for rank in range(RANKS)]))
            error = distance(torch.load(shared.into), torch.load(alone.into))
        rows.append(Row(f"{kind} over {RANKS} ranks", "error_of_float32", "share", error, None, GOALS["float32"]))
    return rows


def save_mixture(what: tuple[Shape, str]) -> None:
    """Save a mixture with random weights that has the vocabulary of a shape."""
    mixture_model(Path(what[1]), what[0].vocabulary)


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return ‖ours − exact‖ / ‖exact‖."""
    difference = sum(float((value.double() - exact[name].double()).square().sum()) for name, value in ours.items())
    norm = sum(float(value.double().square().sum()) for value in exact.values())
    return (difference / norm) ** 0.5


def take_gradient(case: Case) -> None:
    """Compute the gradient of one step on this rank's part of a batch, not clipped. Rank 0 writes it to a file."""
    import torch
    import torch.distributed as dist

    from flash.trainer.step import Trainer

    if case.gpu:
        torch.cuda.set_device(case.rank)
    meeting = f"file://{case.into}.store"
    dist.init_process_group("nccl" if case.gpu else "gloo", init_method=meeting, rank=case.rank, world_size=case.ranks)
    try:
        config = step_config(case.folder, case.dtype, LENGTH[1], GROUPS * GROUP_SIZE, 1, gpu=case.gpu)
        replace = msgspec.structs.replace
        train = replace(config.train, max_grad_norm=1e9)
        trainer = Trainer(replace(config, train=train, parallel=case.parallel))
        found: dict[str, Tensor] = {}

        def keep(*_: Any) -> None:
            for name, weight in trainer.model.named_parameters():
                assert weight.grad is not None
                found[name] = weight.grad.full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]

        trainer.optimizer.register_step_pre_hook(keep)
        shard, mesh = random_shard(0, GROUPS, LENGTH, case.vocabulary), trainer.mesh
        trainer.train_step(replace(shard, samples=shard.samples[mesh.data_shard :: mesh.data_shards]))
        if case.rank == 0:
            torch.save(found, case.into)
    finally:
        dist.destroy_process_group()
