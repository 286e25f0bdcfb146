"""Several ranks, of a card each: the gradient of models that they divide, and groups for weights that form anew."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.exact import GOALS, Case, distance, save_random, take_gradient
from benchmarks.gpu.sizes import MIDDLE, Part, Shape, Sizes, Skipped, mixture_model
from benchmarks.real.objective_cost import apart
from benchmarks.real.weight_groups import Workers, publish, trainer
from flash.config.machine import count_gpus
from flash.config.tree import ParallelConfig

RANKS = 2
LAYOUTS = {
    "tensor": ParallelConfig(tensor=RANKS),
    "context": ParallelConfig(context=RANKS),
    "expert": ParallelConfig(expert=RANKS),
}
TENSORS = 4
"""Of a version that is broadcast, 4 MiB each."""


def divided_rows(sizes: Sizes) -> list[Row]:
    """Layers, rows and experts over two ranks, against one on the processor, in float32.

    Raises:
        Skipped: there are fewer cards.
    """
    import torch

    _check(sizes)
    rows: list[Row] = []
    for kind, parallel in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            shape = MIDDLE if sizes.gpu else sizes.shape
            apart(save_mixture if kind == "expert" else save_random, (shape, folder))
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


def save_mixture(asked: tuple[Shape, str]) -> None:
    """A mixture with random weights, of the same vocabulary."""
    mixture_model(Path(asked[1]), asked[0].vocabulary)


def groups_rows(sizes: Sizes) -> list[Row]:
    """A worker takes two versions, another one a third, and is killed within a fourth; who comes then takes the fifth.

    Raises:
        Skipped: there are fewer than two cards.
    """
    _check(sizes)
    backend = "nccl" if sizes.gpu else "gloo"
    workers, taken, wanted = Workers(backend), 0, 0
    with trainer(backend) as publisher:
        for version in range(1, 6):
            if version == 3:
                workers.leave(0)
            if not workers.there:
                workers.join()
            killed = version == 4
            got = workers.take(publish(publisher, version, TENSORS), 0 if killed else None, 1)
            wanted, taken = wanted + (not killed), taken + got.count(TENSORS)
        workers.leave(0)
    return [Row(f"groups of {backend}", "versions_taken", "versions", taken, None, wanted)]


def _check(sizes: Sizes) -> None:
    if sizes.gpu and (cards := count_gpus()) < RANKS:
        raise Skipped(f"it needs {RANKS} cards, as nccl refuses two ranks on one; here there are {cards}")


PARTS: dict[str, Part] = {"divided": divided_rows, "groups": groups_rows}
