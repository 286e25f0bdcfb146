"""Training step with weights on the host, on tensors without data, with a device type that torch does not know.

As with a GPU, no operation takes tensors of both devices. Streams and events of the device wait for nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from flash.config.tree import Config
from flash.foreign.torch import absent_ranks, counted
from flash.trainer.memory import rank_memory
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.adapters import empty_policy, engine_tensors
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import recompute_mode, shard_model
from flash.trainer.optimizer import make_optimizer
from flash.trainer.packing import in_one_row
from tests.trainer.trainer_cases import local, make_config

CARD: Any = "card"
"""Name of the device type that stands for a GPU."""


class Waits:
    """Stream or event that never waits. The methods are those of `torch.cuda.Stream` and `torch.cuda.Event`."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self) -> Waits:
        return Waits()

    def record(self) -> Waits:
        return self

    def synchronize(self) -> None: ...


class Card:
    """Stand-in for the module `torch.cuda`, with the functions that torch and FSDP call on a machine with one GPU."""

    Stream = Event = Waits

    def current_stream(self) -> Waits:
        return Waits()

    def stream(self, _: Waits) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return False  # otherwise torch would put small tensors there

    def is_initialized(self) -> bool:
        return True

    def is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _: int) -> None: ...


def main(folder: Path, tables: dict[str, Any], ranks: int, planned: bool, rank: int) -> None:
    """Run one rank of the model in `folder`, and save the results there. It needs its own process.

    With `planned`, the results have the memory that is planned for the rank, too.
    """
    # torch keeps a registered device type for the life of the process.
    _setup_privateuseone_for_python_backend(CARD, Card())
    config = make_config(folder, **tables)
    seen = step(config, ranks, rank)
    if planned:
        seen["planned"] = rank_memory(config, ranks).total
    torch.save(seen, folder / "seen.pt")


def step(config: Config, ranks: int, rank: int) -> dict[str, Any]:
    """Run two micro-batches and an update on one rank of `ranks`, of which the others do not exist.

    Returns:
        Numbers by name. Bytes on the device: `waiting` before the first pass, and `most` at any time until the update;
        `weights`: bytes of this rank's weights. Types of devices: `computed on`, `published on`, and `kept on` (of
        weights, gradients and moments). Counts of parameters: `trained`, and `with gradients`.
    """
    lengths = [config.model.max_length] * 2
    packed = in_one_row(np.split(np.arange(sum(lengths)) % 40, np.cumsum(lengths)[:-1]))
    before_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
    with absent_ranks(ranks, rank):
        mesh = trainer_mesh(CARD, config.parallel, offloads="weights" in config.train.offload)
        empty = empty_policy(config)
        with counted(CARD) as count:
            for module in empty.modules():
                for name, one in module.named_buffers(recurse=False):
                    module._buffers[name] = torch.empty(one.shape, dtype=one.dtype, device=CARD)
            model = shard_model(empty, mesh, config.model, recompute=recompute_mode(config.train))
            fill(model, mesh.weight_device)
            optimizer, waiting = make_optimizer(model, config.train), count.now
            for _ in range(2):
                logp_T = token_logprobs(model, packed, before_T, np.zeros_like(before_T)).logp_T
                logp_T.sum().backward()
            trained = [one for one in model.parameters() if one.requires_grad]
            grads = [one.grad for one in trained if one.grad is not None]
            most = count.most
            optimizer.step()
            moments = [one for state in optimizer.state.values() for one in state.values()]
            published = [one for _, one in engine_tensors(model, config.lora)]
    return {
        "waiting": waiting,
        "weights": sum(local(one).numel() * one.element_size() for one in model.parameters()),
        "most": most,
        "computed on": {logp_T.device.type},
        "published on": {one.device.type for one in published},
        "kept on": {local(one).device.type for one in (*trained, *grads)} | {one.device.type for one in moments},
        "trained": len(trained),
        "with gradients": len(grads),
    }


def fill(model: nn.Module, home: str) -> None:
    """Allocate the model's weights on the device type `home`, as loading them from a file would."""
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(torch.empty_like(one, device=home), one.requires_grad)
