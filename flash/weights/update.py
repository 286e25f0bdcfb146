"""What `Published.update_info` holds, for every backend: how to join once, and what to fetch this time.

The dictionaries go unchanged to vLLM's `init_weight_transfer_engine` and `update_weights`.
"""

from __future__ import annotations

from typing import Any

import msgspec

TCP_BACKEND = "flash_tcp"
"""Name under which `flash.weights.plugin` registers the tcp receiver in vLLM's processes."""


NOT_HELD = "is not held any more"
"""What a trainer says of a version that it has forgotten."""
DAMAGED = "is damaged"
"""What a worker says of a version whose bytes are not those that were published."""
TRAINER_RANKS = 1
"""Trainer processes in the group that nccl forms with the engine workers: only rank 0 broadcasts."""


class UpdateInfo(msgspec.Struct, frozen=True):
    """The decoded form of `Published.update_info`."""

    update: dict[str, Any]
    """Arguments of this version's `update_weights`."""
    fingerprint: list[int]
    """Of the tensors as published (`flash.weights.fingerprint`)."""
    init: dict[str, Any] | None = None
    """Arguments of the rendezvous with this publisher; None where there is none."""


def encode_update(info: UpdateInfo) -> bytes:
    """Msgpack, as it travels in `Published.update_info`."""
    return msgspec.msgpack.encode(info)


def decode_update(data: bytes) -> UpdateInfo:
    """The reverse of `encode_update`; raises `msgspec.ValidationError` on anything else."""
    return msgspec.msgpack.decode(data, type=UpdateInfo)


def place_engine(init: dict[str, Any], engine: int, tensor_parallel: int) -> dict[str, Any]:
    """A rendezvous as one engine joins it: behind the trainer and the workers of the engines before it."""
    if "rank_offset" not in init:
        return init
    return init | {"rank_offset": TRAINER_RANKS + engine * tensor_parallel}
