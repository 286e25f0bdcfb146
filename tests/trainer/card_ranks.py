"""A step whose weights are on the host, on tensors without data, of a card that torch does not know.

As of a GPU, nothing is computed of tensors of both; no stream or event of it waits for anything.
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
from flash.trainer.model.prefixes import in_one_row
from flash.trainer.optimizer import make_optimizer
from tests.trainer.trainer_cases import local, make_config

CARD: Any = "card"


class Waits:
    """A stream, or an event."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self) -> Waits:
        return Waits()

    def record(self) -> Waits:
        return self

    def synchronize(self) -> None: ...


class Card:
    """What torch.cuda is of a GPU."""

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
        return False  # or torch would put small tensors there in earnest

    def is_initialized(self) -> bool:
        return True

    def is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _: int) -> None: ...


def main(folder: Path, tables: dict[str, Any], ranks: int, rank: int) -> None:
    """`folder` is of the model, and takes what was seen. In a process of its own: torch keeps what a card is."""
    _setup_privateuseone_for_python_backend(CARD, Card())
    config = make_config(folder, **tables)
    torch.save(step(config, ranks, rank) | {"planned": rank_memory(config, ranks).total}, folder / "seen.pt")


def step(config: Config, ranks: int, rank: int) -> dict[str, Any]:
    """Two micro-batches and an update by one of so many ranks, of which there are no others."""
    lengths = [config.model.max_length] * 2
    packed = in_one_row(np.split(np.arange(sum(lengths)) % 40, np.cumsum(lengths)[:-1]))
    keep_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
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
                logp_T = token_logprobs(model, packed, keep_T, np.zeros_like(keep_T)).logp_T
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
    """Give its weights memory, as a file of them would."""
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(torch.empty_like(one, device=home), one.requires_grad)
