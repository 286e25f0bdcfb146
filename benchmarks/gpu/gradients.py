"""The gradient of one training step on a card, beside that of a processor in float32, and beside itself."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from benchmarks.form import Row
from benchmarks.gpu.sizes import MIDDLE, Sizes
from benchmarks.gpu.steps import GROUP_SIZE, apart, random_shard, save_random, step_config

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = (40, 200)
"""Shortest and longest answer, in tokens."""
GROUPS = 4
"""Number of groups of the training step."""
GOALS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest distance of a gradient from the reference, relative to the norm of the reference."""


class Case(msgspec.Struct, frozen=True):
    """A training step whose gradient is taken."""

    folder: str
    """Folder of the model."""
    dtype: Literal["float32", "bfloat16"]
    gpu: bool
    """True to compute on the card, False on the CPU."""
    vocabulary: int
    """Number of token ids of the model."""
    into: str
    """File to which the gradient is written."""


def exact_rows(sizes: Sizes) -> list[Row]:
    """Return the rows of the part `exact`: each precision on the card beside float32 on the processor, and beside the
    same step again.
    """
    import torch

    shape = MIDDLE if sizes.gpu else sizes.shape
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        apart(save_random, (shape, folder, "float32", False))

        def gradient(name: str, dtype: Literal["float32", "bfloat16"], *, gpu: bool) -> dict[str, Tensor]:
            """Compute a gradient in a process of its own, and return it by parameter."""
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
                Row(case, "error_of_float32", "share", distance(ours, exact), at_most=GOALS[dtype]),
                Row(case, "worst_tensor", "share", max(distance({n: v}, {n: exact[n]}) for n, v in ours.items())),
                Row(case, "same_again", "yes/no", float(same), at_least=1.0),
            ]
    return rows


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return ‖ours − exact‖ / ‖exact‖ of two gradients, given by the names of the parameters in `ours`."""
    difference = sum(float((value.double() - exact[name].double()).square().sum()) for name, value in ours.items())
    norm = sum(float(value.double().square().sum()) for value in exact.values())
    return (difference / norm) ** 0.5


def take_gradient(case: Case) -> None:
    """Compute the gradient of one training step, without clipping, and write it to the file `case.into`.

    `apart` runs this in a process of its own, because the process group and the memory of a card belong to one process.
    """
    import torch

    from flash.foreign.torch import single_process_group
    from flash.trainer.step import Trainer

    config = step_config(case.folder, case.dtype, LENGTH[1], GROUPS * GROUP_SIZE, 1, gpu=case.gpu)
    replace = msgspec.structs.replace
    with single_process_group("nccl" if case.gpu else "gloo"):
        trainer = Trainer(replace(config, train=replace(config.train, max_grad_norm=1e9)))  # no gradient is so large
        found: dict[str, Tensor] = {}

        def keep(*_: Any) -> None:
            """Copy the gradient before the optimizer changes it."""
            for name, weight in trainer.model.named_parameters():
                assert weight.grad is not None
                found[name] = weight.grad.full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]

        trainer.optimizer.register_step_pre_hook(keep)
        trainer.train_step(random_shard(0, GROUPS, LENGTH, case.vocabulary))
        torch.save(found, case.into)
