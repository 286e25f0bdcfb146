"""What a card makes of one training step, beside a processor in float32: the gradient, twice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.compute import step_config_for
from benchmarks.gpu.sizes import MIDDLE, Shape, Sizes
from benchmarks.real.objective_cost import apart, random_shard
from flash.config.tree import ParallelConfig

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = (40, 200)
"""Of the answers, in tokens."""
GROUPS = 4
GOALS = {"float32": 1e-3, "bfloat16": 0.1}
"""How far a gradient may be from the reference, relative to its norm."""


class Case(msgspec.Struct, frozen=True):
    """One step to take."""

    folder: str
    """Of the model."""
    dtype: Literal["float32", "bfloat16"]
    gpu: bool
    vocabulary: int
    into: str
    """The file that the gradient goes to."""
    parallel: ParallelConfig = ParallelConfig()
    ranks: int = 1
    rank: int = 0
    """Of these, with a card of its own where there are cards."""


def exact_rows(sizes: Sizes) -> list[Row]:
    """Each precision on the card against float32 on the processor; the same step again."""
    import torch

    shape = MIDDLE if sizes.gpu else sizes.shape
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        apart(save_random, (shape, folder))

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


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """‖ours − exact‖ / ‖exact‖."""
    apart_ = sum(float((value.double() - exact[name].double()).square().sum()) for name, value in ours.items())
    whole = sum(float(value.double().square().sum()) for value in exact.values())
    return (apart_ / whole) ** 0.5


def save_random(asked: tuple[Shape, str]) -> None:
    """A model with random weights."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(asked[0].config()).save_pretrained(asked[1])


def take_gradient(case: Case) -> None:
    """The gradient of one step, not clipped, of this rank's part of a batch. The first one writes it."""
    import torch

    with one_rank(case):
        from flash.trainer.step import Trainer

        config = step_config_for(case.folder, case.dtype, LENGTH[1], GROUPS * 8, 1, gpu=case.gpu)
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


@contextmanager
def one_rank(case: Case) -> Iterator[None]:
    """A process group as a trainer rank has it."""
    import torch
    import torch.distributed as dist

    if case.gpu:
        torch.cuda.set_device(case.rank)
    dist.init_process_group(
        "nccl" if case.gpu else "gloo",
        init_method=f"file://{case.into}.store",
        rank=case.rank,
        world_size=case.ranks,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
